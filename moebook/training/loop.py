"""One way to train: a loop over accelerate, reproducible step by step, stopped by the first NaN."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets import Dataset as Rows
from pydantic import SkipValidation
from torch import Tensor, nn

from moebook import runtime
from moebook.errors import refuse, shown
from moebook.models.conventions import check
from moebook.nn import evaluating, plain
from moebook.nn.batch import longest, vocabulary
from moebook.nn.passes import modes_kept
from moebook.settings import Count, Place, checked
from moebook.training import checkpoints, processes
from moebook.training.batches import Batches, check_encoded
from moebook.training.checkpoints import History
from moebook.training.precision import widen
from moebook.training.recipe import (
    Recipe,
    check_decay,
    check_warmup,
    make_optimizer,
    make_schedule,
)

Penalty = Callable[[Any], Tensor]
Milestones = Sequence[tuple[Collection[int], Callable[[Any], Any]]]


@checked
def fit(
    model: nn.Module,
    train: SkipValidation[Rows],
    *,
    penalty: Penalty | None = None,
    milestones: SkipValidation[Milestones] = (),
    label: str = "",
    pad_id: int = 0,
    output: Place | None = None,
    every: Count = 500,
    shards: Any = None,
    **recipe: Any,
) -> History:
    """Train the parameters that require a gradient on the labelled tokens of the rows, with AdamW.

    What trains is float32 or wider: parameters in 16 bits become float32 in the model, and stay so;
    where a host in 16 bits cannot compute with them the training is refused (E-DTYPE, see
    `training.precision`). Frozen parameters, and so most products, keep the host's dtype.

    Rows, dropout and noise depend on seed and step alone: torch's generators are seeded anew at
    each step. So two runs are equal bit for bit (at one number of threads), also when one was
    interrupted and goes on. Random states and each module's mode stay as they were.

    Under ``accelerate launch`` every process trains on its part of every batch, data parallel or by
    FSDP2 (``shards``, which `training` sets there); all share the folder of checkpoints. Loss and
    penalty are means over the whole batch. So one process or several, whole or accumulated, give
    the same numbers up to rounding. But dropout draws others, and a balance loss (the product of
    two means) is that of each part. With FSDP2 a penalty gets the model in shards, a milestone the
    whole one, in every process; what breaks training off, but for a refused step, leaves the model
    empty (E-PROCESS: another process has ended).

    The loss is the likelihood of the next token alone: what a configuration adds to it (a balance
    loss by ``output_router_logits``) would depend on how rows are batched, and is left out. A model
    that looks ahead, or whose own loss is another, is refused.

    Rows have ``input_ids`` and ``labels`` (-100: nothing is learnt). ``penalty`` is called with the
    model after each forward pass, and its scalar added to the loss. ``milestones`` are numbers of
    steps done, from 0, and what to call with the model then; it must leave the parameters alone.

    A folder ``output`` keeps checkpoints: every so many steps, every five minutes or more, at
    milestones and at the end. Training goes on from the newest of the same run, which is one of
    the same recipe, rows and model; a penalty is not compared. A notebook under
    `moebook run` has such a folder unasked (`training.checkpoints`). ``recipe`` holds fields of
    `Recipe`. A loss or gradient that is not finite is refused before it moves a parameter.

    >>> from moebook import data, models
    >>> model, tokenizer = models.load("nano")
    >>> rows = data.encode(data.mixture({"sums": 8}, "train"), tokenizer)
    >>> history = fit(model, rows, steps=2, batch=4, lr=1e-3, pad_id=tokenizer.pad_token_id)
    >>> len(history.loss)
    2
    """
    plan = Recipe(**recipe)
    if output is not None and not os.fspath(output).strip():
        wanted = "expected a folder for checkpoints, or None for none"
        refuse("E-PATH", f"output is empty, {wanted}")
    check_encoded("train", train)
    batches = Batches(train, plan.batch, seed=plan.seed, pad_id=pad_id)
    batches.check(vocabulary(model), longest(model))
    check_decay(model, plan)
    _check_whole(model)
    total = plan.total(batches.per_epoch)
    check_warmup(plan, total)
    device = next(model.parameters()).device
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=plan.bf16)

    with _undisturbed(model), ExitStack() as cleanup:
        with autocast():
            check(model, loss=True)
        marks = _marks(milestones)
        accelerator, shards = processes.join(model, plan, shards)
        rank = accelerator.process_index
        world = accelerator.num_processes
        # Before anything is made of the parameters: their hash, their moments.
        widen(model)

        store = checkpoints.store_of(
            model,
            plan,
            batches,
            total,
            output=output,
            every=every,
            marks=marks,
            shards=shards,
        )
        if store and accelerator.is_main_process:
            cleanup.enter_context(store.locked())
        cleanup.enter_context(processes.telling())
        accelerator.wait_for_everyone()  # whoever held the folder has gone

        # With FSDP2 a twin of the model trains, in shards of it.
        trained = shards.twin(model) if shards else model
        wrapped, optimizer = accelerator.prepare(trained, make_optimizer(trained, plan))
        # Not by `prepare`: accelerate would step it once for each process.
        schedule = make_schedule(optimizer, plan, total)

        # Go on from the newest checkpoint, if there is one.
        measure = partial(_measure, model, trained, milestones)
        history = History(milestones=[{} for _ in milestones])
        if store:
            history = store.resume(
                trained, optimizer, schedule, history, measure, total
            )
        else:
            checkpoints.check_marks(marks, 0, total)
        done = len(history.step)
        seconds_before = history.seconds[-1] if done else 0.0
        began = time.perf_counter() - seconds_before
        processes.release(model, trained)

        # A batch of B rows comes in parts: one after another, or one a process.
        parts = plan.accumulate * world
        inner = accelerator.unwrap_model(wrapped)
        for step in runtime.progress(range(done, total), label, total - done):
            measure(step, history)

            # Dropout and noise depend on the seed and the step alone.
            _seed(plan.seed, step, rank)
            wrapped.train()
            label_count = torch.tensor(batches.labels(step), device=accelerator.device)
            # Of loss and penalty, over the parts, [2].
            sums = torch.zeros(2, dtype=torch.double).to(label_count.device)

            for part in range(rank, parts, world):
                batch, share = batches.part(step, part, parts)
                batch = send_to_device(batch, accelerator.device)
                is_last = part + world >= parts
                with _exchanging(accelerator, wrapped, is_last):
                    # -log P (Rocket Eq. 15), as the mean over all labels of the batch,
                    # whatever part they are in.
                    asked = {"num_items_in_batch": label_count, "use_cache": False}
                    with autocast():
                        loss = wrapped(**batch, **asked).loss
                    # Losses add up over parts; gradients are averaged over processes.
                    loss = loss * world
                    extra = torch.zeros_like(loss)
                    if penalty:
                        # A mean over tokens, so it counts by the part's share of them.
                        extra = _extra(penalty, inner) * (world * share)
                    accelerator.backward(loss + extra)
                sums += torch.stack([loss.detach(), extra.detach()])
                del loss, extra  # and with them the graph

            # Nothing moves unless the batch's loss, penalty and gradient are finite.
            norm = float(accelerator.clip_grad_norm_(wrapped.parameters(), plan.clip))
            # The mean over processes takes ``world`` out again.
            batch_loss, batch_extra = accelerator.reduce(sums, "mean").tolist()
            if not math.isfinite(batch_loss + batch_extra + norm):
                trained.zero_grad()
                processes.gather(model, trained)
                _stop(step, batch_loss, batch_extra, norm, batches, store)

            optimizer.step()
            schedule.step()
            trained.zero_grad()

            tokens_before = history.tokens[-1] if history.tokens else 0
            history.add(
                step=step + 1,
                loss=batch_loss,
                penalty=batch_extra,
                norm=norm,
                seconds=time.perf_counter() - began,
                tokens=tokens_before + batches.tokens(step),
            )
            if store:
                store.save_if_due(trained, optimizer, history, total)

        accelerator.wait_for_everyone()  # the last checkpoint is there for all of them
        processes.gather(model, trained)
        _measure(model, model, milestones, total, history)
    return history


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Put random states and modules' modes back after the block, in which the loss is `plain`."""
    with runtime.random_states_kept(), modes_kept(model), plain(model):
        yield


def _marks(milestones: Milestones) -> frozenset[int]:
    """Return the steps at which something is measured."""
    marks = frozenset(chain.from_iterable(steps for steps, _ in milestones))
    for mark in marks:
        if not isinstance(mark, Integral):
            refuse(
                "E-TYPE", f"milestones name step {shown(mark)}, expected a whole number"
            )
    return marks


def _seed(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators for a step; the first process as if it were alone."""
    # Mixed: by seed + step, step 1 of seed 0 would draw what step 0 of seed 1 draws.
    entropy = [seed, step, rank] if rank else [seed, step]
    torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def _exchanging(
    accelerator: Accelerator, wrapped: nn.Module, is_last: bool
) -> AbstractContextManager[Any]:
    """Let the processes exchange gradients after the last part of a step alone.

    With FSDP2 they do so after each: else they would hold the gradient whole.
    """
    if is_last or accelerator.distributed_type == "FSDP":
        return nullcontext()
    exchange: AbstractContextManager[Any] = accelerator.no_sync(wrapped)
    return exchange


def _extra(penalty: Penalty, model: nn.Module) -> Tensor:
    """Return what a penalty adds to the loss: a tensor of one number."""
    value = penalty(model)
    if not isinstance(value, Tensor) or value.dim():
        is_tensor = isinstance(value, Tensor)
        got = f"a tensor {tuple(value.shape)}" if is_tensor else shown(value)
        refuse(
            "E-SHAPE",
            f"penalty returns {got}, expected a tensor without dimensions, as the loss",
        )
    return value


def _check_whole(model: nn.Module) -> None:
    """Refuse a model of which parts lie on a disk or have no values (E-DEVICE)."""
    if any(parameter.is_meta for parameter in model.parameters()):
        away = "parameters of the model are offloaded, or have no values"
        refuse("E-DEVICE", f"{away}: load it whole, without device_map")


def _stop(
    step: int,
    loss: float,
    extra: float,
    norm: float,
    batches: Batches,
    store: checkpoints.Store | None,
) -> NoReturn:
    """Refuse a step whose loss, penalty or gradient is not finite."""
    steps = store.steps() if store else []
    saved = f"last checkpoint: step {max(steps)}" if steps else "unsaved"
    text = f"step {step + 1}: loss {loss}, penalty {extra}, gradient norm {norm}"
    text += f" on rows {batches.rows(step).tolist()}; the model is as after step {step}"
    # Before the first update no rate has moved anything.
    fix = "lower lr" if step else "look at the weights, the rows and the penalty"
    refuse("E-NONFINITE", f"{text} ({saved}): {fix}")


def _measure(
    model: nn.Module,
    trained: nn.Module,
    milestones: Milestones,
    step: int,
    history: History,
) -> None:
    """Call what belongs to a milestone with the whole model, without dropout."""
    for (steps, measure), measured in zip(milestones, history.milestones, strict=True):
        if step not in steps:
            continue
        processes.gather(model, trained)
        # Whether the steps before it were done just now, in training mode, or not.
        with runtime.random_states_kept(), evaluating(model):
            torch.manual_seed(step)
            measured[step] = measure(model)
        processes.release(model, trained)
