"""Turns, floors and goals: medians of ratios and verdicts on numbers that the test sets."""

import math
from functools import partial

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moebook.bench import case, report, timing
from moebook.bench.case import Product
from moebook.bench.timing import Contender, Cost, Timing
from moebook.errors import Refusal

CPU = torch.device("cpu")
S, D, F = 6144, 1024, 704
OURS, EAGER = (2.0, 1.0, 10), (32.0, 16.0, 10)


@pytest.fixture
def race(monkeypatch):
    """What contenders cost with given seconds for each turn, below 0 a failure; who ran when."""

    def run(rounds, budget=1e9, **seconds):
        order = []

        def read(contender, device, *, watched=False):
            order.append(contender.name)
            spent = seconds[contender.name].pop(0)
            if spent < 0:
                raise RuntimeError("out of memory\nat a place")
            return Timing(spent, 2 * spent, 7 if watched else None)

        monkeypatch.setattr(timing, "timed", read)
        contenders = [Contender(name, lambda: None) for name in seconds]
        return *timing.interleave(contenders, CPU, rounds=rounds, budget=budget), order

    return run


def test_a_ratio_is_the_median_of_the_rounds_and_a_slow_contender_has_one_turn(race):
    costs, failed, _ = race(3, ours=[9, 9, 1, 2, 10], peer=[9, 4, 2, 50])
    assert failed == {}  # the peer's ratio is that of 4, 1 and 5; medians 4 and 2 would give 2
    assert costs == {"ours": Cost(2, 4, 1, 3, 7, None), "peer": Cost(4, 8, 4, 3, 7, None)}
    costs, _, _ = race(3, 25, ours=[1] * 5, slow=[30], peer=[1] * 4)
    assert (costs["slow"].ratio, costs["slow"].rounds, costs["peer"].rounds) == (30, 1, 3)


def test_others_take_turns_in_rotating_order_and_go_on_where_one_fails(race):
    _, _, order = race(1, ours=[1] * 3, a=[1] * 2, b=[1] * 2)
    assert order == ["ours", "ours", "a", "b", "ours", "b", "a"]
    costs, failed, order = race(2, ours=[1] * 4, a=[3, -1], b=[2] * 3)
    assert failed == {"a": "out of memory"}
    assert {name: cost.ratio for name, cost in costs.items()} == {"ours": 1, "b": 2}
    assert order == ["ours", "ours", "a", "b", "ours", "b", "a", "ours", "b"]
    with pytest.raises(RuntimeError, match="out of memory"):
        race(2, ours=[1, 1, -1], a=[1] * 3)
    errors = ValueError("\nno\nplace"), MemoryError(), Refusal("E-PEER", "peft is not installed")
    assert [timing.why(e) for e in errors] == ["no", "MemoryError", "peft is not installed"]


def test_gradients_of_the_last_run_are_freed_before_the_next():
    leaf, seen = torch.zeros(2, requires_grad=True), []

    def run():
        leaf.sum().backward()
        seen.append(leaf.grad.clone())

    timing.interleave([Contender("ours", run, [leaf])], CPU, rounds=1, budget=1.0)
    assert [grad.tolist() for grad in seen] == [[1, 1]] * 3


def test_extra_memory_is_what_a_run_needs_over_what_was_held():
    small = timing.timed(Contender("none", lambda: None), CPU, watched=True)
    if small.memory is None:
        pytest.skip("only Linux tells resident memory")
    large = timing.timed(Contender("large", lambda: torch.ones(2**24)), CPU, watched=True)
    assert small.memory < 2**24
    assert large.memory == pytest.approx(2**26, rel=0.1)  # the system counts in steps
    assert large.seconds >= 0 < large.wall


def test_the_floor_has_two_flops_a_term_and_takes_the_faster_library(monkeypatch):
    for shape, flops in (((2, 3, 5), 60), ((2, 3, 5, 4), 240)):
        contender = case.dense([Product(*shape)], CPU, torch.float32)
        with FlopCounterMode(display=False) as counted:
            contender.run()
        assert contender.name == "floor"
        assert counted.get_total_flops() == Product(*shape).flops == flops
    for trained, times in ((S, 18), (S // 2, 15), (0, 12)):
        step = case.expert_step(S, trained, D, F)
        assert sum(each.flops for each in step) == times * S * D * F
    shapes = []  # the floor takes the faster library, in results that are not new memory
    monkeypatch.setattr(case, "BLOCK", 10)
    monkeypatch.setattr(case, "product", lambda left, right: shapes.append(left.shape))
    for blocked_is_faster in (True, False):
        seconds = lambda run, to=blocked_is_faster: isinstance(run, partial) == to  # noqa: E731
        monkeypatch.setattr(case, "_seconds", seconds)
        case.dense([Product(5, 3, 5)], CPU, torch.float32).run()
        assert shapes == [(2, 3), (2, 3), (1, 3)]


def frame(**rows):
    """One case of experts: contender to (seconds, ratio, kept)."""
    measured = pd.DataFrame(rows.values(), columns=["seconds", "ratio", "kept"])
    profiles = [{"aten::mm": 0.9, "all else": 0.1}] * len(rows)
    rest = {"wall": 1.0, "note": "refused", "profile": profiles, "contender": list(rows)}
    measured = measured.assign(op="experts", case="fine", **rest)
    measured.attrs.update(device="cpu", scale="full", rounds=5, threads=1)
    return measured


def test_goals_are_met_or_missed_by_the_ratio_in_their_direction():
    measured = frame(ours=OURS, eager=EAGER, grouped_mm=(2.4, 1.2, 10), floor=(1.8, 0.9, 0))
    verdicts = report.judge(measured).set_index("against")
    assert verdicts["verdict"].to_dict() == {"eager": "met", "grouped_mm": "missed", "floor": "met"}
    assert verdicts.loc["floor", "measured"] == pytest.approx(1 / 0.9)
    assert verdicts.loc["eager", "goal"] == "at least 15 x as fast"
    reason = "aten::mm 0.75, all else 0.08; the floor alone 0.75"
    assert verdicts["reason"].to_dict() == {"eager": "", "floor": "", "grouped_mm": reason}
    measured = frame(ours=OURS, floor=(math.nan, math.nan, 0))
    assert set(report.judge(measured)["verdict"]) == {"not run"}
    refused = report.judge(frame(ours=(math.nan, math.nan, 0), floor=(1.0, 1.0, 0)))
    assert set(refused["verdict"]) == {"missed"} and set(refused["reason"]) == {"refused"}
    measured = frame(ours=(1.0, 1.0, 30), grouped_mm=(1.5, 1.5, 100), floor=(0.8, 0.8, 0))
    measured.attrs.update(device="cuda", scale="model")  # whose goals are others
    goals = report.judge(measured)
    assert list(goals["verdict"]) == ["met", "met", "met"]
    assert list(goals["measured"]) == pytest.approx([1.25, 1.5, 0.3])


def test_goals_are_stated_for_their_scale_rounds_and_thread_and_a_bound_itself_is_met():
    for setting, value in (("rounds", 9), ("rounds", 4), ("threads", 2), ("scale", "small")):
        measured = frame(ours=OURS, eager=EAGER)
        measured.attrs[setting] = value
        assert report.stated(measured) is (value == 9)
        verdicts = set(report.judge(measured)["verdict"])
        assert verdicts == ({"met", "not run"} if value == 9 else {"not stated"})

    for kind, value, met in (
        ("faster", 2.0, True), ("faster", 1.9, False), ("within", 2.0, True),
        ("within", 2.1, False), ("memory", 2.1, False), ("seconds", 1.0, True),
    ):  # fmt: skip
        assert report.KINDS[kind][1](value, 2.0) is met, kind
