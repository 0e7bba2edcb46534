"""Poly: layer by layer a task says which skills it uses; its LoRA is their normalised mix.

``z_j = sigmoid((log(u / (1 - u)) + Z_j) / tau)`` with u uniform (a relaxed Bernoulli) in training,
``sigmoid(Z_j)`` afterwards; ``w_j = z_j / sum z``; ``A = sum w_j A_j``, ``B = sum w_j B_j``. Ponti
et al. (2022), Combining Modular Skills in Multitask Learning, arXiv 2202.13914; code:
McGill-NLP/polytropon and microsoft/mttl. The paper learns one row of Z a task from 120 tasks
jointly, then a new task's from its shots; here is the new task's row alone.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributions import RelaxedBernoulli

from moebook.errors import refuse
from moebook.methods.rivals import mixing, tuning
from moebook.methods.rivals.tuning import Data, Tuned
from moebook.methods.rocket.bank import Bank, check
from moebook.settings import Positive, Presets, settings

__all__ = [
    "Config",
    "attach",
    "tuned",
]


@settings
class Config(Presets):
    """How Z becomes weights, and what is trained. The defaults are the preset ``bank``.

    ``paper`` learns fresh skills and Z at two speeds; ``released`` does so without noise, as
    mttl's newer router; ``bank`` starts from the bank, at one rate, as Rocket must have.

    Attributes:
        noise: z is drawn anew in every pass of training (paper), or is sigmoid(Z) there too (mttl).
        temperature: tau.
        normalise: ``"raw"`` takes Z itself for the weights, without sigmoid, noise and sum to 1:
            what mttl does with a library, and another method.
        start: The skills are the bank's LoRAs, or fresh ones of their shape (the paper's start).
        trains: Z alone, or the skills too (paper). Rocket speaks of "routing parameters", but the
            official code trains both.
        rate: Learning rate of Z, of which the authors make 1e-1 to 1e-2, beside 1e-2 to 1e-4 of the
            skills; None for the skills' own, as in Rocket, at which Z hardly leaves 0.
    """

    noise: Literal["relaxed", "none"] = "relaxed"
    temperature: Positive = 1.0
    normalise: Literal["sum", "raw"] = "sum"
    start: Literal["bank", "random"] = "bank"
    trains: Literal["Z", "Z + skills"] = "Z + skills"
    rate: Positive | None = None

    def __post_init__(self) -> None:
        if (self.normalise, self.noise) == ("raw", "relaxed"):
            refuse(
                "E-CHOICE",
                "normalise is 'raw', which draws nothing: set noise to 'none'",
            )

    PRESETS: ClassVar = {
        "paper": {"start": "random", "rate": 0.1},
        "released": {"start": "random", "rate": 0.1, "noise": "none"},
        "bank": {},
    }


class Assignment(nn.Module):
    """The task's row of Z in one layer: N logits within 1e-3 of 0, so weights start at 1/N."""

    def __init__(self, skills: int, config: Config) -> None:
        super().__init__()
        self.config = config
        # Z [N], in the released range.
        self.z = nn.Parameter(torch.empty(skills).uniform_(-1e-3, 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weights ``[N]``, whatever x is."""
        if self.config.normalise == "raw":
            return self.z
        # z_j = sigmoid(Z_j).
        drawn = self.z.sigmoid()
        if self.training and self.config.noise == "relaxed":
            # z_j = sigmoid((log(u / (1 - u)) + Z_j) / tau), with a gradient for Z.
            drawn = RelaxedBernoulli(self.config.temperature, logits=self.z).rsample()
        # w_j = z_j / sum z; 1e-12 as released.
        return drawn / (drawn.sum() + 1e-12)


def attach(model: nn.Module, bank: Bank, config: Config, *, seed: int = 0) -> Tuned:
    """Put the skills on the base, with Z drawn by the seed."""
    check(bank)
    if config.start == "random":
        bank = mixing.fresh_like(bank, seed=seed)
    return tuning.attach(
        model,
        bank,
        lambda *_: Assignment(len(bank), config),
        mix="factors",
        learnt=config.trains == "Z + skills",
        seed=seed,
    )


def tuned(
    model: nn.Module,
    bank: Bank,
    data: Data,
    config: Config,
    *,
    seed: int = 0,
    **recipe: Any,
) -> Tuned:
    """Put the skills on the base and train Z, and the skills if so set; the result is one LoRA."""
    done = attach(model, bank, config, seed=seed)
    return tuning.fit(done, data, rate=config.rate, seed=seed, **recipe)
