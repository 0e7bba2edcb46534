"""Where routers start: random weights, prompts' hidden states, embeddings; and their scale.

Those from clusters of representations, TRSU and CRSU, are in `centroids`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moebook.analysis.routers import logit_scale
from moebook.errors import refuse
from moebook.methods.settings import chosen, real, whole
from moebook.methods.upcycling.representations import Representations
from moebook.models.anatomy import anatomy
from moebook.models.fingerprint import fingerprint

KINDS = ("normal", "kaiming", "wide")
SCALES = ("raw", "unit", "matched")


@dataclass(frozen=True)
class Start:
    """First weights of the routers.

    Attributes:
        weights: ``[L, E, D]`` float32: the rows of a layer are its experts' embeddings (Eq. 1).
        layers: The L decoder layers that they belong to.
        base: Fingerprint of the model they were taken from; None when they fit any model.
    """

    weights: Tensor
    layers: tuple[int, ...]
    base: str | None = None


def random(model: nn.Module, experts: int, *, kind: str = "normal", seed: int = 0) -> Start:
    """Draw the routers at random: plain sparse upcycling (SU). The paper does not say from what.

    Args:
        model: Gives L and D.
        experts: E.
        kind: ``"normal"`` N(0, 0.02^2) (OLMoE, and transformers' own default); ``"kaiming"``
            uniform within 1/sqrt(D), what ``nn.Linear`` does; ``"wide"`` N(0, 1), what mergekit's
            ``random`` does: with a normed input of D = 4096 its logits have a standard deviation
            near 64, so a nearly one-hot router.
        seed: Of the draw, which is made on the CPU.
    """
    chosen("kind", kind, KINDS)
    whole("experts", experts, 1)
    host = anatomy(model)
    shape = (len(host.layers), experts, host.hidden)
    generator = torch.Generator().manual_seed(seed)
    if kind == "kaiming":
        bound = 1 / math.sqrt(host.hidden)
        weights = (2 * torch.rand(shape, generator=generator) - 1) * bound
    else:
        weights = torch.randn(shape, generator=generator) * (1.0 if kind == "wide" else 0.02)
    return Start(weights, tuple(range(shape[0])))


def hidden(positive: Representations, negative: Representations | None = None) -> Start:
    """Take each task's mean instance vector, of length 1, as mergekit's gate modes do.

    Its ``hidden`` is ``collect(..., tensor="block_input", tokens="last")``: the input of every
    decoder layer (embeddings for layer 0) at the prompt's last token. Its ``hidden_avg`` is
    ``tokens="mean"``, padding averaged in. Neither is TRSU's attention output.

    Args:
        positive: The tasks' prompts; expert e serves task e.
        negative: Of the same tasks in the same order: their means are subtracted first.

    Raises:
        Refusal: E-DATA when the two differ in tasks; E-BASE when they come from different models;
            E-NONFINITE for NaN or infinity.
    """
    weights = positive.means()
    if negative is not None:
        if negative.tasks != positive.tasks:
            refuse("E-DATA", f"tasks differ: {positive.tasks} and, negative, {negative.tasks}")
        same_base(positive, negative)
        weights = weights - negative.means()
    return Start(_unit(weights), positive.layers, positive.base)


@torch.no_grad()
def cheap_embed(model: nn.Module, tasks: Mapping[str, Iterable[Mapping[str, Tensor]]]) -> Start:
    """Take the sum of each task's token embeddings, of length 1, the same for every layer.

    What mergekit's ``cheap_embed`` does: no forward pass, so no context either.

    Args:
        model: Its input embeddings are read.
        tasks: For each task its batches of ``input_ids`` and, where padded, ``attention_mask``.

    Raises:
        Refusal: E-DATA for a task with no tokens.
    """
    table, rows = model.get_input_embeddings().weight, []
    for task, batches in tasks.items():
        total = torch.zeros(table.shape[1], dtype=torch.float32)
        for batch in batches:
            ids = batch["input_ids"]
            real_tokens = ids[batch.get("attention_mask", torch.ones_like(ids)).bool()]
            total += table[real_tokens.to(table.device)].float().sum(0).cpu()
        if not total.any():
            refuse("E-DATA", f"task '{task}' has no tokens: give it at least one prompt")
        rows.append(total)
    layers = len(anatomy(model).layers)
    weights = _unit(torch.stack(rows)).repeat(layers, 1, 1)
    return Start(weights, tuple(range(layers)), fingerprint(model))


def scaled(
    start: Start, scale: str, *, inputs: Representations | None = None, target: float = 1.0
) -> Start:
    """Give a start another length: it sets the temperature of the routers' first choices.

    Args:
        start: Any.
        scale: ``"raw"`` leaves it (what the paper's text says); ``"unit"`` makes every row of
            length 1 (mergekit); ``"matched"`` gives each layer one factor, so that its logits have
            the standard deviation ``target``, see `moebook.analysis.routers.logit_scale`.
        inputs: What the routers will read, for ``"matched"``: collected with
            ``tensor="ffn_input"``.
        target: Standard deviation of a token's logits over the experts, at least 1e-6.

    Raises:
        Refusal: E-CHOICE, E-RANGE; E-DATA when ``"matched"`` lacks its inputs or a layer's logits
            are all equal; E-BASE when inputs and start come from different models.
    """
    chosen("scale", scale, SCALES)
    if scale == "raw":
        return start
    if scale == "unit":
        return replace(start, weights=_unit(start.weights))
    real("target", target, "[1e-6, inf)")
    if inputs is None or inputs.tensor != "ffn_input" or inputs.layers != start.layers:
        refuse("E-DATA", "scale='matched' needs inputs: collect(..., tensor='ffn_input')")
    if start.base is not None:
        same_base(inputs, start)
    rows = []
    for layer, points, weight in zip(start.layers, inputs.points, start.weights, strict=True):
        found = logit_scale(points @ weight.T)
        if not found > 0:
            refuse("E-DATA", f"layer {layer}: the routers' logits are all equal, no scale fits")
        rows.append(weight * (target / found))
    return replace(start, weights=torch.stack(rows), base=inputs.base)


def same_base(one: Representations, other: Representations | Start) -> None:
    """Refuse two things that were collected from different models."""
    if one.base != other.base:
        theirs = "any model" if other.base is None else f"base {other.base[:12]}..."
        refuse("E-BASE", f"representations of base {one.base[:12]}... do not go with {theirs}")


def _unit(weights: Tensor) -> Tensor:
    return weights / weights.norm(dim=-1, keepdim=True).clamp(min=1e-8)
