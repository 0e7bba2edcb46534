"""Instances of a task: in batches, by perplexity, and the hardest of them (App. B)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from datasets import Dataset
from torch import Tensor, nn

from moebook.data import IGNORED
from moebook.data.padding import padded
from moebook.errors import refuse
from moebook.methods.settings import chosen, real, whole
from moebook.nn import evaluating

OF = ("answer", "all")


def batches(rows: Dataset, size: int = 32, *, pad_id: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yield the rows in order, padded on the right.

    Args:
        rows: ``input_ids`` and ``labels`` in each, as `moebook.data.encode` makes them.
        size: B, at least 1.
        pad_id: Fills short rows; masked, so that its value is irrelevant.

    Yields:
        ``input_ids``, ``attention_mask`` and ``labels`` (-100 where masked), each ``[B, T]``.

    Raises:
        Refusal: E-RANGE or E-TYPE for the size, when the first batch is asked for.
    """
    whole("size", size, 1)
    for at in range(0, len(rows), size):
        part = rows[at : at + size]
        ids, mask = padded(part["input_ids"], pad_id)
        labels, _ = padded(part["labels"], IGNORED)
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def perplexities(
    model: nn.Module, rows: Dataset, *, of: str = "answer", size: int = 32, pad_id: int = 0
) -> Tensor:
    """Return the perplexity of each instance under the model, ``[len(rows)]`` float64.

    Args:
        model: A causal language model; runs in evaluation mode, given back as it came.
        rows: See `batches`.
        of: ``"answer"``: of the labelled tokens given the prompt; ``"all"``: of every token after
            the first. The paper says "instance-level perplexity" and not of what.
        size: Rows a forward pass.
        pad_id: Fills short rows.

    Raises:
        Refusal: E-CHOICE; E-RANGE or E-TYPE for the size; E-DATA for a row with nothing to score;
            E-NONFINITE.
    """
    chosen("of", of, OF)
    device, found = next(model.parameters()).device, []
    with evaluating(model):
        for batch in batches(rows, size, pad_id=pad_id):
            read = {key: batch[key].to(device) for key in ("input_ids", "attention_mask")}
            targets = batch["labels"]
            if of == "all":
                targets = batch["input_ids"].where(batch["attention_mask"].bool(), IGNORED)
            found.append(_mean_nats(model(**read).logits, targets.to(device)).cpu())
    nats = torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
    for row in (~nats.isfinite()).nonzero().flatten().tolist():
        refuse("E-NONFINITE", f"row {row}: its perplexity is not finite (or it has no {of} token)")
    return nats.exp()


def hardest(
    model: nn.Module,
    tasks: Mapping[str, Dataset],
    *,
    share: float = 0.05,
    of: str = "answer",
    pad_id: int = 0,
) -> dict[str, Dataset]:
    """Return each task's instances of highest perplexity, in their order (App. B: the top 5 %).

    The paper contradicts itself: Sec. 4.2 speaks of "representative" samples. ``share=1`` takes
    all.

    Args:
        model: The dense base.
        tasks: For each task its rows, see `batches`.
        share: In (0, 1]; ``floor(share * instances)`` of them are kept. Equal ones: the first.
        of: See `perplexities`.
        pad_id: Fills short rows.

    Raises:
        Refusal: E-RANGE; E-DATA, naming the task, when it has no instances or too few for the
            share to give one.
    """
    real("share", share, "[0, 1]")
    kept = {}
    for task, rows in tasks.items():
        if not len(rows):
            refuse("E-DATA", f"task '{task}' has no instances: give it some, or leave it out")
        wanted = math.floor(share * len(rows) + 1e-9)
        if not wanted:
            need = math.ceil(1 / share) if share else "more"
            refuse(
                "E-DATA",
                f"task '{task}' has {len(rows)} instances, of which a share of {share:g} is none:"
                f" give it at least {need}, or a larger share",
            )
        found = perplexities(model, rows, of=of, pad_id=pad_id)
        order = found.argsort(descending=True, stable=True)[:wanted]
        kept[task] = rows.select(order.sort().values.tolist())
    return kept


def _mean_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean nats per scored token of each row ``[B]``; NaN where none is scored."""
    nats = nn.functional.cross_entropy(
        logits[:, :-1].float().mT, targets[:, 1:], ignore_index=IGNORED, reduction="none"
    ).double()
    return nats.sum(1) / (targets[:, 1:] != IGNORED).sum(1)
