"""PEMs: the bank's LoRAs are added up as they stand; Rocket then tunes the sum (arXiv 2306.14870).

``A = sum_i l_i A_i``, ``B = sum_i l_i B_i`` with coefficients that sum to 1: l and 1 - l for two
LoRAs, 1/N for more. No row is needed for it. The LoRAs are meant to start from one initialisation
(the authors' README; the paper's own word on this was not at hand, a summary calls its sensitivity
to it a limitation). On a bank trained from different starts the sum is nearly the base, see
`mixing`. Not PEFT's ``linear``, which takes the root of each coefficient. The paper's other
operations, negation and analogy, have no place in Rocket's table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from moebook.errors import refuse
from moebook.methods.rivals import mixing, tuning
from moebook.methods.rivals.tuning import Cost, Data, Tuned
from moebook.methods.rocket.bank import Bank, check
from moebook.settings import preset, settings


@settings
class Config:
    """How LoRAs are added, and what follows. The defaults are the preset ``bank``.

    Attributes:
        mix: The sum of the factors (paper), or of what they put out, which no initialisation spoils
            and whose rank is N R.
        coefficients: 1/N, or, for two LoRAs, the l of a grid that has the least nats on D_K.
        grid: Step of that grid over [0, 1]; the released scripts have 0.02 to 0.2.
        tune: Nothing (paper), or the merged LoRA on D_K and D_A (Rocket).
    """

    mix: Literal["factors", "outputs"] = "factors"
    coefficients: Literal["uniform", "validation"] = "uniform"
    grid: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    tune: Literal["none", "merged"] = "merged"

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Config:
        """Return a named set of settings, with single fields changed.

        ``paper`` merges and does nothing else; ``released`` does so for two LoRAs, by validation;
        ``bank`` merges all by 1/N and tunes the result, as Rocket must have.
        """
        return preset(cls, PRESETS, name, changes)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"tune": "none"},
    "released": {"tune": "none", "coefficients": "validation"},
    "bank": {},
}


def tuned(model: nn.Module, bank: Bank, data: Data, config: Config, **recipe: Any) -> Tuned:
    """Attach the merged LoRA, tuned if so set; its one weight is 1."""
    check(bank, ranks=config.mix == "factors")
    best, spent = torch.full((len(bank),), 1 / len(bank)), Cost()
    if config.coefficients == "validation":
        best, spent = _validated(model, bank, data, config)
    result = _attached(model, bank, best, config)
    if config.tune == "none":
        return replace(result, cost=spent)
    return tuning.fit(result, data, spent=spent, **recipe)


def _attached(model: nn.Module, bank: Bank, weights: torch.Tensor, config: Config) -> Tuned:
    merged = mixing.merged(bank, weights, mix=config.mix)
    one, learnt = mixing.Fixed(torch.ones(1)), config.tune == "merged"
    return tuning.attach(model, {"merged": merged}, lambda *_: one, mix="outputs", learnt=learnt)


def _validated(
    model: nn.Module, bank: Bank, data: Data, config: Config
) -> tuple[torch.Tensor, Cost]:
    """Return the best (l, 1 - l) of the grid on D_K, and what looking for it took."""
    if len(bank) != 2:
        refuse("E-CHOICE", f"coefficients by validation are of 2 LoRAs, the bank has {len(bank)}")
    tried = {}
    for share in np.linspace(0, 1, round(1 / config.grid) + 1):
        weights = torch.tensor([share, 1 - share], dtype=torch.float32)
        result = _attached(model, bank, weights, config)
        with tuning.undone(result):
            tried[tuning.nats(model, data.shots, pad_id=data.pad_id)] = weights
        result.detach()
    tokens = len(tried) * sum(map(len, data.shots["input_ids"]))
    return tried[min(tried)], Cost(1, tokens)
