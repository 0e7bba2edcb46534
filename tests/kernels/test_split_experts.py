"""split experts: a plain loop over tokens and experts in float64 is the truth."""

import pytest
import torch
from torch.nn import functional as F

from moebook.errors import Refusal
from moebook.kernels import Bank, route, split_experts

SHAPES = [  # T, D, F, E, K, the experts that train
    (12, 8, 4, 4, 2, [2, 0]),
    (7, 6, 5, 3, 1, [1]),
    (1, 4, 2, 5, 3, [0, 1, 2, 3, 4]),
    (5, 4, 2, 16, 2, [9, 3]),  # some experts get no row
    (6, 4, 2, 3, 2, []),  # nothing trains
    (0, 4, 2, 3, 2, [1]),
]


def case(T, D, width, E, K, chosen):
    """x, logits, the frozen bank and the trained one, which differs from its frozen rows."""
    torch.manual_seed(T + E)
    shapes = [(T, D), (T, E), (E, 2 * width, D), (E, D, width)]
    shapes += [(len(chosen), 2 * width, D), (len(chosen), D, width)]
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def table(experts, chosen):
    slots = torch.full((experts,), -1)
    slots[torch.tensor(chosen, dtype=torch.long)] = torch.arange(len(chosen))
    return slots


def loop(x, logits, gate_up, down, own_gate_up, own_down, top_k, chosen):
    values, order = logits.sort(dim=1, descending=True)
    weights = values[:, :top_k].exp() / values[:, :top_k].exp().sum(1, keepdim=True)
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[t])
        for k in range(top_k):
            expert = int(order[t, k])
            if expert in chosen:
                slot = chosen.index(expert)
                first, second = own_gate_up[slot], own_down[slot]
            else:
                first, second = gate_up[expert].detach(), down[expert].detach()
            width = len(first) // 2
            gate, up = first[:width] @ x[t], first[width:] @ x[t]
            row = row + weights[t, k] * (second @ (gate / (1 + (-gate).exp()) * up))
        rows.append(row)
    return torch.stack(rows)


def op(impl):
    def call(x, logits, gate_up, down, own_gate_up, own_down, top_k, chosen):
        frozen, trained = Bank(gate_up, down), Bank(own_gate_up, own_down)
        slots = table(logits.shape[1], chosen)
        return split_experts(x, route(logits, top_k), frozen, trained, slots, F.silu, impl=impl)

    return call


def run(function, inputs, top_k, chosen):
    """Output, then the gradients of x, logits and the trained bank."""
    out = function(*inputs, top_k, chosen)
    wanted = [inputs[0], inputs[1], *inputs[4:]]
    cotangent = torch.arange(out.numel(), dtype=torch.float64).view_as(out).cos().to(out.dtype)
    grads = torch.autograd.grad(out, wanted, cotangent, allow_unused=True, materialize_grads=True)
    return [out, *grads]


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_plain_loop(shape, impl):
    inputs = case(*shape)
    truth = loop if shape[0] else op("reference")
    want = run(truth, inputs, *shape[4:])
    for got, expected in zip(run(op(impl), inputs, *shape[4:]), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_the_frozen_bank_gets_no_gradient(impl):
    inputs = case(*SHAPES[0])
    op(impl)(*inputs, 2, [2, 0]).sum().backward()
    assert inputs[2].grad is None
    assert inputs[3].grad is None
    assert inputs[4].grad.abs().sum() > 0


def test_an_input_that_needs_no_gradient_leaves_the_others_as_they_are():
    inputs = case(*SHAPES[0])
    want = run(op("torch"), inputs, 2, [2, 0])
    inputs[0] = inputs[0].detach()
    out = op("torch")(*inputs, 2, [2, 0])
    cotangent = torch.arange(out.numel(), dtype=torch.float64).view_as(out).cos()
    got = torch.autograd.grad(out, [inputs[1], *inputs[4:]], cotangent)
    assert all(torch.equal(a, b) for a, b in zip(got, want[2:], strict=True))


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_gradcheck_in_float64(impl):
    x, logits, gate_up, down, *own = case(6, 4, 3, 3, 2, [1])
    assert torch.autograd.gradcheck(
        lambda x, logits, *own: op(impl)(x, logits, gate_up, down, *own, 2, [1]),
        (x, logits, *own),
    )


def test_a_float32_bank_serves_a_bfloat16_host_and_keeps_float32_gradients():
    inputs = [tensor.detach().to(torch.bfloat16) for tensor in case(*SHAPES[0])]
    own = [tensor.float().requires_grad_() for tensor in inputs[4:]]
    out = op("torch")(*inputs[:4], *own, 2, [2, 0])
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(tensor.grad.dtype == torch.float32 for tensor in own)


def test_shapes_that_do_not_fit_are_refused():
    inputs = [tensor.detach() for tensor in case(*SHAPES[0])]
    for place in (0, 2, 3, 4, 5):
        wrong = list(inputs)
        wrong[place] = wrong[place][..., :-1]
        with pytest.raises(Refusal, match="E-SHAPE: split_experts"):
            op("torch")(*wrong, 2, [2, 0])
    with pytest.raises(Refusal, match="E-IMPL"):
        op("cuda")(*inputs, 2, [2, 0])


def test_on_meta_the_reference_infers_shapes_and_the_fast_path_refuses():
    inputs = [tensor.detach().to("meta") for tensor in case(*SHAPES[0])]
    routing, banks = route(inputs[1], 2), (Bank(*inputs[2:4]), Bank(*inputs[4:]))

    def call(impl):
        slots = torch.zeros(4, dtype=torch.int64, device="meta")
        return split_experts(inputs[0], routing, *banks, slots, F.silu, impl=impl)

    assert call("reference").shape == (12, 8)
    with pytest.raises(Refusal, match="E-DEVICE: a routing on meta"):
        call("torch")
