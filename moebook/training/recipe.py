"""What decides a training beside model and rows: its settings, its optimizer, its rates."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from moebook.errors import extra, refuse
from moebook.nn import ChosenRows
from moebook.settings import Count, Positive, Share, settings

# Ours to transformers' names of schedules; the others are called alike.
SCHEDULES = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}
# Patterns of parameters that do not decay.
UNDECAYED = [
    "bias",
    "layernorm",
    "rmsnorm",
    r"(?:^|\.)norm(?:$|\.)",
    r"_norm(?:$|\.)",
]


@settings
class Recipe:
    """What decides a training, beside model and rows.

    After the warm-up the rate is constant, or goes down to 0 in a line, in a cosine, or
    in a line over the last fifth of all steps (``"wsd"``). The paged optimizers are
    bitsandbytes' AdamW, in main memory when the GPU is full.
    """

    #: Steps of the optimizer; else one epoch.
    steps: Annotated[int, Field(ge=1, le=10**8)] | None = None
    #: Or epochs, rounded up to whole steps.
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    batch: Count = 32  #: B, rows a step, of all processes together
    #: AdamW's learning rate, the highest of the schedule.
    lr: Annotated[float, Field(gt=0, le=100)] = 2e-4
    #: How the rate changes after the warm-up.
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup: Share = 0.03  #: of the steps, over which the rate rises linearly from 0
    #: Decay of all but biases and normalisations.
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    #: AdamW's averages of the gradient and of its square.
    betas: tuple[Share, Share] = (0.9, 0.999)
    #: The gradient's norm at most.
    clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    #: Decides the order of rows, dropout and noise.
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    #: Parts of a step that each process computes in turn, to save memory.
    accumulate: Count = 1
    #: AdamW, or one of its paged forms.
    optimizer: Literal["adamw", "paged_32bit", "paged_8bit"] = "adamw"
    #: Computes under torch's autocast, whatever the parameters are in.
    bf16: bool = False
    #: Rates by a name on a parameter's path; none of these parameters decays.
    rates: dict[str, Positive] | None = None

    def __post_init__(self) -> None:
        if self.steps and self.epochs:
            both = f"steps = {self.steps}, epochs = {self.epochs}"
            refuse("E-USAGE", f"{both}: give one of them")

    def total(self, batches_per_epoch: int) -> int:
        """Return the number of steps in all."""
        return self.steps or math.ceil((self.epochs or 1) * batches_per_epoch)


def check_warmup(recipe: Recipe, total: int) -> None:
    """Refuse a training whose only step is that of the warm-up, at rate 0."""
    if total == 1 and recipe.warmup > 0:
        why = "the only step is that of the warm-up, at rate 0, so nothing is trained"
        fix = "take 2 or more, a batch of fewer rows, or warmup = 0"
        refuse("E-RANGE", f"steps = 1: {why}; {fix}")


def check_decay(model: nn.Module, recipe: Recipe) -> None:
    """Refuse weight decay where a part of a parameter is to stay as it is."""
    if not recipe.weight_decay:
        return
    for name, part in model.named_modules():
        if isinstance(part, ChosenRows):
            refuse(
                "E-CHOICE",
                f"weight_decay is {recipe.weight_decay}, but only some rows of {name} are "
                "to train, and decay would shrink the others too: set weight_decay=0",
            )


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """Make AdamW over what requires a gradient; biases and normalisations do not decay."""
    groups = _groups(model, recipe)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=recipe.betas, fused=True)
    return _paged(model, groups, recipe)


def _groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Sort what trains by the rate and the decay that it gets."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        refuse("E-MODEL", "no parameter requires a gradient; nothing would be trained")
    decayed = set(get_parameter_names(model, [nn.LayerNorm], UNDECAYED))
    rates = recipe.rates or {}
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in trained:
        path = name.split(".")
        # A whole name on the path, no piece of one.
        own = next((part for part in rates if part in path), None)
        decay = recipe.weight_decay if own is None and name in decayed else 0.0
        rate = recipe.lr if own is None else rates[own]
        group = groups.setdefault(
            (own, decay), {"params": [], "weight_decay": decay, "lr": rate}
        )
        group["params"].append(parameter)
    used = {own for own, _ in groups}
    unused = rates.keys() - used
    if unused:
        why = "but no such parameter is trained"
        refuse("E-NAME", f"rates names '{min(unused)}', {why}")
    return [*groups.values()]


def _paged(model: nn.Module, groups: list[dict[str, Any]], recipe: Recipe) -> Optimizer:
    """Make bitsandbytes' AdamW, whose moments move to main memory when the GPU is full."""
    if not groups[0]["params"][0].is_cuda:
        refuse(
            "E-DEVICE",
            f"optimizer {recipe.optimizer} needs a GPU, the model is on none",
        )
    with extra("quantised", f"optimizer {recipe.optimizer}"):
        from bitsandbytes import optim
    manager = optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        # For embeddings 8 bits are too few, say the authors of bitsandbytes.
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    bits = 8 if recipe.optimizer == "paged_8bit" else 32
    return optim.AdamW(groups, betas=recipe.betas, is_paged=True, optim_bits=bits)


def make_schedule(optimizer: Optimizer, recipe: Recipe, total: int) -> LambdaLR:
    """Make the learning rate of each of ``total`` steps: a warm-up, then the schedule."""
    name = SCHEDULES.get(recipe.schedule, recipe.schedule)
    last_fifth = {"num_decay_steps": math.ceil(total / 5), "decay_type": "linear"}
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=math.ceil(recipe.warmup * total),
        num_training_steps=total,
        scheduler_specific_kwargs=last_fifth if recipe.schedule == "wsd" else None,
    )
