"""Router initialisation's arms: the dense base, and upcycled ones by how their routers start.

What of an arm follows from the parameters (its steps, when it is tested) `upcycling.arms` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from moebook import data, evaluation
from moebook.analysis import routers, routing
from moebook.data import tasks
from moebook.errors import Refusal, refuse
from moebook.experiments import arm, effects, needs, own, rates
from moebook.experiments.arm import Arm, Complaints, Settings
from moebook.experiments.checks import Check
from moebook.experiments.effects import Idle
from moebook.experiments.experiment import (
    Experiment,
    Recorder,
    Rows,
    asking,
    of_rows,
)
from moebook.methods import upcycling
from moebook.methods.upcycling.config import LABORATORY, LED, MAIN
from moebook.methods.upcycling.representations import Representations
from moebook.methods.upcycling.starts import MODES, Start
from moebook.training import History

# Domains that the paper tests, a list of tasks each.
AREAS = (
    "code",
    "mathematics",
    "text",
)
PAIR = ("code", "mathematics")  # the domains of which TRSU makes an expert each
CLUSTERED = ("crsu", "ffn_input")  # starts at centroids of clusters
# How routers start, in words.
STARTS = {
    "random": "a random router (SU)",
    "trsu": "a router of task centroids (TRSU), of code and mathematics",
    "trsu3": "a router of task centroids (TRSU), of code, mathematics and text",
    "crsu": "a router of cluster centroids (CRSU)",
    "kaiming": "random rows as nn.Linear draws them",
    "wide": "long random rows, N(0, 1), as mergekit draws them",
    "ffn_input": "centroids of what the router reads",
    "hidden": "mergekit's prompts: the residual stream at their last token",
    "hidden_avg": "mergekit's prompts: the residual stream, mean over tokens",
    "cheap_embed": "mergekit's prompts: their embeddings",
}
# What an arm's name may end with: how its experts' outputs are combined.
RULES = {
    "renormalised": "; the weights of a token's experts sum to 1",
    "scaled": "; one factor a layer makes up for the probabilities",
}
# What is recorded of a start, other than shares.
UNITS = {"start": "nats", "loss": "nats", "gradient": "number", "scale": "number"}

COMPARED = 4  # experts of the starts that a run compares at step 0


def plan(settings: Settings) -> dict[str, upcycling.config.Arm]:
    """Return by name how each arm starts, how long it trains and when it is tested."""
    length = settings["length"]
    combine = settings["combine"]
    return upcycling.arms(settings["steps"], length=length, combine=combine)


def configure(name: str, settings: Settings) -> upcycling.Config | None:
    """Return how an arm is upcycled; None for the dense one."""
    planned = plan(settings)[name]
    if not planned.start:
        return None
    return upcycling.Config(
        experts=planned.experts,
        combine=planned.combine,
        top_k=settings["top_k"],
        balance_weight=settings["balance_weight"],
        seed=settings["seed"],
    )


def build(
    base: nn.Module, config: upcycling.Config | None, start: Start | None = None
) -> nn.Module:
    """Upcycle the base, by a start of the routers or SU's; all parameters train."""
    base.requires_grad_(True)
    if config is not None:
        upcycling.upcycle(base, config, start)
    return base


def _recipe(name: str, settings: Settings) -> dict[str, Any]:
    """Return an arm's steps; the warm-up has the same number of steps in every arm."""
    steps = plan(settings)[name].steps
    return {"steps": steps, "warmup": settings["warmup"] * settings["steps"] / steps}


def _needs(name: str, settings: Settings) -> Complaints:
    """Complain where an arm has a single step, or too few rows or tokens for its routers."""
    planned = plan(settings)[name]
    leave = f"or leave {name} out of arms"
    if planned.laboratory:
        quarter = f" of {name}, a quarter of them,"
        yield from needs.more_than_a_step(settings, "steps", of=quarter, part=4)
    domains = {"trsu": PAIR, "trsu3": AREAS}.get(planned.start, ())
    if domains or planned.start in CLUSTERED:
        least = planned.experts // max(1, len(domains))
        if settings["kept_tokens"] < least:
            why = f"{name} starts experts at centroids of {least} tokens or more"
            remedy = f"take {least} or more, {leave}"
            yield f"kept_tokens = {settings['kept_tokens']}: {why}; {remedy}"
    if tasks.is_file(settings["mix"]):
        with suppress(Refusal):  # of which `needs.files` complains
            yield from _lacks(name, domains, tasks.find(settings["mix"]))
        if planned.start in upcycling.MODES:
            why = f"{name} deals tasks out to {planned.experts} experts, and a file is one"
            yield f"mix = {settings['mix']!r}: {why}; take another mix, {leave}"
    if settings["mix"] != "embedded":  # whose rows have all domains, whatever is tested
        return
    rows = _rows_by_domain(settings)
    if planned.start in upcycling.MODES and planned.experts > len(_listed(settings)):
        why = f"{name} deals the tasks out to {planned.experts} experts"
        count = len(_listed(settings))
        yield f"{count} tasks in {_lists()}: {why}; name more, {leave}"
    for domain in domains:
        if not rows.get(domain):
            text = settings[f"tasks_{domain}"]
            why = f"{name} starts experts from the rows of {', '.join(domains)}"
            remedy = f"name a task of that domain, {leave}"
            yield f"tasks_{domain} = {text!r} has no rows of {domain}: {why}; {remedy}"


def _lists() -> str:
    """Name the parameters that list tasks."""
    return ", ".join(f"tasks_{area}" for area in AREAS)


def _rows_by_domain(settings: Settings) -> dict[str, int]:
    """Return how many training rows each domain of the paper has, at most."""
    rows: dict[str, int] = {}
    for name, count in needs.drawn(settings, _listed(settings)).items():
        task = tasks.find(name)
        split = needs.training_split(settings)
        domains = {task.domain}
        if not task.shipped:  # each row of a user's file has a domain of its own
            domains = {item.domain for item in task.items(split)}
        for area in {_area(domain) for domain in domains}:
            rows[area] = rows.get(area, 0) + count
    return rows


def _area(domain: str) -> str:
    """Return the one of the `AREAS` that a row's domain belongs to: text, if it is none."""
    return domain if domain in AREAS else "text"


def _lacks(name: str, domains: Iterable[str], task: tasks.Task) -> Complaints:
    """Complain about domains of which a user's file has no rows."""
    have = {_area(item.domain) for item in task.items("train")}
    for domain in domains:
        if domain not in have:
            why = f"{name} starts experts from rows whose 'domain' is {domain!r}"
            yield f"mix = {task.source!r}: {why}, and it has none"


def _what(name: str, experts: int, start: str, length: str) -> str:
    """Say in one line what an arm is."""
    if not start:
        return "the base, fine-tuned without experts"
    text = f"{experts} experts, {STARTS[start]}"
    if length == "matched":
        text += ", scaled so that its logits deviate by 1"
    _, _, rule = name.rpartition("_")
    text += RULES.get(rule, "")
    if name in LABORATORY:
        text += "; a quarter of the steps"
    return text


def _arm(name: str, experts: int, start: str, length: str) -> Arm:
    return Arm(
        name,
        what=_what(name, experts, start, length),
        configure=partial(configure, name),
        build=build,
        needs=partial(_needs, name),
        penalty=upcycling.balance_loss if start else None,
        recipe=partial(_recipe, name),
    )


ARMS: dict[str, Arm] = {
    name: _arm(name, *how) for name, how in (MAIN | LABORATORY).items()
}


def idle(settings: Settings, arms: Mapping[str, Arm]) -> Idle:
    """Tell which parameters have no effect on these arms."""
    yield from effects.of_rates(settings, "lr", "rate_steps")
    yield from effects.of_mix(settings, ",".join(_listed(settings)))
    if settings["second"] == settings["base"]:
        yield "second", "it is the base"
    planned = [plan(settings)[name] for name in arms]
    routed = [each for each in planned if each.start]
    if not routed:
        yield "top_k balance_weight combine length", "the dense arm has no router"
    ruled = ("_renormalised", "_scaled")
    if all(name.endswith(ruled) for name in arms if name != "dense"):
        yield "combine", "the rule of these arms is in their names"
    quartered = [each for each in planned if each.laboratory or len(each.scored) > 1]
    if not quartered:
        yield "quarter_rows", "these arms are tested at their end alone"


def _shared_needs(
    settings: Settings,
    arms: Mapping[str, Arm],
    every: Mapping[str, Arm],
    device: torch.device | None,
) -> Complaints:
    """Complain about rates, tasks, the device; then about single arms."""
    yield from rates.needs(settings, arms, every)
    tested = {f"tasks_{area}": settings[f"tasks_{area}"] for area in AREAS}
    tested = {parameter: text for parameter, text in tested.items() if text}
    if not tested:
        why = "nothing would be trained on or tested"
        yield f"{_lists()} are empty: {why}; name a task in one"
    if settings["mix"] == "embedded":
        for parameter, text in tested.items():
            yield from needs.embedded_tasks(parameter, text, "mix = 'embedded'")
        yield from _hardest(settings)
    yield from needs.named(tested)
    yield from own.complaints(settings, tested)
    if settings["quarter_rows"] > settings["test_rows"]:
        why = f"the test at the end has test_rows = {settings['test_rows']} a task"
        remedy = f"take 0 to {settings['test_rows']}"
        yield f"quarter_rows = {settings['quarter_rows']}: {why}; {remedy}"
    if settings["kept_tokens"] < COMPARED:
        why = f"the starts are compared with {COMPARED} experts, whichever arms run"
        remedy = f"take {COMPARED} or more, a token for each"
        yield f"kept_tokens = {settings['kept_tokens']}: {why}; {remedy}"
    yield from needs.optimizer(settings, device)
    yield from arm.needs(arms, settings)


check = Check(lambda _: ARMS, _shared_needs, idle)


def _hardest(settings: Settings) -> Complaints:
    """Complain about a share of the hardest rows that is none of a domain's."""
    for domain, count in _rows_by_domain(settings).items():
        rows = min(count, settings["hardest_rows"])
        least = math.ceil(1 / settings["hardest_share"])
        if rows < least:
            share = f"hardest_share = {settings['hardest_share']:g}"
            why = f"it is less than one of the {rows} rows of {domain}"
            how = "rows_per_task, hardest_rows, tasks"
            yield f"{share}: {why}; take 1/{rows} or more, or {least} rows ({how})"


def areas(settings: Settings) -> dict[str, str]:
    """Return the tasks that are tested, and the domain of each."""
    return {tasks.label(name): area for name, area in _listed(settings).items()}


def _listed(settings: Settings) -> dict[str, str]:
    """Return what the parameters list, names and files, and the domain of each."""
    listed = {}
    for area in AREAS:
        for name in filter(None, settings[f"tasks_{area}"].split(",")):
            listed[name] = area
    return listed


def rows(settings: Settings) -> Rows:
    """Draw the rows, the same in all runs, whatever the seed; none held out is trained on."""
    names = list(_listed(settings))
    what = "tasks" if tasks.is_file(settings["mix"]) else "benchmarks"
    tested = {what: tasks.content(names), "rows": settings["test_rows"]}
    return own.rows(settings, names, settings["routed_rows"], tested)


def merge_domains(rows: Rows) -> None:
    """Let every row belong to one of the `AREAS`: what is neither code nor mathematics is text."""
    for row in rows.train + rows.held_out:
        row["domain"] = _area(row["domain"])


@dataclass(frozen=True)
class States:
    """What the dense base represents: the points that routers may start from."""

    three: Representations  # of the hardest rows, a group a domain (TRSU)
    pair: Representations | None  # of these, code and mathematics, if both are there
    context: Representations  # of tokens of the mixture (CRSU)
    inputs: Representations  # of what the routers will read


def states(settings: Settings, dense: nn.Module, tokenizer: Any, rows: Rows) -> States:
    """Collect representations of training rows at every layer, in one pass each."""
    pad_id = tokenizer.pad_token_id
    encode = partial(
        data.encode, tokenizer=tokenizer, max_length=settings["max_length"]
    )
    by_domain = {
        name: encode(part[: settings["hardest_rows"]])
        for name, part in data.grouped(rows.train).items()
    }
    hard = upcycling.hardest(
        dense, by_domain, share=settings["hardest_share"], pad_id=pad_id
    )
    collect = partial(
        upcycling.collect,
        dense,
        tensor=settings["tensor"],
        limit=settings["kept_tokens"],
    )
    hard_batches = {
        name: upcycling.batches(part, pad_id=pad_id) for name, part in hard.items()
    }
    three = collect(hard_batches)
    has_pair = set(PAIR) <= set(three.tasks)
    some_rows = encode(rows.train[: settings["context_rows"]])
    mixture = {"all": list(upcycling.batches(some_rows, pad_id=pad_id))}
    share = settings["context_share"]
    return States(
        three=three,
        pair=three.only(*PAIR) if has_pair else None,
        context=collect(mixture, share=share),
        inputs=collect(mixture, share=share, tensor="ffn_input"),
    )


def starts(
    settings: Settings,
    arms: Mapping[str, Arm],
    dense: nn.Module,
    tokenizer: Any,
    rows: Rows,
    states: States,
) -> dict[str, Start]:
    """Return the first weights of the routers of each arm that has any."""
    seed = settings["seed"]
    makers: dict[str, Callable[[int], Start]] = {
        "random": partial(upcycling.su, dense, seed=seed),
        "kaiming": partial(upcycling.su, dense, kind="kaiming", seed=seed),
        "wide": partial(upcycling.su, dense, kind="wide", seed=seed),
        "trsu3": partial(upcycling.trsu, states.three, seed=seed),
        "crsu": partial(upcycling.crsu, states.context, seed=seed),
        "ffn_input": partial(upcycling.crsu, states.inputs, seed=seed),
    }
    if states.pair is not None:  # else no arm needs it
        makers["trsu"] = partial(upcycling.trsu, states.pair, seed=seed)
    for mode in MODES:
        makers[mode] = partial(
            upcycling.prompted,
            dense,
            tokenizer,
            rows.train,
            mode=mode,
            max_length=settings["max_length"],
        )
    return started(settings, arms, makers, states.inputs)


def started(
    settings: Settings,
    arms: Mapping[str, Arm],
    makers: Mapping[str, Callable[[int], Start]],
    inputs: Representations,
) -> dict[str, Start]:
    """Return where the routers of each arm start; the dense arm has none.

    ``makers`` are by start and take a number of experts; ``inputs`` are what the dense base's FFNs
    read, by which rows get their length and the rule "scaled" its factors.
    """
    starts = {}
    for name, planned in plan(settings).items():
        if name not in arms or not planned.start:
            continue
        start = makers[planned.start](planned.experts)
        start = upcycling.scaled(start, planned.length, inputs=inputs)
        if planned.combine == "scaled":
            start = upcycling.levelled(start, inputs, settings["top_k"])
        starts[name] = start
    return starts


def experiment(
    settings: Settings,
    arms: Mapping[str, Arm],
    starts: Mapping[str, Start],
    rows: Rows,
    load: Callable[[], nn.Module],
    tokenizer: Any,
    *,
    bf16: bool,
) -> Experiment:
    """Bring together what all arms share; ``starts`` of their routers are by arm.

    ``load`` returns a fresh base in float32 at each call; ``bf16`` is what products are in.

    Raises:
        Refusal: E-KEYS for an upcycled arm of which ``starts`` has none: the method would draw
            random routers (SU) in its place.
    """
    planned = plan(settings)
    with_starts: dict[str, Arm] = {}
    for name, each in arms.items():
        if planned[name].start and name not in starts:
            remedy = "give what `router_init.starts` returns for these arms"
            refuse("E-KEYS", f"no start is given for the routers of {name}; {remedy}")
        built = partial(build, start=starts.get(name))
        with_starts[name] = replace(each, build=built)
    test = asking(settings, tokenizer, list(_listed(settings)))
    return of_rows(settings, with_starts, rows, load, tokenizer, test, bf16=bf16)


@dataclass(frozen=True)
class Course:
    """What became of an arm on its way, by the steps after which it was looked at."""

    # Of its routers before the first step; empty for the dense arm.
    before: Mapping[str, float]
    history: History  # a line a step
    routes: Mapping[int, Tensor]  # which experts were activated on held-out rows
    answers: Mapping[int, pd.DataFrame]  # a row a test item
    # Which expert served which domain at the end, of two experts.
    shares: pd.DataFrame | None
    # Nats a token on the validation rows; empty for the laboratory's arms.
    recovery: Mapping[int, float]


def run(
    experiment: Experiment,
    arm: Arm,
    rate: float,
    parts: Mapping[str, Sequence[Mapping[str, Tensor]]],
    first: Mapping[str, Tensor],
) -> Course:
    """Make an arm, train it at its rate, and look at its routing and test it on the way.

    ``parts`` are held-out rows by domain, in padded batches, ``first`` is the batch on which
    routers' gradients are measured before the first step.
    """
    settings = experiment.settings
    planned = plan(settings)[arm.name]
    held_out = [batch for part in parts.values() for batch in part]
    model = experiment.make(arm)
    before = routers.summary(model, held_out, first) if planned.start else {}

    few = settings["quarter_rows"] or settings["test_rows"]
    at_end = few if planned.laboratory else settings["test_rows"]
    milestones: list[Any] = [
        (planned.watched, partial(routers.activated, batches=held_out)),
        (planned.scored[:-1], partial(experiment.test, limit=few)),
        ((planned.steps,), partial(experiment.test, limit=at_end)),
    ]
    if planned.experts == 2 and planned.start in ("random", "trsu"):
        milestones.append(((planned.steps,), partial(routing.shares, batches=parts)))
    milestones.append((planned.recovery, experiment.validate))
    history = experiment.fit(arm, model, rate, milestones)
    routes, early, late, *shares, recovery = history.milestones
    return Course(
        before=before,
        history=history,
        routes=routes,
        answers=early | late,
        shares=shares[0][planned.steps] if shares else None,
        recovery=recovery,
    )


def record_recovery(
    run: Recorder,
    root: str,
    plan: Mapping[str, upcycling.config.Arm],
    courses: Mapping[str, Course],
) -> pd.DataFrame:
    """Record how far each arm starts from its base, and how it comes back from there.

    ``step0/nll`` of an arm is its loss on the validation rows before the first step, in nats a
    token; that of the dense arm is the base's. Returns a line an arm, a column a step.
    """
    lines = {}
    for name, course in courses.items():
        if course.recovery:
            path = f"{root}/{plan[name].path}"
            run.record(f"{path}/step0/nll", course.recovery[0], "nats")
            heights = [*course.recovery.values()]
            run.curve(f"{path}/recovery", heights, "nats", x=[*course.recovery])
            lines[name] = course.recovery
    return pd.DataFrame(lines).T


def tables(settings: Settings, course: Course) -> dict[int, pd.DataFrame]:
    """Return an arm's answers by step, each benchmark weighted alike."""
    area = areas(settings)
    return {
        step: evaluation.by_benchmark(answers, area)
        for step, answers in course.answers.items()
    }


def stability(history: History, steps: int) -> dict[str, float]:
    """Return how rough a training was, after its first tenth.

    Spread and largest jump of the loss less its running median over a tenth of the steps (nats),
    and the largest gradient over the median one.
    """
    loss = pd.Series(history.loss)
    norm = pd.Series(history.norm)
    tenth = steps // 10
    around = loss.rolling(max(3, tenth), center=True, min_periods=1).median()
    rest = (loss - around)[tenth:]
    return {
        "spread": rest.std(),
        "jump": rest.max(),
        "gradient": norm[tenth:].max() / norm.median(),
    }


def specialisation(course: Course) -> tuple[float, float] | None:
    """Return how far expert 0 parts code from mathematics: over layers first, and in each layer.

    None where an arm has not two experts, or the held-out rows not both domains.
    """
    served = course.shares
    if served is None or not set(PAIR) <= set(served.domain):
        return None
    averaged, by_layer = routing.contrast(served, *PAIR)
    return averaged, by_layer


def begun(settings: Settings, course: Course) -> dict[str, float]:
    """Return what became of a start: its router before the first step, and a quarter later."""
    short = upcycling.quarters(settings["steps"])[25]
    losses = course.history.loss[:short]
    return {
        **course.before,
        "start": losses[0],
        "loss": float(np.mean(losses[-max(1, short // 6) :])),
        "consistency": routers.overall(course.routes, upcycling.thirds(short)),
    }


def record(
    run: Recorder, root: str, experiment: Experiment, name: str, course: Course
) -> None:
    """Keep what became of an arm, below ``root``: loss, scores, stability, routing, its start."""
    settings = experiment.settings
    planned = plan(settings)[name]
    place = f"{root}/{planned.path}"
    run.curve(f"{place}/loss", course.history.loss, "nats")
    answers = tables(settings, course)[planned.steps]
    run.scores(place, answers, domains=not planned.laboratory)

    if not planned.laboratory:
        for measure, value in stability(course.history, planned.steps).items():
            unit = "ratio" if measure == "gradient" else "nats"
            run.record(f"{place}/stability/{measure}", value, unit)
        if planned.start:
            kept = routers.overall(course.routes, upcycling.thirds(planned.steps))
            # Table 6 has SU with two experts twice.
            for path in ("su", "su2") if name == "su" else (name,):
                run.record(f"{root}/{path}/consistency", kept, "share")
    parted = specialisation(course)
    if parted:
        averaged, by_layer = parted
        run.record(f"{root}/{name}/specialisation", averaged, "share")
        run.record(f"{root}/{name}/specialisation_by_layer", by_layer, "share")
    if course.before and (name in LED or planned.laboratory):
        state = begun(settings, course)
        for measure, value in state.items():
            unit = UNITS.get(measure, "share")
            run.record(f"{root}/lab/{name}/{measure}", value, unit)
        if name in LED:
            run.record(f"{root}/{name}/entropy", state["entropy"], "share")


@dataclass(frozen=True)
class Lead:
    """How far centroids are ahead of random routers, four experts each, by per cent of training."""

    points: dict[int, float]  # of accuracy
    nats: dict[int, float]  # of likelihood


def leads(
    run: Recorder, root: str, settings: Settings, courses: Mapping[str, Course]
) -> dict[str, Lead]:
    """Record, by combine rule, CRSU's lead over SU after each quarter, where both ran."""
    most = settings["quarter_rows"] or settings["test_rows"]
    area = areas(settings)
    by_rule: dict[str, Lead] = {}
    for rule in ("", "_renormalised"):
        pair = (f"crsu{rule}", f"su4{rule}")
        if not set(pair) <= set(courses):
            continue
        lead = Lead({}, {})
        for part, step in upcycling.quarters(settings["steps"]).items():
            ours, theirs = (
                evaluation.by_benchmark(_first(courses[name], step, most, area), area)
                for name in pair
            )
            points = 100 * (ours.score - theirs.score)
            nats = (theirs.nll - ours.nll).dropna()
            place = f"{rule}/{part}"
            run.record(f"{root}/lead{place}", points.mean(), "percent_points", points)
            run.record(f"{root}/lead_nats{place}", nats.mean(), "nats", nats)
            lead.points[part] = points.mean()
            lead.nats[part] = nats.mean()
        parts = list(lead.points)
        run.curve(f"{root}/lead{rule}", lead.points.values(), "percent_points", parts)
        run.curve(f"{root}/lead_nats{rule}", lead.nats.values(), "nats", parts)
        by_rule[rule] = lead
    return by_rule


def _first(
    course: Course, step: int, most: int, area: Mapping[str, str]
) -> pd.DataFrame:
    """Return the answers after a step to the first rows of each task."""
    answers = evaluation.by_benchmark(course.answers[step], area)
    return answers[answers["item"] < most]
