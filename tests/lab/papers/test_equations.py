"""Each numbered equation of the papers leads to its function and test in the book.

The table of a paper's map links to blocks of code there or on the theory page, each
included from a file by the name of a function or class. Whoever moves one of these
mends the block (and the name shown in the row).
"""

import ast
import importlib
import json
import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EQUATIONS = {"pesc": 10, "router_init": 4, "rocket": 17, "esft": 8}
PAGES = {**EQUATIONS, "rivals": 0}  # a page on eight papers has no numbers of its own
BLOCK = re.compile(r"```\{literalinclude\} \.\./(\S+)\n((?::.*\n)*)")
NUMBER = re.compile(
    r"\\tag\{(\d+)\}|\((\d+)\)\s*\$|^\s*(?:\\n)?\((\d+)\)\s*$", re.MULTILINE
)


def rows(paper):
    """The table's cells: equations of the paper, here, function, test, oracle."""
    page = (ROOT / "book" / f"{paper}_map.md").read_text("utf-8")
    table = page.partition("| paper | here | function | test | compares with |\n")[2]
    lines = table.partition("\n\n")[0].splitlines()[1:]
    cells = [line.strip("|").split(" | ") for line in lines]
    return [list(map(str.strip, of_line)) for of_line in cells]


def blocks(paper):
    """Path and options (pyobject, name ...) of every block of code of both pages."""
    pages = [ROOT / "book" / f"{paper}_{part}.md" for part in ("theory", "map")]
    listed = []
    for page in pages:
        for path, options in BLOCK.findall(page.read_text("utf-8")):
            listed.append({"path": path} | dict(re.findall(r":(\w+): (.*)\n", options)))
    return listed


def test_a_theory_page_is_at_most_1500_words_and_three_listings():
    pages = sorted((ROOT / "book").glob("*_theory.md"))
    assert len(pages) == 7
    for page in pages:
        text = page.read_text("utf-8")
        listings = text.count("```{literalinclude}")
        assert len(text.split()) <= 1500 and listings <= 3, page.name


def test_a_page_says_whose_equation_a_number_is():
    """The book numbers its own equations, so "Eq. 2" alone may be either's."""
    names = ["primer", "kernels_theory", "pesc_exercises", "esft_exercises"]
    names += [f"{paper}_theory" for paper in ("pesc", "router_init", "esft")]
    texts = {name: (ROOT / "book" / f"{name}.md").read_text("utf-8") for name in names}
    cells = json.loads((ROOT / "notebooks" / "01_pesc.ipynb").read_text("utf-8"))
    told = [one["source"] for one in cells["cells"] if one["cell_type"] == "markdown"]
    texts["01_pesc"] = "".join(chain.from_iterable(told))
    for name, text in texts.items():
        one_line = " ".join(text.split())
        assert re.findall(r"(?<!paper's )(?<!\bits )Eq\. \d+", one_line) == [], name


@pytest.mark.parametrize("paper", PAGES)
def test_every_numbered_equation_has_a_row_with_a_function_and_a_test_that_are_there(
    paper,
):
    numbered = set()
    names = {block["name"]: block["path"] for block in blocks(paper) if "name" in block}
    for equation, _, function, test, oracle in rows(paper):
        if equation.startswith("Eq. "):
            numbered |= set(map(int, equation.removeprefix("Eq. ").split(", ")))
        for cell, folder in ((function, "moebook/"), (test, "tests/")):
            links = re.findall(r"\]\(#([\w-]+)\)", cell)
            assert links, f"{equation}: no link in '{cell}'"
            assert all(names[link].startswith(folder) for link in links), equation
        assert oracle
    assert numbered == set(range(1, PAGES[paper] + 1))
    for block in blocks(paper):
        path = block["path"]
        name = block["pyobject"]
        nodes = ast.parse((ROOT / path).read_text("utf-8")).body
        assert name in {getattr(node, "name", None) for node in nodes}, (
            f"{path} has no {name}"
        )
        if path.startswith("moebook/"):
            module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
            assert callable(getattr(module, name))


@pytest.mark.parametrize("paper", EQUATIONS)
def test_the_papers_text_numbers_as_many_equations(paper, shared):
    text = (shared / "papers" / f"{paper}.txt").read_text("utf-8")
    numbers = filter(None, chain.from_iterable(NUMBER.findall(text)))
    assert max(map(int, numbers)) == EQUATIONS[paper]
