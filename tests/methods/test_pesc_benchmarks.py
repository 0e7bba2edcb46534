"""The paper's groups of benchmarks, and the names under which runs are kept."""

import pytest

from moebook.methods import pesc


def test_ten_of_the_papers_benchmarks_stand_in_its_groups() -> None:
    groups = sorted(pesc.GROUPS.values())
    assert {name: groups.count(name) for name in groups} == {
        "common_sense": 5, "knowledge": 2, "mathematics": 2, "mmlu": 1,
    }  # fmt: skip


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
