"""experts, in one bank or two: a plain loop over tokens and experts in float64 is the truth."""

import sys

import pytest
import torch
from torch.nn import functional as F

from moebook.errors import Refusal
from moebook.kernels import Bank, experts, grouped, route, split_experts

SHAPES = [  # T, D, F, E, K, the experts that train in a bank of their own
    (12, 8, 4, 4, 2, [2, 0]),
    (7, 6, 5, 3, 1, [1]),
    (1, 4, 2, 5, 3, [0, 1, 2, 3, 4]),
    (5, 4, 2, 16, 2, [9, 3]),  # some experts get no row
    (40, 4, 3, 2, 1, []),  # segments of more than 16 rows, which bfloat16 fills up
    (0, 4, 2, 3, 2, [1]),
]
both = pytest.mark.parametrize("impl", ["torch", "reference"])


def case(T, D, width, E, K, chosen=()):
    """x, logits, the bank of all experts, and one of the chosen, which differs from it."""
    torch.manual_seed(T + E)
    shapes = [(T, D), (T, E)]
    shapes += [s for N in (E, len(chosen)) for s in ((N, 2 * width, D), (N, D, width))]
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def loop(x, ids, weights, matrices):
    """Token by token, expert by expert, with its own SiLU; ``matrices(e)`` are an expert's two."""
    rows = []
    for token, chosen, shares in zip(x, ids.tolist(), weights, strict=True):
        row = torch.zeros_like(token)
        for expert, share in zip(chosen, shares, strict=True):
            first, second = matrices(expert)
            gate, up = (first @ token).chunk(2)
            row = row + share * (second @ (gate / (1 + (-gate).exp()) * up))
        rows.append(row)
    return torch.stack(rows)


def by_loop(x, logits, gate_up, down, own_gate_up, own_down, top_k, chosen):
    values, order = logits.sort(dim=1, descending=True)
    weights = values[:, :top_k].exp() / values[:, :top_k].exp().sum(1, keepdim=True)

    def matrices(expert):
        if chosen is None:
            return gate_up[expert], down[expert]
        if expert in chosen:
            return own_gate_up[chosen.index(expert)], own_down[chosen.index(expert)]
        return gate_up[expert].detach(), down[expert].detach()

    return loop(x, order[:, :top_k], weights, matrices)


def op(impl, act=F.silu):
    """The op with the loop's arguments: in one bank where ``chosen`` is None, else in two."""

    def call(x, logits, gate_up, down, own_gate_up, own_down, top_k, chosen):
        bank, by = Bank(gate_up, down), route(logits, top_k)
        if chosen is None:
            return experts(x, by, bank, act, impl=impl)
        slots = torch.full((logits.shape[1],), -1, device=x.device)
        slots[torch.tensor(chosen, dtype=torch.long)] = torch.arange(len(chosen), device=x.device)
        return split_experts(x, by, bank, Bank(own_gate_up, own_down), slots, act, impl=impl)

    return call


def run(function, inputs, *rest):
    """Output, then the gradients of all inputs, zero where there is none."""
    out = function(*inputs, *rest)
    leaves = [leaf for leaf in inputs if leaf.requires_grad]
    cotangent = torch.arange(out.numel(), dtype=torch.float64).view_as(out).cos().to(out.dtype)
    grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True)
    return [out, *grads]


@pytest.fixture(params=[1, 2**18])
def part(request, monkeypatch):
    """Let each expert be computed alone, or many side by side."""
    monkeypatch.setattr(sys.modules["moebook.kernels.experts"], "PART", request.param)


@pytest.mark.usefixtures("part")
@both
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_plain_loop(shape, split, impl):
    inputs, rest = case(*shape), (shape[4], shape[5] if split else None)
    truth = by_loop if shape[0] else op("reference")
    for got, want in zip(run(op(impl), inputs, *rest), run(truth, inputs, *rest), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@both
@pytest.mark.parametrize("chosen", [None, [1]])
def test_gradcheck_in_float64(impl, chosen):
    inputs = case(6, 4, 3, 3, 2, [1])
    if chosen:
        inputs[2:4] = [tensor.detach() for tensor in inputs[2:4]]
    assert torch.autograd.gradcheck(lambda *args: op(impl)(*args, 2, chosen), inputs)


def test_any_elementwise_activation_will_do_and_triton_knows_silu_alone():
    inputs = case(9, 4, 3, 3, 2)
    for act in (F.gelu, torch.tanh, F.relu):
        fast, plain = (run(op(impl, act), inputs, 2, None) for impl in ("torch", "reference"))
        for a, b in zip(fast, plain, strict=True):
            torch.testing.assert_close(a, b)
        with pytest.raises(Refusal, match=r"E-IMPL: experts: .*its activation is SiLU alone"):
            op("triton", act)(*inputs, 2, None)


@both
def test_an_expert_that_a_token_chose_twice_counts_twice(impl):
    x, _, gate_up, down, *_ = case(3, 4, 2, 3, 2)
    ids = torch.tensor([[1, 1], [0, 2], [2, 2]])
    weights = torch.rand(3, 2, dtype=torch.float64).requires_grad_()
    y = experts(x, grouped(ids, weights, 3), Bank(gate_up, down), F.silu, impl=impl)
    want = loop(x, ids, weights, lambda expert: (gate_up[expert], down[expert]))
    torch.testing.assert_close(y, want)
    leaves = (x, weights, gate_up, down)
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (y, want)]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("token", [0, 100])
def test_a_token_that_is_not_finite_spoils_the_weights_of_its_experts_alone(token):
    x, logits, gate_up, down, *_ = (t.detach().float() for t in case(101, 8, 4, 3, 1))
    routing = route(logits, 1)
    assert (routing.counts > 16).all()  # so that segments are filled up
    x[token] = torch.nan
    bank = Bank(gate_up.requires_grad_(), down.requires_grad_())
    experts(x, routing, bank, F.silu).sum().backward()
    spoilt = torch.arange(3) == routing.ids[token]
    for weight in bank:
        assert torch.equal(weight.grad.isnan().flatten(1).any(1), spoilt)


def test_a_second_backward_pass_finds_all_that_the_first_did():
    inputs = case(61, 16, 8, 16, 3)[:4]
    loss = op("torch")(*inputs, None, None, 3, None).sin().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("chosen", [None, [2, 0]])
def test_on_meta_the_reference_infers_shapes_and_the_fast_path_refuses(chosen):
    inputs = [t.detach().to("meta") for t in case(*SHAPES[0])]
    assert op("reference")(*inputs, 2, chosen).shape == (12, 8)
    with pytest.raises(Refusal, match="E-DEVICE: a routing on meta"):
        op("torch")(*inputs, 2, chosen)


@pytest.mark.parametrize("chosen", [None, [2, 0]])
def test_what_needs_no_gradient_gets_none_and_changes_no_other(chosen):
    inputs = case(*SHAPES[0])
    want = run(op("torch"), inputs, 2, chosen)[1:]
    for frozen in (0, 2, 3, 4):
        some = [leaf.detach() if n == frozen else leaf for n, leaf in enumerate(inputs)]
        got = run(op("torch"), some, 2, chosen)[1:]
        others = [grad for n, grad in enumerate(want) if n != frozen]
        assert all(torch.equal(a, b) for a, b in zip(got, others, strict=True))
    assert bool(want[2].abs().sum()) is bool(want[3].abs().sum()) is (chosen is None)


def test_a_float32_bank_serves_a_bfloat16_host_and_keeps_float32_gradients():
    inputs = [tensor.detach().to(torch.bfloat16) for tensor in case(*SHAPES[0])]
    inputs[4:] = [tensor.float().requires_grad_() for tensor in inputs[4:]]
    out = op("torch")(*inputs, 2, [2, 0])
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(tensor.grad.dtype == torch.float32 for tensor in inputs[4:])


@both
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
    with pytest.raises(Refusal, match=f"E-TYPE: experts: {why}"):
        op(impl, act)(*case(5, 4, 2, 3, 2), 2, None)


def test_without_gradients_an_activation_may_have_parameters():
    inputs = case(5, 4, 2, 3, 2)
    act = torch.nn.PReLU().to(inputs[0])
    with torch.no_grad():
        ys = [op(impl, act)(*inputs, 2, None) for impl in ("torch", "reference")]
    torch.testing.assert_close(*ys)


@pytest.mark.parametrize("chosen", [None, [2, 0]])
def test_arguments_that_do_not_fit_are_refused(chosen):
    inputs = [tensor.detach() for tensor in case(*SHAPES[0])]
    name = "split_experts" if chosen else "experts"
    for place in (0, 2, 3, 4, 5) if chosen else (0, 2, 3):
        wrong = list(inputs)
        wrong[place] = wrong[place][..., :-1]
        with pytest.raises(Refusal, match=rf"E-SHAPE: {name}: expected x \[T, D\]"):
            op("torch")(*wrong, 2, chosen)
    with pytest.raises(Refusal, match="E-SHAPE: experts"):
        op("torch")(inputs[0], inputs[1], inputs[2][:, :3], *inputs[3:], 2, None)
