"""Cases of a model's layer: routing, experts, adapters, LoRAs, the balance loss."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import silu

from moebook import kernels
from moebook.errors import refuse
from moebook.kernels import Bank, Routing, route
from moebook.kernels.lora_mixture import lora_mixture
from moebook.lab.bench.case import (
    Case,
    Product,
    Run,
    expert_step,
    number_format,
    peer,
    size_of,
)
from moebook.lab.bench.timing import Contender

LARGEST = 2**29  # bytes of copied weights from which `batched_mm` does not take part


def routed(device: torch.device, T: int, E: int, K: int) -> Case:
    """Logits to ids, weights, counts and order, against the same made by hand."""
    logits = torch.randn(T, E, device=device)

    def composed() -> tuple[Tensor, ...]:
        chosen, ids = logits.topk(K, dim=1)
        slots = ids.flatten()
        counts = slots.bincount(minlength=E)
        return chosen.softmax(-1), slots.argsort(stable=True), counts

    case = Case(size_of(logits) + T * K * 20)
    case.add("ours", lambda: route(logits, K))
    case.add("floor", logits.clone)
    case.add("torch top-k + sort", composed)
    case.add("reference", lambda: route(logits, K, impl="reference"))
    return case


def balanced(device: torch.device, T: int, E: int, K: int) -> Case:
    """Top-k, which theirs cannot leave out, the loss and its gradient."""
    if K > E:
        refuse("E-RANGE", f"balance_loss: a token cannot choose {K} of {E} experts")
    logits = torch.randn(T, E, device=device, requires_grad=True)

    def loss(impl: str) -> Tensor:
        ids = logits.detach().topk(K, dim=1).indices
        return kernels.balance_loss(logits, ids, impl=impl)

    def by_transformers() -> Run:
        mixtral = peer("transformers.models.mixtral.modeling_mixtral")
        return partial(mixtral.load_balancing_loss_func, (logits,), E, K)

    case = Case(2 * size_of(logits), torch.ones((), device=device), [logits])
    case.add("ours", partial(loss, "auto"))
    case.contenders.append(Contender("floor", logits.detach().clone))
    case.add("one-hot", partial(loss, "reference"))
    case.invite("transformers", by_transformers)
    return case


class Inputs(NamedTuple):
    """What an op of experts takes."""

    x: Tensor  # [T, D]
    routing: Routing
    bank: Bank


def _inputs(
    device: torch.device, dtype: torch.dtype, T: int, D: int, F: int, E: int, K: int
) -> Inputs:
    """Draw tokens, their routing and a bank, from one seed."""
    torch.manual_seed(0)
    here = {"device": device, "dtype": dtype}
    x = torch.randn(T, D, **here, requires_grad=True)
    routing = route(torch.randn(T, E, device=device), K)
    # Weights over the root of their inputs, so that what comes out is as large as what went in.
    gate_up = torch.randn(E, 2 * F, D, **here).mul_(D**-0.5)
    down = torch.randn(E, D, F, **here).mul_(F**-0.5)
    return Inputs(x, routing, Bank(nn.Parameter(gate_up), nn.Parameter(down)))


def _hosted(implementation: str, inputs: Inputs) -> Run:
    """Return the experts of transformers' Mixtral with one of its implementations."""
    x, routing, bank = inputs
    E, gate_and_up, D = bank.gate_up.shape
    # It copies the weights of every slot.
    copied = routing.ids.numel() * size_of(*bank) // E
    if implementation == "batched_mm" and copied > LARGEST:
        refuse(
            "E-MEMORY", f"its copies of the weights would take {copied / 1e9:.0f} GB"
        )
    mixtral = peer("transformers.models.mixtral")
    config = mixtral.MixtralConfig(
        num_local_experts=E, hidden_size=D, intermediate_size=gate_and_up // 2
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = mixtral.modeling_mixtral.MixtralExperts(config)
    module.gate_up_proj, module.down_proj = bank
    return partial(module, x, routing.ids, routing.weights.to(x.dtype))


def full_experts(
    device: torch.device, T: int, D: int, F: int, E: int, K: int, bits: int = 0
) -> Case:
    """Gated experts against transformers' own implementations and the dense floor."""
    dtype = number_format(device, bits)
    inputs = _inputs(device, dtype, T, D, F, E, K)
    x, _, bank = inputs
    traffic = 3 * size_of(*bank) + 4 * size_of(x)
    case = Case(traffic, torch.randn_like(x), [x, *bank])
    case.add("ours", lambda: kernels.experts(*inputs, silu))
    case.floor(expert_step(T * K, T * K, D, F), device, dtype)
    if bits == 16:
        wide = _inputs(device, torch.float32, T, D, F, E, K)
        second = Case(0, torch.randn_like(wide.x), [wide.x, *wide.bank])
        second.add("own float32", lambda: kernels.experts(*wide, silu))
        case.contenders += second.contenders
    for implementation in ("grouped_mm", "eager", "batched_mm"):
        case.invite(implementation, partial(_hosted, implementation, inputs))
    return case


def half_trained(device: torch.device, T: int, D: int, F: int, E: int, K: int) -> Case:
    """Half of the experts train, against full gradients that are masked afterwards."""
    dtype = number_format(device)
    half = E // 2
    inputs = _inputs(device, dtype, T, D, F, E, K)
    x, routing, bank = inputs
    slots = torch.full((E,), -1, device=device)  # -1: frozen
    slots[:half] = torch.arange(half, device=device)
    frozen = Bank(*(weight.detach() for weight in bank))
    trained = Bank(*(nn.Parameter(weight[:half].clone()) for weight in frozen))
    still = torch.arange(half, E, device=device)

    def split() -> Tensor:
        return kernels.split_experts(x, routing, frozen, trained, slots, silu)

    def mask() -> None:
        for weight in bank:
            weight.grad.index_fill_(0, still, 0)

    traffic = size_of(*bank, *bank, *trained) + 4 * size_of(x)
    case = Case(traffic, torch.randn_like(x), [x, *bank, *trained])
    case.add("ours", split)
    trained_slots = int(routing.counts[:half].sum())
    case.floor(expert_step(T * K, trained_slots, D, F), device, dtype)
    case.add("own full gradients", lambda: kernels.experts(*inputs, silu))
    masked = partial(_hosted, "grouped_mm", inputs)
    case.invite("grouped_mm + mask", masked, after=mask)
    return case


def routed_adapters(
    device: torch.device,
    T: int,
    D: int,
    R: int,
    E: int,
    K: int,
    backward: int = 1,
    F: int = 0,
) -> Case:
    """Routed adapters (PESC) against Eq. 7 and 8; with F behind a frozen FFN."""
    torch.manual_seed(0)
    dtype = number_format(device)
    draw = partial(torch.randn, device=device, dtype=dtype)
    h = draw(T, D, requires_grad=True)
    down = nn.Parameter(draw(E, D, R).mul_(D**-0.5))
    up = nn.Parameter(draw(E, R, D).mul_(R**-0.5))
    routing = route(torch.randn(T, E, device=device), K)

    # 4 T D K R FLOPs forward, and twice that backward.
    products = [Product(T * K, D, R, 6 if backward else 2)]
    frozen = (draw(2 * F, D), draw(D, F)) if F else ()
    if backward:  # the gradients of what trains are written, too
        traffic = 4 * size_of(h) + 3 * size_of(down, up) + 2 * size_of(*frozen)
    else:
        traffic = 2 * size_of(h) + size_of(down, up, *frozen)
    cotangent = torch.randn_like(h) if backward else None
    case = Case(traffic, cotangent, [h, down, up])
    if F:
        ffn = _frozen_ffn(h, *frozen)
        case.add("ours", lambda: kernels.adapters(ffn(), routing, down, up))
        # Backward one product a frozen weight, for the gradient of what went in.
        case.floor([*products, Product(T, D, F, 6 if backward else 3)], device, dtype)
        case.add("frozen FFN alone", ffn)
        return case
    case.add("ours", lambda: kernels.adapters(h, routing, down, up))
    case.floor(products, device, dtype)
    case.add("published form", lambda: _published(h, routing, down, up))
    case.add("grouped_mm", lambda: _grouped(h, routing, down, up))
    if not backward:
        case.add("residual add", partial(torch.add, h, torch.randn_like(h)))
    return case


def _frozen_ffn(h: Tensor, gate_up: Tensor, down: Tensor) -> Run:
    """Return a gated FFN on h, its random weights scaled by their inner widths."""
    gate_up.mul_(gate_up.shape[1] ** -0.5)
    down.mul_(down.shape[1] ** -0.5)

    def run() -> Tensor:
        gate, across = F.linear(h, gate_up).chunk(2, dim=-1)
        return F.linear(silu(gate) * across, down)

    return run


def _published(h: Tensor, routing: Routing, down: Tensor, up: Tensor) -> Tensor:
    """PESC Eq. 7 with Eq. 8, term by term: all experts on all tokens, residual too."""
    # [T, E], 0 where a token did not choose an expert.
    gates = h.new_zeros(len(h), len(down))
    gates = gates.scatter(1, routing.ids, routing.weights.to(h.dtype))
    y = torch.zeros_like(h)
    for expert in range(len(down)):
        adapted = F.gelu(h @ down[expert]) @ up[expert] + h  # Eq. 8
        y = y + gates[:, expert, None] * adapted
    return y


def _grouped(h: Tensor, routing: Routing, down: Tensor, up: Tensor) -> Tensor:
    """Sort, two products of torch's grouped_mm, and back to the order of the tokens."""
    K = routing.ids.shape[1]
    order = routing.order  # [T K], slots sorted by expert; slot // K is its token
    ends = routing.counts.cumsum(0).to(torch.int32)  # [E], where an expert's slots end
    tokens = h[order // K]  # [T K, D]
    hidden = F.gelu(F.grouped_mm(tokens, down, offs=ends))
    out = F.grouped_mm(hidden, up, offs=ends)
    gates = routing.weights.to(h.dtype).flatten()[order, None]
    # Where each slot stands in the order: the sorting, undone.
    back = torch.empty_like(order)
    back[order] = torch.arange(len(back), device=back.device)
    slots = (out * gates)[back]
    return h + slots.view(len(h), K, -1).sum(1)


def mixed_loras(device: torch.device, T: int, D: int, R: int, N: int, K: int) -> Case:
    """A frozen layer with N routed LoRAs, against PEFT's with one and a loop over N."""
    torch.manual_seed(0)
    dtype = number_format(device)
    draw = partial(torch.randn, device=device, dtype=dtype)
    x = draw(T, D, requires_grad=True)
    layer = nn.Linear(D, D, bias=False, device=device, dtype=dtype)
    layer.requires_grad_(False)
    down = nn.Parameter(draw(N, R, D).mul_(D**-0.5))
    up = nn.Parameter(draw(N, D, R).mul_(R**-0.5))
    chosen = route(torch.randn(T, N, device=device), min(K, N))
    gates = x.new_zeros(T, N).scatter(1, chosen.ids, chosen.weights.to(dtype))
    traffic = 2 * size_of(layer.weight) + 3 * size_of(down, up) + 4 * size_of(x)
    case = Case(traffic, torch.randn_like(x), [x, down, up])

    def mixed(impl: str) -> Tensor:
        return lora_mixture(x, layer(x), gates, down, up, impl=impl)

    def one_lora() -> Run:
        peft = peer("peft")
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
