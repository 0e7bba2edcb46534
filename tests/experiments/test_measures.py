"""What experiments make of trainings and answers, beside numbers by hand."""

import math
import statistics
from types import SimpleNamespace

import pandas as pd
import pytest

from moebook.experiments import budgets, router_init, specialists, targets
from moebook.methods import esft


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
    rows = {"gcd": 10, "isa": 1000, "sums": 50}  # so 6 and 200 mixed cases
    errors = targets.mixed_errors(cases, rows)
    assert errors["mixture"] == pytest.approx((6 * 0.5 + 200 * 0.9) / 206)
    assert errors["best expert"] == pytest.approx((6 * 0.1 + 200 * 0.5) / 206)
    assert targets.mixed_errors(cases.loc[["sums"]], rows) == {}


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


class Kept:
    """Stands in for a run."""

    def __init__(self):
        self.values = {}

    def record(self, name, value, unit, items=None):
        self.values[name] = value


def answers(asked, **right):
    """Return what an evaluation says: by task, which of its items are correct."""
    lines = []
    for task, items in right.items():
        for number, correct in enumerate(items):
            lines.append((task, "benchmark", number, correct, 1.0, asked))
    columns = ["task", "domain", "item", "correct", "nll", "asked"]
    return pd.DataFrame(lines, columns=columns)


# What tests two targets, and by arm and target which items are correct.
LEARNT = {
    "each by itself": (
        {"isa": "isa", "docstring": "docstring"},
        {
            ("gate", "isa"): answers("isa", isa=[1, 1]),
            ("lora", "isa"): answers("isa", isa=[0, 0]),
            ("gate", "docstring"): answers("docstring", docstring=[0, 0]),
            ("lora", "docstring"): answers("docstring", docstring=[1, 1]),
        },
        (100.0, -100.0),
    ),
    "both by one task": (
        {"isa": "sums", "docstring": "sums"},
        {
            ("gate", "isa"): answers("sums", sums=[1, 1]),
            ("lora", "isa"): answers("sums", sums=[0, 0]),
            ("gate", "docstring"): answers("sums", sums=[0, 0]),
            ("lora", "docstring"): answers("sums", sums=[1, 1]),
        },
        (100.0, -100.0),
    ),
    "by a group and a task": (
        {"isa": "mmlu", "docstring": "sums"},
        {
            ("gate", "isa"): answers("mmlu", mmlu_law=[1, 1], mmlu_art=[1, 0]),
            ("lora", "isa"): answers("mmlu", mmlu_law=[1, 0], mmlu_art=[0, 0]),
            ("gate", "docstring"): answers("sums", sums=[1, 0]),
            ("lora", "docstring"): answers("sums", sums=[1, 1]),
        },
        (50.0, -50.0),
    ),
}


@pytest.mark.parametrize("case", LEARNT)
def test_a_lead_is_of_each_target_whatever_tests_it(case):
    tested, results, (fewer, more) = LEARNT[case]
    tables = specialists.Tables(esft.by_arm(results, list(tested.values())), {})
    solved = specialists.solved(tables)
    for (arm, target), table in results.items():
        assert solved.loc[arm, target] == table.correct.mean()
    # Of two layers; isa takes fewer experts.
    counts = pd.DataFrame(
        [[4, 4], [1, 2]],
        pd.MultiIndex.from_tuples([("gate", "docstring"), ("gate", "isa")]),
    )
    kept = Kept()
    experiment = SimpleNamespace(
        pool=SimpleNamespace(tested=tested), arms=("gate", "lora")
    )
    specialists.record_lead(kept, experiment, counts, solved)
    assert kept.values == {
        "esft/lead/fewer_experts/accuracy": fewer,
        "esft/lead/more_experts/accuracy": more,
    }


@pytest.mark.parametrize(
    ("test", "members"),
    [("gcd", ["gcd"]), ("mmlu", ["mmlu_law"]), ("mmlu", ["mmlu_art", "mmlu_law"])],
)
def test_the_best_lora_on_test_rows_is_found_whatever_tests_a_target(test, members):
    right = {
        "base": [0, 0, 0, 0],
        "wrong": [1, 0, 0, 0],
        "best": [1, 1, 0, 0],
        "leak": [1, 1, 1, 1],
    }
    per_task = 4 // len(members)
    by_lora = {}
    for lora, items in right.items():
        parts = {
            task: items[at::2][:per_task] if len(members) > 1 else items
            for at, task in enumerate(members)
        }
        other = answers("sums", sums=[lora == "wrong"])
        by_lora[lora] = pd.concat([answers(test, **parts), other], ignore_index=True)
    untuned = pd.concat(by_lora, names=["lora", "row"]).reset_index("lora")
    pool = SimpleNamespace(tested={"kinship": test, "sums": "sums"})
    clean = dict.fromkeys(pool.tested, dict.fromkeys(["wrong", "best"]))
    best = targets.best_on_test_rows(untuned, clean, pool)
    assert best == {"kinship": "best", "sums": "wrong"}

    experiment = SimpleNamespace(pool=pool, best=best, arms=("mixture",))
    tables = targets.tables(experiment, {}, untuned, {})
    for name, expected in {"base": [0.0, 0.0], "source_best": [0.5, 1.0]}.items():
        found = tables[name].groupby("domain").correct.mean()
        assert found[["kinship", "sums"]].to_list() == expected
