"""Findings: every sentence, table and point follows from the pools' numbers."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from moebook import evaluation, storage
from moebook.data import tasks
from moebook.errors import Refusal
from moebook.lab import papers, records
from moebook.lab.evidence import findings, heads
from moebook.lab.evidence.verdicts import repeated, row
from moebook.lab.pages import pages
from moebook.lab.records import Curve, Run, Value
from moebook.lab.records.store import Pool
from moebook.lab.run import sources
from tests.refusals import refused

CLAIM = papers.claim("pesc.sparse-beats-dense")
BOUND = papers.claim("pesc.outputs-near-full-experts")
EXACT = replace(
    CLAIM,
    id="pesc.size",
    exact=True,
    reference=None,
    unit="count",
    kind="number",
    direction=None,
    claimed=7e9,
    tolerance=1e9,
)
HOLDS = (0.02, 0.025, 0.015)
FAILS = (-0.02, -0.025, -0.015)
OPEN = (0.02, -0.02, 0.01)


def pool(*effects, protocol="nano", tier="study", claim=CLAIM):
    """A pool with these effects seed by seed, made without items."""
    reference = claim.reference if isinstance(claim.reference, str) else ""
    start = 0.5 if reference else float(claim.reference or 0.0)
    base = {"base": "nano" if tier == "cpu" else protocol}
    runs = []
    for seed, effect in enumerate(effects):
        values = [Value(claim.value, start + effect, claim.unit)]
        values += [Value(reference, start, claim.unit)] if reference else []
        runs.append(Run("pesc", protocol, tier, seed, tuple(values), settings=base))
    return Pool("pesc", protocol, tuple(runs))


def decided(claim, *pools):
    """The claim's row where every one of these pools decides at its scale."""
    return row(claim, pools, {pool.protocol: () for pool in pools})


def ruled(name, *effects):
    pools = [pool(*effects)] if effects else []
    return decided(replace(CLAIM, id=f"pesc.{name}"), *pools)


def only(row):
    """What was measured at a row's one scale."""
    (verdict,) = row.verdicts
    return verdict.shown


COMPUTED = row(EXACT, [pool(7.5e9, claim=EXACT)])


SENTENCES = """\
**Holds** at 1 M: +2.0 points (95 % from +0.8 to +3.2 points; 3 seeds).
**Fails** at 1 M: −2.0 points (95 % from −3.2 to −0.8 points; 3 seeds).
**Too small to see** at 1 M: +0.3 points (95 % from −4.8 to +5.5 points; 3 seeds); \
these runs could have seen 5.2 points or more.
**Cannot tell** at 1 M: +10.0 points, one value; as claimed so far.
**Cannot tell** at 1 M: +10.0 points (95 % from +10.0 to +10.0 points; 2 seeds); \
as claimed so far.
**Not run** at a scale that can test it.
**Fails** at 1 M: 1.21, claimed to be below 1 (95 % from 1.19 to 1.23; 3 seeds).
**Reproduced** at 1 M: +2.0 points (95 % from +0.8 to +3.2 points; 3 seeds).
**Holds**: 7,500,000,000, a computed value."""


def test_a_sentence_tells_the_claim_the_verdict_and_the_numbers_it_rests_on():
    ran = [
        pool(*HOLDS),
        pool(*FAILS),
        pool(*OPEN),
        pool(0.1, protocol="cpu", tier="cpu"),
        pool(0.1, 0.1),
        None,
        pool(0.2, 0.21, 0.22, claim=BOUND),
        pool(*HOLDS, tier="paper"),
        pool(7.5e9, claim=EXACT),
    ]
    claims = [CLAIM] * 6 + [BOUND, replace(CLAIM, claimed=0.02, tolerance=0.01), EXACT]
    for claim, one, told in zip(claims, ran, SENTENCES.splitlines(), strict=True):
        judged = decided(claim, one) if one else decided(claim)
        assert findings.said(judged) == told
    two = row(CLAIM, [pool(*HOLDS), pool(*OPEN, protocol="smollm2")], {"nano": ()})
    assert findings.said(two).endswith(
        "3 seeds). **Exploratory only** at 135 M: +0.3 points (95 % from −4.8 to +5.5 points; "
        "3 seeds); these runs could have seen 5.2 points or more."
    )


def test_a_verdict_that_survives_the_correction_is_told_so():
    sure = ruled("holds", *HOLDS)
    sure = replace(sure, verdicts=(replace(sure.verdicts[0], survives=True),))
    assert findings.said(sure).endswith(
        "3 seeds); significant after correcting for all claims."
    )


@pytest.mark.parametrize(
    ("direction", "claimed", "value"),
    [
        ("greater", None, 2.0),
        ("less", None, -2.0),
        ("equal", None, 2.0),
        ("equal", 0.05, -3.0),
        ("less", -0.01, -2.0),
    ],
)
def test_a_point_of_a_forest_plot_is_turned_so_that_right_is_as_claimed(
    direction, claimed, value
):
    claim = replace(CLAIM, direction=direction, claimed=claimed, tolerance=0.001)
    (point,) = findings.intervals(decided(claim, pool(*HOLDS)))
    half = 100 * 4.302653 * 0.005 / 3**0.5
    assert point[:3] == ["points", CLAIM.id, "1 M"]
    assert point[3:6] == pytest.approx([value, value - half, value + half], rel=1e-6)
    printed = 1.0 if direction == "less" else 0.0
    assert point[7] == (pytest.approx(printed) if claimed else None)


def test_promises_are_drawn_for_what_ran_and_open_where_nothing_is_decided():
    figure = findings.promises([decided(CLAIM, pool(*HOLDS)), row(BOUND, [])])
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert [" ".join(label.split()) for label in labels] == [
        findings.PROMISES[CLAIM.id]
    ]
    assert axes.lines[1].get_markerfacecolor() != "white"
    assert figure.get_suptitle() == "1 of 1 promised gains is clear here"
    open_one = findings.promises([decided(CLAIM, pool(*OPEN))])
    assert open_one.axes[0].lines[1].get_markerfacecolor() == "white"
    assert open_one.get_suptitle() == "None of 1 promised gains is clear here"
    against = findings.promises([decided(CLAIM, pool(*(-x for x in HOLDS)))])
    title = "None of 1 promised gains is clear here, 1 is reversed"
    assert " ".join(against.get_suptitle().split()) == title
    assert findings.promises([row(CLAIM, []), COMPUTED]) is None


def test_a_headline_follows_the_pools_and_stops_where_no_reading_fits():
    text = f"Sparse {{leads | trails: {CLAIM.value} less {CLAIM.reference} in nano}}"
    assert findings.headline(text, {"nano": pool(*HOLDS)}) == "Sparse leads"
    assert findings.headline(text, {"nano": pool(*FAILS)}) == "Sparse trails"
    refused(
        "E-PROSE: a headline of pesc: .*not apart from zero",
        findings.headline,
        text,
        {"nano": pool(*OPEN)},
    )


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        (HOLDS, {"leads": "8", "trails": "16"}),
        ([0.0 - effect for effect in HOLDS], {"trails": "8", "leads": "16"}),
        (OPEN, {"ties with": "8 and 16"}),
    ],
)
def test_those_of_whom_a_headline_says_the_same_are_named_together(runs, told):
    lead = "{{leads | trails | ties with: {} less {} in nano}}".format
    either_way = {
        "8": lead(CLAIM.value, CLAIM.reference),
        "16": lead(CLAIM.reference, CLAIM.value),
    }
    assert findings.alike(either_way, {"nano": pool(*runs)}) == told


def test_what_a_verdict_rests_on_is_said_for_arms_that_no_value_names_and_not_for_floors():
    rates = [Value(f"pesc/rate/adapters/{rate}", rate, "nats") for rate in (0.1, 0.2)]
    one = pool(*HOLDS, claim=BOUND)
    runs = tuple(replace(run, values=(*run.values, *rates)) for run in one.runs)
    best = only(
        row(replace(BOUND, arms="adapters/upcycled"), [replace(one, runs=runs)])
    )
    assert findings.notes(best) == [
        "adapters (3 of 3 seeds) preferred the lowest rate we tried and may be under-tuned"
    ]
    asked = {CLAIM.value: (0.0, 0.0), CLAIM.reference: (0.0, 0.0)}
    values = tuple(Value(name, 0.0, "share", each) for name, each in asked.items())
    floor = Pool(
        "pesc", "nano", tuple(Run("pesc", "nano", "study", s, values) for s in range(3))
    )
    # Neither can do the task: nothing was measured.
    assert row(CLAIM, [floor]).labels == ("not run",)


def measured(seed, *arms, **items):
    """A run with values by arm, the steps of a curve, and which arms ran."""
    rows = {f"toy/{name}/loss": tuple(each) for name, each in items.items()}
    values = [
        Value(name, float(np.mean(each)), "nats", each) for name, each in rows.items()
    ]
    curves = [Curve(name, "nats", (1.0, 2.0), each) for name, each in rows.items()]
    return Run(
        "toy",
        "nano",
        "study",
        seed,
        tuple(values),
        tuple(curves),
        arms or tuple(items),
        manifest={"date": "2026-01-02"},
    )


FIRST = measured(0, a=[1.0, 3.0], b=[2.0, 2.0])
TOY = Pool("toy", "nano", (FIRST, measured(1, a=[2.0, 4.0]), measured(4, a=[3.0, 5.0])))


def test_pools_that_decide_are_those_of_the_ledger_what_is_computed_included(ledger):
    """No head names a computed claim, as of the routing that the authors published."""
    decide = set()
    for one in ledger:
        if one.claim.run == "routing":
            decide |= {verdict.shown.pool.protocol for verdict in one.decided}
    assert set(findings.pools("routing")) == decide == {"nano", "paper"}


def test_arms_are_measured_over_their_seeds_and_put_into_a_table():
    lone = Run("toy", "nano", "study", 0, (Value("toy/c/loss", 2.0, "nats"),))
    names = {"loss": "toy/{arm}/loss", "again": "toy/{arm}/loss"}
    frame = findings.arms(TOY, ["a", "b", "c"], names)
    by_arm = [["a", 3.0, 3], ["b", 2.0, 1]]
    assert frame[["arm", "value", "seeds"]].to_numpy().tolist() == [*by_arm, *by_arm]
    assert frame.measure.tolist() == ["loss", "loss", "again", "again"]
    half = np.hypot(4.302653 / 3**0.5, 12.706205 * 2**0.5 / 2**0.5)
    assert (frame.low[0], frame.high[0]) == pytest.approx(
        (3 - half, 3 + half), rel=1e-6
    )
    text = findings.table(frame)
    assert list(text.columns) == ["loss", "again", "seeds"]
    assert text.seeds.tolist() == [3, 1]
    assert text.loss["a"] == f"3.000 (−{half - 3:.3f} to {half + 3:.3f})"
    frame = findings.arms(replace(TOY, runs=(lone,)), ["c"], names)
    assert findings.table(frame).loss["c"] == "2.000"
    assert (
        findings.table(frame.assign(value=4e5, low=4e5, high=4e5)).loss["c"]
        == "400,000"
    )
    assert (
        findings.table(frame.assign(value=12.0, low=12.0, high=12.0)).loss["c"] == "12"
    )
    assert findings.table(frame.assign(value=0.0, low=0.0, high=0.0)).loss["c"] == "0"
    tiny = dict.fromkeys(("value", "low", "high"), 1.6e-6)
    assert findings.table(frame.assign(**tiny)).loss["c"] == "2 × 10⁻⁶"
    below_zero = dict.fromkeys(("value", "low", "high"), -4e-12)
    assert findings.table(frame.assign(**below_zero)).loss["c"] == "−4 × 10⁻¹²"
    shares = {"unit": "share", "value": 0.207, "low": -0.014, "high": 0.228}
    told = findings.table(frame.assign(**shares))
    assert told.loss["c"] == "20.7 % (−1.4 to 22.8)"
    assert findings.table(frame.assign(**shares | {"low": 0.228})).loss["c"] == "20.7 %"
    assert findings.arms(TOY, ["d"], names).empty
    told = findings.runs({"nano": TOY})
    assert told.loc["nano", ["seeds", "runs", "arms"]].tolist() == ["0, 1, 4", 3, 2]
    assert told.code["nano"].startswith("of 2026-01-02; ")
    assert findings.of({"nano": TOY}, "nano") is TOY
    with pytest.raises(
        Refusal, match="E-PROTOCOL: no pool of protocol 'nanp'; did you mean 'nano"
    ):
        findings.of({"nano": TOY}, "nanp")
    with pytest.raises(Refusal, match="there is none yet: see moebook study"):
        findings.of({}, "nano")


def test_differences_are_drawn_paired_by_seed_and_item_pool_by_pool():
    pools = [
        TOY,
        replace(
            TOY,
            protocol="two",
            runs=tuple(replace(run, protocol="two") for run in TOY.runs[:1]),
        ),
    ]
    pairs = {
        "a - b": ("toy/a/loss", "toy/b/loss"),
        "none": ("toy/c/loss", "toy/b/loss"),
    }
    parts = [(one, pairs) for one in pools]
    (axes,) = findings.differences(parts, xlabel="more", title="a and b").axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a - b"]
    points = [line.get_xdata().tolist() for line in axes.lines[1::2]][:2]
    # Of a's 1 and 3 less b's 2 and 2: items alone tell.
    half = 12.706205 * 2**0.5 / 2**0.5
    assert points == [[0.0], [0.0]]
    assert axes.get_xlabel() == "more (nats)"
    assert axes.lines[0].get_xdata() == pytest.approx([-half, half], rel=1e-6)
    assert (
        findings.differences([(TOY, {"none": pairs["none"]})], xlabel="", title="")
        is None
    )


def test_series_and_bands_take_the_seeds_that_have_every_name_and_refuse_other_steps():
    assert findings.series(TOY, ["toy/a/loss"]).tolist() == [[2], [3], [4]]
    assert findings.series(TOY, ["toy/b/loss", "toy/a/loss"]).tolist() == [[2, 2]]
    ran = Pool(
        "toy",
        "nano",
        (measured(0, "sparse", "experts16", "experts4", "experts_all", "experts²"),),
    )
    sizes = findings.sizes(ran, "experts", (8, "sparse"))
    assert list(sizes.items()) == [(4, "experts4"), (8, "sparse"), (16, "experts16")]
    names = {"A": "toy/a/loss", "B": "toy/b/loss", "none": "toy/c/loss"}
    lines, steps = findings.bands(TOY, names)
    assert steps == (1.0, 2.0)
    assert list(lines) == ["A", "B"]
    assert lines["A"].tolist() == [[1, 3], [2, 4], [3, 5]]
    assert lines["B"].tolist() == [[2, 2]]
    less, _ = findings.bands(TOY, names, less="toy/b/loss")  # which one seed alone has
    assert {name: rows.tolist() for name, rows in less.items()} == {
        "A": [[-1, 1]],
        "B": [[0, 0]],
    }
    assert findings.bands(TOY, {"none": "toy/c/loss"}) == ({}, ())
    assert findings.series(TOY, ["toy/a/loss", "none"]).shape == (0, 2)
    grown = findings.beside(TOY, ["toy/b/loss", "toy/a/loss"], [40.0, 41.5])
    assert {name: rows.tolist() for name, rows in grown.items()} == {
        "here": [[0, 0]],
        "in the paper": [0, 1.5],
    }
    other = replace(measured(7), curves=(Curve("toy/a/loss", "nats", (1.0,), (2.0,)),))
    with pytest.raises(
        Refusal, match="E-SHAPE: toy/a/loss, seed 7, has 1 positions; expected"
    ):
        findings.bands(replace(TOY, runs=(*TOY.runs, other)), names)


def test_an_end_of_the_grid_of_rates_is_told_of_the_arms_that_most_seeds_took_it_for():
    def run(seed, **losses):
        tried = [
            Value(f"pesc/rate/a/{rate}", loss, "nats") for rate, loss in losses.items()
        ]
        reached = [
            Value(f"pesc/{arm}/accuracy", 0.1 * seed, "share") for arm in ("a", "b")
        ]
        return Run("pesc", "nano", "study", seed, (*tried, *reached), arms=("a", "b"))

    runs = run(1, **{"0.001": 2.0, "0.01": 1.0}), run(2, **{"1e-05": 1.0})
    several = Pool("pesc", "nano", runs)
    told = several.at_end("pesc/b/accuracy", "pesc/a/accuracy")
    liked = (
        "a (1 of 1 seeds) preferred the highest rate we tried and may be under-tuned"
    )
    assert told == liked
    assert several.tried("pesc/b/accuracy", "pesc/a/accuracy", 0.5) == {
        "b": False,
        "a": True,
    }
    alone = Pool("pesc", "nano", runs[1:])
    assert alone.tried("pesc/a/accuracy") == {"a": False}  # one rate is no choice
    alike = [
        replace(value, name=value.name.replace("/a/", "/c/"))
        for value in runs[0].values
        if "/a/" in value.name
    ]
    run_of_both = replace(
        runs[0], values=(*runs[0].values, *alike), arms=("a", "b", "c")
    )
    both = Pool("pesc", "nano", (run_of_both,)).at_end("pesc/a/c")
    assert both == liked.replace(" preferred", ", c (1 of 1 seeds) preferred")
    inside = run(
        3, **{"0.1/one": 2.0, "0.1/two": 2.0, "1/one": 1.0, "1/two": 1.0, "9/one": 3.0}
    )
    runs += inside, run(4, **{"0.1": 2.0, "1": 1.0, "9": 3.0})
    assert not Pool("pesc", "nano", runs).at_end("pesc/a/accuracy", None, 0.5)


def test_it_is_told_how_arms_came_by_their_rates(ledger):
    """Chosen in each run, fixed by a study before it, or one rate that nobody chose."""
    rows = {one.claim.id: one for one in ledger}
    told = {
        "esft.default-threshold-is-enough": "rates chosen in each run",
        "esft.gate-beats-lora-of-equal-size": (
            "rates fixed beforehand by equal_sizes_tuning"
        ),
        "pesc.adapters-recover-half-of-the-lead": (
            "rates fixed beforehand by eq6_tuning"
        ),
        "pesc.sparse-beats-dense": "rates fixed beforehand by tuning",
        "rocket.four-experts-beat-two": "",
    }
    untuned = "mixture and experts2 had no choice of rate"
    for name, rates in told.items():
        measured = rows[name].at(findings.SMALL).shown
        assert findings.rates(measured) == rates, name
        assert (untuned in findings.notes(measured)) == (not rates)
        assert rates == "" or "no choice" not in " ".join(findings.notes(measured))


def test_each_study_that_chooses_rates_for_others_is_named_by_one_that_takes_them():
    choosing = set()
    named = set()
    for name, notebook in sources.notebooks(storage.root()).items():
        for protocol in heads.planned(notebook):
            if heads.UNDECIDING in " ".join(notebook.head(protocol)):
                choosing.add((name, protocol))
            else:
                studies = heads.tuned_by(notebook, protocol)
                named |= {(name, study) for study in studies}
    assert named == choosing
    assert ("esft", "paper_sizes_tuning_low") in named


def test_a_claim_that_presupposes_another_is_not_tested_while_that_has_not_held(
    ledger,
):
    rows = {one.claim.id: one for one in ledger}
    assert "direction holds" not in rows["router_init.lead-early"].labels
    assert {*rows["router_init.lead-shrinks"].labels} == {"not testable here"}


def test_a_pool_is_judged_twice_without_its_other_seeds_and_by_them():
    both = pool(*HOLDS, *FAILS)
    told = {
        one.claim.id: (one.label, two.label) for one, two in repeated(both, [3, 4, 5])
    }
    assert told == {CLAIM.id: ("direction holds", "direction fails")}
    assert not repeated(both, [6])


@pytest.mark.parametrize(
    ("name", "protocol", "number"),
    [("routing", "nano", 3), ("esft", "budgets", 6), ("pesc", "higher", 1)],
)
def test_ten_other_seeds_change_no_label_that_survives_the_correction(
    pools, name, protocol, number
):
    other = sources.find(storage.root(), name).seeds(protocol, heads.OTHERS)
    pairs = repeated(pools(name)[protocol], other)
    sure = pages.surviving(one for one, _ in pairs)
    assert len(sure) == number
    assert {two.shown.seeds for _, two in pairs} == {10} == {len(other)}
    assert all(one.label == two.label for one, two in pairs if one.claim.id in sure)


def test_what_is_measured_before_training_needs_no_choice_of_a_rate(ledger):
    rows = {one.claim.id: one for one in ledger}
    assert not findings.notes(only(rows["router_init.random-router-is-undecided"]))


def test_a_verdict_that_needs_the_weights_of_its_tasks_says_so():
    parts = []
    for name, turn in ((CLAIM.value, 1), (CLAIM.reference, -1)):
        parts.append(Value(f"{name}/code", 0.5 + 0.1 * turn, "share"))
        parts.append(Value(f"{name}/text", 0.5 - 0.1 * turn, "share"))
    one = pool(*HOLDS)
    runs = tuple(replace(run, values=(*run.values, *parts)) for run in one.runs)
    best = only(row(CLAIM, [replace(one, runs=runs)]))
    said = ["1 of 2 domains point the claimed way", "not so if domains weighed alike"]
    assert best.side == 1
    assert findings.notes(best) == said
    best = only(row(CLAIM, [replace(one, runs=(*runs[:2], one.runs[2]))]))
    assert best.seeds == 3
    assert not findings.notes(best)  # one seed recorded no domains


def test_a_change_is_over_the_seeds_that_have_both_and_arms_with_fewer_seeds_are_named():
    runs = [
        measured(0, a=[1.0, 3.0], b=[2.0, 2.0]),
        measured(1, a=[1.0, 1.0], b=[0.0, 1.0]),
        measured(2, a=[9.0, 9.0]),
    ]
    both = Pool("toy", "nano", tuple(runs))
    (line,) = findings.changes(
        both, ["a"], {"a": "toy/a/loss", "b": "toy/b/loss"}
    ).itertuples()
    assert (line.a[:5], line.b[:5], line.change[:6], line.seeds) == (
        "1.500",
        "1.250",
        "−0.250",
        2,
    )
    for absent in (["c"], []):
        assert findings.changes(
            both, absent, {"a": "toy/{arm}/loss", "b": "toy/b/loss"}
        ).empty
    assert both.lacking(["a", "b", "c"]) == " (of these: b 2, c 0)"
    assert both.lacking(["all"]) == both.lacking(["a", ""]) == ""


def test_an_interval_of_a_difference_of_shares_ends_at_100_points():
    runs = []
    for seed, (one, other) in enumerate([(0.0, 1.0), (1.0, 1.0)]):
        values = (Value("toy/one", one, "share"), Value("toy/other", other, "share"))
        runs.append(Run("toy", "nano", "study", seed, values))
    both = Pool("toy", "nano", tuple(runs))
    # Student's interval of -1 and 0 leaves both ends.
    parts = [(both, {"one - other": ("toy/one", "toy/other")})]
    (axes,) = findings.differences(parts, xlabel="more", title="").axes
    assert axes.lines[0].get_xdata().tolist() == [-100, 100]
    measures = {"other": "toy/other", "one": "toy/one"}
    (line,) = findings.changes(both, ["any"], measures).itertuples()
    assert line.change == "−50.0 points (−100.0 to 100.0)"


def test_the_interval_of_a_claim_ends_where_its_unit_does():
    wide = only(ruled("wide", 0.48, -0.48, 0.48))
    assert wide.interval[0] < -1 and wide.interval[1] > 1
    assert "95 % from −100.0 to +100.0 points" in findings.numbers(wide)
    shares = replace(CLAIM, reference=0.9, unit="share")
    bound = only(decided(shares, pool(0.09, -0.5, 0.05, claim=shares)))
    assert bound.interval[1] > 0.1
    assert bound.bounded == pytest.approx((-0.9, 0.1))
    assert "above 90.0 % (95 % from 0.0 to 100.0 %" in findings.numbers(bound)


def test_what_a_head_names_between_braces_is_written_from_the_pools():
    both = pool(*HOLDS)
    more = pool(0.1, 0.1, protocol="more")
    pair = f"{CLAIM.value} less {CLAIM.reference}"
    pools = {"nano": both, "more": more}
    for text, written in {
        f"it is {{{pair}}}.": "it is +2.0 points (+0.8 to +3.2).",
        f"{{{pair} of 0-1}}": "+2.3 points (−0.9 to +5.4)",
        f"{{{pair} and {CLAIM.value} in nano of 0}}": "+1.0 points",  # the mean of both
        f"{{{pair} in more}}": "+10.0 points",
        f"{{{CLAIM.value} of 0}}": "52.0 %",
        f"{{{CLAIM.value} less 0.5 in more of 1}}": "+10.0 points",
        f"{{{pair} in lost}}": "(no pool lost on record)",
        f"{{{pair} in pesc/more}}": "+10.0 points",
        f"{{gains in size | falls: {pair}}}": "gains in size",
    }.items():
        assert heads.filled(text, pools, "pesc/nano") == written
    for text in (f"{{{pair} in more of 7}}", "{pesc/lost/accuracy}"):
        refused(
            r"head of nano.*: the pool of pesc.\w+ has no pesc",
            heads.filled,
            text,
            pools,
            "pesc/nano",
        )


def test_a_head_says_nothing_of_arms_that_still_run():
    runs = pool(*HOLDS).runs
    arms = ("sparse", "dense")
    assert all(f"/{arm}/" in f"{CLAIM.value} {CLAIM.reference}" for arm in arms)
    one = Pool("pesc", "nano", tuple(replace(run, arms=arms) for run in runs))
    pair = f"{{{CLAIM.value} less {CLAIM.reference}}}"
    seeds = range(len(runs))
    told = heads.filled(pair, {"nano": one}, "pesc/nano", seeds)
    assert told == heads.filled(pair, {"nano": one}, "pesc/nano") != "(still running)"
    more = range(len(runs) + 1)
    assert heads.filled(pair, {"nano": one}, "pesc/nano", more) == "(still running)"


def test_a_designs_chance_is_that_of_the_test_rows_that_its_measure_has():
    """PESC's `eq6` names the rows of accuracy; its measure is one of layers, on others."""
    designs = {
        (one.notebook, one.protocol): one
        for one in heads.read(Path(__file__).parents[3])
    }
    design = designs["pesc", "eq6"]
    assert design.facts["Test rows"] == "7465"
    told = design.facts["Chance to see it"]
    assert told.endswith(": it has 2,000 test rows, not 7,465")
    assert int(told.partition("%")[0]) < 70


def test_recorded_benchmarks_stand_beside_chance_and_their_model_card(pools):
    every = pools("bases")
    scores = findings.benchmarks(every)
    right = {}
    for value in every["smollm2"].last.values:
        if value.name.endswith("/normalised"):
            right[value.name.split("/")[3]] = value.value
    assert len(right) == 9
    told = scores.loc["smollm2"].normalised
    assert {*told.index} == {*right, "ai2_arc"}
    for name, share in right.items():
        assert told[name] == f"{share:.3f}"
    chance = scores.loc["smollm2"].chance
    below = told.astype(float) < chance.astype(float)
    assert below.any()
    assert scores.loc["smollm2"]["SE over chance"][below].str.startswith("−").all()
    both = (right["arc_easy"] + right["arc_challenge"]) / 2
    assert float(told["ai2_arc"]) == pytest.approx(both, abs=1e-3)
    assert findings.benchmarks({"nano": every["nano"]}).empty
    assert findings.benchmarks({}).empty


def asked(groups, without=()):
    """Items of benchmarks as `evaluate` gives them, by groups; some tasks have no loss."""
    parts = []
    for group, members in groups.items():
        for rows, task in enumerate(members, 2):
            right = [float(row == 0) for row in range(rows)]
            loss = np.nan if task in without else [rows + 1.0] * rows
            part = pd.DataFrame({"correct": right, "unnormalised": right, "nll": loss})
            parts.append(part.assign(chance=0.25, task=task, asked=group))
    return pd.concat(parts, ignore_index=True)


def recorded(base, items):
    """The run that the notebook's own cells record of a base that reaches these items."""
    values = []
    curves = []

    def record(name, value, unit, items=None):
        values.append(Value(name, value, unit, None if items is None else tuple(items)))

    answers = pd.DataFrame({"domain": "text", "task": [*tasks.CATALOGUE], "correct": 1})
    items.attrs["files"] = {}
    names = {
        "base": base,
        "benchmarks": ",".join(items.asked.unique()),
        "benchmark_rows": 300,
        "data_folder": "",
        "model": None,
        "tokenizer": None,
        "before": answers,
        "after": answers,
        "history": SimpleNamespace(loss=[2.0, 1.0], step=[1, 2]),
        "run": SimpleNamespace(
            record=record,
            curve=lambda name, y, unit: curves.append(
                Curve(name, unit, (1, 2), tuple(y))
            ),
            files=dict,
        ),
        "evaluation": SimpleNamespace(
            evaluate=lambda *_, **__: items, summary=evaluation.summary
        ),
        "plotting": SimpleNamespace(curves=lambda *_, **__: None),
        "records": records,
        "tasks": tasks,
        "pd": pd,
    }
    path = storage.root() / "notebooks/00_bases.ipynb"
    cells = {
        cell["id"]: "".join(cell["source"])
        for cell in json.loads(path.read_text())["cells"]
    }
    (called,) = [line for line in cells["bases-06"].splitlines() if "called =" in line]
    for part in (called, cells["benchmarks"], cells["bases-19"], cells["bases-23"]):
        exec(part, names)
    return Run(
        "bases", "nano", "cpu", 0, tuple(values), tuple(curves), settings={"base": base}
    )


@pytest.mark.parametrize(
    ("base", "called"),
    [
        *((name, name) for name in ("nano", "nano-moe", "mid-moe", "smollm2", "my.2")),
        ("org/name@0123abc", "org_name_0123abc"),
        ("/models/my base", "models_my_base"),
        ("./mine", "mine"),
        ("../d/mine", "d_mine"),
        ("~/modèle", "mod_le"),
        (".", "folder"),
        ("模型", "folder"),
    ],
)
def test_values_of_every_base_are_recorded_and_its_benchmarks_are_found(base, called):
    run = recorded(base, asked({"piqa": ["piqa"], "d/own.jsonl": ["own_my own"]}))
    names = {value.name for value in (*run.values, *run.curves)}
    assert {f"bases/{called}/{each}" for each in ("loss", "tuned/gcd")} < names
    assert f"bases/{called}/benchmark/piqa/accuracy" in names
    found = findings.benchmarks({"nano": Pool("bases", "nano", (run,))})
    assert found.loc["nano"].loss.to_dict() == {"piqa": "3.000", "d_own.jsonl": "3.000"}


@pytest.mark.parametrize("base", ["mine", "d/mine", "d/e/mine"])
def test_benchmarks_are_found_where_a_run_kept_its_base_as_a_folders_path(base):
    run = recorded("mine", asked({"piqa": ["piqa"]}))
    values = [
        replace(value, name=value.name.replace("bases/mine/", f"bases/{base}/"))
        for value in run.values
    ]
    run = replace(run, values=tuple(values))
    found = findings.benchmarks({"nano": Pool("bases", "nano", (run,))})
    assert found.loc["nano"].index.tolist() == ["piqa"]


@pytest.mark.parametrize(
    ("groups", "losses"),
    [
        ({"mmlu": ["mmlu_a", "mmlu_b"], "piqa": ["piqa"]}, [3.5, 3.0]),
        ({"arc_easy": ["arc_easy"]}, [3.0]),
        ({name: [name] for name in ("arc_challenge", "arc_easy")}, [3.0, 3.0, 3.0]),
        ({"ai2_arc": ["arc_challenge", "arc_easy"]}, [3.5]),
        (
            {"ai2_arc": ["arc_challenge", "arc_easy"], "arc_easy": ["arc_easy"]},
            [3.5, 3],
        ),
        ({"gsm8k": ["gsm8k"]}, [np.nan]),
        ({"gsm8k": ["gsm8k"], "piqa": ["piqa"]}, [np.nan, 3.0]),
        ({"both": ["gsm8k", "piqa"]}, [np.nan]),
    ],
    ids=str,
)
def test_recorded_benchmarks_are_those_of_the_summary_and_a_loss_may_be_missing(
    groups, losses
):
    items = asked(groups, without=["gsm8k"])
    run = recorded("nano", items)
    found = findings.benchmarks({"nano": Pool("bases", "nano", (run,))}).loc["nano"]
    wanted = evaluation.summary(items, "nano")
    for column in ("accuracy", "normalised", "chance", "rows"):
        kept = pd.to_numeric(found[column]).reindex(wanted.index)
        np.testing.assert_allclose(kept, wanted[column], atol=5e-4)
    given = found.loss.replace("", np.nan).astype(float)
    np.testing.assert_array_equal(given.sort_index(), losses)
