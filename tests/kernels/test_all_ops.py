"""What all ops have in common: what they refuse, and on which GPU their kernels are launched."""

import contextlib
import os
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional as F

from moebook import kernels
from moebook.errors import Refusal
from moebook.kernels import Bank
from moebook.kernels.bank_scoring import Answers
from moebook.kernels.lora_mixture import Projection


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def bank(number, dtype, device="cpu"):
    return Bank(drawn(number, 8, 6, dtype=dtype), drawn(number, 6, 4, dtype=dtype).to(device))


def routing(dtype):
    return kernels.route(drawn(5, 3, dtype=dtype), 2)


def call(op, *, impl="auto", dtype=torch.float32, device="cpu", **changes):
    """Call an op as it is meant to be, but for what is said; one argument lies on ``device``."""
    x, by = drawn(5, 6, dtype=dtype), routing(dtype)._replace(**changes)
    match op:
        case "route":
            return kernels.route(x, 2, impl=impl)
        case "experts":
            return kernels.experts(x, by, bank(3, dtype, device), F.silu, impl=impl)
        case "split_experts":
            banks, slots = (bank(3, dtype), bank(1, dtype, device)), torch.tensor([-1, 0, -1])
            return kernels.split_experts(x, by, *banks, slots, F.silu, impl=impl)
        case "adapters":
            down, up = drawn(3, 6, 4, dtype=dtype), drawn(3, 4, 6, dtype=dtype).to(device)
            return kernels.adapters(x, by, down, up, impl=impl)
        case "lora_mixture":
            down, up = drawn(2, 3, 6, dtype=dtype), drawn(2, 7, 3, dtype=dtype).to(device)
            base, gates = drawn(5, 7, dtype=dtype), drawn(5, 2, dtype=dtype)
            return kernels.lora_mixture(x, [Projection(base, gates, down, up)], impl=impl)
        case "balance_loss":
            return kernels.balance_loss(x, by.ids.to(device), impl=impl)
        case "bank_scoring":
            answers = Answers(*(torch.tensor(part).to(device) for part in ([0], [2], [1])))
            hidden, head = drawn(1, 3, 4, dtype=dtype), drawn(5, 4, dtype=dtype)
            return kernels.bank_scoring(hidden, head, answers, impl=impl)
        case "nearest":
            return kernels.nearest(x.to(device), x[:2], 3, impl=impl)
        case "duplicates":
            return kernels.duplicates(x, torch.ones(5).to(device), 0.9, impl=impl)
        case "groups":
            return kernels.groups(x[:, :5], torch.ones(5), 2, impl=impl)
        case "clusters":
            return kernels.clusters(x[None], x[None, :2].to(device), impl=impl)


OPS = (
    "route", "experts", "split_experts", "adapters", "lora_mixture", "balance_loss",
    "bank_scoring", "nearest", "duplicates", "groups", "clusters",
)  # fmt: skip
installed = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("op", OPS)
def test_an_implementation_that_is_not_there_is_refused(op):
    call(op)
    with pytest.raises(Refusal, match=f"E-IMPL: {op}: no implementation impl='cuda'"):
        call(op, impl="cuda")


@installed
@pytest.mark.parametrize(
    ("interpret", "dtype", "why"),
    [
        ("0", torch.float32, "the input is on cpu, expected an NVIDIA GPU"),
        ("1", torch.bfloat16, "Triton's interpreter computes bfloat16 wrongly"),
        ("1", torch.float64, "the input is torch.float64"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_triton_is_refused_where_it_cannot_run(op, interpret, dtype, why, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    why = "the op has no Triton kernel" if op == "groups" else why
    with pytest.raises(Refusal, match=f"E-IMPL: {op}: impl='triton' cannot run here: .*{why}"):
        call(op, impl="triton", dtype=dtype)


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("route", "groups")])
def test_arguments_on_two_devices_are_refused(op):
    with pytest.raises(Refusal, match=f"E-DEVICE: {op}: "):
        call(op, device="meta")


@pytest.mark.parametrize("op", ["experts", "split_experts", "adapters"])
def test_counts_that_do_not_sum_to_the_rows_are_refused(op):
    with pytest.raises(Refusal, match=f"E-SHAPE: {op}: the routing's counts sum to 9, .* are 10"):
        call(op, counts=torch.tensor([3, 3, 3]))


@installed
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="arguments lie on a CPU")
@pytest.mark.parametrize("op", [op for op in OPS if op != "groups"])
def test_kernels_are_launched_where_the_first_tensor_lies(op, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def device_of(tensor):
        seen.append(tensor.shape)
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    call(op, impl="triton")
    assert seen
