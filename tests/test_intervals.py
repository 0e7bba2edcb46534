"""Intervals cover what they say and agree with p; committed runs are what they were."""

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from moebook.intervals import combined, half_width, interval, p_value, sees, visible
from moebook.lab.records import store
from moebook.lab.run.verifying import verify

ROOT = Path(__file__).parents[1]
DRAWS = 200_000  # the error of a coverage near 95 % is then 0.05 points
FEWER = 20_000  # of the same draws, which show what cases may be the worst
SHARE = 0.1  # of the cases, which get all draws

SPREADS = [
    (1, 0, 0),
    (0, 1, 0),
    (0, 0, 1),
    (1, 1, 0),
    (1, 1, 1),
    (1, 3, 0),
    (1, 10, 0),
    (1, 14, 1),
    (1, 30, 1),
    (1, 0, 1),
    (0, 1, 1),
    (0.1, 1, 1),
    (1, 1, 10),
    (0.02, 0.3, 0.3),
    (1e-3, 1, 0),
]
"""Between seeds, between items, and of what belongs to neither."""
GRID = [(*spread, items) for spread, items in product(SPREADS, (2, 40, 200))]


@cache
def _normals() -> np.ndarray:
    """Draw grand means in units of their spread, alike for every case."""
    return np.random.default_rng(0).normal(size=DRAWS)


@cache
def _squares(degrees: int, place: int) -> np.ndarray:
    """Draw chi-squares over their degrees; each place has its own."""
    return np.random.default_rng([degrees, place]).chisquare(degrees, DRAWS) / degrees


def coverage(
    spreads: tuple[float, float, float], items: int, seeds: int, draws: int = DRAWS
) -> float:
    """How often the interval of a balanced crossed design covers its true mean of zero.

    Drawn are the grand mean (normal) and the two variances between means (chi-squares).
    """
    between_seeds, between_items, rest = np.square(spreads)
    seed_variance = between_seeds + rest / items
    item_variance = between_items + rest / seeds
    mean_variance = seed_variance / seeds + between_items / items

    variances = [seed_variance * _squares(seeds - 1, 0)[:draws]]
    counts = [seeds]
    if items > 1:
        variances.append(item_variance * _squares(items - 1, 1)[:draws])
        counts.append(items)
    halves = combined(variances, counts, 0.05)
    return float(np.mean(np.abs(np.sqrt(mean_variance) * _normals()[:draws]) <= halves))


def spreads(effects: np.ndarray) -> tuple[float, float, float]:
    """Estimate spreads between seeds, items and of the rest: two-way random effects."""
    seeds, items = effects.shape
    seed_means = effects.mean(axis=1, keepdims=True)
    item_means = effects.mean(axis=0, keepdims=True)
    if items == 1:
        return float(seed_means.std(ddof=1)), 0.0, 0.0
    residuals = effects - seed_means - item_means + effects.mean()
    rest = (residuals**2).sum() / ((seeds - 1) * (items - 1))
    between_seeds = max(0.0, float(seed_means.var(ddof=1)) - rest / items)
    between_items = max(0.0, float(item_means.var(ddof=1)) - rest / seeds)
    return between_seeds**0.5, between_items**0.5, float(rest) ** 0.5


@pytest.fixture(scope="module")
def cases(ledger: Any) -> dict[tuple[float, float, float, int], str]:
    """Spreads and number of items of a grid, and of the claims in committed pools."""
    committed = {}
    for row in ledger:
        for measurement in row.measurements:
            claim = measurement.claim
            effects = measurement.effects
            if claim.exact or measurement.seeds == 1 or np.ptp(effects) == 0:
                continue
            case = (*spreads(effects), effects.shape[1])
            committed[case] = f"{claim.id} at {measurement.pool.protocol}"
    assert len(committed) > 20
    return dict.fromkeys(GRID, "the grid") | committed


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_covers_the_mean_whatever_differs_more_seeds_or_items(
    cases, seeds
):
    screened = sorted(cases, key=lambda case: coverage(case[:3], case[3], seeds, FEWER))
    likely = screened[: round(SHARE * len(cases))]
    covered = {case: coverage(case[:3], case[3], seeds) for case in likely}
    case = min(covered, key=covered.get)
    worst = covered[case]
    assert worst >= 0.945, f"{worst:.4f} of {seeds} seeds: {cases[case]} {case}"
    # Of seeds alone the interval is Student's, which is exact.
    assert coverage((1, 0, 0), 1, seeds) == pytest.approx(0.95, abs=0.0025)


def test_sufficient_statistics_cover_as_often_as_effects_that_are_drawn_one_by_one():
    rng = np.random.default_rng(1)

    def draw(spreads: tuple[float, float, float], seeds: int, items: int) -> np.ndarray:
        between_seeds, between_items, rest = spreads
        of_seeds = rng.normal(0, between_seeds, (seeds, 1))
        of_items = rng.normal(0, between_items, (1, items))
        return of_seeds + of_items + rng.normal(0, rest, (seeds, items))

    case = (1.0, 3.0, 1.0)
    inside = 0
    for _ in range(4000):
        low, high = interval(draw(case, 3, 40))
        inside += low <= 0 <= high
    # Of 4000 studies the error is 0.3 points.
    assert inside / 4000 == pytest.approx(coverage(case, 40, 3), abs=0.005)
    assert spreads(draw((2, 0.5, 1), 400, 300)) == pytest.approx((2, 0.5, 1), rel=0.1)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("shape", [(2, 2), (3, 40), (10, 7)])
def test_the_interval_is_never_narrower_than_students_over_the_seeds_alone(
    shape, spread
):
    rng = np.random.default_rng(3)
    effects = rng.normal(0.3, 1, (shape[0], 1)) + rng.normal(0, spread, shape[1])
    alone = stats.ttest_1samp(effects.mean(axis=1), 0).confidence_interval()
    low, high = interval(effects)
    if spread:
        noisy = effects + rng.normal(0, spread, shape)
        seed_means = noisy.mean(axis=1, keepdims=True)
        assert half_width(noisy, 0.05) > half_width(seed_means, 0.05)
        assert low < alone.low
        assert alone.high < high
    else:
        assert (low, high) == pytest.approx(tuple(alone), rel=1e-12)


def test_an_interval_by_hand_one_without_width_and_none_of_one_number():
    # Means of seeds 1.5, 2.5 and 3.5, of items 1 and 4.
    effects = np.array([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]])
    half = np.hypot(4.302653 / 3**0.5, 12.706205 * 4.5**0.5 / 2**0.5)
    assert interval(effects) == pytest.approx((2.5 - half, 2.5 + half), rel=1e-6)
    assert interval(np.full((3, 4), 0.5)) == (0.5, 0.5)
    assert interval(np.array([[0.1]])) is None


@pytest.mark.parametrize("shape", [(3, 1), (1, 30), (3, 30), (8, 200)])
def test_p_is_below_5_in_100_exactly_where_the_interval_excludes_zero(shape):
    rng = np.random.default_rng(4)
    effects = rng.normal(size=(shape[0], 1)) + rng.normal(size=shape)
    effects -= effects.mean()
    half = half_width(effects, 0.05)
    for shift in (-2, -1.0001, -0.9999, 0.5, 0.9999, 1.0001, 3):
        shifted = effects + shift * half
        low, high = interval(shifted)
        excluded = not low <= 0 <= high
        assert excluded == (abs(shift) > 1)
        assert (p_value(shifted) < 0.05) == excluded


def test_p_is_students_where_items_or_seeds_do_not_differ_and_extremes_by_hand():
    for mean in (0.01, -0.5, 3.0, 1000.0, 20_000.0):
        effects = mean + np.array([[0], [1], [2.3], [-0.4]])
        students = stats.ttest_1samp(effects[:, 0], 0).pvalue
        single_seed = effects.T
        for same in (effects, effects.repeat(4, axis=1), single_seed):
            assert p_value(same) == pytest.approx(students, rel=1e-9)
    assert p_value(np.array([[-1.0], [0.0], [1.0]])) == 1
    assert p_value(np.zeros((3, 4))) == 1
    assert p_value(np.full((3, 4), 0.5)) == 0
    sure = 1 + np.random.default_rng(5).normal(0, 0.1, (1, 400))
    assert p_value(sure) == 1e-15 > stats.ttest_1samp(sure[0], 0).pvalue


def test_the_chance_to_see_an_effect_is_the_power_of_students_test_and_rises_with_seeds():
    effects = np.random.default_rng(1).normal(size=(6, 1))
    spread = effects.std(ddof=1)
    chances = []
    for seeds in (3, 8, 20):
        standard_errors = seeds**0.5 / spread  # by which an effect of 1 lies from zero
        bound = stats.t.isf(0.025, seeds - 1)
        power = stats.nct.sf(bound, seeds - 1, standard_errors)
        chances.append(sees(effects, 1.0, seeds))
        assert chances[-1] == pytest.approx(power, abs=0.02)
    assert chances == sorted(chances)
    crossed = effects + 3 * np.random.default_rng(2).normal(size=(6, 400))
    assert sees(crossed, 0.0, 8) < 0.03 < sees(crossed, 2.0, 8)
    assert sees(crossed, 2.0, 8) <= sees(crossed, 2.0, 8, items=4000)
    for given in (effects, crossed):
        assert sees(given, visible(given), seeds=6) == pytest.approx(0.8, abs=0.001)
    noncentral = visible(effects) * 6**0.5 / spread
    power = stats.nct.sf(stats.t.isf(0.025, 5), 5, noncentral)
    assert power == pytest.approx(0.8, abs=0.02)


def test_every_committed_run_is_small_and_sealed_as_it_was():
    assert store.unsealed(ROOT) == {}
    # Of the pool, and of the run on the page where a book was made here.
    assert {finding.failures for finding in verify("banks", ROOT)} == {()}
    sizes = [path.stat().st_size for path in (ROOT / "results").rglob("*.parquet")]
    assert max(sizes) < 500_000
