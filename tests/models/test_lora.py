"""LoRA as methods train it: PEFT's numbers, in fewer passes; PEFT's own where it is not plain."""

import copy
from functools import partial

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.lora import Linear, LoraLayer
from torch import nn

from moebook.models import lora
from moebook.nn import Dropout
from moebook.nn.lora import lora_step

SHARE = 0.25
SCALE = 2.5


def layers(*, bias=False, dtype=torch.float64, share=SHARE):
    """A layer as we put it on, and PEFT's own around the same weights and with our dropout."""
    torch.manual_seed(0)
    host = nn.ModuleDict({"layer": nn.Linear(12, 20, bias=bias).to(dtype)})
    config = LoraConfig(
        r=4, lora_alpha=4 * SCALE, lora_dropout=share, target_modules=["layer"]
    )
    ours = lora.put_on(host, config)["layer"].to(dtype).train()
    for part in ours.parameters():
        nn.init.normal_(part)
    theirs = copy.deepcopy(ours)
    theirs.__class__ = Linear
    assert type(ours) is lora.LoraLinear
    return ours, theirs


def run(layer, x):
    """The output and all gradients of a pass whose random numbers are those of seed 3."""
    torch.manual_seed(3)
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    y = layer(leaf)
    y.backward(torch.arange(y.numel()).cos().view_as(y).to(y))
    return [y, leaf.grad, *(part.grad for part in layer.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 12), (2, 5, 12), (1, 12)])
@pytest.mark.parametrize("graded", [False, True])
def test_a_step_with_dropout_is_pefts(bias, shape, graded):
    ours, theirs = layers(bias=bias)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=graded)
    for mine, right in zip(run(ours, x), run(theirs, x), strict=True):
        if right is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    assert "_Step" in type(ours(x).grad_fn.next_functions[0][0]).__name__


def test_gradients_are_those_of_differences():
    torch.manual_seed(1)
    draw = partial(torch.randn, dtype=torch.float64)
    x = draw(6, 5, requires_grad=True)
    down = draw(2, 5, requires_grad=True)
    up = draw(4, 2, requires_grad=True)
    weight = draw(4, 5)
    bias = draw(4)

    def step(*leaves):
        torch.manual_seed(2)
        return lora_step(leaves[0], weight, bias, *leaves[1:], scale=1.5, share=0.5)

    assert torch.autograd.gradcheck(step, (x, down, up))


NOT_PLAIN = {
    "evaluation": lambda layer: layer.eval(),
    "merged": lambda layer: layer.merge(),
    "trained base": lambda layer: layer.base_layer.weight.requires_grad_(True),
    "base in 16 bits": lambda layer: layer.base_layer.bfloat16(),
    "switched off": lambda layer: layer.enable_adapters(False),
    "no dropout": lambda layer: layer.lora_dropout.update({"default": nn.Identity()}),
    "dropout of nothing": lambda layer: layer.lora_dropout.update(
        {"default": Dropout(0.0)}
    ),
    "another base": lambda layer: setattr(
        layer, "base_layer", nn.Sequential(layer.base_layer)
    ),
}


@pytest.mark.parametrize("change", NOT_PLAIN.values(), ids=list(NOT_PLAIN))
def test_what_is_no_plain_step_is_pefts_own_bit_for_bit(change):
    ours, theirs = layers()
    for layer in (ours, theirs):
        change(layer)
    x = torch.randn(3, 12, dtype=torch.float64)
    x = x.to(next(ours.base_layer.parameters()).dtype)
    torch.manual_seed(4)
    mine = ours(x)
    torch.manual_seed(4)
    assert torch.equal(mine, theirs(x))


def test_under_autocast_it_is_pefts_own():
    ours, theirs = layers(dtype=torch.float32)
    outputs = []
    for layer in (ours, theirs):
        torch.manual_seed(4)
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(layer(torch.ones(3, 12)))
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(*outputs)


def test_masks_are_drawn_at_the_rate_and_anew_at_each_pass():
    ours, _ = layers()
    down = ours.lora_A["default"].weight
    up = ours.lora_B["default"].weight
    with torch.no_grad():
        ours.base_layer.weight.zero_()
        down.zero_()[0, 0] = 1.0
        up.zero_()[0, 0] = 1.0
    x = torch.ones(100_000, 12, dtype=torch.float64)
    first = ours(x)[:, 0]
    # A row reads one element of x: dropped, or scaled up so that the mean stays.
    assert first.unique().tolist() == pytest.approx([0.0, SCALE / (1 - SHARE)])
    deviation = (SHARE * (1 - SHARE) / len(x)) ** 0.5
    assert float((first == 0).double().mean()) == pytest.approx(
        SHARE, abs=4 * deviation
    )
    assert not torch.equal(first, ours(x)[:, 0])


def test_on_another_device_it_is_pefts_own():
    ours, theirs = layers()
    for layer in (ours, theirs):
        layer.to("meta")
    x = torch.empty(3, 12, dtype=torch.float64, device="meta")
    assert type(ours(x).grad_fn) is type(theirs(x).grad_fn)
    assert "_Step" not in type(ours(x).grad_fn.next_functions[0][0]).__name__


def test_peft_saves_loads_and_merges_our_layers_as_its_own(tmp_path):
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 4))
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=SHARE, target_modules=["0", "1"]
    )
    ours = lora.in_wrapper(copy.deepcopy(host), config)
    theirs = get_peft_model(copy.deepcopy(host), config)
    assert {type(layer) for layer in ours.modules() if isinstance(layer, Linear)} == {
        lora.LoraLinear
    }
    for name, part in ours.named_parameters():
        if "lora_" in name:
            nn.init.normal_(part)
    tensors = get_peft_model_state_dict(ours)
    assert list(tensors) == list(get_peft_model_state_dict(theirs))

    ours.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(host), tmp_path)
    x = torch.randn(3, 12)
    assert torch.equal(loaded.eval()(x), ours.eval()(x))
    set_peft_model_state_dict(theirs, tensors)
    assert torch.equal(theirs.eval()(x), ours(x))
    # In float64, where no machine's order of sums is seen.
    merged = ours.double().merge_and_unload()
    assert not any(isinstance(part, LoraLayer) for part in merged.modules())
    torch.testing.assert_close(merged(x.double()), theirs.double()(x.double()))
