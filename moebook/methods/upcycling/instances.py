"""Instances of a task: in batches, by perplexity, and the hardest of them (App. B)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import torch
from datasets import Dataset
from pydantic import Field
from torch import Tensor, nn

from moebook.data import IGNORED
from moebook.data.padding import padded
from moebook.errors import refuse
from moebook.nn import evaluating
from moebook.settings import checked


@checked
def batches(
    rows: Dataset, size: Annotated[int, Field(ge=1)] = 32, *, pad_id: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Yield encoded rows in order, padded on the right: B = ``size`` rows at a time.

    Yields:
        ``input_ids``, ``attention_mask`` and ``labels`` (-100 where masked), each ``[B, T]``.
    """
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        ids, mask = padded(part["input_ids"], pad_id)
        labels, _ = padded(part["labels"], IGNORED)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


@checked
@torch.no_grad()
def perplexities(
    model: nn.Module,
    rows: Dataset,
    *,
    of: Literal["answer", "all"] = "answer",
    size: int = 32,
    pad_id: int = 0,
) -> Tensor:
    """Return the perplexity of each instance under the model, ``[len(rows)]`` float64.

    ``of="answer"`` scores the labelled tokens given the prompt, ``"all"`` every token after the
    first: the paper says "instance-level perplexity" and not of what.
    """
    device, parts = next(model.parameters()).device, [torch.zeros(0, dtype=torch.float64)]
    with evaluating(model):
        for batch in batches(rows, size, pad_id=pad_id):
            targets = batch.pop("labels")
            if of == "all":
                targets = batch["input_ids"].where(batch["attention_mask"].bool(), IGNORED)
            logits = model(**{key: value.to(device) for key, value in batch.items()}).logits
            parts.append(_mean_nats(logits, targets.to(device)).cpu())
    nats = torch.cat(parts)
    for row in (~nats.isfinite()).nonzero().flatten().tolist():
        refuse("E-NONFINITE", f"row {row}: its perplexity is not finite (or it has no {of} token)")
    return nats.exp()


@checked
def hardest(
    model: nn.Module,
    tasks: Mapping[str, Dataset],
    *,
    share: Annotated[float, Field(gt=0, le=1)] = 0.05,
    of: Literal["answer", "all"] = "answer",
    pad_id: int = 0,
) -> dict[str, Dataset]:
    """Return each task's instances of highest perplexity, in their order (App. B: the top 5 %).

    ``floor(share * instances)`` are kept, of equal ones the first. The paper contradicts itself:
    Sec. 4.2 speaks of "representative" samples.
    """
    hard = {}
    for task, rows in tasks.items():
        wanted = math.floor(share * len(rows) + 1e-9)
        if not wanted:
            refuse(
                "E-DATA",
                f"task '{task}' has {len(rows)} instances, of which a share of {share:g} is none:"
                f" give it at least {math.ceil(1 / share)}, or a larger share",
            )
        scores = perplexities(model, rows, of=of, pad_id=pad_id)
        order = scores.argsort(descending=True, stable=True)[:wanted]
        hard[task] = rows.select(order.sort().values.tolist())
    return hard


def _mean_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean nats per scored token of each row ``[B]``; NaN where none is scored."""
    nats = nn.functional.cross_entropy(
        logits[:, :-1].float().mT, targets[:, 1:], ignore_index=IGNORED, reduction="none"
    ).double()
    return nats.sum(1) / (targets[:, 1:] != IGNORED).sum(1)
