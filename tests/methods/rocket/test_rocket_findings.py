"""Correlations over a bank and the cases that experts split on, against numbers worked by hand."""

import math

import numpy as np
import pandas as pd
import pytest

from moebook.methods.rocket import findings, pipeline


@pytest.fixture
def told():
    """Two LoRAs scored on two shots of a task, as log-perplexities."""
    nats = pd.DataFrame([[1.0, 1.0], [2.0, 2.0]], ["x", "y"])
    solved = pd.DataFrame([[1, 0], [0, 0]], ["x", "y"])
    return pipeline.Case("a", 0, [{}, {}], nats, nats + 3, solved, np.zeros((2, 1)))


def test_perplexities_stand_beside_what_tuning_came_to(told):
    found = findings.foretold({"a": told}, {("a", "y"): [0.25, 0.75]})
    assert found.index.tolist() == [("a", "y")]
    expected = [2 + math.log(2), 5 + math.log(2), 0.25, 0.75, 0.5]
    assert found.iloc[0].tolist() == pytest.approx(expected)
    assert found.columns.tolist() == [*findings.KINDS, "before", "after", "gain"]
    assert findings.clouds(found)["bare answers"]["a"].to_numpy().tolist() == [[0, 0.75]]


def test_without_tuning_there_is_nothing_to_correlate(told):
    found = findings.foretold({"a": told}, {})
    ranks = findings.correlations(found, list(findings.KINDS), ["after", "gain"])
    assert found.empty and ranks.empty
    assert findings.claimed(ranks) == {}
    assert findings.averaged(ranks).empty


def test_correlations_are_taken_within_a_task():
    index = pd.MultiIndex.from_tuples(
        [(t, n) for t in ("a", "b") for n in "xyz"], names=["task", "lora"]
    )
    columns = {"nats": [1.0, 2, 3, 10, 20, 30], "after": [3.0, 2, 1, 0.5, 0.5, 0.5]}
    found = findings.correlations(pd.DataFrame(columns, index), ["nats"], ["after"])
    assert found.to_dict() == {("nats", "after", "a"): pytest.approx(-1)}


def test_claims_are_about_means_over_tasks():
    ranks = {
        ("bare answers", "after", "a"): 0.5,
        ("bare answers", "after", "b"): 0.0,
        ("with rationales", "after", "a"): -0.5,
        ("with rationales", "gain", "a"): -0.25,
        ("with rationales", "gain", "b"): 0.75,
    }
    ranks = pd.Series(ranks).rename_axis(["of", "with", "task"])
    assert findings.claimed(ranks) == {
        "gain_correlation": pytest.approx(0.25),
        "reasoning_minus_plain/correlation": pytest.approx(-0.75),
    }
    found = findings.averaged(ranks)
    assert found.loc[("bare answers", "after"), "correlation"] == pytest.approx(0.25)
    assert found.loc[("with rationales", "after"), "targets"] == 1
    assert math.isnan(found.loc[("with rationales", "after"), "to"])


def test_the_best_lora_is_of_those_that_may_be_taken_and_ties_go_by_likelihood():
    columns = pd.MultiIndex.from_product([["correct", "nll"], ["a"]])
    means = pd.DataFrame([[0.9, 1.0], [0.5, 2.0], [0.5, 1.5]], list("xyz"), columns)
    assert findings.best(means, ["x", "y", "z"], "a") == "x"
    assert findings.best(means, ["y", "z"], "a") == "z"


def test_an_average_is_one_over_targets_whatever_their_rows():
    nats = {"a": [1.0, 2.0, 3.0, 4.0], "b": [6.0, 8.0]}
    right = {"a": [True, False, False, False], "b": [True, True]}
    tables = {
        t: pd.DataFrame({"task": f"{t}_task", "domain": "d", "correct": c, "nll": nats[t]})
        for t, c in right.items()
    }
    tested = {"a": "a_task", "b": "b_task"}
    found = findings.over_targets(tables, tested)
    assert found.score.mean() == pytest.approx(0.625)
    assert found.nll.mean() == pytest.approx((2.5 + 7) / 2)
    assert found.groupby("domain").correct.mean().to_dict() == {"a": 0.25, "b": 1}
    tables["a"]["nll"] = np.nan
    assert findings.over_targets(tables, tested).nll.mean() == pytest.approx(7)


def test_arms_that_differ_in_one_number_are_sorted_by_it():
    names = ["mixture", "shots5", "shots_only", "shots20", "budget300"]
    means = pd.DataFrame({"mean": [0.1, 0.2, 0.3, 0.4, 0.5]}, names)
    found = findings.sizes(means, {"shots": 50, "budget": 100})
    assert found["mean"].to_dict() == {
        ("shots", 5): 0.2, ("shots", 20): 0.4, ("shots", 50): 0.1,
        ("budget", 100): 0.1, ("budget", 300): 0.5,
    }  # fmt: skip
    assert findings.sizes(means.iloc[2:3], {"shots": 50}).empty


def test_activation_takes_the_routers_of_a_layer_together():
    shares = pd.DataFrame(
        [(0, "q", 0, 3), (0, "q", 1, 1), (0, "v", 0, 0), (0, "v", 1, 4)],
        columns=["layer", "router", "expert", "slots"],
    )
    assert findings.activation(shares)["layer 0"].tolist() == [3 / 8, 5 / 8]


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


def test_errors_on_mixed_cases_are_weighed_by_how_many_there_are():
    one, two = (
        {"mixed": mixed, "best expert": best, "mean expert": 0.5, "worst expert": 1, "mixture": own}
        for mixed, best, own in ((0.75, 0.0, 0.2), (0.25, 0.4, 0.6))
    )
    none = dict.fromkeys(one, np.nan) | {"mixed": 0.0}
    found = findings.mixed_errors(pd.DataFrame([one, two, none]))
    assert found.to_dict() == pytest.approx(
        {"best expert": 0.1, "mean expert": 0.5, "worst expert": 1, "mixture": 0.3}
    )
    assert findings.mixed_errors(pd.DataFrame([none])).empty
    assert findings.mixed_errors(pd.DataFrame({}).T).empty
