"""Prose follows the pools' numbers, and stops the build where a sentence no longer fits them."""

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from moebook.lab import papers
from moebook.lab.evidence import prose, verdicts
from moebook.lab.records import Run, Value
from moebook.lab.records.store import Pool
from tests import sentences
from tests.refusals import refused

CLAIM = next(c for c in papers.claims("pesc") if c.id == "pesc.sparse-beats-dense")
ROOT = Path(__file__).resolve().parents[3]


def pool(*gains, protocol="nano"):
    """A pool in which dense answers half of 100 questions, sparse so many more, by seed."""
    runs = []
    for seed, gain in enumerate(gains):
        right = {"dense": 50, "sparse": 50 + gain}
        values = [
            Value(f"pesc/{arm}/accuracy", count / 100, "share")
            for arm, count in right.items()
        ]
        values.append(Value("pesc/dense/nll", 0.5, "nats"))
        settings = {"base": "nano"}
        run = Run(
            "pesc",
            protocol,
            "study",
            seed,
            tuple(values),
            settings=settings,
            manifest={},
        )
        runs.append(run)
    return Pool("pesc", protocol, tuple(runs))


def evidence(*gains):
    mine = pool(*gains)
    rows = [verdicts.row(CLAIM, [mine], {"nano": ()})]
    return prose.Evidence({"pesc": {"nano": mine}}, rows)


GAIN = "pesc/sparse/accuracy less pesc/dense/accuracy in pesc/nano"


def told(text, *gains):
    return prose.filled(text, evidence(*gains), "book/found/pesc.md")


def test_a_number_stands_with_its_interval_worked_by_hand():
    # Student's at 95 % over 3 seeds: 10 ± 4.3027 * 1 / sqrt(3) = 10 ± 2.484.
    assert told(f"{{{GAIN}}}", 9, 10, 11) == "+10.0 points (+7.5 to +12.5)"
    assert told(f"{{{GAIN}}}", -9, -10, -11) == "−10.0 points (−12.5 to −7.5)"


@pytest.mark.parametrize(
    ("aspect", "said"),
    [
        ("size", "10.0 points"),
        ("value", "60.0 %"),
        ("other", "50.0 %"),
        ("interval", "+7.5 to +12.5"),
        ("seeds", "3"),
        ("percent", "10 %"),
    ],
)
def test_an_aspect_of_an_effect_is_written_alone(aspect, said):
    assert told(f"{{{aspect} of {GAIN}}}", 9, 10, 11) == said


@pytest.mark.parametrize(
    ("gains", "word"),
    [((9, 10, 11), "beats"), ((-9, -10, -11), "loses to"), ((-5, 0, 6), "ties with")],
)
def test_a_word_follows_the_place_of_the_interval(gains, word):
    page = f"---\ngain: {GAIN}\n---\nIt {{beats | loses to | ties with: gain}} dense."
    assert told(page, *gains) == f"It {word} dense."


def test_a_claim_is_read_from_the_pool_of_the_ledger_and_set_against_the_paper():
    page = "---\ngain: pesc.sparse-beats-dense at 1 M\n---\n"
    page += "{gain}, {paper of gain}, {status of gain}"
    assert told(page, 9, 10, 11) == (
        "+10.0 points (+7.5 to +12.5), +0.9 points, planned"
    )
    against = "{exceeded | ruled out | fits: pesc.sparse-beats-dense at 1 M against the paper}"
    assert told(against, 9, 10, 11) == "exceeded"
    assert told(against, 0, 1, 2) == "fits"
    assert told(against, -9, -10, -11) == "ruled out"


def test_an_effect_without_one_task_is_the_mean_over_the_others():
    runs = []
    for seed, gain in enumerate((0.09, 0.10, 0.11)):
        right = {"dense": (0.5, 0.5, 0.5), "sparse": (0.5 + gain, 0.5 - gain, 0.8)}
        values = []
        for arm, shares in right.items():
            name = f"pesc/{arm}/accuracy"
            values.append(Value(name, sum(shares) / 3, "share"))
            for task, share in zip(("a", "b", "c"), shares, strict=True):
                values.append(Value(f"{name}/{task}", share, "share"))
        settings = {"base": "nano"}
        parts = ("pesc", "nano", "study", seed, tuple(values))
        runs.append(Run(*parts, settings=settings, manifest={}))
    mine = Pool("pesc", "nano", tuple(runs))
    shown = prose.Evidence({}, [verdicts.row(CLAIM, [mine], {"nano": ()})])

    def told(task):
        text = f"{{size of pesc.sparse-beats-dense at 1 M without {task}}}"
        return prose.filled(text, shown, "book/found/pesc.md")

    # Without b the mean of 10 and 30 points is left, without c that of 10 and -10.
    assert (told("b"), told("c")) == ("20.0 points", "0.0 points")
    refused("E-PROSE: .*no task 'd'", told, "d")


def test_a_number_that_no_longer_fits_its_sentence_stops_with_file_and_sentence():
    page = f"First. Sparse {{beats: {GAIN}}} dense. Last."
    assert told(page, 9, 10, 11) == "First. Sparse beats dense. Last."
    refused(
        r"E-PROSE: book/found/pesc.md: 'Sparse {beats: .*} dense\.': .*below zero",
        told,
        page,
        *(-9, -10, -11),
    )
    other = page.replace("beats", "beats | - | -")
    refused("not apart from zero", told, other, -5, 0, 6)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{gian}", "E-POOL"),
        ("{pesc/none/accuracy in pesc/nano}", "E-POOL"),
        ("{pesc/dense/accuracy in pesc/none}", "E-POOL"),
        ("{pesc.none at 1 M}", "E-PROSE"),
        ("{pesc.sparse-beats-dense at 135 M}", "E-PROSE"),
        ("{colour of pesc/dense/accuracy in pesc/nano}", "E-PROSE"),
        ("{other of pesc/dense/accuracy in pesc/nano}", "E-PROSE"),
        ("{percent of pesc/dense/nll in pesc/nano}", "E-PROSE"),
        ("{pesc/dense/accuracy less}", "E-PROSE"),
        ("{pesc/sparse/accuracy less dense in pesc/nano}", "E-PROSE"),
        ("{pesc.sparse-beats-dense at 1 M over all studies without code}", "E-PROSE"),
        ("{pesc/sparse/accuracy less nan in pesc/nano}", "E-PROSE"),
        ("{pesc/sparse/accuracy less inf in pesc/nano}", "E-PROSE"),
        (f"{{{GAIN} of 1-3}}", "E-PROSE"),
    ],
)
def test_a_name_that_nothing_has_is_refused_in_one_line(text, code):
    refused(f"{code}: book/found/pesc.md", told, text, 1, 2, 3)


@pytest.mark.parametrize("other", ["nll", "accuracy and pesc/dense/nll"])
def test_values_of_two_units_are_not_compared(other):
    text = f"Sparse leads by {{pesc/sparse/accuracy less pesc/dense/{other} in nano}}."
    words = r"E-PROSE: book/found/pesc.md: 'Sparse leads by .* compares nats and share"
    home = replace(evidence(9, 10, 11), home="pesc/")
    refused(words, prose.filled, text, home, "book/found/pesc.md")


def test_seeds_that_are_asked_for_by_number_are_all_there_or_named():
    assert told(f"{{seeds of {GAIN} of 0-2}}", 9, 10, 11) == "3"
    words = "the pool of pesc/nano lacks seeds 3, 5 of"
    refused(f"E-PROSE: .*{words}", told, f"{{{GAIN} of 1-3,5}}", 9, 10, 11)


def test_what_is_computed_is_one_number_as_in_the_ledger_and_no_study_planned_it():
    """Its items and seeds, which differ here, give it no interval: it lies by its sign."""
    claim = replace(CLAIM, exact=True)
    mine = pool(-1, -3)
    row = verdicts.row(claim, [mine])
    page = "---\ngain: pesc.sparse-beats-dense at 1 M\n---\n"
    page += "{gain}, {up | down | open: gain}, {value of gain}, {status of gain}"
    shown = prose.Evidence({}, [row])
    said = prose.filled(page, shown, "book/found/pesc.md")
    assert said == "−2.0 points, down, 48.0 %, exploratory"
    (verdict,) = row.verdicts
    assert verdict.deciding.interval is None
    assert verdict.deciding.effect == pytest.approx(-0.02)
    refused(
        "E-PROSE: .*has no 'interval'",
        prose.filled,
        page.replace("{gain},", "{interval of gain}"),
        shown,
        "book/found/pesc.md",
    )


@pytest.mark.parametrize(
    ("claims", "status"), [({CLAIM.id: ""}, "planned"), ({}, "exploratory")]
)
def test_a_claim_is_planned_where_its_runs_knew_it(claims, status):
    runs = [replace(run, manifest={"claims": claims}) for run in pool(9, 10, 11).runs]
    row = verdicts.row(CLAIM, [Pool("pesc", "nano", tuple(runs))], {"nano": ()})
    text = "{status of pesc.sparse-beats-dense at 1 M}"
    assert prose.filled(text, prose.Evidence({}, [row]), "a page") == status


def test_roles_and_directives_stay():
    text = "```{include} a.md\n```\n{ref}`b` [c]{.verdict}`d`"
    assert told("```{include} a.md\n```\n{ref}`b`", 1, 2, 3) in text


def test_the_books_own_prose_fits_its_pools_names_bases_and_no_pool_and_is_short(
    ledger,
):
    pages = prose.pages(ROOT, ledger)
    beside = {"found_front", "found_which", *(f"found_{name}" for name in DETAILS)}
    papers_told = {n for n in pages if n not in beside}
    assert len(papers_told) == 6
    page = (ROOT / "book" / "found.md").read_text()
    introduction = page.partition("\n## ")[0]
    texts = [introduction, *(pages[name] for name in papers_told)]
    assert sum(len(text.split()) for text in texts) <= 1500
    measured = chain.from_iterable(row.measurements for row in ledger)
    protocols = {each.pool.protocol for each in measured}
    for name, text in pages.items():
        assert "{" not in text and "nan" not in text.lower().split(), name
        assert [*sentences.long(text)] == [], name
        ours = {word.strip("`.,:") for word in text.split() if "`" in word}
        assert not ours & protocols, name
    for name in papers_told:
        for mark in ("**The surprise.**", "Caution:", "The price"):
            assert mark in pages[name], (name, mark)
    for name in papers_told | {f"found_{name}" for name in DETAILS}:
        for sentence in re.split(r"(?<=[.?!])\**\s+", pages[name]):
            measured = re.search(r"\d (points|nats|%|times)", sentence)
            assert not measured or re.search(r"\b\d+ M\b", sentence), sentence


DETAILS = {
    "pesc_details": [("pesc", "fixed", "pesc/sparse/accuracy")],
    "router_init_details": [
        ("router_init", "trsu", "router_init/trsu/accuracy"),
        ("router_init", "crsu", "router_init/crsu/accuracy"),
    ],
    "rocket_details": [("rocket", "passes", "rocket/mixture/accuracy")],
    "rivals_details": [("rivals", "own_fresh", "rivals/rocket/accuracy")],
    "esft_details": [("esft", "aligned", "esft/gate/accuracy")],
    "together_details": [("together", "nano", "together/dense/pesc/accuracy")],
}
"""What stands below an answer on its page of findings, and the values whose test rows it counts."""


@pytest.mark.parametrize("name", DETAILS)
def test_what_the_questions_are_is_told_with_the_rows_of_the_pools(name, pools):
    text = (ROOT / "book" / "found" / f"{name}.md").read_text()
    for notebook, protocol, value in DETAILS[name]:
        questions = pools(notebook)[protocol].effects(value).shape[1]
        assert f"{questions:,}" in text, (protocol, questions)
    finding = next((ROOT / "notebooks").glob(f"*_{name[:-8]}_findings.ipynb"))
    assert f"_generated/found_{name}.md" in finding.read_text()


@pytest.mark.parametrize(
    ("number", "unit", "compared", "written"),
    [
        (0.0123, "nats", True, "+0.012 nats"),
        (-12.3, "nats", True, "−12 nats"),
        (99.7, "seconds", False, "100 seconds"),
        (1234.5, "ratio", False, "1,234"),
        (1.0, "ratio", False, "1.0"),
        (5e-5, "nats", True, "+0.000050 nats"),
        (-1.26e-7, "ratio", True, "−0.00000013"),
        (-3.2e6, "bytes", True, "−3.2 MB"),
        (1.5e8, "bytes", False, "150 MB"),
    ],
)
def test_a_number_has_two_digits_or_is_whole_and_has_no_exponent(
    number, unit, compared, written
):
    effect = prose.Effect("x", np.zeros((1, 1)), unit, compared, (0.0,))
    assert effect.number(number) == written


def test_an_interval_of_shares_ends_where_a_share_does():
    shares = np.array([[0.0], [0.02], [0.05]])
    low, high = prose.Effect("x", shares, "share", False, (0.0,)).span.split(" to ")
    assert (low, float(high) > 5) == ("0.0", True)
    apart = np.array([[0.0], [0.5]])
    effect = prose.Effect("x", apart, "share", True, (0.0,))
    assert effect.span == "−100.0 to +100.0"
