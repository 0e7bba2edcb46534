"""One way to train: transformers' Trainer, reproducible step by step, stopped by the first NaN."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset as Rows
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from moebook.errors import nearest, refuse
from moebook.models import fingerprint
from moebook.training import checkpoints
from moebook.training.batches import Batches
from moebook.training.course import Course, History

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


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
    penalty: Callable[[nn.Module], Tensor] | None = None,
    label: str = "",
    pad_id: int = 0,
    output: str | Path | None = None,
    every: int = 500,
) -> History:
    """Train the parameters that require a gradient on the labelled tokens of the rows, with AdamW.

    Everything random is a function of the seed and the step: the order of the rows, and dropout or
    noise, since torch's generators are seeded anew at each step. Two runs are therefore equal bit
    for bit (at one number of threads), and so is a run that was interrupted and goes on. Random
    states, training mode and the configuration's ``use_cache`` are left as they were found.

    Args:
        model: A causal language model of transformers, wrapped by PEFT or altered by surgery.
        train: Rows with ``input_ids`` and ``labels`` (-100 where nothing is learnt).
        steps: Optimizer steps; give this or ``epochs``. One epoch when neither is given.
        epochs: Passes over the rows, rounded up to whole steps.
        batch: B, rows a step.
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
        output: Folder for checkpoints. When it holds some of the same run, training goes on from
            the newest; without it nothing is written.
        every: Steps between checkpoints; the last step is always kept.

    Returns:
        The history of all steps, those before an interruption included.

    Raises:
        Refusal: ``E-RANGE`` for a value outside its range, ``E-DATA`` for rows that cannot be
            trained on, ``E-MODEL`` when nothing is trainable, ``E-NONFINITE`` at the step whose
            loss or gradient is not finite (that step changes no parameter and is not saved),
            ``E-CONFIGDIFF`` when the folder's checkpoints belong to another run.
    """
    settings = {
        "batch": batch, "lr": lr, "schedule": schedule, "warmup": warmup,
        "weight_decay": weight_decay, "betas": list(betas), "clip": clip, "seed": seed,
    }  # fmt: skip
    _check(steps=steps, epochs=epochs, every=every, **settings)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        refuse("E-MODEL", "no parameter requires a gradient; nothing would be trained")
    batches = Batches(train, batch, seed=seed, pad_id=pad_id)
    total = steps or math.ceil((epochs or 1) * batches.per_epoch)
    course = Course(batches, total, seed, label)
    if output is None:
        _train(model, course, penalty, settings)
        return course.history
    with checkpoints.locked(Path(output)):
        identity = {"steps": total, "data": batches.digest(), "model": fingerprint(model)}
        course.keep(Path(output), every, settings | identity)
        if course.done == total:
            checkpoints.restore(model, course.tensors)
        else:
            _train(model, course, penalty, settings)
    return course.history


def _train(
    model: nn.Module,
    course: Course,
    penalty: Callable[[nn.Module], Tensor] | None,
    settings: dict[str, Any],
) -> None:
    """Run the Trainer, with everything off that would write, print or cost time."""
    course.batches.start, course.batches.length = course.done, course.total - course.done
    with tempfile.TemporaryDirectory() as scratch, _as_found(model):
        arguments = TrainingArguments(
            output_dir=scratch,  # made by the Trainer whether it saves or not
            max_steps=course.total,
            per_device_train_batch_size=1,  # an item of `Batches` is a whole batch
            train_sampling_strategy="sequential",
            learning_rate=settings["lr"],
            lr_scheduler_type=SCHEDULES[settings["schedule"]],
            warmup_steps=math.ceil(settings["warmup"] * course.total),
            weight_decay=settings["weight_decay"],
            adam_beta1=settings["betas"][0],
            adam_beta2=settings["betas"][1],
            max_grad_norm=settings["clip"],
            seed=settings["seed"],
            use_cpu=next(model.parameters()).device.type == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = _Trainer(
            model=model,
            args=arguments,
            train_dataset=course.batches,
            data_collator=_unwrap,
            callbacks=[course],
        )
        trainer.course, trainer.penalty = course, penalty
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def _unwrap(items: list[dict[str, Any]]) -> dict[str, Any]:
    return items[0]


class _Trainer(Trainer):
    """The Trainer with a penalty beside the loss, and a stop at the first number gone bad."""

    course: Course
    penalty: Callable[[nn.Module], Tensor] | None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Cross-entropy plus penalty, each kept for the history."""
        loss: Any = super().compute_loss(model, inputs, *args, **kw)
        inner: Any = self.model  # without what accelerate may have wrapped around it
        penalty = self.penalty(inner) if self.penalty else torch.zeros_like(loss)
        self.course.parts = (loss.detach(), penalty.detach())
        return loss + penalty

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Look at loss and gradient before the optimizer uses them.

        Overridden although private: it is the one place before the optimizer's step that knows the
        norm, and measuring it again would cost another pass over the gradient. Left alone, the
        Trainer reports a loss of 0 for NaN and goes on.
        """
        norm = super()._get_grad_norm(model, grad_norm)
        self.course.look(float(norm), model)
        return norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: it would walk over all parameters at every step."""
        return 0


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Put back what the Trainer changes on its way: random states, mode, the use of a cache."""
    config = getattr(model, "config", None)
    cache, training = getattr(config, "use_cache", None), model.training
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            model.train(training)
            if config is not None:
                config.use_cache = cache


def _check(**given: Any) -> None:
    """Refuse the first setting outside its range."""
    steps, epochs = given["steps"], given["epochs"]
    if steps is not None and epochs is not None:
        refuse("E-USAGE", f"steps = {steps} and epochs = {epochs}: give one of them")
    if given["schedule"] not in SCHEDULES:
        names = nearest(given["schedule"], SCHEDULES)
        refuse("E-RANGE", f"schedule = {given['schedule']!r}: {names}")
    rules = {
        "steps": (steps is None or steps >= 1, "at least 1"),
        "epochs": (epochs is None or 0 < epochs < math.inf, "a positive number"),
        "batch": (given["batch"] >= 1, "at least 1"),
        "every": (given["every"] >= 1, "at least 1"),
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
