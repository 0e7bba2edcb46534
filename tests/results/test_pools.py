"""Pools: which runs belong together, and what is compared in them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moebook import results
from moebook.errors import Refusal
from moebook.results import Curve, Pool, Run, Value

BOTH = {"left": (1.0, 2.0), "right": (0.5, 0.25)}


def made(seed: int, arms: dict[str, tuple[float, ...]] = BOTH, **other: Any) -> Run:
    """A run with a value an arm, by its items, and one that all of its arms share."""
    values = [Value(f"toy/{a}", sum(x) / len(x), "nats", x) for a, x in arms.items()]
    fields: dict[str, Any] = {
        "values": (*values, Value("toy/base", seed / 8, "nats")), "arms": tuple(arms),
        "settings": {"base": "nano", "steps": 600},
        "rows": {"train": f"rows of {seed}", "test": "rows"},
    }  # fmt: skip
    return Run("toy", "nano", "study", seed, **(fields | other))


def pooled(*runs: Run) -> Pool:
    return Pool("toy", "nano", runs)


ONE, LEFT, RIGHT = (made(0, arms) for arms in (BOTH, {"left": (1, 2)}, {"right": (0.5, 0.25)}))


def test_arms_of_a_seed_join_and_other_seeds_may_train_on_other_rows_and_say_more():
    for pool in (pooled(LEFT, RIGHT, made(1)), pooled(ONE, made(1))):
        assert list(pool.seeds) == [0, 1] and pool.arms == {"left": (0, 1), "right": (0, 1)}
        assert np.array_equal(pool.effects("toy/left", "toy/right"), [[0.5, 1.75]] * 2)
    curve = Curve("toy/loss", "nats", (1.0,), (0.5,))
    pool = pooled(ONE, made(1, settings={"base": "nano", "added": 1}, curves=(curve,)))
    assert [run.rows["train"] for run in pool.runs] == ["rows of 0", "rows of 1"]
    assert pool.curves("toy/loss") == {1: curve}


@pytest.mark.parametrize(("one", "other", "message"), [
    (ONE, LEFT, "two files hold the arm left"), (ONE, ONE, "two files hold the arm left"),
    (replace(ONE, arms=()), LEFT, "two files hold this seed"),
    (ONE, replace(made(1), protocol="smollm2"), r"toy at smollm2 .*runs of toy at nano"),
    (ONE, replace(made(1), notebook="pesc"), r"pesc at nano .*runs of toy at nano"),
    (ONE, replace(made(1), tier="gpu"), r"tier gpu.*tier study"),
    (ONE, made(1, settings={"base": "nano-moe"}), "base = 'nano-moe', seed 0 has 'nano'"),
    (ONE, made(1, settings={"steps": 90}), "steps = 90, seed 0 has 600"),
    (ONE, made(1, rows={"test": "others"}), "tested on other rows than seed 0"),
    (ONE, made(1, values=(Value("toy/left", 0.5, "share"),)), "is in share, seed 0 has it in"),
    (LEFT, replace(RIGHT, rows={"train": "others", "test": "rows"}), "trained on other rows"),
    (LEFT, replace(RIGHT, values=(Value("toy/base", 9.0, "nats"),)), "toy/base differently"),
])  # fmt: skip
def test_runs_that_do_not_belong_together_are_refused_in_any_order(one, other, message):
    for runs, told in (((one, other), message), ((other, one), ""), ((made(7), other, one), "")):
        with pytest.raises(Refusal, match=f"E-POOL: .*{told}"):
            pooled(*runs)


def test_effects_are_paired_by_seed_and_item_and_else_means_are_compared():
    runs = [made(s, {"left": (s + 1.0, 4.0 * s), "right": (1.0, s)}) for s in (2, 0, 1)]
    pool = pooled(*runs, made(5, {"left": (9.0, 9.0)}), made(6, {"right": (9.0, 9.0)}))
    wanted = [[s + 1.0 - 1.0, 4.0 * s - s] for s in (0, 1, 2)]
    assert np.array_equal(pool.effects("toy/left", "toy/right"), wanted), "seeds 5, 6 lack one"
    assert np.array_equal(pool.effects("toy/right", 0.5)[-1], [8.5, 8.5])
    assert pool.effects("toy/left", "toy/none").shape == (0, 1)
    assert np.array_equal(pool.effects("toy/base"), np.array([[0], [1], [2], [5], [6]]) / 8)
    for right, mean in (((1.0, 1.0), 2.0), ((0.0, 0.0, 0.0), 3.0)):  # other items, or not as many
        pool = pooled(ONE, made(1, {"left": (1.0, 2.0, 6.0), "right": right}))
        effects = pool.effects("toy/left", "toy/right")
        assert np.allclose(effects, [[1.125], [mean]], atol=1e-15)
    for left, differs in ((0.1 + 0.2, False), (0.3 + 1e-9, True)):  # rounding alone is no effect
        pool = pooled(made(0, {"left": (left,), "right": (0.3,)}))
        assert (pool.effects("toy/left", "toy/right").item() > 0.0) == differs


def test_pools_are_read_smallest_scale_first_and_a_run_must_lie_in_its_folder(tmp_path):
    large = replace(ONE, protocol="big", settings={"base": "smollm2"})
    for run in (large, ONE, replace(ONE, protocol="a100", tier="gpu")):
        results.write_run(tmp_path / "results" / "toy" / run.protocol / "0.parquet", run)
    (tmp_path / "results" / "toy" / "empty").mkdir()
    assert list(results.pools("toy", tmp_path)) == ["nano", "big", "a100"]
    assert results.pools("other", tmp_path) == {} and results.live("toy", tmp_path) is None
    page = tmp_path / "book" / "notebooks" / "01_toy.parquet"
    results.write_run(page, replace(ONE, protocol="cpu", tier="cpu"))
    shown = results.live("toy", tmp_path)
    assert shown is not None and (shown.tier, list(shown.seeds)) == ("cpu", [0])
    results.write_run(tmp_path / "results" / "toy" / "nano" / "1.parquet", large)
    with pytest.raises(Refusal, match=r"E-POOL: .*1\.parquet is a run of toy at big; move it"):
        results.pools("toy", tmp_path)
