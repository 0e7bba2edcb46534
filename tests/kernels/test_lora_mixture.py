"""mixture of LoRAs: a plain loop over tokens and experts in float64 is the truth."""

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels.lora_mixture import lora_mixture

SHAPES = [(6, 8, 4, 3, 5), (5, 6, 2, 1, 4), (1, 4, 3, 4, 7), (0, 4, 2, 2, 3)]  # T, D, R, N, O
SCALE = 0.7
both = pytest.mark.parametrize("impl", ["torch", "reference"])


def case(T, D, R, N, width):
    """x, base, gates, down and up; some gates are zero."""
    torch.manual_seed(T + N)
    gates = torch.rand(T, N) * (torch.rand(T, N) < 0.7)
    drawn = torch.randn(T, D), torch.randn(T, width), gates
    drawn += torch.randn(N, R, D), torch.randn(N, width, R)
    return [tensor.double().requires_grad_() for tensor in drawn]


def op(impl):
    return lambda *tensors: lora_mixture(*tensors, SCALE, impl=impl)


def loop(x, base, gates, down, up):
    rows = [
        base[t] + SCALE * sum(gates[t, n] * (up[n] @ (down[n] @ x[t])) for n in range(len(down)))
        for t in range(len(x))
    ]
    return torch.stack(rows)


def run(function, inputs):
    """The output, then the gradient of every input that requires one."""
    y = function(*inputs)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    cotangent = torch.arange(y.numel()).view_as(y).cos().to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, cotangent)]


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_plain_loop(shape, impl):
    inputs = case(*shape)
    truth = loop if shape[0] else op("reference")
    for got, want in zip(run(op(impl), inputs), run(truth, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@both
def test_gradcheck_in_float64(impl):
    assert torch.autograd.gradcheck(op(impl), case(3, 4, 2, 2, 3))


@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
def test_any_mixture_of_dtypes_is_as_accurate_as_the_reference(of_x, of_base, of_gates):
    dtypes = [of_x, of_base, of_gates, of_x, of_x]
    inputs = [
        tensor.detach().to(dtype).requires_grad_()
        for tensor, dtype in zip(case(64, 16, 4, 4, 8), dtypes, strict=True)
    ]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = run(op("reference"), exact)
    fast, plain = (run(op(impl), inputs) for impl in ("torch", "reference"))
    assert fast[0].dtype == of_base
    for a, b, want in zip(fast, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert (a - want).norm() <= 2 * (b - want).norm() + 1e-12


def test_only_the_gradients_asked_for_are_computed_and_that_of_a_base_is_the_incoming_one():
    inputs = case(6, 8, 4, 3, 5)
    want = run(op("torch"), inputs)[1:]
    for chosen in ([0], [2], [3], [4], [1], [0, 2, 4]):
        parts = [t.detach().requires_grad_(i in chosen) for i, t in enumerate(inputs)]
        for place, grad in zip(chosen, run(op("torch"), parts)[1:], strict=True):
            torch.testing.assert_close(grad, want[place], rtol=1e-12, atol=1e-12)
    y = op("torch")(*inputs)
    (grad,) = torch.autograd.grad(y, inputs[1], incoming := torch.ones_like(y))
    assert grad.data_ptr() == incoming.data_ptr()


def test_leading_dimensions_are_kept():
    inputs = [tensor.detach() for tensor in case(6, 8, 4, 3, 5)]
    shaped = [t.unflatten(0, (2, 3)) if len(t) == 6 else t for t in inputs]
    torch.testing.assert_close(op("torch")(*shaped).flatten(0, 1), op("torch")(*inputs))


def test_arguments_that_do_not_fit_are_refused():
    inputs = [tensor.detach() for tensor in case(6, 8, 4, 3, 5)]
    for place in range(len(inputs)):
        wrong = list(inputs)
        wrong[place] = wrong[place][..., :-1]
        with pytest.raises(Refusal, match=r"E-SHAPE: lora_mixture: expected x \[..., D\]"):
            op("torch")(*wrong)
