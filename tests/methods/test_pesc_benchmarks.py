"""Averages over benchmarks, by the paper's groups, and the names under which runs are kept."""

import pandas as pd
import pytest

from moebook.errors import Refusal
from moebook.methods import pesc

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
    found = pesc.by_benchmark(TABLE)
    assert found.score.mean() == pytest.approx((0.25 + 0.5 + 1 + 0.5) / 4)
    by_domain = found.groupby("domain").domain_score.mean().to_dict()
    assert by_domain == pytest.approx({"mathematics": 0.375, "mmlu": 1, "code": 0.5})
    assert list(found.correct) == list(TABLE.correct)


def test_items_of_equal_tasks_keep_their_scores() -> None:
    equal = TABLE[TABLE.task.isin(["hendrycks_math_algebra", "hendrycks_math_geometry"])]
    equal = pd.concat([equal, TABLE[TABLE.task == "python_eval"]], ignore_index=True)
    found = pesc.by_benchmark(equal)
    assert found.score.equals(equal.correct.astype(float))
    assert found.domain_score.equals(equal.correct.astype(float))


def test_a_table_without_items_is_refused() -> None:
    with pytest.raises(Refusal, match="E-DATA: no evaluated item"):
        pesc.by_benchmark(TABLE[:0])


@pytest.mark.parametrize(
    ("base", "mix", "want"),
    [
        ("nano", "embedded", "pesc"),
        ("meta-llama/Llama-2-7b-hf@34b13b", "idae-500k", "pesc"),
        ("meta-llama/Llama-2-13b-hf@01", "idae-500k", "pesc/13b"),
        ("01-ai/Yi-34B@01", "idae-500k", "pesc/34b"),
        ("01-ai/Yi-34B@01", "idae-720k", "pesc/34b/pro"),
    ],
)
def test_each_base_and_mixture_has_a_name_of_its_own(base: str, mix: str, want: str) -> None:
    assert pesc.root(base, mix) == want
