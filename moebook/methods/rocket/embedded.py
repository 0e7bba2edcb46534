"""The embedded bank: twelve LoRAs on `nano` that ship, and the recipe that makes them anywhere."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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


def retrained(
    model: nn.Module, tokenizer: Any, shipped: Mapping[str, Lora], only: Collection[str]
) -> pd.DataFrame:
    """Train some of a bank again by the recipe and compare.

    Args:
        model: The base, unaltered.
        tokenizer: Its tokenizer.
        shipped: The bank.
        only: Names of `catalogue.EMBEDDED`, two at least; or none.

    Returns:
        Indexed by name: ``gap``, the largest difference of a step's loss (nats), and ``equal``,
        whether the LoRAs are equal bit for bit.

    Raises:
        Refusal: Those of `bank.train`.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, lora in make(model, tokenizer, folder, only=only).items() if only else ():
            one, other = (each.provenance["losses"] for each in (lora, shipped[name]))
            gap = np.abs(np.subtract(one, other)).max()
            found[name] = [gap, lora.digest == shipped[name].digest]
    return pd.DataFrame.from_dict(found, orient="index", columns=["gap", "equal"])


def experts(
    model: nn.Module,
    tokenizer: Any,
    sets: Mapping[str, Sequence[bank.Row]],
    source: str,
    **changes: Any,
) -> dict[str, Lora]:
    """Train a LoRA on each target's own training set ("Expert LoRA"), as the bank's were trained.

    Args:
        model: The base, unaltered.
        tokenizer: Its tokenizer.
        sets: Rows by target, two targets at least.
        source: ``"embedded"`` for the recipe, ``"hub"`` for the paper's Table 12.
        changes: Settings of `bank.train` that go before these.

    Raises:
        Refusal: Those of `bank.train`.
    """
    settings = recipe() if source == "embedded" else {}
    settings.pop("rows", None)
    with tempfile.TemporaryDirectory() as folder:
        return bank.train(model, tokenizer, sets, folder, **(settings | changes))


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
