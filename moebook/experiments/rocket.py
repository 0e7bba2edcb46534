"""Rocket's arms and what they need; how each chooses and trains `experiments.pipeline` says."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moebook import lists
from moebook.data import tasks
from moebook.data.tasks.task import NAME
from moebook.errors import Refusal, located, refuse
from moebook.experiments import needs, rates
from moebook.experiments.arm import Complaints, Settings, complaint, picked
from moebook.experiments.checks import Check
from moebook.experiments.effects import Idle
from moebook.experiments.pipeline import Arm
from moebook.methods import rocket

# Parameters that one arm alone takes.
OWN = {
    "data_strictly_deduplicated": "strict",
    "mixture": "repeats",
    "perplexity": "tuned",
}
# Arms that mix nothing: a LoRA of the target's own set; the bank's, each tuned alone.
UNMIXED = ("expert_lora", "perplexity")
SIZES = "shots candidates experts top_k budget"  # parameters that are fields of Config


def main(settings: Settings) -> rocket.Config:
    """Return the settings of the mixture, of which each arm changes something."""
    sizes = picked(settings, f"{SIZES} threshold")
    return rocket.Config.preset(settings["preset"], **sizes)


def known(settings: Settings) -> dict[str, Arm | None]:
    """Return all arms by name, as the sizes allow them; sizes that allow none are refused."""
    with located("", "E-RANGE"):
        return arms(main(settings), strict=settings["strict"])


def arms(config: rocket.Config, *, strict: float) -> dict[str, Arm | None]:
    """Return all arms of the study by name, without those that the settings do not allow.

    Vanilla comparisons (Table 1), other experts (Table 2), data (Table 3), samplers, budgets C and
    thresholds (Figures 9, 10), and K, N and k (Tables 4, 6, 7). None stands for the `UNMIXED`.
    """
    single = replace(config, experts=1, top_k=1)
    budgets = (max(1, config.budget // 3), config.budget * 4)
    experts = [n for n in (2, 6, 8) if config.top_k <= n <= config.candidates]
    study: dict[str, Arm | None] = {
        "mixture": Arm(config=config),
        "source_best_sft": Arm(config=config, by=("best",)),
        "random_lora": Arm(config=single, by=("random",)),
        "random_experts": Arm(config=config, by=("random",)),
        "experts_by_perplexity": Arm(config=config, by=("perplexity",)),
        "experts_by_accuracy": Arm(config=config, by=("accuracy",)),
        "experts_without_diversity": Arm(config=config, by=("perplexity", "accuracy")),
        "experts_normalised": Arm(config=replace(config, ranking="normalised")),
        "experts_identical": Arm(config=config, by=("perplexity",), identical=True),
        "shots_only": Arm(config=config, open_data=False),
    }
    changes: dict[str, dict[str, Any]] = {
        "random_data": {"sampler": "random"},
        "data_with_duplicates": {"duplicates": "keep"},
        "data_by_kde": {"sampler": "kde", "gamma": 10.0},
        "data_by_narrower_kde": {"sampler": "kde", "gamma": 2.0},
        "data_by_hull": {"sampler": "hull"},
        "data_by_repr_filter": {"duplicates": "repr"},
        **{f"budget{c}": {"budget": c} for c in budgets},
        "data_strictly_deduplicated": {"threshold": strict},
        **{f"shots{n}": {"shots": n} for n in (1, 5, 20) if n < config.shots},
        **{f"experts{n}": {"experts": n} for n in experts},
        **{f"selected{n}": {"top_k": n} for n in (1, 3, 4) if n <= config.experts},
    }
    for name, change in changes.items():
        study[name] = Arm(config=replace(config, **change))
    return study | dict.fromkeys(UNMIXED)


def tested(targets: Sequence[str], benchmarks: Sequence[str]) -> dict[str, str]:
    """Return what evaluates each target: the benchmarks in their order, or itself without any."""
    if benchmarks and len(benchmarks) != len(targets):
        given = f"benchmarks has {len(benchmarks)} names, targets has {len(targets)}"
        refuse("E-RANGE", f"{given}: give one a target, in the targets' order")
    return dict(zip(targets, benchmarks or targets, strict=True))


def idle(settings: Settings, arms: Mapping[str, Arm | None]) -> Idle:
    """Tell which parameters have no effect on these arms."""
    if not makes_bank(settings):
        yield (
            "bank_rows bank_epochs bank_rate bank_rank",
            "the LoRAs of the bank are there already",
        )
    if len(rates.grid(settings)) == 1:
        yield "valid_rows", "with a single rate none is chosen"
    yield from of_the_source(settings)
    if settings["epochs"]:
        yield "steps", "epochs says how long arms train"
    for name, parameters in OWN.items():
        if name not in arms:
            yield parameters, f"the arm {name} alone takes it"


def makes_bank(settings: Settings) -> bool:
    """Whether the LoRAs of the bank are to be trained, into a folder that is missing or empty."""
    folder = settings["bank_folder"]
    return bool(folder) and rocket.bank.vacant(Path(os.path.expanduser(folder)))


def of_the_source(settings: Settings) -> Idle:
    """Tell what has no effect where all rows are embedded, in Rocket's notebook and the rivals'."""
    if settings["source"] == "embedded" and not settings["benchmarks"]:
        yield (
            "revisions data_folder pool_sets",
            "embedded tasks take nothing from the hub",
        )


def _needs(
    settings: Settings,
    arms: Mapping[str, Arm | None],
    every: Mapping[str, Arm | None],
    device: torch.device | None,
) -> Complaints:
    yield from rates.needs(settings, arms, every, at_least_one=True)
    yield from targets_and_bank(settings)
    yield from _steps(settings, arms)
    yield from _retrained(settings)
    yield from _rank(settings)
    if "data_by_hull" in arms:
        yield from _hull(settings)
    if "expert_lora" in arms:
        yield from _rows_to_judge_by(settings)
    yield from needs.optimizer(settings, device)


def _retrained(settings: Settings) -> Complaints:
    """Complain about LoRAs to be trained anew that are not among the members."""
    if settings["retrain"] and not settings["bank_folder"]:
        bank = members(settings)
        yield from complaint("", lists.listed, "retrain", settings["retrain"], bank)


def _rank(settings: Settings) -> Complaints:
    """Complain about a rank that the LoRAs of the shipped bank do not have.

    In any run LoRAs of the targets' own sets stand beside them: the leak check is tried by these.
    """
    rank = rocket.bank.RECIPE["rank"]
    if settings["bank_rank"] != rank and not settings["bank_folder"]:
        own = "those of the targets' own sets"
        why = f"LoRAs of the shipped bank have rank {rank}, and {own} stand beside them"
        yield f"bank_rank = {settings['bank_rank']}: {why}; take {rank}, or give a bank_folder"


def _hull(settings: Settings) -> Complaints:
    """Complain about fewer shots than a hull takes: one more than its space has axes."""
    least = main(settings).components + 1
    if settings["shots"] < least:
        why = f"data_by_hull takes open rows in the hull of the shots, which takes {least}"
        yield f"shots = {settings['shots']}: {why}; give more, or leave data_by_hull out of arms"


def _rows_to_judge_by(settings: Settings) -> Complaints:
    """Complain about targets of which validation leaves no row for expert_lora to train on."""
    try:
        tried = rates.grid(settings)
    except Refusal:  # which is told elsewhere
        return
    if len(tried) < 2:
        return
    for name, count in annotated(settings).items():
        if settings["valid_rows"] >= count:
            why = f"{name} has {count} annotated rows, and expert_lora trains on the others"
            yield f"valid_rows = {settings['valid_rows']}: {why}; take less"


def _steps(settings: Settings, arms: Mapping[str, Arm | None]) -> Complaints:
    """Complain about arms whose only step is that of the warm-up."""
    if not settings["epochs"]:
        if any(name != "expert_lora" for name in arms):
            yield from needs.more_than_a_step(settings, "steps")
        if "perplexity" in arms and settings["steps"] > 1:
            half = " of perplexity, half of them,"
            yield from needs.more_than_a_step(settings, "steps", of=half, part=2)
        return
    short: dict[int, list[str]] = {}  # arms of one step, by their rows
    for name, arm in arms.items():
        if name == "expert_lora":
            continue
        rows = settings["shots"]  # of perplexity, which chooses no open rows
        if arm:
            rows = arm.config.shots
            if arm.open_data:
                rows += arm.config.budget
        steps = settings["epochs"] * math.ceil(rows / settings["batch"])
        if steps == 1:
            short.setdefault(rows, []).append(name)
    for rows, names in short.items():
        have = f"{', '.join(names)} {'has' if len(names) == 1 else 'have'}"
        why = f"{have} at most {rows} rows, so one step, that of the warm-up, at rate 0"
        remedy = "take 2 epochs or more"
        if rows > 1:
            remedy += f", or a batch below {rows}"
        yield f"epochs = 1 and batch = {settings['batch']}: {why}; {remedy}"


def annotated(settings: Settings) -> dict[str, int]:
    """Return how many annotated rows embedded targets and users' files have, as written.

    Left out are targets of the hub, and what cannot be read, of which others complain.
    """
    names = settings["targets"].split(",")
    if settings["source"] == "hub":
        names = list(filter(tasks.is_file, names))
    return needs.available(settings, names)


def targets_and_bank(settings: Settings) -> Complaints:
    """Complain about what Rocket's notebook and the rivals' have in common."""
    yield from _targets(settings)
    yield from _bank(settings)
    yield from encoder_there(settings)


def _targets(settings: Settings) -> Complaints:
    """Complain about targets: their names, their rows, and what evaluates them."""
    listed = {"targets": settings["targets"]}
    splits = (needs.training_split(settings), settings["test_split"])
    yield from needs.named(listed)
    yield from needs.files(listed, *splits)
    targets = settings["targets"].split(",")
    if settings["source"] == "embedded":
        yield from needs.embedded_tasks(
            "targets", settings["targets"], "source = 'embedded'"
        )
    yield from _shots(settings)
    benchmarks = settings["benchmarks"].split(",") if settings["benchmarks"] else []
    if benchmarks:
        yield from needs.named({"benchmarks": settings["benchmarks"]})
    yield from complaint("", tested, targets, benchmarks)


def _shots(settings: Settings) -> Complaints:
    """Complain about targets of which the shots leave no row to judge rates by.

    Rows of one prompt count once: a row with the prompt of a shot judges nothing. A target without
    any row is complained of elsewhere.
    """
    split = needs.training_split(settings)
    for name, rows in annotated(settings).items():
        if not rows:
            continue
        count = len({row["prompt"] for row in tasks.rows(name, split, rows)})
        if count <= settings["shots"]:
            have = f"{rows} annotated rows"
            if count < rows:
                have += f", of {count} different prompts"
            why = f"{name} has {have}, and one at least judges rates"
            remedy = f"take 1 to {count - 1}" if count > 1 else "give it more"
            yield f"shots = {settings['shots']}: {why}; {remedy}"


def _bank(settings: Settings) -> Complaints:
    """Complain about a bank: its folder, its members, their number and their training."""
    folder = settings["bank_folder"]
    if folder and not makes_bank(settings):
        where = f"bank_folder = {folder!r}"
        yield from complaint(where, rocket.loras.folders, folder)
    if settings["members"]:
        yield from needs.named({"members": settings["members"]})
    whole = _whole(settings)
    if settings["members"] and whole:
        yield from complaint("", lists.listed, "members", settings["members"], whole)
    names = members(settings)
    if names is not None:
        yield from _unfit_names(settings, names)
        yield from too_few(settings, names)
    if makes_bank(settings):
        yield from bank_training(settings)


def _unfit_names(settings: Settings, names: Sequence[str]) -> Complaints:
    """Complain about LoRAs of a folder under whose names no score could be kept."""
    if not settings["bank_folder"]:
        return
    where = f"bank_folder = {settings['bank_folder']!r}"
    remedy = "rename its folder, or leave it out of members"
    for name in names:
        if name == "base":
            why = "has the name under which the base's own scores are kept"
            yield f"{where}: its LoRA 'base' {why}; {remedy}"
        elif not NAME.fullmatch(name):
            why = "scores are kept under names of letters, digits, '_', '-' and '.'"
            yield f"{where}: its LoRA {name!r}: {why}; {remedy}"


def bank_training(settings: Settings) -> Complaints:
    """Complain about LoRAs of a bank whose only step is that of the warm-up."""
    batch = rocket.bank.RECIPE["batch"]
    steps = settings["bank_epochs"] * math.ceil(settings["bank_rows"] / batch)
    if steps == 1:
        sizes = f"bank_rows = {settings['bank_rows']} and bank_epochs = 1"
        why = f"a LoRA of the bank has one step of {batch} rows, in the warm-up, at rate 0"
        yield f"{sizes}: {why}; give more rows or epochs"


def encoder_there(settings: Settings) -> Complaints:
    """Complain about an encoder's folder that is not there."""
    encoder = settings["encoder"]
    if encoder.startswith(("/", "./", "~")) and not Path(encoder).expanduser().exists():
        yield f"encoder = {encoder!r}: there is no such folder; take minilm, or org/name@commit"


def too_few(settings: Settings, bank: Sequence[str]) -> Complaints:
    """Complain about a bank with fewer LoRAs than are to be chosen from for a target.

    A LoRA of the target's own task is left out there: it has seen the rows.
    """
    where = "members lists" if settings["members"] else "the whole bank holds"
    for target in settings["targets"].split(","):
        size = len([name for name in bank if name != target])
        seen = ""
        if target in bank:
            seen = f", of which {target}'s has seen the rows of the target {target}"
        if size < 2:
            why = f"there is nothing to choose from{seen}"
            yield f"members = {settings['members']!r}: {why}; name two LoRAs or more"
        elif settings["candidates"] > size:
            have = f"{where} {len(bank)}{seen}"
            yield f"candidates = {settings['candidates']}: {have}; take {size} or less"


def members(settings: Settings) -> list[str] | None:
    """Return the names of the LoRAs that a notebook works with.

    None where a folder is still to be filled, or holds no LoRA, of which others complain.
    """
    if settings["members"]:
        return list(settings["members"].split(","))
    return _whole(settings)


def _whole(settings: Settings) -> list[str] | None:
    """Return the names of all LoRAs of the bank; None as `members` does."""
    if not settings["bank_folder"]:
        return list(rocket.bank.EMBEDDED)
    if makes_bank(settings):
        return None
    try:
        return [path.name for path in rocket.loras.folders(settings["bank_folder"])]
    except Refusal:
        return None


check = Check(known, _needs, idle)
