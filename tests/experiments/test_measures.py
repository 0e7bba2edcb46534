"""What experiments make of trainings and answers, beside numbers by hand."""

import math
import statistics
from types import SimpleNamespace

import pandas as pd
import pytest

from moebook.experiments import budgets, router_init, targets


def test_losses_are_averaged_over_targets_by_arm_and_rate():
    losses = {
        ("mixture", 0.1, "gcd"): 1.0,
        ("mixture", 0.1, "isa"): 3.0,
        ("mixture", 0.2, "gcd"): 2.0,
        ("mixture", 0.2, "isa"): 1.0,
        ("expert_lora", 0.1, "gcd"): 5.0,
    }
    table = targets.grid(losses)
    assert table.loc["mixture"].to_dict() == {0.1: 2.0, 0.2: 1.5}
    assert table.loc["expert_lora", 0.1] == 5.0
    assert table.idxmin(axis=1).to_dict() == {"mixture": 0.2, "expert_lora": 0.1}
    assert targets.grid({}).empty


def test_a_trainings_roughness_is_its_loss_around_a_running_median():
    losses = [5.0, 4.0, 3.0, 3.5, 2.0, 2.0, 4.0, 2.0, 1.5, 1.0] * 2
    norms = [1.0] * 10 + [6.0] + [1.0] * 9
    steps = len(losses)
    measured = router_init.stability(SimpleNamespace(loss=losses, norm=norms), steps)
    # A window of three (a tenth of the steps is two): each step and its neighbours.
    rest = []
    for step in range(steps // 10, steps):
        around = losses[max(0, step - 1) : step + 2]
        rest.append(losses[step] - statistics.median(around))
    assert measured["spread"] == pytest.approx(statistics.stdev(rest))
    assert measured["jump"] == pytest.approx(max(rest))
    assert measured["gradient"] == 6.0


def test_errors_on_mixed_cases_weigh_targets_by_how_many_they_have():
    columns = ["all right", "mixed", "all wrong", "best expert", "mixture"]
    cases = pd.DataFrame(
        [[0.2, 0.6, 0.2, 0.1, 0.5], [0.5, 0.2, 0.3, 0.5, 0.9], [1, 0, 0, None, None]],
        index=["gcd", "isa", "sums"],
        columns=columns,
        dtype=float,
    )
    errors = targets.mixed_errors(cases)
    assert errors["mixture"] == pytest.approx((0.6 * 0.5 + 0.2 * 0.9) / 0.8)
    assert errors["best expert"] == pytest.approx((0.6 * 0.1 + 0.2 * 0.5) / 0.8)
    assert targets.mixed_errors(cases.loc[["sums"]]) == {}


@pytest.mark.parametrize("sized", [True, False])
def test_an_arm_is_off_its_budgets_by_a_share_and_of_weights_only_where_they_are_free(
    sized,
):
    experiment = SimpleNamespace(
        amounts={"tokens": 1000.0},
        settings={"parameters": 500},
        arms={"lora": SimpleNamespace(sized=sized)},
    )
    done = SimpleNamespace(spent=1010.0, count=450)
    off = budgets.spent(experiment, "lora", done)
    assert math.isclose(off.pop("tokens"), 0.01)
    assert off == ({"parameters": pytest.approx(-0.1)} if sized else {})
