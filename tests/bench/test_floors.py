"""Floors by hand-worked numbers, and goals on numbers that are given."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moebook.bench import floors, goals
from moebook.bench.floors import Product

CPU = torch.device("cpu")
S, D, F = 6144, 1024, 704


def flops(products: list[Product]) -> int:
    return sum(each.flops for each in products)


def test_a_product_of_2_by_3_and_3_by_5_is_60_flops_each_time() -> None:
    assert Product(2, 3, 5).flops == 60
    assert Product(2, 3, 5, 4).flops == 240


def test_full_experts_cost_18_s_d_f_and_half_trained_ones_15() -> None:
    assert flops(floors.expert_step(S, S, D, F)) == 18 * S * D * F
    assert flops(floors.expert_step(S, S // 2, D, F)) == 15 * S * D * F
    assert flops(floors.expert_step(S, 0, D, F)) == 12 * S * D * F


def test_the_floor_does_its_products() -> None:
    contender = floors.dense([Product(3, 4, 5, 2)], CPU, torch.float32)
    assert contender.name == "floor"
    counted = FlopCounterMode(display=False)
    with counted:
        contender.run()
    assert counted.get_total_flops() == 2 * 3 * 4 * 5 * 2


def test_the_floor_takes_the_faster_library_in_results_that_are_not_new_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(floors, "BLOCK", 10)
    monkeypatch.setattr(floors, "product", lambda left, right: shapes.append(left.shape))
    monkeypatch.setattr(floors, "_seconds", lambda run: 2 if isinstance(run, partial) else 1)
    floors.dense([Product(5, 3, 5)], CPU, torch.float32).run()
    assert shapes == [(2, 3), (2, 3), (1, 3)]
    monkeypatch.setattr(floors, "_seconds", lambda run: 1 if isinstance(run, partial) else 2)
    floors.dense([Product(5, 3, 5)], CPU, torch.float32).run()
    assert len(shapes) == 3


def frame(**rows: tuple[float, float, float]) -> pd.DataFrame:
    """One case of experts: contender to (seconds, ratio, kept)."""
    lines = [
        ["experts", "fine", name, seconds, seconds, ratio, kept]
        for name, (seconds, ratio, kept) in rows.items()
    ]
    columns = ["op", "case", "contender", "seconds", "wall", "ratio", "kept"]
    found = pd.DataFrame(lines, columns=columns)
    found["note"], found["profile"] = "refused", [{"aten::mm": 0.9, "all else": 0.1}] * len(found)
    found.attrs.update(device="cpu", scale="full", rounds=5, threads=1)
    return found


def test_goals_are_met_or_missed_by_the_ratio_in_their_direction() -> None:
    measured = frame(
        ours=(2.0, 1.0, 10), eager=(32.0, 16.0, 10), grouped_mm=(2.4, 1.2, 10), floor=(1.8, 0.9, 0)
    )
    verdicts = goals.judge(measured).set_index("against")
    assert verdicts["verdict"].to_dict() == {"eager": "met", "grouped_mm": "missed", "floor": "met"}
    assert verdicts.loc["floor", "measured"] == pytest.approx(1 / 0.9)
    assert verdicts.loc["eager", "goal"] == "at least 15 x as fast"
    assert verdicts["reason"].to_dict() == {
        "eager": "", "floor": "",
        "grouped_mm": "aten::mm 0.75, all else 0.08; the floor alone 0.75",
    }  # fmt: skip


def test_what_took_no_part_is_not_run_and_what_refused_its_case_has_missed() -> None:
    measured = frame(ours=(2.0, 1.0, 10), floor=(math.nan, math.nan, 0))
    assert set(goals.judge(measured)["verdict"]) == {"not run"}
    refused = frame(ours=(math.nan, math.nan, 0), floor=(1.0, 1.0, 0))
    assert set(goals.judge(refused)["verdict"]) == {"missed"}
    assert set(goals.judge(refused)["reason"]) == {"refused"}


def test_goals_of_an_op_that_is_absent_are_not_run() -> None:
    measured = frame(ours=(math.nan, math.nan, 0)).assign(op="bank", case="")
    found = goals.judge(measured)
    assert list(found["case"]) == ["bank"] and list(found["verdict"]) == ["not run"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [({"rounds": 9}, True), ({"rounds": 4}, False), ({"threads": 2}, False),
     ({"scale": "small"}, False)],
)  # fmt: skip
def test_goals_are_stated_for_their_scale_five_rounds_and_one_thread(
    setting: dict[str, object], expected: bool
) -> None:
    measured = frame(ours=(2.0, 1.0, 10), eager=(32.0, 16.0, 10))
    measured.attrs.update(setting)
    assert goals.stated(measured) is expected
    verdicts = set(goals.judge(measured)["verdict"])
    assert verdicts == ({"met", "not run"} if expected else {"not stated"})


def test_goals_of_a_gpu_are_not_asked_of_a_cpu() -> None:
    measured = frame(ours=(1.0, 1.0, 30), grouped_mm=(1.5, 1.5, 100), floor=(0.8, 0.8, 0))
    measured.attrs.update(device="cuda", scale="model")
    found = goals.judge(measured)
    assert list(found["verdict"]) == ["met", "met", "met"]
    assert list(found["measured"]) == pytest.approx([1.25, 1.5, 0.3])


@pytest.mark.parametrize(
    ("kind", "value", "met"),
    [("faster", 2.0, True), ("faster", 1.9, False), ("within", 2.0, True), ("within", 2.1, False),
     ("memory", 2.1, False), ("seconds", 1.0, True)],
)  # fmt: skip
def test_a_bound_itself_is_met(kind: str, value: float, met: bool) -> None:
    assert goals.KINDS[kind][1](value, 2.0) is met
