"""adapters: a plain loop over tokens and experts in float64 is the truth."""

import math
import os
from importlib.util import find_spec

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels import adapters, grouped, route

SHAPES = [  # T, D, R, E, K
    (12, 8, 4, 4, 2),
    (7, 6, 5, 3, 1),
    (1, 4, 2, 5, 3),
    (5, 4, 2, 16, 2),  # some experts get no row
    (0, 4, 2, 3, 2),
    (260, 6, 3, 2, 2),  # enough tokens to sort them by pair
]
both = pytest.mark.parametrize("impl", ["torch", "reference"])


def loop(h, source, ids, weights, down, up, scale=0.7):
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


def run(function, inputs, *rest):
    out = function(*inputs, *rest)
    cotangent = torch.arange(out.numel(), device=out.device).view_as(out).cos().to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, cotangent)]


def close(got, want, tolerance=1e-10):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def by_loop(h, source, logits, down, up, top_k):
    values, ids = logits.sort(dim=1, descending=True)
    weights = values[:, :top_k].exp() / values[:, :top_k].exp().sum(1, keepdim=True)
    return loop(h, source, ids[:, :top_k], weights, down, up)


def by_op(impl):
    def call(h, source, logits, down, up, top_k):
        return adapters(h, route(logits, top_k), down, up, scale=0.7, source=source, impl=impl)

    return call


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_plain_loop(shape, impl):
    inputs, truth = case(*shape), by_loop if shape[0] else by_op("reference")
    close(run(by_op(impl), inputs, shape[-1]), run(truth, inputs, shape[-1]))


@both
def test_gradcheck_in_float64(impl):
    assert torch.autograd.gradcheck(lambda *args: by_op(impl)(*args, 2), case(6, 4, 3, 3, 2))


@pytest.mark.parametrize("tokens", [6, 600])  # by expert, by pair
def test_what_is_its_own_source_has_one_gradient_for_both(tokens):
    h, _, logits, down, up = case(tokens, 4, 3, 3, 2)
    routing = route(logits.detach(), 2)
    ys = [adapters(h, routing, down, up, impl=impl) for impl in ("torch", "reference")]
    close(*(torch.autograd.grad(y.cos().sum(), [h, down, up]) for y in ys))


def twice(function):
    """Tokens that choose one expert twice, the other twice, or both."""

    def call(h, source, logits, down, up, top_k):
        slots = torch.arange(len(h) * top_k, device=h.device)
        ids = (slots % 3 // 2).view(len(h), top_k)  # 0 0 1, 0 0 1, ...
        weights = logits[:, :1].sigmoid() * torch.arange(1, top_k + 1, device=h.device)
        return function(h, source, ids, weights, down, up)

    return call


def over_ids(impl):
    def call(h, source, ids, weights, down, up):
        by = grouped(ids, weights, len(down))
        return adapters(h, by, down, up, scale=0.7, source=source, impl=impl)

    return call


@both
@pytest.mark.parametrize(("tokens", "top_k"), [(5, 2), (7, 3), (300, 2)])  # the last by pair
def test_an_expert_chosen_twice_counts_twice(tokens, top_k, impl):
    inputs = case(tokens, 6, 3, 2, top_k)
    close(run(twice(over_ids(impl)), inputs, top_k), run(twice(loop), inputs, top_k))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_an_expert_chosen_twice_counts_twice_in_triton():
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    inputs = [t.detach().to(device, torch.float32) for t in case(7, 16, 3, 2, 2)]
    inputs[3:] = [factor / factor.shape[1] ** 0.5 for factor in inputs[3:]]
    leaves = [tensor.requires_grad_() for tensor in inputs]
    close(*(run(twice(over_ids(impl)), leaves, 2) for impl in ("triton", "reference")), 1e-4)


@pytest.mark.parametrize("shape", [(5, 4, 2, 3, 1), (5, 4, 65, 3, 2), (5, 4, 2, 65, 2)])
def test_triton_takes_two_adapters_a_token_and_few_narrow_ones(shape):
    with pytest.raises(Refusal, match=r"E-IMPL: adapters: .* it takes 2 of at most 64 experts"):
        by_op("triton")(*case(*shape), shape[-1])


def test_shapes_that_do_not_fit_are_refused():
    h, _, logits, down, up = case(5, 4, 2, 3, 1)
    for wrong in ((logits, down[:2], up), (logits, down, up.mT), (logits[:2], down, up)):
        with pytest.raises(Refusal, match="E-SHAPE: adapters"):
            by_op("torch")(h, h, *wrong, 1)
