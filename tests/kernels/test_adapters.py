"""adapters: a plain loop over tokens and experts in float64 is the truth."""

import math
import os
from importlib.util import find_spec

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels import Routing, adapters, grouped, route

SHAPES = [  # T, D, R, E, K
    (12, 8, 4, 4, 2),
    (7, 6, 5, 3, 1),
    (1, 4, 2, 5, 3),
    (5, 4, 2, 16, 2),  # some experts get no row
    (0, 4, 2, 3, 2),
    (260, 6, 3, 2, 2),  # enough tokens to sort them by pair
]


def loop(h, source, ids, weights, down, up, scale):
    """Token by token, expert by expert, with its own gelu."""
    rows = []
    for t in range(len(h)):
        row = h[t]
        for k in range(ids.shape[1]):
            expert = int(ids[t, k])
            pre = source[t] @ down[expert]
            active = pre * 0.5 * (1 + torch.erf(pre / math.sqrt(2)))
            row = row + scale * weights[t, k] * (active @ up[expert])
        rows.append(row)
    return torch.stack(rows) if rows else h.clone()


def case(T, D, R, E, K):
    torch.manual_seed(T + E)
    shapes = [(T, D), (T, D), (T, E), (E, D, R), (E, R, D)]
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def run(function, inputs, top_k):
    h, source, logits, down, up = inputs
    out = function(h, source, logits, down, up, top_k)
    cotangent = torch.arange(out.numel(), dtype=torch.float64).view_as(out).cos().to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, cotangent)]


def by_loop(h, source, logits, down, up, top_k):
    values, ids = logits.sort(dim=1, descending=True)
    weights = values[:, :top_k].exp() / values[:, :top_k].exp().sum(1, keepdim=True)
    return loop(h, source, ids[:, :top_k], weights, down, up, 0.7)


def by_op(impl):
    def call(h, source, logits, down, up, top_k):
        return adapters(h, route(logits, top_k), down, up, scale=0.7, source=source, impl=impl)

    return call


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_plain_loop(shape, impl):
    inputs = case(*shape)
    for got, want in zip(
        run(by_op(impl), inputs, shape[-1]),
        run(by_loop, inputs, shape[-1]) if shape[0] else run(by_op("reference"), inputs, shape[-1]),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_gradcheck_in_float64(impl):
    inputs = case(6, 4, 3, 3, 2)
    assert torch.autograd.gradcheck(lambda *args: by_op(impl)(*args, 2), inputs)


@pytest.mark.parametrize("tokens", [6, 600])  # by expert, by pair
def test_what_is_its_own_source_has_one_gradient_for_both(tokens):
    h, _, logits, down, up = case(tokens, 4, 3, 3, 2)
    routing = route(logits.detach(), 2)
    found = [adapters(h, routing, down, up, impl=impl) for impl in ("torch", "reference")]
    grads = [torch.autograd.grad(y.cos().sum(), [h, down, up]) for y in found]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_permuting_the_experts_changes_nothing():
    h, source, logits, down, up = case(20, 8, 4, 5, 2)
    order = torch.tensor([3, 0, 4, 1, 2])
    before = by_op("torch")(h, source, logits, down, up, 2)
    after = by_op("torch")(h, source, logits[:, order], down[order], up[order], 2)
    torch.testing.assert_close(before, after)


def twice(function, tensors, top_k):
    """Output and gradients where tokens choose one expert twice, the other twice, or both."""
    h, source, logits, down, up = (tensor.requires_grad_() for tensor in tensors)
    slots = torch.arange(len(h) * top_k, device=h.device)
    ids = (slots % 3 // 2).view(len(h), top_k)  # 0 0 1, 0 0 1, ...
    weights = logits[:, :1].sigmoid() * torch.arange(1, top_k + 1, device=h.device)
    out = function(h, source, ids, weights, down, up)
    return [out, *torch.autograd.grad(out.cos().sum(), [h, source, logits, down, up])]


def over_ids(impl):
    return lambda h, source, ids, weights, down, up: adapters(
        h, grouped(ids, weights, len(down)), down, up, source=source, impl=impl
    )


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(("tokens", "top_k"), [(5, 2), (7, 3), (300, 2)])  # the last by pair
def test_an_expert_chosen_twice_counts_twice(tokens, top_k, impl):
    inputs = case(tokens, 6, 3, 2, top_k)
    got = twice(over_ids(impl), inputs, top_k)
    want = twice(lambda *given: loop(*given, 1.0), inputs, top_k)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("rank", "top_k"), [(3, 2), (40, 2), (3, 3)])  # the first by pair
def test_an_expert_chosen_twice_counts_twice_in_triton(rank, top_k):
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    drawn = [tensor.detach().to(device, torch.float32) for tensor in case(7, 16, rank, 2, top_k)]
    drawn[3:] = [factor / factor.shape[1] ** 0.5 for factor in drawn[3:]]
    found, wanted = (twice(over_ids(impl), drawn, top_k) for impl in ("triton", "reference"))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_an_expert_without_rows_gets_a_zero_gradient():
    h, source, _, down, up = case(5, 4, 2, 3, 1)
    logits = torch.zeros(5, 3, dtype=torch.float64)  # ties: expert 0 takes all
    adapters(h, route(logits, 1), down, up, source=source).sum().backward()
    assert down.grad[0].abs().sum() > 0
    assert down.grad[1:].abs().sum() == 0
    assert up.grad[1:].abs().sum() == 0


def test_shapes_that_do_not_fit_are_refused():
    h, _, logits, down, up = case(5, 4, 2, 3, 1)
    routing = route(logits, 1)
    short = Routing(routing.ids[:2], *routing[1:])
    calls = [(h, routing, down[:2], up), (h, routing, down, up.mT), (h, short, down, up)]
    for call in calls:
        with pytest.raises(Refusal, match="E-SHAPE: adapters"):
            adapters(*call)
    with pytest.raises(Refusal, match="E-IMPL"):
        adapters(h, routing, down, up, impl="cuda")
