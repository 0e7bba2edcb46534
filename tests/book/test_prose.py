"""What stands in the pages' sources, read before they are rendered."""

import inspect
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

BOOK = Path(__file__).resolve().parents[2] / "book"
PAGES = sorted([*BOOK.glob("*_exercises.md"), *BOOK.glob("*_theory.md")])
PAGES += [BOOK / "primer.md"]
BLOCK = re.compile(r"(?ms)^ *```(?:\{code-block\} \w+|python|console)\n(.*?)^ *```")
FOLDED = re.compile(r"(?ms)^:::\{dropdown\}.*?^:::$")
LISTING = re.compile(
    r"```\{literalinclude\} \.\./(\S+)\.py\n(?:.*\n)*?:pyobject: (\S+)"
)
WIDEST = 76  # characters of a line that no screen and no sheet of paper cuts
FORMATTED = 88  # the same of a listing of the package, which the formatter breaks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_line_of_code_in_a_page_is_cut(page):
    text = page.read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    assert [line for line in lines if len(line) > WIDEST] == []
    for path, name in LISTING.findall(FOLDED.sub("", text)):
        shown = attrgetter(name)(import_module(path.replace("/", ".")))
        lines = inspect.getsource(shown).splitlines()
        assert [line for line in lines if len(line) > FORMATTED] == [], name


def test_the_pages_hold_code_and_listings_that_are_not_folded():
    every = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(BLOCK.findall(every)) > 40
    assert len(LISTING.findall(FOLDED.sub("", every))) > 5
