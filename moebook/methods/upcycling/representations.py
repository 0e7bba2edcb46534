"""Collecting what a dense model represents: hooks at every layer, one pass, bounded memory.

`sampled` streams chunks and keeps nothing; `collect` keeps a uniform sample of bounded size. One
percent of 200 M tokens x 32 layers x 4,096 numbers would be a terabyte: it never exists at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.methods.settings import chosen, real, whole
from moebook.methods.upcycling.listening import TENSORS, listening
from moebook.models.anatomy import Anatomy, anatomy
from moebook.models.fingerprint import fingerprint
from moebook.nn import evaluating

Batch = Mapping[str, Tensor]
TOKENS = ("each", "last", "mean")


@dataclass(frozen=True)
class Chunk:
    """The tokens taken from one batch.

    Attributes:
        points: ``[L, n, D]`` float32 on the CPU.
        keys: ``[n]`` the uniform number in [0, 1) that each was drawn by.
        task: Number of the task that the batch belongs to.
    """

    points: Tensor
    keys: Tensor
    task: int


@dataclass(frozen=True)
class Representations:
    """What a model represents at every layer, for a sample of tokens.

    Attributes:
        points: ``[L, S, D]`` float32 on the CPU; the samples of a task stand together, in the
            order of the text.
        labels: ``[S]`` the number of each sample's task.
        tasks: Their names.
        layers: The L decoder layers.
        tensor: Which tensor was read, one of `TENSORS`.
        base: Fingerprint of the model.
    """

    points: Tensor
    labels: Tensor
    tasks: tuple[str, ...]
    layers: tuple[int, ...]
    tensor: str
    base: str

    def means(self) -> Tensor:
        """Return the mean of each task's samples by layer, ``[L, tasks, D]``."""
        groups = [self.points[:, self.labels == task] for task in range(len(self.tasks))]
        return torch.stack([group.mean(1) for group in groups], dim=1)

    def only(self, *tasks: str) -> Representations:
        """Return the samples of some tasks, in the order in which they are held.

        Raises:
            Refusal: E-DATA for a task that is not there.
        """
        if absent := [task for task in tasks if task not in self.tasks]:
            refuse("E-DATA", f"no task '{absent[0]}' in the representations of {self.tasks}")
        kept = [number for number, task in enumerate(self.tasks) if task in tasks]
        rows = torch.isin(self.labels, torch.tensor(kept))
        labels = torch.searchsorted(torch.tensor(kept), self.labels[rows])
        names = tuple(self.tasks[number] for number in kept)
        return replace(self, points=self.points[:, rows], labels=labels, tasks=names)


def sampled(
    model: nn.Module,
    tasks: Mapping[str, Iterable[Batch]],
    *,
    tensor: str = "attention_output",
    tokens: str = "each",
    share: float = 1.0,
    seed: int = 0,
) -> Iterator[Chunk]:
    """Run the model over each task's batches and yield the tokens that the draw hits.

    Every real token draws a uniform number from its task's own generator and is taken when it is
    below ``share``: which tokens are taken depends on the text's order and the seed alone, not on
    how it is cut into batches. Batches without a hit are not run. The model runs in evaluation
    mode without a graph and is given back in the mode it came in. What is held at any time is one
    batch's chunk, ``n * L * D`` float32 numbers, and the forward pass of that batch; hooks gather
    the rows, so no layer's full output outlives its layer.

    Args:
        model: A dense decoder (or any with the layers that `moebook.models.anatomy` finds).
        tasks: For each task its batches of ``input_ids`` and, where padded, ``attention_mask``
            ``[B, T]``.
        tensor: ``"attention_output"``, what the attention's output projection puts out;
            ``"residual"``, that plus the residual stream, before the FFN's norm; ``"ffn_input"``,
            the normed input that the FFN, and later the router, reads; ``"block_input"``, the
            residual stream before the layer (mergekit's choice). The paper says "attention
            outputs" and leaves open which of the first three is meant.
        tokens: ``"each"`` token on its own; ``"last"``, the last real token of every row;
            ``"mean"``, the mean over the columns of every row, padding averaged in as mergekit's
            ``hidden_avg`` does. For the latter two a draw is made per row.
        share: Probability of a token (or row) to be taken, in (0, 1].
        seed: Of the draw, 0 or more.

    Raises:
        Refusal: E-CHOICE, E-RANGE, E-TYPE; E-MODEL for a host without the tensor.
    """
    chosen("tensor", tensor, TENSORS)
    chosen("tokens", tokens, TOKENS)
    real("share", share, "(0, 1]")
    whole("seed", seed, 0)
    host, device = anatomy(model), next(model.parameters()).device
    with evaluating(model):
        for number, batches in enumerate(tasks.values()):
            rng = np.random.default_rng([seed, number])
            for batch in batches:
                mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
                keys = torch.from_numpy(rng.random(int(_drawn(mask, tokens).sum())))
                taken = keys < share
                if taken.any():
                    pick = _picker(mask.to(device), tokens, taken.to(device))
                    points = _forward(model, host, tensor, batch, device, pick)
                    yield Chunk(points, keys[taken], number)


def collect(
    model: nn.Module,
    tasks: Mapping[str, Iterable[Batch]],
    *,
    tensor: str = "attention_output",
    tokens: str = "each",
    share: float = 1.0,
    seed: int = 0,
    limit: int = 4096,
) -> Representations:
    """Keep at most ``limit`` samples of each task: all that `sampled` yields, or a part of it.

    When more are yielded, those with the smallest keys stay: a uniform draw without replacement.
    The bound on memory is ``tasks * limit * L * D * 4`` bytes, whatever the length of the text,
    plus one layer's share of it while the samples are put in order, plus what `sampled` holds.
    The default limit means 2.1 GB a task at 32 layers of width 4,096, and 8 MB at 4 of 128.

    Args:
        model: See `sampled`, as for all but ``limit``.
        tasks: For each task its batches.
        tensor: Which tensor.
        tokens: What a sample is.
        share: Probability of a token to be taken, in (0, 1].
        seed: Of the draw, 0 or more.
        limit: Samples kept per task, at least 1.

    Raises:
        Refusal: Those of `sampled`; E-DATA, naming the task, when a task yields no sample.
    """
    whole("limit", limit, 1)
    host, names = anatomy(model), tuple(tasks)
    if not names:
        refuse("E-DATA", "no tasks to collect from: give at least one")
    points = torch.empty(len(host.layers), len(names) * limit, host.hidden)
    keys = torch.full((len(names), limit), torch.inf, dtype=torch.float64)
    order = torch.zeros(len(names), limit, dtype=torch.int64)
    seen = 0
    for chunk in sampled(model, tasks, tensor=tensor, tokens=tokens, share=share, seed=seed):
        old, new = _survivors(keys[chunk.task], chunk.keys)
        keys[chunk.task, old], order[chunk.task, old] = chunk.keys[new], seen + new
        points[:, chunk.task * limit + old] = chunk.points[:, new]
        seen += len(chunk.keys)
    for task, name in enumerate(names):
        if not keys[task].isfinite().any():
            refuse("E-DATA", f"task '{name}' has no instances: give it text, or a larger share")
    slots, labels = _ordered(keys, order)
    for layer in points:  # in place: a second copy of all layers would double the bound
        layer[: len(slots)] = layer[slots]
    places = tuple(layer.index for layer in host.layers)
    return Representations(
        points[:, : len(slots)], labels, names, places, tensor, fingerprint(model)
    )


def _survivors(held: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots to overwrite and which of the new samples go there."""
    keep = torch.cat([held, fresh]).topk(len(held), largest=False).indices
    new = keep[keep >= len(held)] - len(held)
    evicted = torch.ones(len(held), dtype=torch.bool)
    evicted[keep[keep < len(held)]] = False
    return evicted.nonzero().flatten(), new


def _ordered(keys: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the filled slots in the order of the text, and their tasks."""
    filled = keys.isfinite()
    ranks = order.where(filled, torch.iinfo(torch.int64).max).argsort(1)
    slots = [
        task * len(row) + row[: int(count)]
        for task, (row, count) in enumerate(zip(ranks, filled.sum(1), strict=True))
    ]
    return torch.cat(slots), filled.nonzero()[:, 0]


def _drawn(mask: Tensor, tokens: str) -> Tensor:
    """Return what a number is drawn for: real tokens ``[B, T]``, or rows that have any ``[B]``."""
    return mask if tokens == "each" else mask.any(1)


def _picker(mask: Tensor, tokens: str, taken: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what takes the hit samples ``[n, D]`` out of a layer's tensor ``[B, T, D]``."""
    if tokens == "each":
        rows = mask.flatten().nonzero().flatten()[taken]
        return lambda h: h.flatten(0, 1)[rows]
    rows = mask.any(1).nonzero().flatten()[taken]
    if tokens == "mean":
        return lambda h: h[rows].float().mean(1)
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    return lambda h: h[rows, last[rows]]


@torch.no_grad()
def _forward(
    model: nn.Module,
    host: Anatomy,
    tensor: str,
    batch: Batch,
    device: torch.device,
    pick: Callable[[Tensor], Tensor],
) -> Tensor:
    """Run one batch and return what ``pick`` takes at each layer, ``[L, n, D]``."""
    found: dict[int, Tensor] = {}

    def keep(layer: int, h: Tensor) -> None:
        found[layer] = pick(h).float().cpu()

    with listening(host, tensor, keep):
        read = {k: batch[k].to(device) for k in ("input_ids", "attention_mask") if k in batch}
        host.decoder(**read)
    return torch.stack([found[layer.index] for layer in host.layers])
