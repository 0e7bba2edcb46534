"""Which rows make the batch of a step: a pure function of the seed and the step's number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from datasets import Dataset as Rows
from torch.utils.data import Dataset

from moebook.data import IGNORED, encode, padded
from moebook.errors import refuse

POOL = 8
"""Batches that are sorted by length together.

Measured on rows of 17 to 80 tokens in batches of 32, a model of 1 M parameters on one core: sorted
in pools of 8 batches they need 30 % fewer tokens, padding included, than in random order (35 % when
all are sorted, but then the tasks of a mixture come one after another). Packing rows end to end
under a block-diagonal mask is slower still than sorting, by 5 % in lines of 128 tokens and 17 % in
lines of 256, since attention works on whole lines; and it bars the way to skipping logits (below),
which saves another fifth.
"""


class Batches(Dataset):
    """Items are the batches of steps from ``start`` on: rows of similar length, shuffled anew.

    Rows are drawn without replacement within an epoch; batches of an epoch come in random order.
    Each comes in as many items as it has parts, its rows dealt out among them.

    Args:
        rows: ``input_ids`` and ``labels`` of equal length in each row; labels are -100 where
            nothing is learnt (the prompt). More columns are ignored.
        size: B, rows a batch; the last batch of an epoch may be smaller.
        seed: Any non-negative integer.
        pad_id: Token that fills short rows on the right; masked, so that its value is irrelevant.
        parts: Items a step: processes times parts that each computes one after the other.

    Attributes:
        start: Step of the first item.
        length: Number of steps; any, since they go on without end.

    Raises:
        Refusal: ``E-DATA`` for no rows, unequal lengths, or a row without any label.
    """

    def __init__(self, rows: Rows, size: int, *, seed: int, pad_id: int, parts: int = 1) -> None:
        columns = rows.select_columns(["input_ids", "labels"]).with_format(None)[:]
        self.ids: list[list[int]] = columns["input_ids"]
        self.labels: list[list[int]] = columns["labels"]
        self.lengths = np.array([len(ids) for ids in self.ids])
        self.size, self.seed, self.pad_id, self.parts = size, seed, pad_id, parts
        self.start, self.length = 0, self.per_epoch
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])
        self._refuse_bad_rows()

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the rows."""
        return -(-len(self.ids) // self.size)

    def __len__(self) -> int:
        return self.length * self.parts

    def __getitem__(self, item: int) -> dict[str, Any]:
        """Part ``item % parts`` of a step; one that has no rows is a row without labels."""
        if not 0 <= item < len(self):
            raise IndexError(item)
        step, part = divmod(item, self.parts)
        rows = self.rows(self.start + step)
        if len(mine := rows[part :: self.parts]):
            return self.collate(mine)
        batch = self.collate(rows[:1])
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}

    def share(self, step: int, part: int) -> float:
        """Share of a step's tokens, padding left out, that are in a part."""
        return float(self.lengths[self.rows(step)[part :: self.parts]].sum() / self.tokens(step))

    def rows(self, step: int) -> np.ndarray:
        """Numbers of the rows in the batch of a step, ``[B]``."""
        epoch, place = divmod(step, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        return self._epoch[1][place]

    def tokens(self, step: int) -> int:
        """Tokens in the batch of a step, padding left out."""
        return int(self.lengths[self.rows(step)].sum())

    def digest(self) -> str:
        """Hash of all rows (sha256, hex)."""
        return sha256(json.dumps([self.ids, self.labels]).encode()).hexdigest()

    def collate(self, rows: np.ndarray) -> dict[str, Any]:
        """Pad rows on the right to ``[B, T]`` and leave out the logits that no label needs.

        ``labels`` keeps the last columns only, from one before the first label of any row, and
        ``logits_to_keep`` says how many: the head and the loss then skip the prompts' common part.
        """
        ids, mask = padded([self.ids[row] for row in rows], self.pad_id)
        labels, _ = padded([self.labels[row] for row in rows], IGNORED)
        first = int((labels[:, 1:] != IGNORED).any(0).int().argmax())
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels[:, first:].clone(),
            "logits_to_keep": ids.shape[1] - first,
        }

    def _order(self, epoch: int) -> list[np.ndarray]:
        """Shuffle the rows, sort each pool by length, cut it into batches, shuffle the batches."""
        rng = np.random.default_rng([self.seed, epoch])
        shuffled = rng.permutation(len(self.ids))
        width = POOL * self.size
        pools = [shuffled[at : at + width] for at in range(0, len(shuffled), width)]
        batches = []
        for pool in pools:
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += [pool[at : at + self.size] for at in range(0, len(pool), self.size)]
        return [batches[place] for place in rng.permutation(len(batches))]

    def _refuse_bad_rows(self) -> None:
        if not self.ids:
            refuse("E-DATA", "training data: no rows; expected at least one")
        for row, (ids, labels) in enumerate(zip(self.ids, self.labels, strict=True)):
            if len(ids) != len(labels):
                refuse("E-DATA", f"row {row}: {len(ids)} input_ids but {len(labels)} labels")
            if all(label == IGNORED for label in labels[1:]):
                refuse(
                    "E-DATA",
                    f"row {row}: every label is masked (-100), so there is nothing to learn from; "
                    "expected an answer after the prompt",
                )


def fixed(
    parts: Mapping[str, Sequence[Mapping[str, str]]],
    tokenizer: Any,
    *,
    max_length: int,
    seed: int = 0,
    size: int = 32,
) -> dict[str, list[dict[str, Any]]]:
    """Encode rows and pad them to batches once, for measuring many models on the same tokens.

    Args:
        parts: Rows by name, a domain's for instance.
        tokenizer: Of the models.
        max_length: Longer rows are left out, tokens.
        seed: Of the batches' order.
        size: B, rows a batch.

    Returns:
        The same names, each with its batches ``[B, T]``.
    """
    pad_id, found = tokenizer.pad_token_id or 0, {}
    for name, rows in parts.items():
        encoded = encode(rows, tokenizer, max_length=max_length)
        batches = Batches(encoded, size, seed=seed, pad_id=pad_id)
        found[name] = [batches[place] for place in range(len(batches))]
    return found
