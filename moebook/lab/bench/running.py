"""Every op by name: its contenders in turns, and whether its answer is right."""

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
from moebook.errors import Refusal, refuse, refuse_unknown
from moebook.kernels import Bank
from moebook.kernels.lora_mixture import lora_mixture
from moebook.kernels.similarity import duplicates, nearest_rows
from moebook.lab.bench.case import Case, Product, dense, number_format
from moebook.lab.bench.timing import Contender, Cost, interleave, shares
from moebook.storage import formed

with formed(Path(__file__).with_name("cases.yaml")) as _FILE:
    OPS = _FILE["ops"]
    PEERS = _FILE["peers"]
"""What is known of each op, and what each peer is compared on: see there."""
STATED = {"cpu": "full", "cuda": "model"}  # the scale of the goals
ROUNDS = 5  # the fewest of the goals
SCALES = ("tiny", "small", "full", "model")
KEYS = "op", "case", "contender", "key"
COLUMNS = (*KEYS, *Cost._fields, "flops", "traffic", "note", "profile")
TOLERANCE = 2
"""An op may err so many times as the reference in its number format."""
_chosen = partial(kernels.route, top_k=2, impl="reference")
Names = Iterable[str] | None
Letters = Mapping[str, int]


def installed() -> pd.DataFrame:
    """List the peers: version (None: not installed), what each is compared on."""
    versions = {}
    for distribution in importlib.metadata.distributions():
        versions[distribution.name] = distribution.version
    columns = {
        "version": [versions.get(name) for name in PEERS],
        "compared on": list(PEERS.values()),
    }
    return pd.DataFrame(columns, index=PEERS)


def find(name: str) -> dict[str, Any]:
    """Return what `OPS` knows of an op."""
    refuse_unknown(name, OPS, "E-NAME", f"unknown op '{name}';")
    return dict(OPS[name])


def build(name: str, device: torch.device, **letters: int) -> Case:
    """Make a case of an op; its module is imported now, as some take long."""
    make: Callable[..., Case] = pkgutil.resolve_name(
        f"moebook.lab.bench.{find(name)['build']}"
    )
    return make(device, **letters)


def roles(names: Names = None) -> pd.DataFrame:
    """List which letter of each op plays the part of T, E and N, and what it counts."""
    rows = {}
    for name in names or OPS:
        axes = find(name)["sweep"].items()
        rows[name] = {role: f"{letter}: {what}" for role, (letter, what, _) in axes}
    return pd.DataFrame(rows.values(), index=list(rows))


def measure(
    names: Names = None,
    *,
    scale: str | None = None,
    device: str = "auto",
    rounds: int = ROUNDS,
) -> pd.DataFrame:
    """Time every case of some ops (by default all) against its floor and its peers.

    The scale is one of `SCALES`, by default the one that the device's goals are stated
    for. Returns one row a contender, `COLUMNS`: those of `timing.Cost`; ``key``, the
    name of its values in a record; ``flops`` and ``traffic`` of the case; ``note``, why
    it took no part; ``profile``, where the time of ours goes. ``attrs`` has ``device``,
    ``scale``, ``rounds`` and ``threads``.
    """
    place = runtime.resolve_device(device)
    if scale is None:
        scale = STATED[place.type]
    _check(scale, rounds)
    frame = _run("bench", names, lambda op: op[scale], place, rounds, 3.0)
    threads = torch.get_num_threads()
    frame.attrs.update(device=place.type, scale=scale, rounds=rounds, threads=threads)
    return frame


def growth(
    names: Names = None,
    *,
    scale: str = "small",
    device: str = "auto",
    rounds: int = 1,
    points: int | None = None,
) -> pd.DataFrame:
    """Measure each op at ``points`` sizes a letter, else as in its first case.

    Returns the columns of `measure`, and ``letter``, ``value`` and ``exponent``: of the
    power law through a contender's first and last point (1 is linear).
    """

    def swept(op: dict[str, Any]) -> Mapping[str, Letters]:
        first_case = next(iter(op[scale].values()))
        cases = {}
        for letter, _, values in op["sweep"].values():
            for value in values[:points]:
                cases[f"{letter}={value}"] = {**first_case, letter: value}
        return cases

    place = runtime.resolve_device(device)
    _check(scale, rounds)
    frame = _run("sweep", names, swept, place, rounds, 0.5)
    frame = frame[frame["seconds"].notna()].reset_index(drop=True)
    frame[["letter", "value"]] = frame["case"].str.extract(r"(\w+)=(\d+)")
    frame = frame.astype({"value": int})
    curves = frame.sort_values("value").groupby(["op", "letter", "contender"])
    ends = curves[["value", "seconds"]]
    logs = np.log(ends.transform("last") / ends.transform("first"))
    return frame.assign(exponent=logs["seconds"] / logs["value"])


def _check(scale: str, rounds: int) -> None:
    """Refuse an unknown scale, or no round."""
    refuse_unknown(scale, SCALES, "E-CHOICE", f"unknown scale '{scale}';")
    if rounds < 1:
        refuse("E-RANGE", f"rounds is {rounds}, expected at least 1")


def _run(
    task: str,
    names: Names,
    cases: Callable[[dict[str, Any]], Mapping[str, Letters]],
    place: torch.device,
    rounds: int,
    budget: float,
) -> pd.DataFrame:
    """Time some cases of each op."""
    todo = []
    for name in OPS if names is None else names:
        for label, letters in cases(find(name)).items():
            todo.append((name, label, letters))
    lines: list[dict[str, Any]] = []
    for case in runtime.progress(todo, task, len(todo)):
        lines += measured(*case, place, rounds, budget, profiled=task == "bench")
    return pd.DataFrame(lines, columns=list(COLUMNS))


def measured(
    name: str,
    label: str,
    letters: Letters,
    place: torch.device,
    rounds: int,
    budget: float,
    *,
    profiled: bool = False,
) -> list[dict[str, Any]]:
    """Time one case; its inputs are freed at the end."""
    head: dict[str, Any] = {"op": name, "case": label}
    try:
        case = build(name, place, **letters)
        costs, failed = interleave(case.contenders, place, rounds=rounds, budget=budget)
    except Refusal as refusal:
        # Of our own op: a case that it cannot do is a result too.
        return [{**head, "contender": "ours", "note": refusal.message}]
    head |= {"flops": case.flops, "traffic": case.traffic}
    lines = []
    for who, cost in costs.items():
        key = f"{name}/{label}/{slug(who)}"
        lines.append(
            {**head, "contender": who, "key": key, "note": "", **cost._asdict()}
        )
    if profiled:
        ours = case.contenders[0]
        lines[0]["profile"] = shares(ours, place, costs[ours.name].seconds)
    for who, note in {**failed, **case.absent}.items():
        lines.append({**head, "contender": who, "note": note})
    return lines


def slug(name: str) -> str:
    """Write a name as part of a recorded value's name."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")


def ceilings(
    device: str = "auto", dtype: torch.dtype | None = None
) -> dict[str, float]:
    """Measure the roof: FLOPs a second of a product, bytes a second of a copy.

    Both are in ``dtype``, by default that in which ops are timed on the device.
    """
    place = runtime.resolve_device(device)
    dtype = dtype or number_format(place)
    side, squares = (8192, 8) if place.type == "cuda" else (1024, 64)
    product = Product(side, side, side)
    source = torch.zeros(squares * side * side, device=place, dtype=dtype)
    target = torch.empty_like(source)
    copy = Contender("copy", lambda: target.copy_(source))
    contenders = [dense([product], place, dtype), copy]
    costs, _ = interleave(contenders, place, rounds=5, budget=60.0)
    return {
        "flops": product.flops / costs["floor"].seconds,
        "bytes": 2 * source.nbytes / costs["copy"].seconds,
    }


def errors(names: Names = None, *, device: str = "auto") -> pd.DataFrame:
    """Check ops (by default all): ``error`` to float64, or how many differ."""
    place = runtime.resolve_device(device)
    lines = []
    for name in OPS if names is None else names:
        find(name)
        for check in _checks(name, place):
            lines.append([name, *check])
    frame = pd.DataFrame(lines, columns=["op", "what", "error", "allowed"])
    return frame.assign(right=frame["error"] <= frame["allowed"])


Check = tuple[str, float, float]  # what, its error, and how large that may be


def _checks(name: str, place: torch.device) -> Iterator[Check]:
    """Compare outputs and gradients with the reference in float64, and two runs."""
    if name == "bank":
        yield _bank_check(place)
        return
    if name == "pesc_step":
        yield _step_check(place)
        return
    op, *shapes = FORWARD[name]
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, device=place) for shape in shapes]
    exact = _results(op, "reference", [x.double() for x in inputs])
    plain = _results(op, "reference", inputs)
    ours = _results(op, "auto", inputs)
    again = _results(op, "auto", inputs)
    unit = torch.finfo(inputs[0].dtype).eps  # the reference may be exact by chance
    differing = 0
    for what, mine in ours.items():
        right = exact[what]
        differing += int((mine != again[what]).sum())
        if mine.is_floating_point():
            reference_error = _relative(plain[what], right)
            allowed = TOLERANCE * max(reference_error, unit)
            yield what, _relative(mine, right), allowed
        elif mine.shape == right.shape:
            yield f"{what} that differ", int((mine != right).sum()), 0
        else:
            yield f"{what} that differ", mine.numel() + 1, 0
    yield "numbers in which two runs differ", differing, 0


def _relative(result: Tensor, right: Tensor) -> float:
    """Norm of the error over the norm of what is right, in float64."""
    scale = right.norm().clamp(min=1e-300)
    return float((result.double() - right).norm() / scale)


def _bank_check(place: torch.device) -> Check:
    """Compare with PEFT's loop in float64, in which no shot is padded."""
    case = build("bank", place, N=3, S=5, R=4, bits=64)
    nats = {contender.name: contender.run for contender in case.contenders}
    difference = np.asarray(nats["ours"]()) - nats["set_adapter, shot by shot"]()
    return "perplexities", float(np.abs(np.expm1(difference)).max()), 1e-5


def _step_check(place: torch.device) -> Check:
    """Compare every gradient with the plain loop's in float64, with the same dropout."""
    case = build("pesc_step", place, B=4, E=4, R=4, bits=64)
    for contender in (case.contenders[0], case.contenders[-1]):
        torch.manual_seed(0)
        contender.run()
    count = len(case.leaves) // 2  # those of the plain loop lie behind ours
    pairs = zip(case.leaves[:count], case.leaves[count:], strict=True)
    errors = [_relative(mine.grad, right.grad) for mine, right in pairs]
    # A NaN among them is the largest to NumPy alone.
    return "gradients", float(np.max(errors)), 1e-9


def _results(
    op: Callable[..., Any], impl: str, inputs: list[Tensor]
) -> dict[str, Tensor]:
    """Return an op's outputs, and the gradients where it has any."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = op(*leaves, impl=impl)
    fields = {"output": result} if isinstance(result, Tensor) else result._asdict()
    outputs = {k: x for k, x in fields.items() if isinstance(x, Tensor)}
    graded = [x for x in outputs.values() if x.requires_grad]
    if graded:
        # Any fixed cotangent does; a wave has no two places alike.
        waves = [torch.arange(x.numel()).cos().view_as(x).to(x) for x in graded]
        gradients = torch.autograd.grad(graded, leaves, waves)
        for number, gradient in enumerate(gradients, start=1):
            outputs[f"gradient {number}"] = gradient
    return {name: x.detach() for name, x in outputs.items()}


def _experts(x: Tensor, logits: Tensor, *bank: Tensor, impl: str) -> Tensor:
    return kernels.experts(x, _chosen(logits), Bank(*bank), silu, impl=impl)


def _split(x: Tensor, logits: Tensor, *trained: Tensor, impl: str) -> Tensor:
    """Of eight experts the second, fourth and seventh train."""
    # Eight frozen experts, made of the three that train.
    eight = [weight.detach().repeat(3, 1, 1)[:8] for weight in trained]
    frozen = Bank(*eight)
    # For each expert its place among those that train, or -1.
    slots = torch.tensor([-1, 0, -1, 1, -1, -1, 2, -1], device=x.device)
    routing = _chosen(logits)
    bank = Bank(*trained)
    return kernels.split_experts(x, routing, frozen, bank, slots, silu, impl=impl)


def _adapters(h: Tensor, logits: Tensor, *factors: Tensor, impl: str) -> Tensor:
    return kernels.adapters(h, _chosen(logits), *factors, impl=impl)


def _balance(logits: Tensor, impl: str) -> Tensor:
    return kernels.balance_loss(logits, logits.topk(4).indices, impl=impl)


FORWARD: Mapping[str, tuple[Any, ...]] = {
    "route": (partial(kernels.route, top_k=4), (257, 16)),
    "experts": (_experts, (97, 32), (97, 8), (8, 48, 32), (8, 32, 24)),
    "split_experts": (_split, (97, 32), (97, 8), (3, 48, 32), (3, 32, 24)),
    "adapters": (_adapters, (300, 32), (300, 2), (2, 32, 16), (2, 16, 32)),
    "lora_mixture": (
        lora_mixture,
        (97, 32),
        (97, 48),
        (97, 4),
        (4, 16, 32),
        (4, 48, 16),
    ),
    "balance_loss": (_balance, (257, 16)),
    "nearest": (partial(nearest_rows, count=100), (20_000, 16), (5, 16)),
    "duplicates": (partial(duplicates, threshold=0.8), (100, 4), (100,)),
}
"""Each op, called with its inputs and ``impl``, and the shapes of its inputs."""
