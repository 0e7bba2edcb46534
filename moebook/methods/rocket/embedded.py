"""The embedded bank: twelve LoRAs on `nano` that ship, and the recipe that makes them anywhere."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from moebook.methods.rocket import bank, catalogue
from moebook.methods.rocket.loras import Lora

FOLDER = Path(__file__).parent / "nano"
RECIPE = FOLDER / "recipe.yaml"


def recipe() -> dict[str, Any]:
    """Return the recipe: ``rows`` a task, and the settings of `bank.train`."""
    settings: dict[str, Any] = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    return settings | {"targets": tuple(settings["targets"])}


def make(
    model: nn.Module,
    tokenizer: Any,
    folder: str | Path,
    *,
    only: Collection[str] = catalogue.EMBEDDED,
) -> dict[str, Lora]:
    """Train the bank by its recipe, or the part of it that the folder does not hold yet.

    About five minutes for ``nano`` on one core.

    Args:
        model: The base, unaltered.
        tokenizer: Its tokenizer.
        folder: Where the bank stands, one folder a LoRA.
        only: Names of `catalogue.EMBEDDED`, two at least.

    Raises:
        Refusal: Those of `bank.train`.
    """
    settings = recipe()
    left_out = [name for name in catalogue.EMBEDDED if name not in only]
    sets = catalogue.embedded(settings.pop("rows"), seed=settings["seed"], without=left_out)
    return bank.train(model, tokenizer, sets, folder, **settings)


def load(model: nn.Module, tokenizer: Any, folder: str | Path = "") -> dict[str, Lora]:
    """Open a bank: the shipped one, any folder of LoRAs, or one made on the spot by the recipe.

    Args:
        model: The base, unaltered; the shipped bank is of ``nano``.
        tokenizer: Its tokenizer, for a bank that has to be made.
        folder: Empty for the shipped bank. A folder without a LoRA gets one trained by `make`.

    Raises:
        Refusal: Those of `bank.open` and `bank.train`.
    """
    place = Path(folder) if folder else FOLDER
    if folder and not list(place.glob(f"[!.]*/{bank.loras.SETTINGS}")):
        return make(model, tokenizer, place)
    return bank.open(place, model)
