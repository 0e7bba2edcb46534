"""Cases of what stands in a model's layer: routing, experts, adapters, LoRAs, the balance loss."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook import kernels
from moebook.bench.case import Case, Product, Run, expert_step, number_format, peer, size_of
from moebook.bench.timing import Contender
from moebook.errors import refuse
from moebook.kernels import Bank, Routing, route
from moebook.kernels.lora_mixture import lora_mixture

LARGEST = 2**29  # bytes of copied weights from which `batched_mm` does not take part


def routed(device: torch.device, T: int, E: int, K: int) -> Case:
    """Logits to ids, weights, counts and order, against the same put together by hand."""
    logits = torch.randn(T, E, device=device)

    def composed() -> tuple[Tensor, ...]:
        chosen, ids = logits.topk(K, dim=1)
        slots = ids.flatten()
        return chosen.softmax(-1), slots.argsort(stable=True), slots.bincount(minlength=E)

    case = Case(size_of(logits) + T * K * 20)
    case.add("ours", lambda: route(logits, K))
    case.add("floor", logits.clone)
    case.add("torch top-k + sort", composed)
    case.add("reference", lambda: route(logits, K, impl="reference"))
    return case


def balanced(device: torch.device, T: int, E: int, K: int) -> Case:
    """Top-k, which theirs cannot leave out, the loss and its gradient, against transformers'."""
    logits = torch.randn(T, E, device=device, requires_grad=True)

    def loss(impl: str) -> Tensor:
        return kernels.balance_loss(logits, logits.detach().topk(K, dim=1).indices, impl=impl)

    case = Case(2 * size_of(logits), torch.ones((), device=device), [logits])
    case.add("ours", partial(loss, "auto"))
    case.contenders.append(Contender("floor", logits.detach().clone))
    case.add("one-hot", partial(loss, "reference"))
    mixtral = "transformers.models.mixtral.modeling_mixtral"
    theirs = lambda: partial(peer(mixtral).load_balancing_loss_func, (logits,), E, K)  # noqa: E731
    case.invite("transformers", theirs)
    return case


def _bank(
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
    """Return the experts of transformers' Mixtral with one of its implementations."""
    number, double, width = bank.gate_up.shape
    copied = routing.ids.numel() * size_of(*bank) // number
    if name == "batched_mm" and copied > LARGEST:  # it copies the weights of every slot
        refuse("E-MEMORY", f"its copies of the weights would take {copied / 1e9:.0f} GB")
    mixtral = peer("transformers.models.mixtral")
    sizes = {"hidden_size": width, "intermediate_size": double // 2}
    config = mixtral.MixtralConfig(num_local_experts=number, **sizes)
    config._experts_implementation = name
    with torch.device("meta"):
        module = mixtral.modeling_mixtral.MixtralExperts(config)
    module.gate_up_proj, module.down_proj = bank
    return partial(module, x, routing.ids, routing.weights.to(x.dtype))


def full_experts(
    device: torch.device, T: int, D: int, F: int, E: int, K: int, bits: int = 0
) -> Case:
    """Gated experts against transformers' own implementations and the dense floor."""
    dtype = number_format(device, bits)
    inputs = x, _, bank = _bank(device, dtype, T, D, F, E, K)
    case = Case(3 * size_of(*bank) + 4 * size_of(x), torch.randn_like(x), [x, *bank])
    case.add("ours", lambda: kernels.experts(*inputs, nn.functional.silu))
    case.floor(expert_step(T * K, T * K, D, F), device, dtype)
    if bits == 16:
        wide = rows, _, others = _bank(device, torch.float32, T, D, F, E, K)
        second = Case(0, torch.randn_like(rows), [rows, *others])
        second.add("own float32", lambda: kernels.experts(*wide, nn.functional.silu))
        case.contenders += second.contenders
    for name in ("grouped_mm", "eager", "batched_mm"):
        case.invite(name, partial(_hosted, name, *inputs))
    return case


def half_trained(device: torch.device, T: int, D: int, F: int, E: int, K: int) -> Case:
    """Half of the experts train, against full gradients that are masked afterwards."""
    dtype, half, silu = number_format(device), E // 2, nn.functional.silu
    inputs = x, routing, bank = _bank(device, dtype, T, D, F, E, K)
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
    case.add("ours", lambda: kernels.split_experts(x, routing, frozen, trained, slots, silu))
    case.floor(expert_step(T * K, int(routing.counts[:half].sum()), D, F), device, dtype)
    case.add("own full gradients", lambda: kernels.experts(*inputs, silu))
    case.invite("grouped_mm + mask", partial(_hosted, "grouped_mm", *inputs), after=mask)
    return case


def routed_adapters(
    device: torch.device, T: int, D: int, R: int, E: int, K: int, backward: int = 1, F: int = 0
) -> Case:
    """Routed adapters (PESC) against Eq. 7 and 8 as printed; with ``F``, behind a frozen FFN."""
    torch.manual_seed(0)
    dtype = number_format(device)
    draw = partial(torch.randn, device=device, dtype=dtype)
    h = draw(T, D, requires_grad=True)
    down = nn.Parameter(draw(E, D, R).mul_(D**-0.5))
    up = nn.Parameter(draw(E, R, D).mul_(R**-0.5))
    routing = route(torch.randn(T, E, device=device), K)
    gate_up, narrow = (draw(2 * F, D).mul_(D**-0.5), draw(D, F).mul_(F**-0.5)) if F else (h, h)

    def ffn() -> Tensor:
        gate, across = nn.functional.linear(h, gate_up).chunk(2, dim=-1)
        return nn.functional.linear(nn.functional.silu(gate) * across, narrow)

    # 4 T D K R FLOPs forward, and twice that backward.
    products = [Product(T * K, D, R, 6 if backward else 2)]
    traffic = 12 * D * F + (4 if backward else 2) * size_of(h)
    case = Case(traffic, torch.randn_like(h) if backward else None, [h, down, up])
    case.add("ours", lambda: kernels.adapters(ffn() if F else h, routing, down, up))
    case.floor([*products, Product(T, D, F, 6)] if F else products, device, dtype)
    if F:
        case.add("frozen FFN alone", ffn)
        return case
    case.add("published form", lambda: _published(h, routing, down, up))
    case.add("grouped_mm", lambda: _grouped(h, routing, down, up))
    if not backward:
        case.add("residual add", partial(torch.add, h, torch.randn_like(h)))
    return case


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


def mixed_loras(device: torch.device, T: int, D: int, R: int, N: int, K: int) -> Case:
    """A frozen layer with N routed LoRAs, against PEFT's layer with one, and a loop over N."""
    torch.manual_seed(0)
    dtype = number_format(device)
    draw = partial(torch.randn, device=device, dtype=dtype)
    x = draw(T, D, requires_grad=True)
    layer = nn.Linear(D, D, bias=False, device=device, dtype=dtype).requires_grad_(False)
    down = nn.Parameter(draw(N, R, D).mul_(D**-0.5))
    up = nn.Parameter(draw(N, D, R).mul_(R**-0.5))
    chosen = route(torch.randn(T, N, device=device), min(K, N))
    gates = x.new_zeros(T, N).scatter(1, chosen.ids, chosen.weights.to(dtype))
    case = Case(2 * size_of(layer.weight) + 4 * size_of(x), torch.randn_like(x), [x, down, up])

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
