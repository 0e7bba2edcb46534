"""Cases of what a router decides: `route` and `balance_loss`."""

from __future__ import annotations

import torch
from torch import Tensor

from moebook.bench import peers
from moebook.bench.case import Case, Op, size_of, stepping
from moebook.bench.timing import Contender
from moebook.kernels import balance_loss, route


def _route(device: torch.device, T: int, E: int, K: int) -> Case:
    """Logits to ids, weights, counts and order, against the same put together by hand."""
    logits = torch.randn(T, E, device=device)

    def composed() -> tuple[Tensor, ...]:
        kept, ids = logits.topk(K, dim=1)
        slots = ids.flatten()
        return kept.softmax(-1), slots.argsort(stable=True), slots.bincount(minlength=E)

    contenders = [
        Contender("ours", lambda: route(logits, K)),
        Contender("floor", logits.clone),
        Contender("torch top-k + sort", composed),
        Contender("reference", lambda: route(logits, K, impl="reference")),
    ]
    return Case(contenders, traffic=size_of(logits) + T * K * 20)


def _balance(device: torch.device, T: int, E: int, K: int) -> Case:
    """The loss and its gradient, against one-hot vectors and transformers' own loss."""
    logits = torch.randn(T, E, device=device, requires_grad=True)
    ids = logits.detach().topk(K, dim=1).indices
    one = torch.ones((), device=device)
    leaves = [logits]

    def transformers() -> Contender:
        loss = peers.module("transformers.models.mixtral.modeling_mixtral")
        return stepping(
            "transformers", lambda: loss.load_balancing_loss_func((logits,), E, K), one, leaves
        )

    contenders = [
        stepping("ours", lambda: balance_loss(logits, ids), one, leaves),
        Contender("floor", logits.detach().clone),
        stepping("one-hot", lambda: balance_loss(logits, ids, impl="reference"), one, leaves),
    ]
    case = Case(contenders, traffic=2 * size_of(logits) + size_of(ids))
    case.invite("transformers", transformers)
    return case


_SIZES = {
    "tiny": {"fine": {"T": 16, "E": 4, "K": 2}},
    "small": {"fine": {"T": 2048, "E": 64, "K": 6}},
    "full": {"fine": {"T": 16384, "E": 64, "K": 6}},
    "model": {"fine": {"T": 65536, "E": 64, "K": 6}},
}
_AXES = {"T": (0.5, 1, 2, 4), "E": (0.25, 0.5, 1, 2, 4)}

ROUTE = Op("logits to experts, weights and the order of the rows", _route, _SIZES, _AXES)
BALANCE = Op("the balance loss of one router and its gradient", _balance, _SIZES, _AXES)
