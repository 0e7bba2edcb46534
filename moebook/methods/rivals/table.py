"""Table 1 on one bank: each row an arm, and all arms tuned by one call (Rocket, Sec. 4.3).

Beside the paper's rows stand those that it leaves open: each rival on Rocket's own experts
(``_chosen``), which tells routing from selection; mixing weights at the rate that Rocket gave to
all parameters (``_slow``); what trains nothing as its own paper has it (``_untuned``). No row has
dropout, where Rocket and MixLoRA have 0.05 and most rivals none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from moebook.kernels.dispatch import natural
from moebook.methods.rivals import (
    arrow,
    lorahub,
    mixlora,
    pems,
    phatgoose,
    pi_tuning,
    poly,
    rocket,
    smear,
    vanilla,
)
from moebook.methods.rivals.phatgoose import Learnt
from moebook.methods.rivals.pi_tuning import Fisher
from moebook.methods.rivals.tuning import Data, Tuned
from moebook.methods.rocket.bank import Bank
from moebook.settings import Count, Positive, checked, settings

MODULES: dict[str, ModuleType] = {
    "mixlora": mixlora,
    "lorahub": lorahub,
    "smear": smear,
    "pems": pems,
    "poly": poly,
    "pi_tuning": pi_tuning,
    "arrow": arrow,
    "phatgoose": phatgoose,
    "vanilla": vanilla,
    "rocket": rocket,
}
RIVALS = tuple(MODULES)[:8]
SLOW = 5e-5  # Rocket's learning rate (Table 12), which all rivals but LoRAHub had


@settings
class Arm:
    """A row of the table.

    Attributes:
        rival: What `MODULES` names.
        rated: The arm on whose learning rate the rows are trained; "" where none are.
        preset, changes: The rival's settings.
        bank: Mix all LoRAs, or only the experts that Rocket chose; the target's own LoRA stands
            beside them for Expert LoRA alone.
        data: The rows that it sees.
    """

    rival: str
    rated: str
    preset: str = "bank"
    changes: Mapping[str, int | float] = field(default_factory=dict)
    bank: Literal["whole", "chosen", "with_target"] = "whole"
    data: Literal["D_K", "D_K + D_A"] = "D_K + D_A"


@checked
def arms(
    size: Count, *, rate: Positive, searches: Count, experts: Count, top_k: Count
) -> dict[str, Arm]:
    """Return all arms by name, for a bank of ``size`` LoRAs of which Rocket chooses ``experts``.

    ``rate`` is the learning rate of mixing weights, ``searches`` are LoRAHub's evaluations, and
    ``top_k`` is Rocket's LoRAs a token.
    """
    natural("arms", "top_k", top_k, experts, "experts")
    weighted = ("smear", "poly", "pi_tuning")  # mixing weights have a rate of their own
    changes: dict[str, dict[str, Any]] = {name: {"rate": rate} for name in weighted}
    changes["arrow"] = {"top_k": min(4, size)}  # all of a smaller bank
    changes["lorahub"] = {"budget": searches}
    changes["mixlora"] = {"dropout": 0.0}

    # Single LoRAs, as they are or tuned. Expert LoRA is the target's own, which was
    # trained on D_T before: here it is put on as it is.
    best = Arm(rival="vanilla", rated="", preset="source_best")
    table = {
        "source_best": best,
        "best_by_shots": replace(best, preset="best_by_shots"),
        "expert_lora": replace(best, bank="with_target"),
    }
    for name in ("random", "source_best_sft"):
        table[name] = Arm(rival="vanilla", rated=name, preset=name)

    # The rivals on the whole bank, and Rocket on the experts that it chose.
    for name in RIVALS:
        # LoRAHub searches without gradients, so it has no learning rate.
        rated = "" if name == "lorahub" else name
        table[name] = Arm(rival=name, rated=rated, changes=changes.get(name, {}))
    table["rocket"] = Arm(
        rival="rocket",
        rated="rocket",
        preset="fixed",
        bank="chosen",
        changes={"experts": experts, "top_k": top_k, "lora_dropout": 0.0},
    )

    # Variants: on shots alone, at Rocket's rate, on Rocket's experts, without training.
    for name in ("random", "mixlora", "lorahub"):
        table[f"{name}_shots"] = replace(table[name], data="D_K")
    for name in weighted:
        table[f"{name}_slow"] = replace(table[name], changes={"rate": SLOW})
    few = changes | {"arrow": {"top_k": min(4, experts)}}
    for name in RIVALS[1:]:  # MixLoRA has no use for a bank
        own = few.get(name, {})
        table[f"{name}_chosen"] = replace(table[name], bank="chosen", changes=own)
    for name in ("pems", "arrow"):
        table[f"{name}_untuned"] = replace(table[name], rated="", preset="paper")
    return table


@dataclass(frozen=True)
class Shipped:
    """What the makers of a bank would have to ship with their LoRAs, by name."""

    fishers: Mapping[str, Fisher] = field(default_factory=dict)  # for pi-tuning
    # By learning rate.
    gates: Mapping[float, Mapping[str, Learnt]] = field(default_factory=dict)


def tuned(
    model: nn.Module,
    arm: Arm,
    bank: Bank,
    data: Data,
    shipped: Shipped,
    *,
    lr: float,
    named: str = "",
    **recipe: Any,
) -> Tuned:
    """Put an arm on the base, in place; ``named`` is the LoRA of a Source Best or Expert LoRA.

    What was not shipped is made here, gates at ``lr``, on the rows that the LoRAs were trained on.
    """
    module = MODULES[arm.rival]
    extra = {"named": named} if named else {}
    config = module.Config.preset(arm.preset, **{**arm.changes, **extra})
    if arm.rival == "phatgoose":
        recipe["learnt"] = shipped.gates.get(lr, {})
        if not bank.keys() <= recipe["learnt"].keys():
            config = replace(config, lr=lr)  # the others' gates are learnt here
    if arm.rival == "pi_tuning":
        fishers = {
            name: shipped.fishers[name] for name in bank if name in shipped.fishers
        }
        recipe["embeddings"] = fishers
    seen = replace(data, chosen=None) if arm.data == "D_K" else data
    result: Tuned = module.tuned(model, bank, seen, config, lr=lr, **recipe)
    return result


def weights(done: Tuned, batch: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean weight of each LoRA over layers and tokens; none where no bank is mixed."""
    if not all(hasattr(part, "weigh") for part in done.parts.values()):
        return {}
    # [N] a layer, of weights [N], [B, 1, N] or [B, T, N].
    by_layer = [
        each.reshape(-1, each.shape[-1]).mean(0)
        for each in done.weights(batch).values()
    ]
    mean = torch.stack([each.cpu() for each in by_layer]).mean(0)
    return dict(zip(done.origin.names, mean.tolist(), strict=True))
