"""One way to train: transformers' Trainer, reproducible step by step, stopped by the first NaN."""

from __future__ import annotations

import importlib.util
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from datasets import Dataset as Rows
from torch import nn

from moebook import runtime
from moebook.errors import nearest, refuse
from moebook.models import fingerprint
from moebook.training import checkpoints
from moebook.training.batches import Batches
from moebook.training.course import Course, History
from moebook.training.milestones import reached
from moebook.training.trainer import OPTIMIZERS, SCHEDULES, Penalty, run


def fit(
    model: nn.Module,
    train: Rows,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    batch: int = 32,
    lr: float = 2e-4,
    schedule: str = "constant",
    warmup: float = 0.03,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    clip: float = 1.0,
    seed: int = 0,
    penalty: Penalty | None = None,
    label: str = "",
    pad_id: int = 0,
    accumulate: int = 1,
    optimizer: str = "adamw",
    bf16: bool = False,
    output: str | Path | None = None,
    every: int = 500,
) -> History:
    """Train the parameters that require a gradient on the labelled tokens of the rows, with AdamW.

    Everything random is a function of the seed and the step: the order of the rows, and dropout or
    noise, since torch's generators are seeded anew at each step. Two runs are therefore equal bit
    for bit (at one number of threads), and so is a run that was interrupted and goes on. Random
    states, training mode and the configuration's ``use_cache`` are left as they were found.

    Under ``accelerate launch`` every process calls it with the same arguments; each trains on its
    part of every batch (data parallel), and the first one writes the checkpoints, which all must be
    able to read. A step gives the same numbers in one process or several, whole or accumulated,
    up to rounding, since loss and penalty are averaged over the tokens of the whole batch; but
    dropout draws others, and a penalty that is not a mean over tokens (a balance loss: the product
    of two) is that of each part.

    Args:
        model: A causal language model of transformers, wrapped by PEFT or altered by surgery.
        train: Rows with ``input_ids`` and ``labels`` (-100 where nothing is learnt).
        steps: Optimizer steps; give this or ``epochs``. One epoch when neither is given.
        epochs: Passes over the rows, rounded up to whole steps.
        batch: B, rows a step, of all processes together.
        lr: Peak learning rate.
        schedule: ``constant``, ``linear`` or ``cosine`` (both down to 0), after the warm-up.
        warmup: Share of the steps over which the rate rises linearly from 0, in [0, 1).
        weight_decay: Decoupled decay, applied to all but biases and normalisations.
        betas: AdamW's decay rates of the two moments, in [0, 1).
        clip: The gradient is scaled down to this norm; ``inf`` never scales.
        seed: From 0 to 2^32 - 1.
        penalty: Called after each forward pass with the model; its scalar is added to the loss
            (a balance loss, for instance).
        label: What the progress bar says.
        pad_id: Token that fills short rows; masked.
        accumulate: Parts in which each process computes its rows of a step, one after the other,
            to need less memory.
        optimizer: ``adamw``, or bitsandbytes' AdamW whose state moves to main memory when the GPU
            is full: ``paged_32bit`` (the papers'), ``paged_8bit``.
        bf16: Compute under torch's autocast to bfloat16, whatever the parameters are in.
        output: Folder for checkpoints. When it holds some of the same run, training goes on from
            the newest; without it nothing is written.
        every: Steps between checkpoints; the last step is always kept.

    Returns:
        The history of all steps, those before an interruption included.

    Raises:
        Refusal: ``E-RANGE`` for a value outside its range, ``E-DATA`` for rows that cannot be
            trained on, ``E-MODEL`` when nothing is trainable, ``E-NONFINITE`` at the step whose
            loss or gradient is not finite (that step changes no parameter and is not saved),
            ``E-CONFIGDIFF`` when the folder's checkpoints belong to another run, ``E-DEVICE`` or
            ``E-DEP`` for a paged optimizer without a GPU or bitsandbytes.
    """
    settings = {
        "batch": batch, "lr": lr, "schedule": schedule, "warmup": warmup,
        "weight_decay": weight_decay, "betas": list(betas), "clip": clip, "seed": seed,
        "accumulate": accumulate, "optimizer": optimizer, "bf16": bf16,
    }  # fmt: skip
    _check(steps=steps, epochs=epochs, every=every, **settings)
    _check_model(model, optimizer)
    rank, processes = runtime.processes()
    batches = Batches(train, batch, seed=seed, pad_id=pad_id, parts=accumulate * processes)
    total = steps or math.ceil((epochs or 1) * batches.per_epoch)
    course = Course(batches, total, seed, label)
    if output is None:
        run(model, course, penalty, settings)
    else:
        with checkpoints.locked(Path(output)) if rank == 0 else nullcontext():
            identity = {"steps": total, "data": batches.digest(), "model": fingerprint(model)}
            course.keep(Path(output), every, settings | identity | {"processes": processes})
            if course.done == total:
                checkpoints.restore(model, course.tensors)
            else:
                run(model, course, penalty, settings)
    reached(model, total)
    return course.history


def _check_model(model: nn.Module, optimizer: str) -> None:
    """Refuse a model with nothing to train, or a paged optimizer where it cannot run."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        refuse("E-MODEL", "no parameter requires a gradient; nothing would be trained")
    if optimizer == "adamw":
        return
    device = next(model.parameters()).device
    if device.type != "cuda":
        refuse(
            "E-DEVICE", f"optimizer {optimizer} needs a GPU, the model is on {device}; use adamw"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        refuse("E-DEP", f"optimizer {optimizer} needs bitsandbytes: pip install bitsandbytes")


def _check(**given: Any) -> None:
    """Refuse the first setting outside its range."""
    steps, epochs = given["steps"], given["epochs"]
    if steps is not None and epochs is not None:
        refuse("E-USAGE", f"steps = {steps} and epochs = {epochs}: give one of them")
    for name, known in (("schedule", SCHEDULES), ("optimizer", OPTIMIZERS)):
        if given[name] not in known:
            refuse("E-RANGE", f"{name} = {given[name]!r}: {nearest(given[name], known)}")
    rules = {
        "steps": (steps is None or steps >= 1, "at least 1"),
        "epochs": (epochs is None or 0 < epochs < math.inf, "a positive number"),
        "batch": (given["batch"] >= 1, "at least 1"),
        "every": (given["every"] >= 1, "at least 1"),
        "accumulate": (given["accumulate"] >= 1, "at least 1"),
        "lr": (0 < given["lr"] < math.inf, "a positive number"),
        "warmup": (0 <= given["warmup"] < 1, "in [0, 1)"),
        "weight_decay": (0 <= given["weight_decay"] < math.inf, "0 or more"),
        "betas": (all(0 <= beta < 1 for beta in given["betas"]), "both in [0, 1)"),
        "clip": (given["clip"] > 0, "above 0"),
        "seed": (0 <= given["seed"] < 2**32, "in [0, 2^32)"),
    }
    for name, (good, rule) in rules.items():
        if not good:
            refuse("E-RANGE", f"{name} = {given[name]!r}: expected {rule}")
