"""Cases of what a router decides: `route` and `balance_loss`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moebook.bench import peers
from moebook.bench.case import Axis, Case, Op, Run, size_of
from moebook.bench.timing import Contender
from moebook.kernels import balance_loss, route


def _route(device: torch.device, T: int, E: int, K: int) -> Case:
    """Logits to ids, weights, counts and order, against the same put together by hand."""
    logits = torch.randn(T, E, device=device)

    def composed() -> tuple[Tensor, ...]:
        kept, ids = logits.topk(K, dim=1)
        slots = ids.flatten()
        return kept.softmax(-1), slots.argsort(stable=True), slots.bincount(minlength=E)

    case = Case(size_of(logits) + T * K * 20)
    case.add("ours", lambda: route(logits, K))
    case.add("floor", logits.clone)
    case.add("torch top-k + sort", composed)
    case.add("reference", lambda: route(logits, K, impl="reference"))
    return case


def _balance(device: torch.device, T: int, E: int, K: int) -> Case:
    """Top-k, the loss and its gradient, against one-hot vectors and transformers' own loss.

    Theirs takes its own top-k, so that everyone's is inside the clock; a `route` would have it.
    """
    logits = torch.randn(T, E, device=device, requires_grad=True)

    def loss(impl: str) -> Tensor:
        return balance_loss(logits, logits.detach().topk(K, dim=1).indices, impl=impl)

    def transformers() -> Run:
        mixtral = peers.module("transformers.models.mixtral.modeling_mixtral")
        return lambda: mixtral.load_balancing_loss_func((logits,), E, K)

    case = Case(2 * size_of(logits), torch.ones((), device=device), [logits])
    case.add("ours", partial(loss, "auto"))
    case.contenders.append(Contender("floor", logits.detach().clone))
    case.add("one-hot", partial(loss, "reference"))
    case.invite("transformers", transformers)
    return case


ROUTE = Op(
    _route,
    tiny={"fine": {"T": 16, "E": 4, "K": 2}},
    small={"fine": {"T": 2048, "E": 64, "K": 6}},
    full={"fine": {"T": 16384, "E": 64, "K": 6}},
    model={"fine": {"T": 65536, "E": 64, "K": 6}},
    T=Axis("T", "tokens", (1024, 2048, 4096, 8192)),
    E=Axis("E", "experts", (16, 32, 64, 128)),
    N=Axis("K", "experts of a token", (2, 4, 8, 16)),
)
BALANCE = replace(ROUTE, build=_balance)
