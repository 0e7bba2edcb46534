"""experts, adapters and mixtures of LoRAs: a plain loop over tokens and experts is the truth."""

import math
import os
import sys
from importlib.util import find_spec

import pytest
import torch
from calls import call, draw, places
from torch.nn import functional as F
from transformers.activations import ACT2FN

from moebook.errors import Refusal
from moebook.kernels import Bank, experts, grouped, route
from moebook.kernels.experts import _check_act
from tests.refusals import refused

SHAPES = {
    # T, E, K, D, F, the experts that train in a bank of their own
    "split_experts": [
        (12, 4, 2, 8, 4, [2, 0]),
        (7, 3, 1, 6, 5, [1]),
        (1, 5, 3, 4, 2, [0, 1, 2, 3, 4]),
        (5, 16, 2, 4, 2, [9, 3]),  # some experts get no row
        (40, 2, 1, 4, 3, []),  # segments of more than 16 rows, which bfloat16 fills up
        (0, 3, 2, 4, 2, [1]),
    ],
    # T, E, K, D, R
    "adapters": [
        (12, 4, 2, 8, 4),
        (7, 3, 1, 6, 5),
        (1, 5, 3, 4, 2),
        (5, 16, 2, 4, 2),
        (0, 3, 2, 4, 2),
        (260, 2, 2, 6, 3),  # enough tokens to sort them by pair
    ],
    "lora_mixture": [
        (6, 3, 8, 4, 5),
        (5, 1, 6, 2, 4),
        (1, 4, 4, 3, 7),
        (0, 2, 4, 2, 3),
    ],
}
SHAPES["experts"] = [shape[:5] for shape in SHAPES["split_experts"]]
LETTERS = {"adapters": "T E K D R", "lora_mixture": "T N D R O"}
OPS = ("experts", "split_experts", "adapters", "lora_mixture")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
both = pytest.mark.parametrize("impl", ["torch", "reference"])
each = pytest.mark.parametrize("op", OPS)


def given(op, shape=None, dtype=torch.float64):
    """Tensors by name, the top-k and the trained experts of one shape, of the first by default."""
    shape = shape or SHAPES[op][0]
    sizes = dict(zip(LETTERS.get(op, "T E K D F chosen").split(), shape, strict=False))
    chosen = sizes.pop("chosen", None)
    of = draw(
        op, sizes | {"N": sizes.get("N", len(chosen or ()))}, dtype, seed=sum(shape[:2])
    )
    if op == "lora_mixture":
        of["gates"] = of["gates"].sigmoid() * (of["gates"] < 0.5)  # some are zero
    return {name: t.requires_grad_() for name, t in of.items()}, sizes.get("K"), chosen


def by_op(op, of, impl, K=2, chosen=None, act=F.silu):
    slots = None
    if chosen is not None:
        slots = places(of["logits"].shape[1], chosen, of["x"].device)
    return call(op, of | {"slots": slots}, impl, K=K, act=act)


def through(op, of, t, e, chosen):
    """What expert e makes of token t, with its own gelu and SiLU."""
    if op == "lora_mixture":
        return 0.7 * of["up"][e] @ (of["down"][e] @ of["x"][t])
    if op == "adapters":
        pre = of["source"][t] @ of["down"][e]
        return 0.7 * (pre * 0.5 * (1 + torch.erf(pre / math.sqrt(2)))) @ of["up"][e]
    gate_up = of["gate_up"][e]
    down = of["down"][e]
    if chosen is not None:
        gate_up = gate_up.detach()
        down = down.detach()
    if e in (chosen or ()):
        place = chosen.index(e)
        gate_up = of["trained_gate_up"][place]
        down = of["trained_down"][place]
    gate, up = (gate_up @ of["x"][t]).chunk(2)
    return down @ (gate / (1 + (-gate).exp()) * up)


def loop(op, of, K=2, chosen=None):
    """Token by token, expert by expert."""
    if op == "lora_mixture":
        ids = torch.arange(of["gates"].shape[1]).expand(of["gates"].shape)
        shares = of["gates"]
    elif "ids" in of:
        ids = of["ids"]
        shares = of["weights"]
    else:
        values, order = of["logits"].sort(dim=1, descending=True)
        ids = order[:, :K]
        shares = values[:, :K].exp() / values[:, :K].exp().sum(1, keepdim=True)
    rows = []
    for t, experts_of_t in enumerate(ids.tolist()):
        row = 0
        for residual in ("base", "h"):
            if residual in of:
                row = of[residual][t]
        for k, e in enumerate(experts_of_t):
            row = row + shares[t, k] * through(op, of, t, e, chosen)
        rows.append(row)
    return torch.stack(rows)


def with_gradients(out, of):
    """The output, then the gradients of all inputs that need one, zero where there is none."""
    leaves = [leaf for leaf in of.values() if leaf.requires_grad]
    wave = torch.arange(out.numel(), device=out.device).view_as(out).cos().to(out.dtype)
    zero_where_none = {"allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(out, leaves, wave, **zero_where_none)
    return [out, *gradients]


def close(got, want, tolerance=1e-10):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[1, 2**18])
def part(request, monkeypatch):
    """Let each expert be computed alone, or many side by side."""
    for op in ("experts", "adapters"):
        monkeypatch.setattr(sys.modules[f"moebook.kernels.{op}"], "PART", request.param)


@pytest.mark.usefixtures("part")
@both
@pytest.mark.parametrize(
    ("op", "shape"), [(op, shape) for op in OPS for shape in SHAPES[op]]
)
def test_outputs_and_gradients_equal_the_plain_loop(op, shape, impl):
    of, *rest = given(op, shape)
    truth = loop(op, of, *rest) if shape[0] else by_op(op, of, "reference", *rest)
    close(with_gradients(by_op(op, of, impl, *rest), of), with_gradients(truth, of))


@both
@each
def test_gradcheck_in_float64(op, impl):
    small = {
        "lora_mixture": (3, 2, 4, 2, 3),
        "split_experts": (6, 3, 2, 4, 3, [1]),
    }
    of, *rest = given(op, small.get(op, (6, 3, 2, 4, 3)))
    frozen = {"gate_up", "down"} if op == "split_experts" else set()
    leaves = [t.detach() if name in frozen else t for name, t in of.items()]

    def function(*tensors):
        return by_op(op, dict(zip(of, tensors, strict=True)), impl, *rest)

    assert torch.autograd.gradcheck(function, leaves)


@each
def test_what_needs_no_gradient_gets_none_and_changes_no_other(op):
    of, *rest = given(op)
    want = dict(
        zip(of, with_gradients(by_op(op, of, "torch", *rest), of)[1:], strict=True)
    )
    for name in of:
        for trained in ({name}, of.keys() - {name}):
            some = {n: t.detach().requires_grad_(n in trained) for n, t in of.items()}
            y = by_op(op, some, "torch", *rest)
            if y.requires_grad:
                expected = [want[n] for n in some if n in trained]
                assert all(map(torch.equal, with_gradients(y, some)[1:], expected))
    if op == "split_experts":
        assert not any(want[name].any() for name in ("gate_up", "down"))


@pytest.mark.parametrize(
    ("op", "tokens", "K", "impl"),
    [
        *(
            (op, tokens, K, impl)
            for op, tokens, K in (
                ("experts", 5, 2),
                ("adapters", 5, 2),
                ("adapters", 7, 3),
                ("adapters", 300, 2),
            )
            for impl in ("torch", "reference")
        ),
        ("adapters", 7, 2, "triton"),
    ],
)
def test_an_expert_that_a_token_chose_twice_counts_twice(op, tokens, K, impl):
    """Tokens that choose one expert twice, the other twice, or both; the last by pair."""
    if impl == "triton" and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    device = DEVICE if impl == "triton" else "cpu"
    dtype = torch.float32 if impl == "triton" else torch.float64
    of, *_ = given(op, (tokens, 2, K, 6, 3))
    of = {name: t.detach().to(device, dtype).requires_grad_() for name, t in of.items()}
    # 0 0 1, 0 0 1, ...
    ids = (torch.arange(tokens * K, device=device) % 3 // 2).view(tokens, K)
    by = grouped(ids, torch.zeros(ids.shape, device=device), 2)._asdict()

    def run(function, *rest):
        weights = of["logits"][:, :1].sigmoid() * torch.arange(1, K + 1, device=device)
        return with_gradients(function(op, of | by | {"weights": weights}, *rest), of)

    close(run(call, impl), run(loop), 1e-4 if impl == "triton" else 1e-10)


def test_any_elementwise_activation_will_do_and_triton_knows_silu_alone():
    of, *_ = given("experts")
    for act in (F.gelu, torch.tanh, F.relu):
        ys = [by_op("experts", of, impl, act=act) for impl in ("torch", "reference")]
        close(*(with_gradients(y, of) for y in ys), 1e-7)
        with pytest.raises(
            Refusal, match=r"E-IMPL: experts: .*its activation is SiLU alone"
        ):
            by_op("experts", of, "triton", act=act)

    def silu(rows):  # what a function is called does not make it SiLU
        return 2 * F.silu(rows)

    assert _check_act("experts", silu) == "its activation is SiLU alone"
    for act in (F.silu, torch.nn.SiLU(), ACT2FN["silu"]):
        assert _check_act("experts", act) == ""
    with torch.no_grad():  # without gradients an activation may have parameters
        act = torch.nn.PReLU().double()
        close(
            *([by_op("experts", of, impl, act=act)] for impl in ("torch", "reference"))
        )


@both
@pytest.mark.parametrize(
    ("act", "why"),
    [
        ("silu", "act is 'silu', expected a function"),
        (torch.nn.PReLU(), "act is PReLU, whose parameters would get no gradient"),
        (torch.nn.SiLU(inplace=True), "act is SiLU, expected one that is not in place"),
        (
            torch.nn.Sequential(torch.nn.SiLU(inplace=True)),
            "act is Sequential, expected one",
        ),
        (torch.nn.RReLU(), "act is RReLU, which the backward pass would draw anew"),
        (
            torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5)),
            "act is Sequential, which the backward pass would draw anew",
        ),
    ],
)
def test_an_activation_that_the_backward_pass_would_miss_is_refused(act, why, impl):
    refused(
        f"E-TYPE: experts: {why}", by_op, "experts", given("experts")[0], impl, act=act
    )


@pytest.mark.parametrize("shape", [(5, 3, 1, 4, 2), (5, 3, 2, 4, 65), (5, 65, 2, 4, 2)])
def test_triton_takes_two_adapters_a_token_and_few_narrow_ones(shape):
    of, K, _ = given("adapters", shape)
    with pytest.raises(
        Refusal, match=r"E-IMPL: adapters: .* it takes 2 of at most 64 experts"
    ):
        by_op("adapters", of, "triton", K)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("token", [0, 100])
def test_a_token_that_is_not_finite_spoils_the_weights_of_its_experts_alone(token):
    of, *_ = given("experts", (101, 3, 1, 8, 4), torch.float32)
    routing = route(of["logits"].detach(), 1)
    assert (routing.counts > 16).all()  # so that segments are filled up
    of["x"].data[token] = torch.nan
    bank = Bank(of["gate_up"], of["down"])
    experts(of["x"], routing, bank, F.silu).sum().backward()
    for weight in bank:
        spoilt = weight.grad.isnan().flatten(1).any(1)
        assert torch.equal(spoilt, torch.arange(3) == routing.ids[token])


def test_a_second_backward_pass_finds_all_that_the_first_did():
    of, K, _ = given("experts", (61, 16, 3, 16, 8))
    loss = by_op("experts", of, "torch", K).sin().sum()
    leaves = list(of.values())
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))


@pytest.mark.parametrize("op", ["experts", "split_experts"])
def test_shapes_are_inferred_on_meta(op):
    of, *rest = given(op)
    of = {name: t.detach().to("meta") for name, t in of.items()}
    for impl in ("reference", "torch"):
        assert by_op(op, of, impl, *rest).shape == (12, 8)


@pytest.mark.parametrize("of_gates", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
def test_any_mixture_of_dtypes_is_as_accurate_as_the_reference(of_x, of_base, of_gates):
    of, *_ = given("lora_mixture", (64, 4, 16, 4, 8))
    dtypes = {"base": of_base, "gates": of_gates}
    of = {n: t.detach().to(dtypes.get(n, of_x)).requires_grad_() for n, t in of.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in of.items()}
    truth = with_gradients(by_op("lora_mixture", exact, "reference"), exact)
    fast = with_gradients(by_op("lora_mixture", of, "torch"), of)
    plain = with_gradients(by_op("lora_mixture", of, "reference"), of)
    assert fast[0].dtype == of_base
    for a, b, want in zip(fast, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert (a - want).norm() <= 2 * (b - want).norm() + 1e-12


def test_leading_dimensions_of_a_mixture_are_kept_and_a_bases_gradient_is_the_incoming_one():
    of, *_ = given("lora_mixture")
    shaped = {
        name: t.unflatten(0, (2, 3)) if len(t) == 6 else t for name, t in of.items()
    }
    y = by_op("lora_mixture", of, "torch")
    torch.testing.assert_close(by_op("lora_mixture", shaped, "torch").flatten(0, 1), y)
    incoming = torch.ones_like(y)
    (grad,) = torch.autograd.grad(y, of["base"], incoming)
    assert grad.data_ptr() == incoming.data_ptr()
