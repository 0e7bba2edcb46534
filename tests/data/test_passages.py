"""Free text by domain: as it ships, drawn by the seed, and never twice the same template."""

import json
from importlib import resources

import pytest

from moebook.data.passages import opening, passages
from moebook.errors import Refusal


def test_texts_are_those_that_ship_with_nothing_around_them():
    found = passages(30, seed=1)
    assert list(found) == ["text", "code", "mathematics"]
    whole = resources.files("moebook.data").joinpath("licence.jsonl").read_text("utf-8")
    clauses = {json.loads(line)["clause"] for line in whole.splitlines()}
    assert set(found["text"]) <= clauses
    assert all(text.startswith(("def ", "async def ")) for text in found["code"])
    assert all("?" in text for text in found["mathematics"])


def test_a_draw_is_decided_by_the_seed_and_repeats_no_template():
    one, other = passages(200, seed=1), passages(200, seed=2)
    assert one == passages(200, seed=1)
    for domain, texts in one.items():
        assert len({opening(text) for text in texts}) == 200
        assert set(texts) != set(other[domain])


def test_texts_that_differ_in_names_and_numbers_open_alike():
    assert opening("Amelia has 30 pens.") == opening("Bo has 4 pens.") != opening("Bo lost 4.")


@pytest.mark.parametrize("size", [0, 100_000])
def test_more_texts_than_there_are_is_refused(size):
    with pytest.raises(Refusal, match=f"E-RANGE: passages: {size} texts of text, expected 1 to"):
        passages(size)
