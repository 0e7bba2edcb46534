"""Whether an op's answer is right on small inputs: against its reference in float64, or PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import silu

from moebook import kernels, runtime
from moebook.bench.running import OPS, build, find
from moebook.kernels import Bank
from moebook.kernels.clusters import clusters
from moebook.kernels.groups import groups
from moebook.kernels.lora_mixture import lora_mixture
from moebook.kernels.similarity import duplicates, nearest_rows

SLACK = 2  # an op may err so many times as the reference in its number format, or a unit roundoff
_chosen = partial(kernels.route, top_k=2, impl="reference")


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
