"""Triton kernels against float64: interpreted on a CPU, compiled where there is a GPU.

An error is held against that of PyTorch's own computation in the same dtype. The interpreter
computes bfloat16 wrongly, so that runs on a GPU alone.
"""

import importlib
import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from moebook.kernels import (
    Bank,
    adapters,
    balance_loss,
    experts,
    lora_mixture,
    route,
    split_experts,
)
from moebook.kernels.lora_mixture import Projection

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    # The first product of autograd's own thread on a GPU.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
SHAPES = [  # T, D, F, E, K
    (12, 8, 4, 4, 2),
    (7, 20, 5, 3, 1),
    (5, 4, 2, 16, 2),  # some experts get no row
    (40, 40, 33, 2, 1),  # more than one tile, and a rest
    (1, 4, 2, 5, 3),
    (0, 4, 2, 3, 2),
    (70, 16, 24, 3, 2),  # widths that Hopper's tensor memory accelerator can fetch
]


def drawn(*shapes, seed=0):
    """Tensors of a size that leaves products near 1, so that float16 holds them."""
    torch.manual_seed(seed)
    tensors = [torch.randn(shape) for shape in shapes]
    return [t / max(t.shape[-1], 1) ** 0.5 if t.dim() == 3 else t for t in tensors]


def outcome(function, inputs, impl):
    """Outputs, then the gradient of every input, all in float64."""
    ys = function(*inputs, impl)
    ys = ys if isinstance(ys, list) else [ys]
    cotangents = [torch.arange(y.numel(), device=y.device).view_as(y).cos().to(y.dtype) for y in ys]
    grads = torch.autograd.grad(ys, inputs, cotangents, allow_unused=True, materialize_grads=True)
    return [tensor.detach().double() for tensor in (*ys, *grads)]


def check(function, shapes, dtype, *, draws=4, also=1e-7):
    """Hold each error, summed over some draws, against twice the reference's own."""
    errors = {"triton": 0.0, "reference": 0.0}
    for seed in range(draws):
        made = [t.to(DEVICE, dtype).requires_grad_() for t in drawn(*shapes, seed=seed)]
        exact = [t.detach().double().requires_grad_() for t in made]
        truth = outcome(function, exact, "reference")
        for impl in errors:
            pairs = zip(outcome(function, made, impl), truth, strict=True)
            errors[impl] = errors[impl] + torch.stack([(a - b).norm() for a, b in pairs])
    assert (errors["triton"] <= 2 * errors["reference"] + also).all(), errors


def through_experts(top_k, act=F.silu):
    return lambda x, logits, gate_up, down, impl: experts(
        x, route(logits, top_k), Bank(gate_up, down), act, impl=impl
    )


def shapes_of_experts(T, D, width, E):
    return [(T, D), (T, E), (E, 2 * width, D), (E, D, width)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts(shape, dtype):
    check(through_experts(shape[4]), shapes_of_experts(*shape[:4]), dtype, draws=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5], SHAPES[6]])
def test_experts_of_another_activation(shape, dtype):
    check(through_experts(shape[4], F.gelu), shapes_of_experts(*shape[:4]), dtype, draws=2)


@pytest.mark.parametrize(
    ("chosen", "D", "width", "act", "dtype"),
    [*(([2, 0], 8, 4, act, torch.float32) for act in (F.silu, F.gelu)),
     ([1], 8, 4, F.silu, torch.float32), ([], 8, 4, F.silu, torch.float32),
     # The accelerator fetches.
     *(([2, 0], 16, 24, act, dtype) for act in (F.silu, F.gelu) for dtype in DTYPES[1:])],
)  # fmt: skip
def test_split_experts(chosen, D, width, act, dtype):
    slots = torch.full((4,), -1)
    slots[torch.tensor(chosen, dtype=torch.long)] = torch.arange(len(chosen))

    def function(x, logits, gate_up, down, own_gate_up, own_down, impl):
        banks = Bank(gate_up, down), Bank(own_gate_up, own_down)
        return split_experts(x, route(logits, 2), *banks, slots.to(DEVICE), act, impl=impl)

    N = len(chosen)
    shapes = [*shapes_of_experts(12, D, width, 4), (N, 2 * width, D), (N, D, width)]
    check(function, shapes, dtype, draws=2)


def test_weights_may_begin_anywhere_in_a_buffer():
    x, logits, gate_up, down = (
        t.to(DEVICE, torch.float16) for t in drawn(*shapes_of_experts(5, 8, 8, 3))
    )
    moved = torch.cat([gate_up.new_zeros(1), gate_up.flatten()])[1:].view_as(gate_up)
    assert moved.data_ptr() % 16
    ys = [through_experts(2)(x, logits, w, down, "triton") for w in (gate_up, moved)]
    assert torch.equal(*ys)


def test_weights_without_a_gradient_change_no_other():
    x, logits, gate_up, down = (t.to(DEVICE) for t in drawn(*shapes_of_experts(12, 8, 4, 4)))
    x.requires_grad_()
    down.requires_grad_()
    y = through_experts(2)(x, logits, gate_up, down, "triton")
    grads = torch.autograd.grad(y.sum(), [x, down])
    gate_up.requires_grad_()
    y = through_experts(2)(x, logits, gate_up, down, "triton")
    again = torch.autograd.grad(y.sum(), [x, down, gate_up])
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=False))


@pytest.mark.parametrize(
    ("kilobytes", "enough"), [(227, True), (163, True), (99, False), (64, False)]
)
def test_large_tiles_are_for_gpus_that_have_the_shared_memory(kilobytes, enough, monkeypatch):
    grouped = importlib.import_module("moebook.kernels._triton.grouped")
    has = SimpleNamespace(shared_memory_per_block_optin=kilobytes * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: has)
    assert grouped.roomy(torch.device("cuda", 0)) == enough


def through_adapters(top_k, apart):
    def function(h, other, logits, down, up, impl):
        routing, source = route(logits, top_k), other if apart else None
        return adapters(h, routing, down, up, scale=0.7, source=source, impl=impl)

    return function


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES[:3], (6, 20, 3, 5, 3), (45, 40, 5, 2, 2), SHAPES[5]])
def test_adapters(shape, apart, dtype):
    T, D, R, E, K = shape
    shapes = [(T, D), (T, D), (T, E), (E, D, R), (E, R, D)]
    check(through_adapters(K, apart), shapes, dtype, draws=1 + 2 * (T < 10))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 8, 4, 3, (8, 5)), (70, 6, 3, 1, (4,)), (0, 4, 2, 2, (3,))])
def test_lora_mixture(shape, dtype):
    T, D, R, N, widths = shape
    shapes = [(T, D)]
    for width in widths:
        shapes += [(T, width), (T, N), (N, R, D), (N, width, R)]

    def function(x, *tensors_and_impl):
        *tensors, impl = tensors_and_impl
        parts = zip(*(tensors[i::4] for i in range(4)), strict=True)
        return lora_mixture(x, [Projection(*part, 0.7) for part in parts], impl=impl)

    check(function, shapes, dtype)


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_a_mixture_keeps_leading_dimensions(lead):
    shapes = [(*lead, 8), (*lead, 5), (*lead, 3), (3, 4, 8), (3, 5, 4)]
    x, *parts = (t.to(DEVICE) for t in drawn(*shapes))
    ours, plain = (lora_mixture(x, [Projection(*parts)], impl=impl)[0]
                   for impl in ("triton", "reference"))  # fmt: skip
    torch.testing.assert_close(ours, plain)


def test_a_mixture_of_float32_loras_beside_a_half_precision_layer_keeps_both_dtypes():
    x, base, gates, down, up = drawn((6, 8), (6, 5), (6, 3), (3, 4, 8), (3, 5, 4))
    inputs = [t.to(DEVICE).requires_grad_() for t in (x, base.half(), gates, down, up)]
    ys = [lora_mixture(inputs[0], [Projection(*inputs[1:])], impl=impl)[0]
          for impl in ("triton", "reference")]  # fmt: skip
    assert ys[0].dtype == torch.float16
    torch.testing.assert_close(*ys, rtol=2e-3, atol=2e-3)
    grads = [torch.autograd.grad(y.float().sum(), inputs) for y in ys]
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "width", "top_k"), [(70, 5, 2), (3, 8, 8), (9, 1, 1), (0, 3, 1)]
)
def test_route(tokens, width, top_k, dtype):
    torch.manual_seed(0)
    logits = torch.randn(tokens, width).round(decimals=1).to(DEVICE, dtype)  # rounding makes ties
    made, wanted = (route(logits, top_k, impl=impl) for impl in ("triton", "reference"))
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


def test_route_chooses_an_expert_once_where_few_logits_are_finite():
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf], [-torch.inf] * 3], device=DEVICE)
    made, wanted = (route(logits, 2, impl=impl) for impl in ("triton", "reference"))
    assert torch.equal(made.ids, wanted.ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tokens", "width", "top_k"), [(70, 5, 2), (3, 8, 1), (0, 3, 1)])
def test_balance_loss(tokens, width, top_k, masked, dtype):
    mask = torch.arange(tokens, device=DEVICE) % 3 > 0 if masked else None

    def function(logits, impl):
        return balance_loss(logits, route(logits, top_k).ids, mask=mask, impl=impl)

    check(function, [(tokens, width)], dtype)


def test_balance_loss_in_its_constant_form_is_the_constant():
    logits = torch.randn(9, 4, device=DEVICE)
    value = balance_loss(logits, route(logits, 2).ids, form="constant", impl="triton")
    assert value.item() == pytest.approx(2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_real_size_on_a_gpu(dtype):
    shape = (4096, 1024, 704, 64, 6)
    check(through_experts(6), shapes_of_experts(*shape[:4]), dtype, draws=1)
    made = [t.to(DEVICE, dtype).requires_grad_() for t in drawn(*shapes_of_experts(*shape[:4]))]
    first, second = (outcome(through_experts(6), made, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
