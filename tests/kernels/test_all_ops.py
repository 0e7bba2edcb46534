"""What all ops have in common: what they refuse, and on which GPU their kernels are launched."""

import contextlib
import os
from importlib.util import find_spec
from operator import methodcaller

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from moebook import kernels
from moebook.errors import Refusal
from moebook.kernels import Bank
from moebook.kernels.bank_scoring import Answers
from moebook.kernels.lora_mixture import Projection
from moebook.kernels.route import Routing


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def bank(number, dtype):
    return Bank(drawn(number, 8, 6, dtype=dtype), drawn(number, 6, 4, dtype=dtype))


def routing(dtype):
    return kernels.route(drawn(5, 3, dtype=dtype), 2)


def call(op, *, impl="auto", dtype=torch.float32, wrong=None, **changes):
    """Call an op as it is meant to be, but for what is said.

    Args:
        op: Its name.
        impl, dtype: Of the call.
        wrong: For the name of an argument, what is made of it.
        changes: Parts of the routing that are others.
    """

    def given(**tensors):
        wanted = wrong or {}
        found = [wanted.get(name, torch.clone)(tensor) for name, tensor in tensors.items()]
        return found if len(found) > 1 else found[0]

    x, by = drawn(5, 6, dtype=dtype), routing(dtype)._replace(**changes)
    match op:
        case "route":
            return kernels.route(given(logits=x), 2, impl=impl)
        case "grouped":
            return kernels.grouped(*given(ids=by.ids, weights=by.weights), 3)
        case "experts":
            own, by = Bank(*given(**bank(3, dtype)._asdict())), Routing(*given(**by._asdict()))
            return kernels.experts(given(x=x), by, own, F.silu, impl=impl)
        case "split_experts":
            own, by = Bank(*given(**bank(3, dtype)._asdict())), Routing(*given(**by._asdict()))
            trained = {f"trained_{name}": t for name, t in bank(1, dtype)._asdict().items()}
            x, slots = given(x=x, slots=torch.tensor([-1, 0, -1]))
            banks = own, Bank(*given(**trained))
            return kernels.split_experts(x, by, *banks, slots, F.silu, impl=impl)
        case "adapters":
            by, down, up = Routing(*given(**by._asdict())), drawn(3, 6, 4), drawn(3, 4, 6)
            x, source, down, up = given(h=x, source=x, down=down.to(dtype), up=up.to(dtype))
            return kernels.adapters(x, by, down, up, source=source, impl=impl)
        case "lora_mixture":
            down, up = drawn(2, 3, 6, dtype=dtype), drawn(2, 7, 3, dtype=dtype)
            base, gates = drawn(5, 7, dtype=dtype), drawn(5, 2, dtype=dtype)
            x, *own = given(x=x, base=base, gates=gates, down=down, up=up)
            return kernels.lora_mixture(x, [Projection(*own)], impl=impl)
        case "balance_loss":
            x, ids, mask = given(logits=x, ids=by.ids, mask=torch.ones(5))
            return kernels.balance_loss(x, ids, mask=mask, impl=impl)
        case "bank_scoring":
            answers = Answers(*(torch.tensor(part) for part in ([0], [2], [1])))
            hidden, head = drawn(1, 3, 4, dtype=dtype), drawn(5, 4, dtype=dtype)
            hidden, head, *places = given(hidden=hidden, head=head, **answers._asdict())
            return kernels.bank_scoring(hidden, head, Answers(*places), impl=impl)
        case "nearest_rows":
            pool, shots = given(pool=x, shots=x[:2])
            return kernels.nearest_rows(pool, shots, 3, impl=impl)
        case "duplicates":
            vectors, key = given(vectors=x, key=torch.ones(5))
            return kernels.duplicates(vectors, key, 0.9, impl=impl)
        case "groups":
            similarity, worth = given(similarity=x[:, :5], worth=torch.ones(5))
            return kernels.groups(similarity, worth, 2, impl=impl)
        case "clusters":
            points, centres = given(points=x[None], centres=x[None, :2])
            return kernels.clusters(points, centres, impl=impl)


OPS = (
    "route", "experts", "split_experts", "adapters", "lora_mixture", "balance_loss",
    "bank_scoring", "nearest_rows", "duplicates", "groups", "clusters",
)  # fmt: skip
TWINS = (*OPS[:6], "duplicates")  # with a Triton kernel
installed = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("op", OPS)
def test_an_implementation_that_is_not_there_is_refused(op):
    call(op)
    with pytest.raises(Refusal, match=f"E-IMPL: {op}: no implementation impl='cuda'"):
        call(op, impl="cuda")


@pytest.mark.parametrize("op", sorted({*OPS} - {*TWINS}))
def test_triton_is_refused_where_an_op_has_no_kernel(op):
    with pytest.raises(Refusal, match=f"^E-IMPL: {op}: impl='triton' .*: the op has no Triton"):
        call(op, impl="triton")


HERE = ("0", torch.float32, "the input is on cpu, expected an NVIDIA GPU")
BAD = [
    ("1", torch.bfloat16, "Triton's interpreter computes bfloat16 wrongly"),
    ("1", torch.float64, "the input is torch.float64"),
]


@installed
@pytest.mark.parametrize(
    ("op", "interpret", "dtype", "why"),
    [(op, *case) for op in TWINS for case in (HERE, *BAD)],
)
def test_triton_is_refused_where_it_cannot_run(op, interpret, dtype, why, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(Refusal, match=f"E-IMPL: {op}: impl='triton' cannot run here: .*{why}"):
        call(op, impl="triton", dtype=dtype)


BY = ("ids", "weights", "order", "counts")
ARGUMENTS = {
    "route": ("logits",), "grouped": ("ids", "weights"),
    "experts": ("x", "gate_up", "down", *BY),
    "split_experts": ("x", "gate_up", "down", "trained_gate_up", "trained_down", "slots", *BY),
    "adapters": ("h", "source", "down", "up", *BY),
    "lora_mixture": ("x", "base", "gates", "down", "up"), "balance_loss": ("logits", "ids", "mask"),
    "bank_scoring": ("hidden", "head", "readers", "targets", "lengths"),
    "nearest_rows": ("pool", "shots"), "duplicates": ("vectors", "key"),
    "groups": ("similarity", "worth"), "clusters": ("points", "centres"),
}  # fmt: skip
EACH = [(op, name) for op, names in ARGUMENTS.items() for name in names]


@pytest.mark.parametrize(("op", "argument"), EACH)
def test_an_argument_with_a_dimension_too_many_is_refused(op, argument):
    call(op)
    refused("E-SHAPE", rf"{op}: .*\(1, ", op, argument, lambda t: t[None])


# Of shots on the meta device no value could be checked.
@pytest.mark.parametrize(
    ("op", "argument"), [case for case in EACH[1:] if case != ("nearest_rows", "shots")]
)
def test_an_argument_on_another_device_is_refused(op, argument):
    message = rf"{op}: .*\b(meta.*cpu|cpu.*meta)\b"
    refused("E-DEVICE", message, op, argument, methodcaller("to", "meta"))


@pytest.mark.parametrize("op", ["bank_scoring", "nearest_rows", "duplicates", "groups", "clusters"])
def test_an_op_that_needs_values_is_refused_on_meta(op):
    names = dict.fromkeys(ARGUMENTS[op], methodcaller("to", "meta"))
    with pytest.raises(Refusal, match=f"^E-DEVICE: {op}: .* on meta, which holds no values$"):
        call(op, wrong=names)


EIGHT = torch.float8_e4m3fn
NUMBERS = (
    "logits", "x", "gate_up", "down", "weights", "h", "source", "up", "base", "gates", "mask",
    "hidden", "head", "shots", "vectors", "key", "similarity", "worth", "points", "centres",
    "trained_gate_up", "trained_down",
)  # fmt: skip


@pytest.mark.parametrize(
    ("op", "argument"), [case for case in EACH if case[0] != "grouped" and case[1] in NUMBERS]
)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_numbers_of_eight_bits_are_refused(op, argument, impl):
    name = argument.replace("trained_", "trained ")
    with pytest.raises(Refusal, match=rf"^E-DTYPE: {op}: .*\b{name} is {EIGHT}, .* 16 bits"):
        call(op, impl=impl, wrong={argument: methodcaller("to", EIGHT)})


def refused(code, message, op, argument, change):
    """Expect one line."""
    with pytest.raises(Refusal, match=f"^{code}: {message}") as found:
        call(op, wrong={argument: change})
    assert "\n" not in str(found.value)


WHOLE, REAL, WIDE = (torch.int64, torch.bool), (torch.float32, torch.bool), (torch.float64,)
COMPLEX = (torch.complex64,)
WRONG = {
    "route": {"logits": (*WHOLE, *COMPLEX)},
    "grouped": {"ids": REAL},
    "experts": {
        "x": (*WHOLE, *COMPLEX), "gate_up": (torch.int8,), "down": (torch.uint8,),
        "ids": REAL, "weights": WHOLE, "order": (*REAL, torch.int32), "counts": REAL,
    },
    "split_experts": {"x": WHOLE, "order": (torch.int32,), "slots": (*REAL, torch.uint8)},
    "adapters": {"h": WHOLE, "source": WIDE, "down": WHOLE, "up": WHOLE, "counts": REAL},
    "lora_mixture": {
        "x": (*WHOLE, *WIDE), "base": WHOLE, "gates": (*WHOLE, *COMPLEX), "down": WIDE, "up": WIDE,
    },
    "balance_loss": {"logits": WHOLE, "ids": REAL, "mask": COMPLEX},
    "bank_scoring": {
        "hidden": WHOLE, "head": WIDE, "readers": (torch.int32,), "targets": (torch.int32, *REAL),
        "lengths": REAL,
    },
    "nearest_rows": {"pool": WIDE, "shots": WHOLE},
    "duplicates": {"vectors": WHOLE, "key": COMPLEX},
    "groups": {"similarity": COMPLEX, "worth": COMPLEX},
    "clusters": {"points": WHOLE, "centres": WIDE},
}  # fmt: skip
CASES = [
    (op, name, dtype)
    for op, own in WRONG.items()
    for name, dtypes in own.items()
    for dtype in dtypes
]


@pytest.mark.parametrize(("op", "argument", "wrong"), CASES)
def test_an_argument_of_a_wrong_dtype_is_named_with_it(op, argument, wrong):
    message = rf"{op}: .*\b{argument}\b.*{wrong}\b"
    refused("E-DTYPE", message, op, argument, methodcaller("to", wrong))


@pytest.mark.parametrize("slots", [[-1, 1, -1], [7, 0, -1]])
def test_a_slot_beyond_the_trained_bank_is_refused(slots):
    given = drawn(5, 6), routing(torch.float32), bank(3, torch.float32), bank(1, torch.float32)
    with pytest.raises(Refusal, match=f"E-RANGE: split_experts: slots go up to {max(slots)}, "):
        kernels.split_experts(*given, torch.tensor(slots), F.silu)


@pytest.mark.parametrize(("slots", "why"), [([-2, 0, -1], "hold -2"), ([0, 0, -1], "hold 0 twice")])
def test_slots_that_are_no_places_or_shared_are_refused(slots, why):
    given = drawn(5, 6), routing(torch.float32), bank(3, torch.float32), bank(1, torch.float32)
    with pytest.raises(Refusal, match=f"E-RANGE: split_experts: .*{why}"):
        kernels.split_experts(*given, torch.tensor(slots), F.silu)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: kernels.nearest_rows(torch.tensor(1.0), drawn(2, 4), 1), "E-SHAPE: .*pool"),
        (lambda: kernels.groups(torch.tensor(1.0), drawn(5), 2), "E-SHAPE: groups: .*similarity"),
        (lambda: kernels.clusters(drawn(0, 5, 4), drawn(0, 2, 4)), "E-SHAPE: clusters: .*points"),
        (lambda: kernels.grouped(torch.tensor([[0, 3]]), drawn(1, 2), 3), "E-RANGE: grouped: ids"),
        (
            lambda: kernels.balance_loss(drawn(1, 3), torch.tensor([[-1, 2]])),
            "E-RANGE: balance_loss: ids are -1 to 2, expected 0 to 2",
        ),
    ],
)
def test_what_has_no_rows_or_names_no_expert_is_refused(run, message):
    with pytest.raises(Refusal, match=f"^{message}"):
        run()


@pytest.mark.parametrize("op", ["experts", "split_experts", "adapters"])
@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("ids", lambda ids: ids + 9),
        ("order", lambda order: order - 1),
        ("counts", lambda counts: counts * torch.tensor([0, 0, -1])),
    ],
)
def test_a_routing_to_nowhere_is_refused(op, part, change):
    good = routing(torch.float32)
    wrong = change(getattr(good, part))
    if part == "counts":
        wrong[0] = good.counts.sum() - wrong.sum()
    with pytest.raises(Refusal, match=f"^E-RANGE: {op}: the routing's {part} are "):
        call(op, **{part: wrong})


@pytest.mark.parametrize("op", ["experts", "split_experts", "adapters"])
def test_an_order_that_does_not_group_the_slots_is_refused(op):
    good = routing(torch.float32)
    for wrong in (good.order.flip(0), good.order * 0):
        with pytest.raises(Refusal, match=f"^E-RANGE: {op}: the routing's order does not group"):
            call(op, order=wrong)
    twice = torch.arange(10) // 2 * 2
    same = Routing(torch.zeros_like(good.ids), good.weights, twice, torch.tensor([10, 0, 0]))
    with pytest.raises(Refusal, match=r"^E-RANGE: the routing's order names slot 0 twice"):
        call(op, **same._asdict())


@pytest.mark.parametrize("op", ["experts", "split_experts", "adapters"])
def test_a_routing_that_chooses_no_expert_is_refused(op):
    none = routing(torch.float32)._replace(order=torch.arange(0), counts=torch.zeros(3).long())
    none = none._replace(ids=none.ids[:, :0], weights=none.weights[:, :0])
    with pytest.raises(Refusal, match=f"^E-SHAPE: {op}: expected a routing"):
        call(op, **none._asdict())


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(
    ("op", "argument", "change"),
    [
        ("experts", "gate_up", lambda t: t[:, :0]),
        ("split_experts", "trained_gate_up", lambda t: t[:, :0]),
        ("adapters", "down", lambda t: t[..., :0]),
        ("lora_mixture", "up", lambda t: t[:, :0]),
        ("clusters", "centres", lambda t: t[..., :0]),
        ("grouped", "ids", lambda t: t[:, :0]),
    ],
)
def test_a_width_of_zero_is_refused(op, argument, change, impl):
    same = {
        "gate_up": {"down": lambda t: t[..., :0]},
        "trained_gate_up": {"trained_down": lambda t: t[..., :0]},
        "down": {"up": lambda t: t[:, :0]},
        "up": {"base": lambda t: t[:, :0]},
        "centres": {"points": lambda t: t[..., :0]},
        "ids": {"weights": lambda t: t[:, :0]},
    }
    with pytest.raises(Refusal, match=f"^E-SHAPE: {op}: .* 0"):
        call(op, impl=impl, wrong={argument: change} | same[argument])


@installed
@pytest.mark.parametrize("op", TWINS)
def test_triton_is_refused_on_meta(op, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = dict.fromkeys(ARGUMENTS[op], methodcaller("to", "meta"))
    with pytest.raises(Refusal, match=f"^E-(IMPL|DEVICE): {op}: .* on meta, "):
        call(op, impl="triton", wrong=names)


@pytest.mark.parametrize("op", ["experts", "adapters", "lora_mixture"])
def test_a_gradient_that_is_not_asked_for_costs_nothing(op):
    one, many = ("h", "source") if op == "adapters" else ("x",), {
        "experts": ("gate_up", "down"), "adapters": ("down", "up"), "lora_mixture": ("down", "up"),
    }[op]  # fmt: skip
    cost = {}
    for asked in ((*one, *many), one, many):
        leaves = {name: methodcaller("requires_grad_") for name in asked}
        with FlopCounterMode(display=False) as forward:
            out = call(op, dtype=torch.float64, wrong=leaves)
        with FlopCounterMode(display=False) as backward:
            (out[0] if op == "lora_mixture" else out).sum().backward()
        cost[asked] = backward.get_total_flops() / forward.get_total_flops()
    both, inputs, weights = cost.values()
    assert (both, inputs) == (2, 1)
    assert 1 < weights < 2


def test_a_mixture_of_no_projections_is_refused():
    with pytest.raises(Refusal, match="E-SHAPE: lora_mixture: projections is empty"):
        kernels.lora_mixture(drawn(5, 6), [])


@pytest.mark.parametrize("op", ["experts", "split_experts", "adapters"])
def test_counts_that_do_not_sum_to_the_rows_are_refused(op):
    with pytest.raises(Refusal, match=f"E-SHAPE: {op}: the routing's counts sum to 9, .* are 10"):
        call(op, counts=torch.tensor([3, 3, 3]))


@installed
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="arguments lie on a CPU")
@pytest.mark.parametrize("op", TWINS)
def test_kernels_are_launched_where_the_first_tensor_lies(op, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def device_of(tensor):
        seen.append(tensor.shape)
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    call(op, impl="triton")
    assert seen
