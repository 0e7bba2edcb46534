"""Whether an op's answer is right: against float64, against loops, against PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import silu

from moebook import kernels, runtime
from moebook.bench.running import OPS, find
from moebook.kernels import Bank, Routing
from moebook.kernels.lora_mixture import Projection

SLACK = 2
"""An op may err so many times as much as the reference does in the same number format, or as one
unit in the last place where that is more."""

Forward = Callable[..., Tensor]
"""An op with one output, called with ``impl`` and its inputs."""


class Check(NamedTuple):
    """One answer checked.

    Attributes:
        what: The quantity.
        error: Of ours: relative distance to float64, or the number of answers that differ.
        allowed: The largest error that is right.
    """

    what: str
    error: float
    allowed: float


def errors(names: Iterable[str] | None = None, *, device: str = "auto") -> pd.DataFrame:
    """Check ops on small inputs: no tolerance is set by hand where float64 can set it.

    Args:
        names: Ops; all by default.
        device: As `runtime.resolve_device` takes it.

    Returns:
        One row a check: ``op``, ``what``, ``error``, ``allowed`` and ``right``.
    """
    place = runtime.resolve_device(device)
    chosen = [name for name in (OPS if names is None else names) if find(name)]
    lines = [[name, *check] for name in chosen for check in CHECKS[name](place=place)]
    frame = pd.DataFrame(lines, columns=["op", "what", "error", "allowed"])
    return frame.assign(right=frame["error"] <= frame["allowed"])


def _against_float64(
    forward: Forward, *shapes: tuple[int, ...], place: torch.device
) -> Iterator[Check]:
    """Compare the output and every gradient with the reference in float64."""
    inputs = _drawn(place, *shapes)
    cotangent = torch.randn_like(forward("reference", *inputs).detach())
    exact = _step(forward, "reference", [part.double() for part in inputs], cotangent.double())
    plain = _step(forward, "reference", inputs, cotangent)
    found = _step(forward, "auto", inputs, cotangent)
    for number, (ours, same, truth) in enumerate(zip(found, plain, exact, strict=True)):
        what = f"gradient {number}" if number else "output"
        scale = truth.norm().clamp(min=1e-300)
        error, allowed = ((got.double() - truth).norm() / scale for got in (ours, same))
        unit = torch.finfo(ours.dtype).eps  # one number may be exact in the reference by chance
        yield Check(what, error.item(), SLACK * max(allowed.item(), unit))
    again = _step(forward, "auto", inputs, cotangent)
    differing = sum(int((a != b).sum()) for a, b in zip(found, again, strict=True))
    yield Check("numbers in which two runs differ", differing, 0)


def _step(
    forward: Forward, impl: str, inputs: list[Tensor], cotangent: Tensor
) -> tuple[Tensor, ...]:
    leaves = [part.detach().requires_grad_() for part in inputs]
    out = forward(impl, *leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, cotangent)


def _drawn(place: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, device=place) for shape in shapes]


def _differing(what: str, *lists: Any) -> Check:
    """Count the places at which two lists differ; all of them where the lengths do."""
    ours, theirs = (torch.as_tensor(each, device="cpu") for each in lists)
    alike = ours.shape == theirs.shape
    wrong = int((ours != theirs).sum()) if alike else max(len(ours), len(theirs))
    return Check(f"{what} that differ", wrong, 0)


def _runs(name: str, place: torch.device, **letters: int) -> dict[str, Callable[[], Any]]:
    """Make a case and return what its contenders run."""
    case = find(name).build(place, **letters)
    return {contender.name: contender.run for contender in case.contenders}


def _bank(place: torch.device) -> Iterator[Check]:
    """Compare perplexities with those of PEFT's loop in float64, in which no shot is padded."""
    runs = _runs("bank", place, N=3, S=5, R=4, bits=64)
    apart = np.asarray(runs["ours"]()) - runs["set_adapter, shot by shot"]()
    yield Check("perplexities", float(np.abs(np.expm1(apart)).max()), 1e-5)


def _clusters(place: torch.device) -> Iterator[Check]:
    points, centres = _drawn(place, (2, 300, 16), (2, 5, 16))
    found = kernels.clusters(points, centres)
    exact = kernels.clusters(points.double(), centres.double(), impl="reference")
    yield _differing("points", found.ids, exact.ids)
    yield Check("distance of the sums", (found.sums - exact.sums).abs().max().item(), 1e-4)


def _nearest(place: torch.device) -> Iterator[Check]:
    runs = _runs("nearest", place, S=20_000, K=5, D=16, C=100, bits=32)
    yield _differing("rows", runs["ours"]().index, runs["numpy, all at once"]())


def _duplicates(place: torch.device) -> Iterator[Check]:
    runs = _runs("duplicates", place, S=200, E=66, D=16, bits=32)
    yield _differing("rows", runs["ours"](), runs["the paper's loops"]())


def _groups(place: torch.device) -> Iterator[Check]:
    runs = _runs("groups", place, M=9, N=4)
    yield _differing("sums of ranks", runs["ours"]().total, runs["itertools"]())


def _route(place: torch.device) -> Iterator[Check]:
    logits = _drawn(place, (257, 16))[0]
    ours, truth = kernels.route(logits, 4), kernels.route(logits, 4, impl="reference")
    for what in ("ids", "order", "counts"):
        yield _differing(what, getattr(ours, what), getattr(truth, what))
    yield from _against_float64(
        lambda impl, logits: kernels.route(logits, 4, impl=impl).weights, (257, 16), place=place
    )


def _chosen(logits: Tensor) -> Routing:
    return kernels.route(logits, 2, impl="reference")


def _experts(impl: str, x: Tensor, logits: Tensor, *bank: Tensor) -> Tensor:
    return kernels.experts(x, _chosen(logits), Bank(*bank), silu, impl=impl)


def _split(impl: str, x: Tensor, logits: Tensor, *trained: Tensor) -> Tensor:
    frozen = Bank(*_drawn(x.device, (8, 48, 32), (8, 32, 24))).to(x.dtype)
    slots = torch.tensor([-1, 0, -1, 1, -1, -1, 2, -1], device=x.device)
    routing = _chosen(logits)
    return kernels.split_experts(x, routing, frozen, Bank(*trained), slots, silu, impl=impl)


CHECKS: Mapping[str, Callable[..., Iterator[Check]]] = {
    "route": _route,
    "experts": partial(_against_float64, _experts, (97, 32), (97, 8), (8, 48, 32), (8, 32, 24)),
    "split_experts": partial(_against_float64, _split, (97, 32), (97, 8), (3, 48, 32), (3, 32, 24)),
    "adapters": partial(
        _against_float64,
        lambda impl, h, logits, *both: kernels.adapters(h, _chosen(logits), *both, impl=impl),
        (300, 32), (300, 2), (2, 32, 16), (2, 16, 32),
    ),
    "lora_mixture": partial(
        _against_float64,
        lambda impl, x, *loras: kernels.lora_mixture(x, [Projection(*loras)], impl=impl)[0],
        (97, 32), (97, 48), (97, 4), (4, 16, 32), (4, 48, 16),
    ),
    "balance_loss": partial(
        _against_float64,
        lambda impl, logits: kernels.balance_loss(logits, logits.topk(4).indices, impl=impl),
        (257, 16),
    ),
    "bank": _bank,
    "nearest": _nearest,
    "duplicates": _duplicates,
    "groups": _groups,
    "clusters": _clusters,
}  # fmt: skip
"""What is checked of each op, on a device: ``place``.

Ops that choose do so in float32, as the loops do that they are compared with.
"""
