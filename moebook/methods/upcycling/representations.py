"""What a dense model finds hard, and what it represents: hooks at every layer, bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from datasets import Dataset
from pydantic import Field, SkipValidation
from torch import Tensor, nn
from transformers import PreTrainedModel

from moebook.data import IGNORED, padded
from moebook.data.reading import clean
from moebook.errors import refuse
from moebook.kernels.bank_scoring import token_nats
from moebook.kernels.dispatch import indices, shapes
from moebook.models.anatomy import Anatomy, Layer, anatomy
from moebook.models.checkpoint import fingerprint
from moebook.models.conventions import check
from moebook.nn import evaluating, hooked
from moebook.nn.batch import check_batch
from moebook.runtime import random_states_kept
from moebook.settings import Count, Seed, Size, checked, record

Batch = Mapping[str, Tensor]
Tasks = SkipValidation[Mapping[str, Iterable[Batch]]]
Source = Literal["attention_output", "residual", "ffn_input", "block_input"]
Tokens = Literal["each", "last", "mean"]
Share = Annotated[float, Field(gt=0, le=1)]


@checked
def batches(
    rows: Dataset, size: Count = 32, *, pad_id: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Yield encoded rows in order, ``size`` at a time, padded on the right to ``[B, T]``."""
    for name in ("input_ids", "labels"):
        if name not in rows.column_names:
            have = ", ".join(rows.column_names)
            refuse("E-DATA", f"rows have {have}, expected {name}: see data.encode")
    rows = rows.with_format(None)  # lists, whatever the rows are shown as
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        for number, (ids, answer) in enumerate(
            zip(part["input_ids"], part["labels"], strict=True), start=at
        ):
            if not ids or len(ids) != len(answer):
                sizes = f"{len(ids)} input_ids and {len(answer)} labels"
                refuse(
                    "E-DATA",
                    f"row {number} has {sizes}, expected as many, one at least",
                )
        ids, mask = padded(part["input_ids"], pad_id)
        labels, _ = padded(part["labels"], IGNORED)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


@checked
@torch.no_grad()
def perplexities(
    model: nn.Module, rows: Dataset, *, size: Count = 32, pad_id: int = 0
) -> Tensor:
    """Return each answer's perplexity ``[S]`` given its prompt (the paper: "instance-level")."""
    check(model, "perplexities")
    device = next(model.parameters()).device
    means = [torch.zeros(0, dtype=torch.float64)]
    with evaluating(model):
        for batch in batches(rows, size, pad_id=pad_id):
            check_batch("perplexities", model, batch)
            actual = batch.pop("labels")[:, 1:].to(device)  # [B, T - 1]
            inputs = {key: value.to(device) for key, value in batch.items()}
            logits = model(**inputs, use_cache=False).logits  # [B, T, V]
            # PPL = exp(mean of -ln p over the answer's tokens). A place predicts the
            # next token; the prompt's, which bear no label, add 0.
            nats = token_nats(logits[:, :-1], actual).double().sum(1)  # [B]
            tokens = (actual != IGNORED).sum(1)
            means.append((nats / tokens).cpu())  # 0/0 is NaN: a row without an answer
    scores = torch.cat(means).exp()  # [S]
    broken = (~scores.isfinite()).nonzero().flatten().tolist()
    if broken:
        why = "its perplexity is not finite (or it has no answer)"
        refuse("E-NONFINITE", f"row {broken[0]}: {why}")
    return scores


@checked
def hardest(
    model: nn.Module,
    tasks: Mapping[str, Dataset],
    *,
    share: Share = 0.05,
    pad_id: int = 0,
) -> dict[str, Dataset]:
    """Return each task's instances of highest perplexity, in their order (App. B: the top 5 %).

    ``floor(share * instances)`` are kept, of equal ones the first (Sec. 4.2: "representative").
    """
    hard = {}
    for task, rows in tasks.items():
        # In floats 0.29 * 100 is 28.999999999999996: 29 are meant.
        wanted = math.floor(share * len(rows) + 1e-9)
        if not wanted:
            fewest = math.ceil((1 - 1e-9) / share)
            least = f"a share of {share:g} needs {fewest}"
            refuse(
                "E-DATA", f"task '{task}' has {len(rows)} instances, {least} at least"
            )
        scores = perplexities(model, rows, pad_id=pad_id)
        # App. B: the top 5 % by perplexity.
        order = scores.argsort(descending=True, stable=True)[:wanted]
        hard[task] = rows.select(order.sort().values.tolist())
    return hard


@record
class Representations:
    """What a model represents at each of its L layers, for a sample of tokens."""

    # [L, S, D] float32 on the CPU, task by task in the order of the text.
    points: Tensor
    labels: Tensor  # [S] the number of each sample's task
    tasks: tuple[str, ...]
    tensor: Source
    base: str  # fingerprint of the model

    def __post_init__(self) -> None:
        tensors = {
            "points": (self.points, "L S D"),
            "labels": (self.labels, "S", "int64"),
        }
        shapes("Representations", tensors, empty="")
        indices("Representations", "labels", self.labels, len(self.tasks))
        if len(set(self.tasks)) < len(self.tasks) or not all(self.tasks):
            refuse(
                "E-NAME",
                f"Representations: tasks are {self.tasks}, expected different names",
            )

    def means(self) -> Tensor:
        """Return the mean of each task's samples by layer, ``[L, tasks, D]``."""
        groups = [
            self.points[:, self.labels == task] for task in range(len(self.tasks))
        ]
        return torch.stack([group.mean(1) for group in groups], dim=1)

    def only(self, *tasks: str) -> Representations:
        """Return the samples of these tasks, in the order in which they are held."""
        absent = [task for task in tasks if task not in self.tasks]
        if absent:
            refuse(
                "E-DATA",
                f"no task '{absent[0]}' in the representations of {self.tasks}",
            )
        names = tuple(name for name in self.tasks if name in tasks)
        numbers = torch.tensor([self.tasks.index(name) for name in names])
        rows = torch.isin(self.labels, numbers)
        # The numbers ascend: the place of an old one among them is the new one.
        labels = torch.searchsorted(numbers, self.labels[rows])
        return replace(self, points=self.points[:, rows], labels=labels, tasks=names)


@checked
def sampled(
    model: nn.Module,
    tasks: Tasks,
    *,
    tensor: Source = "attention_output",
    tokens: Tokens = "each",
    share: Share = 1.0,
    seed: Seed = 0,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Run the model over each task's batches and yield the tokens that the draw hits.

    Every real token (or row, see ``tokens``) draws a uniform number from its task's own generator,
    however the text is cut into batches, and is taken if that is below ``share``. Yields the task's
    number, points ``[L, n, D]`` float32 on the CPU, and the numbers drawn ``[n]``.

    - ``tasks``: by task batches of ``input_ids`` and, where padded, ``attention_mask [B, T]``.
    - ``tensor``: ``"attention_output"``, that of the last projection; ``"residual"``, that plus the
      residual stream, before the FFN's norm; ``"ffn_input"``, the normed input of the FFN and later
      the router (the paper's "attention outputs" may be any of these); ``"block_input"``, the
      residual stream before the layer (mergekit).
    - ``tokens``: ``"each"`` on its own; ``"last"``, the last real one of every row; ``"mean"``, the
      mean over a row's columns, padding averaged in as in mergekit's ``hidden_avg``.
    """
    host = anatomy(model)
    with evaluating(model):
        for number, batches in enumerate(tasks.values()):
            # So a task's draw does not depend on how long the texts before it are.
            rng = np.random.default_rng([seed, number])
            for batch in batches:
                check_batch("sampled", model, batch)
                mask = batch.get(
                    "attention_mask", torch.ones_like(batch["input_ids"])
                ).bool()
                rows, columns = _places(mask, tokens)  # of all that draw
                keys = torch.from_numpy(rng.random(len(rows)))
                # App. B, CRSU: with share 0.01 a random 1 % of the tokens.
                hit = keys < share
                # A batch that the draw misses is not run at all.
                if hit.any():
                    drawn = None if tokens == "mean" else columns[hit]
                    points = _forward(host, tensor, batch, rows[hit], drawn)
                    yield number, points, keys[hit]


@checked
def collect(
    model: nn.Module,
    tasks: Tasks,
    *,
    tensor: Source = "attention_output",
    limit: Size = 4096,
    **draw: Any,
) -> Representations:
    """Keep at most ``limit`` samples of each task: all that `sampled` yields, or a part of it.

    Of more, those with the smallest keys stay: a uniform draw without replacement. Memory is about
    ``tasks * limit * L * D * 4`` bytes (2.1 GB per task at 32 layers of width 4,096); all of 1 % of
    200 M tokens would be a terabyte. ``draw``: ``tokens``, ``share`` and ``seed``.
    """
    host = anatomy(model)
    names = tuple(tasks)
    if not names:
        refuse("E-DATA", "no tasks to collect from: give at least one")
    # A task has `limit` slots. An empty one has an infinite key, so that every sample
    # displaces it, and the latest arrival, so that it comes last.
    points = torch.empty(len(host.layers), len(names), limit, host.hidden)
    keys = torch.full((len(names), limit), torch.inf, dtype=torch.float64)
    arrival = torch.full((len(names), limit), torch.iinfo(torch.int64).max)
    seen = 0  # samples so far, of all tasks
    for task, fresh, fresh_keys in sampled(model, tasks, tensor=tensor, **draw):
        freed, taken = _displaced(keys[task], fresh_keys)
        keys[task, freed] = fresh_keys[taken]
        arrival[task, freed] = seen + taken
        points[:, task, freed] = fresh[:, taken]  # [L, taken, D]
        seen += len(fresh_keys)
    filled = keys.isfinite()
    for name, count in zip(names, filled.sum(1), strict=True):
        if not count:
            remedy = "give it text, or a larger share"
            refuse("E-DATA", f"task '{name}' has no instances: {remedy}")
    # By arrival: in the order of the text, task by task, empty slots last.
    slots = arrival.flatten().argsort()[: int(filled.sum())]
    points = points.flatten(1, 2)  # a view, [L, tasks * limit, D]
    for layer in points:  # in place: a second copy of all layers would double the bound
        layer[: len(slots)] = layer[slots]
    # [S]: `nonzero` goes row by row, so task by task, in the samples' order.
    labels = filled.nonzero()[:, 0]
    points = points[:, : len(slots)]
    return Representations(points, labels, names, tensor, fingerprint(model))


def _displaced(keys: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Return slots that give way, and as many fresh samples for them: the smallest keys stay."""
    limit = len(keys)
    kept = torch.cat([keys, fresh]).topk(limit, largest=False).indices
    # A place below `limit` is a slot, another one a fresh sample.
    freed = (~torch.isin(torch.arange(limit), kept)).nonzero().flatten()
    return freed, kept[kept >= limit] - limit


@checked
def clouds(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Mapping[str, SkipValidation[Iterable[str]]],
    *,
    tensor: Source = "attention_output",
    max_length: Size = 48,
    seed: Seed = 0,
) -> dict[str, Representations]:
    """Represent each text by its mean, in a ``pretrained`` network and with ``random`` weights.

    The paper's Fig. 1 lacks this control: untrained networks, too, separate domains by their words.
    """
    cut = {"truncation": True, "max_length": max_length, "return_tensors": "pt"}
    tasks: dict[str, list[Any]] = {}
    for domain, part in texts.items():
        tasks[domain] = [
            tokenizer(clean(text, domain, "texts"), **cut) for text in part
        ]
    with random_states_kept():
        torch.manual_seed(seed)
        control = type(model)(model.config).to(model.device, model.dtype)
    networks = {"pretrained": model, "random": control}
    return {
        name: collect(each, tasks, tensor=tensor, tokens="mean")
        for name, each in networks.items()
    }


def _places(mask: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return rows and columns of real tokens, or of the last one in each row that has any."""
    if tokens == "each":
        return mask.nonzero(as_tuple=True)
    rows = mask.any(1).nonzero().flatten()
    # The first 1 of a reversed row is its last real token. A row without any is not in
    # `rows`, so what comes out for it is not read.
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    return rows, last[rows]


@torch.no_grad()
def _forward(
    host: Anatomy, tensor: Source, batch: Batch, rows: Tensor, columns: Tensor | None
) -> Tensor:
    """Run one batch and return each layer's samples ``[L, n, D]``; without columns rows' means."""
    device = next(host.decoder.parameters()).device
    rows = rows.to(device)
    if columns is not None:
        columns = columns.to(device)
    points: dict[int, Tensor] = {}

    def see(layer: int, arguments: tuple[Any, ...], output: Any) -> None:
        h = output if tensor == "attention_output" else arguments[0]
        if isinstance(h, tuple):  # an attention's: its weights are the second part
            h = h[0]
        # [n, D], of h [B, T, D], which nobody keeps: memory is the samples' alone.
        # Means are over all T columns, padding too.
        picked = h[rows].float().mean(1) if columns is None else h[rows, columns]
        points[layer] = picked.float().cpu()

    seen = {layer.index: _source(layer, tensor) for layer in host.layers}
    inputs = {
        name: batch[name].to(device)
        for name in ("input_ids", "attention_mask")
        if name in batch
    }
    with hooked(seen, see):
        # Without the head or a KV cache: nobody reads either.
        host.decoder(**inputs, use_cache=False)
    return torch.stack([points[layer.index] for layer in host.layers])


def _source(layer: Layer, tensor: Source) -> nn.Module:
    """Return the module whose input (of the attention: whose output) is the tensor."""
    if tensor == "block_input":
        return layer.block
    if tensor == "attention_output":
        if layer.attention is None:
            refuse("E-MODEL", f"decoder layer {layer.index} has no attention module")
        return layer.attention
    before, after = (f"{side}_feedforward_layernorm" for side in ("pre", "post"))
    if tensor == "ffn_input" or (
        hasattr(layer.block, after) and not hasattr(layer.block, before)
    ):
        return layer.mlp  # OLMo 2, EXAONE 4: the MLP reads the residual stream as it is
    # In Gemma 2, which has both, the latter norms what the attention puts out.
    for name in (before, "post_attention_layernorm"):
        norm = getattr(layer.block, name, None)
        if isinstance(norm, nn.Module):
            return norm
    refuse(
        "E-MODEL",
        f"decoder layer {layer.index} has no norm before its feed-forward part",
    )
