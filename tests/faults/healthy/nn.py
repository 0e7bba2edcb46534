"""Calls of modules that are right, and plain loops that they must agree with."""

import torch
from torch import nn as tnn
from torch.nn import functional as F

from moebook import kernels, nn
from moebook.nn.lora_mixture import LoraMixture
from tests.faults.healthy import hosts
from tests.faults.healthy.kernels import draw, gated
from tests.faults.hostile import EVERY, Row

B = 2
T = 3
D = 6
E = 4
K = 2
R = 2
FF = 5
OUT = 7
N = 3


class MLP(tnn.Module):
    """A gated MLP as transformers' hosts have it."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (tnn.Linear(D, FF, bias=False) for _ in range(2))
        self.down_proj = tnn.Linear(FF, D, bias=False)
        self.act_fn = tnn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def seeded(make):
    """Make a module with weights of one seed."""
    torch.manual_seed(0)
    return make()


def mlp():
    return seeded(MLP)


def router(**changes):
    return seeded(
        lambda: nn.Router(
            **{"width": D, "experts": E, "top_k": K, "layer": 0, **changes}
        )
    )


def chosen(router, x):
    """A router's gates [T, E], by sorting."""
    logits = x.double() @ router.weight.double().T
    if logits.shape[-1] < router.top_k:
        raise ValueError("top_k")
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[..., : router.top_k]
    if router.combine == "renormalised":
        weights = logits.gather(-1, ids).softmax(-1)
    else:
        weights = logits.softmax(-1).gather(-1, ids)
    return torch.zeros_like(logits).scatter(-1, ids, weights)


def routed(x, **how):
    """A router's routing of x, its gates as a table."""
    routing = router(**how)(x)
    gates = torch.zeros(len(routing.ids), len(routing.counts))
    return gates.scatter(1, routing.ids, routing.weights)


def true_routed(
    x,
    width,
    experts,
    top_k,
    layer,
    combine="renormalised",
    trace=None,
    device=None,
    dtype=torch.float32,
):
    if layer < 0 or x.dim() < 2 or not dtype.is_floating_point or top_k > experts:
        raise ValueError("router")
    made = router(
        width=width, experts=experts, top_k=top_k, layer=layer, combine=combine
    )
    return chosen(made, x.flatten(0, -2))


def experts(x, mlp, experts):
    made = nn.Experts(mlp, experts)
    return made(x, kernels.route(draw(len(x), experts, seed=9), K))


def true_experts(x, mlp, experts):
    return mlp.double()(x.double())


def expert_moe(x, router, experts):
    return nn.ExpertMoE(router, experts)(x)


def split_experts(x, frozen, chosen):
    made = nn.SplitExperts(frozen, chosen)
    made.gate_up_proj.data += 1
    return made(x, kernels.route(draw(len(x), E, seed=9), K))


def true_split(x, frozen, chosen):
    if len({*chosen}) < len(chosen) or not {*chosen} <= {*range(E)}:
        raise ValueError("chosen")
    routing = kernels.route(draw(len(x), E, seed=9), K)
    bank = (
        frozen.gate_up_proj.detach().double().clone(),
        frozen.down_proj.detach().double(),
    )
    bank[0][list(chosen)] += 1
    run = gated(*bank, F.silu)
    y = torch.zeros_like(x).double()
    for token, (ids, gates) in enumerate(
        zip(routing.ids.tolist(), routing.weights, strict=True)
    ):
        for expert, gate in zip(ids, gates.double(), strict=True):
            y[token] += gate * run(expert, x[token].double())
    return y


def adapters(h, **how):
    made = seeded(lambda: nn.Adapters(**how))
    made.up.data += 0.5
    made.eval()
    return made(
        h, kernels.route(draw(len(h), how["experts"], seed=9), min(K, how["experts"]))
    )


def true_adapters(
    h, width, experts, adapter_width, scale, served_scale, dropout, down_init, dtype
):
    if not 0 <= dropout < 1 or not h.is_floating_point():
        raise ValueError("dropout")
    if down_init not in ("kaiming", "zero"):
        raise ValueError(down_init)
    made = seeded(
        lambda: nn.Adapters(width, experts, adapter_width, down_init=down_init)
    )
    down = made.down.double()
    up = made.up.double() + 0.5
    routing = kernels.route(draw(len(h), experts, seed=9), min(K, experts))
    y = h.double().clone()
    for token, (ids, gates) in enumerate(
        zip(routing.ids.tolist(), routing.weights, strict=True)
    ):
        for expert, gate in zip(ids, gates.double(), strict=True):
            row = F.gelu(h[token].double() @ down[expert]) @ up[expert]
            y[token] += float(served_scale) * gate * row
    return y


def filled_adapters(**changes):
    made = seeded(
        lambda: nn.Adapters(**{"width": D, "experts": E, "adapter_width": R, **changes})
    )
    made.up.data += 0.5
    return made.eval()


def adapter_moe(x, shared, router, adapters):
    return nn.AdapterMoE(shared, router, adapters)(x)


def true_adapter_moe(x, shared, router, adapters):
    gates = chosen(router, x)
    h = shared.double()(x.double())
    inner = F.gelu(torch.einsum("...d,edr->...er", h, adapters.down.double()))
    return h + torch.einsum("...e,...er,erd->...d", gates, inner, adapters.up.double())


def layer():
    return seeded(lambda: tnn.Linear(D, OUT, bias=False))


def lora_mixture(x, base_layer, router, down, up, scales, reads, dropout):
    made = LoraMixture(
        base_layer, router, down, up, scales, reads=reads, dropout=dropout
    )
    return made.eval()(x)


def true_lora_mixture(x, base_layer, router, down, up, scales, reads, dropout):
    if len(scales) != len(down) or reads != "layer" or not 0 <= dropout < 1:
        raise ValueError("scales")
    if (
        len(up) != len(down)
        or down.shape[1] != up.shape[2]
        or not all(s > 0 for s in scales)
    ):
        raise ValueError("factors")
    gates = chosen(router, x)
    y = x.double() @ base_layer.weight.double().T
    for n, scale in enumerate(scales):
        y = y + gates[..., n : n + 1] * scale * (
            x.double() @ down[n].double().T @ up[n].double().T
        )
    return y


class Decoder(tnn.Module):
    """Two routers, one after the other, that read the same."""

    def __init__(self):
        super().__init__()
        trace = nn.Trace()
        self.routers = tnn.ModuleList(
            nn.Router(D, E, K, layer=n, trace=trace) for n in range(2)
        )
        trace.follow(self)

    def forward(self, x):
        return [router(x) for router in self.routers]


def traced():
    """Two routers that have run once."""
    decoder = seeded(Decoder)
    decoder(draw(B, T, D))
    return list(decoder.routers)


def true_balance(routers, attention_mask, first=False, form="live"):
    if attention_mask.shape[0] != B or attention_mask.shape[1] < T or form != "live":
        raise ValueError("mask")
    real = attention_mask[:, -T:].flatten().bool()
    total = 0
    for router in routers:
        decision = router.trace.decisions[router.layer]
        share = decision.logits[real].double().softmax(-1)
        load = torch.bincount(decision.ids[real].flatten(), minlength=E).double()
        count = max(int(real.sum()), 1)
        total = total + E * (load / (count * K) * share.sum(0) / count).sum()
    return total


def watched(model, batch):
    """What the routers of a mixture decide, by layer."""
    gates = {n: layer.mlp.gate for n, layer in enumerate(model.model.layers)}
    return {
        n: seen.real()[:4] for n, seen in nn.observe(model.model, gates, batch).items()
    }


def true_watched(model, batch):
    output = model(**batch, output_router_logits=True, use_cache=False)
    if not batch["input_ids"].numel() or batch["input_ids"].dim() != 2:
        raise ValueError("no tokens")
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    if mask.shape != batch["input_ids"].shape or not ((mask == 0) | (mask == 1)).all():
        raise ValueError("mask")
    decisions = {}
    for n, logits in enumerate(output.router_logits):
        logits = logits.view(*mask.shape, -1)[mask.bool()]
        top = logits.softmax(-1).topk(2)
        gates = top.values / top.values.sum(-1, keepdim=True)
        decisions[n] = logits, top.indices, gates, torch.ones(len(logits))
    return decisions


# ``own``: the dtype of x is the business of the host's linear layers.
ROUTER = {"width": D, "experts": E, "top_k": K, "layer": 0}
ROWS = {
    "nn.Router": Row(
        routed,
        lambda: {
            "x": draw(B, T, D),
            **ROUTER,
            "combine": "renormalised",
            "dtype": torch.float32,
        },
        true_routed,
        more={
            "dtype": {
                "whole": torch.int64,
                "complex": torch.complex64,
                "bool": torch.bool,
            }
        },
    ),
    "nn.Experts": Row(
        experts, lambda: {"x": draw(T, D), "mlp": mlp(), "experts": E}, true_experts
    ),
    "nn.ExpertMoE": Row(
        expert_moe,
        lambda: {
            "x": draw(B, T, D),
            "router": router(),
            "experts": nn.Experts(mlp(), E),
        },
        lambda x, router, experts: (
            mlp().double()(x.double())
            if router.weight.shape == (E, D) and len(experts.down_proj) == E
            else None
        ),
        more={
            "router": {"fewer": router(experts=E - 1), "narrow": router(width=D - 1)},
            "experts": {"fewer": nn.Experts(mlp(), E - 1)},
        },
    ),
    "nn.SplitExperts": Row(
        split_experts,
        lambda: {"x": draw(T, D), "frozen": nn.Experts(mlp(), E), "chosen": [2, 0]},
        true_split,
        more={"chosen": {"out of range": [E], "twice": [1, 1], "negative": [-1]}},
    ),
    "nn.Adapters": Row(
        adapters,
        lambda: {
            "h": draw(T, D),
            "width": D,
            "experts": E,
            "adapter_width": R,
            "scale": 2.0,
            "served_scale": 0.5,
            "dropout": 0.1,
            "down_init": "kaiming",
            "dtype": torch.float32,
        },
        true_adapters,
        more={"dtype": {"whole": torch.int64, "complex": torch.complex64}},
    ),
    "nn.AdapterMoE": Row(
        adapter_moe,
        lambda: {
            "x": draw(B, T, D),
            "shared": mlp(),
            "router": router(),
            "adapters": filled_adapters(),
        },
        true_adapter_moe,
        more={
            "router": {"fewer": router(experts=E - 1), "narrow": router(width=D - 1)},
            "adapters": {"fewer": filled_adapters(experts=E - 1)},
        },
        own={"x": "dtype"},
    ),
    "nn.lora_mixture.LoraMixture": Row(
        lora_mixture,
        lambda: {
            "x": draw(B, T, D),
            "base_layer": layer(),
            "router": router(experts=N),
            "down": draw(N, R, D),
            "up": draw(N, OUT, R),
            "scales": [0.5, 1.0, 2.0],
            "reads": "layer",
            "dropout": 0.1,
        },
        true_lora_mixture,
        more={
            "router": {"fewer": router(experts=N - 1), "narrow": router(width=D - 1)}
        },
        own={"x": "dtype"},
    ),
    "nn.balance": Row(
        nn.balance,
        lambda: {
            "routers": traced(),
            "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
            "form": "live",
        },
        true_balance,
        more={
            "routers": {"never ran": [router(trace=nn.Trace())], "no trace": [router()]}
        },
    ),
    "nn.observe": Row(
        watched, lambda: {"model": hosts.sparse(), "batch": hosts.seen()}, true_watched
    ),
    "nn.hooked": Row(
        lambda modules: nn.hooked(modules, print).__enter__(),
        lambda: {"modules": {"a": mlp()}},
        fine={"modules": EVERY},
    ),
}
