"""How every op is called: the shapes of its tensors by letters, and the call itself."""

import torch
from torch.nn import functional as F

from moebook import kernels
from moebook.kernels import Bank, Routing
from moebook.kernels.bank_scoring import Answers, bank_scoring
from moebook.kernels.groups import groups
from moebook.kernels.lora_mixture import lora_mixture
from moebook.kernels.similarity import duplicates, nearest_rows

BANK = {"x": "T D", "logits": "T E", "gate_up": "E 2F D", "down": "E D F"}
SHAPES = {
    "route": {"logits": "T E"},
    "experts": BANK,
    "split_experts": {**BANK, "trained_gate_up": "N 2F D", "trained_down": "N D F"},
    "adapters": {
        "h": "T D",
        "source": "T D",
        "logits": "T E",
        "down": "E D R",
        "up": "E R D",
    },
    "lora_mixture": {
        "x": "T D",
        "base": "T O",
        "gates": "T N",
        "down": "N R D",
        "up": "N O R",
    },
    "balance_loss": {"logits": "T E"},
    "bank_scoring": {"hidden": "N T D", "head": "V D"},
    "nearest_rows": {"pool": "S D", "shots": "K D"},
    "duplicates": {"vectors": "S D"},
    "groups": {"similarity": "M M"},
}
"""Of all tensors that hold floating-point numbers and are no routing."""


def draw(op, sizes, dtype=torch.float32, device="cpu", seed=0):
    """Draw tensors by name, of a size that leaves products near 1, so that float16 holds them."""
    torch.manual_seed(seed)
    tensors = {}
    for name, dims in SHAPES[op].items():
        shape = [int(dim[:-1] or 1) * sizes[dim[-1]] for dim in dims.split()]
        size = max(shape[-1], 1) ** 0.5 if len(shape) == 3 else 1
        tensors[name] = (torch.randn(shape) / size).to(device, dtype)
    return tensors


def places(experts, chosen, device="cpu"):
    """The slots of a bank in which the chosen experts train."""
    slots = torch.full((experts,), -1, device=device)
    slots[torch.tensor(chosen, dtype=torch.long)] = torch.arange(
        len(chosen), device=device
    )
    return slots


def call(op, of, impl="auto", *, K=2, act=F.silu, scale=0.7, **settings):
    """Call an op with tensors by name, and a routing from them or made of their logits."""
    if op in ("experts", "split_experts", "adapters"):
        parts = [of.get(name) for name in Routing._fields]
        by = kernels.route(of["logits"], K) if parts[0] is None else Routing(*parts)
    match op:
        case "route":
            return kernels.route(of["logits"], K, impl=impl)
        case "grouped":
            return kernels.grouped(of["ids"], of["weights"], 3)
        case "experts":
            return kernels.experts(
                of["x"], by, Bank(of["gate_up"], of["down"]), act, impl=impl
            )
        case "split_experts":
            banks = (
                Bank(of["gate_up"], of["down"]),
                Bank(of["trained_gate_up"], of["trained_down"]),
            )
            return kernels.split_experts(
                of["x"], by, *banks, of["slots"], act, impl=impl
            )
        case "adapters":
            rest = {"scale": scale, "source": of.get("source"), "impl": impl}
            return kernels.adapters(of["h"], by, of["down"], of["up"], **rest)
        case "lora_mixture":
            return lora_mixture(*(of[name] for name in SHAPES[op]), scale, impl=impl)
        case "balance_loss":
            return kernels.balance_loss(
                of["logits"], of["ids"], mask=of.get("mask"), impl=impl
            )
        case "bank_scoring":
            answers = Answers(of["readers"], of["targets"], of["lengths"])
            return bank_scoring(of["hidden"], of["head"], answers, impl=impl)
        case "nearest_rows":
            return nearest_rows(
                of["pool"], of["shots"], settings.get("count", 3), impl=impl
            )
        case "duplicates":
            threshold = settings.pop("threshold", 0.9)
            return duplicates(
                of["vectors"], of["key"], threshold, **settings, impl=impl
            )
        case "groups":
            size = settings.pop("size", 2)
            return groups(of["similarity"], of["worth"], size, **settings)
