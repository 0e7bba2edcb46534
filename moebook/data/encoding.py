"""Rows become token ids whose prompt is masked, so that the loss falls on the answer only."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from datasets import Dataset

from moebook.data import chat
from moebook.errors import refuse

IGNORED = -100  # label that the loss leaves out


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Tokenize texts."""


def encode(
    rows: Sequence[Mapping[str, str]],
    tokenizer: Tokenizer,
    *,
    format: str = "camel",
    max_length: int,
) -> Dataset:
    """Tokenize rows in a chat format, with labels on the answer and its end token only.

    Prompt and answer are tokenized apart, so the border never falls inside a token. A format's
    beginning token is left out for a tokenizer that has none (Qwen's): its models never saw one.

    Args:
        rows: Dictionaries with prompt, answer and, optionally, system.
        tokenizer: With an end-of-sequence token.
        format: A key of `chat.FORMATS`.
        max_length: Longest row in tokens, at least 2. Longer rows are left out, counted and
            reported by a warning (W-LONG); none is cut.

    Returns:
        Columns input_ids, labels (-100 on the prompt) and length (tokens), in the rows' order.

    Raises:
        Refusal: E-DATA when there are no rows, none is short enough, a field is missing or the
            tokenizer has no end token; E-RANGE for max_length below 2.
    """
    if max_length < 2:
        refuse("E-RANGE", f"max_length is {max_length}, expected at least 2 tokens")
    if not rows:
        refuse("E-DATA", "no rows to encode; expected at least one")
    if tokenizer.eos_token_id is None:
        refuse("E-DATA", "the tokenizer has no end-of-sequence token; set tokenizer.eos_token")
    form = chat.find(format)
    pairs = [_rendered(row, form, index) for index, row in enumerate(rows)]
    start = [tokenizer.bos_token_id] if form.bos and tokenizer.bos_token_id is not None else []
    before, learnt = (
        tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        for texts in zip(*pairs, strict=True)
    )
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": []}
    for prompt, answer in zip(before, learnt, strict=True):
        ids = [*start, *prompt, *answer, tokenizer.eos_token_id]
        if len(ids) <= max_length:
            masked = len(ids) - len(answer) - 1
            columns["input_ids"].append(ids)
            columns["labels"].append([IGNORED] * masked + ids[masked:])
            columns["length"].append(len(ids))
    _report(len(rows) - len(columns["length"]), len(rows), max_length)
    return Dataset.from_dict(columns)


def _rendered(row: Mapping[str, str], form: chat.Format, index: int) -> tuple[str, str]:
    missing = [name for name in ("prompt", "answer") if not isinstance(row.get(name), str)]
    if missing:
        refuse("E-DATA", f"row {index}: field '{missing[0]}' is missing or not text")
    return form.render(row["prompt"], row["answer"], row.get("system") or "")


def _report(dropped: int, rows: int, max_length: int) -> None:
    """Warn of rows that were left out; refuse when nothing is left."""
    if dropped == rows:
        refuse(
            "E-DATA",
            f"all {rows} rows are longer than max_length {max_length} tokens; "
            "nothing is left to train on",
        )
    if dropped:
        warnings.warn(
            f"W-LONG: {dropped} of {rows} rows are longer than max_length {max_length} "
            "tokens and were left out",
            stacklevel=3,
        )
