"""PEMs: the bank's LoRAs are added up as they stand; Rocket then tunes the sum (arXiv 2306.14870).

``A = sum_i l_i A_i``, ``B = sum_i l_i B_i`` with coefficients that sum to 1: l and 1 - l for two
LoRAs, 1/N for more. No row is needed for it. The LoRAs are meant to start from one initialisation
(the authors' README; the paper's own word on this was not at hand, a summary calls its sensitivity
to it a limitation). On a bank trained from different starts the sum is nearly the base, see
`mixing`. Not PEFT's ``linear``, which takes the root of each coefficient. The paper's other
operations, negation and analogy, have no place in Rocket's table.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from moebook.errors import refuse
from moebook.methods.rivals import mixing, tuning
from moebook.methods.rivals.tuning import Cost, Data, Tuned
from moebook.methods.rocket.bank import Bank, check
from moebook.settings import Presets, settings

__all__ = [
    "Config",
    "tuned",
]


@settings
class Config(Presets):
    """How LoRAs are added, and what follows. The defaults are the preset ``bank``.

    ``paper`` merges and does nothing else; ``released`` does so for two LoRAs, by validation;
    ``bank`` merges all by 1/N and tunes the result, as Rocket must have.

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

    PRESETS: ClassVar = {
        "paper": {"tune": "none"},
        "released": {"tune": "none", "coefficients": "validation"},
        "bank": {},
    }


def tuned(
    model: nn.Module, bank: Bank, data: Data, config: Config, **recipe: Any
) -> Tuned:
    """Attach the merged LoRA, tuned if so set; its one weight is 1."""
    check(bank, ranks=config.mix == "factors")
    spent = Cost()
    if config.coefficients == "validation":
        if len(bank) != 2:
            message = f"coefficients by validation are of 2 LoRAs, not of {len(bank)}"
            refuse("E-CHOICE", message)
        # A step that does not divide 1 is rounded to one that does.
        grid = torch.linspace(0, 1, round(1 / config.grid) + 1)
        # A = l A_1 + (1 - l) A_2, B alike, for each l of the grid.
        tried = [
            mixing.merged(bank, torch.stack([share, 1 - share]), mix=config.mix)
            for share in grid
        ]
        best = min(tried, key=lambda lora: tuning.on_shots(model, lora, data))
        # One number was chosen, and each candidate read the shots once.
        spent = Cost(1, len(tried) * sum(map(len, data.shots["input_ids"])))
    else:
        equal = torch.full((len(bank),), 1 / len(bank))  # [N], l_i = 1/N
        best = mixing.merged(bank, equal, mix=config.mix)
    result = tuning.alone(model, best, learnt=config.tune == "merged")
    # Where nothing trains, `fit` does no more than note the cost.
    return tuning.fit(result, data, spent=spent, **recipe)
