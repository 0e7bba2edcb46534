"""Which rows make the batch of a step: a pure function of the seed and the step's number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from datasets import Dataset as Rows

from moebook.data import IGNORED, encode, padded
from moebook.errors import refuse

POOL = 8
"""Batches that are sorted by length together.

Measured on rows of 17 to 80 tokens in batches of 32: pools of 8 batches need 30 % fewer tokens with
their padding than random order (35 % when all rows are sorted, but then the tasks of a mixture come
one after another). Packing under a block-diagonal mask was 5 to 17 % slower still, since attention
works on whole lines, and it bars the way to skipping logits (`collate`), which saves another fifth.
"""


class Batches:
    """The batch of each step: rows of similar length, shuffled anew in every epoch, without end.

    Rows are drawn without replacement within an epoch; batches of an epoch come in random order.

    Args:
        rows: ``input_ids`` and ``labels`` of equal length in each row; labels are -100 where
            nothing is learnt (the prompt). More columns are ignored.
        size: B, rows a batch; the last batch of an epoch may be smaller.
        seed: Any non-negative integer.
        pad_id: Token that fills short rows on the right; masked, so that its value is irrelevant.
    """

    def __init__(self, rows: Rows, size: int, *, seed: int, pad_id: int) -> None:
        columns = rows.select_columns(["input_ids", "labels"]).with_format(None)[:]
        self.row_ids: list[list[int]] = columns["input_ids"]
        self.row_labels: list[list[int]] = columns["labels"]
        self.lengths = np.array([len(ids) for ids in self.row_ids])
        self.size, self.seed, self.pad_id = size, seed, pad_id
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])
        self._refuse_bad_rows()

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the rows."""
        return -(-len(self.row_ids) // self.size)

    def __getitem__(self, step: int) -> dict[str, Any]:
        """The whole batch of a step, see `collate`."""
        return self.collate(self.rows(step))

    def part(self, step: int, part: int, parts: int) -> tuple[dict[str, Any], float]:
        """One of the parts among which a step's rows are dealt out, and its share of the tokens.

        A part that has no rows is a row without labels.
        """
        rows = self.rows(step)
        dealt = rows[part::parts]
        batch = self.collate(dealt if len(dealt) else rows[:1])
        if not len(dealt):
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        return batch, float(self.lengths[dealt].sum() / self.tokens(step))

    def labels(self, step: int) -> float:
        """Number of labels in the batch of a step; no token comes before the first of a row."""
        rows = [self.row_labels[row][1:] for row in self.rows(step)]
        return float(sum(label != IGNORED for labels in rows for label in labels))

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
        return sha256(json.dumps([self.row_ids, self.row_labels]).encode()).hexdigest()

    def collate(self, rows: np.ndarray) -> dict[str, Any]:
        """Pad rows on the right to ``[B, T]`` and leave out the logits that no label needs.

        ``labels`` keeps the last columns only, from one before the first label of any row, and
        ``logits_to_keep`` says how many: the head and the loss then skip the prompts' common part.
        """
        ids, mask = padded([self.row_ids[row] for row in rows], self.pad_id)
        labels, _ = padded([self.row_labels[row] for row in rows], IGNORED)
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
        shuffled, batches = rng.permutation(len(self.row_ids)), []
        for pool in _cut(shuffled, POOL * self.size):
            batches += _cut(pool[np.argsort(self.lengths[pool], kind="stable")], self.size)
        return [batches[place] for place in rng.permutation(len(batches))]

    def _refuse_bad_rows(self) -> None:
        if not self.row_ids:
            refuse("E-DATA", "training data: no rows; expected at least one")
        for row, (ids, labels) in enumerate(zip(self.row_ids, self.row_labels, strict=True)):
            if len(ids) != len(labels):
                refuse("E-DATA", f"row {row}: {len(ids)} input_ids but {len(labels)} labels")
            if all(label == IGNORED for label in labels[1:]):
                reason = "every label is masked (-100), so there is nothing to learn from"
                refuse("E-DATA", f"row {row}: {reason}; expected an answer after the prompt")


def _cut(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def fixed(
    parts: Mapping[str, Sequence[Mapping[str, str]]],
    tokenizer: Any,
    *,
    max_length: int,
    seed: int = 0,
    size: int = 32,
) -> dict[str, list[dict[str, Any]]]:
    """Encode rows by name (of a domain, for instance) and batch them once, to measure many models.

    Rows longer than ``max_length`` tokens are left out; batches have ``size`` rows.
    """
    batches = {}
    for name, rows in parts.items():
        encoded = encode(rows, tokenizer, max_length=max_length)
        drawn = Batches(encoded, size, seed=seed, pad_id=tokenizer.pad_token_id or 0)
        batches[name] = [drawn[step] for step in range(drawn.per_epoch)]
    return batches
