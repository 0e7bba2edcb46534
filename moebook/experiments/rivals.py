"""The rivals' arms and what they need; how each is put on a base `methods.rivals.table` says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moebook.errors import located
from moebook.experiments import needs, rates
from moebook.experiments.arm import Complaints, Settings, complaint, picked
from moebook.experiments.checks import Check
from moebook.experiments.effects import Idle
from moebook.experiments.rocket import (
    SIZES,
    annotated,
    makes_bank,
    members,
    of_the_source,
    targets_and_bank,
)
from moebook.methods import rocket
from moebook.methods.rivals import table
from moebook.methods.rocket.bank import SOURCES

# Parameters, and the only rivals that take them.
OWN = {
    "searches": ("lorahub",),
    "gate_steps": ("phatgoose",),
    "source_rows": ("phatgoose", "pi_tuning"),
    "top_k": ("rocket",),
}
BEYOND = 2  # evaluations above the LoRAs' number that LoRAHub's search takes at least


def known(settings: Settings) -> dict[str, table.Arm]:
    """Return all arms by name; of a bank whose size a folder tells, as if it were the paper's."""
    sizes = picked(settings, "rate searches experts top_k")
    with located("", "E-RANGE"):
        return table.arms(len(members(settings) or SOURCES), **sizes)


def idle(settings: Settings, arms: Mapping[str, table.Arm]) -> Idle:
    """Tell which parameters have no effect on these arms."""
    if not makes_bank(settings):
        there = "the LoRAs of the bank are there already"
        yield "starts bank_rows", there
        if "expert_lora" not in arms:
            yield "bank_epochs bank_rate", there
    yield from of_the_source(settings)
    rivals = {arm.rival for arm in arms.values()}
    for parameters, takers in OWN.items():
        if not rivals & {*takers}:
            take = "takes" if len(takers) == 1 else "take"
            yield parameters, f"{' and '.join(takers)} alone {take} it"
    if not any(arm.rated for arm in arms.values()):
        recipe = "steps batch schedule accumulate weight_decay rates"
        yield recipe, "no arm here is tuned"
    if "expert_lora" not in arms:
        yield "whole_rows", "the arm expert_lora alone takes it"
    if not any(arm.changes.get("rate") == settings["rate"] for arm in arms.values()):
        yield "rate", "no arm here trains mixing weights at it"


def _needs(
    settings: Settings,
    arms: Mapping[str, table.Arm],
    every: Mapping[str, table.Arm],
    _: object,
) -> Complaints:
    yield from rates.needs(settings, arms, every, at_least_one=True)
    yield from targets_and_bank(settings)
    sizes = picked(settings, SIZES)
    yield from complaint("", lambda: rocket.Config.preset("fixed", **sizes))
    if any(arm.rated for arm in arms.values()):
        yield from needs.more_than_a_step(settings, "steps")
    if any(arm.rival == "phatgoose" for arm in arms.values()):
        yield from needs.more_than_a_step(settings, "gate_steps", of=" of a gate")
    if "expert_lora" in arms and settings["source"] == "embedded":
        yield from _own_loras(settings)
    bank = members(settings) or []
    yield from _sources(settings, arms, bank)
    yield from _searches(settings, arms, bank)


def _own_loras(settings: Settings) -> Complaints:
    """Complain about targets whose own rows are one step, that of the warm-up."""
    for name, count in annotated(settings).items():
        if min(count, settings["whole_rows"]) <= rocket.bank.RECIPE["batch"]:
            whose = f" of {name}'s own LoRA"
            yield from needs.more_than_a_step(settings, "bank_epochs", of=whose)


def _searches(
    settings: Settings, arms: Mapping[str, table.Arm], bank: Sequence[str]
) -> Complaints:
    """Complain about fewer evaluations than LoRAHub's search over so many LoRAs takes.

    Of an empty ``bank`` the number of LoRAs is not known yet: a folder alone tells.
    """
    searches = settings["searches"]
    for name, arm in arms.items():
        if arm.rival != "lorahub":
            continue
        if arm.bank == "chosen":
            size = settings["experts"]
            parameter = "experts"
        elif bank:
            size = len(bank)
            from_folder = settings["bank_folder"] and not settings["members"]
            parameter = "bank_folder" if from_folder else "members"
        else:
            continue
        if searches < size + BEYOND:
            over = f"{size} LoRAs ({parameter} = {settings[parameter]!r})"
            least = f"the search of {name} over {over} takes {size + BEYOND} at least"
            yield f"searches = {searches}: {least}; give more, or leave {name} out of arms"


def _sources(
    settings: Settings, arms: Mapping[str, table.Arm], bank: Iterable[str]
) -> Complaints:
    """Complain about arms that take rows of each LoRA, where the bank is a stranger's."""
    takers = [name for name, arm in arms.items() if arm.rival in OWN["source_rows"]]
    known = list(rocket.bank.SETS)
    if settings["source"] == "embedded":
        known = rocket.bank.EMBEDDED
    without = [name for name in bank if name not in known]
    if settings["bank_folder"] and takers and without:
        why = f"{', '.join(takers)} take the rows that each LoRA was trained on"
        lack = f"of {without[0]!r} none are known"
        where = f"bank_folder = {settings['bank_folder']!r}"
        yield f"{where}: {why}, and {lack}; leave them out of arms"


check = Check(known, _needs, idle)
