"""Cases of full experts, forward and backward: `experts` and `split_experts`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from moebook.bench import floors, peers
from moebook.bench.case import Axis, Case, Op, Run, number_format, size_of
from moebook.errors import refuse
from moebook.kernels import Bank, Routing, experts, route, split_experts

LARGEST = 2**29
"""Bytes of copied weights from which `batched_mm` does not take part."""


def _drawn(
    device: torch.device, dtype: torch.dtype, T: int, D: int, F: int, E: int, K: int
) -> tuple[Tensor, Routing, Bank]:
    """Return tokens, their routing and a bank, from one seed."""
    torch.manual_seed(0)
    x = torch.randn(T, D, device=device, dtype=dtype, requires_grad=True)
    routing = route(torch.randn(T, E, device=device), K)
    gate_up = torch.randn(E, 2 * F, D, device=device, dtype=dtype).mul_(D**-0.5)
    down = torch.randn(E, D, F, device=device, dtype=dtype).mul_(F**-0.5)
    return x, routing, Bank(nn.Parameter(gate_up), nn.Parameter(down))


def _hosted(name: str, x: Tensor, routing: Routing, bank: Bank) -> Run:
    """Return the experts of transformers' Mixtral with one of its implementations.

    Raises:
        Refusal: E-MEMORY for `batched_mm`, which copies the weights of every slot, where the copies
            are too large; E-PEER without transformers.
    """
    number, double, width = bank.gate_up.shape
    copied = routing.ids.numel() * size_of(*bank) // number
    if name == "batched_mm" and copied > LARGEST:
        refuse("E-MEMORY", f"its copies of the weights would take {copied / 1e9:.0f} GB")
    mixtral = peers.module("transformers.models.mixtral")
    sizes = {"hidden_size": width, "intermediate_size": double // 2}
    config = mixtral.MixtralConfig(num_local_experts=number, **sizes)
    config._experts_implementation = name
    with torch.device("meta"):
        module: Any = mixtral.modeling_mixtral.MixtralExperts(config)
    module.gate_up_proj, module.down_proj = bank
    return partial(module, x, routing.ids, routing.weights.to(x.dtype))


def _experts(device: torch.device, T: int, D: int, F: int, E: int, K: int, bits: int = 0) -> Case:
    """Gated experts against transformers' own implementations and the dense floor."""
    dtype = number_format(device, bits)
    given = x, _, bank = _drawn(device, dtype, T, D, F, E, K)
    case = Case(3 * size_of(*bank) + 4 * size_of(x), torch.randn_like(x), [x, *bank])
    case.add("ours", lambda: experts(*given, silu))
    case.floor(floors.expert_step(T * K, T * K, D, F), device, dtype)
    if bits == 16:
        wide = rows, _, others = _drawn(device, torch.float32, T, D, F, E, K)
        own = Case(0, torch.randn_like(rows), [rows, *others])
        own.add("own float32", lambda: experts(*wide, silu))
        case.contenders += own.contenders
    for name in ("grouped_mm", "eager", "batched_mm"):
        case.invite(name, partial(_hosted, name, *given))
    return case


def _split(device: torch.device, T: int, D: int, F: int, E: int, K: int) -> Case:
    """Half of the experts train, against full gradients that are masked afterwards."""
    dtype, half = number_format(device), E // 2
    given = x, routing, bank = _drawn(device, dtype, T, D, F, E, K)
    slots = torch.full((E,), -1, device=device)
    slots[:half] = torch.arange(half, device=device)
    frozen = Bank(*(weight.detach() for weight in bank))
    trained = Bank(*(nn.Parameter(weight[:half].clone()) for weight in frozen))
    still = torch.arange(half, E, device=device)

    def mask() -> None:
        for weight in bank:
            weight.grad.index_fill_(0, still, 0)

    traffic = size_of(*bank, *bank, *trained) + 4 * size_of(x)
    case = Case(traffic, torch.randn_like(x), [x, *bank, *trained])
    case.add("ours", lambda: split_experts(x, routing, frozen, trained, slots, silu))
    case.floor(floors.expert_step(T * K, int(routing.counts[:half].sum()), D, F), device, dtype)
    case.add("own full gradients", lambda: experts(*given, silu))
    case.invite("grouped_mm + mask", partial(_hosted, "grouped_mm", *given), after=mask)
    return case


_TINY = {"T": 16, "D": 8, "F": 8, "E": 4, "K": 2}
_FINE = {"T": 1024, "D": 1024, "F": 704, "E": 64, "K": 6}
_COARSE = {"T": 1024, "D": 1024, "F": 1408, "E": 8, "K": 2}
_SMALL = {"T": 512, "D": 256, "F": 176, "E": 32, "K": 4}
_SMALL_COARSE = {"T": 512, "D": 256, "F": 352, "E": 8, "K": 2}
_LITE = {"T": 8192, "D": 2048, "F": 1408, "E": 64, "K": 6}
_MIXTRAL = {"T": 8192, "D": 4096, "F": 11008, "E": 8, "K": 2}

EXPERTS = Op(
    _experts,
    tiny={"fine": _TINY, "coarse_bf16": {**_TINY, "bits": 16}},
    small={
        "fine": _SMALL,
        "coarse": _SMALL_COARSE,
        "coarse_bf16": {**_SMALL_COARSE, "bits": 16},
    },
    full={"fine": _FINE, "coarse": _COARSE, "coarse_bf16": {**_COARSE, "bits": 16}},
    model={"fine": _LITE, "coarse": _MIXTRAL},
    T=Axis("T", "tokens", (128, 256, 512, 1024)),
    E=Axis("E", "experts", (8, 16, 32, 64)),
    N=Axis("K", "experts of a token", (1, 2, 4, 8)),
)
SPLIT = replace(
    EXPERTS,
    build=_split,
    tiny={"half": _TINY},
    small={"half": _SMALL},
    full={"half": _FINE},
    model={"half": _LITE},
)
