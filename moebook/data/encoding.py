"""Rows become token ids: the papers' chat formats, labels on answers, padding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor

from moebook.data.reading import field
from moebook.errors import refuse, refuse_unknown
from moebook.kernels.dispatch import natural
from moebook.nn.batch import IGNORED


class Format(NamedTuple):
    """How one exchange becomes text, which the end-of-sequence token always follows."""

    # Of prompt, answer and system, which may be empty: the text before the answer, and
    # the answer's.
    render: Callable[[str, str, str], tuple[str, str]]
    bos: bool  # whether the beginning-of-sequence token comes first


def camel(prompt: str, answer: str, system: str = "") -> tuple[str, str]:
    """PESC's form: `### Human:`, `### Assistant:`, each on a line of its own."""
    head = f"### System:\n{system}\n" if system else ""
    return f"{head}### Human:\n{prompt}\n### Assistant:\n", answer


def deepseek(prompt: str, answer: str, system: str = "") -> tuple[str, str]:
    """ESFT's form: `User: ...`, an empty line, `Assistant:`, a space, the answer."""
    head = f"{system}\n\n" if system else ""
    return f"{head}User: {prompt}\n\nAssistant:", f" {answer}"


FORMATS = {"camel": Format(camel, bos=True), "deepseek": Format(deepseek, bos=False)}


def encode(
    rows: Sequence[Mapping[str, str]],
    tokenizer: Any,
    *,
    format: str = "camel",
    max_length: int | None = None,
) -> Dataset:
    """Tokenize rows in a chat format, with labels on the answer and its end token only.

    Prompt and answer are tokenized apart, so the border never falls inside a token. A
    tokenizer without a beginning token (Qwen's) gets none. Rows have prompt, answer
    and, optionally, system; ``format`` is a key of `FORMATS`; rows above ``max_length``
    tokens are left out and reported by a warning (W-LONG). Without one all stay, and
    training refuses those that are too long for its model. Returns columns input_ids,
    labels (-100 on the prompt) and length (tokens).

    >>> from moebook import models
    >>> _, tokenizer = models.load("nano")
    >>> line = encode([{"prompt": "1 + 1 =", "answer": "2"}], tokenizer)[0]
    >>> learnt = [label for label in line["labels"] if label != IGNORED]
    >>> tokenizer.decode(learnt, skip_special_tokens=True)
    '2'
    """
    if max_length is not None:
        natural("encode", "max_length", max_length)
        if max_length < 2:
            refuse("E-RANGE", f"max_length is {max_length}, expected at least 2 tokens")
    if not isinstance(rows, (Sequence, Dataset)):
        refuse("E-TYPE", f"rows is a {type(rows).__name__}, expected a list")
    if not rows:
        refuse("E-DATA", "no rows to encode; expected at least one")
    refuse_unknown(format, FORMATS, "E-DATA", f"unknown chat format '{format}':")
    eos = tokenizer.eos_token_id
    if eos is None:
        missing = "the tokenizer has no end-of-sequence token"
        refuse("E-DATA", f"{missing}; set tokenizer.eos_token")
    form = FORMATS[format]
    prompts = []
    answers = []
    for index, row in enumerate(rows):
        prompt, answer = _rendered(row, form, index)
        prompts.append(prompt)
        answers.append(answer)
    before = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    learnt = tokenizer(answers, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    start = [bos] if form.bos and bos is not None else []
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": []}
    for prompt_ids, answer_ids in zip(before, learnt, strict=True):
        ids = [*start, *prompt_ids, *answer_ids, eos]
        if max_length is None or len(ids) <= max_length:
            masked = len(ids) - len(answer_ids) - 1
            columns["input_ids"].append(ids)
            columns["labels"].append([IGNORED] * masked + ids[masked:])
            columns["length"].append(len(ids))
    long = len(rows) - len(columns["length"])
    longer = f"rows are longer than max_length {max_length} tokens"
    if long == len(rows):
        refuse("E-DATA", f"all {len(rows)} {longer}; nothing is left to train on")
    if long:
        share = f"{long} of {len(rows)}"
        warnings.warn(f"W-LONG: {share} {longer} and were left out", stacklevel=2)
    return Dataset.from_dict(columns)


def _rendered(row: Mapping[str, str], form: Format, index: int) -> tuple[str, str]:
    where = f"row {index}"
    prompt = field(row, "prompt", where)
    answer = field(row, "answer", where)
    return form.render(prompt, answer, field(row, "system", where, default=""))


def padded(
    rows: Sequence[Sequence[int]], fill: int, *, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rows ``[B, T]``, filled up on the right (or left), and their mask.

    Both are int64; the mask holds 1 and 0.
    """
    if fill is None:
        missing = "nothing to fill short rows up with (fill is None)"
        refuse("E-TYPE", f"{missing}; give a token, such as tokenizer.eos_token_id")
    if not rows:
        refuse("E-DATA", "no rows to pad; expected at least one")
    tokens = _whole([fill, *chain.from_iterable(rows)])
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    places = torch.arange(int(lengths.max()))  # [T]
    fillings = len(places) - lengths
    mask = places >= fillings if left else places < lengths
    filled = tokens[:1].expand(mask.shape).clone()
    filled[mask] = tokens[1:]
    return filled, mask.long()


def _whole(tokens: list[int]) -> Tensor:
    """Return token ids as int64, or refuse what is no whole number of 64 bits."""
    # Among numbers torch would take True for 1.
    if bool in set(map(type, tokens)):
        refuse("E-TYPE", "token ids are torch.bool, expected whole numbers")
    try:
        ids = torch.tensor(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        refuse("E-TYPE", f"token ids are not whole numbers of 64 bits: {error}")
    if ids.dtype != torch.int64:
        refuse("E-TYPE", f"token ids are {ids.dtype}, expected whole numbers")
    return ids
