"""PESC's settings, presets and names: where paper and code differ, and what is refused."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest

from moebook.errors import Refusal
from moebook.methods import pesc


def test_presets_differ_where_the_paper_and_its_code_differ():
    paper, released, fixed = (pesc.Config.preset(n) for n in ("paper", "released", "fixed"))
    assert (paper.down_init, released.down_init, fixed.down_init) == ("zero", "kaiming", "kaiming")
    assert (paper.adapter_width, released.adapter_width, fixed.adapter_width) == (512, 64, 512)
    assert (paper.balance, released.balance, fixed.balance) == ("live", "constant", "live")
    assert (released.adapter_scale, released.served_scale) == (1.0, 0.25)
    assert fixed == pesc.Config()
    assert pesc.Config.preset("released", adapter_width=8).adapter_width == 8


@pytest.mark.parametrize("name", ["paper", "released", "fixed"])
def test_a_reading_is_the_preset_with_the_sizes_and_the_hosts_tuning_of_another(name):
    sizes = {"experts": 4, "top_k": 1, "adapter_width": 6, "host": "lora", "lora_rank": 3}
    other = pesc.Config(**sizes, served_scale=0.5, adapter_scale=2.0, balance_weight=0.3)
    assert replace(other, **pesc.reading(name)) == pesc.Config.preset(name, **sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "E-RANGE: top_k is 0"),
        ({"top_k": 9}, r"E-RANGE: top_k is 9, expected 1 to 8 \(experts\)"),
        ({"experts": 0}, "E-RANGE: experts is 0"),
        ({"experts": 2.0}, "E-TYPE: experts is 2.0"),
        ({"adapter_width": -4}, "E-RANGE: adapter_width is -4"),
        ({"adapter_scale": math.nan}, "E-RANGE: adapter_scale is nan"),
        ({"served_scale": math.inf}, "E-RANGE: served_scale is inf"),
        ({"adapter_dropout": 1.0}, "E-RANGE: adapter_dropout is 1.0"),
        ({"balance_weight": -0.1}, "E-RANGE: balance_weight is -0.1"),
        ({"balance": "dead"}, "E-CHOICE: balance is 'dead'"),
        ({"host": "qlor"}, "E-CHOICE: host is 'qlor', expected .*'qlora'"),
        ({"lora_rank": 0}, "E-RANGE: lora_rank is 0"),
        ({"lora_targets": ("q_proj", ".*")}, r"E-CHOICE: lora_targets.1 is '\.\*'"),
        ({"lora_targets": "q_proj"}, "E-TYPE: lora_targets"),
        ({"layers": ()}, "E-RANGE: layers"),
        ({"layers": (1, 1)}, "E-RANGE: layers names a layer twice"),
        ({"layers": (-1,)}, "E-RANGE: layers.0 is -1"),
    ],
)
def test_unusable_settings_are_refused_in_one_line(changes, message):
    with pytest.raises(Refusal, match=message) as refusal:
        pesc.Config(**changes)
    assert "\n" not in str(refusal.value)
    with pytest.raises(FrozenInstanceError):
        pesc.Config().top_k = 9


def test_an_unknown_preset_or_setting_names_the_nearest():
    with pytest.raises(Refusal, match="did you mean 'released'"):
        pesc.Config.preset("release")
    with pytest.raises(Refusal, match="did you mean 'experts'"):
        pesc.Config.preset("fixed", expert=4)


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
