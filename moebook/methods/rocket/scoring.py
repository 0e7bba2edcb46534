"""How well each LoRA of a bank models and solves the K shots: perplexity and accuracy (Eq. 1-5)."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from moebook.data import IGNORED, encode, hub
from moebook.data.tasks import KNOWN
from moebook.data.tasks.task import Task, first_line
from moebook.errors import nearest, refuse
from moebook.kernels import bank_scoring
from moebook.kernels.bank_scoring import Answers
from moebook.methods.rocket import bank as banks
from moebook.methods.rocket import generation
from moebook.methods.rocket.attachment import Products, attached, trimmed
from moebook.methods.rocket.catalogue import SOURCES
from moebook.methods.rocket.loras import Lora
from moebook.methods.rocket.packing import Pack, packs
from moebook.models.anatomy import Anatomy, anatomy
from moebook.nn import evaluating
from moebook.runtime import progress

Row = Mapping[str, str]
REDUCTIONS = ("mean", "sum")
JUDGED: dict[str, Task | hub.Source] = {**KNOWN, **hub.CATALOGUE, **SOURCES}
"""What says how its answers are compared, by the task's name in a row."""
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of some models that change logits after the head's product."""


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
    tokens: int | None = None,
) -> pd.DataFrame:
    """Measure the log-perplexity of each shot's answer under each LoRA (Eq. 1, 2), in nats.

    Of the answer as it stands: give shots from `rationales.expand` for the reasoning perplexity.
    Kept as logarithms, since Eq. 1's own sum overflows single precision past 88 nats. Answers are
    scored with their end token, as they are trained on. All LoRAs share one copy of the base.
    Shots are packed without padding, and what several begin with, such as a task's wording, runs
    once (`packing`); a row of the batch is one LoRA on the pack. Dropout is off, and the end of the
    last layer and the head run on the answers alone.

    Args:
        model: The base, unaltered.
        tokenizer: Its tokenizer.
        bank: LoRAs by name.
        shots: Rows with prompt and answer.
        reduction: ``"mean"`` over the answer's tokens (released), ``"sum"`` (Eq. 1 literally).
        format: A key of `data.chat.FORMATS`.
        tokens: Most tokens a forward pass, over all LoRAs in it; at least one shot under one LoRA
            runs. By default 2,048 on a CPU, where more would leave its cache, else 16,384. A pack
            is no longer than the model is wide: attention then costs at most a sixth of the
            products.

    Returns:
        ``[N, S]``, indexed by name, one column a shot.

    Raises:
        Refusal: E-CHOICE for another reduction, E-KSHOT without shots or for one above the model's
            length, E-BANK for an empty bank or LoRAs that differ in kind, E-MODEL for a base
            whose answers cannot be read off a pack.
    """
    if reduction not in REDUCTIONS:
        refuse("E-CHOICE", f"reduction is {reduction!r}; {nearest(reduction, REDUCTIONS)}")
    items = _encoded(model, tokenizer, bank, shots, format)
    loras, (host, head) = list(bank.values()), _readable(model)
    most = tokens or (2048 if head.device.type == "cpu" else 16384)
    made = packs(items, min(host.hidden, most))
    together = max(1, most // max(len(pack.tokens) for pack in made))
    rounds = -(-len(loras) // together)
    found = np.zeros((len(loras), len(items)))
    with evaluating(model), torch.no_grad(), Products():
        for group in np.array_split(np.arange(len(loras)), rounds):
            with attached(model, [loras[number] for number in group]):
                for pack in made:
                    nats = _nats(model, host.decoder, head, pack, len(group), reduction)
                    found[group[:, None], pack.lines] = nats
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
            `data.tasks` or of its data set (GSM8K's is the final number), else the first line, by
            which free text counts as solved only word for word.
        limit: Most new tokens; by default the tasks' or data sets' own, else 64.
        format: A key of `data.chat.FORMATS`.

    Returns:
        ``[N, S]``, indexed by name, one column a shot.

    Raises:
        Refusal: As `perplexity` does; E-SANDBOX for a data set (MBPP) whose answers would have to
            be run.
    """
    posts = [post or _post(row.get("task", "")) for row in shots]
    items = _encoded(model, tokenizer, bank, shots, format)
    contexts = [item["input_ids"][: item["labels"].count(IGNORED)] for item in items]
    tasks = [JUDGED.get(row.get("task", "")) for row in shots]
    most = limit or max(task.max_new_tokens if task else 64 for task in tasks)
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


def _post(task: str) -> Callable[[str], str]:
    """Return f of Eq. 5 for a row's task."""
    known = JUDGED.get(task)
    post = known.normalise if known else first_line
    if post is None:
        refuse(
            "E-SANDBOX",
            f"task '{task}': code is right when it runs, and code that a model wrote is not run "
            "here; give post= to compare texts, or take another task",
        )
    return post


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
    limits = ("max_position_embeddings", "sliding_window")
    most = min(getattr(config, name, None) or sys.maxsize for name in limits)
    longest = max(range(len(items)), key=lambda line: items[line]["length"])
    if items[longest]["length"] > most:
        refuse(
            "E-KSHOT",
            f"shot {longest} has {items[longest]['length']} tokens, the model takes {most}",
        )
    return items


def _readable(model: nn.Module) -> tuple[Anatomy, Tensor]:
    """Return the model's anatomy and its head's weight, if answers can be read off a pack by them.

    Raises:
        Refusal: E-MODEL for a layer without attention, which would see the other samples of a
            pack, and for a head that is more than one product.
    """
    host, head, config = anatomy(model), model.get_output_embeddings(), model.config
    for layer in host.layers:
        if layer.attention is None:
            refuse("E-MODEL", f"layer {layer.index} has no attention: LoRAs cannot be scored on it")
    changes = [name for name in LOGIT_CHANGES if getattr(config, name, None) not in (None, 1)]
    if changes or getattr(head, "bias", None) is not None:
        what = f"config.{changes[0]}" if changes else "a bias"
        refuse("E-MODEL", f"the head of {type(model).__name__} has {what}, expected one product")
    return host, head.weight


def _nats(
    model: nn.Module, decoder: nn.Module, head: Tensor, pack: Pack, loras: int, reduction: str
) -> np.ndarray[Any, Any]:
    """Return the answers' negative log-likelihoods ``[N, S]``, summed or averaged over tokens."""
    ids, positions, seen = (t.to(head.device) for t in (pack.tokens, pack.positions, pack.seen))
    answers = Answers(*(part.to(head.device) for part in pack.answers))
    mask = torch.zeros(seen.shape, dtype=head.dtype, device=head.device)
    places = pack.answers.readers.unique().to(head.device)
    with trimmed(model, loras, len(ids), places):
        hidden = decoder(
            input_ids=ids.expand(loras, -1),
            position_ids=positions.unsqueeze(0),
            attention_mask=mask.masked_fill_(~seen, -torch.inf)[None, None],
            use_cache=False,
        ).last_hidden_state
    nats = bank_scoring(hidden, head, answers)
    per_token = nats / answers.lengths if reduction == "mean" else nats
    return per_token.cpu().numpy()
