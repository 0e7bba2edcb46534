"""The arms that are compared: ESFT, full fine-tuning and LoRA; their data, sweeps and costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import numpy as np
from accelerate.utils import send_to_device
from datasets import Dataset as Rows
from datasets import concatenate_datasets
from peft import LoraConfig
from pydantic import Field, SkipValidation
from torch import Tensor, nn

from moebook import lists
from moebook.data import hub, tasks
from moebook.data.tasks import Task
from moebook.errors import refuse, refuse_unknown
from moebook.methods.esft.apply import Origin, specialise
from moebook.methods.esft.choose import random_selection, select
from moebook.methods.esft.config import Config, Score
from moebook.methods.esft.grouping import group
from moebook.methods.esft.score import Scores, measure
from moebook.models.anatomy import anatomy, sparse_layers
from moebook.models.checkpoint import origin_or_none
from moebook.models.lora import put_on
from moebook.settings import Count, Each, Size, checked
from moebook.training import fit, step_memory
from moebook.training.batches import Batches

RANKS = 512  # the largest rank of LoRA in the paper's sweep (Sec. 6.2)
STEPS = 9  # of the short run that `cost` times; the first one, which warms up, is not counted

Amount = Annotated[int | float, Field(gt=0, le=10**6)]  # ranks stay whole
Tried = Mapping[str, Each[Amount]]  # by method, smallest first


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


def sweep(
    thresholds_gate: str, thresholds_token: str, ranks: str, group_sizes: str
) -> dict[str, list[float]]:
    """Read the values of the sweeps (Fig. 6 and 7) by arm: rising numbers with commas between.

    Gate thresholds and ranks are compared place by place, so there must be as many.
    """
    tried = {
        "gate": _rising("thresholds_gate", thresholds_gate, above=0, most=1),
        "token": _rising("thresholds_token", thresholds_token, above=0, most=1),
        "lora": _whole("ranks", ranks, above=0, most=RANKS),
        "groups": _whole("group_sizes", group_sizes, above=1, most=math.inf),
    }
    if len(tried["gate"]) != len(tried["lora"]):
        given = f"thresholds_gate is '{thresholds_gate}' and ranks '{ranks}'"
        refuse(
            "E-RANGE", f"{given}; expected as many of both, which are compared in turn"
        )
    return tried


def _rising(name: str, text: str, *, above: float, most: float) -> list[float]:
    """Read rising numbers with commas between, one at least."""
    values = lists.numbers(name, text)
    inside = all(above < value <= most for value in values)
    if not values or not inside or values != sorted(values):
        limits = f"above {above}, at most {most}"
        refuse("E-RANGE", f"{name} is '{text}', expected rising numbers {limits}")
    return values


def _whole(name: str, text: str, *, above: float, most: float) -> list[float]:
    """Read rising whole numbers with commas between, one at least."""
    values = _rising(name, text, above=above, most=most)
    broken = [value for value in values if value != int(value)]
    if broken:
        refuse("E-RANGE", f"{name} lists {broken[0]:g}: expected whole numbers")
    return [int(value) for value in values]


@checked
def arms(tried: Tried, usual: Mapping[str, Amount]) -> dict[str, Arm]:
    """Return the arms by name: main ones of ``usual`` sizes, ``gate-0.3``, grouped ``gate-g2``."""
    _check_methods("usual", usual, ["lora", *get_args(Score)])
    _check_methods("tried", tried, ["lora", "groups", *get_args(Score)])
    known = {"fft": Arm("fft"), "lora": Arm("lora", usual["lora"])}
    known["lora_attention"] = Arm("lora", usual["lora"], attention=True)
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


def _check_methods(name: str, sizes: Mapping[str, Any], wanted: Iterable[str]) -> None:
    if missing := [method for method in wanted if method not in sizes]:
        have = ", ".join(sizes) or "nothing"
        refuse(
            "E-KEYS",
            f"{name} has sizes of {have}, expected those of '{missing[0]}' too",
        )


@checked
def budget(tried: Tried, usual: Mapping[str, Amount]) -> dict[str, list[str]]:
    """Return the names of Fig. 6's arms by method, smallest first; no value is trained twice."""
    _check_methods("tried", tried, usual)
    return {
        method: [
            method if size == value else f"{method}-{size:g}" for size in tried[method]
        ]
        for method, value in usual.items()
    }


@checked
def plan(
    arms: Mapping[str, Arm],
    model: nn.Module,
    drawn: SkipValidation[Mapping[str, Iterable[Mapping[str, Any]]]],
    scores: Mapping[str, Scores],
    together: SkipValidation[Mapping[int, Tensor]],
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
            if arm.method in ("fft", "lora"):
                sizes = {
                    "rank": int(arm.size),
                    "scale": scale,
                    "attention": arm.attention,
                }
                calls[name, task] = sizes if arm.method == "lora" else {}
                continue
            config = Config.preset(preset, score=arm.method, threshold=arm.size)
            measured, groups = scores[task], None
            if arm.group > 1:
                refuse_unknown(
                    task, drawn, "E-DATA", f"no samples are drawn for '{task}';"
                )
                bound = deepcopy(model)
                groups = group(bound, together, arm.group)
                measured = measure(bound, drawn[task], config)
            selection = select(measured, config, groups=groups)
            if arm.random:
                label = f"{arm.method}/{task}/{seed}"
                selection = random_selection(selection, measured.experts, label)
            calls[name, task] = {"selection": selection}
    return calls


def start(
    model: nn.Module, arm: Arm, given: Mapping[str, Any], together: Mapping[int, Tensor]
) -> nn.Module:
    """Return a copy of the base that is ready to train as an arm, with what `plan` has for it."""
    tuned = deepcopy(model)
    if arm.group > 1:
        group(tuned, together, arm.group)
    return {"fft": full, "lora": lora}.get(arm.method, specialise)(tuned, **given)


def full(model: nn.Module) -> nn.Module:
    """Let every parameter of a mixture train, routers included (FFT)."""
    _check_plain(model)
    return model.requires_grad_(True)


@checked
def lora(
    model: nn.Module, *, rank: Size = 8, scale: float = 2.0, attention: bool = False
) -> nn.Module:
    """Freeze a mixture and put LoRA on it in place, with PEFT.

    On modules that the paper leaves open: the linear layers of attention, of dense layers' MLPs and
    of shared experts, and the routed experts' fused tensors, to which PEFT adds one product of rank
    ``rank`` per expert (a fused gate and up share it), times ``scale``; or on ``attention`` alone.
    """
    _check_plain(model)
    layers = anatomy(model).layers
    # PEFT gets the blocks, which bear no configuration: by a model's it would take "gate_proj" for
    # the name of an unfused expert, rename it, and leave dense layers and shared experts out.
    blocks = nn.ModuleList(layer.block for layer in layers)
    adapted = [layer.attention for layer in layers]
    if not attention:
        adapted += [
            layer.mlp if layer.kind == "dense" else layer.shared for layer in layers
        ]
    parts = [part for owner in adapted if owner for part in owner.modules()]
    linears = {part for part in parts if isinstance(part, nn.Linear)}
    sparse = [] if attention else sparse_layers(model)
    banks = {p for layer in sparse for p in layer.experts.parameters()}
    config = LoraConfig(
        r=rank,
        lora_alpha=scale * rank,
        target_modules=[
            name for name, part in blocks.named_modules() if part in linears
        ],
        target_parameters=[name for name, p in blocks.named_parameters() if p in banks],
    )
    put_on(blocks, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return model


def _check_plain(model: nn.Module) -> None:
    if any(".lora_" in name for name, _ in model.named_parameters()):
        refuse("E-MODEL", "the model holds LoRA already: load the base again")
    if origin_or_none(model, Origin):
        refuse(
            "E-MODEL", "the model is specialised: esft.restore or esft.merge it first"
        )
    sparse_layers(model)


@checked
def rows(
    targets: Each[str | Task],
    alignment: Each[str | Task],
    size: Count,
    *,
    split: str = "train",
    revisions: str = "",
    seed: int,
) -> dict[str, list[dict[str, str]]]:
    """Draw rows of target tasks and of alignment data, ``size`` of each, to train on.

    Each is a `Task` of your own, or a name: of an embedded task, whose ``split`` may be the
    ``rest`` beside fresh test rows, or of a set of the hub, of which twice as many alignment rows
    come. The rows are returned by these names.
    """
    pins = hub.pins(revisions)
    drawn: dict[str, list[dict[str, str]]] = {}
    for times, sources in ((2, alignment), (1, targets)):
        for source in sources:
            name = source if isinstance(source, str) else source.name
            if isinstance(source, str) and not tasks.known(source):
                most = times * size
                pin = pins.get(name)
                drawn[name] = hub.load(name, revision=pin, size=most, seed=seed)
                continue
            task = tasks.find(source) if isinstance(source, str) else source
            count = min(size, task.available(split))
            drawn[name] = task.rows(split, count, seed)
    return drawn


@checked
def mix(
    task: Rows,
    alignment: Rows,
    share: Annotated[float, Field(ge=0, lt=1)],
    seed: Annotated[int, Field(ge=0)],
) -> Rows:
    """Mix a task's rows with alignment data, which keeps the general abilities (Sec. 4.3).

    ``share`` is that of alignment rows in the mix: 0.5 in the paper (1:1), 0 as released.
    """
    wanted = math.floor(len(task) * share / (1 - share) + 0.5)
    if wanted > len(alignment):
        refuse("E-DATA", f"{wanted} alignment rows needed, {len(alignment)} given")
    drawn = alignment.shuffle(seed=seed).select(range(wanted))
    return concatenate_datasets([task, drawn]).shuffle(seed=seed)


def cost(model: nn.Module, train: Rows, **recipe: Any) -> dict[str, float]:
    """Train `STEPS` steps of a recipe for `training.fit`; count what one holds (Fig. 4).

    ``time`` is the median step in seconds; in bytes ``peak_memory`` of a step, ``resident``
    (weights, buffers), ``optimizer`` (AdamW's two moments) and ``storage`` (what trains).
    """
    first = Batches(
        train, recipe["batch"], seed=recipe["seed"], pad_id=recipe["pad_id"]
    )[0]
    inputs = send_to_device(first, next(model.parameters()).device)
    memory = step_memory(model.train(), inputs)
    seconds = fit(model, train, **recipe | {"steps": STEPS}).seconds
    return {
        "time": float(np.median(np.diff(seconds))),
        "peak_memory": memory.total,
        "resident": memory.parameters,
        "optimizer": 2 * memory.trained // 3,
        "storage": memory.trained // 3,
    }
