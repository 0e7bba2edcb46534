"""Verdicts: what may be said from which record, and that every change of a value shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebook import papers
from moebook.errors import Refusal
from moebook.notebook import verdicts
from moebook.notebook.intervals import interval
from moebook.notebook.measurements import amount, describe, measure
from moebook.notebook.verdicts import Label, row, verdict
from moebook.papers import Claim
from moebook.results import TIERS, Record, Value

DIRECTION = Claim(
    id="pesc.test",
    sentence="A beats B.",
    where="Table 1",
    quantity="accuracy",
    kind="direction",
    direction="greater",
    reference="pesc/b/accuracy",
    claimed=0.02,
    unit="share",
    printed="42 against 40",
    tolerance=0.01,
    why="noise",
    scales=("cpu", "study", "gpu", "paper"),
    notebook="01_pesc",
    value="pesc/a/accuracy",
    function="moebook.methods.pesc.craft",
)
NUMBER = replace(
    DIRECTION,
    kind="number",
    direction=None,
    reference=None,
    claimed=8e9,
    tolerance=5e8,
    unit="count",
    value="pesc/size",
    exact=True,
    scales=TIERS,
)


def arm(name: str, scores: list[float], items: list[list[float]] | None = None) -> list[Value]:
    return [
        Value(f"pesc/{name}/accuracy", score, "share", seed, tuple(items[seed]) if items else None)
        for seed, score in enumerate(scores)
    ]


def record(scale: str, a: list[float], b: list[float]) -> Record:
    return Record("pesc", scale, (*arm("a", a), *arm("b", b)))


STUDY = record("study", [0.42, 0.425, 0.415], [0.40, 0.40, 0.40])


def test_a_study_whose_interval_excludes_zero_says_that_the_direction_holds() -> None:
    found = verdict(DIRECTION, [STUDY])
    assert str(found.label) == "direction holds"
    measured = found.measurement
    assert measured is not None and (measured.seeds, measured.scale) == (3, "study")
    assert measured.effect == pytest.approx(0.02)
    half = 4.3027 * 0.005 / 3**0.5  # Student's quantile at two degrees of freedom
    assert measured.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-6)
    assert found.badge.startswith("direction holds (study, 3 seeds: +2.0 points, 95 % from +0.8")


def test_perturbing_a_recorded_value_changes_the_verdict_and_its_badge() -> None:
    worse = record("study", [0.38, 0.375, 0.385], [0.40, 0.40, 0.40])
    mixed = record("study", [0.42, 0.37, 0.41], [0.40, 0.40, 0.40])
    badges = [verdict(DIRECTION, [one]).badge for one in (STUDY, worse, mixed)]
    labels = [badge.split(" (")[0] for badge in badges]
    assert labels == ["direction holds", "direction fails", "inconclusive"]
    assert len(set(badges)) == 3


def test_deleting_the_record_or_one_arm_of_it_gives_not_run() -> None:
    assert verdict(DIRECTION, []).badge == "not run"
    alone = Record("pesc", "study", tuple(arm("a", [0.4, 0.4, 0.4])))
    assert str(verdict(DIRECTION, [alone]).label) == "not run"


def test_one_live_seed_shows_its_own_direction_and_no_verdict() -> None:
    found = verdict(DIRECTION, [record("cpu", [0.45], [0.40])])
    assert str(found.label) == "inconclusive"
    assert "1 seed: +5.0 points, as claimed so far" in found.badge
    assert "against the claim" in verdict(DIRECTION, [record("cpu", [0.3], [0.4])]).badge
    assert "no difference so far" in verdict(DIRECTION, [record("cpu", [0.4], [0.4])]).badge


def test_three_seeds_of_a_live_run_or_two_of_a_study_decide_nothing() -> None:
    assert str(verdict(DIRECTION, [replace(STUDY, scale="cpu")]).label) == "inconclusive"
    two = record("study", [0.5, 0.5], [0.4, 0.4])
    assert str(verdict(DIRECTION, [two]).label) == "inconclusive"


def test_only_a_paper_scale_record_within_tolerance_reproduces() -> None:
    labels = {
        scale: str(verdict(DIRECTION, [replace(STUDY, scale=scale)]).label) for scale in TIERS
    }
    assert labels["paper"] == "reproduced"
    assert labels["gpu"] == labels["study"] == "direction holds"
    far = record("paper", [0.5, 0.51, 0.52], [0.4, 0.4, 0.4])
    assert str(verdict(DIRECTION, [far]).label) == "direction holds"
    unprinted = replace(DIRECTION, claimed=None, tolerance=None)
    assert str(verdict(unprinted, [replace(STUDY, scale="paper")]).label) == "direction holds"


@pytest.mark.parametrize("scale", [tier for tier in TIERS if tier != "paper"])
def test_the_label_reproduced_cannot_be_made_from_a_smaller_record(scale: str) -> None:
    with pytest.raises(Refusal, match="cannot reproduce"):
        Label("reproduced", replace(STUDY, scale=scale))
    with pytest.raises(Refusal, match="rests on a record"):
        Label("reproduced")


@settings(max_examples=30, deadline=None)
@given(
    scale=st.sampled_from([tier for tier in TIERS if tier != "paper"]),
    claim=st.sampled_from([DIRECTION, NUMBER, replace(DIRECTION, kind="number")]),
    a=st.lists(st.floats(0, 1), min_size=3, max_size=4),
    size=st.floats(0, 1e11),
)
def test_no_values_below_the_papers_scale_ever_reproduce(
    scale: str, claim: Claim, a: list[float], size: float
) -> None:
    values = (*arm("a", a), *arm("b", [0.4] * len(a)), Value("pesc/size", size, "count"))
    assert str(verdict(claim, [Record("pesc", scale, values)]).label) != "reproduced"


def test_the_highest_scale_that_may_decide_gives_the_verdict() -> None:
    lone = record("gpu", [0.3], [0.4])
    found = row(DIRECTION, [lone, STUDY, record("cpu", [0.3], [0.4])])
    assert found.verdict.measurement is found.measurements[1]
    assert [measured.scale for measured in found.measurements] == ["cpu", "study", "gpu"]
    assert found.live is found.measurements[0]
    assert found.recorded is found.measurements[2]


def test_an_exact_value_needs_no_seeds_and_has_no_interval() -> None:
    def judged(size: float, scale: str) -> verdicts.Verdict:
        return verdict(NUMBER, [Record("pesc", scale, (Value("pesc/size", size, "count"),))])

    assert str(judged(7.8e9, "cpu").label) == "direction holds"
    assert str(judged(7.8e9, "paper").label) == "reproduced"
    assert str(judged(6.9e9, "cpu").label) == "direction fails"
    measured = judged(7.8e9, "cpu").measurement
    assert measured is not None and measured.interval is None
    assert "cpu, one value: 7,800,000,000" in judged(7.8e9, "cpu").badge


def test_equality_holds_inside_the_tolerance_fails_outside_and_is_open_across_its_border() -> None:
    equal = replace(DIRECTION, direction="equal", claimed=None)
    inside = record("study", [0.401, 0.402, 0.399], [0.4, 0.4, 0.4])
    outside = record("study", [0.45, 0.46, 0.44], [0.4, 0.4, 0.4])
    across = record("study", [0.401, 0.42, 0.405], [0.4, 0.4, 0.4])
    labels = [str(verdict(equal, [one]).label) for one in (inside, outside, across)]
    assert labels == ["direction holds", "direction fails", "inconclusive"]


def test_less_is_greater_turned_round() -> None:
    less = replace(DIRECTION, direction="less")
    assert str(verdict(less, [STUDY]).label) == "direction fails"
    turned = replace(less, value="pesc/b/accuracy", reference="pesc/a/accuracy")
    assert str(verdict(turned, [STUDY]).label) == "direction holds"


def test_a_numeric_reference_is_subtracted() -> None:
    against = replace(DIRECTION, reference=0.40)
    measured = verdict(against, [STUDY]).measurement
    assert measured is not None and measured.effect == pytest.approx(0.02)


def test_arms_are_paired_by_seed_and_by_item() -> None:
    rng = np.random.default_rng(0)
    hard = rng.integers(0, 2, 200).astype(float)
    better = [np.where(rng.random(200) < 0.1, 1.0, hard).tolist() for _ in range(3)]
    plain = [hard.tolist()] * 3
    a = arm("a", [float(np.mean(x)) for x in better], better)
    b = arm("b", [float(np.mean(x)) for x in plain], plain)
    shuffled = Record("pesc", "study", (*reversed(a), *b))
    measured = measure(DIRECTION, shuffled)
    assert measured is not None
    assert np.array(measured.effects).shape == (3, 200)
    assert measured.effect == pytest.approx(float(np.mean(better) - hard.mean()))
    low, high = measured.interval or (0, 0)
    assert 0 < low < measured.effect < high


def test_an_arm_without_seeds_serves_every_seed_of_the_other() -> None:
    base = Value("pesc/b/accuracy", 0.4, "share")
    measured = measure(DIRECTION, Record("pesc", "study", (*arm("a", [0.5, 0.6]), base)))
    assert measured is not None
    assert [round(effect, 6) for (effect,) in measured.effects] == [0.1, 0.2]


def test_arms_without_a_common_seed_are_refused() -> None:
    values = (*arm("a", [0.5]), Value("pesc/b/accuracy", 0.4, "share", seed=7))
    with pytest.raises(Refusal, match="no seed in common"):
        measure(DIRECTION, Record("pesc", "study", values))


def test_a_value_in_another_unit_is_refused_and_one_at_another_scale_is_no_evidence() -> None:
    values = tuple(replace(value, unit="ratio") for value in STUDY.values)
    with pytest.raises(Refusal, match=r"E-VERDICT: pesc/a/accuracy is recorded in ratio"):
        verdict(DIRECTION, [replace(STUDY, values=values)])
    large = replace(DIRECTION, scales=("gpu", "paper"))
    assert verdict(large, [replace(STUDY, scale="cpu")]).label.text == "not run"


def test_a_baseline_alone_may_be_recorded_at_any_scale() -> None:
    values = tuple(value for value in STUDY.values if value.name != DIRECTION.value)
    assert DIRECTION.reference in {value.name for value in values}
    claim = replace(DIRECTION, scales=("gpu", "paper"))
    assert str(verdict(claim, [replace(STUDY, values=values, scale="cpu")]).label) == "not run"


def test_a_smoke_run_is_no_evidence_unless_the_claim_names_it() -> None:
    assert str(verdict(DIRECTION, [replace(STUDY, scale="smoke")]).label) == "not run"
    size = Record("pesc", "smoke", (Value("pesc/size", 8e9, "count"),))
    assert str(verdict(NUMBER, [size]).label) == "direction holds"


def test_the_interval_over_seeds_and_items_is_wider_than_over_either_alone() -> None:
    rng = np.random.default_rng(1)
    effects = rng.normal(0, 1, (1, 300)) + rng.normal(0, 0.1, (5, 1))
    both, seeds = interval(effects), interval(effects.mean(axis=1, keepdims=True))
    items = interval(effects.mean(axis=0, keepdims=True))
    assert both and seeds and items
    width = [high - low for low, high in (both, seeds, items)]
    assert width[0] > width[1] and width[0] > width[2]


def test_the_interval_of_many_items_is_the_textbook_one() -> None:
    effects = np.random.default_rng(2).normal(0.5, 1.0, (1, 2000))
    error = effects.std() / np.sqrt(effects.size)
    low, high = interval(effects) or (0, 0)
    assert low == pytest.approx(effects.mean() - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(effects.mean() + 1.96 * error, abs=0.3 * error)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("items", [1, 40])
@pytest.mark.parametrize(("apart", "noise"), [(1, 0), (0.3, 1), (0, 1), (1, 1)])
def test_an_effect_of_zero_is_seldom_outside_its_interval(
    seeds: int, items: int, apart: float, noise: float
) -> None:
    """One in twenty is the promise; 1,000 draws of a sum of variances leave room up to 8 %."""
    rng = np.random.default_rng(3)
    luck, outside = 0.5 * (items > 1), 0
    for _ in range(1000):
        effects = apart * rng.normal(size=(seeds, 1)) + luck * rng.normal(size=(1, items))
        low, high = interval(effects + noise * rng.normal(size=(seeds, items))) or (0, 0)
        outside += not low <= 0 <= high
    assert outside < 80


def test_effects_that_are_all_the_same_have_an_interval_without_width() -> None:
    assert interval(np.full((3, 4), 0.5)) == (0.5, 0.5)


def test_what_differs_by_rounding_alone_is_no_effect() -> None:
    tie = record("study", [0.1 + 0.2] * 3, [0.3] * 3)
    assert 0.1 + 0.2 > 0.3 and str(verdict(DIRECTION, [tie]).label) == "inconclusive"


def test_a_single_number_has_no_interval() -> None:
    assert interval(np.array([[0.1]])) is None


def test_the_effect_size_is_the_mean_over_the_spread_between_seeds() -> None:
    measured = measure(DIRECTION, STUDY)
    assert measured is not None
    assert measured.size == pytest.approx(0.02 / 0.005)
    assert "effect size 4.0" in describe(measured)


def test_effects_are_told_in_the_claims_unit() -> None:
    assert amount(DIRECTION, 0.021) == "+2.1 points"
    assert amount(replace(DIRECTION, reference=None), 0.421) == "42.1 %"
    assert amount(replace(DIRECTION, unit="percent_points"), -1.5) == "-1.5 points"
    assert amount(replace(DIRECTION, unit="nats"), -0.0321) == "-0.0321 nats"
    assert amount(NUMBER, 7.8e9) == "7,800,000,000"


def test_the_ledger_of_an_empty_project_says_not_run_for_every_claim(tmp_path) -> None:
    rows = verdicts.ledger(tmp_path)
    assert [found.claim.id for found in rows] == [claim.id for claim in papers.claims()]
    assert {str(found.verdict.label) for found in rows} == {"not run"}


def test_the_ledger_reads_the_committed_records_of_a_project(tmp_path) -> None:
    folder = tmp_path / "results" / "pesc" / "study"
    folder.mkdir(parents=True)
    values = [
        Value(f"pesc/{name}/accuracy", score + seed / 100, "share", seed)
        for name, score in (("sparse", 0.5), ("dense", 0.4))
        for seed in range(3)
    ]
    (folder / "record.json").write_text(Record("pesc", "study", tuple(values)).to_text())
    (folder / "manifest.json").write_text('{"date": "2026-11-01T00:00:00+00:00"}')
    found = {one.claim.id: one for one in verdicts.ledger(tmp_path)}["pesc.sparse-beats-dense"]
    assert str(found.verdict.label) == "direction holds"
    (folder / "record.json").unlink()
    again = {one.claim.id: one for one in verdicts.ledger(tmp_path)}["pesc.sparse-beats-dense"]
    assert again.verdict.badge == "not run"
