"""split experts on a GPU: the kernels of `experts`, which read either bank by a table of slots."""

from __future__ import annotations

from torch import Tensor

from moebook.kernels._triton.experts import gated_ffn
from moebook.kernels._triton.placing import placed
from moebook.kernels.experts import Activation, Bank
from moebook.kernels.route import Routing


@placed
def run(
    x: Tensor, routing: Routing, frozen: Bank, trained: Bank, slots: Tensor, act: Activation
) -> Tensor:
    """Run `moebook.kernels.split_experts`."""
    slots = slots.long().contiguous()
    return gated_ffn(x, routing, [trained, frozen], slots, act)
