"""Calls of the ops that are right, and plain loops in float64 that they must agree with."""

from itertools import combinations
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from moebook import kernels
from moebook.kernels import Bank, Routing
from moebook.kernels.bank_scoring import Answers, bank_scoring, token_nats
from moebook.kernels.groups import groups
from moebook.kernels.lora_mixture import lora_mixture
from moebook.kernels.similarity import duplicates, nearest_rows
from tests.faults.hostile import Row

T = 5
D = 6
E = 3
FF = 4
K = 2
R = 2
N = 3
OUT = 7
V = 9


def draw(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + len(shape))
    )


def routing():
    return kernels.route(draw(T, E), K)


def double(*tensors):
    return [tensor.double() for tensor in tensors]


def slots(ids, weights):
    """Token, expert and gate of each slot."""
    for token, (experts, gates) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, gate in zip(experts, gates, strict=True):
            if expert < 0:
                raise IndexError(expert)
            yield token, expert, gate


def routed(x, routing, of_expert):
    """Sum the gated outputs of each token's experts."""
    if len(routing.ids) != len(x) or routing.ids.shape != routing.weights.shape:
        raise ValueError("another number of tokens")
    hit = [routing.ids.flatten().tolist().count(e) for e in range(len(routing.counts))]
    if hit != routing.counts.tolist() or sum(hit) != routing.ids.numel():
        raise ValueError("counts are of another routing")
    if sorted(routing.order.tolist()) != list(range(routing.ids.numel())):
        raise ValueError("order does not hold each slot once")
    sorted_ids = routing.ids.flatten()[routing.order].tolist()
    if sorted_ids != sorted(sorted_ids):
        raise ValueError("order is of another routing")
    y = torch.zeros_like(x)
    for token, expert, gate in slots(routing.ids, routing.weights.double()):
        y[token] += gate * of_expert(expert, x[token])
    return y


def gated(gate_up, down, act):
    if len(gate_up) != len(down) or gate_up.shape[1] != 2 * down.shape[2]:
        raise ValueError("a bank of two sizes")

    def run(expert, x):
        gate, up = (gate_up[expert] @ x).chunk(2)
        active = act(gate)
        if active.shape != gate.shape:
            raise ValueError("act gives another shape")
        return down[expert] @ (active * up)

    return run


def true_route(logits, top_k, combine="renormalised", impl="auto"):
    if logits.dim() != 2 or top_k != int(top_k) or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(top_k)
    wide = logits.double()
    order = wide.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    if combine == "renormalised":
        weights = wide.gather(1, order).softmax(-1)
    elif combine == "probability":
        weights = wide.softmax(-1).gather(1, order)
    else:
        raise ValueError(combine)
    return true_grouped(order, weights, logits.shape[1])


def true_grouped(ids, weights, experts):
    if ids.shape != weights.shape or ids.dim() != 2 or not ids.shape[1] or experts < 1:
        raise ValueError("shapes")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < experts:
        raise IndexError("ids")
    flat = ids.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda slot: flat[slot])
    counts = [flat.count(expert) for expert in range(experts)]
    return (
        ids,
        weights.double(),
        torch.tensor(order, dtype=torch.long),
        torch.tensor(counts),
    )


def true_experts(x, routing, bank, act, impl="auto"):
    return routed(x.double(), routing, gated(*double(*bank), act))


def true_split(x, routing, frozen, trained, slots, act, impl="auto"):
    if len(slots) != len(frozen.down) or slots.dtype == torch.bool:
        raise ValueError("slots")
    if sorted(s for s in slots.tolist() if s != -1) != sorted({*slots.tolist()} - {-1}):
        raise ValueError("a place twice")
    if not {*slots.tolist()} <= {-1, *range(len(trained.down))}:
        raise ValueError("no place")
    if trained.gate_up.shape[1:] != frozen.gate_up.shape[1:]:
        raise ValueError("shapes")
    of_frozen = gated(*double(*frozen), act)
    of_trained = gated(*double(*trained), act)

    def of_expert(expert, token):
        place = int(slots[expert])
        return of_frozen(expert, token) if place < 0 else of_trained(place, token)

    return routed(x.double(), routing, of_expert)


def true_adapters(h, routing, down, up, scale=1.0, source=None, impl="auto"):
    read = h if source is None else source
    if read.shape != h.shape or read.dtype != h.dtype or len(down) != len(up):
        raise ValueError("shapes")
    if down.shape[2] != up.shape[1] or down.dim() != 3:
        raise ValueError("factors")
    down, up = double(down, up)
    added = routed(read.double(), routing, lambda e, x: F.gelu(x @ down[e]) @ up[e])
    return h.double() + float(scale) * added


def true_lora_mixture(x, base, gates, down, up, scale=1.0, impl="auto"):
    if x.shape[:-1] != base.shape[:-1] or gates.shape[:-1] != x.shape[:-1]:
        raise ValueError("tokens")
    if not gates.shape[-1] == len(down) == len(up) or down.dim() != 3 or not up.numel():
        raise ValueError("experts")
    x, base, gates, down, up = double(x, base, gates, down, up)
    total = base.clone()
    for n in range(len(down)):
        total = total + float(scale) * gates[..., n : n + 1] * (x @ down[n].T @ up[n].T)
    return total


def true_balance(logits, ids, mask=None, form="live", impl="auto"):
    tokens, experts = logits.shape
    mask = torch.ones(tokens) if mask is None else mask
    if (
        len(ids) != tokens
        or mask.shape != (tokens,)
        or not ids.shape[1]
        or form != "live"
    ):
        raise ValueError("shapes")
    share = logits.double().softmax(-1)
    mask = mask.double()
    load = torch.zeros(experts).double()
    for token, expert, _ in slots(ids, torch.ones(ids.shape)):
        load[expert] += mask[token]
    real = mask.sum().clamp(min=1)
    return experts * ((load / (real * ids.shape[1])) * (mask @ share / real)).sum()


def true_scoring(hidden, head, answers, impl="auto"):
    readers, targets, lengths = answers
    if hidden.dtype != head.dtype or len(readers) != len(targets) != 0:
        raise ValueError("answers")
    if int(lengths.sum()) != len(readers) or (lengths < 0).any() or hidden.dim() != 3:
        raise ValueError("lengths")
    if targets.numel() and (targets.min() < 0 or readers.min() < 0):
        raise IndexError("places")
    logs = (hidden.double() @ head.double().T).log_softmax(-1)
    nats = -logs[:, readers, targets]
    parts = [part.sum(1) for part in nats.split(lengths.tolist(), dim=1)]
    return torch.stack(parts, 1) if parts else nats.new_zeros(len(hidden), 0)


def cosines(left, right):
    unit = [
        part / part.norm(dim=1, keepdim=True).clamp(min=1e-300)
        for part in double(left, right)
    ]
    if not all(part.isfinite().all() for part in unit):
        raise ValueError("no cosines")
    return unit[0] @ unit[1].T


def true_nearest(pool, shots, count, impl="auto"):
    if pool.dtype != shots.dtype or count != int(count) or count < 1 or not len(shots):
        raise ValueError("count")
    near = cosines(pool, shots).amax(1)
    if near.isnan().any():
        raise ValueError("NaN")
    order = near.sort(descending=True, stable=True).indices[:count]
    return order, near[order], pool[order], len(pool)


def true_duplicates(vectors, key, threshold, rule="standing", impl="auto"):
    if key.shape != vectors.shape[:1] or not -1 <= threshold <= 1 or rule != "standing":
        raise ValueError("key")
    if not key.isfinite().all():
        raise ValueError("key")
    near = cosines(vectors, vectors)
    alive = [True] * len(vectors)
    for i, j in combinations(range(len(vectors)), 2):
        if alive[i] and alive[j] and near[i, j] > threshold:
            alive[j if key[i] > key[j] else i] = False
    return torch.tensor([i for i, stays in enumerate(alive) if stays], dtype=torch.long)


def true_groups(similarity, worth, size, best=1000, diversity="ordered"):
    if (
        similarity.shape != (len(worth), len(worth))
        or size != int(size)
        or best != int(best)
    ):
        raise ValueError("shapes")
    if not 1 <= size <= len(worth) or best < 1 or diversity != "ordered":
        raise ValueError("size")
    if not (similarity.isfinite().all() and worth.isfinite().all()):
        raise ValueError("NaN")
    every = list(combinations(range(len(worth)), size))
    alike = []
    for group in every:
        pairs = combinations(group, 2)
        alike.append(sum(float(similarity[pair]) for pair in pairs))
    rank = []
    total = []
    for group, mine in zip(every, alike, strict=True):
        rank.append(1 + sum(other < mine - 1e-12 for other in alike))
        total.append(rank[-1] + sum(float(worth[i]) for i in group))
    order = sorted(range(len(every)), key=lambda n: total[n])[:best]
    columns = map(torch.tensor, (every, rank, total))
    return tuple(column[order] for column in columns)


def true_token_nats(logits, targets):
    if logits.shape[:-1] != targets.shape:
        raise ValueError("shapes")
    logs = logits.double().log_softmax(-1).flatten(0, -2)
    flat = [
        0.0 if t < 0 else -float(logs[n, t])
        for n, t in enumerate(targets.flatten().tolist())
    ]
    return torch.tensor(flat).view(targets.shape)


def bank(seed=3):
    return Bank(draw(E, 2 * FF, D, seed=seed), draw(E, D, FF, seed=seed + 1))


def wrong_acts():
    """What is no elementwise activation."""
    return {
        "another shape": lambda x: x[..., :1],
        "one number": lambda x: x.sum(),
        "another dtype": lambda x: x.double(),
        "in place": lambda x: x.mul_(2),
        "no tensor": lambda x: 1.0,
        "rows": lambda x: x[:1],
    }


SCALES = {"several": torch.ones(2), "tensor": torch.tensor(0.5)}
IMPL = {"impl": {"none": "cuda"}}
ROWS = {
    "kernels.route": Row(
        kernels.route,
        lambda: {
            "logits": draw(T, E),
            "top_k": K,
            "combine": "probability",
            "impl": "torch",
        },
        true_route,
    ),
    "kernels.grouped": Row(
        kernels.grouped,
        lambda: {"ids": routing().ids, "weights": routing().weights, "experts": E},
        true_grouped,
    ),
    "kernels.Routing": Row(
        lambda **parts: kernels.experts(draw(T, D), Routing(**parts), bank(), F.silu),
        lambda: routing()._asdict(),
        lambda **parts: true_experts(
            draw(T, D), SimpleNamespace(**parts), bank(), F.silu
        ),
        more={
            "order": {"another": torch.arange(T * K), "less one": routing().order - 1},
            "counts": {"another": routing().counts.flip(0)},
            "ids": {"another": routing().ids.flip(0)},
        },
    ),
    "kernels.experts": Row(
        kernels.experts,
        lambda: {
            "x": draw(T, D),
            "routing": routing(),
            "bank": bank(),
            "act": F.silu,
            "impl": "torch",
        },
        true_experts,
        more={"act": wrong_acts()},
    ),
    "kernels.split_experts": Row(
        kernels.split_experts,
        lambda: {
            "x": draw(T, D),
            "routing": routing(),
            "frozen": bank(),
            "trained": Bank(*(part[:2] for part in bank(7))),
            "slots": torch.tensor([1, -1, 0]),
            "act": F.silu,
            "impl": "torch",
        },
        true_split,
        more={"act": wrong_acts()},
    ),
    "kernels.adapters": Row(
        kernels.adapters,
        lambda: {
            "h": draw(T, D),
            "routing": routing(),
            "down": draw(E, D, R),
            "up": draw(E, R, D),
            "scale": 0.7,
            "source": draw(T, D, seed=5),
            "impl": "torch",
        },
        true_adapters,
        more={"scale": SCALES},
    ),
    "kernels.lora_mixture.lora_mixture": Row(
        lora_mixture,
        lambda: {
            "x": draw(T, D),
            "base": draw(T, OUT),
            "gates": draw(T, N),
            "down": draw(N, R, D),
            "up": draw(N, OUT, R),
            "scale": 0.7,
            "impl": "torch",
        },
        true_lora_mixture,
        more={"scale": SCALES},
    ),
    "kernels.balance_loss": Row(
        kernels.balance_loss,
        lambda: {
            "logits": draw(T, E),
            "ids": routing().ids,
            "mask": torch.tensor([1.0, 1, 0, 1, 1]),
            "form": "live",
            "impl": "torch",
        },
        true_balance,
    ),
    "kernels.bank_scoring.bank_scoring": Row(
        bank_scoring,
        lambda: {
            "hidden": draw(N, T, D),
            "head": draw(V, D),
            "answers": Answers(
                torch.tensor([0, 1, 3]), torch.tensor([4, 0, 8]), torch.tensor([2, 1])
            ),
            "impl": "torch",
        },
        true_scoring,
    ),
    "kernels.bank_scoring.token_nats": Row(
        token_nats,
        lambda: {"logits": draw(T, V), "targets": torch.tensor([1, -100, 0, 8, 2])},
        true_token_nats,
    ),
    "kernels.similarity.nearest_rows": Row(
        nearest_rows,
        lambda: {
            "pool": draw(8, D),
            "shots": draw(3, D, seed=1),
            "count": 4,
            "impl": "torch",
        },
        true_nearest,
    ),
    "kernels.similarity.duplicates": Row(
        duplicates,
        lambda: {
            "vectors": draw(6, 3),
            "key": draw(6),
            "threshold": 0.5,
            "rule": "standing",
            "impl": "torch",
        },
        true_duplicates,
    ),
    "kernels.groups.groups": Row(
        groups,
        lambda: {
            "similarity": draw(5, 5),
            "worth": torch.arange(5.0),
            "size": 2,
            "best": 4,
            "diversity": "ordered",
        },
        true_groups,
    ),
}
