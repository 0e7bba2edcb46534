"""experts: a plain loop over tokens and experts in float64 is the truth."""

import sys

import pytest
import torch
from torch.nn import functional as F

from moebook.errors import Refusal
from moebook.kernels import Bank, Routing, experts, grouped, route

SHAPES = [  # T, D, F, E, K
    (12, 8, 4, 4, 2),
    (7, 6, 5, 3, 1),
    (1, 4, 2, 5, 3),
    (5, 4, 2, 16, 2),  # some experts get no row
    (40, 4, 3, 2, 1),  # segments of more than 16 rows, which bfloat16 fills up
    (0, 4, 2, 3, 2),
]


def case(T, D, width, E, K, seed=0):
    torch.manual_seed(T + E + seed)
    shapes = [(T, D), (T, E), (E, 2 * width, D), (E, D, width)]
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def loop(x, logits, gate_up, down, top_k):
    """Token by token, expert by expert, with its own SiLU."""
    values, order = logits.sort(dim=1, descending=True)
    weights = values[:, :top_k].exp() / values[:, :top_k].exp().sum(1, keepdim=True)
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[t])
        for k in range(top_k):
            first, second = gate_up[order[t, k]], down[order[t, k]]
            width = len(first) // 2
            gate, up = first[:width] @ x[t], first[width:] @ x[t]
            row = row + weights[t, k] * (second @ (gate / (1 + (-gate).exp()) * up))
        rows.append(row)
    return torch.stack(rows)


def op(impl, act=F.silu):
    def call(x, logits, gate_up, down, top_k):
        return experts(x, route(logits, top_k), Bank(gate_up, down), act, impl=impl)

    return call


def run(function, inputs, top_k):
    """Output, then the gradients of x, logits and both weights."""
    out = function(*inputs, top_k)
    cotangent = torch.arange(out.numel(), dtype=torch.float64).view_as(out).cos().to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, cotangent)]


@pytest.fixture(params=[1, 2**18])
def part(request, monkeypatch):
    """Let each expert be computed alone, or many side by side."""
    monkeypatch.setattr(sys.modules["moebook.kernels.experts"], "PART", request.param)


@pytest.mark.usefixtures("part")
@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_plain_loop(shape, impl):
    inputs = case(*shape)
    truth = loop if shape[0] else op("reference")
    pairs = zip(run(op(impl), inputs, shape[4]), run(truth, inputs, shape[4]), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_gradcheck_in_float64(impl):
    inputs = case(6, 4, 3, 3, 2)
    assert torch.autograd.gradcheck(lambda *args: op(impl)(*args, 2), inputs)


def test_any_elementwise_activation_will_do():
    inputs = case(9, 4, 3, 3, 2)
    for act in (F.gelu, torch.tanh, F.relu):
        fast, plain = (run(op(impl, act), inputs, 2) for impl in ("torch", "reference"))
        for a, b in zip(fast, plain, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_an_expert_that_a_token_chose_twice_counts_twice(impl):
    x, _, gate_up, down = case(3, 4, 2, 3, 2)
    ids = torch.tensor([[1, 1], [0, 2], [2, 2]])
    weights = torch.rand(3, 2, dtype=torch.float64).requires_grad_()
    y = experts(x, grouped(ids, weights, 3), Bank(gate_up, down), F.silu, impl=impl)
    rows = []
    for row, chosen, shares in zip(x, ids.tolist(), weights, strict=True):
        outputs = []
        for expert in chosen:
            gate, up = (gate_up[expert] @ row).chunk(2)
            outputs.append(down[expert] @ (gate * gate.sigmoid() * up))
        rows.append(shares @ torch.stack(outputs))
    want, leaves = torch.stack(rows), (x, weights, gate_up, down)
    torch.testing.assert_close(y, want)
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (y, want)]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("token", [0, 100])
def test_a_token_that_is_not_finite_spoils_the_weights_of_its_experts_alone(token):
    x, logits, gate_up, down = (t.detach().float() for t in case(101, 8, 4, 3, 1))
    routing = route(logits, 1)
    assert (routing.counts > 16).all()  # so that segments are filled up
    x[token] = torch.nan
    bank = Bank(gate_up.requires_grad_(), down.requires_grad_())
    experts(x, routing, bank, F.silu).sum().backward()
    spoilt = torch.arange(3) == routing.ids[token]
    for weight in bank:
        assert torch.equal(weight.grad.isnan().flatten(1).any(1), spoilt)


def test_a_second_backward_pass_finds_all_that_the_first_did():
    inputs = case(61, 16, 8, 16, 3)
    loss = op("torch")(*inputs, 3).sin().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_on_meta_the_reference_infers_shapes_and_the_fast_path_refuses():
    x, logits, gate_up, down = (t.detach().to("meta") for t in case(12, 8, 4, 4, 2))
    routing, bank = route(logits, 2), Bank(gate_up, down)
    assert experts(x, routing, bank, F.silu, impl="reference").shape == (12, 8)
    with pytest.raises(Refusal, match="E-DEVICE: a routing on meta"):
        experts(x, routing, bank, F.silu)


def test_frozen_weights_get_no_gradient_and_change_no_other():
    inputs = case(12, 8, 4, 4, 2)
    want = run(op("torch"), inputs, 2)
    x, logits, gate_up, down = inputs
    down = down.detach()
    out = op("torch")(x, logits, gate_up, down, 2)
    cotangent = torch.arange(out.numel(), dtype=torch.float64).view_as(out).cos()
    got = torch.autograd.grad(out, [x, logits, gate_up], cotangent)
    assert all(torch.equal(a, b) for a, b in zip(got, want[1:4], strict=True))


def test_gradients_of_two_passes_add_up():
    inputs = case(12, 8, 4, 4, 2)
    out = op("torch")(*inputs, 2)
    out.sum().backward()
    once = [tensor.grad.clone() for tensor in inputs]
    op("torch")(*inputs, 2).sum().backward()
    for tensor, grad in zip(inputs, once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * grad)


def test_an_expert_without_rows_gets_a_zero_gradient():
    x, _, gate_up, down = case(5, 4, 2, 3, 1)
    logits = torch.zeros(5, 3, dtype=torch.float64)  # ties: expert 0 takes all
    experts(x, route(logits, 1), Bank(gate_up, down), F.silu).sum().backward()
    for weight in (gate_up, down):
        assert weight.grad[0].abs().sum() > 0
        assert weight.grad[1:].abs().sum() == 0


def test_grouping_a_given_routing_equals_what_route_says():
    want = route(torch.randn(9, 5), 2)
    got = grouped(want.ids, want.weights, 5)
    assert torch.equal(got.order, want.order)
    assert torch.equal(got.counts, want.counts)
    with pytest.raises(Refusal, match="E-SHAPE: grouped"):
        grouped(want.ids, want.weights[:, :1], 5)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(
    ("act", "why"),
    [
        ("silu", "act is 'silu', expected a function"),
        (torch.nn.PReLU(), "act is PReLU, whose parameters would get no gradient"),
        (torch.nn.SiLU(inplace=True), "act is SiLU, expected one that is not in place"),
        (torch.nn.Sequential(torch.nn.SiLU(inplace=True)), "act is Sequential, expected one"),
    ],
)
def test_an_activation_that_the_backward_pass_would_miss_is_refused(act, why, impl):
    x, logits, *bank = (tensor.detach() for tensor in case(5, 4, 2, 3, 2))
    with pytest.raises(Refusal, match=f"E-TYPE: experts: {why}"):
        experts(x, route(logits, 2), Bank(*bank), act, impl=impl)


def test_without_gradients_an_activation_may_have_parameters():
    x, logits, *bank = (tensor.detach() for tensor in case(5, 4, 2, 3, 2))
    act = torch.nn.PReLU().to(x)
    with torch.no_grad():
        found, wanted = (
            experts(x, route(logits, 2), Bank(*bank), act, impl=impl)
            for impl in ("torch", "reference")
        )
    torch.testing.assert_close(found, wanted)


def test_arguments_that_do_not_fit_are_refused():
    x, logits, gate_up, down = (tensor.detach() for tensor in case(5, 4, 2, 3, 2))
    routing, bank = route(logits, 2), Bank(gate_up, down)
    for wrong in (bank._replace(down=down.mT), bank._replace(gate_up=gate_up[:, :3]),
                  bank._replace(gate_up=gate_up[0])):  # fmt: skip
        with pytest.raises(Refusal, match=r"E-SHAPE: experts: expected x \[T, D\]"):
            experts(x, routing, wrong, F.silu)
    short = Routing(routing.ids[:2], routing.weights[:2], *routing[2:])
    for wrong in (short, routing._replace(order=routing.order[1:])):
        with pytest.raises(Refusal, match=r"E-SHAPE: experts: .* the routing's ids \[T, K\]"):
            experts(x, wrong, bank, F.silu)
    with pytest.raises(Refusal, match="E-RANGE: the routing's order and counts"):
        experts(x, routing._replace(counts=routing.counts + 1), bank, F.silu)
    with pytest.raises(Refusal, match="E-DEVICE: experts: down lies on meta"):
        experts(x, routing, bank._replace(down=down.to("meta")), F.silu)
    with pytest.raises(Refusal, match="E-DEVICE: experts: the routing's ids lies on meta"):
        experts(x, routing._replace(ids=routing.ids.to("meta")), bank, F.silu)
    with pytest.raises(Refusal, match="E-IMPL: experts: no implementation impl='cuda'"):
        experts(x, routing, bank, F.silu, impl="cuda")
