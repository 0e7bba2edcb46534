"""What all ops have in common: what they refuse, where kernels run, and how both are chosen."""

import contextlib
import os
import sys
from importlib.util import find_spec
from operator import methodcaller
from types import SimpleNamespace

import pytest
import torch
from calls import SHAPES, call, draw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from moebook import kernels
from moebook.errors import Refusal
from moebook.kernels import Bank, Routing, dispatch
from moebook.kernels.dispatch import implementation
from moebook.kernels.groups import groups
from moebook.kernels.similarity import nearest_rows
from tests import refusals

TWINS = ("route", "experts", "split_experts", "adapters", "lora_mixture", "duplicates")
VALUED = ("bank_scoring", "nearest_rows", "duplicates", "groups")
OPS = (*TWINS, "balance_loss", "bank_scoring", "nearest_rows", "groups")
ones = torch.ones
SIZES = {
    "T": 5,
    "D": 6,
    "E": 3,
    "F": 4,
    "K": 2,
    "R": 3,
    "N": 1,
    "O": 7,
    "V": 5,
    "S": 5,
    "M": 5,
    "L": 1,
}
installed = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed"
)


def arguments(op, dtype=torch.float32):
    """The tensors of a right call by name."""
    of = draw(op, SIZES, dtype) if op in SHAPES else {}
    by = kernels.route(draw("route", SIZES, dtype)["logits"], 2)._asdict()
    match op:
        case "grouped":
            return {"ids": by["ids"], "weights": by["weights"]}
        case "experts" | "split_experts" | "adapters":
            del of["logits"]
            slots = (
                {"slots": torch.tensor([-1, 0, -1])} if op == "split_experts" else {}
            )
            return {**of, **slots, **by}
        case "balance_loss":
            return {**of, "ids": by["ids"], "mask": torch.ones(5)}
        case "bank_scoring":
            answers = {"readers": [0], "targets": [2], "lengths": [1]}
            return {
                **of,
                **{name: torch.tensor(place) for name, place in answers.items()},
            }
        case "duplicates":
            return {**of, "key": torch.ones(5)}
        case "groups":
            return {**of, "worth": torch.ones(5)}
    return of


def changed(op, *, impl="auto", dtype=torch.float32, **changes):
    """Call an op as it is meant to be, but for what is made of some of its arguments."""
    of = {n: changes.get(n, torch.clone)(t) for n, t in arguments(op, dtype).items()}
    return call(op, of, impl)


def refused(message, op, **rest):
    """Expect one line."""
    refusals.refused(f"^{message}", changed, op, **rest)


EACH = [(op, name) for op in (*OPS, "grouped") for name in arguments(op)]
each = pytest.mark.parametrize(("op", "argument"), EACH)
ROUTED = ("experts", "split_experts", "adapters")


# Of groups there is one implementation alone.
@pytest.mark.parametrize("op", [op for op in OPS if op != "groups"])
def test_an_implementation_that_is_not_there_is_refused(op):
    changed(op)
    refused(f"E-IMPL: {op}: no implementation impl='cuda'", op, impl="cuda")
    if op not in TWINS:
        refused(
            f"E-IMPL: {op}: no implementation impl='triton'; one of", op, impl="triton"
        )


@installed
@pytest.mark.parametrize(
    ("interpret", "dtype", "why"),
    [
        ("0", torch.float32, "the input is on cpu, expected an NVIDIA GPU"),
        ("1", torch.bfloat16, "Triton's interpreter computes bfloat16 wrongly"),
        ("1", torch.float64, "the input is torch.float64"),
    ],
)
@pytest.mark.parametrize("op", TWINS)
def test_triton_is_refused_where_it_cannot_run(op, interpret, dtype, why, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    why = f"E-IMPL: {op}: impl='triton' cannot run here: .*{why}"
    refused(why, op, impl="triton", dtype=dtype)


EIGHT = torch.float8_e4m3fn
COMPLEX = (torch.complex64,)
WHOLE = (torch.int64, torch.bool)
REAL = (torch.float32, torch.bool)
WIDE = (torch.float64,)
WRONG = {
    "route": {"logits": (*WHOLE, *COMPLEX)},
    "grouped": {"ids": REAL},
    "experts": {
        "x": (*WHOLE, *COMPLEX),
        "gate_up": (torch.int8,),
        "down": (torch.uint8,),
        "ids": REAL,
        "weights": WHOLE,
        "order": (*REAL, torch.int32),
        "counts": REAL,
    },
    "split_experts": {
        "x": WHOLE,
        "order": (torch.int32,),
        "slots": (*REAL, torch.uint8),
    },
    "adapters": {
        "h": WHOLE,
        "source": WIDE,
        "down": WHOLE,
        "up": WHOLE,
        "counts": REAL,
    },
    "lora_mixture": {
        "x": (*WHOLE, *WIDE),
        "base": WHOLE,
        "gates": (*WHOLE, *COMPLEX),
        "down": WIDE,
        "up": WIDE,
    },
    "balance_loss": {"logits": WHOLE, "ids": REAL, "mask": COMPLEX},
    "bank_scoring": {
        "hidden": WHOLE,
        "head": WIDE,
        "readers": (torch.int32,),
        "targets": (torch.int32, *REAL),
        "lengths": REAL,
    },
    "nearest_rows": {"pool": WIDE, "shots": WHOLE},
    "duplicates": {"vectors": WHOLE, "key": COMPLEX},
    "groups": {"similarity": COMPLEX, "worth": COMPLEX},
}


@each
def test_an_argument_of_another_shape_device_or_dtype_is_refused(op, argument):
    parts = Routing._fields if op in ROUTED else ()
    # Which is made before the op is called.
    named = "Routing" if argument in parts else op
    refused(rf"E-SHAPE: {named}: .*\(1, ", op, **{argument: lambda t: t[None]})
    # The logits of `route` are alone; of shots on the meta device no value could be checked.
    if (op, argument) not in (("route", "logits"), ("nearest_rows", "shots")):
        message = rf"E-DEVICE: {named}: .*\b(meta.*cpu|cpu.*meta)\b"
        refused(message, op, **{argument: methodcaller("to", "meta")})
    if op in (*ROUTED, "lora_mixture"):
        short = f"E-SHAPE: {named}"
        if argument == "counts":
            short = "E-RANGE: Routing: ids are 0 to 2"
        refused(f"{short}.* expected ", op, **{argument: lambda t: t[..., :-1]})
    name = argument.replace("trained_", "trained ")
    for wrong in (*WRONG[op].get(argument, ()), EIGHT):
        message = rf"E-DTYPE: {named}: .*\b{name}\b.*{wrong}\b"
        refused(message, op, **{argument: methodcaller("to", wrong)})


@pytest.mark.parametrize("op", (*VALUED, *TWINS))
def test_ops_that_need_values_and_kernels_are_refused_on_meta(op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    meta = dict.fromkeys(arguments(op), methodcaller("to", "meta"))
    if op in VALUED:
        refused(f"E-DEVICE: {op}: .* on meta, which holds no values$", op, **meta)
    if op in TWINS:
        refused(f"E-(IMPL|DEVICE): {op}: .* on meta, ", op, impl="triton", **meta)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ("experts", {"gate_up": lambda t: t[:, :0], "down": lambda t: t[..., :0]}),
        (
            "split_experts",
            {
                "trained_gate_up": lambda t: t[:, :0],
                "gate_up": lambda t: t[:, :0],
                "trained_down": lambda t: t[..., :0],
                "down": lambda t: t[..., :0],
            },
        ),
        ("adapters", {"down": lambda t: t[..., :0], "up": lambda t: t[:, :0]}),
        ("lora_mixture", {"up": lambda t: t[:, :0], "base": lambda t: t[:, :0]}),
        ("grouped", {"ids": lambda t: t[:, :0], "weights": lambda t: t[:, :0]}),
    ],
)
def test_a_width_of_zero_is_refused(op, changes, impl):
    refused(f"E-SHAPE: {op}: .* 0", op, impl=impl, **changes)


@pytest.mark.parametrize("slots", [[-1, 1, -1], [7, 0, -1], [-2, 0, -1], [0, 0, -1]])
def test_slots_that_are_no_places_of_the_trained_bank_or_shared_are_refused(slots):
    message = (
        rf"E-RANGE: split_experts: slots are \[{slots[0]}, .*-1 or a place in \[0, 1\)"
    )
    refused(message, "split_experts", slots=lambda _: torch.tensor(slots))


@pytest.mark.parametrize(
    "change",
    [
        {"counts": lambda _: torch.tensor([3, 3, 4])},
        {"counts": lambda t: t.roll(1)},
        {"order": lambda t: t // 2 * 2},
        {"order": lambda t: t - 1},
        {"order": lambda t: t.flip(0)},
        {"ids": lambda t: t.roll(1, 0)},
    ],
)
def test_a_routing_made_by_hand_has_the_order_and_counts_of_its_ids(change):
    routing = kernels.route(draw("route", SIZES)["logits"], 2)
    changed = {
        name: change.get(name, torch.clone)(part)
        for name, part in routing._asdict().items()
    }
    message = "^E-RANGE: Routing: order and counts are not those of the ids; make it by"
    refusals.refused(message, Routing, **changed)
    refusals.refused(message, routing._replace, **changed)
    assert (
        Routing(*routing)._replace(weights=routing.weights / 2).order is routing.order
    )


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (
            "E-SHAPE: Routing: .* the routing's ids",
            {
                "ids": lambda t: t[:, :0],
                "weights": lambda t: t[:, :0],
                "order": lambda t: t[:0],
            },
        ),
        ("E-SHAPE: Routing: .* the routing's order", {"order": lambda t: t[1:]}),
        (
            "E-RANGE: Routing: ids are -1 to 1, expected 0 to 2",
            {"ids": lambda t: t - 1},
        ),
    ],
)
@pytest.mark.parametrize("op", ROUTED)
def test_a_routing_of_other_shapes_or_of_no_expert_is_refused(op, message, change):
    refused(message, op, **change)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(
    ("message", "act"),
    [
        (
            r"E-SHAPE: experts: act returns \(\d+, 1\) of torch.float32, expected \(\d+, 4\) of",
            lambda x: x[..., :1],
        ),
        ("E-TYPE: experts: act returns a float, expected", lambda x: 1.0),
        (
            "E-SHAPE: experts: act returns .* of torch.float64, expected .* of torch.float32",
            lambda x: x.double(),
        ),
        ("E-TYPE: experts: act changes what it is given", lambda x: x.mul_(2)),
    ],
)
def test_an_activation_that_is_not_elementwise_is_refused(impl, message, act):
    of = arguments("experts")
    routing = Routing(*(of[name] for name in Routing._fields))
    bank = (of["gate_up"], of["down"])
    if impl == "reference":  # which names the shape [T, E, F]
        message = message.replace(r"\(\d+, ", r"\(\d+, 3, ")
    refusals.refused(
        message, kernels.experts, of["x"], routing, Bank(*bank), act, impl=impl
    )


def test_an_activation_without_a_gradient_is_refused_in_the_backward_pass():
    of = {name: t.requires_grad_() for name, t in draw("experts", SIZES).items()}
    y = call("experts", of, "torch", act=lambda x: x.detach() * 2)
    refusals.refused(
        "E-GRADIENT: experts: act returns what has no gradient", y.sum().backward
    )


def test_an_activation_that_reads_parameters_is_refused_in_the_backward_pass():
    """Its parameters hide in a closure, or in a bound method; it may read nothing else."""
    beta = torch.nn.Parameter(torch.tensor(1.5))
    acts = (
        lambda x: x * (beta.exp() * x).sigmoid(),
        torch.nn.PReLU().forward,
        lambda x: torch.ones_like(x) * beta,
    )
    for act in acts:
        of = {name: t.requires_grad_() for name, t in draw("experts", SIZES).items()}
        y = call("experts", of, "torch", act=act)
        message = "E-GRADIENT: experts: act reads parameters, which would get no grad"
        refusals.refused(message, y.sum().backward)
    beta.requires_grad_(False)
    call("experts", of, "torch", act=acts[0]).sum().backward()
    call("experts", of, "torch", act=lambda x: x).sum().backward()


@pytest.mark.parametrize("impl", ["torch", "reference", "triton"])
@pytest.mark.parametrize("op", ["adapters", "lora_mixture"])
def test_a_scale_has_a_gradient(op, impl):
    """The output is linear in it, so its gradient is that of a finite difference, of any size."""
    if impl == "triton" and not find_spec("triton"):
        pytest.skip("triton is not installed")
    of = draw(op, SIZES)
    scale = torch.tensor(0.7, requires_grad=True)
    y = call(op, of, impl, scale=scale)
    (found,) = torch.autograd.grad(y.sum(), scale)
    right = call(op, of, impl, scale=1.7).sum() - call(op, of, impl, scale=0.7).sum()
    assert y.dtype == torch.float32
    assert found.item() == pytest.approx(right.item(), rel=1e-4)
    assert torch.allclose(y, call(op, of, impl, scale=0.7), rtol=1e-5)


@pytest.mark.parametrize("op", ["adapters", "lora_mixture"])
@pytest.mark.parametrize(
    ("code", "scale"),
    [
        ("E-SHAPE", torch.ones(2)),
        ("E-SHAPE", torch.tensor(1)),
        ("E-NONFINITE", float("nan")),
        ("E-NONFINITE", 10**400),
        ("E-TYPE", True),
        ("E-TYPE", "1"),
    ],
)
def test_a_scale_that_is_no_number_is_refused(op, code, scale):
    refusals.refused(f"{code}: {op}: scale is ", call, op, draw(op, SIZES), scale=scale)


@pytest.mark.parametrize(
    ("message", "run"),
    [
        (
            "E-SHAPE: nearest_rows: .*pool",
            lambda: nearest_rows(ones(()), ones(2, 4), 1),
        ),
        ("E-SHAPE: groups: .*similarity", lambda: groups(ones(()), ones(5), 2)),
        (
            "E-RANGE: grouped: ids are 0 to 3, expected 0 to 2",
            lambda: kernels.grouped(torch.tensor([[0, 3]]), torch.zeros(1, 2), 3),
        ),
        (
            "E-RANGE: balance_loss: ids are -1 to 2, expected 0 to 2",
            lambda: kernels.balance_loss(torch.zeros(1, 3), torch.tensor([[-1, 2]])),
        ),
    ],
)
def test_what_has_no_rows_or_names_no_expert_is_refused(run, message):
    refusals.refused(f"^{message}", run)


@pytest.mark.parametrize("op", ["experts", "adapters", "lora_mixture"])
def test_a_gradient_that_is_not_asked_for_costs_nothing(op):
    one = ("h", "source") if op == "adapters" else ("x",)
    many = ("down", "up")
    many = ("gate_up", "down") if op == "experts" else many
    cost = {}
    for asked in ((*one, *many), one, many):
        leaves = {name: methodcaller("requires_grad_") for name in asked}
        with FlopCounterMode(display=False) as forward:
            out = changed(op, dtype=torch.float64, **leaves)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        cost[asked] = backward.get_total_flops() / forward.get_total_flops()
    both, inputs, weights = cost.values()
    assert (both, inputs) == (2, 1)
    assert 1 < weights < 2


@installed
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="arguments lie on a CPU"
)
@pytest.mark.parametrize("op", TWINS)
def test_kernels_are_launched_where_the_first_tensor_lies(op, monkeypatch):
    seen = []
    nothing = contextlib.nullcontext()
    monkeypatch.setattr(
        torch.cuda, "device_of", lambda tensor: seen.append(tensor) or nothing
    )
    changed(op, impl="triton")
    assert seen


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("op", ["experts", "adapters", "lora_mixture"])
def test_under_autocast_an_op_computes_whole_in_autocasts_dtype(op, impl):
    def run(by_hand):
        of = {name: t.requires_grad_() for name, t in draw(op, SIZES).items()}
        given = dict(of)
        if by_hand:
            low = [name for name in of if name not in ("logits", "gates", "base")]
            given |= {name: of[name].bfloat16() for name in low}
        with torch.autocast("cpu", torch.bfloat16, enabled=not by_hand):
            y = call(op, given, impl)
        return [y, *torch.autograd.grad(y.square().sum(), list(of.values()))]

    found = run(by_hand=False)
    assert all(map(torch.equal, run(by_hand=True), found))
    y, *gradients = found
    # What a LoRA's base puts out is cast by the base.
    assert y.dtype == (torch.float32 if op == "lora_mixture" else torch.bfloat16)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


def test_under_autocast_float64_stays_as_in_a_linear_layer():
    wide = draw("experts", SIZES, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = call("experts", wide, "torch")
        linear = torch.nn.functional.linear(wide["x"], wide["down"][0].mT)
    assert y.dtype == linear.dtype == torch.float64
    assert torch.equal(y, call("experts", wide, "torch"))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("op", ["experts", "split_experts", "adapters", "lora_mixture"])
def test_a_backward_pass_inside_autocast_is_that_outside(op):
    def run(inside):
        of = {name: t.requires_grad_() for name, t in draw(op, SIZES).items()}
        given = of | (
            {"slots": torch.tensor([-1, 0, -1])} if op.startswith("s") else {}
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(op, given, "torch").square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return torch.autograd.grad(loss, list(of.values()), allow_unused=True)

    for outside, inside in zip(run(False), run(True), strict=True):
        assert outside is inside is None or torch.equal(outside, inside)


TABLE = {"torch": len, "reference": sum, "triton": "known.run"}


def test_a_name_is_obeyed_or_refused_and_auto_is_the_first_on_a_cpu(monkeypatch):
    assert implementation("known", "reference", TABLE) is sum
    for on in (None, torch.zeros(1), torch.zeros(1, device="meta")):
        assert implementation("known", "auto", TABLE, on) is len
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    for name, message in (
        ("tritn", "no implementation impl='tritn'; did you mean 'triton'"),
        ("triton", "impl='triton' cannot run here: triton is not installed"),
    ):
        with pytest.raises(Refusal, match=f"E-IMPL: known: {message}"):
            implementation("known", name, TABLE, torch.zeros(1))


@pytest.mark.parametrize(
    ("capability", "compiler", "why"),
    [
        ((8, 0), "/usr/bin/gcc", None),
        (
            (7, 5),
            "/usr/bin/gcc",
            "cuda:0 has compute capability 7.5, expected at least 8.0",
        ),
        (
            (9, 0),
            None,
            "Triton finds no C compiler: install gcc or clang, or name one in CC",
        ),
    ],
)
def test_auto_is_triton_only_on_a_gpu_that_can_run_it(
    capability, compiler, why, monkeypatch
):
    """The GPU is PyTorch's fake one, with a device and no memory; Triton and a kernel are too."""
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    monkeypatch.setitem(
        sys.modules, "moebook.kernels._triton.known", SimpleNamespace(run=max)
    )
    for name in ("TRITON_INTERPRET", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch.shutil, "which", lambda name: compiler)
    dispatch._lacking.cache_clear()
    with FakeTensorMode():
        on = torch.zeros(1, device="cuda")
    if why:
        assert implementation("known", "auto", TABLE, on) is len
        with pytest.raises(Refusal, match=f"E-IMPL: known: .*{why}; use impl='auto'"):
            implementation("known", "triton", TABLE, on)
    else:
        for name in ("auto", "triton"):
            assert implementation("known", name, TABLE, on).__wrapped__ is max
    assert implementation("other", "auto", {"torch": len}, on) is len
    dispatch._lacking.cache_clear()
