"""What a model is called with: token ids, a mask and labels that fit it and one another."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from moebook.errors import refuse
from moebook.kernels.dispatch import shapes

IGNORED = -100  # label that the loss leaves out
IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"


def vocabulary(model: nn.Module) -> int:
    """Return V, by the rows of the model's input embeddings, if it has a way to tell them."""
    if not hasattr(model, "get_input_embeddings"):
        return sys.maxsize
    return len(model.get_input_embeddings().weight)


def longest(model: nn.Module) -> int:
    """Return how many tokens a row may have by the model's configuration, if known."""
    config = getattr(model, "config", None)
    return getattr(config, "max_position_embeddings", 0) or sys.maxsize


def check_batch(
    who: str, model: nn.Module, batch: Mapping[str, Any], *, needs: Collection[str] = ()
) -> None:
    """Refuse a batch of token ids ``[B, T]`` that a user brings and a model cannot take.

    ``needs`` names what the batch must hold beside them, of labels one at least that is asked.
    ``attention_mask [B, T]`` holds 1 and 0, ``labels [B, T]`` tokens, or `IGNORED`; those of
    `training.batches`, which go with ``logits_to_keep``, begin later. Values on a GPU are not
    looked at, which would wait for it.
    """
    if not isinstance(batch, Mapping):
        refuse(
            "E-TYPE",
            f"{who}: the batch is a {type(batch).__name__}, expected {IDS} by name",
        )
    for name in (IDS, *needs):
        if batch.get(name) is None:
            have = ", ".join(batch) or "nothing"
            refuse("E-DATA", f"{who}: the batch holds {have}, expected {name}")

    # Beside ``logits_to_keep`` labels may be fewer than tokens: a letter of their own.
    length = "T" if "logits_to_keep" not in batch else "S"
    dims = {
        IDS: ("B T", "int"),
        MASK: ("B T", "real"),
        LABELS: (f"B {length}", "int64"),
    }
    held = {name: batch[name] for name in dims if batch.get(name) is not None}
    for name, tensor in held.items():
        if not isinstance(tensor, Tensor):
            fix = "ask the tokenizer for return_tensors='pt'"
            have = f"{who}: {name} is a {type(tensor).__name__}, expected a tensor"
            refuse("E-TYPE", f"{have}; {fix}")
    named = {name: (tensor, *dims[name]) for name, tensor in held.items()}
    shapes(who, named, empty="")
    _check_length(who, model, batch[IDS])

    if LABELS in needs and batch[LABELS].device.type == "cpu" and not _asks(batch):
        refuse(
            "E-DATA", f"{who}: no token of the batch has a label, so there is no loss"
        )
    if LABELS in held:
        # -100 is allowed but no token: 0, which every vocabulary has, takes its place.
        labels = held[LABELS]
        held[LABELS] = labels.masked_fill(labels == IGNORED, 0)
    known = vocabulary(model)
    ends = {IDS: known, MASK: 2, LABELS: known}
    for name, tensor in held.items():
        if tensor.device.type == "cpu":
            _check_range(who, name, tensor, ends[name])


def _check_length(who: str, model: nn.Module, ids: Tensor) -> None:
    """Refuse rows ``[B, T]`` longer than the model, which would compute on and say nothing."""
    length = ids.shape[1]
    most = longest(model)
    if length > most:
        fix = "lower length, or max_length, at which rows are cut"
        refuse(
            "E-RANGE", f"{who}: rows of {length} tokens, the model takes {most}: {fix}"
        )


def _asks(batch: Mapping[str, Any]) -> bool:
    """Whether any token is to be foretold: the first column's is not, whatever its label."""
    asked = batch[LABELS][:, 1:] != IGNORED
    return bool(asked.any())


def _check_range(who: str, name: str, tensor: Tensor, end: int) -> None:
    """Refuse numbers outside [0, end), by what they are, and a mask of others than 0 and 1."""
    lowest = tensor.min().item()
    highest = tensor.max().item()
    is_whole = name != MASK or bool(((tensor == 0) | (tensor == 1)).all())
    if lowest >= 0 and highest < end and is_whole:
        return
    have = f"{who}: {name} are {lowest} to {highest}"
    if name == MASK:
        refuse("E-RANGE", f"{have}, expected 1 and 0")
    fix = "use its own tokenizer"
    if name == LABELS and lowest < 0:
        fix = f"say {IGNORED} for none"
    refuse("E-VOCAB", f"{have}, the model knows 0 to {end - 1}: {fix}")
