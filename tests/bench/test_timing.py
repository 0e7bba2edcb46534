"""Turns, medians of ratios and memory: the plumbing, with a clock that the test sets."""

from __future__ import annotations

import pytest
import torch

from moebook.bench.timing import Contender, Lap, interleave, lap

CPU = torch.device("cpu")


class Script:
    """A clock that reads each contender's laps from a list, and keeps who ran when."""

    def __init__(self, **seconds: list[float]) -> None:
        self.left = {name: list(values) for name, values in seconds.items()}
        self.order: list[str] = []

    def __call__(self, contender: Contender, device: torch.device, watched: bool) -> Lap:
        self.order.append(contender.name)
        seconds = self.left[contender.name].pop(0)
        return Lap(seconds, 2 * seconds, 7 if watched else None)


def contenders(*names: str) -> list[Contender]:
    return [Contender(name, lambda: None) for name in names]


def test_a_ratio_is_the_median_of_the_rounds_behind_the_warm_up_and_not_that_of_medians() -> None:
    clock = Script(ours=[9, 9, 1, 2, 10], peer=[9, 4, 2, 50])
    found = interleave(contenders("ours", "peer"), CPU, rounds=3, budget=1e9, clock=clock)
    assert found["peer"].ratio == 4  # of 4, 1 and 5; medians 4 and 2 would give 2
    assert (found["peer"].seconds, found["peer"].wall) == (4, 8)
    assert (found["ours"].ratio, found["ours"].seconds, found["ours"].rounds) == (1, 2, 3)


def test_a_slow_contender_has_one_turn_and_it_counts() -> None:
    clock = Script(ours=[1] * 5, slow=[30], peer=[1] * 4)
    found = interleave(contenders("ours", "slow", "peer"), CPU, rounds=3, budget=25, clock=clock)
    assert (found["slow"].ratio, found["slow"].rounds) == (30, 1)
    assert found["peer"].rounds == 3


def test_others_take_turns_in_rotating_order_after_ours() -> None:
    clock = Script(ours=[1] * 3, a=[1] * 2, b=[1] * 2)
    interleave(contenders("ours", "a", "b"), CPU, rounds=1, budget=1e9, clock=clock)
    assert clock.order == ["ours", "ours", "a", "b", "ours", "b", "a"]


def test_memory_is_that_of_the_first_run() -> None:
    clock = Script(ours=[1] * 3, peer=[1] * 2)
    found = interleave(contenders("ours", "peer"), CPU, rounds=1, budget=1e9, clock=clock)
    assert {name: cost.memory for name, cost in found.items()} == {"ours": 7, "peer": 7}


def test_gradients_of_the_last_run_are_freed_before_the_next() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    seen: list[torch.Tensor] = []

    def run() -> None:
        leaf.sum().backward()
        seen.append(leaf.grad.clone())

    interleave([Contender("ours", run, [leaf])], CPU, rounds=1, budget=1.0)
    assert [grad.tolist() for grad in seen] == [[1, 1]] * 3


def test_extra_memory_is_what_a_run_needs_over_what_was_held() -> None:
    if lap(Contender("none", lambda: None), CPU, True).memory is None:
        pytest.skip("only Linux tells resident memory")
    held = lap(Contender("none", lambda: None), CPU, True)
    large = lap(Contender("large", lambda: torch.ones(2**24)), CPU, True)
    assert held.memory is not None and held.memory < 2**24
    assert large.memory == pytest.approx(2**26, rel=0.1)  # the system counts in steps
    assert large.seconds >= 0 and large.wall > 0
