"""Triton kernels where `test_recipe` does not look, interpreted on a CPU or compiled for a GPU."""

import importlib
import os
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from moebook.errors import Refusal
from moebook.kernels import Bank, adapters, experts, route, split_experts
from moebook.kernels.lora_mixture import lora_mixture
from moebook.kernels.similarity import duplicates

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    # The first product of autograd's own thread on a GPU.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
LORAS = (6, 8), (6, 5), (6, 3), (3, 4, 8), (3, 5, 4)  # x, base, gates, down, up


def drawn(*shapes):
    torch.manual_seed(0)
    return [(torch.randn(shape) / shape[-1] ** 0.5).to(DEVICE) for shape in shapes]


def through_experts(x, logits, gate_up, down):
    return experts(x, route(logits, 2), Bank(gate_up, down), F.silu, impl="triton")


def test_weights_may_begin_anywhere_in_a_buffer():
    x, logits, gate_up, down = (t.half() for t in drawn((5, 8), (5, 3), (3, 16, 8), (3, 8, 8)))
    moved = torch.cat([gate_up.new_zeros(1), gate_up.flatten()])[1:].view_as(gate_up)
    assert moved.data_ptr() % 16
    ys = [through_experts(x, logits, weight, down) for weight in (gate_up, moved)]
    assert torch.equal(*ys)


@pytest.mark.parametrize(
    ("kilobytes", "enough"), [(227, True), (163, True), (99, False), (64, False)]
)
def test_large_tiles_are_for_gpus_that_have_the_shared_memory(kilobytes, enough, monkeypatch):
    grouped = importlib.import_module("moebook.kernels._triton.grouped")
    has = SimpleNamespace(shared_memory_per_block_optin=kilobytes * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: has)
    assert grouped.roomy(torch.device("cuda", 0)) == enough


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
    grouped = importlib.import_module("moebook.kernels._triton.grouped")
    setattr(torch.backends.cuda.matmul, name, value)
    precision = grouped.precision()
    torch.backends.cuda.matmul.allow_tf32 = False
    assert precision == wanted


def test_a_trained_expert_that_no_slot_names_has_a_gradient_of_zero():
    shapes = (12, 8), (12, 4), (4, 8, 8), (4, 8, 4), (2, 8, 8), (2, 8, 4)
    x, logits, *weights = (t.requires_grad_() for t in drawn(*shapes))
    slots = torch.tensor([-1, 0, -1, -1], device=DEVICE)
    banks = Bank(*weights[:2]), Bank(*weights[2:])
    y = split_experts(x, route(logits, 2), *banks, slots, F.silu, impl="triton")
    for grad in torch.autograd.grad(y.sum(), weights[2:]):
        assert grad[0].abs().sum() > 0 and grad[1].abs().sum() == 0


def test_weight_gradients_of_frozen_adapters_are_not_computed(monkeypatch):
    h, logits, *factors = drawn((9, 8), (9, 4), (4, 8, 4), (4, 4, 8))

    def grads(*trained):
        parts = [t.detach().requires_grad_(n in trained) for n, t in enumerate((h, *factors))]
        y = adapters(parts[0], route(logits, 2), *parts[1:], impl="triton")
        return torch.autograd.grad(y.cos().sum(), [parts[n] for n in trained])

    want = grads(0, 1, 2)
    for n in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(grads(0, n), (want[0], want[n]), strict=True))
    monkeypatch.delattr("moebook.kernels._triton.adapters.weight_gradient")
    assert torch.equal(grads(0)[0], want[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU computes in bfloat16")
def test_a_base_that_the_interpreter_would_round_wrongly_is_refused():
    x, base, *parts = drawn(*LORAS)
    for wrong in (base.bfloat16(), base.double()):
        with pytest.raises(Refusal, match="E-IMPL: lora_mixture: impl='triton' cannot run"):
            lora_mixture(x, wrong, *parts, impl="triton")


def test_numbers_of_numpy_are_numbers_to_a_kernel():
    x, *parts = drawn(*LORAS)
    scales, thresholds = (0.5, np.float32(0.5)), (0.5, np.float32(0.5), torch.tensor(0.5))
    ys = [lora_mixture(x, *parts, scale, impl="triton") for scale in scales]
    assert torch.equal(*ys)
    first, *others = (duplicates(x, x[:, 0], each, impl="triton") for each in thresholds)
    assert all(torch.equal(other, first) for other in others)


def test_a_mixture_of_float32_loras_beside_a_half_precision_layer_keeps_both_dtypes():
    x, base, *parts = drawn(*LORAS)
    inputs = [t.requires_grad_() for t in (x, base.half(), *parts)]
    ys = [lora_mixture(*inputs, impl=impl) for impl in ("triton", "reference")]
    assert ys[0].dtype == torch.float16
    torch.testing.assert_close(*ys, rtol=2e-3, atol=2e-3)
    grads = [torch.autograd.grad(y.float().sum(), inputs) for y in ys]
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_route_in_triton_chooses_what_the_reference_chooses_of_equal_and_odd_logits(dtype):
    torch.manual_seed(0)
    logits = torch.randn(90, 12).round(decimals=1).to(dtype)
    odd = torch.inf, -torch.inf, torch.nan, -torch.tensor(torch.nan), -0.0, torch.finfo(dtype).min
    for number in odd:
        logits[torch.rand(logits.shape) < 0.1] = number
    logits[0] = -torch.inf
    ours, wanted = (route(logits.to(DEVICE), 6, impl=impl) for impl in ("triton", "reference"))
    for part in ("ids", "order", "counts"):
        assert torch.equal(getattr(ours, part), getattr(wanted, part)), part
