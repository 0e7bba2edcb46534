"""Verdicts: what may be said from which pool, and that every change of a value shows."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from moebook.errors import Refusal
from moebook.lab import papers
from moebook.lab.evidence import findings, verdicts
from moebook.lab.evidence.verdicts import amount, chance, row
from moebook.lab.records import TIERS, Run, Value, write_run
from moebook.lab.records.store import LIVE, Pool
from moebook.lab.run import sources
from tests.refusals import refused

DIRECTION = replace(
    papers.claim("pesc.sparse-beats-dense"),
    id="pesc.test",
    claimed=0.02,
    tolerance=0.01,
    scales=("cpu", "study", "gpu", "paper"),
    value="pesc/a/accuracy",
    reference="pesc/b/accuracy",
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
ROOT = Path(__file__).parents[3]
STUDY = (0.42, 0.425, 0.415)
LOWER = (0.38, 0.375, 0.385)
MIXED = (0.42, 0.37, 0.41)


def accuracy(name, items):
    several = tuple(items) if isinstance(items, Sequence) else None
    return Value(f"pesc/{name}/accuracy", float(np.mean(items)), "share", several)


def pool(tier, *seeds, base="nano"):
    """A pool with these values, seed by seed; a study's protocol is called like its base."""
    name = base if tier == "study" else tier
    design = {"base": base}
    runs = (
        Run("pesc", name, tier, n, tuple(v), settings=design)
        for n, v in enumerate(seeds)
    )
    return Pool("pesc", name, tuple(runs))


def against(tier, a, b=0.4, base="nano"):
    """A pool in which A has these accuracies, seed by seed, and B always the same."""
    return pool(
        tier, *([accuracy("a", score), accuracy("b", b)] for score in a), base=base
    )


def size(tier, count):
    return pool(tier, [Value("pesc/size", count, "count")])


def decided(claim, *pools):
    """The claim's row where every one of these pools decides at its scale."""
    return row(claim, pools, {pool.protocol: () for pool in pools})


def judge(claim, *pools):
    """The label of the largest scale."""
    return decided(claim, *pools).labels[-1]


def test_a_study_whose_interval_excludes_zero_says_that_the_direction_holds():
    (judged,) = decided(DIRECTION, against("study", STUDY)).verdicts
    best = judged.deciding
    assert (best.seeds, best.pool.protocol) == (3, "nano")
    half = 4.302653 * 0.005 / 3**0.5  # Student's quantile at two degrees of freedom
    measured = (best.effect, *best.interval, best.smallest)
    assert measured == pytest.approx((0.02, 0.02 - half, 0.02 + half, half), rel=1e-6)
    assert judged.label == "direction holds"


@pytest.mark.parametrize(
    ("scores", "direction", "label"),
    [
        (STUDY, "greater", "holds"),
        (LOWER, "greater", "fails"),
        (MIXED, "greater", "inconclusive"),
        (STUDY, "less", "fails"),
        (LOWER, "less", "holds"),
        (MIXED, "less", "inconclusive"),
        # More than .4 by rounding alone.
        ((0.1 + 0.2 + 0.1, 0.4, 0.4), "greater", "inconclusive"),
        ((0.401, 0.402, 0.399), "equal", "holds"),  # within .01
        ((0.45, 0.46, 0.44), "equal", "fails"),
        ((0.35, 0.36, 0.34), "equal", "fails"),
        ((0.401, 0.42, 0.405), "equal", "inconclusive"),
    ],
)
def test_the_label_follows_the_recorded_values(scores, direction, label):
    claim = replace(DIRECTION, direction=direction, claimed=None)
    judged = judge(claim, against("study", scores))
    assert judged.removeprefix("direction ") == label
    number = replace(claim, reference=0.4)  # subtracted as B's accuracy is
    assert judge(number, against("study", scores, b=0.9)) == judged


@pytest.mark.parametrize(
    ("scores", "claimed", "label"),
    [
        # Student's half width of 4.303 s / 3½ is 2.48 points for s = 1, around a mean of 1 point
        # In -1.48 to 3.48, below 2.48.
        ((0.40, 0.41, 0.42), 0.02, "too small to see here"),
        # In the interval, and large enough to be seen.
        ((0.40, 0.41, 0.42), 0.03, "inconclusive"),
        ((0.40, 0.41, 0.42), 0.04, "excludes the paper's size"),
        ((0.40, 0.40, 0.40), 0.04, "inconclusive"),  # nothing differs
        ((0.40, 0.41, 0.42), None, "inconclusive"),
        ((0.42, 0.43, 0.44), 0.04, "direction holds"),  # 0.52 to 5.48
    ],
)
@pytest.mark.parametrize("turn", [1, -1])
def test_across_the_border_the_papers_size_decides_what_is_said(
    scores, claimed, label, turn
):
    claim = replace(
        DIRECTION,
        direction="greater" if turn > 0 else "less",
        claimed=claimed and turn * claimed,
    )
    pool = against("study", [0.4 + turn * (score - 0.4) for score in scores])
    (judged,) = decided(claim, pool).verdicts
    best = judged.deciding
    assert judged.label == label
    undecided = not best.side and best.smallest > 0
    visible = "these runs could have seen 2.5 points or more"
    assert (visible in findings.notes(best)) == undecided


def named(protocol, pool):
    """The same pool under another protocol."""
    runs = tuple(replace(run, protocol=protocol) for run in pool.runs)
    return replace(pool, protocol=protocol, runs=runs)


def test_seeds_of_pools_that_asked_other_numbers_of_items_keep_the_spread_over_items():
    rng = np.random.default_rng(0)
    pools = [against("study", MIXED), named("two", against("study", LOWER))]
    (judged,) = row(DIRECTION, pools, {"nano": ()}).verdicts
    hard = np.tile(rng.normal(size=(1, 100)), 4)  # by item, of any hundred alike
    seeds = rng.normal(0.1, 0.01, size=(8, 1))
    shown = replace(judged.deciding, effects=seeds[:5] + hard)
    (other,) = judged.exploratory

    def together(items):
        some = replace(other, effects=seeds[5:] + hard[:, :items])
        return replace(judged, deciding=shown, exploratory=(some,)).together

    fewer, as_many = together(100), together(400)
    assert fewer.effect == pytest.approx(as_many.effect)
    assert fewer.interval == pytest.approx(as_many.interval)


def test_each_scale_has_a_verdict_of_its_own_and_none_overrules_another():
    pools = [
        against("study", STUDY, base="nano"),
        against("study", LOWER, base="smollm2"),
    ]
    judged = decided(DIRECTION, *reversed(pools))
    assert [one.scale for one in judged.verdicts] == ["1 M", "135 M"]
    assert judged.labels == ("direction holds", "direction fails")
    assert judged.at("1 M").deciding.pool is pools[0]
    assert judged.at("11 M") is None


@pytest.mark.parametrize("others", [STUDY, LOWER, (*STUDY, *STUDY)])
def test_only_the_pool_that_a_head_names_decides_whatever_the_others_say(others):
    pools = [against("study", MIXED), named("two", against("study", others))]
    (judged,) = row(DIRECTION, pools, {"nano": ()}).verdicts
    assert judged.label == "too small to see here"
    assert judged.deciding.pool.protocol == "nano"
    assert [one.pool.protocol for one in judged.exploratory] == ["two"]
    assert judged.together.seeds == 3 + len(others)
    assert judged.together.effect == pytest.approx(np.mean([*MIXED, *others]) - 0.4)
    (judged,) = row(DIRECTION, pools).verdicts
    assert judged.label == "exploratory"
    assert judged.deciding is None
    assert row(DIRECTION, pools).decided == ()
    with pytest.raises(
        Refusal, match=r"E-CONFIG: pesc\.test: nano and two both decide it at 1 M"
    ):
        row(DIRECTION, pools, {"nano": (), "two": ()})


def test_arms_that_ran_fewer_seeds_than_their_head_plans_decide_nothing_yet():
    """Else one could stop an arm where its result looks good, while others run on."""
    some = [[accuracy("a", score), accuracy("b", 0.4)] for score in STUDY]
    every = pool("study", *some, [accuracy("b", 0.4)])
    for planned, label in (
        ((), "direction holds"),
        (range(3), "direction holds"),
        (range(4), "exploratory"),
    ):
        assert row(DIRECTION, [every], {"nano": planned}).labels == (label,)


def test_seeds_that_no_head_planned_do_not_count_in_a_verdict():
    """Else one could add seeds to an arm where its result nearly looks good."""
    scores = [*STUDY, 0.2]  # the last of which turns the verdict
    every = pool("study", *([accuracy("a", s), accuracy("b", 0.4)] for s in scores))
    (judged,) = row(DIRECTION, [every], {"nano": range(3)}).verdicts
    assert judged.label == "direction holds"
    assert judged.deciding.seeds == 3
    assert row(DIRECTION, [every], {"nano": ()}).labels != ("direction holds",)


def test_nothing_is_measured_of_arms_that_still_run():
    """Whether their pool decides the claim or not: nobody looks before all seeds are there."""
    seeds = [[accuracy("a", score), accuracy("b", 0.4)] for score in STUDY]
    runs = pool("study", *seeds, [accuracy("b", 0.4)]).runs
    arms = [("a", "b")] * 3 + [("b",)]
    runs = tuple(replace(run, arms=a) for run, a in zip(runs, arms, strict=True))
    every = Pool("pesc", "nano", runs)
    assert row(DIRECTION, [every], {}, {"nano": range(4)}).verdicts == ()
    assert (
        row(DIRECTION, [every], {"nano": range(4)}, {"nano": range(4)}).verdicts == ()
    )
    for planned in ((), range(3)):
        (judged,) = row(DIRECTION, [every], {}, {"nano": planned}).verdicts
        assert judged.shown.seeds == 3
    # A claim of the arm that has run with all of them is measured.
    alone = replace(DIRECTION, value="pesc/b/accuracy", reference=0.1)
    assert row(alone, [every], {}, {"nano": range(4)}).verdicts


def test_what_a_claim_presupposes_is_frozen_with_it():
    presupposing = replace(DIRECTION, presupposes=("pesc/b/nll", "pesc/c/nll"))
    assert presupposing.frozen != DIRECTION.frozen
    other = replace(DIRECTION, presupposes=("pesc/b/nll", "pesc/d/nll"))
    assert other.frozen != presupposing.frozen


def test_no_committed_verdict_rests_on_fewer_seeds_than_were_planned(ledger):
    deciders = sources.deciders(ROOT)
    for judged in ledger:
        for verdict in judged.decided:
            measured = verdict.deciding
            planned = deciders.get(judged.claim.id, {}).get(measured.pool.protocol, ())
            assert measured.pool.having(*judged.claim.values) >= {*planned}
            if planned:
                assert {*measured.pool.seeds} == {*planned}
    crsu = deciders["router_init.consistency-8"]["crsu"]
    assert crsu == {*range(10, 18)}


def test_where_items_are_no_test_rows_the_page_names_the_verdicts_that_hang_on_them(
    ledger,
):
    """What `how_to_read` says of intervals over seeds alone, from the committed runs."""
    otherwise = {}
    for judged in ledger:
        for verdict in judged.decided:
            measured = verdict.deciding
            timed = judged.claim.value.endswith("/step_time")
            of_rows = measured.pool.notebook != "routing" and not timed
            if of_rows or measured.interval is None:
                continue
            by_seed = measured.effects.mean(axis=1, keepdims=True)
            label = replace(measured, effects=by_seed).label
            if label != measured.label:
                otherwise[judged.claim.id, verdict.spoken] = label
    assert otherwise == {
        ("esft.routing-is-concentrated", "3 M"): "direction holds",
        ("esft.middle-layers-need-fewer-experts", "3 M"): "direction fails",
        ("pesc.costs-more-than-dense", "135 M"): "direction holds",
    }


def test_a_claim_says_nothing_where_what_it_presupposes_is_not_shown():
    claim = replace(DIRECTION, presupposes=("pesc/b/accuracy", "pesc/c/accuracy"))
    for third, label in (
        ((0.3, 0.31, 0.32), "direction holds"),
        ((0.4, 0.39, 0.41), "not testable here"),
        ((0.5, 0.51, 0.52), "not testable here"),
    ):
        seeds = []
        for a, c in zip(STUDY, third, strict=True):
            seeds.append([accuracy("a", a), accuracy("b", 0.4), accuracy("c", c)])
        (verdict,) = decided(claim, pool("study", *seeds)).verdicts
        assert verdict.label == label
        named = "pesc/b/accuracy lies above pesc/c/accuracy" in findings.told(verdict)
        assert named == (label == "not testable here")


def test_what_is_computed_but_differs_between_seeds_is_not_decided_by_the_first():
    one_sided = pool("study", *([Value("pesc/size", n, "count")] for n in (8e9, 8e9)))
    both = pool("study", *([Value("pesc/size", n, "count")] for n in (8e9, 1e9)))
    assert judge(NUMBER, one_sided) == "direction holds"
    assert judge(NUMBER, both) == "inconclusive"


def test_what_is_computed_needs_no_decider_and_all_pools_of_a_scale_must_agree():
    pools = [size("study", 8e9), named("two", size("study", 7.9e9))]
    assert row(NUMBER, pools).labels == ("direction holds",)
    pools[0] = size("study", 1e9)
    assert row(NUMBER, pools).labels == ("inconclusive",)


def test_a_claim_that_our_designs_cannot_decide_says_so_below_the_papers_scale():
    claim = replace(DIRECTION, untestable="One expert knows it all.")
    assert judge(claim) == judge(claim, against("study", STUDY)) == "not testable here"
    assert judge(claim, against("paper", STUDY)) == "reproduced"
    assert chance([decided(claim, against("study", STUDY))]).tested == ()


def nats(name, *items):
    return Value(f"pesc/{name}", float(np.mean(items)), "nats", items)


HALF = replace(
    DIRECTION,
    direction="less",
    claimed=None,
    unit="nats",
    value="pesc/a/nll",
    reference=("pesc/b/nll", "pesc/c/nll"),
)


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (1.0, "direction holds"),
        (1.4, "direction holds"),  # the middle of 2 and 1 is 1.5
        (1.6, "direction fails"),
        (2.0, "direction fails"),
    ],
)
def test_a_claim_may_ask_for_more_than_half_of_a_lead(loss, label):
    assert HALF.values == ("pesc/a/nll", "pesc/b/nll", "pesc/c/nll")
    seeds = [
        [nats("a/nll", loss + spread), nats("b/nll", 2.0), nats("c/nll", 1.0)]
        for spread in (-0.01, 0.0, 0.01)
    ]
    assert judge(HALF, pool("study", *seeds)) == label
    without_c = [values[:2] for values in seeds]
    assert judge(HALF, pool("study", *without_c)) == "not run"


def test_the_middle_of_two_arms_is_paired_by_item_and_by_task():
    by_item = pool(
        "study", [nats("a/nll", 1, 3), nats("b/nll", 2, 4), nats("c/nll", 1, 1)]
    )
    assert by_item.effects("pesc/a/nll", HALF.reference).tolist() == [[-0.5, 0.5]]
    other = pool("study", [nats("a/nll", 1, 3), nats("b/nll", 2, 4), nats("c/nll", 1)])
    assert other.effects("pesc/a/nll", HALF.reference).tolist() == [
        [0.0]
    ]  # their means
    values = []
    for arm, loss in (("a", 1), ("b", 2), ("c", 3)):
        values += [nats(f"{arm}/nll/{task}", loss) for task in "xy"]
    parts = pool("study", values).parts("pesc/a/nll", HALF.reference)
    assert {task: part.tolist() for task, part in parts.items()} == {
        "x": [[-1.5]],
        "y": [[-1.5]],
    }


@pytest.mark.parametrize(
    ("share", "label"), [(0.3, "direction holds"), (0.1, "not run"), (0.5, "not run")]
)
def test_a_claim_about_sizes_counts_runs_whose_arms_have_them_and_says_both(
    share, label
):
    sized = replace(
        DIRECTION, sizes=("pesc/a/trained", "pesc/b/trained"), times=(20, 40)
    )
    trained = [
        ("a/x", share - 0.1),
        ("a/y", share + 0.1),
        ("b", 0.01),
    ]  # by task: their mean
    sizes = [Value(f"pesc/{arm}/trained", size, "ratio") for arm, size in trained]
    scores = [[accuracy("a", a), accuracy("b", 0.4), *sizes] for a in STUDY]
    assert judge(sized, pool("study", *scores)) == label
    assert sized.frozen != replace(sized, times=(1, 40)).frozen != DIRECTION.frozen
    beside = replace(sized, times=None)
    assert beside.frozen == DIRECTION.frozen  # sizes alone change no verdict
    (verdict,) = decided(beside, pool("study", *scores)).verdicts
    assert f"trained weights: a {share:.2%}, b 1.00%" in findings.notes(
        verdict.deciding
    )


def test_the_sign_by_task_stands_beside_a_mean_and_what_is_computed_must_agree_on_all():
    tasks = {
        "x": (0.5, 0.4),
        "y": (0.3, 0.4),
        "z": (0.46, 0.4),
    }  # their mean: .42 against .4
    values = []
    for task, pair in tasks.items():
        for arm, score in zip("ab", pair, strict=True):
            values.append(Value(f"pesc/{arm}/accuracy/{task}", score, "share"))
            values.append(Value(f"pesc/{arm}/{task}/other/accuracy", score, "share"))
    for kept, good in ((values[::2], 2), (values[1::2], 2), (values[:4:2], 1), ([], 0)):
        runs = pool(
            "study", *([accuracy("a", a), accuracy("b", 0.4), *kept] for a in STUDY)
        )
        (judged,) = decided(DIRECTION, runs).verdicts
        assert judged.label == "direction holds"
        count = len(kept) // 2
        said = []
        if count > 1:
            said.append(f"{good} of {count} tasks point the claimed way")
        if count == 3:
            said.append("without any one of x, z the verdict would be another")
        assert findings.notes(judged.deciding) == said
        computed = replace(DIRECTION, exact=True)
        assert judge(computed, runs) == (
            "inconclusive" if good < count else "direction holds"
        )
    alike = [value for value in values if "/y" not in value.name]
    runs = pool("study", [accuracy("a", 0.42), accuracy("b", 0.4), *alike[::2]])
    assert judge(computed, runs) == "direction holds"


def test_without_three_seeds_of_both_arms_at_full_size_there_is_no_verdict():
    one = [accuracy("a", 0.4)]
    other = [accuracy("b", 0.3)]
    for pools in ([], [pool("study", one, one, one)], [pool("study", one, one, other)]):
        assert judge(DIRECTION, *pools) == "not run"
    for base, label in {"nano": "direction holds", "smollm2": "not run"}.items():
        assert (
            judge(replace(DIRECTION, under={"base": base}), against("study", STUDY))
            == label
        )
    for score, so in (
        (0.45, "as claimed"),
        (0.3, "against the claim"),
        (0.4, "no difference"),
    ):
        (judged,) = decided(DIRECTION, against("cpu", [score])).verdicts
        assert judged.label == "inconclusive"
        assert findings.notes(judged.deciding) == [f"{so} so far"]
    assert judge(DIRECTION, against("cpu", STUDY)) == "inconclusive"
    assert judge(DIRECTION, against("study", [0.5, 0.5])) == "inconclusive", "two seeds"


@pytest.mark.parametrize("tier", TIERS)
def test_only_runs_of_the_papers_scale_within_tolerance_reproduce(tier):
    label = {"smoke": "not run", "cpu": "inconclusive"}.get(tier, "direction holds")
    unprinted = replace(DIRECTION, claimed=None, tolerance=None)
    far = [0.428, 0.433, 0.438]
    assert judge(DIRECTION, against(tier, STUDY)) == (
        "reproduced" if tier == "paper" else label
    )
    assert (
        judge(DIRECTION, against(tier, far))
        == judge(unprinted, against(tier, STUDY))
        == label
    )


def test_a_value_in_another_unit_or_at_a_scale_that_the_claim_does_not_name_is_no_evidence():
    values = [
        Value(name, 1.0, "ratio") for name in (DIRECTION.value, "pesc/b/accuracy")
    ]
    with pytest.raises(
        Refusal, match=r"E-VERDICT: pesc/a/accuracy is recorded in ratio"
    ):
        judge(DIRECTION, pool("study", values))
    assert (
        judge(replace(DIRECTION, scales=("gpu", "paper")), against("study", STUDY))
        == "not run"
    )


def test_an_exact_value_needs_no_seeds_and_effects_are_written_in_the_claims_unit():
    assert judge(NUMBER, size("paper", 7.5e9)) == "reproduced"
    assert judge(NUMBER, size("smoke", 8e9)) == "direction holds"
    for tier, count in (("paper", 7.49e9), ("paper", 8.51e9), ("cpu", 7.4e9)):
        assert judge(NUMBER, size(tier, count)) == "direction fails"
    assert amount(DIRECTION, 0.021) == "+2.1 points"
    assert amount(replace(DIRECTION, reference=None), 0.421) == "42.1 %"
    assert amount(replace(DIRECTION, unit="percent_points"), -1.5) == "−1.5 points"
    assert amount(replace(DIRECTION, unit="nats"), -0.0321) == "−0.0321 nats"
    assert amount(NUMBER, 7.8e9) == "7,800,000,000"
    # What rounds to zero has no sign.
    assert amount(DIRECTION, -0.0004) == amount(DIRECTION, 0.0004) == "0.0 points"
    assert amount(replace(DIRECTION, unit="nats"), -0.0004) == "−0.0004 nats"


def test_a_computed_value_is_decided_by_committed_runs_and_else_by_the_pages():
    committed = pool("study", [Value("pesc/size", 8e9, "count")])
    on_page = size("cpu", 6.9e9).runs[0]
    later = {"date": "2999-01-01T00:00:00+00:00"}
    on_page = replace(on_page, settings={"base": "nano"}, manifest=later)
    shown = Pool("pesc", LIVE, (on_page,))
    (judged,) = row(NUMBER, [shown, committed]).verdicts
    assert judged.deciding.pool == committed
    assert judged.label == "direction holds"
    (alone,) = row(NUMBER, [shown]).verdicts
    assert alone.label == "direction fails"


def test_what_is_read_from_published_files_is_computed_and_needs_no_seeds():
    drawn = pool("paper", [accuracy("a", [0.4, 0.44]), accuracy("b", [0.4, 0.4])])
    read = replace(drawn.runs[0], manifest={"files": {"law": "0" * 64}})
    (judged,) = row(DIRECTION, [replace(drawn, runs=(read,))]).verdicts
    assert judged.label == "direction holds"
    assert judged.deciding.exact  # nobody ran it here
    assert judged.scale == "the authors' data"
    trained = replace(read, rows={"train": "0" * 64})
    for other in (drawn.runs[0], trained):
        assert judge(DIRECTION, replace(drawn, runs=(other,))) == "inconclusive"
        both = replace(drawn, runs=(read, replace(other, seed=1)))
        assert judge(DIRECTION, both) == "inconclusive"


def at_p(p, name):
    """A claim that three seeds of a study test at this p-value, by Student's closed form."""
    t = (1 - p) * (
        2 / (p * (2 - p))
    ) ** 0.5  # two degrees of freedom: p = 1 - t / (t² + 2)½
    effects = 0.001 * (t / 3**0.5 + np.array([-1, 0, 1]))
    assert stats.ttest_1samp(effects, 0).pvalue == pytest.approx(p)
    return decided(replace(DIRECTION, id=name), against("study", 0.4 + effects))


@pytest.mark.parametrize(
    ("p", "decides", "hochberg"),
    [
        # sorted, the limits are .05/m, 2 × .05/m, ..., .05
        ({"a": 0.2, "b": 0.001, "c": 0.016, "d": 0.03, "e": 0.012}, "bcde", "bcde"),
        # a lies above 3 × .05/4.
        ({"a": 0.04, "b": 0.001, "c": 0.022, "d": 0.2}, "abc", "bc"),
        # b is saved by a.
        ({"a": 0.035, "b": 0.03, "c": 0.001, "d": 0.2}, "abc", "abc"),
        ({"a": 0.04, "b": 0.06}, "a", ""),
    ],
)
def test_the_correction_for_many_claims_is_that_worked_by_hand(p, decides, hochberg):
    by_chance = chance([at_p(each, name) for name, each in p.items()])
    assert by_chance.tested == tuple((name, "1 M") for name in p)
    surviving = (by_chance.decided, by_chance.hochberg)
    assert tuple("".join(one.claim for one in few) for few in surviving) == (
        decides,
        hochberg,
    )


def test_chance_is_asked_only_about_directions_that_seeds_of_deciding_runs_test():
    equal = decided(
        replace(DIRECTION, id="equal", direction="equal"), against("study", STUDY)
    )
    live = decided(DIRECTION, against("cpu", STUDY))
    computed = row(NUMBER, [size("study", 8e9)])
    explored = row(DIRECTION, [against("study", STUDY)])
    rows = [live, row(DIRECTION, []), equal, computed, explored]
    assert chance(rows) == verdicts.Chance((), (), ())
    same = decided(DIRECTION, against("study", [0.5] * 3))  # differs without any spread
    assert chance([*rows, same]).hochberg == ((DIRECTION.id, "1 M"),)


MAIN = "pesc.sparse-beats-dense"


@pytest.fixture
def project(tmp_path):
    """A copy of the notebooks without protocols of PESC, beside five runs of one called main."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for path in (tmp_path / "notebooks").glob("*.yaml"):
        path.unlink()
    head(tmp_path, "main", MAIN)
    committed(tmp_path, "main", *(0.5 + seed / 100 for seed in range(5)))
    return tmp_path


def head(folder, protocol, *decides, base="nano"):
    """Write a protocol of PESC that decides these claims."""
    path = folder / "notebooks" / f"01_pesc.{protocol}.yaml"
    path.write_text(f"# Decides: {', '.join(decides)}\ntier: study\nbase: {base}\n")


def committed(folder, protocol, *scores, **manifest):
    """Commit runs in which sparse has these accuracies, and dense always the same."""
    for seed, score in enumerate(scores):
        values = (accuracy("sparse", score), accuracy("dense", 0.4))
        run = Run(
            "pesc",
            protocol,
            "study",
            seed,
            values,
            manifest=manifest,
            settings={"base": "nano"},
        )
        write_run(folder / "results" / "pesc" / protocol / f"{seed}.parquet", run)


def main_claim(folder, live=True):
    rows = verdicts.ledger(folder, live=live)
    return next(one for one in rows if one.claim.id == MAIN)


def test_the_ledger_reads_the_committed_and_the_live_runs_of_a_project(
    tmp_path, project
):
    rows = verdicts.ledger(project)
    assert [one.claim.id for one in rows] == [claim.id for claim in papers.claims()]
    live = (accuracy("sparse", 0.5), accuracy("dense", 0.4))
    page = project / "book" / "notebooks" / "01_pesc.parquet"
    write_run(page, Run("pesc", "cpu", "cpu", 0, live, settings={"base": "nano"}))
    (verdict,) = main_claim(project).verdicts
    assert verdict.label == "direction holds"
    assert verdict.survives
    assert [one.seeds for one in (verdict.deciding, *verdict.exploratory)] == [5, 1]
    assert verdict.together is None  # a live run is no study
    assert not main_claim(project, live=False).verdicts[0].exploratory
    (project / "results" / "pesc" / "main" / "4.parquet").unlink()
    (verdict,) = main_claim(project).verdicts
    assert verdict.label == "direction holds"
    assert not verdict.survives  # too few for the mark
    shutil.rmtree(project / "results")
    assert main_claim(project).labels == ("exploratory",)
    assert main_claim(project, live=False).labels == ("not run",)


def test_no_two_protocols_of_one_scale_decide_a_claim_and_no_other_notebooks_claims(
    project,
):
    head(project, "other", MAIN, base="smollm2")  # of another scale
    assert main_claim(project).labels == ("direction holds",)
    head(project, "other", MAIN)
    refused(
        r"E-CONFIG: .*other.yaml and .*main.yaml both decide pesc", main_claim, project
    )
    head(project, "other", "pesc.sparse-beats-dens")
    refused(
        r"E-CONFIG: .*other.yaml decides 'pesc.sparse-beats-dens'.*-dense",
        main_claim,
        project,
    )
    head(project, "other", "esft.gate-beats-lora")
    refused(r"E-CONFIG: .*other.yaml decides esft.gate-beats-lora", main_claim, project)


def test_a_study_decides_nothing_while_seeds_that_its_head_plans_are_to_run(project):
    path = project / "notebooks" / "01_pesc.main.yaml"
    decides = path.read_text()
    for seeds, label in (("0-4", "direction holds"), ("0-5", "not run")):
        path.write_text(f"# Seeds: {seeds}\n{decides}")
        assert main_claim(project).labels == (label,)
    path.write_text(f"# Seeds: 0-5\n# Stopped: no disk was left\n{decides}")
    assert main_claim(project).labels == ("direction holds",)
    path.write_text(f"# Seeds: five\n{decides}")
    refused("E-RANGE: 01_pesc.main.yaml: Seeds five: 'five'", main_claim, project)


@pytest.mark.parametrize(
    "change",
    [
        {"claimed": 0.5},
        {"direction": "less"},
        {"reference": "pesc/a"},
        {"under": {"steps": 1}},
        {"tolerance": 0.3},
        {"value": "pesc/b/accuracy"},
        {"unit": "ratio"},
        {"scales": ("paper",)},
    ],
)
def test_a_claim_that_was_changed_after_a_run_that_decides_it_is_refused(
    project, change
):
    claim = papers.claim(MAIN)
    then = replace(claim, **change)
    assert then.frozen != claim.frozen == replace(claim, why="Other words.").frozen
    committed(
        project, "main", 0.5, 0.51, 0.52, claims={MAIN: claim.frozen, "pesc.gone": "0"}
    )
    assert main_claim(project).labels == ("direction holds",)
    committed(project, "main", 0.5, claims={MAIN: then.frozen})
    refused(
        r"E-CLAIM: pesc.sparse-beats-dense was changed after seed 0 of pesc/main",
        main_claim,
        project,
    )
    committed(project, "other", 0.5, claims={MAIN: then.frozen})
    committed(project, "main", 0.5)
    assert main_claim(project).verdicts[0].exploratory  # which decides nothing


def test_a_verdict_says_when_its_claim_was_written_after_the_first_of_its_runs(project):
    claim = papers.claim(MAIN)
    assert claim.since is not None
    assert replace(claim, claimed=0.5).since is None
    for date, late in (
        ("2026-01-01T00:00:00+00:00", True),
        ("2027-01-01T00:00:00+00:00", False),
    ):
        committed(project, "main", 0.5, 0.51, 0.52, 0.53, 0.54, date=date)
        (verdict,) = main_claim(project).verdicts
        assert verdict.late == late
        assert ("written after these runs" in findings.told(verdict)) == late
    for known, late in (({}, True), ({MAIN: claim.frozen}, False)):
        committed(
            project,
            "main",
            0.5,
            0.51,
            0.52,
            date="2027-01-01T00:00:00+00:00",
            claims=known,
        )
        # A run lists the claims of its time.
        assert main_claim(project).verdicts[0].late == late
    counted = size("study", 8e9)
    dated = replace(counted.runs[0], manifest={"claims": {}})
    (computed,) = decided(NUMBER, replace(counted, runs=(dated,))).verdicts
    assert computed.late  # what is computed is known as early as what is sampled
