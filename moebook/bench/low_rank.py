"""Cases of what is small beside a frozen layer: `adapters` and `lora_mixture`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook.bench import peers
from moebook.bench.case import Axis, Case, Op, Run, number_format, size_of
from moebook.bench.floors import Product
from moebook.kernels import Routing, adapters, lora_mixture, route
from moebook.kernels.lora_mixture import Projection


def _adapters(
    device: torch.device, T: int, D: int, R: int, E: int, K: int, backward: int = 1, F: int = 0
) -> Case:
    """Routed adapters (PESC) against Eq. 7 and 8 as they are printed, and grouped_mm.

    Without ``backward`` beside an addition of two such tensors; with ``F``, a step behind a frozen
    FFN of that width, beside the FFN alone.
    """
    torch.manual_seed(0)
    dtype = number_format(device)
    draw = {"device": device, "dtype": dtype}
    h = torch.randn(T, D, **draw, requires_grad=True)
    down = nn.Parameter(torch.randn(E, D, R, **draw).mul_(D**-0.5))
    up = nn.Parameter(torch.randn(E, R, D, **draw).mul_(R**-0.5))
    routing = route(torch.randn(T, E, device=device), K)
    ffn = _frozen_ffn(D, F, **draw) if F else nn.Identity()
    # 4 T D K R FLOPs forward, and twice that backward.
    products = [Product(T * K, D, R, 6 if backward else 2)]
    traffic = 12 * D * F + (4 if backward else 2) * size_of(h)
    case = Case(traffic, torch.randn_like(h) if backward else None, [h, down, up])
    case.add("ours", lambda: adapters(ffn(h), routing, down, up))
    case.floor([*products, Product(T, D, F, 6)] if F else products, device, dtype)
    if F:
        case.add("frozen FFN alone", lambda: ffn(h))
        return case
    case.add("published form", lambda: _published(h, routing, down, up))
    case.add("grouped_mm", lambda: _grouped(h, routing, down, up))
    if not backward:
        case.add("residual add", partial(torch.add, h, torch.randn_like(h)))
    return case


def _frozen_ffn(D: int, width: int, **draw: Any) -> Callable[[Tensor], Tensor]:
    """Return a gated FFN whose weights have no gradient."""
    gate_up = torch.randn(2 * width, D, **draw).mul_(D**-0.5)
    down = torch.randn(D, width, **draw).mul_(width**-0.5)

    def ffn(x: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    return ffn


def _published(h: Tensor, routing: Routing, down: Tensor, up: Tensor) -> Tensor:
    """PESC Eq. 7 with Eq. 8, term by term: every expert on every token, and the residual too."""
    gates = h.new_zeros(len(h), len(down))
    gates = gates.scatter(1, routing.ids, routing.weights.to(h.dtype))
    y = torch.zeros_like(h)
    for expert, (first, second) in enumerate(zip(down, up, strict=True)):
        y = y + gates[:, expert, None] * (F.gelu(h @ first) @ second + h)
    return y


def _grouped(h: Tensor, routing: Routing, down: Tensor, up: Tensor) -> Tensor:
    """Sort, two products of torch's grouped_mm, and back to the order of the tokens."""
    K = routing.ids.shape[1]
    ends = routing.counts.cumsum(0).to(torch.int32)
    gates = routing.weights.to(h.dtype).flatten()[routing.order, None]
    hidden = F.gelu(F.grouped_mm(h[routing.order // K], down, offs=ends))
    rows = F.grouped_mm(hidden, up, offs=ends) * gates
    back = torch.empty_like(routing.order)
    back[routing.order] = torch.arange(len(back), device=back.device)
    return h + rows[back].view(len(h), K, -1).sum(1)


def _loras(device: torch.device, T: int, D: int, R: int, N: int, K: int) -> Case:
    """A frozen layer with N routed LoRAs, against PEFT's layer with one, and a loop over N."""
    torch.manual_seed(0)
    dtype = number_format(device)
    draw = {"device": device, "dtype": dtype}
    x = torch.randn(T, D, **draw, requires_grad=True)
    layer = nn.Linear(D, D, bias=False, **draw).requires_grad_(False)
    down = nn.Parameter(torch.randn(N, R, D, **draw).mul_(D**-0.5))
    up = nn.Parameter(torch.randn(N, D, R, **draw).mul_(R**-0.5))
    chosen = route(torch.randn(T, N, device=device), min(K, N))
    gates = x.new_zeros(T, N).scatter(1, chosen.ids, chosen.weights.to(dtype))
    case = Case(2 * size_of(layer.weight) + 4 * size_of(x), torch.randn_like(x), [x, down, up])

    def mixed(impl: str) -> Tensor:
        return lora_mixture(x, [Projection(layer(x), gates, down, up)], impl=impl)[0]

    def one_lora() -> Run:
        peft = peers.module("peft")
        config = peft.LoraConfig(r=R, target_modules=["layer"], init_lora_weights=False)
        host = nn.ModuleDict({"layer": layer})
        peft.inject_adapter_in_model(config, host)
        wrapped = host["layer"].to(dtype)
        case.leaves += [p for p in wrapped.parameters() if p.requires_grad]
        return partial(wrapped, x)

    case.add("ours", lambda: mixed("auto"))
    # Two for the frozen weight, which has no gradient, and three for each factor.
    products = [Product(T, D, D, 2), Product(T, D, N * R, 3), Product(T, N * R, D, 3)]
    case.floor(products, device, dtype)
    case.add("frozen layer alone", lambda: layer(x))
    case.add("one after another", lambda: mixed("reference"))
    case.invite("one LoRA of PEFT", one_lora)
    return case


_TINY = {"T": 16, "D": 8, "R": 4, "E": 4, "K": 2}
_FULL = {"T": 8192, "D": 1024, "R": 32, "E": 8, "K": 2}
_MODEL = {"T": 16384, "D": 4096, "R": 64, "E": 8, "K": 2}

ADAPTERS = Op(
    _adapters,
    tiny={"step": _TINY, "forward": {**_TINY, "backward": 0}, "behind_ffn": {**_TINY, "F": 8}},
    small={"step": {"T": 2048, "D": 256, "R": 32, "E": 8, "K": 2}},
    full={"step": _FULL, "forward": {**_FULL, "backward": 0}},
    model={
        "step": _MODEL,
        "forward": {**_MODEL, "backward": 0},
        "behind_ffn": {**_MODEL, "F": 11008},
    },
    T=Axis("T", "tokens", (512, 1024, 2048, 4096)),
    E=Axis("E", "adapters", (4, 8, 16, 32)),
    N=Axis("K", "adapters of a token", (1, 2, 4)),
)
LORAS = Op(
    _loras,
    tiny={"four": {"T": 16, "D": 8, "R": 4, "N": 2, "K": 2}},
    small={"four": {"T": 1024, "D": 512, "R": 16, "N": 4, "K": 2}},
    full={"four": {"T": 2048, "D": 2048, "R": 16, "N": 4, "K": 2}},
    model={"four": {"T": 16384, "D": 4096, "R": 16, "N": 4, "K": 2}},
    T=Axis("T", "tokens", (256, 512, 1024, 2048)),
    E=Axis("N", "LoRAs", (2, 4, 8, 16)),
    N=Axis("K", "LoRAs of a token", (1, 2, 4)),
)
