"""ESFT's arms: ESFT, full fine-tuning and LoRA, their sizes, how each starts, what they need."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from moebook import lists
from moebook.data import hub, tasks
from moebook.errors import Refusal, nearest, refuse
from moebook.experiments import effects, needs, rates
from moebook.experiments.arm import Complaints, Settings, complaint
from moebook.experiments.checks import Check
from moebook.experiments.effects import Idle
from moebook.methods import esft
from moebook.methods.esft.config import Score
from moebook.methods.esft.score import Scores
from moebook.models.anatomy import anatomy
from moebook.models.skeleton import configuration, skeleton
from moebook.nn.batch import longest

LISTS = ("general", "alignment")
COLON = re.compile("(?<!^[A-Za-z]):")  # none behind the letter of a drive
# The parameter with the rate of a method's arms where none is tried.
USUAL_RATES = {
    "fft": "lr_fft",
    "lora": "lr_lora",
    "token": "lr_esft",
    "gate": "lr_esft",
}
Tried = Mapping[str, Sequence[float]]  # sizes by method, smallest first


@dataclass(frozen=True)
class Arm:
    """One training among those that are compared."""

    method: str  # fft, lora, or the score that chooses experts, token or gate
    size: float = 1  # rank of LoRA or threshold of the score
    # As many random experts stand for those that the score chooses.
    random: bool = False
    attention: bool = False  # LoRA adapts attention alone, no expert
    group: int = 1  # experts that share a gate
    main: bool = True  # runs on every task; else on the first one


def known(settings: Settings) -> dict[str, Arm]:
    """Return all arms by name: which there are the parameters of the sweeps say."""
    return arms(sweep(settings), usual(settings))


def sweep(settings: Settings) -> dict[str, list[float]]:
    """Read the sizes that vary (Fig. 6 and 7), by method: rising numbers with commas between.

    Gate thresholds and ranks are compared place by place, so there must be as many.
    """
    tried = {
        "gate": _rising(settings, "thresholds_gate"),
        "token": _rising(settings, "thresholds_token"),
        "lora": _whole(settings, "ranks"),
        "groups": _whole(settings, "group_sizes"),
    }
    if len(tried["gate"]) != len(tried["lora"]):
        gates = f"thresholds_gate is '{settings['thresholds_gate']}'"
        ranks = f"ranks '{settings['ranks']}'"
        wanted = "expected as many of both, which are compared in turn"
        refuse("E-RANGE", f"{gates} and {ranks}; {wanted}")
    return tried


def _rising(settings: Settings, name: str) -> list[float]:
    """Read rising numbers with commas between, one at least; their range the cell declares."""
    text = settings[name]
    values = lists.numbers(name, text)
    if not values or values != sorted(values):
        refuse("E-RANGE", f"{name} is '{text}', expected rising numbers")
    return values


def _whole(settings: Settings, name: str) -> list[float]:
    """Read rising whole numbers with commas between, one at least."""
    values = _rising(settings, name)
    broken = [value for value in values if value != int(value)]
    if broken:
        refuse("E-RANGE", f"{name} lists {broken[0]:g}: expected whole numbers")
    return [int(value) for value in values]


def arms(tried: Tried, usual: Mapping[str, float]) -> dict[str, Arm]:
    """Return the arms by name: main ones of ``usual`` sizes, ``gate-0.3``, grouped ``gate-g2``."""
    known = {
        "fft": Arm("fft"),
        "lora": Arm("lora", usual["lora"]),
        "lora_attention": Arm("lora", usual["lora"], attention=True),
    }
    for score in get_args(Score):
        known[score] = Arm(score, usual[score])
        known[f"random_{score}"] = Arm(score, usual[score], random=True)
    for method, names in budget(tried, usual).items():
        for name, size in zip(names, tried[method], strict=True):
            known.setdefault(name, Arm(method, size, main=False))
    for size in map(int, tried["groups"]):
        known[f"fft-g{size}"] = Arm("fft", group=size, main=False)
        known[f"gate-g{size}"] = Arm("gate", usual["gate"], group=size, main=False)
    return known


def budget(tried: Tried, usual: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the names of Fig. 6's arms by method, smallest first; no value is trained twice."""
    names: dict[str, list[str]] = {}
    for method, main in usual.items():
        names[method] = []
        for size in tried[method]:
            names[method].append(method if size == main else f"{method}-{size:g}")
    return names


def plan(
    arms: Mapping[str, Arm],
    model: nn.Module,
    drawn: Mapping[str, Iterable[Mapping[str, Any]]],
    scores: Mapping[str, Scores],
    together: Mapping[int, Tensor],
    *,
    preset: str,
    scale: float,
    seed: int,
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what each arm's method is called with, by arm and task.

    Main arms run on every task of ``scores``, the others on the first. Experts grouped by
    ``together`` (from `cooccurrence`) are measured anew on the samples ``drawn`` for the task, on a
    copy of the model. Random experts depend on score, task and seed.
    """
    calls: dict[tuple[str, str], dict[str, Any]] = {}
    for name, arm in arms.items():
        for task in list(scores) if arm.main else list(scores)[:1]:
            if arm.method == "fft":
                calls[name, task] = {}
                continue
            if arm.method == "lora":
                rank = int(arm.size)
                sizes = {"rank": rank, "scale": scale, "attention": arm.attention}
                calls[name, task] = sizes
                continue
            config = esft.Config.preset(preset, score=arm.method, threshold=arm.size)
            measured = scores[task]
            groups = None
            if arm.group > 1:
                bound = deepcopy(model)
                groups = esft.group(bound, together, arm.group)
                measured = esft.measure(bound, drawn[task], config)
            selection = esft.select(measured, config, groups=groups)
            if arm.random:
                label = f"{arm.method}/{task}/{seed}"
                selection = esft.random_selection(selection, measured.experts, label)
            calls[name, task] = {"selection": selection}
    return calls


def start(
    model: nn.Module, arm: Arm, given: Mapping[str, Any], together: Mapping[int, Tensor]
) -> nn.Module:
    """Return a copy of the base that is ready to train as an arm, with what `plan` has for it."""
    tuned = deepcopy(model)
    if arm.group > 1:
        esft.group(tuned, together, arm.group)
    if arm.method == "fft":
        return esft.full(tuned)
    if arm.method == "lora":
        return esft.lora(tuned, **given)
    return esft.specialise(tuned, **given)


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


def idle(settings: Settings, arms: Mapping[str, Arm]) -> Idle:
    """Tell which parameters have no effect on these arms."""
    trial = "" if settings["checkpoints"] else "watched_rows"
    yield from effects.of_rates(settings, "lr_fft lr_lora lr_esft", trial)
    taken = {USUAL_RATES[arm.method] for arm in arms.values()}
    for name in sorted({*USUAL_RATES.values()} - taken):
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
    every: Mapping[str, Arm],
    device: torch.device | None,
) -> Complaints:
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


def _base(settings: Settings, arms: Mapping[str, Arm]) -> Complaints:
    """Complain about a base without experts, too long samples, and groups that do not fit."""
    try:
        base = skeleton(configuration(settings["base"]))
    except Refusal:  # which the notebook says as well, where it loads the base
        return
    if all(layer.kind != "sparse" for layer in anatomy(base).layers):
        why = "it is dense, and ESFT chooses among a layer's experts"
        yield f"base = {settings['base']!r}: {why}; take nano-moe or another sparse one"
        return
    most = longest(base)
    if settings["sample_length"] > most:
        why = f"{settings['base']} takes {most} tokens a row"
        yield f"sample_length = {settings['sample_length']}: {why}; take {most} or less"
    sizes = {arm.group for arm in arms.values()} - {1}
    where = f"group_sizes = {settings['group_sizes']!r}"
    yield from complaint(where, esft.grouping.check, base, sorted(sizes))


def _files(settings: Settings, targets: str) -> Complaints:
    """Complain about users' files: each has a name of its own, and rows to train or test on."""
    trained = {"tasks": targets, "alignment": settings["alignment"]}
    yield from needs.files(trained, needs.training_split(settings))
    tests = ",".join(tested(settings).values())
    asked = {"tasks": tests, "general": settings["general"]}
    yield from needs.files(asked, settings["test_split"])
    # Rows are kept under a task's name, those that train and those that test.
    yield from needs.apart({**asked, **trained, "tasks": f"{targets},{tests}"})
    if settings["rates"]:
        yield from needs.files({"tasks": targets}, "validation")
        for name in targets.split(","):
            if name in hub.CATALOGUE and not tasks.known(name):
                why = f"{name} is a set of the hub, and no rows of it are kept to choose by"
                yield f"rates = {settings['rates']!r}: {why}; leave rates empty"


def _data(parameter: str, text: str) -> Complaints:
    """Complain about names of what is trained on that are of no data set."""
    known = [*tasks.KNOWN, *hub.CATALOGUE]
    for name in filter(str.strip, text.split(",")):
        if not tasks.known(name) and name not in known:
            yield f"{parameter} lists {name!r}, no data set: {nearest(name, known)}"


def _steps(settings: Settings) -> Complaints:
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


def _alignment(settings: Settings) -> Complaints:
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


check = Check(known, _needs, idle)
