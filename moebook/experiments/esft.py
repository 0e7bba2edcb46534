"""ESFT's arms and what they need; how each is made and trained `moebook.methods.esft` says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from moebook.data import hub, tasks
from moebook.errors import Refusal, nearest
from moebook.experiments import effects, needs, rates
from moebook.experiments.arm import Settings, asked, complaint, refuse_complaints
from moebook.experiments.effects import Idle
from moebook.methods import esft
from moebook.methods.esft.arms import Arm
from moebook.models.anatomy import anatomy
from moebook.models.skeleton import configuration, skeleton

LISTS = ("general", "alignment")
COLON = re.compile("(?<!^[A-Za-z]):")  # none behind the letter of a drive


def known(settings: Settings) -> dict[str, Arm]:
    """Return all arms by name: which there are the parameters of the sweeps say."""
    return esft.arms(sweep(settings), usual(settings))


def sweep(settings: Settings) -> dict[str, list[float]]:
    """Return the sizes that vary, by method."""
    names = ("thresholds_gate", "thresholds_token", "ranks", "group_sizes")
    return esft.sweep(*(settings[name] for name in names))


def usual(settings: Settings) -> dict[str, float]:
    """Return the sizes of the main arms, by method."""
    return {
        "gate": settings["p_gate"],
        "token": settings["p_token"],
        "lora": settings["lora_rank"],
    }


def tested(settings: Settings) -> dict[str, str]:
    """Return the target tasks, and what tests each: itself, or what stands behind a colon."""
    tests: dict[str, str] = {}
    for pair in settings["tasks"].split(","):
        target, *test = COLON.split(pair, 1)
        tests[target] = test[0] if test else target
    return tests


def check(
    settings: Settings,
    device: torch.device | None = None,
    changed: Iterable[str] = (),
) -> dict[str, Arm]:
    """Return the arms asked for, or refuse parameters with which they cannot run (E-RANGE).

    W-IDLE tells which of the ``changed`` parameters do nothing here.
    """
    every = known(settings)
    arms = asked(settings, every)
    refuse_complaints(_needs(settings, arms, list(every), device))
    effects.warn(changed, idle(settings, arms))
    return arms


def idle(settings: Settings, arms: Mapping[str, Arm]) -> Idle:
    """Tell which parameters have no effect on these arms."""
    usual = {"fft": "lr_fft", "lora": "lr_lora", "token": "lr_esft", "gate": "lr_esft"}
    trial = "" if settings["checkpoints"] else "watched_rows"
    yield from effects.of_rates(settings, "lr_fft lr_lora lr_esft", trial)
    taken = {usual[arm.method] for arm in arms.values()}
    for name in sorted({*usual.values()} - taken):
        yield name, "no arm of its method is here"
    if not any(arm.method == "lora" for arm in arms.values()):
        yield "lora_scale", "no arm here has LoRA"
    if not settings["align_steps"]:
        yield "align_lr", "align_steps is 0"
        if not settings["alignment_share"]:
            yield "alignment", "align_steps and alignment_share are 0"
    names = [*tested(settings), settings["general"], settings["alignment"]]
    yield from effects.of_rows("revisions", ",".join(names))


def _needs(
    settings: Settings,
    arms: Mapping[str, Arm],
    every: list[str],
    device: torch.device | None,
) -> Iterator[str]:
    yield from rates.needs(settings, arms, every)
    yield from _base(settings, arms)
    yield from _steps(settings)
    pairs = settings["tasks"].split(",")
    targets = ",".join(COLON.split(pair, 1)[0] for pair in pairs)
    yield from needs.named({"tasks": targets})
    yield from _files(settings, targets)
    for parameter in LISTS:
        yield from needs.named({parameter: settings[parameter]})
    yield from _data("tasks", targets)
    yield from _data("alignment", settings["alignment"])
    tests = set(tested(settings).values())
    for name in dict.fromkeys(settings["general"].split(",")):
        if name in tests:
            why = "tasks tests it too, and what is forgotten is measured on other tasks"
            yield f"general lists {name!r}: {why}; take it out of one of the two"
    yield from _alignment(settings)
    yield from needs.optimizer(settings, device)


def _base(settings: Settings, arms: Mapping[str, Arm]) -> Iterator[str]:
    """Complain about a base without experts, and about groups that do not fit its experts."""
    try:
        base = skeleton(configuration(settings["base"]))
    except Refusal:  # which the notebook says as well, where it loads the base
        return
    if all(layer.kind != "sparse" for layer in anatomy(base).layers):
        why = "it is dense, and ESFT chooses among a layer's experts"
        yield f"base = {settings['base']!r}: {why}; take nano-moe or another sparse one"
        return
    sizes = {arm.group for arm in arms.values()} - {1}
    where = f"group_sizes = {settings['group_sizes']!r}"
    yield from complaint(where, esft.grouping.check, base, sorted(sizes))


def _files(settings: Settings, targets: str) -> Iterator[str]:
    """Complain about users' files: each has rows to train on, to test on, or both."""
    trained = {"tasks": targets, "alignment": settings["alignment"]}
    yield from needs.files(trained, needs.training_split(settings))
    tests = ",".join(tested(settings).values())
    asked = {"tasks": tests, "general": settings["general"]}
    yield from needs.files(asked, settings["test_split"])
    if settings["rates"]:
        yield from needs.files({"tasks": targets}, "validation")
        for name in targets.split(","):
            if name in hub.CATALOGUE and not tasks.known(name):
                why = f"{name} is a set of the hub, and no rows of it are kept to choose by"
                yield f"rates = {settings['rates']!r}: {why}; leave rates empty"


def _data(parameter: str, text: str) -> Iterator[str]:
    """Complain about names of what is trained on that are of no data set."""
    known = [*tasks.KNOWN, *hub.CATALOGUE]
    for name in filter(str.strip, text.split(",")):
        if not tasks.known(name) and name not in known:
            yield f"{parameter} lists {name!r}, no data set: {nearest(name, known)}"


def _steps(settings: Settings) -> Iterator[str]:
    """Complain about trainings whose only step is that of the warm-up, more tests than steps."""
    yield from needs.more_than_a_step(settings, "steps")
    if settings["rates"] and settings["steps"] == 2:
        why = "a trial of rates takes half of them, and its only step is that of the warm-up"
        yield f"steps = 2: {why}, at rate 0; take 3 or more, or no rates"
    if settings["align_steps"]:
        yield from needs.more_than_a_step(settings, "align_steps")
    if settings["checkpoints"] > settings["steps"]:
        why = f"a training has steps = {settings['steps']}"
        remedy = f"take 0 to {settings['steps']}"
        yield f"checkpoints = {settings['checkpoints']}: {why}; {remedy}"


def _alignment(settings: Settings) -> Iterator[str]:
    """Complain where a task's mix needs more alignment rows than there are."""
    names = settings["alignment"].split(",")
    if not all(map(tasks.known, names)):  # sets of the hub, of any size
        return
    have = sum(needs.drawn(settings, names).values())
    share = settings["alignment_share"]
    for name, count in needs.drawn(settings, tested(settings)).items():
        wanted = round(count * share / (1 - share))
        if wanted > have:
            why = f"{count} rows of {name} need {wanted:,} alignment rows beside them"
            remedy = f"take {have / (have + count):.2g} or less, or name more sets in alignment"
            yield f"alignment_share = {share:g}: {why}, and alignment has {have:,}; {remedy}"
