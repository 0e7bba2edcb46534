"""Every op by name: its contenders in turns, a row each, and whether its own answer is right."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import silu

from moebook import kernels, runtime
from moebook.bench.case import Case, Product, dense, number_format
from moebook.bench.timing import Contender, Cost, interleave, shares
from moebook.errors import Refusal, refuse, refuse_unknown
from moebook.kernels import Bank
from moebook.kernels.clusters import clusters
from moebook.kernels.groups import groups
from moebook.kernels.lora_mixture import lora_mixture
from moebook.kernels.similarity import duplicates, nearest_rows
from moebook.results import formed

with formed(Path(__file__).with_name("cases.yaml")) as _FILE:
    OPS, PEERS = _FILE["ops"], _FILE["peers"]
"""What is known of each op, and what each peer's distribution is compared on: see there."""
STATED, ROUNDS = {"cpu": "full", "cuda": "model"}, 5  # scale and fewest rounds of the goals
SCALES = ("tiny", "small", "full", "model")
KEYS = "op", "case", "contender", "key"
COLUMNS = (*KEYS, *Cost._fields, "flops", "traffic", "note", "profile")
SLACK = 2  # an op may err so many times as the reference in its number format, or a unit roundoff
_chosen = partial(kernels.route, top_k=2, impl="reference")
Names = Iterable[str] | None


def installed() -> pd.DataFrame:
    """List the peers: version (None where not installed) and what each is compared on."""
    there = {each.name: each.version for each in importlib.metadata.distributions()}
    versions = [there.get(name) for name in PEERS]
    return pd.DataFrame({"version": versions, "compared on": list(PEERS.values())}, index=PEERS)


def find(name: str) -> dict[str, Any]:
    """Return what `OPS` knows of an op."""
    refuse_unknown(name, OPS, "E-NAME", f"unknown op '{name}';")
    return dict(OPS[name])


def build(name: str, device: torch.device, **letters: int) -> Case:
    """Make a case of an op; its module is imported now, since some of them take long to import."""
    make: Callable[..., Case] = pkgutil.resolve_name(f"moebook.bench.{find(name)['build']}")
    return make(device, **letters)


def roles(names: Names = None) -> pd.DataFrame:
    """List which letter of each op plays the part of T, E and N, and what it counts there."""
    sweeps = {name: find(name)["sweep"] for name in names or OPS}
    rows = [{role: f"{axis[0]}: {axis[1]}" for role, axis in s.items()} for s in sweeps.values()]
    return pd.DataFrame(rows, index=list(sweeps))


def measure(
    names: Names = None, *, scale: str | None = None, device: str = "auto", rounds: int = ROUNDS
) -> pd.DataFrame:
    """Time every case of some ops (by default all) against its floor and its peers.

    The scale is one of `SCALES`, by default the one that the device's goals are stated for.
    Returns one row a contender, `COLUMNS`: those of `timing.Cost`; ``key``, the name of its values
    in a record; ``flops`` and ``traffic`` of the case; ``note``, why it took no part; ``profile``,
    where the time of ours goes. ``attrs`` has ``device``, ``scale``, ``rounds`` and ``threads``.
    """
    place = runtime.resolve_device(device)
    chosen = STATED[place.type] if scale is None else scale
    refuse_unknown(chosen, SCALES, "E-CHOICE", f"unknown scale '{chosen}';")
    if rounds < 1:
        refuse("E-RANGE", f"rounds is {rounds}, expected at least 1")
    frame = _run("bench", names, lambda op: op[chosen], place, rounds, 3.0)
    threads = torch.get_num_threads()
    frame.attrs.update(device=place.type, scale=chosen, rounds=rounds, threads=threads)
    return frame


def growth(
    names: Names = None, *, scale: str = "small", device: str = "auto", rounds: int = 1,
    points: int | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Measure each op at ``points`` sizes a letter; the others are as in the scale's first case.

    Returns the columns of `measure`, and ``letter``, ``value`` and ``exponent``: of the power law
    through a contender's first and last point (1 is linear).
    """

    def swept(op: dict[str, Any]) -> dict[str, dict[str, int]]:
        letters = next(iter(op[scale].values()))
        return {
            f"{letter}={value}": {**letters, letter: value}
            for letter, _, values in op["sweep"].values()
            for value in values[:points]
        }

    place = runtime.resolve_device(device)
    frame = _run("sweep", names, swept, place, rounds, 0.5)
    frame = frame[frame["seconds"].notna()].reset_index(drop=True)
    frame[["letter", "value"]] = frame["case"].str.extract(r"(\w+)=(\d+)")
    frame = frame.astype({"value": int})
    curves = frame.sort_values("value").groupby(["op", "letter", "contender"])
    over, span = (
        np.log(curves[name].transform("last") / curves[name].transform("first"))
        for name in ("value", "seconds")
    )
    return frame.assign(exponent=span / over)


def _run(task: str, names: Names, cases: Callable[[Any], Any], *how: Any) -> pd.DataFrame:
    """Time some cases of each op; ``how`` are the place, rounds and budget of `measured`."""
    chosen = OPS if names is None else names
    todo = [(name, *case) for name in chosen for case in cases(find(name)).items()]
    lines: list[dict[str, Any]] = []
    for name, label, letters in runtime.progress(todo, task, len(todo)):
        lines += measured(name, label, letters, *how, profiled=task == "bench")
    return pd.DataFrame(lines, columns=list(COLUMNS))


def measured(
    name: str, label: str, letters: Mapping[str, int], place: torch.device, rounds: int,
    budget: float, *, profiled: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time one case; its inputs are freed at the end."""
    head: dict[str, Any] = {"op": name, "case": label}
    try:
        case = build(name, place, **letters)
        costs, failed = interleave(case.contenders, place, rounds=rounds, budget=budget)
    except Refusal as refusal:  # of our own op: a case that it cannot do is a result too
        return [{**head, "contender": "ours", "note": refusal.message}]
    head |= {"flops": case.flops, "traffic": case.traffic, "note": ""}
    lines = [
        {**head, "contender": who, "key": f"{name}/{label}/{slug(who)}", **cost._asdict()}
        for who, cost in costs.items()
    ]
    if profiled:
        lines[0]["profile"] = shares(case.contenders[0], place, lines[0]["seconds"])
    absent = {**failed, **case.absent}
    return lines + [{**head, "contender": who, "note": note} for who, note in absent.items()]


def slug(name: str) -> str:
    """Write a name as part of a recorded value's name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def ceilings(device: str = "auto") -> dict[str, float]:
    """Measure the roof: FLOPs a second of a square product, bytes a second of a large copy."""
    place = runtime.resolve_device(device)
    dtype, gpu = number_format(place), place.type == "cuda"
    side = 8192 if gpu else 1024
    square = Product(side, side, side)
    source = torch.zeros((8 if gpu else 64) * side * side, device=place, dtype=dtype)
    target = torch.empty_like(source)
    parties = [dense([square], place, dtype), Contender("copy", lambda: target.copy_(source))]
    costs, _ = interleave(parties, place, rounds=5, budget=60.0)
    return {
        "flops": square.flops / costs["floor"].seconds,
        "bytes": 2 * source.nbytes / costs["copy"].seconds,
    }


def errors(names: Iterable[str] | None = None, *, device: str = "auto") -> pd.DataFrame:
    """Check ops (by default all), one row a check: ``error`` to float64, or how many differ."""
    place = runtime.resolve_device(device)
    chosen = [name for name in (OPS if names is None else names) if find(name)]
    lines = [[name, *check] for name in chosen for check in _checks(name, place)]
    frame = pd.DataFrame(lines, columns=["op", "what", "error", "allowed"])
    return frame.assign(right=frame["error"] <= frame["allowed"])


def _checks(name: str, place: torch.device) -> Iterator[tuple[str, float, float]]:
    """Compare every output and gradient with the reference's in float64, and two runs."""
    if name == "bank":  # against PEFT's loop in float64, in which no shot is padded
        case = build("bank", place, N=3, S=5, R=4, bits=64)
        nats = {contender.name: contender.run for contender in case.contenders}
        apart = np.asarray(nats["ours"]()) - nats["set_adapter, shot by shot"]()
        yield "perplexities", float(np.abs(np.expm1(apart)).max()), 1e-5
        return
    op, *shapes = FORWARD[name]
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, device=place) for shape in shapes]
    truth = _results(op, "reference", [part.double() for part in inputs])
    plain = _results(op, "reference", inputs)
    ours, again = (_results(op, "auto", inputs) for _ in range(2))
    for what, mine in ours.items():
        right = truth[what]
        if mine.is_floating_point():
            scale = right.norm().clamp(min=1e-300)
            error, same = (float((e.double() - right).norm() / scale) for e in (mine, plain[what]))
            unit = torch.finfo(inputs[0].dtype).eps  # the reference may be exact by chance
            yield what, error, SLACK * max(same, unit)
        else:
            wrong = (mine != right).sum() if mine.shape == right.shape else mine.numel() + 1
            yield f"{what} that differ", int(wrong), 0
    differing = sum(int((mine != again[what]).sum()) for what, mine in ours.items())
    yield "numbers in which two runs differ", differing, 0


def _results(op: Callable[..., Any], impl: str, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Return an op's outputs, and the gradients where it has any."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    result = op(*leaves, impl=impl)
    named = {"output": result} if isinstance(result, Tensor) else result._asdict()
    outputs = {name: part for name, part in named.items() if isinstance(part, Tensor)}
    graded = [part for part in outputs.values() if part.requires_grad]
    waves = [torch.arange(part.numel()).cos().view_as(part).to(part) for part in graded]
    gradients = torch.autograd.grad(graded, leaves, waves) if graded else ()
    outputs |= {f"gradient {number}": part for number, part in enumerate(gradients, start=1)}
    return {name: part.detach() for name, part in outputs.items()}


def _split(x: Tensor, logits: Tensor, *trained: Tensor, impl: str) -> Tensor:
    frozen = Bank(*(part.detach().repeat(3, 1, 1)[:8] for part in trained))
    slots = torch.tensor([-1, 0, -1, 1, -1, -1, 2, -1], device=x.device)
    routing = _chosen(logits)
    return kernels.split_experts(x, routing, frozen, Bank(*trained), slots, silu, impl=impl)


FORWARD: Mapping[str, tuple[Any, ...]] = {
    "route": (partial(kernels.route, top_k=4), (257, 16)),
    "experts": (
        lambda x, by, *bank, impl: kernels.experts(x, _chosen(by), Bank(*bank), silu, impl=impl),
        (97, 32), (97, 8), (8, 48, 32), (8, 32, 24),
    ),
    "split_experts": (_split, (97, 32), (97, 8), (3, 48, 32), (3, 32, 24)),
    "adapters": (
        lambda h, by, *both, impl: kernels.adapters(h, _chosen(by), *both, impl=impl),
        (300, 32), (300, 2), (2, 32, 16), (2, 16, 32),
    ),
    "lora_mixture": (lora_mixture, (97, 32), (97, 48), (97, 4), (4, 16, 32), (4, 48, 16)),
    "balance_loss": (
        lambda by, impl: kernels.balance_loss(by, by.topk(4).indices, impl=impl), (257, 16),
    ),
    "nearest": (partial(nearest_rows, count=100), (20_000, 16), (5, 16)),
    "duplicates": (partial(duplicates, threshold=0.8), (100, 4), (100,)),
    "groups": (partial(groups, size=4), (9, 9), (9,)),
    "clusters": (clusters, (2, 300, 16), (2, 5, 16)),
}  # fmt: skip
"""Each op, called with its inputs and ``impl``, and the shapes of its inputs."""
