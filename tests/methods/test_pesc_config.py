"""PESC's settings: the three presets, and what is refused."""

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


def test_settings_cannot_be_changed_after_they_were_checked():
    with pytest.raises(FrozenInstanceError):
        pesc.Config().top_k = 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "E-RANGE: top_k is 0"),
        ({"top_k": 9}, r"E-RANGE: top_k is 9, expected 1 to 8 \(experts\)"),
        ({"experts": 0}, "E-RANGE: experts is 0"),
        ({"experts": 2.0}, "E-TYPE: experts is 2.0"),
        ({"experts": True}, "E-TYPE: experts is True"),
        ({"adapter_width": 0}, "E-RANGE: adapter_width is 0"),
        ({"adapter_width": -4}, "E-RANGE: adapter_width is -4"),
        ({"adapter_scale": math.nan}, "E-RANGE: adapter_scale is nan"),
        ({"served_scale": math.inf}, "E-RANGE: served_scale is inf"),
        ({"adapter_scale": "1"}, "E-TYPE: adapter_scale is '1'"),
        ({"adapter_dropout": 1.0}, "E-RANGE: adapter_dropout is 1.0"),
        ({"balance_weight": -0.1}, "E-RANGE: balance_weight is -0.1"),
        ({"balance": "dead"}, "E-CHOICE: balance is 'dead'"),
        ({"host": "qlor"}, "did you mean 'qlora'"),
        ({"down_init": 0}, "E-CHOICE: down_init is 0"),
        ({"lora_rank": 0}, "E-RANGE: lora_rank is 0"),
        ({"lora_targets": ("q_proj", ".*")}, "E-CHOICE: lora_targets"),
        ({"lora_targets": "q_proj"}, "E-CHOICE: lora_targets"),
        ({"layers": ()}, "E-TYPE: layers"),
        ({"layers": (1, 1)}, "E-RANGE: layers names a layer twice"),
        ({"layers": (-1,)}, "E-RANGE: layers is -1"),
    ],
)
def test_unusable_settings_are_refused_in_one_line(changes, message):
    with pytest.raises(Refusal, match=message) as refusal:
        pesc.Config(**changes)
    assert "\n" not in str(refusal.value)


def test_an_unknown_preset_or_setting_names_the_nearest():
    with pytest.raises(Refusal, match="did you mean 'released'"):
        pesc.Config.preset("release")
    with pytest.raises(Refusal, match="did you mean 'experts'"):
        pesc.Config.preset("fixed", expert=4)
