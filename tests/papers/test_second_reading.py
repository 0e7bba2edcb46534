"""The second reading: every number of a CSV stands in the paper's own text, in the same order."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from moebook import papers
from moebook.papers.printed import folder

SHARED = os.environ.get("MOEBOOK_SHARED")
WITH_EXAMPLES = {("rocket", "8")}
"""Tables whose rows end in whole examples of the data, which are full of numbers."""
TABLES = [(paper, name) for paper in papers.PAPERS for name in papers.tables(paper)]


def tokens(text: str) -> list[str]:
    """All numbers of a text in order, without units, typesetting or thousands separators."""
    text = re.sub(r"</?\w[^>\n]*>|[\\$_{}]", " ", text)
    return [found.replace(",", "") for found in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def window(wanted: list[str], text: list[str]) -> list[str] | None:
    """The shortest stretch that holds all wanted numbers in order, greedily from each start."""
    best: list[str] | None = None
    for start in (i for i, token in enumerate(text) if token == wanted[0]):
        place = start
        for number in wanted[1:]:
            try:
                place = text.index(number, place + 1)
            except ValueError:
                return best
        if best is None or place + 1 - start < len(best):
            best = text[start : place + 1]
    return best


def gaps(wanted: list[str], found: list[str]) -> list[int]:
    """How many other numbers stand before each wanted one: names of models, shots, years."""
    counts, place = [], -1
    for number in wanted:
        following = found.index(number, place + 1)
        counts.append(following - place - 1)
        place = following
    return counts


@pytest.mark.skipif(not SHARED, reason="MOEBOOK_SHARED does not name the folder with the texts")
@pytest.mark.parametrize(("paper", "name"), TABLES)
def test_every_number_of_a_table_stands_in_the_papers_text_in_order(paper: str, name: str) -> None:
    frame = papers.table(paper, name)
    printed = frame.loc[frame["mark"] != "restored", "printed"]
    wanted = [token for value in printed for token in tokens(value)]
    found = window(wanted, tokens(Path(str(SHARED), "papers", f"{paper}.txt").read_text("utf-8")))
    assert found is not None, "a number of the table is not in the text, or not in this order"
    loose = name.startswith("figure_") or (paper, name) in WITH_EXAMPLES
    assert max(gaps(wanted, found)) <= (64 if loose else 10), "not in the table's own place"


@pytest.mark.skipif(not SHARED, reason="MOEBOOK_SHARED does not name the folder with the texts")
@pytest.mark.parametrize("name", ["1", "2", "4", "5"])
def test_the_authors_slides_print_the_same_tables_of_pesc(name: str) -> None:
    frame = papers.table("pesc", name)
    for axis in ("column", "row"):
        order = {key: place for place, key in enumerate(frame[axis].unique())}
        places = frame[axis].map(order)
        frame = frame.loc[places.sort_values(kind="stable").index]
    wanted = [token for value in frame["printed"] for token in tokens(value)]
    found = window(
        wanted, tokens(Path(str(SHARED), "papers", "pesc_slides.txt").read_text("utf-8"))
    )
    assert found is not None
    assert max(gaps(wanted, found)) <= 10


@pytest.mark.skipif(not SHARED, reason="MOEBOOK_SHARED does not name the folder with the texts")
@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_number_that_the_text_is_said_to_state_stands_in_it(paper: str) -> None:
    path = folder(paper) / "stated.yaml"
    text = Path(str(SHARED), "papers", f"{paper}.txt").read_text("utf-8")
    known = set(tokens(text))
    stated = [entry["printed"] for entry in yaml.safe_load(path.read_text("utf-8"))]
    assert [printed for printed in stated if tokens(printed)[0] not in known] == []


def test_the_window_is_the_shortest_stretch_that_holds_the_numbers_in_order() -> None:
    assert window(["1", "2"], ["1", "9", "1", "5", "2", "2"]) == ["1", "5", "2"]
    assert window(["2", "1"], ["1", "2"]) is None


def test_gaps_count_the_numbers_between_the_wanted_ones() -> None:
    assert gaps(["1", "2", "2"], ["1", "9", "8", "2", "2"]) == [0, 2, 0]
