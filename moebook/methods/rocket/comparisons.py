"""What the mixture is compared with (Table 1's upper half): single LoRAs, random and tuned.

The bank's best LoRA as it is runs under `attachment.attached`. Tuned alone, a LoRA is a mixture of
one, which equals PEFT's LoRA exactly; so "Random" (on K shots, with or without the open data) and
"Source Best SFT" are `alone`, and "Expert LoRA" is `bank.train` on the target's whole training set.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from moebook.errors import refuse
from moebook.methods.rocket import mixture
from moebook.methods.rocket.config import Config
from moebook.methods.rocket.loras import Lora


def alone(model: nn.Module, lora: Lora, config: Config) -> nn.Module:
    """Put one LoRA on the base to be tuned by itself, in place, with the mixture's own settings.

    Raises:
        Refusal: Those of `mixture.build`.
    """
    return mixture.build(model, [lora], replace(config, experts=1, top_k=1))


def drawn(bank: Mapping[str, Lora], count: int, *, seed: int) -> list[str]:
    """Draw names at random ("Random" of Tables 1 and 2), a function of names and seed alone.

    Raises:
        Refusal: E-RANGE for a count outside 1 to the bank's size.
    """
    if not 1 <= count <= len(bank):
        refuse("E-RANGE", f"count is {count}, expected 1 to {len(bank)} (the bank)")
    return random.Random(f"rocket/drawn/{seed}").sample(sorted(bank), count)
