"""The templates of the book's pages, and how one is filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from moebook.errors import printable
from moebook.lab.run import sources

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda x: printable(x) if type(x) is str else x,  # one line of Markdown
)
ENVIRONMENT.globals["commit"] = sources.commit  # several pages name one


def page(name: str, **parts: Any) -> str:
    """Fill a template."""
    return ENVIRONMENT.get_template(f"{name}.md").render(parts).strip("\n") + "\n"
