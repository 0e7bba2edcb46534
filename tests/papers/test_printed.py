"""The papers' tables: typed, complete, and refused with file and line when they are malformed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from moebook import papers
from moebook.errors import Refusal
from moebook.papers.printed import _read

TABLES = [(paper, name) for paper in papers.PAPERS for name in papers.tables(paper)]
ISSUE = {
    "pesc": ["1", "2", "3", "4", "5", "7", "8", "9", "10", "11"],
    "router_init": ["1", "2", "3", "4", "5", "6", "7", "8"],
    "rocket": ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "12"],
    "esft": ["1", "2", "3"],
}
GOOD = '# table: "1"\n# caption: c\n# unit: percent\n# source: s\nrow,column,printed,unit,mark\n'


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_numeric_table_of_a_paper_is_there(paper: str) -> None:
    assert set(ISSUE[paper]) <= set(papers.tables(paper))


@pytest.mark.parametrize(("paper", "name"), TABLES)
def test_every_table_loads_with_typed_numbers_and_its_header(paper: str, name: str) -> None:
    frame = papers.table(paper, name)
    assert frame["value"].dtype == float
    assert frame["decimals"].dtype == int
    assert set(frame["mark"]) <= {"", "damaged", "restored"}
    assert len(frame) and frame.attrs["caption"] and frame.attrs["source"]
    assert frame.attrs["table"] == name


@pytest.mark.parametrize(
    ("printed", "value", "decimals"),
    [
        ("75.7%", 75.7, 1),
        ("300K", 300_000, -3),
        ("1.1K", 1_100, -2),
        ("15B", 15e9, -9),
        ("+1.9%", 1.9, 1),
        ("-13.5", -13.5, 1),
        ("−2.6", -2.6, 1),
        ("1,838", 1838, 0),
        ("5e-5", 5e-5, 5),
        ("1×10^{-4}", 1e-4, 4),
        ("0.70", 0.7, 2),
    ],
)
def test_a_printed_number_keeps_its_value_and_how_fine_it_was_printed(
    printed: str, value: float, decimals: int
) -> None:
    found = papers.number(printed)
    assert found is not None
    assert (found.value, found.decimals) == (pytest.approx(value, rel=1e-12), decimals)


@pytest.mark.parametrize("printed", ["", "-", "×", "12.", "1.2.3", "8×7B", "n/a", "10 %"])
def test_what_is_no_number_is_none(printed: str) -> None:
    assert papers.number(printed) is None


def test_the_wide_form_has_the_papers_rows_and_columns_in_order() -> None:
    form = papers.wide("pesc", 10)
    assert list(form.columns)[:2] == ["PIQA", "HellaSwag"]
    assert form.index[0] == "LLaMA2-7B"
    assert form.loc["Camelidae-8×34B-pro", "HellaSwag"] == 82.5
    keyed = papers.wide("router_init", 7)
    assert keyed.loc[("Danube 2", "1", "2×1.8B_TRSU"), "Code"] == 59.3


def test_damaged_cells_are_marked_and_left_out_of_the_wide_form() -> None:
    frame = papers.table("pesc", 8)
    vicuna = frame[frame["row"] == "Vicuna-7B"]
    restored = frame[(frame["row"] == "LLaMA2-7B-Chat") & (frame["column"] == "GSM8K")]
    assert set(vicuna["mark"]) == {"damaged"}
    assert list(restored["mark"]) == ["restored"] and list(restored["value"]) == [26.3]
    assert pd.isna(papers.wide("pesc", 8).loc["LLaMA2-7B-Chat", "Average"])
    assert "Vicuna-7B" not in papers.wide("pesc", 8).dropna(how="all").index


def test_a_frame_can_be_changed_without_changing_the_next_one() -> None:
    frame = papers.table("pesc", 1)
    frame["value"] = 0.0
    assert papers.table("pesc", 1)["value"].max() > 80


def test_an_unknown_paper_or_table_names_the_nearest() -> None:
    with pytest.raises(Refusal, match=r"E-NAME: unknown paper 'rockett'; did you mean 'rocket'"):
        papers.table("rockett", 1)
    with pytest.raises(Refusal, match=r"pesc has no table '6'; .*one of: 1, 10, 11, 2"):
        papers.table("pesc", 6)
    with pytest.raises(Refusal, match=r"rocket has no settings 'papers'; did you mean 'paper'"):
        papers.hyperparameters("rocket", "papers")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (GOOD + "a,b,12..3,,\n", 6, "a number such as"),
        (GOOD + "a,b,1,,\na,b,2,,\n", 7, "each cell once"),
        (GOOD + "a,b,1,,broken\n", 6, "a mark among"),
        (GOOD + "a,b,1\n", 6, "5 fields, found 3"),
        (GOOD.replace("printed", "value"), 5, "columns row, column"),
        ("# caption: c\n" + GOOD.replace("# caption: c\n", "# capton: c\n"), 1, "found ['capton']"),
        (GOOD.replace("# unit: percent\n", ""), 1, "caption, unit and source"),
        ('# table: "1\n' + GOOD, 2, "YAML"),
    ],
)
def test_a_malformed_file_is_refused_with_file_and_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = tmp_path / "pesc" / "table_1.csv"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(Refusal) as refusal:
        _read(path)
    assert f"E-FORMAT: pesc/table_1.csv:{line}: expected" in str(refusal.value)
    assert message in str(refusal.value)


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_setting_has_a_value_and_the_place_where_it_stands(paper: str) -> None:
    groups = papers.hyperparameters(paper)
    assert "paper" in groups
    for parameters in groups.values():
        assert all(entry["where"] for entry in parameters.values())


def test_the_papers_settings_are_those_of_the_text() -> None:
    pesc = papers.hyperparameters("pesc", "paper")
    assert {name: pesc[name]["value"] for name in ("lr", "batch", "max_length", "top_k")} == {
        "lr": 2e-4,
        "batch": 128,
        "max_length": 2048,
        "top_k": 2,
    }
    assert papers.hyperparameters("router_init", "paper")["lr_danube"]["value"] == 1e-5
