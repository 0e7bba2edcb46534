"""pi-tuning: the LoRAs of the k tasks most like the target stand beside the target's own.

A task's embedding is the diagonal Fisher information of its own LoRA on its own rows. Similarity is
the mean over tensors of ``cos(F_a / (F_a + F_b), F_b / (F_a + F_b))``. Then
``y = W x + sum_i softmax(v)_i s_i B_i A_i x`` over target and neighbours, v = 1 at the start. Wu et
al. (2023), pi-Tuning: Transferring Multimodal Foundation Models with Optimal Multi-task
Interpolation, arXiv 2304.14381; code: TencentARC/pi-Tuning. Not verified in the paper's text: that
its Fisher is the experts', as in its code, and not the backbone's; which k it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from moebook.data import IGNORED, padded
from moebook.errors import refuse
from moebook.kernels.dispatch import FLOATS
from moebook.methods.rivals import mixing, tuning
from moebook.methods.rivals.tuning import Data, Rows, Tuned
from moebook.methods.rocket.bank import Bank, check
from moebook.methods.rocket.loras import Lora, attached
from moebook.nn import evaluating
from moebook.nn.batch import longest, vocabulary
from moebook.settings import Count, Positive, Presets, checked, settings
from moebook.training.batches import Batches
from moebook.training.checkpoints import own_folder

__all__ = [
    "Config",
    "fisher",
    "fishers",
    "tuned",
]

Fisher = Mapping[str, Tensor]  # of A and B, by "<path>.A" and "<path>.B"


def _squares(tensor: Tensor) -> Tensor:
    """Refuse what no mean of squares can be."""
    if (
        tensor.dtype not in FLOATS
        or not (tensor >= 0).all()
        or not tensor.isfinite().all()
    ):
        raise PydanticCustomError("squares", "expected finite numbers from 0 upwards")
    return tensor


Fishers = Annotated[
    Mapping[str, Annotated[Tensor, AfterValidator(_squares)]], Field(min_length=1)
]
Form = Literal["row", "batch"]
Eps = Annotated[float, Field(ge=0)]
BATCH = 4  # rows, as released


@settings
class Config(Presets):
    """How tasks are compared, and what is trained. The defaults are the preset ``bank``.

    ``paper`` and ``bank`` are the definition, since the method starts from others' LoRAs
    anyway; ``released`` measures similarity as the authors' code does.

    Attributes:
        fisher: The gradient of each ``"row"`` is squared (paper), or that of a ``"batch"`` of four
            rows (released), which loses what rows disagree on.
        eps: Added to ``F_a + F_b``. The released 1e-6 swamps a language model's entries (1e-9),
            and the measure becomes a plain cosine.
        neighbours: The number k. Shipped scripts hold 2 or 3 LoRAs, the target's included;
            Rocket says no k.
        trains: The softmax weights alone, or the k + 1 LoRAs too (released).
        shared: One v for each attention block (released), for each linear layer, or for all.
        rate: Learning rate of v; None for that of the LoRAs.
    """

    fisher: Form = "row"
    eps: Eps = 0.0
    neighbours: Count = 2
    trains: Literal["weights", "weights + LoRAs"] = "weights + LoRAs"
    shared: Literal["block", "layer", "all"] = "block"
    rate: Positive | None = None

    PRESETS: ClassVar = {
        "paper": {},
        "released": {"fisher": "batch", "eps": 1e-6},
        "bank": {},
    }


class Interpolation(nn.Module):
    """``softmax(v)``, v = 1 at the start; layers of one block hold the same module."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.ones(experts))  # [k + 1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the weights ``[k + 1]``, whatever x is."""
        return self.v.softmax(0)


@checked
def fisher(
    model: nn.Module, lora: Lora, rows: Rows, *, form: Form = "row"
) -> dict[str, Tensor]:
    """Estimate the Fisher information's diagonal at a LoRA's own A and B, on rows with answers.

    ``F = E (d log p(y | x) / d theta)^2``; see `Config` for ``form``. Dropout is off (released: on)
    and labels are not smoothed (released: by 0.1). Returns float64, nats squared, in
    the shapes of the factors by their names: ``A [R, in]``, ``B [out, R]``.
    """
    if lora.idle:
        why = "has B = 0, where the gradient of A is 0"
        refuse("E-BANK", f"'{lora.name}' {why}: take its Fisher after training")
    Batches(rows, BATCH, seed=0, pad_id=0).check(vocabulary(model), longest(model))
    factors: dict[str, Tensor] = {
        f"{path}.A": factor for path, factor in lora.down.items()
    }
    factors |= {f"{path}.B": factor for path, factor in lora.up.items()}
    device = next(model.parameters()).device
    by_row = form == "row"

    def nats(at: Fisher, ids: Tensor, labels: Tensor) -> Tensor:
        """Return -log p(y | x) at these factors; ids and labels are [B, T]."""
        down = {path: at[f"{path}.A"] for path in lora.down}
        up = {path: at[f"{path}.B"] for path in lora.down}
        with attached(model, [replace(lora, down=down, up=up)]):
            logits = model(input_ids=ids, use_cache=False).logits
        # The logits of a place are of the next token.
        foretelling = logits[:, :-1].flatten(0, 1).float()
        answers = labels[:, 1:].flatten()
        # log p(y | x) of a row is the sum over its labels; a batch's loss is a mean.
        reduction = "sum" if by_row else "mean"
        return F.cross_entropy(foretelling, answers, reduction=reduction)

    # By row: a gradient for each, at the same factors: [B, R, D] and [B, O, R].
    gradient = vmap(grad(nats), (None, 0, 0)) if by_row else grad(nats)
    total = {
        name: torch.zeros_like(factor, dtype=torch.double)
        for name, factor in factors.items()
    }
    # `vmap` cannot branch on a mask's values and knows no fused attention. Rows need no
    # mask: padding is on the right, where real tokens of a causal model do not look.
    with evaluating(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        columns = rows.select_columns(["input_ids", "labels"]).with_format(None)
        for batch in columns.iter(BATCH):
            ids = padded(batch["input_ids"], 0)[0].to(device)
            labels = padded(batch["labels"], IGNORED)[0].to(device)
            if by_row:  # [B, 1, T]: each row is a batch of its own
                ids = ids.unsqueeze(1)
                labels = labels.unsqueeze(1)
            for name, value in gradient(factors, ids, labels).items():
                squared = value.double().square()  # (d log p / d theta)^2
                total[name] += squared.sum(0) if by_row else squared
    # A mean over rows, or over batches; the last batch may be short.
    counted = len(rows) if by_row else -(-len(rows) // BATCH)
    if not all(t.isfinite().all() for t in total.values()):
        refuse(
            "E-NONFINITE",
            f"the Fisher of '{lora.name}' holds NaN or infinity: check its rows",
        )
    return {name: t / counted for name, t in total.items()}


def fishers(
    model: nn.Module, bank: Bank, data: Data, config: Config
) -> dict[str, dict[str, Tensor]]:
    """Embed every LoRA of the bank by its Fisher on its own rows: once for all targets.

    Returns `fisher` of each by name: ``A [R, in]`` and ``B [out, R]`` a module.
    """
    # All sets first: one that lacks is refused before any pass.
    sets = {name: data.source(name) for name in bank}
    by_lora: dict[str, dict[str, Tensor]] = {}
    for name, rows in sets.items():
        by_lora[name] = fisher(model, bank[name], rows, form=config.fisher)
    return by_lora


@checked
def similarity(one: Fishers, other: Fishers, *, eps: Eps = 0.0) -> float:
    """Compare two tasks, in [0, 1]; where both entries are 0, so are their shares."""
    odd = sorted(one.keys() ^ other.keys())
    if odd:
        refuse("E-KEYS", f"similarity: one task has '{odd[0]}', the other has not")
    for name in one:
        if one[name].shape != other[name].shape:
            both = f"{tuple(one[name].shape)} and {tuple(other[name].shape)}"
            refuse("E-SHAPE", f"similarity: '{name}' is {both}, expected the same")
    cosines = []
    for name in one:
        pair = torch.stack([one[name].flatten(), other[name].flatten()]).double()
        total = pair.sum(0) + eps
        # F_a / (F_a + F_b + eps) and F_b / (F_a + F_b + eps), entry by entry.
        left, right = torch.where(total > 0, pair / total, 0.0)
        cosines.append(F.cosine_similarity(left, right, dim=0))
    return float(torch.stack(cosines).mean())


def tuned(
    model: nn.Module,
    bank: Bank,
    data: Data,
    config: Config,
    *,
    seed: int = 0,
    embeddings: Mapping[str, Fisher] | None = None,
    **recipe: Any,
) -> Tuned:
    """Train a LoRA on the target, find its neighbours, and train them side by side: one LoRA again.

    Its rank is ``(k + 1) R``. The recipe is of both trainings, whose checkpoints go to the folders
    ``target`` and ``mixture`` in its ``output``. ``embeddings`` are `fishers` of the bank; those
    that lack are made here, at their makers' cost.
    """
    output = recipe.pop("output", None)
    places = {name: own_folder(output, name) for name in ("target", "mixture")}
    check(bank)
    mixing.check_choice(config.neighbours, bank)
    known = dict(embeddings or {})
    new = {name: lora for name, lora in bank.items() if name not in known}
    known |= fishers(model, new, data, config)

    # The target's own LoRA; its Fisher on the shots is the target's embedding.
    first = next(iter(bank.values()))
    start = mixing.fresh_like({"target": first}, seed=seed)
    alone = tuning.alone(model, start["target"], learnt=True)
    alone = tuning.fit(alone, data, seed=seed, output=places["target"], **recipe)
    target = alone.lora("target")
    # `fisher` attaches the LoRA by itself, to a bare base.
    alone.detach()
    own = fisher(model, target, data.shots, form=config.fisher)
    tokens = sum(map(len, data.shots["input_ids"]))
    spent = replace(
        alone.cost,
        forward=alone.cost.forward + tokens,
        backward=alone.cost.backward + tokens,
    )

    # Its k nearest neighbours stand beside it, with one v a layer, a block or in all.
    like = {name: similarity(own, known[name], eps=config.eps) for name in bank}
    # Of tasks that are equally alike, the first in the bank.
    nearest = sorted(like, key=lambda name: -like[name])[: config.neighbours]
    experts = {"target": target} | {name: bank[name] for name in nearest}
    sharing: dict[str, Interpolation] = {}

    def weigh(path: str, _: nn.Module) -> Interpolation:
        # Projections of one attention block have the same parent, so one v.
        places = {"layer": path, "block": path.rpartition(".")[0], "all": ""}
        weights = Interpolation(len(experts))
        return sharing.setdefault(places[config.shared], weights)

    learnt = config.trains == "weights + LoRAs"
    done = tuning.attach(model, experts, weigh, mix="outputs", learnt=learnt)
    recipe |= {"output": places["mixture"], "rate": config.rate}
    return tuning.fit(done, data, seed=seed, spent=spent, **recipe)
