"""transformers' Trainer as `fit` uses it: one process or several, a step whole or in parts."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from moebook.errors import refuse
from moebook.training.course import Course

Penalty = Callable[[nn.Module], Tensor]

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "paged_32bit": "paged_adamw_32bit",
    "paged_8bit": "paged_adamw_8bit",
}


def run(
    model: nn.Module, course: Course, penalty: Penalty | None, settings: Mapping[str, Any]
) -> None:
    """Run the Trainer, with everything off that would write, print or cost time."""
    course.batches.start, course.batches.length = course.done, course.total - course.done
    with tempfile.TemporaryDirectory() as scratch, _as_found(model):
        trainer = _Trainer(
            model=model,
            args=_arguments(scratch, model, course, settings),
            train_dataset=course.batches,
            data_collator=_unwrap,
            callbacks=[course],
        )
        trainer.course, trainer.penalty = course, penalty
        trainer.remove_callback(PrinterCallback)
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            refuse("E-CHOICE", "FSDP and DeepSpeed are not supported: launch with --multi_gpu")
        if course.batches.parts > 1 and not trainer.model_accepts_loss_kwargs:
            kind = type(model).__name__
            refuse("E-MODEL", f"{kind} averages its loss by itself: no parts, no second process")
        trainer.train()
        trainer.accelerator.wait_for_everyone()  # the last checkpoint is there for all of them


def _arguments(
    scratch: str, model: nn.Module, course: Course, settings: Mapping[str, Any]
) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=scratch,  # made by the Trainer whether it saves or not
        max_steps=course.total,
        per_device_train_batch_size=1,  # an item of `Batches` is a whole part of a batch
        gradient_accumulation_steps=settings["accumulate"],
        train_sampling_strategy="sequential",
        optim=OPTIMIZERS[settings["optimizer"]],
        learning_rate=settings["lr"],
        lr_scheduler_type=SCHEDULES[settings["schedule"]],
        warmup_steps=math.ceil(settings["warmup"] * course.total),
        weight_decay=settings["weight_decay"],
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        max_grad_norm=settings["clip"],
        seed=settings["seed"],
        bf16=settings["bf16"],
        use_cpu=next(model.parameters()).device.type == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # else DataParallel would cut a part's tensors
    return arguments


def _unwrap(items: list[dict[str, Any]]) -> dict[str, Any]:
    return items[0]


class _Trainer(Trainer):
    """The Trainer with a penalty beside the loss, and a stop at the first number gone bad."""

    course: Course
    penalty: Penalty | None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Cross-entropy plus penalty of a part, such that the sum over parts is that of the step.

        The Trainer divides the sum over a part's labels by the number of labels of the whole step
        and, since gradients are averaged over processes, multiplies by their number; the penalty
        is weighted by the part's share of the tokens, and multiplied likewise.
        """
        loss: Any = super().compute_loss(model, inputs, *args, **kw)
        inner: Any = self.model  # without what accelerate may have wrapped around it
        penalty = self.penalty(inner) if self.penalty else torch.zeros_like(loss)
        processes = self.accelerator.num_processes
        penalty = penalty * (processes * self.course.share(self.accelerator.process_index))
        self.course.parts.append(torch.stack([loss.detach().double(), penalty.detach().double()]))
        return loss + penalty

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Look at loss and gradient before the optimizer uses them.

        Overridden although private: it is the one place before the optimizer's step that knows the
        norm, and measuring it again would cost another pass over the gradient. Left alone, the
        Trainer reports a loss of 0 for NaN and goes on.
        """
        norm = super()._get_grad_norm(model, grad_norm)
        parts: Any = self.accelerator.reduce(torch.stack(self.course.parts).sum(0), "mean")
        loss, penalty = parts.tolist()
        self.course.look(loss, penalty, float(norm), model)
        return norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: it would walk over all parameters at every step."""
        return 0


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Put back what the Trainer changes on its way: random states, mode, cache, and forward.

    Mixed precision replaces the model's ``forward`` by one under autocast.
    """
    config, device = getattr(model, "config", None), next(model.parameters()).device
    cache, training = getattr(config, "use_cache", None), model.training
    python, numpy = random.getstate(), np.random.get_state()
    own = {name: model.__dict__[name] for name in _FORWARD if name in model.__dict__}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            model.train(training)
            for name in _FORWARD:
                model.__dict__.pop(name, None)
            model.__dict__.update(own)
            if config is not None:
                config.use_cache = cache


_FORWARD = ("forward", "_original_forward")
