"""Correlations over a bank and the cases that experts split on, against numbers worked by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from moebook.methods.rocket import findings


def test_correlations_are_taken_within_a_task_and_a_draw():
    index = pd.MultiIndex.from_tuples(
        [(t, 0, n) for t in ("a", "b") for n in "xyz"], names=["task", "seed", "lora"]
    )
    columns = {"nats": [1.0, 2, 3, 10, 20, 30], "after": [3.0, 2, 1, 0.5, 0.5, 0.5]}
    found = findings.correlations(pd.DataFrame(columns, index), ["nats"], ["after"])
    assert found.to_dict() == {("nats", "after", "a", 0): pytest.approx(-1)}


def test_mixed_cases_are_those_on_which_the_experts_disagree():
    experts = [[1, 1, 0, 0, 1], [1, 0, 1, 0, 0]]
    found = findings.split_cases(experts, [1, 1, 1, 0, 0])
    assert found["all right"] == found["all wrong"] == pytest.approx(0.2)
    assert found["mixed"] == pytest.approx(0.6)
    assert found["best expert"] == pytest.approx(1 / 3)
    assert found["mean expert"] == pytest.approx(0.5)
    assert found["worst expert"] == pytest.approx(2 / 3)
    assert found["mixture"] == pytest.approx(1 / 3)


def test_experts_that_agree_leave_no_mixed_case():
    found = findings.split_cases(np.ones((3, 4)), np.ones(4))
    assert found["all right"] == 1
    assert math.isnan(found["mixture"])
    assert math.isnan(found["best expert"])
