"""Where routers start: random weights, centroids of representations, prompts; and their scale.

`crsu` of ``collect(..., tensor="ffn_input")`` resembles the router of Cluster-aware Upcycling
(arXiv 2604.13508), which clusters by cosine; its experts and self-distillation are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor, nn

from moebook.analysis.routers import logit_scale
from moebook.data import padded
from moebook.data.reading import field
from moebook.errors import refuse
from moebook.kernels.dispatch import shapes
from moebook.methods.upcycling.representations import Representations, Tokens, collect
from moebook.models import checkpoint
from moebook.models.anatomy import anatomy
from moebook.nn.batch import check_batch
from moebook.settings import FINITE, Seed, Size, checked, record

Kind = Literal["normal", "kaiming", "wide"]
Mode = Literal["hidden", "hidden_avg", "cheap_embed"]
MODES: tuple[Mode, ...] = get_args(Mode)
PROMPTS = 32
_unit = partial(nn.functional.normalize, dim=-1, eps=1e-8)


@record
class Start:
    """First weights of the routers of all L layers; a layer's rows are its experts' (Eq. 1)."""

    weights: Annotated[Tensor, FINITE]  # [L, E, D] float32
    # Fingerprint of the model they were taken from; None fits any.
    base: str | None = None
    # [L] by which the experts' outputs are multiplied; None but for the rule "scaled".
    factors: Annotated[Tensor, FINITE] | None = None

    def __post_init__(self) -> None:
        shapes("Start", {"weights": (self.weights, "L E D")}, empty="")
        if self.factors is not None:
            both = {"factors": (self.factors, "L"), "weights": (self.weights, "L E D")}
            shapes("Start", both, empty="")


@checked
def su(
    model: nn.Module, experts: Size, *, kind: Kind = "normal", seed: Seed = 0
) -> Start:
    """Draw the routers at random: plain sparse upcycling (SU). The paper does not say from what.

    ``"normal"`` is N(0, 0.02^2) (OLMoE, transformers' default); ``"kaiming"`` uniform within
    1/sqrt(D) (``nn.Linear``); ``"wide"`` N(0, 1) (mergekit), nearly one-hot.

    >>> from moebook import models
    >>> su(models.load("nano")[0], experts=4).weights.shape
    torch.Size([4, 4, 128])
    """
    host = anatomy(model)
    shape = (len(host.layers), experts, host.hidden)  # [L, E, D]
    generator = torch.Generator().manual_seed(seed)
    if kind == "kaiming":
        bound = 1 / math.sqrt(host.hidden)
        weights = (2 * torch.rand(shape, generator=generator) - 1) * bound
    else:
        weights = torch.randn(shape, generator=generator) * (
            1.0 if kind == "wide" else 0.02
        )
    return Start(weights)


@checked
def trsu(
    states: Representations, experts: Size | None = None, *, seed: Seed = 0
) -> Start:
    """Start each expert at a centroid of one task's tokens: task-representation upcycling.

    After ``hardest`` and ``collect`` the default is Sec. 4.2's recipe, one mean per task ("E =
    number of tasks"). Of C centroids per task expert ``t * C + c`` is the c-th largest of task t.
    """
    # Sec. 4.2 has T experts for T tasks; of a multiple each task gets as many.
    each, rest = divmod(experts or len(states.tasks), len(states.tasks))
    if rest:
        refuse(
            "E-RANGE",
            f"experts is {experts}, expected a multiple of {len(states.tasks)} tasks",
        )
    # App. B: each task's attention outputs are clustered by themselves: [L, each, D].
    groups = [
        _centroids(
            states.points[:, states.labels == task], each, seed, f"task '{name}', "
        )
        for task, name in enumerate(states.tasks)
    ]
    # Row r_i of Eq. 1's W_r is centroid i: [L, E, D].
    return Start(torch.cat(groups, dim=1), states.base)


@checked
def crsu(states: Representations, experts: Size, *, seed: Seed = 0) -> Start:
    """Start each expert at a centroid of all tokens: context-representation upcycling (Sec. 4.3).

    The paper's recipe follows ``collect(..., share=0.01)`` over the whole training mixture. Each
    layer numbers its clusters anew: "expert 0" has no common meaning.
    """
    # Sec. 4.3: k-means over the tokens of all tasks; centroid i is row r_i of W_r.
    return Start(_centroids(states.points, experts, seed, by_size=False), states.base)


@checked
@torch.no_grad()
def prompted(
    model: nn.Module,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    experts: Size,
    *,
    mode: Mode = "hidden",
    max_length: Size = 160,
) -> Start:
    """Start each expert at a vector of length 1 from its prompts, as mergekit's gate modes do.

    The tasks of ``rows`` (each with ``task`` and ``prompt``) are dealt out evenly by name. Of its
    tasks' rows an expert takes the first `PROMPTS`, in their order: shuffle them, or of several
    tasks it may see the first alone. ``"hidden"`` is the mean over prompts of each decoder layer's
    input at the last token, ``"hidden_avg"`` at all columns, padding averaged in. ``"cheap_embed"``
    sums embeddings. Prompts have mergekit's tokens (see `_as_mergekit`), but end at ``max_length``.
    """
    given = [
        (field(row, "task", f"row {number}"), field(row, "prompt", f"row {number}"))
        for number, row in enumerate(rows)
    ]
    tasks = sorted({task for task, _ in given})
    if experts > len(tasks):
        have = f"{len(tasks)} tasks cannot be dealt out to {experts} experts"
        refuse("E-DATA", f"{have}: take fewer experts, or rows of more tasks")
    batches = {}
    for part in np.array_split(tasks, experts):
        name = "+".join(part)
        prompts = [prompt for task, prompt in given if task in part][:PROMPTS]
        # One batch an expert: `hidden_avg` averages its padding in. Its first task tells
        # it from the others: joined, the names of two could be the same.
        batches[str(part[0])] = [_as_mergekit(tokenizer, prompts, max_length, name)]
    if mode == "cheap_embed":
        return _embedded(model, [batch for [batch] in batches.values()])
    tokens: Tokens = "last" if mode == "hidden" else "mean"
    states = collect(model, batches, tensor="block_input", tokens=tokens)
    # [L, E, D]: an expert's prompts were collected as a task.
    return Start(_unit(states.means()), states.base)


def _as_mergekit(
    tokenizer: Any, prompts: Sequence[str], max_length: int, name: str
) -> dict[str, Tensor]:
    """Tokenize an expert's prompts as mergekit's command does: ids and mask ``[B, T]``.

    Each begins with BOS where the tokenizer defines one, and has no other special token. Padding
    stands on the left and is BOS too, or EOS without one; ``hidden_avg`` averages it in.
    """
    begin = tokenizer.bos_token or ""
    texts = [begin + prompt for prompt in prompts]
    whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
    # Not by the tokenizer: one that truncates on the left would take BOS away.
    rows = [row[:max_length] for row in whole]
    # BOS alone is none of a prompt's tokens.
    if max(map(len, rows)) <= bool(begin):
        where = f"within max_length {max_length}, BOS included"
        refuse("E-DATA", f"the prompts of task {name} hold no tokens {where}")
    fill = tokenizer.bos_token_id
    if fill is None:
        fill = tokenizer.eos_token_id
    if fill is None:
        refuse(
            "E-MODEL",
            "the tokenizer has neither BOS nor EOS, and mergekit pads with one",
        )
    ids, mask = padded(rows, fill, left=True)
    return {"input_ids": ids, "attention_mask": mask}


def _embedded(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> Start:
    """Start each expert at the sum of its batch's embeddings, the same in every layer."""
    table = model.get_input_embeddings().weight.cpu()  # [V, D]
    sums = []
    for batch in batches:
        check_batch("prompted", model, batch)
        real = batch["input_ids"][batch["attention_mask"].bool()]
        sums.append(table[real].float().sum(0))  # [D]
    layers = len(anatomy(model).layers)
    weights = _unit(torch.stack(sums)).repeat(layers, 1, 1)  # [L, E, D]
    return Start(weights, checkpoint.fingerprint(model))


@checked
def scaled(
    start: Start,
    scale: Literal["raw", "unit", "matched"],
    *,
    inputs: Representations | None = None,
) -> Start:
    """Give a start another length, which sets the temperature of the routers' first choices.

    ``"raw"`` leaves it (the paper); ``"unit"`` makes every row of length 1 (mergekit);
    ``"matched"`` scales each layer so that the logits of ``inputs`` have `logit_scale` 1.
    """
    if scale == "raw":
        return start
    if start.factors is not None:
        have = "the start has factors, which are of its length now"
        refuse("E-DATA", f"scaled: {have}; scale first, then levelled")
    if scale == "unit":
        return replace(start, weights=_unit(start.weights))
    if inputs is None or inputs.tensor != "ffn_input":
        refuse(
            "E-DATA", "scale='matched' needs inputs: collect(..., tensor='ffn_input')"
        )
    rows = []
    for layer, (logits, weight) in enumerate(
        zip(_logits("scaled", start, inputs), start.weights, strict=True)
    ):
        spread = logit_scale(logits)
        if not spread > 0:
            refuse(
                "E-DATA",
                f"layer {layer}: the routers' logits are all equal, no scale fits",
            )
        # Logits are linear in W_r, so their scale becomes 1. One factor for all E rows:
        # which expert a token likes best stays as it was.
        rows.append(weight * (1 / spread))
    return replace(start, weights=torch.stack(rows), base=inputs.base)


@checked
def levelled(start: Start, inputs: Representations, top_k: Size) -> Start:
    """Give a start the factors by which the rule ``"scaled"`` makes up for Eq. 2 at step 0.

    Under Eq. 2 a layer of copies puts out its FFN's output times the sum of the token's K largest
    probabilities. A layer's factor is one over the mean of these sums over the tokens of
    ``inputs``, which `collect` with ``tensor="ffn_input"`` read off the dense base.
    """
    if inputs.tensor != "ffn_input":
        refuse("E-DATA", "levelled needs inputs: collect(..., tensor='ffn_input')")
    if top_k > start.weights.shape[1]:
        have = f"top_k is {top_k}, expected 1 to {start.weights.shape[1]} (experts)"
        refuse("E-RANGE", f"levelled: {have}")
    factors = []
    for logits in _logits("levelled", start, inputs):
        # Eq. 1; Eq. 2 on copies is FFN(x) times the sum of the K kept p_i.
        probabilities = logits.double().softmax(-1)  # [S, E]
        kept = probabilities.topk(top_k, dim=-1).values.sum(-1)  # [S]
        # So that factor * kept is 1 in the mean over tokens.
        factors.append(1 / kept.mean())
    return replace(start, base=inputs.base, factors=torch.stack(factors).float())


def _logits(where: str, start: Start, inputs: Representations) -> list[Tensor]:
    """Return what the routers of a start say of the inputs, ``[S, E]`` a layer."""
    checkpoint.check_base("the start", start.base or inputs.base, inputs.base)
    tensors = {"inputs": (inputs.points, "L S D"), "start": (start.weights, "L E D")}
    shapes(where, tensors, empty="")
    common = torch.promote_types(inputs.points.dtype, start.weights.dtype)
    # Sec. 3.1: r(x) = W_r x, as [S, D] @ [D, E].
    return [
        points.to(common) @ weight.to(common).T
        for points, weight in zip(inputs.points, start.weights, strict=True)
    ]


def _centroids(
    points: Tensor, wanted: int, seed: int, where: str = "", *, by_size: bool = True
) -> Tensor:
    """Cluster each layer's points ``[L, S, D]``: centroids ``[L, wanted, D]``.

    Mini-batch k-means, then one exact step of Lloyd's, so that each centroid is the mean of its
    points; one without points stays where it is. Lloyd's to the end took up to 70 times as long,
    for an inertia at most 0.4 % less.
    """
    # All layers are looked at before the first is clustered, which takes long.
    for layer, rows in enumerate(points):
        _check_points(rows, wanted, f"{where}layer {layer}")
    layers = []
    for rows in points:
        if wanted == 1:
            # One centroid is the mean, without a search.
            layers.append(rows.double().mean(0, keepdim=True).to(rows.dtype))
            continue
        means, counts = _clustered(rows, wanted, seed)
        if by_size:
            means = means[counts.argsort(descending=True, stable=True)]
        layers.append(means)
    return torch.stack(layers)


def _check_points(rows: Tensor, wanted: int, where: str) -> None:
    """Refuse a layer's points ``[S, D]`` that are not finite, or too few of them distinct."""
    if not rows.isfinite().all():
        refuse("E-NONFINITE", f"{where}: representations hold NaN or infinity")
    # Equal points have one centroid: of more than there are distinct points some would
    # have none.
    distinct = len({row.tobytes() for row in rows.numpy()})
    if distinct < wanted:
        counts = f"{wanted} centroids asked for, but only {distinct} distinct points"
        refuse("E-DATA", f"{where}: {counts}: fewer experts, or more text")


def _clustered(rows: Tensor, wanted: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the centroids ``[wanted, D]`` of points ``[S, D]``, and how many each has."""
    size = min(1024, len(rows))  # scikit-learn's default
    kmeans = MiniBatchKMeans(wanted, n_init=3, batch_size=size, random_state=seed)
    kmeans.fit(rows.numpy())
    nearest = torch.from_numpy(kmeans.labels_).long()  # [S], of the final centres

    # Lloyd's step: each centroid becomes the mean of its points, in float64.
    counts = nearest.bincount(minlength=wanted)  # [wanted]
    sums = torch.zeros(wanted, rows.shape[1], dtype=torch.float64)
    sums.index_add_(0, nearest, rows.double())
    means = (sums / counts.clamp(min=1)[:, None]).to(rows.dtype)
    centres = torch.from_numpy(kmeans.cluster_centers_)
    return torch.where(counts[:, None] > 0, means, centres), counts
