"""The rows of Table 1 without a mixture: one LoRA, drawn, trained on the task, or best of the bank.

Each equals PEFT's ``PeftModel.from_pretrained(..., is_trainable=True)`` and the same training.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar, Literal

from torch import nn

from moebook.errors import nearest, refuse
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
    """Which one LoRA, and whether it is tuned.

    Attributes:
        choose: Draw it by the seed, take the one ``named``, take the one with the least nats on
            D_K, or start a fresh one of the bank's shape.
        named: A LoRA of the bank: for Source Best, the best by accuracy on the TEST rows, which
            makes that row an oracle and no method.
        tune: Whether it is then tuned on D_K and D_A. For Expert LoRA the data are all of D_T.
    """

    choose: Literal["random", "named", "shots", "fresh"]
    named: str | None = None
    tune: bool = True

    def __post_init__(self) -> None:
        given = f"choose is '{self.choose}', named is {self.named!r}"
        if self.choose == "named" and self.named is None:
            refuse("E-USAGE", f"{given}: name a LoRA of the bank")
        if self.choose != "named" and self.named is not None:
            refuse("E-USAGE", f"{given}: leave named out, or choose='named'")

    # Four rows of Table 1, and two that choose by D_K where Source Best saw TEST rows.
    PRESETS: ClassVar = {
        "random": {"choose": "random"},
        "expert_lora": {"choose": "fresh"},
        "source_best": {"choose": "named", "tune": False},
        "source_best_sft": {"choose": "named"},
        "best_by_shots": {"choose": "shots", "tune": False},
        "best_by_shots_sft": {"choose": "shots"},
    }


def tuned(
    model: nn.Module,
    bank: Bank,
    data: Data,
    config: Config,
    *,
    seed: int = 0,
    **recipe: Any,
) -> Tuned:
    """Attach one LoRA of the bank, or a fresh one, and tune it if so set."""
    check(bank)
    name = config.named or ""
    spent = Cost()
    if config.choose == "named" and name not in bank:
        refuse("E-NAME", f"no LoRA '{name}' in the bank; {nearest(name, bank)}")
    if config.choose == "random":
        # Sorted, so that the order of the bank does not matter.
        name = random.Random(f"vanilla/{seed}").choice(sorted(bank))
    if config.choose == "shots":
        name = min(bank, key=lambda name: tuning.on_shots(model, bank[name], data))
        spent = Cost(forward=len(bank) * sum(map(len, data.shots["input_ids"])))
    if config.choose == "fresh":
        name = next(iter(bank))  # any: their shapes are the same
        bank = mixing.fresh_like({name: bank[name]}, seed=seed)
    result = tuning.alone(model, bank[name], learnt=config.tune)
    return tuning.fit(result, data, spent=spent, seed=seed, **recipe)
