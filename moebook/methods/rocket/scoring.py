"""How well each LoRA of a bank models and solves the K shots: perplexity and accuracy (Eq. 1-5)."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook.data import IGNORED, encode
from moebook.data.tasks import KNOWN
from moebook.data.tasks.task import first_line
from moebook.errors import nearest, refuse
from moebook.methods.rocket import bank as banks
from moebook.methods.rocket import generation
from moebook.methods.rocket.attachment import attached
from moebook.methods.rocket.loras import Lora
from moebook.nn.modes import evaluating
from moebook.runtime import progress

Row = Mapping[str, str]
REDUCTIONS = ("mean", "sum")


def draw(rows: Sequence[Row], shots: int, seed: int) -> list[Row]:
    """Draw the K shots from annotated rows without replacement.

    Raises:
        Refusal: E-KSHOT when there are fewer rows than K.
    """
    if not 1 <= shots <= len(rows):
        refuse("E-KSHOT", f"have {len(rows)} annotated rows, need K = {shots}")
    return random.Random(f"rocket/shots/{seed}").sample(list(rows), shots)


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    bank: Mapping[str, Lora],
    shots: Sequence[Row],
    *,
    reduction: str = "mean",
    format: str = "camel",
    tokens: int = 4096,
) -> pd.DataFrame:
    """Measure the log-perplexity of each shot's answer under each LoRA (Eq. 1, 2), in nats.

    Of the answer as it stands: give shots from `rationales.expand` for the reasoning perplexity.
    Kept as logarithms, since Eq. 1's own sum overflows single precision past 88 nats. Answers are
    scored with their end token, as they are trained on. All LoRAs share one copy of the base;
    (LoRA, shot) pairs run in batches sorted by length, with dropout off, and the head runs on the
    answers alone.

    Args:
        model: The base, unaltered.
        tokenizer: Its tokenizer.
        bank: LoRAs by name.
        shots: Rows with prompt and answer.
        reduction: ``"mean"`` over the answer's tokens (released), ``"sum"`` (Eq. 1 literally).
        format: A key of `data.chat.FORMATS`.
        tokens: Most tokens a forward pass, padding included; at least one row runs.

    Returns:
        ``[N, S]``, indexed by name, one column a shot.

    Raises:
        Refusal: E-CHOICE for another reduction, E-KSHOT without shots or for one above the model's
            length, E-BANK for an empty bank or LoRAs that differ in kind.
    """
    if reduction not in REDUCTIONS:
        refuse("E-CHOICE", f"reduction is {reduction!r}; {nearest(reduction, REDUCTIONS)}")
    items = _encoded(model, tokenizer, bank, shots, format)
    loras = list(bank.values())
    found = np.zeros((len(loras), len(items)))
    with evaluating(model), torch.no_grad():
        for group, lines in _batches(items, len(loras), tokens):
            with attached(model, loras[group]):
                batch = [items[line] for line in lines]
                found[group, lines] = _nats(model, batch, len(loras[group]), reduction)
    return pd.DataFrame(found, index=list(bank))


def accuracy(
    model: nn.Module,
    tokenizer: Any,
    bank: Mapping[str, Lora],
    shots: Sequence[Row],
    *,
    post: Callable[[str], str] | None = None,
    limit: int | None = None,
    format: str = "camel",
) -> pd.DataFrame:
    """Say which shots each LoRA solves: greedy answers equal to the gold ones (Eq. 5), true or not.

    Eq. 5 divides by N where it means K; the mean over a row of what is returned is Acc.

    Args:
        model: The base, unaltered.
        tokenizer: Its tokenizer.
        bank: LoRAs by name.
        shots: Rows with prompt and answer (without rationales).
        post: f of Eq. 5, applied to both answers; by default that of the row's task in
            `data.tasks`, else the first line.
        limit: Most new tokens; by default the tasks' own, else 64.
        format: A key of `data.chat.FORMATS`.

    Returns:
        ``[N, S]``, indexed by name, one column a shot.

    Raises:
        Refusal: As `perplexity` does.
    """
    items = _encoded(model, tokenizer, bank, shots, format)
    contexts = [item["input_ids"][: item["labels"].count(IGNORED)] for item in items]
    tasks = [KNOWN.get(row.get("task", "")) for row in shots]
    most = limit or max(task.max_new_tokens if task else 64 for task in tasks)
    posts = [post or (task.normalise if task else first_line) for task in tasks]
    found = {}
    for name, lora in progress(bank.items(), "accuracy", len(bank)):
        with attached(model, [lora]):
            texts = generation.greedy(model, tokenizer, contexts, limit=most)
        answers = zip(posts, texts, shots, strict=True)
        found[name] = [f(text) == f(row["answer"]) for f, text, row in answers]
    return pd.DataFrame.from_dict(found, orient="index")


def scores(perplexities: pd.DataFrame, accuracies: pd.DataFrame) -> pd.DataFrame:
    """Bring both measures to one number a LoRA: the logarithm of PPL_R (Eq. 4), and Acc (Eq. 5).

    A LoRA whose perplexity is not finite on some shot is left out and named in a warning
    (W-NONFINITE).

    Args:
        perplexities: From `perplexity`.
        accuracies: From `accuracy`.

    Returns:
        Indexed by name: ``perplexity`` (log of the sum over shots of exp, in nats), ``accuracy``
        (share). ``attrs["excluded"]`` lists who was left out.

    Raises:
        Refusal: E-BANK when nobody is left, or the two measures are of different LoRAs.
    """
    if list(perplexities.index) != list(accuracies.index):
        refuse("E-BANK", "perplexities and accuracies are of different LoRAs; score one bank")
    values = perplexities.to_numpy(dtype=np.float64)
    good = np.isfinite(values).all(axis=1)
    excluded = [str(name) for name in perplexities.index[~good]]
    if excluded:
        warnings.warn(
            f"W-NONFINITE: no finite perplexity from {', '.join(excluded)}; left out", stacklevel=2
        )
    if not good.any():
        refuse("E-BANK", f"none of {len(good)} LoRAs has a finite perplexity on the shots")
    table = pd.DataFrame(
        {
            "perplexity": np.logaddexp.reduce(values[good], axis=1),
            "accuracy": accuracies[good].mean(axis=1).astype(np.float64),
        },
        index=perplexities.index[good],
    )
    table.attrs["excluded"] = excluded
    return table


def _encoded(
    model: nn.Module, tokenizer: Any, bank: Mapping[str, Lora], shots: Sequence[Row], format: str
) -> list[dict[str, Any]]:
    if not bank:
        refuse("E-BANK", "the bank is empty: nothing to score")
    for lora in bank.values():
        banks.alike(next(iter(bank.values())), lora)
    if not shots:
        refuse("E-KSHOT", "have 0 annotated rows, need at least K = 1")
    items = list(encode(shots, tokenizer, format=format, max_length=sys.maxsize))
    config: Any = model.config
    most = getattr(config, "max_position_embeddings", None) or sys.maxsize
    longest = max(range(len(items)), key=lambda line: items[line]["length"])
    if items[longest]["length"] > most:
        refuse(
            "E-KSHOT",
            f"shot {longest} has {items[longest]['length']} tokens, the model takes {most}",
        )
    return items


def _batches(
    items: list[dict[str, Any]], adapters: int, tokens: int
) -> Iterator[tuple[slice, list[int]]]:
    """Cut LoRAs and shots into blocks of at most ``tokens`` tokens, shots sorted by length."""
    order = sorted(range(len(items)), key=lambda line: items[line]["length"])
    longest = items[order[-1]]["length"]
    together = min(adapters, max(1, tokens // longest))
    size = max(1, tokens // (longest * together))
    for start in range(0, adapters, together):
        for at in range(0, len(order), size):
            yield slice(start, start + together), order[at : at + size]


def _nats(
    model: nn.Module, batch: list[dict[str, Any]], adapters: int, reduction: str
) -> np.ndarray[Any, Any]:
    """Return the answers' negative log-likelihoods ``[G, B]``, summed or averaged over tokens."""
    width = max(item["length"] for item in batch)
    ids, mask = (torch.zeros(len(batch), width, dtype=torch.long) for _ in range(2))
    labels = torch.full((len(batch), width), IGNORED)
    for line, item in enumerate(batch):
        part = slice(0, item["length"])
        ids[line, part], mask[line, part] = torch.tensor(item["input_ids"]), 1
        labels[line, part] = torch.tensor(item["labels"])
    first = min(item["labels"].count(IGNORED) for item in batch)
    device = next(model.parameters()).device
    ids, mask, labels = (t.repeat(adapters, 1).to(device) for t in (ids, mask, labels))
    targets = labels[:, first:]
    logits = model(
        input_ids=ids[:, :-1],
        attention_mask=mask[:, :-1],
        logits_to_keep=targets.shape[1],
        use_cache=False,
    ).logits
    losses = F.cross_entropy(
        logits.float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    ).double()
    total = losses.sum(1)
    answer: Tensor = total / (targets != IGNORED).sum(1) if reduction == "mean" else total
    return answer.view(adapters, -1).cpu().numpy()
