"""Whether an op's answer is right: against float64, against loops, against PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from moebook import kernels, runtime
from moebook.bench.running import OPS, find
from moebook.kernels import Bank
from moebook.kernels.lora_mixture import Projection

SLACK = 2
"""An op may err so many times as much as the reference does in the same number format."""

Forward = Callable[[str, list[Tensor]], Tensor]


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
    chosen = [name for name in (names if names is not None else OPS) if find(name)]
    lines = [[name, *check] for name in chosen for check in _CHECKS[name](place)]
    frame = pd.DataFrame(lines, columns=["op", "what", "error", "allowed"])
    return frame.assign(right=frame["error"] <= frame["allowed"])


def _against_float64(forward: Forward, inputs: list[Tensor]) -> Iterator[Check]:
    """Compare the output and every gradient with the reference in float64."""
    cotangent = torch.randn_like(forward("reference", inputs).detach())
    exact = _step(forward, "reference", [part.double() for part in inputs], cotangent.double())
    plain = _step(forward, "reference", inputs, cotangent)
    found = _step(forward, "auto", inputs, cotangent)
    for number, (ours, same, truth) in enumerate(zip(found, plain, exact, strict=True)):
        what = f"gradient {number}" if number else "output"
        scale = truth.norm().clamp(min=1e-300)
        error, allowed = ((got.double() - truth).norm() / scale for got in (ours, same))
        yield Check(what, error.item(), max(SLACK * allowed.item(), torch.finfo(ours.dtype).eps))
    again = _step(forward, "auto", inputs, cotangent)
    differing = sum(int((a != b).sum()) for a, b in zip(found, again, strict=True))
    yield Check("numbers in which two runs differ", differing, 0)


def _step(
    forward: Forward, impl: str, inputs: list[Tensor], cotangent: Tensor
) -> tuple[Tensor, ...]:
    leaves = [part.detach().requires_grad_() for part in inputs]
    out = forward(impl, leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, cotangent)


def _drawn(place: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, device=place) for shape in shapes]


def _route(place: torch.device) -> Iterator[Check]:
    logits = _drawn(place, (257, 16))[0]
    ours, truth = kernels.route(logits, 4), kernels.route(logits, 4, impl="reference")
    for what in ("ids", "order", "counts"):
        wrong = (getattr(ours, what) != getattr(truth, what)).sum().item()
        yield Check(f"{what} that differ", wrong, 0)
    yield from _against_float64(
        lambda impl, parts: kernels.route(parts[0], 4, impl=impl).weights, [logits]
    )


def _experts(place: torch.device) -> Iterator[Check]:
    inputs = _drawn(place, (97, 32), (97, 8), (8, 48, 32), (8, 32, 24))

    def forward(impl: str, parts: list[Tensor]) -> Tensor:
        x, logits, gate_up, down = parts
        routing = kernels.route(logits, 2, impl="reference")
        return kernels.experts(x, routing, Bank(gate_up, down), F.silu, impl=impl)

    yield from _against_float64(forward, inputs)


def _split(place: torch.device) -> Iterator[Check]:
    inputs = _drawn(place, (97, 32), (97, 8), (3, 48, 32), (3, 32, 24))
    frozen = Bank(*_drawn(place, (8, 48, 32), (8, 32, 24)))
    slots = torch.tensor([-1, 0, -1, 1, -1, -1, 2, -1], device=place)

    def forward(impl: str, parts: list[Tensor]) -> Tensor:
        x, logits, gate_up, down = parts
        routing = kernels.route(logits, 2, impl="reference")
        still, act = frozen.to(x.dtype), F.silu
        trained = Bank(gate_up, down)
        return kernels.split_experts(x, routing, still, trained, slots, act, impl=impl)

    yield from _against_float64(forward, inputs)


def _adapters(place: torch.device) -> Iterator[Check]:
    inputs = _drawn(place, (300, 32), (300, 2), (2, 32, 16), (2, 16, 32))

    def forward(impl: str, parts: list[Tensor]) -> Tensor:
        h, logits, down, up = parts
        return kernels.adapters(h, kernels.route(logits, 2, impl="reference"), down, up, impl=impl)

    yield from _against_float64(forward, inputs)


def _loras(place: torch.device) -> Iterator[Check]:
    inputs = _drawn(place, (97, 32), (97, 48), (97, 4), (4, 16, 32), (4, 48, 16))

    def forward(impl: str, parts: list[Tensor]) -> Tensor:
        return kernels.lora_mixture(parts[0], [Projection(*parts[1:])], impl=impl)[0]

    yield from _against_float64(forward, inputs)


def _balance(place: torch.device) -> Iterator[Check]:
    logits = _drawn(place, (257, 16))[0]
    ids = logits.topk(4).indices
    yield from _against_float64(
        lambda impl, parts: kernels.balance_loss(parts[0], ids, impl=impl), [logits]
    )


def _bank(place: torch.device) -> Iterator[Check]:
    case = find("bank").build(place, N=3, S=5, R=4)
    runs = {contender.name: contender.run for contender in case.contenders}
    ours = np.asarray(runs.pop("ours")())
    del runs["floor"]
    for name, run in runs.items():
        yield Check(f"nats against {name}", float(np.abs(ours / run() - 1).max()), 1e-5)


def _nearest(place: torch.device) -> Iterator[Check]:
    case = find("nearest").build(place, S=20_000, K=5, D=16, C=100)
    runs = {contender.name: contender.run for contender in case.contenders}
    yield _differing("rows", runs["ours"]().index.cpu(), runs["numpy, all at once"]())


def _duplicates(place: torch.device) -> Iterator[Check]:
    case = find("duplicates").build(place, S=200, D=16)
    ours, literal = (c.run() for c in case.contenders if c.name != "floor")
    yield _differing("rows", ours.cpu(), literal)


def _groups(place: torch.device) -> Iterator[Check]:
    case = find("groups").build(place, M=9, N=4)
    ours, literal = (contender.run() for contender in case.contenders)
    yield _differing("sums of ranks", ours.total.cpu(), [total for total, _ in literal])


def _clusters(place: torch.device) -> Iterator[Check]:
    points, centres = _drawn(place, (2, 300, 16), (2, 5, 16))
    found = kernels.clusters(points, centres)
    exact = kernels.clusters(points.double(), centres.double(), impl="reference")
    yield _differing("points", found.ids.cpu(), exact.ids.cpu())
    yield Check("distance of the sums", (found.sums - exact.sums).abs().max().item(), 1e-4)


def _differing(what: str, ours: Any, theirs: Any) -> Check:
    """Count the places at which two lists differ; all of them where the lengths do."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    alike = ours.shape == theirs.shape
    wrong = int((ours != theirs).sum()) if alike else max(len(ours), len(theirs))
    return Check(f"{what} that differ", wrong, 0)


_CHECKS: dict[str, Callable[[torch.device], Iterator[Check]]] = {
    "route": _route,
    "experts": _experts,
    "split_experts": _split,
    "adapters": _adapters,
    "lora_mixture": _loras,
    "balance_loss": _balance,
    "bank": _bank,
    "nearest": _nearest,
    "duplicates": _duplicates,
    "groups": _groups,
    "clusters": _clusters,
}
