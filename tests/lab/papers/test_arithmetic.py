"""The audit: sums done again by other means, and planted errors, all found."""

import csv
from fractions import Fraction
from functools import cache

import pytest
import yaml

from moebook.errors import Refusal
from moebook.lab import papers
from moebook.lab.papers import relations
from moebook.lab.papers.arithmetic import _turned, judge
from moebook.lab.papers.printed import FOLDER
from moebook.lab.papers.relations import metric, stem

findings = cache(papers.audit)


def odd(paper, kind):
    return [
        f
        for f in findings()
        if (f.paper, f.kind) == (paper, kind) and f.status != "agrees"
    ]


def test_the_examples_of_the_docstring_are_rules():
    _, _, rest = relations.__doc__.partition("::\n\n")
    examples, *_ = rest.split("\n\n")
    rules = [yaml.safe_load(line) for line in examples.splitlines()]
    kinds = [(*rule.keys() & {"row", "column"}, rule["is"]) for rule in rules]
    assert kinds[2] == ("row", "difference")
    assert [*kinds[:2], kinds[3]] == 3 * [("column", "mean")]
    assert all(len(rule["of"]) == 2 for rule in rules)


def test_a_printed_number_is_judged_by_its_last_digit():
    for number, decimals, computed, slack, status in [
        (22.8, 1, 22.75, 0.05, "agrees"),
        (33.4, 1, 33.45, 0.05, "agrees"),
        (50.0, 1, 50.0667, 0.05, "truncated"),
        (50.2, 1, 50.0667, 0.1, "rounding"),
        (50.2, 1, 50.0667, 0.05, "differs"),
        (-1.2, 1, -1.28, 0.0, "truncated"),
        (0.3, 1, -0.31, 0.0, "differs"),
        (300_000, -3, 300_400, 0.0, "agrees"),
        (38, 0, 38, 0.0, "agrees"),
        (38, 0, 39, 0.0, "differs"),
    ]:
        assert judge(number, decimals, computed, slack) == status


@pytest.mark.parametrize(
    ("kind", "printed", "slack"),
    [
        ("ratio", ["9.0", "1.0"], 9.05 / 0.95 - 9),  # below 1.0 it moves further
        ("ratio", ["-9.0%", "+1.0%"], 9.05 / 0.95 - 9),
        ("ratio", ["300K", "2"], 300_500 / 1.5 - 150_000),
        ("reduction", ["1.0", "2.0"], 100 * (1.05 / 1.95 - 0.5)),
        ("difference", ["3.0", "1.00"], 0.055),
        ("mean", ["3.0%", "+1.00", "-2"], (0.05 + 0.005 + 0.5) / 3),
        ("sum", ["3.0", "1.0"], 0.1),
        ("min", ["3.0", "3.0"], 0.05),  # one of the two alone lowers it
        ("max", ["3.0", "3.0"], 0.05),
        ("max", ["5.00", "3"], 0.005),
        ("count", ["3.0", "3.0"], 0.0),
        ("same", ["5e-5"], 0.5e-5),
    ],
)
def test_slack_is_how_far_rounding_can_move_a_result(kind, printed, slack):
    numbers = map(papers.printed.number, printed)
    cells = [relations.Cell("1", "a", "b", "", *one, "", {}) for one in numbers]
    check = relations.Check("", kind, "", 0.0, 0, tuple(cells), "")
    assert check.slack == pytest.approx(slack, rel=1e-12)


def means(paper, name):
    """Row, printed result, its last digit and its mean in fractions, from the CSV."""
    rules = papers.table(paper, name).attrs.get("derived") or []
    lines = (FOLDER / paper / f"table_{name}.csv").read_text("utf-8").splitlines()
    rows = {}
    for cell in csv.DictReader(line for line in lines if not line.startswith("#")):
        if cell["mark"] != "damaged" and cell.get("statistic") != "half_width":
            key = (
                cell["row"],
                *(cell.get(k) or "" for k in ("model", "series", "method")),
            )
            rows.setdefault(key, {})[cell["column"]] = cell["printed"].strip("%")
    for rule in (r for r in rules if r["is"] == "mean" and "table" not in r):
        for key, row in rows.items():
            if {rule["column"], *rule["of"]} <= set(row):
                mean = sum(Fraction(row[name]) for name in rule["of"]) / len(rule["of"])
                digit = Fraction(1, 10 ** len(row[rule["column"]].partition(".")[2]))
                yield " ".join(key), row[rule["column"]], digit, mean


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_averages_are_recomputed_as_exact_fractions_give_them(paper):
    checked = 0
    for name in papers.tables(paper):
        start = (f"Table {name}, ", f"{name}: ")
        ours = [
            f
            for f in findings()
            if f.paper == paper
            and f.kind == "average"
            and f.place.startswith(start[0])
            and f.group.startswith(start[1])
            and "'table'" not in f.group
        ]
        theirs = [] if name.startswith("figure_") else list(means(paper, name))
        for finding, (row, result, digit, mean) in zip(ours, theirs, strict=True):
            assert finding.printed.strip("%") == result, row
            assert float(finding.recomputed) == pytest.approx(
                float(mean), abs=float(digit) / 100
            )
            agrees = abs(Fraction(result) - mean) <= digit / 2
            assert (finding.status == "agrees") == agrees, row
        checked += len(theirs)
    assert checked >= 12


def test_the_audit_finds_what_is_wrong_in_the_papers_and_says_why():
    twice = odd("pesc", "same quantity")
    assert ("82.5", "85.2") in {(f.printed, f.recomputed) for f in twice}
    assert any("shots" in f.explanation for f in twice)
    names = [(f.printed, f.recomputed) for f in odd("router_init", "name")]
    assert names == [("2×1.8B_TRSU", "4×1.8B_CRSU")]
    averages = odd("router_init", "average")
    assert "50.0" in [f.printed for f in averages if f.status == "truncated"]
    for paper, table, count, why in [
        ("pesc", "Table 7", 16, "a weighted mean with the same weights in every row"),
        (
            "rocket",
            "Table 9",
            39,
            "agrees with the mean of ARC-c, ARC-e, GSM8K, MBPP alone",
        ),
        ("rocket", "Table 10", 0, ""),
    ]:
        column = [f for f in odd(paper, "average") if f.place.startswith(f"{table}, ")]
        assert len(column) == count
        assert all(why in f.explanation for f in column)


def test_the_report_counts_every_paper_and_folds_equal_lines():
    with pytest.raises(Refusal, match="did you mean 'esft'"):
        papers.audit("esfd")
    text = papers.report(findings())
    assert [line.split(":")[0] for line in text.splitlines() if line[0] != " "] == [
        *papers.PAPERS
    ]
    counted = "24 agrees, 0 rounding, 3 truncated, 0 differs, 1 doubtful name\n"
    assert f"router_init: 27 numbers recomputed: {counted}" in text
    assert text.count("the mean of ARC-c, ARC-e, GSM8K, MBPP alone") <= 2
    assert "  agrees" in papers.report(findings(), everything=True)
    assert "  agrees" not in text


@pytest.fixture
def audited(tmp_path, monkeypatch):
    """Write tables (and a text) of a made-up paper; return what its audit finds."""

    def write(*sheets, stated=""):
        folder = tmp_path / "pesc"
        folder.mkdir()
        for number, sheet in enumerate(sheets, start=1):
            head, _, body = sheet.partition("---\n")
            head = "".join(f"# {line}\n" for line in head.splitlines())
            start = f'# table: "{number}"\n# caption: c\n# unit: percent\n# source: s\n'
            text = f"{start}{head}row,column,printed,unit,mark\n{body}"
            (folder / f"table_{number}.csv").write_text(text, encoding="utf-8")
        (folder / "stated.yaml").write_text(stated or "[]", encoding="utf-8")
        monkeypatch.setattr("moebook.lab.papers.printed.FOLDER", tmp_path)
        return papers.audit("pesc")

    return write


def rows(*lines, columns="a b c mean"):
    text = ""
    for name, numbers in lines:
        for column, number in zip(columns.split(), numbers.split(), strict=True):
            text += f"{name},{column},{number},,\n"
    return text


MEAN = "derived: [{column: mean, is: mean, of: [a, b, c]}]\n---\n"
SETTINGS = [
    f"setting: {name}\n---\n" + rows(("m", number), columns="a")
    for name, number in (("one", "10.0"), ("two", "11.0"))
]
PLANTED = {  # what is written, and (kind, printed, recomputed, explanation) of what differs
    "a row twice under two names, but no row that is nearly the same": (
        [
            "---\n"
            + rows(
                ("x", "10.0 21.0 50.0"),
                ("y", "10.0 21.0 50.1"),
                ("z", "10.0 21.0 50.0"),
                columns="a b c",
            )
        ],
        [("name", "x", "z", "all 3 shared numbers equal those of z in Table 1")],
    ),
    "a subset behind a whole column": (
        [
            MEAN
            + rows(
                ("x", "10.0 21.0 50.0 15.5"),
                ("y", "11.0 30.0 70.0 20.5"),
                ("z", "12.0 8.0 90.0 10.0"),
            )
        ],
        [
            ("average", printed, mean, "agrees with the mean of a, b alone")
            for printed, mean in (("15.5", "27"), ("20.5", "37"), ("10.0", "36.667"))
        ],
    ),
    "a digit of an operand, unless many would do": (
        [MEAN + rows(("x", "10.5 20.5 92.0 31.0"), ("y", "10.0 20.0 60.0 87.3"))],
        [
            ("average", "31.0", "41", "would agree if c were 62.0 (printed 92.0)"),
            ("average", "87.3", "30", "no simple alternative explains it"),
        ],
    ),
    "operands in another and in a transposed table": (
        [
            "---\n" + rows(("Model-A (Acc.)", "10.0 20.0"), columns="a b"),
            "---\n" + rows(("c", "60.0"), columns="model-a"),
            MEAN + rows(("Model A", "37.0"), columns="mean"),
        ],
        [("average", "37.0", "30", "no simple alternative explains it")],
    ),
    "the same quantity across names but not across metrics": (
        [
            "---\n" + rows(("M 1", "10.0 20.0"), columns="Code(Pass@1) text"),
            "---\n" + rows(("m-1", "30.0 25.0"), columns="Code(Pass@10) Text"),
        ],
        [("same quantity", "25.0", "20", "no simple alternative explains it")],
    ),
    "nothing across settings": (SETTINGS, []),
    "nothing from damaged cells": (
        [
            MEAN
            + rows(("x", "10.0 20.0 60.0 99.0")).replace(
                "x,b,20.0,,", "x,b,20.0,,damaged"
            )
        ],
        [],
    ),
}


@pytest.mark.parametrize(("sheets", "expected"), PLANTED.values(), ids=PLANTED)
def test_what_was_planted_is_found(audited, sheets, expected):
    found = audited(*sheets)
    assert {f.status for f in found} <= {"differs"}
    assert [(f.kind, f.printed, f.recomputed, f.explanation) for f in found] == expected


def stated(number, rest):
    return f'- {{where: w, sentence: s, printed: "{number}", unit: count, {rest}}}\n'


def test_numbers_of_the_text_are_recomputed_and_a_round_one_explained(audited):
    cells = [
        ("3", "count", "column: a"),
        ("2", "count", "column: a, except: [x]"),
        ("60", "sum", "column: a"),
        ("30.0", "max", "column: a"),
        ("11.0", "min", "column: a"),
        ("75", "same", "row: x, column: b"),
        ("80", "same", "row: x, column: b"),
        ("76", "same", "row: x, column: b"),
    ]
    text = "".join(
        stated(number, f'is: {kind}, of: [{{table: "1", {rest}}}]')
        for number, kind, rest in cells
    )
    body = rows(("x", "10.0 77.3"), ("y", "20.0 2.0"), ("z", "30.0 3.0"), columns="a b")
    found = audited("---\n" + body, stated=text)
    assert [f.status for f in found] == ["agrees"] * 4 + ["differs"] * 4
    assert [f.explanation for f in found[-3:]] == [
        "agrees when rounded to 5",
        "no simple alternative explains it",  # farther than half of 5
        "no simple alternative explains it",  # no five
    ]


@pytest.mark.parametrize(
    ("printed", "turned"),
    [
        ("7%", []),
        ("7", []),
        ("30K", [f"{digit}0K" for digit in "012456789"]),
        ("7.5%", [f"{digit}.5%" for digit in "012345689"]),
    ],
)
def test_of_a_printed_number_each_digit_but_the_last_is_turned(printed, turned):
    assert list(_turned(printed)) == turned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("is: average, of: []", "unknown relation 'average'"),
        ('is: same, of: [{table: "7"}]', "no table '7'"),
        ('is: same, of: [{table: "1", row: q}]', "no cell matches"),
        (
            'is: difference, of: [{table: "1", row: x}]',
            "difference needs 2 cells, selected 1",
        ),
        ("is: mean", "names its operands as a list"),
    ],
)
def test_a_malformed_relation_is_refused(audited, text, message):
    with pytest.raises(Refusal, match=f"E-FORMAT: .*{message}"):
        audited("---\n" + rows(("x", "1.0"), columns="a"), stated=stated("1", text))


def test_names_are_compared_without_case_punctuation_and_metric():
    for one, other in (
        ("Camelidae-8×34B-pro", "camelidae 8x34B pro"),
        ("Avg.", "Average"),
        ("HumanEval (Pass@1)", "Humaneval"),
    ):
        assert stem(one) == stem(other) != stem("MMLU") != stem("MMLU-Pro")
    assert (metric("HumanEval (Pass@10)"), metric("MMLU")) == ("pass@10", "")


# Places of numbers that the papers print and that others of theirs contradict, noted by hand.
IN_THE_PAPERS = {
    "pesc": {
        "Section 3.2, Knowledge and Reasoning Abilities: Camelidae-8×34B-pro on HellaSwag,"
        " against the table of commonsense benchmarks",
        "Table 2, HellaSwag (Acc.), Camelidae-8×34B-pro",
        "Table 3, Yi-34B-Chat, Code",
        "Table 3, Camelidae-8×13B, Math",
        "Table 7, LLaMA2-7B, Average",
        "Table 7, LLaMA2-7B-Chat, Average",
        "Table 7, Vicuna-7B, Average",
        "Table 7, Camel-7B, Average",
        "Table 7, Camelidae-8×7B, Average",
        "Table 7, LLaMA2-13B, Average",
        "Table 7, LLaMA2-13B-Chat, Average",
        "Table 7, Vicuna-13B, Average",
        "Table 7, Camel-13B, Average",
        "Table 7, Camelidae-8×13B, Average",
        "Table 7, Yi-34B, Average",
        "Table 7, Yi-34B-Chat, Average",
        "Table 7, SUSChat-34B, Average",
        "Table 7, Camel-34B, Average",
        "Table 7, Camelidae-8×34B, Average",
        "Table 7, Camelidae-8×34B-pro, Average",
        "Table 8, Camelidae-8×13B, Average",
        "Table 10, LLaMA2-13B, Average",
        "Table 10, Yi-34B-Chat, HellaSwag",
        "Table 10, Camelidae-8×34B-pro, HellaSwag",
    },
    "router_init": {"Table 2, Danube 2, 2×1.8B_TRSU, MMLU (Acc)"},
    "rocket": {
        "Table 4, LLaMA2-7B, K = 20, Avg.",
        # Every row of Table 9.
        *(
            f"Table 9, LLaMA2-7B, {row}, Average"
            for row in papers.table("rocket", "9").row
        ),
    },
    "esft": {
        "Section 6.1, observation (1): ESFT trains 2 to 15 of 66 experts, hence at least"
        " this share of parameters fewer than FFT",
        "Section 6.1, observation (1): ESFT trains 2 to 15 of 66 experts, hence at most"
        " this share of parameters fewer than FFT",
    },
}


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_no_number_contradicts_another_but_where_the_paper_does(paper):
    places = {f.place for f in findings() if f.paper == paper and f.status == "differs"}
    assert places == IN_THE_PAPERS[paper]
