"""Averages over benchmarks and differences paired by item, against numbers worked by hand."""

import numpy as np
import pandas as pd
import pytest

from moebook import evaluation
from moebook.errors import Refusal

DOMAINS = {"gsm8k": "mathematics", "hendrycks_math": "mathematics", "mmlu": "mmlu"}
TASKS = {
    "gsm8k": ("benchmark", [1, 0, 0, 0]),
    "hendrycks_math_algebra": ("benchmark", [1]),
    "hendrycks_math_geometry": ("benchmark", [0]),
    "mmlu_astronomy": ("benchmark", [1, 1, 1, 1, 1]),
    "python_eval": ("code", [0, 1]),
}
TABLE = pd.DataFrame(
    [(t, domain, correct) for t, (domain, items) in TASKS.items() for correct in items],
    columns=["task", "domain", "correct"],
)


def test_accuracy_is_the_mean_over_benchmarks_whatever_their_number_of_items() -> None:
    found = evaluation.by_benchmark(TABLE, DOMAINS)
    assert found.score.mean() == pytest.approx((0.25 + 0.5 + 1 + 0.5) / 4)
    by_domain = found.groupby("domain").domain_score.mean().to_dict()
    assert by_domain == pytest.approx({"mathematics": 0.375, "mmlu": 1, "code": 0.5})
    assert list(found.correct) == list(TABLE.correct)


def test_weights_are_equal_over_benchmarks_and_1_on_average() -> None:
    found = evaluation.by_benchmark(TABLE, DOMAINS)
    sums = found.groupby("benchmark").weight.sum().to_dict()
    assert sums == pytest.approx(dict.fromkeys([*DOMAINS, "python_eval"], 13 / 4))
    assert found.weight.mean() == pytest.approx(1)


def test_without_domains_each_task_is_its_own_benchmark() -> None:
    found = evaluation.by_benchmark(TABLE)
    assert found.score.mean() == pytest.approx((0.25 + 1 + 0 + 1 + 0.5) / 5)
    assert found.benchmark.equals(TABLE.task)
    by_domain = found.groupby("domain").domain_score.mean().to_dict()
    assert by_domain == pytest.approx({"benchmark": 2.25 / 4, "code": 0.5})


def test_items_of_equal_tasks_keep_their_scores() -> None:
    equal = TABLE[TABLE.task.isin(["hendrycks_math_algebra", "hendrycks_math_geometry"])]
    equal = pd.concat([equal, TABLE[TABLE.task == "python_eval"]], ignore_index=True)
    found = evaluation.by_benchmark(equal, DOMAINS)
    assert found.score.equals(equal.correct.astype(float))
    assert found.domain_score.equals(equal.correct.astype(float))


def test_a_table_without_items_is_refused() -> None:
    with pytest.raises(Refusal, match="E-DATA: no evaluated item"):
        evaluation.by_benchmark(TABLE[:0], DOMAINS)


def arm(scores: list[float], nats: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"score": scores, "nll": nats})


def test_a_difference_is_paired_by_item_with_students_interval() -> None:
    tables = {
        "sparse": arm([1, 1, 0, 1], [1.0, 2.0, 3.0, np.nan]),
        "dense": arm([0, 1, 0, 0], [2.0, 2.0, 5.0, np.nan]),
    }
    found = evaluation.paired(tables, [("sparse", "dense")])
    assert list(found.index) == [
        ("sparse minus dense", "accuracy (points)"),
        ("sparse minus dense", "nll (nats)"),
    ]
    # Gaps 1, 0, 0, 1: mean 0.5, deviation 1/sqrt 3, error 1/sqrt 12; Student's quantile 3.182.
    half = 100 * 3.182446 / 12**0.5
    assert found.iloc[0].tolist() == pytest.approx([50, 50 - half, 50 + half, half], rel=1e-5)
    # Gaps -1, 0, -2 (the missing one is left out): mean -1, error 1/sqrt 3; quantile 4.303.
    half = 4.302653 / 3**0.5
    assert found.iloc[1].tolist() == pytest.approx([-1, -1 - half, -1 + half, half], rel=1e-5)


def test_pairs_with_an_absent_arm_are_left_out() -> None:
    tables = {"sparse": arm([1, 0], [1.0, 2.0]), "paper": arm([0, 0], [np.nan, np.nan])}
    assert evaluation.paired({"sparse": tables["sparse"]}, [("sparse", "dense")]).empty
    found = evaluation.paired(tables, [("sparse", "dense"), ("sparse", "paper")], ["nll"])
    assert list(found.index) == [("sparse minus paper", "nll (nats)")]
    assert found.isna().all(axis=None)  # no item has a likelihood in both


def test_a_single_item_has_a_difference_and_no_interval() -> None:
    tables = {"one": arm([1], [1.5]), "other": arm([0], [1.0])}
    found = evaluation.paired(tables, [("one", "other")])
    assert found["difference"].tolist() == [100, 0.5]
    assert found.drop(columns="difference").isna().all(axis=None)
