"""Rocket's arms and what they need; how each chooses and trains `methods.rocket.pipeline` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from moebook.data import tasks
from moebook.errors import Refusal, nearest, refuse
from moebook.experiments import needs, rates
from moebook.experiments.arm import Settings, asked, complaint, refuse_complaints
from moebook.methods import rocket
from moebook.methods.rocket.pipeline import Arm

SIZES = ("shots", "candidates", "experts", "top_k", "budget")


def main(settings: Settings) -> rocket.Config:
    """Return the settings of the mixture, of which each arm changes something."""
    sizes = {name: settings[name] for name in (*SIZES, "threshold")}
    return rocket.Config.preset(settings["preset"], **sizes)


def check(
    settings: Settings, device: torch.device | None = None
) -> dict[str, Arm | None]:
    """Return the arms asked for, or refuse parameters with which they cannot run (E-RANGE)."""
    try:
        every = rocket.pipeline.arms(main(settings), strict=settings["strict"])
    except Refusal as refusal:  # which arms there are these sizes say
        refuse("E-RANGE", refusal.message)
    arms = asked(settings, every)
    refuse_complaints(_needs(settings, list(arms), list(every), device))
    return arms


def _needs(
    settings: Settings, arms: list[str], every: list[str], device: torch.device | None
) -> Iterator[str]:
    yield from rates.needs(settings, arms, every, at_least_one=True)
    yield from on_a_bank(settings)
    rank = rocket.bank.RECIPE["rank"]
    if (
        "expert_lora" in arms
        and not settings["bank_folder"]
        and settings["bank_rank"] != rank
    ):
        why = f"LoRAs of the shipped bank have rank {rank}, and expert_lora's stand beside them"
        yield f"bank_rank = {settings['bank_rank']}: {why}; take {rank}, or give a bank_folder"
    least = main(settings).components + 1
    if "data_by_hull" in arms and settings["shots"] < least:
        why = f"data_by_hull takes open rows in the hull of the shots, which takes {least}"
        yield f"shots = {settings['shots']}: {why}; give more, or leave data_by_hull out of arms"
    several = len(settings["rates"].split(",")) > 1
    if "expert_lora" in arms and several and settings["source"] == "embedded":
        for name, count in annotated(settings).items():
            if settings["valid_rows"] >= count:
                why = f"{name} has {count} annotated rows, and expert_lora trains on the others"
                yield f"valid_rows = {settings['valid_rows']}: {why}; take less"
    yield from needs.optimizer(settings, device)


def annotated(settings: Settings) -> dict[str, int]:
    """Return how many annotated rows embedded targets have, by name."""
    split = "train" if settings["test_split"] == "test" else "rest"
    names = settings["targets"].split(",")
    return {
        name: tasks.find(name).available(split) for name in names if name in tasks.KNOWN
    }


def on_a_bank(settings: Settings) -> Iterator[str]:
    """Complain about what Rocket's notebook and the rivals' share: targets, members, sizes."""
    yield from needs.named({"targets": settings["targets"]})
    names = settings["targets"].split(",")
    if settings["source"] == "embedded":
        for name in names:
            if name and name not in tasks.KNOWN:
                why = "source = 'embedded' has embedded tasks alone"
                yield f"targets lists {name!r}: {why}: {nearest(name, tasks.KNOWN)}"
        for name, count in annotated(settings).items():
            if settings["shots"] > count:
                why = f"{name} has {count} annotated rows"
                yield f"shots = {settings['shots']}: {why}; take 1 to {count}"
    benchmarks = settings["benchmarks"].split(",") if settings["benchmarks"] else []
    yield from complaint("", rocket.pipeline.tested, names, benchmarks)
    size = bank_size(settings)
    if settings["members"]:
        yield from needs.named({"members": settings["members"]})
        if size == 1:
            why = "there is nothing to choose from"
            yield f"members = {settings['members']!r}: {why}; name two LoRAs or more"
    if size and settings["candidates"] > size:
        have = "members lists" if settings["members"] else "the shipped bank holds"
        yield f"candidates = {settings['candidates']}: {have} {size}; take {size} or less"
    encoder = settings["encoder"]
    if encoder.startswith(("/", "./", "~")) and not Path(encoder).expanduser().exists():
        yield f"encoder = {encoder!r}: there is no such folder; take minilm, or org/name@commit"


def bank_size(settings: Settings) -> int | None:
    """Return how many LoRAs a notebook works with; None where a folder alone tells."""
    if settings["members"]:
        return len(settings["members"].split(","))
    return None if settings["bank_folder"] else len(rocket.bank.EMBEDDED)
