"""Verdicts: what may be said from which pool, and that every change of a value shows."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from moebook import papers
from moebook.errors import Refusal
from moebook.notebook import findings, verdicts
from moebook.notebook.verdicts import amount, chance, row
from moebook.results import TIERS, Run, Value, write_run
from moebook.results.store import Pool

DIRECTION = replace(
    papers.claim("pesc.sparse-beats-dense"), id="pesc.test", claimed=0.02, tolerance=0.01,
    scales=("cpu", "study", "gpu", "paper"), value="pesc/a/accuracy", reference="pesc/b/accuracy",
)  # fmt: skip
NUMBER = replace(
    DIRECTION, kind="number", direction=None, reference=None, claimed=8e9, tolerance=5e8,
    unit="count", value="pesc/size", exact=True, scales=TIERS,
)  # fmt: skip
ROOT = Path(__file__).parents[2]
STUDY, LOWER, MIXED = (0.42, 0.425, 0.415), (0.38, 0.375, 0.385), (0.42, 0.37, 0.41)


def accuracy(name, items):
    several = tuple(items) if isinstance(items, Sequence) else None
    return Value(f"pesc/{name}/accuracy", float(np.mean(items)), "share", several)


def pool(tier, *seeds, base="nano"):
    """A pool with these values, seed by seed; a study's protocol is called like its base."""
    name, design = base if tier == "study" else tier, {"base": base}
    runs = (Run("pesc", name, tier, n, tuple(v), settings=design) for n, v in enumerate(seeds))
    return Pool("pesc", name, tuple(runs))


def against(tier, a, b=0.4, base="nano"):
    """A pool in which A has these accuracies, seed by seed, and B always the same."""
    return pool(tier, *([accuracy("a", score), accuracy("b", b)] for score in a), base=base)


def size(tier, count):
    return pool(tier, [Value("pesc/size", count, "count")])


def judge(claim, *pools):
    return row(claim, pools).label


def test_a_study_whose_interval_excludes_zero_says_that_the_direction_holds():
    judged = row(DIRECTION, [against("study", STUDY)])
    best = judged.best
    assert (best.seeds, best.pool.protocol) == (3, "nano")
    half = 4.302653 * 0.005 / 3**0.5  # Student's quantile at two degrees of freedom
    measured = (best.effect, *best.interval, best.smallest)
    assert measured == pytest.approx((0.02, 0.02 - half, 0.02 + half, half), rel=1e-6)
    assert judged.label == "direction holds" and findings.scatter(best)[-4:] == " 4.0"


@pytest.mark.parametrize(("scores", "direction", "label"), [
    (STUDY, "greater", "holds"), (LOWER, "greater", "fails"), (MIXED, "greater", "inconclusive"),
    (STUDY, "less", "fails"), (LOWER, "less", "holds"), (MIXED, "less", "inconclusive"),
    ((0.1 + 0.2 + 0.1, 0.4, 0.4), "greater", "inconclusive"),  # more than .4 by rounding alone
    ((0.401, 0.402, 0.399), "equal", "holds"),  # within .01
    ((0.45, 0.46, 0.44), "equal", "fails"), ((0.35, 0.36, 0.34), "equal", "fails"),
    ((0.401, 0.42, 0.405), "equal", "inconclusive"),
])  # fmt: skip
def test_the_label_follows_the_recorded_values(scores, direction, label):
    claim = replace(DIRECTION, direction=direction, claimed=None)
    judged = judge(claim, against("study", scores))
    assert judged.removeprefix("direction ") == label
    number = replace(claim, reference=0.4)  # subtracted as B's accuracy is
    assert judge(number, against("study", scores, b=0.9)) == judged


@pytest.mark.parametrize(("scores", "claimed", "label"), [
    # Student's half width of 4.303 s / 3½ is 2.48 points for s = 1, around a mean of 1 point
    ((0.40, 0.41, 0.42), 0.02, "too small to see here"),  # in -1.48 to 3.48, below 2.48
    ((0.40, 0.41, 0.42), 0.03, "inconclusive"),  # in the interval, and large enough to be seen
    ((0.40, 0.41, 0.42), 0.04, "excludes the paper's size"),
    ((0.40, 0.40, 0.40), 0.04, "inconclusive"),  # nothing differs
    ((0.40, 0.41, 0.42), None, "inconclusive"),
    ((0.42, 0.43, 0.44), 0.04, "direction holds"),  # 0.52 to 5.48
])  # fmt: skip
@pytest.mark.parametrize("turn", [1, -1])
def test_across_the_border_the_papers_size_decides_what_is_said(scores, claimed, label, turn):
    claim = replace(DIRECTION, direction="greater" if turn > 0 else "less",
                    claimed=claimed and turn * claimed)  # fmt: skip
    judged = row(claim, [against("study", [0.4 + turn * (score - 0.4) for score in scores])])
    assert judged.label == label
    assert ("less than 2.5 points was not detectable" in findings.notes(judged.best)) == (
        not judged.best.side and judged.best.smallest > 0
    )


@pytest.mark.parametrize(("claimed", "large", "label"), [
    (0.02, (0.40, 0.41, 0.42), "direction holds"),  # 2.48 points either way: it cannot see 2
    (None, (0.40, 0.41, 0.42), "direction holds"), (None, (0.4, 0.4, 0.4), "direction holds"),
    (0.03, (0.40, 0.41, 0.42), "inconclusive"), (0.02, LOWER, "direction fails"),
    (None, (0.398, 0.4, 0.402), "inconclusive"),  # narrower than the smaller scale's 1.24
])  # fmt: skip
def test_a_larger_scale_that_cannot_see_gives_way_to_a_sharper_one(claimed, large, label):
    pools = [against("study", STUDY, base="nano"), against("study", large, base="smollm2")]
    judged = row(replace(DIRECTION, claimed=claimed), pools)
    assert judged.label == label and len(judged.measurements) == 2


@pytest.mark.parametrize(("others", "decides"), [
    ((0.35, 0.45, 0.5), "two"), ((0.43, 0.44, 0.45), "nano"), ((0.43, 0.44, 0.45, 0.46), "two"),
])  # fmt: skip
def test_of_two_pools_at_one_scale_more_seeds_decide_and_of_as_many_the_weaker(others, decides):
    one, two = against("study", STUDY), against("study", others)
    two = replace(two, protocol="two", runs=tuple(replace(r, protocol="two") for r in two.runs))
    judged = row(DIRECTION, [one, two])
    assert judged.best.pool.protocol == decides


def test_a_claim_that_our_designs_cannot_decide_says_so_below_the_papers_scale():
    claim = replace(DIRECTION, untestable="One expert knows it all.")
    assert judge(claim) == judge(claim, against("study", STUDY)) == "not testable here"
    assert judge(claim, against("paper", STUDY)) == "reproduced"
    assert chance([row(claim, [against("study", STUDY)])]).tested == ()


def test_the_sign_by_task_stands_beside_a_mean_and_what_is_computed_must_agree_on_all():
    tasks = {"x": (0.5, 0.4), "y": (0.3, 0.4), "z": (0.46, 0.4)}  # their mean: .42 against .4
    values = [Value(f"pesc/{arm}/{name}", score, "share") for task, pair in tasks.items()
              for arm, score in zip("ab", pair, strict=True)
              for name in (f"accuracy/{task}", f"{task}/other/accuracy")]  # fmt: skip
    for kept, good in ((values[::2], 2), (values[1::2], 2), (values[:4:2], 1), ([], 0)):
        runs = pool("study", *([accuracy("a", a), accuracy("b", 0.4), *kept] for a in STUDY))
        judged = row(DIRECTION, [runs])
        assert judged.label == "direction holds"
        count = len(kept) // 2
        said = [f"as claimed on {good} of {count} tasks"] * (count > 1)
        said += ["no longer so if x or z is left out"] * (count == 3)
        assert findings.notes(judged.best) == said
        computed = replace(DIRECTION, exact=True)
        assert judge(computed, runs) == ("inconclusive" if good < count else "direction holds")
    alike = [value for value in values if "/y" not in value.name]
    runs = pool("study", [accuracy("a", 0.42), accuracy("b", 0.4), *alike[::2]])
    assert judge(computed, runs) == "direction holds"


def test_without_three_seeds_of_both_arms_at_full_size_there_is_no_verdict():
    one, other = [accuracy("a", 0.4)], [accuracy("b", 0.3)]
    for pools in ([], [pool("study", one, one, one)], [pool("study", one, one, other)]):
        assert judge(DIRECTION, *pools) == "not run"
    for base, label in {"nano": "direction holds", "smollm2": "not run"}.items():
        assert judge(replace(DIRECTION, under={"base": base}), against("study", STUDY)) == label
    for score, so in ((0.45, "as claimed"), (0.3, "against the claim"), (0.4, "no difference")):
        judged = row(DIRECTION, [against("cpu", [score])])
        assert judged.label == "inconclusive" and findings.notes(judged.best) == [f"{so} so far"]
    assert judge(DIRECTION, against("cpu", STUDY)) == "inconclusive"
    assert judge(DIRECTION, against("study", [0.5, 0.5])) == "inconclusive", "two seeds"


@pytest.mark.parametrize("tier", TIERS)
def test_only_runs_of_the_papers_scale_within_tolerance_reproduce(tier):
    large = tier in ("study", "gpu", "paper")
    label = "direction holds" if large else "inconclusive" if tier == "cpu" else "not run"
    unprinted, far = replace(DIRECTION, claimed=None, tolerance=None), [0.5, 0.51, 0.52]
    assert judge(DIRECTION, against(tier, STUDY)) == ("reproduced" if tier == "paper" else label)
    assert judge(DIRECTION, against(tier, far)) == judge(unprinted, against(tier, STUDY)) == label


def test_the_highest_scale_that_may_decide_gives_the_verdict_and_its_unit_must_fit():
    other = against("study", [0.3, 0.31, 0.32], base="smollm2")
    pools = [against("gpu", [0.3]), other, against("study", STUDY), against("cpu", [0.3])]
    judged = row(DIRECTION, pools)
    assert [one.pool.protocol for one in judged.measurements] == ["cpu", "nano", "smollm2", "gpu"]
    assert judged.best is judged.measurements[2] and judged.label == "direction fails"
    assert judged.committed.measurements == judged.measurements[1:]
    values = [Value(name, 1.0, "ratio") for name in (DIRECTION.value, "pesc/b/accuracy")]
    with pytest.raises(Refusal, match=r"E-VERDICT: pesc/a/accuracy is recorded in ratio"):
        judge(DIRECTION, pool("study", values))
    assert judge(replace(DIRECTION, scales=("gpu", "paper")), against("study", STUDY)) == "not run"


def test_an_exact_value_needs_no_seeds_and_effects_are_written_in_the_claims_unit():
    assert judge(NUMBER, size("paper", 7.8e9)) == "reproduced"
    assert judge(NUMBER, size("smoke", 8e9)) == "direction holds"
    assert judge(NUMBER, size("cpu", 6.9e9)) == "direction fails"
    assert amount(DIRECTION, 0.021) == "+2.1 points"
    assert amount(replace(DIRECTION, reference=None), 0.421) == "42.1 %"
    assert amount(replace(DIRECTION, unit="percent_points"), -1.5) == "-1.5 points"
    assert amount(replace(DIRECTION, unit="nats"), -0.0321) == "-0.0321 nats"
    assert amount(NUMBER, 7.8e9) == "7,800,000,000"


def test_what_is_read_from_published_files_is_computed_and_needs_no_seeds():
    drawn = pool("paper", [accuracy("a", [0.4, 0.44]), accuracy("b", [0.4, 0.4])])
    read = replace(drawn.runs[0], manifest={"files": {"law": "0" * 64}})
    judged = row(DIRECTION, [replace(drawn, runs=(read,))])
    assert judged.label == "direction holds" and judged.best.exact  # not reproduced: nobody ran it
    trained = replace(read, rows={"train": "0" * 64})
    for other in (drawn.runs[0], trained):
        assert judge(DIRECTION, replace(drawn, runs=(other,))) == "inconclusive"


def at_p(p, name):
    """A claim that three seeds of a study test at this p-value, by Student's closed form."""
    t = (1 - p) * (2 / (p * (2 - p))) ** 0.5  # two degrees of freedom: p = 1 - t / (t² + 2)½
    effects = 0.001 * (t / 3**0.5 + np.array([-1, 0, 1]))
    assert stats.ttest_1samp(effects, 0).pvalue == pytest.approx(p)
    return row(replace(DIRECTION, id=name), [against("study", 0.4 + effects)])


@pytest.mark.parametrize(("p", "decided", "hochberg"), [
    # sorted, the limits are .05/m, 2 × .05/m, ..., .05
    ({"a": 0.2, "b": 0.001, "c": 0.016, "d": 0.03, "e": 0.012}, "bcde", "bcde"),
    ({"a": 0.04, "b": 0.001, "c": 0.022, "d": 0.2}, "abc", "bc"),  # a: above 3 × .05/4
    ({"a": 0.035, "b": 0.03, "c": 0.001, "d": 0.2}, "abc", "abc"),  # b: saved by a
    ({"a": 0.04, "b": 0.06}, "a", ""),
])  # fmt: skip
def test_the_correction_for_many_claims_is_that_worked_by_hand(p, decided, hochberg):
    by_chance = chance([at_p(each, name) for name, each in p.items()])
    assert by_chance.tested == tuple(p)
    surviving = (by_chance.decided, by_chance.hochberg)
    assert tuple(map("".join, surviving)) == (decided, hochberg)


def test_chance_is_asked_only_about_directions_that_seeds_of_deciding_runs_test():
    equal = row(replace(DIRECTION, id="equal", direction="equal"), [against("study", STUDY)])
    live, computed = row(DIRECTION, [against("cpu", STUDY)]), row(NUMBER, [size("study", 8e9)])
    rows = [live, row(DIRECTION, []), equal, computed]
    assert chance(rows) == verdicts.Chance((), (), ())
    same = row(DIRECTION, [against("study", [0.5] * 3)])  # differs without any spread
    assert chance([*rows, same]).hochberg == (DIRECTION.id,)


def test_the_ledger_reads_the_committed_and_the_live_runs_of_a_project(tmp_path):
    empty = verdicts.ledger(tmp_path)
    assert [one.claim.id for one in empty] == [claim.id for claim in papers.claims()]
    assert {one.label for one in empty} == {"not run", "not testable here"}
    folder, page = tmp_path / "results" / "pesc" / "nano", tmp_path / "book" / "notebooks"
    for seed in range(5):
        values = (accuracy("sparse", 0.5 + seed / 100), accuracy("dense", 0.4))
        write_run(folder / f"{seed}.parquet", Run("pesc", "nano", "study", seed, values))
    live = (accuracy("sparse", 0.5), accuracy("dense", 0.4))
    write_run(page / "01_pesc.parquet", Run("pesc", "cpu", "cpu", 0, live))

    def first(live=True):
        rows = verdicts.ledger(tmp_path, "pesc", live=live)
        return next(one for one in rows if one.claim.id == "pesc.sparse-beats-dense")

    assert first().label == "direction holds" and first().survives
    assert [measured.seeds for measured in first().measurements] == [1, 5]
    assert [measured.seeds for measured in first(live=False).measurements] == [5]
    (folder / "4.parquet").unlink()
    assert first().label == "direction holds" and not first().survives  # too few for the mark
    shutil.rmtree(folder)
    assert (first().label, first(live=False).label) == ("inconclusive", "not run")


def test_of_designs_at_one_scale_the_one_that_fewest_others_replace_decides(tmp_path):
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for protocol, arm in (("first", "sparse"), ("second", "sparse"), ("third", "wide")):
        folder = tmp_path / "results" / "pesc" / protocol
        for seed in range(3):
            values = (accuracy(arm, 0.5 + seed / 100), accuracy("dense", 0.4))
            write_run(folder / f"{seed}.parquet", Run("pesc", protocol, "study", seed, values))

    def best(**heads):
        for protocol, head in heads.items():
            path = tmp_path / "notebooks" / f"01_pesc.{protocol}.yaml"
            path.write_text(f"# {head}\ntier: study\n")
        rows = verdicts.ledger(tmp_path, "pesc")
        return next(one for one in rows if one.claim.id == "pesc.sparse-beats-dense").best

    heads = {"first": "Replaces: second", "second": "A design.", "third": "Another."}
    assert best(**heads).pool.protocol == "first"
    heads = {"first": "A design.", "second": "Replaces: first", "third": "Replaces: first, second"}
    assert best(**heads).pool.protocol == "second"
