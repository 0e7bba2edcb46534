"""Which rows make the batch of a step: a pure function of the seed and the step's number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from datasets import Dataset as Rows
from pydantic import SkipValidation
from torch import nn

from moebook.data import IGNORED, encode, padded
from moebook.errors import refuse, shown
from moebook.models.conventions import check
from moebook.nn import evaluating
from moebook.nn.batch import longest, vocabulary
from moebook.settings import Count, Seed, checked

# Batches sorted by length together: 30 % fewer tokens than in random order on rows
# of 17 to 80. Packing under a block-diagonal mask was 5 to 17 % slower.
POOL = 8


def check_encoded(name: str, rows: object) -> None:
    """Refuse what is no table of encoded rows, by its type alone: rows may be confidential."""
    if not isinstance(rows, Rows):
        have = f"{name} is {type(rows).__name__}"
        refuse("E-TYPE", f"{have}, expected what data.encode returns")


def _check_tokens(name: str, column: Sequence[Any]) -> None:
    """Refuse rows that are no lists of whole numbers (E-TYPE)."""
    for row, tokens in enumerate(column):
        if not isinstance(tokens, list):
            refuse("E-TYPE", f"row {row}: {name} is {shown(tokens)}, expected a list")
        strange = [token for token in tokens if type(token) is not int]
        if strange:
            wanted = "expected whole numbers: see data.encode"
            refuse("E-TYPE", f"row {row}: {name} hold {shown(strange[0])}, {wanted}")


class Batches:
    """The batch of each step: B = ``size`` rows of similar length, without end.

    An epoch holds every row once, in batches in random order; its last batch may be smaller. Rows
    have ``input_ids`` and ``labels`` of equal length, -100 where nothing is learnt (the prompt).
    """

    @checked
    def __init__(
        self, rows: SkipValidation[Rows], size: Count, *, seed: Seed, pad_id: int
    ) -> None:
        check_encoded("rows", rows)
        for name in ("input_ids", "labels"):
            if name not in rows.column_names:
                have = ", ".join(rows.column_names)
                refuse("E-DATA", f"rows have {have}, expected {name}: see data.encode")
        columns = rows.select_columns(["input_ids", "labels"]).with_format(None)[:]
        self.row_ids: list[list[int]] = columns["input_ids"]
        self.row_labels: list[list[int]] = columns["labels"]
        _check_tokens("input_ids", self.row_ids)
        _check_tokens("labels", self.row_labels)
        self.lengths = np.array([len(ids) for ids in self.row_ids])
        self.size = size
        self.seed = seed
        self.pad_id = pad_id
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])
        if not self.row_ids:
            refuse("E-DATA", "training data: no rows; expected at least one")
        for row, (ids, labels) in enumerate(
            zip(self.row_ids, self.row_labels, strict=True)
        ):
            if len(ids) != len(labels):
                refuse(
                    "E-DATA",
                    f"row {row}: {len(ids)} input_ids but {len(labels)} labels",
                )
            if all(label == IGNORED for label in labels[1:]):
                refuse(
                    "E-DATA",
                    f"row {row}: every label is masked (-100), nothing can be learnt",
                )

    def check(self, vocabulary: int, longest: int) -> None:
        """Refuse rows that a model of so many token ids, and tokens a row, cannot take."""
        length = self.lengths.max()
        if length > longest:
            where = f"row {self.lengths.argmax()} has {length} tokens"
            refuse("E-RANGE", f"{where}, the model takes {longest}: lower max_length")
        ids = {*chain(*self.row_ids)}
        labels = {*chain(*self.row_labels)} - {IGNORED}
        for name, used in (
            ("input_ids", ids),
            ("pad_id", {self.pad_id}),
            ("labels", labels),
        ):
            odd = [token for token in used if not 0 <= token < vocabulary]
            if odd:
                known = f"the model knows 0 to {vocabulary - 1}: use its own tokenizer"
                refuse("E-VOCAB", f"{name}: {min(odd)} is no token, {known}")

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the rows."""
        return -(-len(self.row_ids) // self.size)

    def __getitem__(self, step: int) -> dict[str, Any]:
        """The whole batch of a step, see `collate`."""
        return self.collate(self.rows(step))

    def part(self, step: int, part: int, parts: int) -> tuple[dict[str, Any], float]:
        """Return one of a step's parts (if empty, a row without labels) and its share of tokens."""
        rows = self.rows(step)
        # Rows lie in the order of their lengths: dealt in turn, the parts are alike.
        dealt = rows[part::parts]
        # A process without rows runs the model all the same: the others wait for it.
        batch = self.collate(dealt if len(dealt) else rows[:1])
        if not len(dealt):
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        return batch, float(self.lengths[dealt].sum() / self.tokens(step))

    def labels(self, step: int) -> float:
        """Number of labels in the batch of a step; no token comes before the first of a row."""
        labels: list[int] = []
        for row in self.rows(step):
            labels += self.row_labels[row][1:]
        return float(len(labels) - labels.count(IGNORED))

    def rows(self, step: int) -> np.ndarray:
        """Numbers of the rows in the batch of a step, ``[B]``."""
        epoch, place = divmod(step, self.per_epoch)
        # The order of one epoch is kept: steps come one after another.
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        return self._epoch[1][place]

    def tokens(self, step: int) -> int:
        """Tokens in the batch of a step, padding left out."""
        return int(self.lengths[self.rows(step)].sum())

    def digest(self) -> str:
        """Hash of all rows (sha256, hex)."""
        total = sha256()
        for row in zip(self.row_ids, self.row_labels, strict=True):
            total.update(json.dumps(row).encode())
        return total.hexdigest()

    def collate(self, rows: np.ndarray) -> dict[str, Any]:
        """Pad rows to ``[B, T]``; labels and logits begin one before the first label of any."""
        ids, mask = padded([self.row_ids[row] for row in rows], self.pad_id)
        labels, _ = padded([self.row_labels[row] for row in rows], IGNORED)
        # The place that predicts the first label: no logit before it is asked for.
        first = int((labels[:, 1:] != IGNORED).any(0).int().argmax())
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels[:, first:].clone(),  # [B, T - first]
            # No number: behind a slice, a view, a frozen head is multiplied row by row.
            "logits_to_keep": torch.arange(first, ids.shape[1]),
        }

    def _order(self, epoch: int) -> list[np.ndarray]:
        """Shuffle the rows, sort each pool by length, cut it into batches, shuffle the batches."""
        rng = np.random.default_rng([self.seed, epoch])
        shuffled = rng.permutation(len(self.row_ids))
        batches = []
        for pool in np.split(
            shuffled, range(POOL * self.size, len(shuffled), POOL * self.size)
        ):
            # Stable, so that equal lengths stay in the order of the seed.
            by_length = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += np.split(by_length, range(self.size, len(pool), self.size))
        return [batches[place] for place in rng.permutation(len(batches))]


def fixed(
    parts: Mapping[str, Sequence[Mapping[str, str]]], tokenizer: Any, *, max_length: int
) -> dict[str, list[dict[str, Any]]]:
    """Encode rows of up to ``max_length`` tokens, by name, in batches that serve many models."""
    batches = {}
    for name, rows in parts.items():
        encoded = encode(rows, tokenizer, max_length=max_length)
        drawn = Batches(encoded, 32, seed=0, pad_id=tokenizer.pad_token_id or 0)
        batches[name] = [drawn[step] for step in range(drawn.per_epoch)]
    return batches


@torch.no_grad()
def nats(model: nn.Module, rows: Rows, *, pad_id: int = 0, batch: int = 32) -> float:
    """Return the mean negative log-likelihood of the rows' labels, nats a token; dropout is off.

    >>> from moebook import data, models
    >>> model, tokenizer = models.load("nano")
    >>> rows = data.encode(data.mixture({"sums": 8}, "test"), tokenizer)
    >>> 0 < nats(model, rows, pad_id=tokenizer.pad_token_id) < 8
    True
    """
    device = next(model.parameters()).device
    total = 0.0
    batches = Batches(rows, batch, seed=0, pad_id=pad_id)
    batches.check(vocabulary(model), longest(model))
    # In the order of length, so that padding is least.
    order = np.argsort(batches.lengths, kind="stable")
    label_count = 0
    for row in batches.row_labels:
        # Nothing stands before the first token that could foretell it.
        label_count += sum(label != IGNORED for label in row[1:])
    with evaluating(model):
        check(model, loss=True)
        if batches.per_epoch > 1 and not getattr(model, "accepts_loss_kwargs", True):
            refuse(
                "E-MODEL",
                f"{type(model).__name__} averages its loss: one batch of all rows",
            )
        for chosen in np.array_split(order, batches.per_epoch):
            inputs = send_to_device(batches.collate(chosen), device)
            # A batch's sum over the labels of all rows: the batches add up to the mean.
            asked = {"num_items_in_batch": label_count, "use_cache": False}
            total += model(**inputs, **asked).loss.item()
    if not math.isfinite(total):
        refuse(
            "E-NONFINITE",
            f"the loss on {len(rows)} rows is {total}: weights are far too large",
        )
    return total
