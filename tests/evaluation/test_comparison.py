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


@pytest.mark.parametrize(
    ("domains", "score", "by_domain"),
    [
        (DOMAINS, [0.25, 0.5, 1, 0.5], {"mathematics": 0.375, "mmlu": 1, "code": 0.5}),
        (None, [0.25, 1, 0, 1, 0.5], {"benchmark": 2.25 / 4, "code": 0.5}),
    ],
)
def test_benchmarks_weigh_equally_whatever_their_number_of_items(domains, score, by_domain):
    items = evaluation.by_benchmark(TABLE, domains)
    assert items.score.mean() == pytest.approx(np.mean(score))
    assert items.groupby("domain").domain_score.mean().to_dict() == pytest.approx(by_domain)
    assert list(items.correct) == list(TABLE.correct)
    sums = items.groupby("benchmark").weight.sum()
    assert sums.to_numpy() == pytest.approx([13 / len(score)] * len(score))
    assert set(sums.index) == ({*DOMAINS, "python_eval"} if domains else set(TABLE.task))


def test_items_of_equal_tasks_keep_their_scores_and_no_items_are_refused():
    equal = TABLE[TABLE.task.isin(["hendrycks_math_algebra", "hendrycks_math_geometry"])]
    equal = pd.concat([equal, TABLE[TABLE.task == "python_eval"]], ignore_index=True)
    items = evaluation.by_benchmark(equal, DOMAINS)
    assert items.score.equals(equal.correct.astype(float))
    assert items.domain_score.equals(equal.correct.astype(float))
    with pytest.raises(Refusal, match="E-DATA: no evaluated item"):
        evaluation.by_benchmark(TABLE[:0], DOMAINS)


def arm(scores, nats):
    return pd.DataFrame({"score": scores, "nll": nats})


def test_a_difference_is_paired_by_item_with_students_interval():
    tables = {
        "sparse": arm([1, 1, 0, 1], [1.0, 2.0, 3.0, np.nan]),
        "dense": arm([0, 1, 0, 0], [2.0, 2.0, 5.0, np.nan]),
    }
    lines = evaluation.paired(tables, [("sparse", "dense")])
    assert list(lines.index) == [
        ("sparse minus dense", "accuracy (points)"),
        ("sparse minus dense", "nll (nats)"),
    ]
    # Gaps 1, 0, 0, 1: mean 0.5, deviation 1/sqrt 3, error 1/sqrt 12; Student's quantile 3.182.
    half = 100 * 3.182446 / 12**0.5
    assert lines.iloc[0].tolist() == pytest.approx([50, 50 - half, 50 + half, half], rel=1e-5)
    # Gaps -1, 0, -2 (the missing one is left out): mean -1, error 1/sqrt 3; quantile 4.303.
    half = 4.302653 / 3**0.5
    assert lines.iloc[1].tolist() == pytest.approx([-1, -1 - half, -1 + half, half], rel=1e-5)


def test_absent_arms_and_values_leave_no_line_or_no_interval():
    tables = {"one": arm([1], [1.5]), "other": arm([0], [1.0]), "paper": arm([0], [np.nan])}
    assert evaluation.paired(tables, [("one", "dense")]).empty
    lines = evaluation.paired(tables, [("one", "other"), ("one", "dense")])
    assert lines["difference"].tolist() == [100, 0.5]
    assert lines.drop(columns="difference").isna().all(axis=None)  # a single item
    lines = evaluation.paired(tables, [("one", "paper")], ["nll"])
    assert list(lines.index) == [("one minus paper", "nll (nats)")]
    assert lines.isna().all(axis=None)  # no item has a likelihood in both
