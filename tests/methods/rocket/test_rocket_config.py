"""The settings check themselves, and the presets say what paper and code do."""

import pytest

from moebook import papers
from moebook.errors import Refusal
from moebook.methods.rocket import Config


def test_the_defaults_are_the_papers_sizes():
    printed = papers.hyperparameters("rocket", "paper")
    config = Config.preset("paper")
    for field, name in (
        ("shots", "shots"), ("candidates", "candidates"), ("experts", "experts"),
        ("top_k", "experts_per_token"), ("budget", "data_budget"),
        ("threshold", "duplicate_threshold"), ("reduction", "perplexity"),
    ):  # fmt: skip
        assert getattr(config, field) == printed[name]["value"]
    assert Config() == Config.preset("fixed")
    released = Config.preset("released")
    assert released.budget == papers.hyperparameters("rocket", "released")["data_budget"]["value"]
    assert released.lora_scale == "omitted"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 9}, r"E-RANGE: experts \(N\) is 9, expected 1 to 8 \(candidates, M\)"),
        ({"top_k": 5}, r"E-RANGE: top_k is 5, expected 1 to 4 \(experts, N\)"),
        ({"shots": 0}, "E-RANGE: shots is 0"),
        ({"budget": 2.5}, "E-TYPE: budget is 2.5"),
        ({"experts": True}, "E-TYPE"),
        ({"threshold": float("nan")}, "E-RANGE: threshold is nan"),
        ({"threshold": 1.1}, "E-RANGE"),
        ({"gamma": 0.0}, "E-RANGE: gamma is 0"),
        ({"lora_dropout": 1.0}, "E-RANGE: lora_dropout is 1"),
        ({"sampler": "maxmum"}, "E-CHOICE: sampler is 'maxmum'; did you mean 'maximum'"),
        ({"gate_input": "output"}, "E-CHOICE: gate_input"),
    ],
)
def test_a_bad_setting_is_refused_by_name(changes, message):
    with pytest.raises(Refusal, match=message):
        Config(**changes)


def test_unknown_presets_and_fields_are_refused():
    with pytest.raises(Refusal, match="E-CHOICE: unknown preset 'papers'; did you mean 'paper'"):
        Config.preset("papers")
    with pytest.raises(Refusal, match="E-CHOICE: unknown setting 'topk'"):
        Config.preset("fixed", topk=1)
