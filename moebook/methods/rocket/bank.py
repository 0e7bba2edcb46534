"""The bank of LoRAs: read after strict checks, trained on its sets of rows, guarded against leaks.

The shipped bank is twelve LoRAs on ``nano`` in the package, beside the recipe that
makes them anywhere; ``catalogue.yaml`` lists their sets and the paper's 38.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
from peft import LoraConfig
from pydantic import Field, SkipValidation
from torch import nn

from moebook import training
from moebook.data import encode, hub, mixtures, tasks
from moebook.data.tasks import Task
from moebook.data.tasks.pools import reserved
from moebook.data.templates import Source
from moebook.errors import located, refuse, refuse_unknown
from moebook.lists import listed
from moebook.methods.rocket import loras
from moebook.methods.rocket.loras import Alpha, Lora, Rank, check_alike
from moebook.models.checkpoint import fingerprint
from moebook.models.lora import in_wrapper
from moebook.runtime import random_states_kept
from moebook.settings import Count, Each, Place, Seed, Share, checked
from moebook.storage import formed, locked
from moebook.training.batches import Batches
from moebook.training.checkpoints import own_folder
from moebook.training.recipe import Recipe

__all__ = [
    "check",
    "guarded",
    "leaks",
    "load",
    "read",
    "train",
]

Bank = Mapping[str, Lora]
Row = dict[str, str]
Pins = Mapping[str, hub.Origin]
Origin = Literal["embedded", "hub"]  # where rows come from
NOWHERE: Pins = hub.pins("")
FOLDER = Path(__file__).parent / "nano"


def _source(entry: dict[str, Any]) -> Source:
    """Return a source of the catalogue: one that the hub's module knows, or of its own fields."""
    if "known" in entry:
        return hub.CATALOGUE[entry["known"]]
    shared = CATALOGUE["collected"] if "files" in entry else {}
    return Source(**shared, **entry)


with formed(Path(__file__).with_name("catalogue.yaml")) as CATALOGUE:
    EMBEDDED: list[str] = CATALOGUE["embedded"]
    QUESTIONS: list[str] = CATALOGUE["questions"]
    HELD_OUT: dict[str, str] = CATALOGUE["held_out"]
    TESTED: dict[str, str] = HELD_OUT | CATALOGUE["open"]
    SOURCES: dict[str, Source] = {
        name: _source(entry) for name, entry in CATALOGUE["sources"].items()
    }
SETS: dict[str, Source] = hub.CATALOGUE | SOURCES
with formed(FOLDER / "recipe.yaml") as RECIPE:
    # Of each set, at most; the rest are settings of `train`.
    ROWS: int = RECIPE.pop("rows")
TABLE_12 = {
    "epochs": 3,
    "batch": 32,
    "lr": 5e-5,
    "schedule": "cosine",
    "weight_decay": 1e-4,
}
"""The paper's training of one LoRA: 2 rows x 16 accumulated are 32 a step."""

# Of what `training.fit` takes, all that leaves a LoRA as it is.
ASIDE = {"every", "label", "milestones", "output", "pad_id", "shards"}


def load(
    model: nn.Module,
    tokenizer: Any,
    folder: str | Path = "",
    *,
    names: Collection[str] = (),
    **changes: Any,
) -> dict[str, Lora]:
    """Load ``names``, or all, of the shipped bank, which is of ``nano``, or of a folder's.

    A folder that is missing or empty gets those that `make` trains by ``changes``, two or more.
    One process does that while others wait, beside the folder, which appears when all are there. A
    folder with LoRAs by other ``changes`` than are given is refused (E-EXISTS).
    """
    # Whole: a draft and a lock are named after the folder, which "." does not name.
    target = Path(os.path.expanduser(folder or FOLDER)).resolve()
    if vacant(target):
        if len({*names}) == 1:
            alone = f"a bank is to be made of '{next(iter(names))}' alone"
            refuse("E-BANK", f"{target}: {alone}, expected 2 names or more")
        with locked(target.with_name(f".{target.name}.lock"), wait=True):
            # Looked at again: whoever held the lock may have made it.
            if vacant(target):
                draft = target.with_name(f".{target.name}")
                make(model, tokenizer, names or EMBEDDED, draft, **changes)
                stood_in = target.exists() and target.samefile(".")
                draft.rename(target)
                if stood_in:  # the empty folder, which is gone
                    os.chdir(target)
    bank = read(target, model)
    for name in names:
        refuse_unknown(name, bank, "E-BANK", f"{target} has no LoRA '{name}';")
    if changes:
        # All are there, so that nothing is trained: each is taken by its settings, or refused.
        fix = f"or leave out {', '.join(changes)}, or name an empty folder"
        with located("", fix=fix):
            make(model, tokenizer, bank, target, **changes)
    return {name: bank[name] for name in names or bank}


def vacant(folder: Path) -> bool:
    """Whether a folder is missing or empty, so that a bank is to be made there."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def read(folder: str | Path, model: nn.Module) -> dict[str, Lora]:
    """Read the PEFT folders of a folder as this base's bank; W-BASE tells of untied ones."""
    base = fingerprint(model)
    bank = {path.name: loras.read(path, model, base) for path in loras.folders(folder)}
    check(bank)
    foreign = [name for name, lora in bank.items() if lora.base != base]
    if foreign:
        which = (
            f"{len(foreign)} of {len(bank)} LoRAs carry no fingerprint of their base"
        )
        fit = f"({', '.join(foreign[:3])}); they fit this one by keys and shapes"
        warnings.warn(f"W-BASE: {which} {fit}", stacklevel=2)
    return bank


def check(bank: Bank, *, ranks: bool = True) -> None:
    """Refuse what nothing can be chosen from: two LoRAs or more, alike, distinct and trained."""
    if len(bank) < 2:
        names = ", ".join(bank) or "none"
        refuse(
            "E-BANK", f"the bank holds {len(bank)} LoRAs ({names}); expected 2 or more"
        )
    check_alike(list(bank.values()), ranks=ranks)
    names_by_digest: dict[str, str] = {}
    for name, lora in bank.items():
        if lora.idle:
            refuse(
                "E-BANK", f"'{name}' changes nothing (B A = 0 everywhere): remove it"
            )
        twin = names_by_digest.setdefault(lora.digest, name)
        if twin != name:
            refuse("E-BANK", f"'{twin}' and '{name}' are the same LoRA: remove one")


@checked
def train(
    model: nn.Module,
    tokenizer: Any,
    sets: SkipValidation[Mapping[str, Sequence[Row]]],
    folder: Place | None = None,
    *,
    rank: Rank = 16,
    alpha: Alpha = 16.0,
    targets: Annotated[Each[str], Field(min_length=1)] = ("q_proj", "v_proj"),
    dropout: Share = 0.05,
    format: str = "camel",
    max_length: Count = 1024,
    seed: Seed = 0,
    own_starts: bool = False,
    **settings: Any,
) -> dict[str, Lora]:
    """Train one PEFT LoRA a data set (Sec. 3.1.3) and keep it in the folder; reuse what is there.

    A LoRA in the folder is taken when it comes from the same base, settings and tokens, by their
    digest in the order of the rows; one that was written before digests were kept, when its prompts
    are the same, whatever the answers. The base is given back as it was. Rank and targets are the
    paper's, dropout is as released; the paper gives no alpha. Rows above ``max_length`` tokens are
    left out and reported (the paper cuts them). The seed is of the start and of the rows' order, so
    all LoRAs share their first A, unless ``own_starts`` has each add its place. ``settings`` are
    for `training.fit`, else `TABLE_12`. Checkpoints of each LoRA go to a folder of its own in
    ``output``. A ``penalty`` cannot be compared, so it is refused where there is a folder.
    """
    if folder and settings.get("penalty"):
        why = f"penalty is a function, by which no LoRA in {folder} is known again"
        refuse("E-USAGE", f"{why}: train without a folder, then write by loras.write")
    # Where steps are given, the paper's epochs do not count.
    plan = {
        k: v for k, v in TABLE_12.items() if k != "epochs" or "steps" not in settings
    }
    plan |= settings
    shape = {"rank": rank, "alpha": alpha, "targets": list(targets), "dropout": dropout}
    facts = {**shape, "format": format, "max_length": max_length, **_compared(plan)}
    config = form(model, rank, alpha, list(targets), dropout)
    base = fingerprint(model)
    bank = {}
    for place, (name, rows) in enumerate(sets.items()):
        start = seed + place * own_starts
        encoded = encode(rows, tokenizer, format=format, max_length=max_length)
        digest = Batches(encoded, 1, seed=0, pad_id=0).digest()
        # By this a LoRA in the folder is known again, and by data and prompts a leak.
        known = {
            "data": name,
            "prompts": hashes(rows),
            # As JSON gives it back: with lists for tuples.
            "training": json.loads(
                json.dumps({**facts, "seed": start, "digest": digest})
            ),
        }
        path = Path(folder, name) if folder else None
        if path and path.is_dir():
            bank[name] = loras.read(path, model, base)
            odd = ", ".join(_differing(bank[name], known))
            if odd:
                other = f"{path} was trained on other rows or settings ({odd})"
                refuse("E-EXISTS", f"{other}: remove it")
            continue
        plan |= {"pad_id": tokenizer.pad_token_id or 0, "seed": start, "label": name}
        plan["output"] = own_folder(settings.get("output"), name)
        bank[name] = tune(model, encoded, config, name=name, base=base, **plan)
        bank[name].provenance.update(known)
        if path:
            loras.write(bank[name], path)
    if len(bank) > 1:  # of one there is nothing to compare
        check(bank)
    return bank


def form(
    model: nn.Module, rank: int, alpha: float, targets: Sequence[str], dropout: float
) -> LoraConfig:
    """Return a LoRA's form on a model, as PEFT takes it."""
    paths = list(loras.linears(model, targets))
    return LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=paths
    )


def _compared(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what settings for `training.fit` say of a LoRA; of a penalty, that there is one."""
    given = plan.keys() - ASIDE - {"penalty"}
    recipe = Recipe(**{key: plan[key] for key in given})
    facts = {key: getattr(recipe, key) for key in given}
    return facts | {"penalty": True} if plan.get("penalty") else facts


def _differing(lora: Lora, known: Mapping[str, Any]) -> list[str]:
    """Name the facts of a LoRA that are not as known; one without a digest is not asked for it."""
    found = dict(lora.provenance.get("training") or {})
    wanted = dict(known["training"])
    if "digest" not in found:  # written before there was one
        del wanted["digest"]
        found = {key: value for key, value in found.items() if key not in ASIDE}
    odd = [key for key in ("data", "prompts") if lora.provenance.get(key) != known[key]]
    for key in {**wanted, **found}:
        # What is not there is not None either.
        if found.get(key, ...) != wanted.get(key, ...):
            odd.append(key)
    return odd


def tune(
    model: nn.Module,
    encoded: Any,
    config: LoraConfig,
    *,
    name: str,
    base: str,
    **settings: Any,
) -> Lora:
    """Train a fresh PEFT LoRA on encoded rows and take it off the base, which is as it was again.

    Its provenance keeps each step's loss. ``settings`` are for `training.fit`; the seed starts it.
    """
    # PEFT freezes the base, so what required a gradient is put back at the end.
    learning = {path: p.requires_grad for path, p in model.named_parameters()}
    # PEFT draws A by the global generator, which is put back as well.
    with random_states_kept():
        torch.manual_seed(settings["seed"])
        wrapped = in_wrapper(model, config)
    try:
        losses = training.fit(wrapped, encoded, **settings).loss
        down = {}
        up = {}
        for path, part in wrapped.get_base_model().named_modules():
            if hasattr(part, "lora_A"):
                # A [R, D] and B [O, R].
                down[path] = part.lora_A["default"].weight.detach().cpu().clone()
                up[path] = part.lora_B["default"].weight.detach().cpu().clone()
    finally:
        wrapped.unload()
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(learning[path])
    provenance = {"losses": [round(loss, 5) for loss in losses]}
    return Lora(
        name, config.r, float(config.lora_alpha), down, up, base, provenance=provenance
    )


def make(
    model: nn.Module,
    tokenizer: Any,
    names: Collection[str],
    folder: str | Path | None = None,
    *,
    rows: int = ROWS,
    pins: Pins = NOWHERE,
    **changes: Any,
) -> dict[str, Lora]:
    """Train two or more of `EMBEDDED` and `SETS`, or what the folder lacks of them.

    The recipe is the shipped bank's; ``rows`` a set and ``changes`` for `train` go before its own.
    """
    for name in names:
        refuse_unknown(
            name, [*EMBEDDED, *SETS], "E-DATA", f"no set of the bank is '{name}';"
        )
    sets = embedded(rows, seed=RECIPE["seed"], names=names)
    sets |= {
        name: source_rows(name, pins[name])[:rows] for name in names if name in SETS
    }
    return train(model, tokenizer, sets, folder, **RECIPE | changes)


def hashes(rows: Iterable[Row]) -> list[str]:
    """Hash the rows' prompts (64 bits of sha256; case and spacing do not count), sorted."""
    return sorted({digest[:16] for digest in mixtures.hashes(rows)})


def leaks(bank: Bank, rows: Sequence[Row], *, task: str) -> pd.DataFrame:
    """Find the LoRAs that have seen the target task: by its name, or by prompts in common.

    ``rows`` are all that are known of the target, test rows included. Returns each LoRA's
    ``status`` (``"leak"``, ``"clean"``, or ``"unknown"`` where it does not tell what it was trained
    on), ``shared`` (prompts in common) and ``data`` (its data set).
    """
    target = set(hashes(rows))
    lines = {}
    for name, lora in bank.items():
        data = lora.provenance.get("data")
        prompts = lora.provenance.get("prompts")
        shared = len(target & set(prompts or ()))
        if shared or task in (data, name):
            status = "leak"
        elif prompts is None:
            status = "unknown"
        else:
            status = "clean"
        lines[name] = {"status": status, "shared": shared, "data": data}
    columns = ["status", "shared", "data"]
    return pd.DataFrame.from_dict(lines, orient="index", columns=columns)


def guarded(bank: Bank, rows: Sequence[Row], *, task: str) -> dict[str, Lora]:
    """Return the bank without the LoRAs that `leaks` flags as ``"leak"``; two must be left."""
    flags = leaks(bank, rows, task=task)["status"]
    clean = {name: lora for name, lora in bank.items() if flags[name] != "leak"}
    check(clean)
    return clean


def source_rows(name: str, revision: hub.Origin, split: str = "") -> list[Row]:
    """Load one of `SETS` in its template, from the hub at a commit or from a folder."""
    refuse_unknown(name, SETS, "E-DATA", f"unknown data set '{name}';")
    pairs = hub.pinned(SETS[name], revision, split)
    return [{"task": name} | SETS[name].row(row, where) for where, row in pairs]


@checked
def embedded(
    size: Count, *, seed: int = 0, names: Each[str] = EMBEDDED
) -> dict[str, list[Row]]:
    """Draw at most ``size`` training rows of each task, without what ``copyleft`` is tested on.

    Of ``names`` those count that are embedded tasks: a bank may hold LoRAs of other data.
    """
    apart = reserved()
    sets = {}
    for name in (name for name in EMBEDDED if name in names):
        rows = tasks.rows(name, "train", tasks.find(name).available("train"), seed)
        if name == "licence":
            rows = [row for row in rows if not any(c in row["prompt"] for c in apart)]
        sets[name] = rows[:size]
    return sets


@checked
def targets(
    names: Annotated[Each[str | Task], Field(min_length=1)],
    source: Origin,
    pins: SkipValidation[Pins],
    split: Literal["test", "fresh"] = "test",
) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """Return, by target task, its annotated rows, those for training, and the rows that test it.

    A target is a `Task` of your own, or a name: of an embedded task, with test rows of a
    ``split``, ``"test"`` or ``"fresh"``, or with the source ``"hub"`` of a set there, at its place
    among ``pins`` (`hub.pins`). Rows go by a target's name, so different targets of one
    name are refused.
    """
    by_name: dict[str, str | Task] = {}
    for target in names:
        name = target if isinstance(target, str) else target.name
        if by_name.setdefault(name, target) != target:
            hint = "expected a name each: rename the file of one"
            refuse("E-DATA", f"two targets are called '{name}', {hint}")
    on_hub = [name for name in names if source == "hub" and isinstance(name, str)]
    for name in on_hub:
        unknown = f"no test rows are known for '{name}';"
        refuse_unknown(name, TESTED, "E-DATA", unknown)
    left = "train" if split == "test" else "rest"

    def drawn(of_own: str, of_hub: Mapping[str, str]) -> dict[str, list[Row]]:
        rows: dict[str, list[Row]] = {}
        for target in names:
            if target in on_hub:
                place = hub.origin(target, pins)
                rows[target] = source_rows(target, place, of_hub.get(target, ""))
            else:
                task = tasks.find(target) if isinstance(target, str) else target
                rows[task.name] = task.rows(of_own, task.available(of_own))
        return rows

    return drawn(left, {}), drawn(split, TESTED)


@checked
def open_data(
    sets: str, size: Count, source: Origin, pins: SkipValidation[Pins]
) -> list[Row]:
    """Return at most ``size`` open rows of each of the embedded bank's sets, or of the hub's.

    ``sets`` are names with commas between, of `SETS`; embedded rows are of all that are `EMBEDDED`.
    """
    if source == "embedded":
        drawn = embedded(size)
    else:
        names = listed("sets", sets, SETS)
        if not names:
            refuse("E-DATA", "sets names no data set of the hub, as in GSM8K,PIQA")
        drawn = {
            name: source_rows(name, hub.origin(name, pins))[:size] for name in names
        }
    return [row for rows in drawn.values() for row in rows]
