"""The course of one training: its history, its seeds, its checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from moebook import runtime
from moebook.errors import refuse
from moebook.training import checkpoints
from moebook.training.batches import Batches
from moebook.training.milestones import reached


@dataclass(frozen=True)
class History:
    """What happened at each step; all lists have one entry a step.

    Attributes:
        step: Number of the step, from 1.
        loss: Cross-entropy of the labels, nats a token, without the penalty.
        penalty: What `penalty` added to the loss; 0 where there is none.
        norm: Norm of the gradient before it was clipped.
        seconds: Wall clock since training began, at the end of the step.
        tokens: Tokens read since training began, padding left out.
    """

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    penalty: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Course(TrainerCallback):
    """The course of one training: its history, its seeds, its checkpoints.

    Attributes:
        parts: Loss and penalty, ``[2]``, of each part of the step that this process has computed.
    """

    def __init__(self, batches: Batches, total: int, seed: int, label: str) -> None:
        self.batches, self.total, self.seed, self.label = batches, total, seed, label
        self.history = History()
        self.parts: list[Tensor] = []
        self.folder: Path | None = None
        self.tensors: dict[str, Tensor] = {}

    @property
    def done(self) -> int:
        """Steps done so far."""
        return len(self.history.step)

    def keep(self, folder: Path, every: int, settings: dict[str, Any]) -> None:
        """Save into a folder, and go on from its newest checkpoint if there is one."""
        self.folder, self.every, self.settings = folder, every, settings
        if found := checkpoints.newest(folder):
            self.tensors, facts = found
            self.history, self.scheduler = History(**facts["history"]), facts["scheduler"]
            old = facts["settings"]
            if changed := sorted(k for k in settings if old.get(k) != settings[k]):
                shown = ", ".join(f"{k} {old.get(k)} -> {settings[k]}" for k in changed)
                refuse(
                    "E-CONFIGDIFF",
                    f"{folder} holds another run ({shown}); repeat its settings or name "
                    "another folder",
                )

    def share(self, process: int) -> float:
        """Share of the step's tokens in the part that a process computes now."""
        now = len(self.parts) * runtime.processes()[1] + process
        return self.batches.share(self.done, now)

    def look(self, loss: float, penalty: float, norm: float, model: nn.Module) -> None:
        """Refuse a loss, penalty or gradient that is not finite; else note them."""
        step = self.done + 1
        if not math.isfinite(loss + penalty + norm):
            model.zero_grad()
            last = f"step {step - 1 - (step - 1) % self.every}" if self.folder else "none kept"
            refuse(
                "E-NONFINITE",
                f"step {step}: loss {loss}, penalty {penalty}, gradient norm {norm} on rows "
                f"{self.batches.rows(step - 1).tolist()}; the model is as after step {step - 1} "
                f"(last checkpoint: {last}); lower lr, or look at these rows",
            )
        self.history.step.append(step)
        self.history.loss.append(loss)
        self.history.penalty.append(penalty)
        self.history.norm.append(norm)

    def on_train_begin(self, args, state, control, **now: Any) -> None:  # type: ignore[no-untyped-def]
        """Restore what a checkpoint held, and start the clock."""
        if self.tensors:
            checkpoints.restore(now["model"], self.tensors, now["optimizer"])
            now["lr_scheduler"].load_state_dict(self.scheduler)
            rates = now["lr_scheduler"].get_last_lr()
            for group, rate in zip(now["optimizer"].param_groups, rates, strict=True):
                group["lr"] = rate
        state.global_step = self.done
        self.began = time.perf_counter() - (self.history.seconds or [0.0])[-1]
        left = range(self.done, self.total)
        self.bar = iter(runtime.progress(left, self.label, len(left)))
        next(self.bar)

    def on_step_begin(self, args, state, control, **now: Any) -> None:  # type: ignore[no-untyped-def]
        """Make all chance of the step a function of the seed and the step (and the process)."""
        reached(now["model"], state.global_step)
        others = [args.process_index] if args.process_index else []
        sequence = np.random.SeedSequence([self.seed, state.global_step, *others])
        torch.manual_seed(int(sequence.generate_state(1)[0]))
        self.parts = []

    def on_step_end(self, args, state, control, **now: Any) -> None:  # type: ignore[no-untyped-def]
        """Complete the history's line, and save when it is time."""
        step, history = state.global_step, self.history
        history.seconds.append(time.perf_counter() - self.began)
        history.tokens.append((history.tokens or [0])[-1] + self.batches.tokens(step - 1))
        next(self.bar, None)
        if not self.folder or not state.is_world_process_zero:
            return
        if step % self.every == 0 or step == self.total:
            facts = {
                "settings": self.settings,
                "scheduler": now["lr_scheduler"].state_dict(),
                "history": asdict(history),
            }
            tensors = checkpoints.capture(now["model"], now["optimizer"])
            checkpoints.save(self.folder, step, tensors, facts)
