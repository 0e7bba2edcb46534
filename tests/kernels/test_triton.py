"""Triton kernels where `test_recipe` does not look, interpreted on a CPU or compiled for a GPU."""

import os
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calls import call, draw

from moebook.errors import Refusal
from moebook.kernels import route

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    # The first product of autograd's own thread on a GPU.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SIZES = {"T": 12, "D": 8, "E": 4, "F": 8, "N": 2, "R": 4, "O": 5, "S": 6}


def given(op, dtype=torch.float32):
    return draw(op, SIZES, dtype, DEVICE)


def test_weights_may_begin_anywhere_in_a_buffer():
    of = given("experts", torch.float16)
    weight = of["gate_up"]
    moved = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view_as(weight)
    assert moved.data_ptr() % 16
    assert torch.equal(
        *(call("experts", of | {"gate_up": w}, "triton") for w in (weight, moved))
    )


@pytest.mark.parametrize("kilobytes", [227, 163, 99, 64])
def test_large_tiles_are_for_gpus_that_have_the_shared_memory(kilobytes, monkeypatch):
    from moebook.kernels._triton import grouped

    has = SimpleNamespace(shared_memory_per_block_optin=kilobytes * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: has)
    assert grouped.roomy(torch.device("cuda", 0)) == (kilobytes > 99)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("fp32_precision", "tf32", "tf32"),
        ("fp32_precision", "ieee", "ieee"),
        ("allow_tf32", True, "tf32"),
        ("allow_tf32", False, "ieee"),
    ],
)
def test_float32_is_multiplied_as_pytorch_is_told_by_either_name(name, value, wanted):
    from moebook.kernels._triton import grouped

    setattr(torch.backends.cuda.matmul, name, value)
    precision = grouped.precision()
    torch.backends.cuda.matmul.allow_tf32 = False
    assert precision == wanted


def test_a_broken_expert_that_serves_no_token_spoils_no_gradient_of_its_neighbour():
    sizes = SIZES | {"D": 64, "F": 40}  # 2F is no multiple of a block's depth
    of = draw("experts", sizes, torch.float16, DEVICE)
    of["logits"] = torch.tensor([[5.0, -5, -5, -5]] * sizes["T"], device=DEVICE)
    of["x"].requires_grad_()
    found = []
    for number in (0.0, torch.inf):
        of["gate_up"][1] = of["down"][1] = number
        y = call("experts", of, "triton", K=1)
        found.append((y, *torch.autograd.grad(y.float().sum(), of["x"])))
    for whole, beside_broken in zip(*found, strict=True):
        assert torch.equal(whole, beside_broken)


def test_a_trained_expert_that_no_slot_names_has_a_gradient_of_zero():
    of = {name: t.requires_grad_() for name, t in given("split_experts").items()}
    slots = torch.tensor([-1, 0, -1, -1], device=DEVICE)
    y = call("split_experts", of | {"slots": slots}, "triton")
    for grad in torch.autograd.grad(
        y.sum(), [of["trained_gate_up"], of["trained_down"]]
    ):
        assert grad[0].abs().sum() > 0
        assert grad[1].abs().sum() == 0


def test_weight_gradients_of_frozen_adapters_are_not_computed(monkeypatch):
    def grads(*trained):
        of = {
            name: t.requires_grad_(name in trained)
            for name, t in given("adapters").items()
        }
        of["source"] = None
        y = call("adapters", of, "triton")
        return torch.autograd.grad(y.cos().sum(), [of[name] for name in trained])

    want = dict(zip(("h", "down", "up"), grads("h", "down", "up"), strict=True))
    for name in ("down", "up"):
        got = grads("h", name)
        assert torch.equal(got[0], want["h"])
        assert torch.equal(got[1], want[name])
    monkeypatch.delattr("moebook.kernels._triton.adapters.weight_gradient")
    assert torch.equal(grads("h")[0], want["h"])


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU computes in bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_base_that_the_interpreter_would_round_wrongly_is_refused(dtype):
    of = given("lora_mixture")
    with pytest.raises(Refusal, match="E-IMPL: lora_mixture: impl='triton' cannot run"):
        call("lora_mixture", of | {"base": of["base"].to(dtype)}, "triton")


@pytest.mark.parametrize(
    ("op", "name", "number"),
    [
        ("lora_mixture", "scale", np.float32(0.5)),
        ("duplicates", "threshold", np.float32(0.5)),
        ("duplicates", "threshold", torch.tensor(0.5)),
    ],
)
def test_numbers_of_numpy_and_pytorch_are_numbers_to_a_kernel(op, name, number):
    of = given(op) | {"key": torch.ones(6, device=DEVICE)}
    assert torch.equal(
        *(call(op, of, "triton", **{name: value}) for value in (0.5, number))
    )


def test_a_mixture_of_float32_loras_beside_a_half_precision_layer_keeps_both_dtypes():
    of = given("lora_mixture")
    of = {n: (t.half() if n == "base" else t).requires_grad_() for n, t in of.items()}
    ys = [call("lora_mixture", of, impl) for impl in ("triton", "reference")]
    assert ys[0].dtype == torch.float16
    torch.testing.assert_close(*ys, rtol=2e-3, atol=2e-3)
    grads = [torch.autograd.grad(y.float().sum(), list(of.values())) for y in ys]
    for a, b in zip(*grads, strict=True):  # and their dtypes
        torch.testing.assert_close(a, b, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_route_in_triton_chooses_what_the_reference_chooses_of_equal_and_odd_logits(
    dtype,
):
    torch.manual_seed(0)
    logits = torch.randn(90, 12).round(decimals=1).to(dtype)
    odd = (
        torch.inf,
        -torch.inf,
        torch.nan,
        -torch.tensor(torch.nan),
        -0.0,
        torch.finfo(dtype).min,
    )
    for number in odd:
        logits[torch.rand(logits.shape) < 0.1] = number
    logits[0] = -torch.inf
    logits = logits.to(DEVICE)
    ours = route(logits, 6, impl="triton")
    wanted = route(logits, 6, impl="reference")
    for part in (0, 2, 3):  # all but the weights, which may be NaN
        assert torch.equal(ours[part], wanted[part])
