"""Turns, medians of ratios and memory: the plumbing, with a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moebook.bench import timing
from moebook.bench.timing import Contender, Cost, Lap
from moebook.errors import Refusal

CPU = torch.device("cpu")


Race = Callable[..., tuple[dict[str, Cost], dict[str, str], list[str]]]


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Race:
    """Contenders with given seconds for each turn: what they cost, and who ran when.

    Seconds below 0 are a failure.
    """

    def run(rounds: int, budget: float = 1e9, **seconds: list[float]) -> Any:
        order: list[str] = []

        def read(contender: Contender, device: torch.device, *, watched: bool = False) -> Lap:
            order.append(contender.name)
            spent = seconds[contender.name].pop(0)
            if spent < 0:
                raise RuntimeError("out of memory\nat a place")
            return Lap(spent, 2 * spent, 7 if watched else None)

        monkeypatch.setattr(timing, "lap", read)
        contenders = [Contender(name, lambda: None) for name in seconds]
        return *timing.interleave(contenders, CPU, rounds=rounds, budget=budget), order

    return run


def test_a_ratio_is_the_median_of_the_rounds_behind_the_warm_up_and_not_that_of_medians(
    race: Race,
) -> None:
    found, failed, _ = race(3, ours=[9, 9, 1, 2, 10], peer=[9, 4, 2, 50])
    assert failed == {}
    assert found["peer"].ratio == 4  # of 4, 1 and 5; medians 4 and 2 would give 2
    assert (found["peer"].seconds, found["peer"].wall) == (4, 8)
    assert (found["ours"].ratio, found["ours"].seconds, found["ours"].rounds) == (1, 2, 3)
    assert {name: cost.memory for name, cost in found.items()} == {"ours": 7, "peer": 7}


def test_a_slow_contender_has_one_turn_and_it_counts(race: Race) -> None:
    found, _, _ = race(3, 25, ours=[1] * 5, slow=[30], peer=[1] * 4)
    assert (found["slow"].ratio, found["slow"].rounds) == (30, 1)
    assert found["peer"].rounds == 3


def test_others_take_turns_in_rotating_order_after_ours(race: Race) -> None:
    _, _, order = race(1, ours=[1] * 3, a=[1] * 2, b=[1] * 2)
    assert order == ["ours", "ours", "a", "b", "ours", "b", "a"]


def test_a_peer_that_fails_drops_out_and_the_others_go_on(race: Race) -> None:
    found, failed, order = race(2, ours=[1] * 4, a=[3, -1], b=[2] * 3)
    assert failed == {"a": "out of memory"}
    assert {name: cost.ratio for name, cost in found.items()} == {"ours": 1, "b": 2}
    assert order == ["ours", "ours", "a", "b", "ours", "b", "a", "ours", "b"]


def test_what_our_own_op_raises_is_raised(race: Race) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        race(2, ours=[1, 1, -1], a=[1] * 3)


def test_an_error_is_told_by_its_first_line_or_by_its_kind() -> None:
    assert timing.why(ValueError("\nno\nplace")) == "no"
    assert timing.why(MemoryError()) == "MemoryError"
    assert timing.why(Refusal("E-PEER", "peft is not installed")) == "peft is not installed"


def test_gradients_of_the_last_run_are_freed_before_the_next() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    seen: list[torch.Tensor] = []

    def run() -> None:
        leaf.sum().backward()
        seen.append(leaf.grad.clone())

    timing.interleave([Contender("ours", run, [leaf])], CPU, rounds=1, budget=1.0)
    assert [grad.tolist() for grad in seen] == [[1, 1]] * 3


def test_extra_memory_is_what_a_run_needs_over_what_was_held() -> None:
    held = timing.lap(Contender("none", lambda: None), CPU, watched=True)
    if held.memory is None:
        pytest.skip("only Linux tells resident memory")
    large = timing.lap(Contender("large", lambda: torch.ones(2**24)), CPU, watched=True)
    assert held.memory < 2**24
    assert large.memory == pytest.approx(2**26, rel=0.1)  # the system counts in steps
    assert large.seconds >= 0 and large.wall > 0
