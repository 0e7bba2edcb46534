"""Cases of full experts, forward and backward: `experts` and `split_experts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook.bench import floors, peers
from moebook.bench.case import Case, Op, number_format, size_of, stepping
from moebook.bench.timing import Contender
from moebook.errors import refuse
from moebook.kernels import Bank, Routing, experts, route, split_experts

LARGEST = 2**29
"""Bytes of copied weights from which `batched_mm` does not take part."""


class _Inputs:
    """Tokens, their routing, a bank and the output's gradient, from one seed."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, T: int, D: int, F: int, E: int, K: int
    ) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(T, D, device=device, dtype=dtype, requires_grad=True)
        self.routing = route(torch.randn(T, E, device=device), K)
        draw = {"device": device, "dtype": dtype}
        self.bank = Bank(
            nn.Parameter(torch.randn(E, 2 * F, D, **draw).mul_(D**-0.5)),
            nn.Parameter(torch.randn(E, D, F, **draw).mul_(F**-0.5)),
        )
        self.cotangent = torch.randn_like(self.x)

    @property
    def leaves(self) -> list[Tensor]:
        """What has a gradient."""
        return [self.x, *self.bank]

    def step(self, name: str, forward: Callable[[], Tensor]) -> Contender:
        """Return a contender that runs forward and backward on these inputs."""
        return stepping(name, forward, self.cotangent, self.leaves)

    def hosted(self, name: str) -> Callable[[], Tensor]:
        """Return the experts of transformers' Mixtral with one of its implementations."""
        mixtral = peers.module("transformers.models.mixtral")
        number, double, width = self.bank.gate_up.shape
        sizes = {"hidden_size": width, "intermediate_size": double // 2}
        config = mixtral.MixtralConfig(num_local_experts=number, **sizes)
        config._experts_implementation = name
        with torch.device("meta"):
            module: Any = mixtral.modeling_mixtral.MixtralExperts(config)
        module.gate_up_proj, module.down_proj = self.bank
        weights = self.routing.weights.to(self.x.dtype)
        return lambda: module(self.x, self.routing.ids, weights)


def _experts(device: torch.device, T: int, D: int, F: int, E: int, K: int, bits: int = 0) -> Case:
    """Gated experts against transformers' own implementations and the dense floor."""
    dtype = number_format(device, bits)
    given = _Inputs(device, dtype, T, D, F, E, K)
    products = floors.expert_step(T * K, T * K, D, F)
    case = Case(
        [given.step("ours", _plain(given)), floors.dense(products, device, dtype)],
        floors.flops(products),
        3 * size_of(*given.bank) + 4 * size_of(given.x),
    )
    if bits == 16:
        wide = _Inputs(device, torch.float32, T, D, F, E, K)
        case.contenders.append(wide.step("own float32", _plain(wide)))
    for name in ("grouped_mm", "eager"):
        case.invite(name, lambda name=name: given.step(name, given.hosted(name)))  # type: ignore[misc]
    case.invite("batched_mm", lambda: _batched(given, 3 * T * K * D * F))
    return case


def _plain(given: _Inputs) -> Callable[[], Tensor]:
    return lambda: experts(given.x, given.routing, given.bank, F.silu)


def _batched(given: _Inputs, numbers: int) -> Contender:
    """Return `batched_mm`, which copies the weights of every slot.

    Raises:
        Refusal: E-MEMORY when the copies are too large.
    """
    copied = numbers * given.x.element_size()
    if copied > LARGEST:
        refuse("E-MEMORY", f"its copies of the weights would take {copied / 1e9:.0f} GB")
    return given.step("batched_mm", given.hosted("batched_mm"))


def _split(device: torch.device, T: int, D: int, F: int, E: int, K: int) -> Case:
    """Half of the experts train, against full gradients that are masked afterwards."""
    dtype = number_format(device)
    given = _Inputs(device, dtype, T, D, F, E, K)
    slots = torch.full((E,), -1, device=device)
    slots[: E // 2] = torch.arange(E // 2, device=device)
    trained = Bank(*(nn.Parameter(weight.detach()[: E // 2].clone()) for weight in given.bank))
    hits = int(given.routing.counts[: E // 2].sum())
    products = floors.expert_step(T * K, hits, D, F)
    ours = stepping("ours", _two_banks(given, trained, slots), given.cotangent, [given.x, *trained])
    case = Case(
        [ours, floors.dense(products, device, dtype)],
        floors.flops(products),
        size_of(*given.bank, *given.bank, *trained) + 4 * size_of(given.x),
    )
    case.contenders.append(given.step("own full gradients", _plain(given)))
    case.invite("grouped_mm + mask", lambda: _masked(given, slots))
    return case


def _two_banks(given: _Inputs, trained: Bank, slots: Tensor) -> Callable[[], Tensor]:
    frozen = Bank(*(weight.detach() for weight in given.bank))
    routing: Routing = given.routing
    return lambda: split_experts(given.x, routing, frozen, trained, slots, F.silu)


def _masked(given: _Inputs, slots: Tensor) -> Contender:
    """Return transformers' `grouped_mm` with full weight gradients, the frozen ones set to zero."""
    step = given.step("grouped_mm + mask", given.hosted("grouped_mm"))
    frozen = (slots < 0).nonzero().flatten()

    def run() -> None:
        step.run()
        for weight in given.bank:
            if weight.grad is not None:
                weight.grad.index_fill_(0, frozen, 0)

    return Contender(step.name, run, step.prepare, step.forward)


_FINE = {"T": 1024, "D": 1024, "F": 704, "E": 64, "K": 6}
_COARSE = {"T": 1024, "D": 1024, "F": 1408, "E": 8, "K": 2}
_TINY = {"T": 16, "D": 8, "F": 8, "E": 4, "K": 2}
_SMALL = {"T": 512, "D": 256, "F": 176, "E": 32, "K": 4}
_LITE = {"T": 8192, "D": 2048, "F": 1408, "E": 64, "K": 6}
_AXES = {"T": (0.25, 0.5, 1, 2), "E": (0.25, 0.5, 1, 2)}

EXPERTS = Op(
    "gated experts, forward and backward",
    _experts,
    {
        "tiny": {"fine": _TINY, "coarse_bf16": {**_TINY, "bits": 16}},
        "small": {
            "fine": _SMALL,
            "coarse": {"T": 512, "D": 256, "F": 352, "E": 8, "K": 2},
            "coarse_bf16": {"T": 512, "D": 256, "F": 352, "E": 8, "K": 2, "bits": 16},
        },
        "full": {"fine": _FINE, "coarse": _COARSE, "coarse_bf16": {**_COARSE, "bits": 16}},
        "model": {
            "fine": _LITE,
            "coarse": {"T": 8192, "D": 4096, "F": 11008, "E": 8, "K": 2},
        },
    },
    _AXES,
)
SPLIT = Op(
    "experts of which half train, forward and backward",
    _split,
    {
        "tiny": {"half": _TINY},
        "small": {"half": _SMALL},
        "full": {"half": _FINE},
        "model": {"half": _LITE},
    },
    _AXES,
)
