"""PESC's arms: dense beside sparse on one base, and what changes one thing in ``sparse``.

``rows`` and ``experiment`` bring what all arms share, ``record`` keeps what became of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import nn

from moebook import evaluation
from moebook.analysis import routing
from moebook.data import tasks
from moebook.experiments import arm, effects, needs, own, rates
from moebook.experiments.arm import Arm, Complaints, Settings, picked
from moebook.experiments.checks import Check
from moebook.experiments.effects import Idle
from moebook.experiments.experiment import (
    Experiment,
    Recorder,
    Result,
    Rows,
    asking,
    of_rows,
)
from moebook.methods import pesc
from moebook.methods.pesc import Config
from moebook.nn import routers
from moebook.settings import SIZE

# Parameters that are fields of `pesc.Config`.
FIELDS = """experts top_k adapter_width adapter_scale balance_weight
            host lora_rank lora_alpha"""
HELD_OUT = 256  # rows of a mixture of the hub, or of a file, that are not trained on
# Domains in which the paper reports the largest gains.
GAINING = (
    "code",
    "mathematics",
)


def main(settings: Settings, **changes: Any) -> Config:
    """Return the settings of the arm ``sparse``, or of one that changes something in it."""
    return Config.preset(settings["preset"], **picked(settings, FIELDS) | changes)


def wide(settings: Settings) -> Config:
    """Return one adapter as wide as all of ``sparse``'s together, which every token uses."""
    width = settings["experts"] * settings["adapter_width"]
    return main(settings, experts=1, top_k=1, adapter_width=width, balance="none")


def reading(name: str, settings: Settings) -> Config:
    """Return the settings as ``paper`` or ``released`` reads what the text leaves open."""
    return main(settings, **pesc.reading(name))


def dense(base: nn.Module, config: Config) -> nn.Module:
    """Tune the base without adapters, as the paper's Camel."""
    return pesc.prepare(base, config, sparse=False)


def matched(base: nn.Module, config: Config) -> nn.Module:
    """Tune the base by a LoRA so wide that it trains as many parameters as ``sparse``."""
    return pesc.prepare(base, pesc.matched(base, config), sparse=False)


def _dense_needs(settings: Settings) -> Complaints:
    if settings["host"] == "frozen":
        why = "dense tunes the host alone, and would train nothing"
        yield f"host = 'frozen': {why}; take lora, qlora or full, or leave dense out of arms"


def _matched_needs(settings: Settings) -> Complaints:
    if settings["host"] not in ("lora", "qlora"):
        why = "matched widens the host's LoRA, and there is none"
        remedy = "take lora or qlora, or leave matched out of arms"
        yield f"host = {settings['host']!r}: {why}; {remedy}"


def _wide_needs(settings: Settings) -> Complaints:
    width = settings["experts"] * settings["adapter_width"]
    if width > SIZE:
        sizes = f"experts = {settings['experts']} and adapter_width = {settings['adapter_width']}"
        remedy = f"take a product of at most {SIZE:,}, or leave wide out of arms"
        yield f"{sizes}: wide would have one adapter of width {width:,}; {remedy}"


def _with_experts(name: str, count: int) -> Arm:
    """Return the arm that is ``sparse`` with so many experts."""

    def needs(settings: Settings) -> Complaints:
        if settings["top_k"] > count:
            why = f"{name} has {count} experts"
            remedy = f"take 1 to {count}, or leave {name} out of arms"
            yield f"top_k = {settings['top_k']}: {why}; {remedy}"

    what = f"sparse with {count} adapters"
    return _arm(name, partial(main, experts=count), needs=needs, what=what)


def _arm(
    name: str,
    configure: Callable[[Settings], Config],
    build: Callable[[nn.Module, Config], nn.Module] = pesc.prepare,
    **how: Any,
) -> Arm:
    return Arm(name, configure, build, penalty=pesc.balance_loss, **how)


_EVERY = (
    _arm(
        "dense",
        main,
        dense,
        needs=_dense_needs,
        what="the base, fine-tuned without adapters: the paper's Camel",
    ),
    _arm(
        "matched",
        main,
        matched,
        needs=_matched_needs,
        what="dense with a LoRA so wide that it trains as many weights as sparse",
    ),
    _arm(
        "wide",
        wide,
        needs=_wide_needs,
        what="one adapter as wide as all of sparse's together, used by every token",
    ),
    _arm(
        "sparse",
        main,
        what="E adapters, K of them a token: the paper's Camelidae",
    ),
    _with_experts("experts4", 4),
    _with_experts("experts16", 16),
    _arm(
        "unbalanced",
        partial(main, balance="none"),
        what="sparse without the balance loss",
    ),
    _arm(
        "paper",
        partial(reading, "paper"),
        what="sparse by the paper's text: both matrices of an adapter start at zero",
    ),
    _arm(
        "released",
        partial(reading, "released"),
        what="sparse by the released code: a quarter of the scale when it answers",
    ),
    # Eq. 6: the host is frozen while adapters, or full experts, train.
    _arm(
        "adapters",
        partial(main, host="frozen"),
        what="adapters and routers train, and nothing of the host",
    ),
    _arm(
        "upcycled",
        partial(main, host="frozen"),
        pesc.full_experts,
        rate="lr_full",
        what="E full copies of the network train as experts: what adapters approximate",
    ),
)
ARMS: dict[str, Arm] = {each.name: each for each in _EVERY}


def _balances(each: Arm, config: Config, settings: Settings) -> bool:
    """Whether an arm has routers, and ``balance_weight`` weighs their balance loss."""
    if each.build in (dense, matched) or config.balance == "none":
        return False
    # The readings bring a weight of their own.
    return config.balance_weight == settings["balance_weight"]


def idle(settings: Settings, arms: Mapping[str, Arm]) -> Idle:
    """Tell which parameters have no effect on these arms."""
    yield from effects.of_rates(settings, "lr lr_full", "rate_steps valid_rows")
    if "upcycled" not in arms:
        yield "lr_full", "the arm upcycled alone takes it"
    if all(each.rate == "lr_full" for each in arms.values()):
        yield "lr", "these arms take lr_full"
    yield from effects.of_mix(settings, settings["tasks"])
    hosts = set()
    balanced = False
    for each in arms.values():
        config = each.configure(settings)
        assert isinstance(config, Config)
        hosts.add(config.host)
        balanced |= _balances(each, config, settings)
    if not hosts & {"lora", "qlora"}:
        yield "lora_rank lora_alpha", f"hosts of these arms: {', '.join(sorted(hosts))}"
    if {*arms} <= {"adapters", "upcycled"}:
        yield "host", "it is frozen in these arms"
    if not balanced:
        yield "balance_weight", "it weighs no balance loss of these arms"


def _needs(
    settings: Settings,
    arms: Mapping[str, Arm],
    every: Mapping[str, Arm],
    device: torch.device | None,
) -> Complaints:
    """Complain about sizes, rates, tasks, the device; then about single arms."""
    experts = settings["experts"]
    if settings["top_k"] > experts:
        yield f"top_k = {settings['top_k']}: expected 1 to {experts}, since experts = {experts}"
    yield from rates.needs(settings, arms, every)
    yield from needs.more_than_a_step(settings, "steps")
    if settings["mix"] == "embedded":
        yield from needs.embedded_tasks("tasks", settings["tasks"], "mix = 'embedded'")
    yield from needs.named({"tasks": settings["tasks"]})
    yield from own.complaints(settings, {"tasks": settings["tasks"]})
    yield from needs.optimizer(settings, device)
    yield from arm.needs(arms, settings)


check = Check(lambda _: ARMS, _needs, idle)


def rows(settings: Settings) -> Rows:
    """Draw the rows, the same in all runs, whatever the seed; none held out is trained on."""
    names = settings["tasks"].split(",")
    embedded = settings["mix"] == "embedded"
    held_out = settings["test_rows"] if embedded else HELD_OUT
    tested = [*tasks.content(names), settings["test_rows"]]
    return own.rows(settings, names, held_out, tested)


def experiment(
    settings: Settings,
    arms: Mapping[str, Arm],
    rows: Rows,
    load: Callable[[], nn.Module],
    tokenizer: Any,
) -> Experiment:
    """Bring together what all arms share; ``load`` returns a fresh base at each call."""
    ask = asking(settings, tokenizer, settings["tasks"].split(","))

    def test(model: nn.Module, limit: int) -> pd.DataFrame:
        return evaluation.by_benchmark(ask(model, limit=limit), pesc.GROUPS)

    return of_rows(settings, arms, rows, load, tokenizer, test)


def record(run: Recorder, root: str, result: Result) -> None:
    """Keep what became of an arm, below ``root``: its scores, its loss, its size, its adapters."""
    name = f"{root}/{result.arm.name}"
    answers = result.answers
    run.scores(name, answers)
    run.curve(f"{name}/loss", result.history.loss, "nats")
    items = answers[answers.task == "gsm8k"].correct
    if len(items):
        run.record(f"{name}/accuracy/gsm8k", items.mean(), "share", items)
    run.record(f"{name}/trained", result.trained, "count")
    if result.arm.build is pesc.prepare:  # it has adapters
        run.record(f"{name}/adapter_norm", pesc.adapter_norm(result.model), "number")


def gains(sparse: Result, dense: Result) -> dict[str, float]:
    """Return the sparse model's mean gain over the dense one, in code and mathematics and others.

    In points of accuracy, each domain counts equally.
    """
    of_sparse, of_dense = (
        result.answers.groupby("domain").domain_score.mean()
        for result in (sparse, dense)
    )
    points = 100 * (of_sparse - of_dense)
    means = points.groupby(points.index.isin(GAINING)).mean()
    return means.rename({False: "others", True: "code_and_mathematics"}).to_dict()


def shares(
    results: Mapping[str, Result], batches: Mapping[str, Any]
) -> dict[str, pd.DataFrame]:
    """Measure by domain which expert serves which tokens, of arms with several experts."""
    tables: dict[str, pd.DataFrame] = {}
    for name, result in results.items():
        experts = [len(router.weight) for router in routers(result.model)]
        if max(experts, default=1) > 1:
            tables[name] = routing.shares(result.model, batches)
    return tables
