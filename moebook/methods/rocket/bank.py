"""The bank of LoRAs: opened from a folder after strict checks, or trained and cached there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from moebook import training
from moebook.data import encode, mixtures
from moebook.errors import refuse
from moebook.methods.rocket import loras
from moebook.methods.rocket.loras import Lora
from moebook.models.checkpoint import fingerprint

Row = Mapping[str, str]
TABLE_12: dict[str, Any] = {
    "epochs": 3,
    "batch": 32,
    "lr": 5e-5,
    "schedule": "cosine",
    "weight_decay": 1e-4,
}
"""The paper's training of one LoRA: 2 rows x 16 accumulated are 32 a step."""
_HASH = 16  # hexadecimal digits kept of a prompt's hash: 64 bits


def open(folder: str | Path, model: nn.Module) -> dict[str, Lora]:
    """Read every PEFT folder inside a folder as the bank of this base, by name in order.

    LoRAs without a manifest of ours (anyone's from the hub) are tied to the base by their keys and
    shapes alone; that is said in one warning (W-BASE).

    Args:
        folder: Holds one folder a LoRA, named as the LoRA.
        model: The base, unaltered.

    Raises:
        Refusal: Those of `loras.read`; E-BANK for an empty bank or one that `check` refuses.
    """
    folder = Path(folder)
    found = sorted(path.parent for path in folder.glob(f"[!.]*/{loras.SETTINGS}"))
    base = fingerprint(model)
    bank = {path.name: loras.read(path, model, base) for path in found}
    if not bank:
        refuse("E-BANK", f"{folder} holds no LoRA; expected folders with {loras.SETTINGS}")
    check(bank)
    foreign = [name for name, lora in bank.items() if lora.base != base]
    if foreign:
        warnings.warn(
            f"W-BASE: {len(foreign)} of {len(bank)} LoRAs carry no fingerprint of their base "
            f"({', '.join(foreign[:3])}); they fit this one by keys and shapes",
            stacklevel=2,
        )
    return bank


def check(bank: Mapping[str, Lora]) -> None:
    """Refuse what nothing can be chosen from: LoRAs must be two or more, alike and distinct.

    Raises:
        Refusal: E-BANK, naming the LoRAs, for fewer than two, other ranks, layers or bases than
            the first one's, two equal ones, or one that changes nothing (``B A = 0``).
    """
    if len(bank) < 2:
        names = ", ".join(bank) or "none"
        refuse("E-BANK", f"the bank holds {len(bank)} LoRAs ({names}); expected 2 or more")
    first = next(iter(bank.values()))
    seen: dict[str, str] = {}
    for name, lora in bank.items():
        alike(first, lora)
        if lora.idle:
            refuse("E-BANK", f"'{name}' changes nothing (B A = 0 everywhere): remove it")
        twin = seen.setdefault(lora.digest, name)
        if twin != name:
            refuse("E-BANK", f"'{twin}' and '{name}' are the same LoRA: remove one")


def alike(first: Lora, lora: Lora) -> None:
    """Refuse two LoRAs that cannot stand in one group (E-BANK), saying in what they differ."""
    for what, one, other in (
        ("rank", first.rank, lora.rank),
        ("targets", first.targets, lora.targets),
        ("layers", len(first.down), len(lora.down)),
        ("base", first.base, lora.base),
        ("base", first.provenance.get("base"), lora.provenance.get("base")),
    ):
        if one and other and one != other:
            names = f"'{first.name}' and '{lora.name}'"
            refuse("E-BANK", f"{names} differ in {what}: {one} and {other}; keep one kind")
    if first.down.keys() != lora.down.keys():
        odd = sorted(first.down.keys() ^ lora.down.keys())[0]
        refuse("E-BANK", f"'{first.name}' and '{lora.name}' differ in layers: {odd}")


def train(
    model: nn.Module,
    tokenizer: Any,
    sets: Mapping[str, Sequence[Row]],
    folder: str | Path,
    *,
    rank: int = 16,
    alpha: float = 16.0,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    dropout: float = 0.05,
    format: str = "camel",
    max_length: int = 1024,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Lora]:
    """Train one PEFT LoRA a data set (Sec. 3.1.3) and keep it in the folder; reuse what is there.

    A LoRA that stands in the folder is taken when it comes from the same base, rows and settings.
    The base is given back as it was. Rows above ``max_length`` are left out and reported (as
    released; the paper cuts them).

    Args:
        model: The base, unaltered.
        tokenizer: Its tokenizer.
        sets: Training rows by name of the LoRA.
        folder: Where the bank stands, one folder a LoRA.
        rank: R (16 in the paper).
        alpha: LoRA's alpha, which the paper does not give.
        targets: Names of the linear layers (q and v in the paper).
        dropout: LoRA's own, in [0, 1) (0.05 as released).
        format: A key of `data.chat.FORMATS`.
        max_length: Longest row in tokens.
        seed: Of the start and of the rows' order.
        settings: For `training.fit`; `TABLE_12` where not given.

    Raises:
        Refusal: E-EXISTS when a LoRA of that name was made otherwise; those of `data.encode` and
            `training.fit`; E-BANK as in `check`.
    """
    base, bank = fingerprint(model), {}
    form: dict[str, Any] = {"rank": rank, "alpha": alpha, "targets": targets, "dropout": dropout}
    plan = {k: v for k, v in TABLE_12.items() if k != "epochs" or "steps" not in settings}
    plan |= settings
    recipe = {**form, "format": format, "max_length": max_length, "seed": seed, **plan}
    recipe = {key: list(v) if isinstance(v, tuple) else v for key, v in recipe.items()}
    for name, rows in sets.items():
        known, kept = (
            {"data": name, "prompts": hashes(rows), "training": recipe},
            Path(folder, name),
        )
        if kept.is_dir():
            bank[name] = loras.read(kept, model, base)
            if any(bank[name].provenance.get(key) != value for key, value in known.items()):
                refuse("E-EXISTS", f"{kept} was trained on other rows or settings: remove it")
            continue
        encoded = encode(rows, tokenizer, format=format, max_length=max_length)
        plan["pad_id"] = tokenizer.pad_token_id or 0
        made = tune(model, encoded, name=name, base=base, seed=seed, **form, **plan)
        made.provenance.update(known)
        loras.write(made, kept)
        bank[name] = made
    check(bank)
    return bank


def tune(
    model: nn.Module,
    encoded: Any,
    *,
    name: str,
    base: str,
    rank: int,
    alpha: float,
    targets: tuple[str, ...],
    dropout: float,
    seed: int,
    **settings: Any,
) -> Lora:
    """Train a fresh PEFT LoRA on encoded rows and take it off the base again.

    Its provenance keeps the loss of every step.

    Args:
        model: The base; given back as it was, what requires a gradient included.
        encoded: From `data.encode`.
        name: The LoRA's name.
        base: Fingerprint of the base.
        rank: R.
        alpha: LoRA's alpha.
        targets: Names of the linear layers.
        dropout: LoRA's own, in [0, 1).
        seed: Of its start and of the rows' order.
        settings: For `training.fit`.
    """
    learning = {key: p.requires_grad for key, p in model.named_parameters()}
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(loras.linears(model, targets)),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, config)
    try:
        losses = training.fit(wrapped, encoded, seed=seed, label=name, **settings).loss
        paths = [path for path, part in wrapped.named_modules() if hasattr(part, "lora_A")]
        parts = {p.removeprefix("base_model.model."): wrapped.get_submodule(p) for p in paths}
        down = {p: m.lora_A["default"].weight.detach().cpu().clone() for p, m in parts.items()}
        up = {p: m.lora_B["default"].weight.detach().cpu().clone() for p, m in parts.items()}
    finally:
        wrapped.unload()
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(learning[key])
    known = {"losses": [round(loss, 5) for loss in losses]}
    return Lora(name, rank, float(alpha), down, up, base, provenance=known)


def hashes(rows: Sequence[Row]) -> list[str]:
    """Hash the rows' prompts (64 bits of sha256; case and spacing do not count), sorted."""
    return sorted({digest[:_HASH] for digest in mixtures.hashes(rows)})


def trainings(bank: Mapping[str, Lora]) -> pd.DataFrame:
    """Tell how each LoRA was trained, as far as it says.

    Returns:
        Indexed by name: ``rows`` (prompts), ``steps``, ``first loss`` and ``last loss`` (nats an
        answer token; the mean of the last twenty steps), NaN where it keeps no losses.
    """
    found = {}
    for name, lora in bank.items():
        losses = lora.provenance.get("losses") or [np.nan]
        rows = len(lora.provenance.get("prompts") or ())
        found[name] = [rows, len(losses), losses[0], np.mean(losses[-20:])]
    columns = ["rows", "steps", "first loss", "last loss"]
    return pd.DataFrame.from_dict(found, orient="index", columns=columns)


def leaks(bank: Mapping[str, Lora], rows: Sequence[Row], *, task: str) -> pd.DataFrame:
    """Find the LoRAs that have seen the target task: by its name, or by prompts in common.

    A bank whose best candidate was trained on the target's own training set makes a K-shot
    comparison worthless. ``guarded`` leaves such LoRAs out.

    Args:
        bank: By name.
        rows: All rows known of the target: its training, K-shot and test rows.
        task: The target's name.

    Returns:
        Indexed by name: ``status`` (``"leak"``, ``"clean"``, or ``"unknown"`` where the LoRA does
        not tell what it was trained on), ``shared`` (prompts in common), ``data`` (its data set).
    """
    target, found = set(hashes(rows)), {}
    for name, lora in bank.items():
        data, prompts = lora.provenance.get("data"), lora.provenance.get("prompts")
        shared = len(target & set(prompts or ()))
        leak = bool(shared) or task in (data, name)
        status = "leak" if leak else "unknown" if prompts is None else "clean"
        found[name] = {"status": status, "shared": shared, "data": data}
    return pd.DataFrame.from_dict(found, orient="index")


def guarded(bank: Mapping[str, Lora], rows: Sequence[Row], *, task: str) -> dict[str, Lora]:
    """Return the bank without the LoRAs that `leaks` flags as ``"leak"``.

    Raises:
        Refusal: E-BANK when fewer than two are left.
    """
    flags = leaks(bank, rows, task=task)["status"]
    kept = {name: lora for name, lora in bank.items() if flags[name] != "leak"}
    check(kept)
    return kept
