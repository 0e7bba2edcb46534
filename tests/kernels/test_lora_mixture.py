"""mixture of LoRAs: a plain loop over tokens, projections and experts in float64 is the truth."""

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels.lora_mixture import Projection, lora_mixture

SHAPES = [  # T, D, R, N, widths of the projections
    (6, 8, 4, 3, (8, 5)),
    (5, 6, 2, 1, (4,)),
    (1, 4, 3, 4, (2, 2, 7)),
    (0, 4, 2, 2, (3,)),
]
SCALE = 0.7


def case(T, D, R, N, widths):
    """x, then base, gates, down and up of each projection; some gates are zero."""
    torch.manual_seed(T + N)
    tensors = [torch.randn(T, D)]
    for width in widths:
        gates = torch.rand(T, N) * (torch.rand(T, N) < 0.7)
        tensors += [torch.randn(T, width), gates, torch.randn(N, R, D), torch.randn(N, width, R)]
    return [tensor.double().requires_grad_() for tensor in tensors]


def projections(tensors):
    parts = zip(*(tensors[1 + i :: 4] for i in range(4)), strict=True)
    return [Projection(*part, SCALE) for part in parts]


def op(impl):
    return lambda *tensors: lora_mixture(tensors[0], projections(tensors), impl=impl)


def loop(x, *rest):
    ys = []
    for base, gates, down, up, scale in projections((x, *rest)):
        rows = [
            base[t]
            + scale * sum(gates[t, n] * (up[n] @ (down[n] @ x[t])) for n in range(len(down)))
            for t in range(len(x))
        ]
        ys.append(torch.stack(rows))
    return ys


def run(function, inputs):
    """All outputs, then the gradient of every input."""
    ys = function(*inputs)
    cotangents = [torch.arange(y.numel()).view_as(y).cos().to(y.dtype) for y in ys]
    return [*ys, *torch.autograd.grad(ys, inputs, cotangents)]


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_plain_loop(shape, impl):
    inputs = case(*shape)
    truth = loop if shape[0] else op("reference")
    for got, want in zip(run(op(impl), inputs), run(truth, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_gradcheck_in_float64(impl):
    inputs = case(3, 4, 2, 2, (3, 2))
    assert torch.autograd.gradcheck(lambda *tensors: tuple(op(impl)(*tensors)), inputs)


@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
def test_any_mixture_of_dtypes_is_as_accurate_as_the_reference(of_x, of_base, of_gates):
    dtypes = [of_x, *[of_base, of_gates, of_x, of_x] * 2]
    inputs = [
        tensor.detach().to(dtype).requires_grad_()
        for tensor, dtype in zip(case(64, 16, 4, 4, (16, 8)), dtypes, strict=True)
    ]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = run(op("reference"), exact)
    fast, plain = (run(op(impl), inputs) for impl in ("torch", "reference"))
    for a, b, want in zip(fast, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert fast[0].dtype == of_base
        assert (a - want).norm() <= 2 * (b - want).norm() + 1e-12


def test_only_the_gradients_asked_for_are_computed_and_that_of_a_base_is_the_incoming_one():
    inputs = case(6, 8, 4, 3, (8, 5))
    want = run(op("torch"), inputs)[2:]
    for chosen in ([0], [2], [3, 7], [4], [1, 5], [2, 6, 0]):
        parts = [t.detach().requires_grad_(i in chosen) for i, t in enumerate(inputs)]
        ys = [y for y in op("torch")(*parts) if y.requires_grad]
        cotangents = [torch.arange(y.numel()).view_as(y).cos().double() for y in ys]
        got = torch.autograd.grad(ys, [parts[i] for i in chosen], cotangents)
        for place, grad in zip(chosen, got, strict=True):
            torch.testing.assert_close(grad, want[place], rtol=1e-12, atol=1e-12)
        if chosen == [1, 5]:
            assert [g.data_ptr() for g in got] == [c.data_ptr() for c in cotangents]


def test_leading_dimensions_are_kept():
    inputs = [tensor.detach() for tensor in case(6, 8, 4, 3, (8, 5))]
    flat = op("torch")(*inputs)
    shaped = [t.unflatten(0, (2, 3)) if len(t) == 6 else t for t in inputs]
    for got, want in zip(op("torch")(*shaped), flat, strict=True):
        torch.testing.assert_close(got.flatten(0, 1), want)


def test_arguments_that_do_not_fit_are_refused():
    inputs = [tensor.detach() for tensor in case(6, 8, 4, 3, (8, 5))]
    for place in range(len(inputs)):
        wrong = list(inputs)
        wrong[place] = wrong[place][..., :-1]
        with pytest.raises(Refusal, match=r"E-SHAPE: lora_mixture: .*projection"):
            op("torch")(*wrong)
    wrong = [*inputs[:5], inputs[5].to("meta"), *inputs[6:]]
    with pytest.raises(Refusal, match="E-DEVICE: lora_mixture: projection 1"):
        op("torch")(*wrong)
    with pytest.raises(Refusal, match="E-IMPL: lora_mixture"):
        op("c")(*inputs)
