"""A headless Chromium for the tests of pages, and a small book."""

import json

import pytest
from chromium import Chromium, installed


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A headless Chromium; the test is skipped where there is none."""
    executable = installed()
    if executable is None:
        pytest.skip("no Chromium on this machine; install the package chromium")
    chromium = Chromium(executable, tmp_path_factory.mktemp("chromium"))
    yield chromium
    chromium.close()


@pytest.fixture
def browser(chromium):
    """A page of its own in the browser of all tests."""
    chromium.fresh()
    return chromium


PAGES = 12


@pytest.fixture
def project(tmp_path):
    """A project whose book has several pages; all of them name its edition."""
    (tmp_path / "book").mkdir()
    (tmp_path / "_config.yml").write_text(
        '{"title": "A", "execute": {"execute_notebooks": "off"}}'
    )
    chapters = [{"file": f"page_{number}"} for number in range(PAGES)]
    parts = [{"caption": "All", "chapters": chapters}]
    toc = {"format": "jb-book", "root": "intro", "parts": parts}
    (tmp_path / "book" / "_toc.yml").write_text(json.dumps(toc))
    write_edition(tmp_path, 0)
    return tmp_path


def write_edition(project, number):
    """Let every page name another edition."""
    for page in ("intro", *(f"page_{number}" for number in range(PAGES))):
        text = f"# The page {page}\n\nThis is edition {number}.\n"
        (project / "book" / f"{page}.md").write_text(text)
