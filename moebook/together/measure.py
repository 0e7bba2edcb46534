"""What an arm is measured by: what it forgot, how it takes up a new task, and what it costs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset as Rows
from pydantic import Field
from torch import Tensor, nn

from moebook import training
from moebook.data import passages
from moebook.nn import SplitExperts, evaluating
from moebook.runtime import stopwatch
from moebook.settings import Count, Size, checked
from moebook.together import combining
from moebook.together.budget import measured
from moebook.together.setup import Setup
from moebook.training.loop import Penalty

# Runs in turns that `costs` times, and their steps; the first is a warm-up.
TURNS = 3
STEPS = 6
WRITTEN = 32  # tokens that are generated to time one


@checked
def texts(
    tokenizer: Callable[..., Any],
    size: Count,
    *,
    length: Annotated[Size, Field(ge=2)] = 128,
    seed: int = 0,
) -> Rows:
    """Encode plain texts, ``size`` a domain, every token a label: what a base could do before."""
    drawn = [text for part in passages(size, seed).values() for text in part]
    ids = [
        tokenizer(text, truncation=True, max_length=length)["input_ids"]
        for text in drawn
    ]
    return Rows.from_dict({"input_ids": ids, "labels": ids})


def forgotten(model: nn.Module, base: nn.Module, plain: Rows, *, pad_id: int) -> float:
    """Return how many nats a token plain texts got worse by since the base."""
    after, before = (
        training.nats(each, plain, pad_id=pad_id) for each in (model, base)
    )
    return after - before


def transfer(
    setup: Setup,
    model: nn.Module,
    shots: Rows,
    test: Rows,
    *,
    lr: float,
    steps: int,
    penalty: Penalty | None,
) -> tuple[float, float]:
    """Train a copy on K shots of a new task, as its arm trains; return nats before and after."""
    tuned = deepcopy(model)
    before = training.nats(tuned, test, pad_id=setup.pad_id)
    setup.fit(tuned, shots, lr=lr, steps=steps, penalty=penalty)
    return before, training.nats(tuned, test, pad_id=setup.pad_id)


def stored(model: nn.Module, base: nn.Module) -> int:
    """Bytes of the tensors that the base does not hold: what is kept for this arm beside it."""
    # By content: whatever it is called, what equals a tensor of the base is not kept.
    known = {_digest(tensor) for tensor in base.state_dict().values()}
    added = {_digest(part): part.nbytes for part in model.state_dict().values()}
    for part in model.modules():
        if not isinstance(part, SplitExperts):
            continue
        # The experts that train stand in for as many frozen ones, which nobody keeps.
        for name in ("gate_up_proj", "down_proj"):
            frozen = getattr(part.frozen, name)
            added[_digest(frozen)] -= frozen[part.chosen].nbytes
    return sum(size for digest, size in added.items() if digest not in known)


def _digest(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(
        plain.numpy().tobytes() + str(tuple(tensor.shape)).encode()
    ).digest()


@torch.no_grad()
def _write(model: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    """Return the seconds that one more token takes a batch of prompts."""
    seconds = []
    for tokens in (1, WRITTEN):
        with evaluating(model), stopwatch(next(model.parameters()).device) as timed:
            model.generate(
                **inputs,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                num_beams=1,
                max_time=None,
                stop_strings=None,
            )
        seconds.append(timed.seconds)
    # The difference leaves out what both take: the prompts and the first token.
    return (seconds[1] - seconds[0]) / (WRITTEN - 1)


def costs(
    setup: Setup,
    models: Mapping[str, nn.Module],
    penalties: Mapping[str, Penalty | None],
) -> pd.DataFrame:
    """Measure what each arm costs, a line an arm, in short runs of all that go in turns.

    ``step`` and ``token`` are medians over turns of the seconds of a training step and of a
    generated token; ``peak`` bytes of a step (`step_memory`); ``flops`` of a step's token, padding
    included; ``stored`` bytes (`stored`); ``trained`` parameters.
    """
    first = setup.batches(setup.encoded)[0]
    device = next(setup.base.parameters()).device
    batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in first.items()}
    prompts = {key: batch[key][:8, :16] for key in ("input_ids", "attention_mask")}
    times: dict[str, list[list[float]]] = {name: [] for name in models}
    # All arms in each turn: what slows the machine for a while slows all of them.
    for turn in range(TURNS):
        for name, model in models.items():
            recipe: dict[str, Any] = {
                "steps": STEPS,
                "lr": 1e-6,
                "seed": turn,
                "penalty": penalties[name],
            }
            history = setup.fit(deepcopy(model), setup.encoded, **recipe)
            times[name].append(
                [np.median(np.diff(history.seconds)), _write(model, prompts)]
            )
    lines = {}
    for name, model in models.items():
        step, token = np.median(times[name], axis=0)
        flops = measured(model, [first], penalties[name]) / first["input_ids"].numel()
        was_training = model.training
        peak = training.step_memory(model.train(), batch).total
        model.train(was_training)
        lines[name] = {
            "step": step,
            "token": token,
            "peak": peak,
            "flops": flops,
            "stored": stored(model, setup.base),
            "trained": combining.trained(model),
        }
    return pd.DataFrame(lines).T
