"""The badge under a notebook's title: what its run really cost, from the manifest beside it.

It is a Sphinx extension (``extra_extensions`` in _config.yml), which adds the badge while a page is
read: the executed copies stay as they ran, hash for hash.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebook import results
from moebook.notebook.overview import duration, size

SMOKE = (
    ":::{warning}\nThis page was executed at tier `smoke`, which tests that everything runs:"
    " its numbers mean nothing.\n:::\n"
)


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("source-read", _insert)
    return {"parallel_read_safe": True}


def _insert(app: Any, docname: str, source: list[str]) -> None:
    """Put the badge after the first cell of an executed notebook."""
    if not docname.startswith("notebooks/"):
        return
    path = Path(app.srcdir) / f"{docname}.manifest.json"
    app.env.note_dependency(str(path))
    manifest = json.loads(path.read_text(encoding="utf-8"))
    notebook = json.loads(source[0])
    text = badge(manifest) + recorded(manifest, path.name.split(".")[0], Path(app.srcdir).parent)
    notebook["cells"].insert(1, {"cell_type": "markdown", "metadata": {}, "source": text})
    source[0] = json.dumps(notebook)


def recorded(manifest: Mapping[str, Any], page: str, folder: Path) -> str:
    """Link a live page and the pages of its committed runs, with their age.

    Args:
        manifest: Of the page's run.
        page: The page's name, such as ``01_pesc`` or ``01_pesc-study``.
        folder: The project.
    """
    records = results.records(manifest["notebook"], folder)
    live, _, tier = page.partition("-")
    if tier:
        return f"\nThis run is {evidence(records[tier], folder)}. [The live page]({live}.ipynb)\n"
    pages = folder / "book" / "notebooks"
    links = [
        f"[the recorded {tier}]({page}-{tier}.ipynb) ({evidence(records[tier], folder)})"
        for tier in results.COMMITTED
        if tier in records and (pages / f"{page}-{tier}.ipynb").is_file()
    ]
    return f"\nThe same notebook at full size: {', '.join(links)}.\n" if links else ""


def badge(manifest: Mapping[str, Any]) -> str:
    """Return the badge of a run as Markdown with a little HTML.

    Args:
        manifest: As `moebook.notebook.manifest` writes it.
    """
    machine = manifest["environment"]
    facts = {
        "tier": manifest["tier"],
        "ran in": duration(manifest["seconds"]),
        "peak memory": (peak := manifest["peak_memory"]) and size(peak),
        "cores": f"{machine['cores']} × {machine['cpu']}",
        "accelerator": machine["accelerator"],
        "date": manifest["date"][:10],
        "commit": commit(manifest),
        "set by the reader": ", ".join(f"{k} = {v}" for k, v in manifest["overrides"].items()),
    }
    items = "".join(f"<li>{k} <b>{html.escape(str(v))}</b></li>" for k, v in facts.items() if v)
    note = SMOKE if manifest["tier"] == "smoke" else ""
    return f'{note}\n<ul class="moe-cost" aria-label="What this run cost">{items}</ul>\n'


def commit(manifest: Mapping[str, Any]) -> str:
    """Write a run's commit: seven digits, and whether files differed from it."""
    found = manifest["commit"]
    if found is None:
        return "unknown"
    return f"{found['id'][:7]}{' with changes' if found['dirty'] else ''}"


def evidence(record: results.Record, folder: Path) -> str:
    """Say of which day a record is and what has changed since it ran."""
    changed = results.changed(record, folder)
    since = f"changed since: {', '.join(changed)}" if changed else "code unchanged"
    return f"of {results.day(record)}; {since}"
