"""A dry run: a training step on the meta device, op by op, without a byte of weights."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

Op = tuple[torch.dtype, int, int]  # type of the result, FLOPs, bytes moved


class Tally(TorchDispatchMode):
    """Counts, while it is entered, what torch runs, and the bytes that are alive at the peak.

    ``ops`` says how often an op of a type, with so many FLOPs and bytes read and written, was run.
    FLOPs are those of products and of attention in full, as torch counts them; views are free.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.ops: Counter[Op] = Counter()
        self.alive = self.peak = 0
        self._seen: Any = WeakIdKeyDictionary()
        for tensor in held:
            self._hold(tensor)
        self.start = self.alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op and count it."""
        result = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        made = _tensors(result)
        fresh = [self._hold(tensor) for tensor in made]
        if any(fresh) or func._schema.is_mutable:
            count = flop_registry.get(func._overloadpacket, lambda *_, **__: 0)
            flops = count(*args, **(kwargs or {}), out_val=result)
            moved = sum(tensor.nbytes for tensor in given + made)
            self.ops[made[0].dtype if made else torch.float32, flops, moved] += 1
        return result

    def _hold(self, tensor: Tensor) -> bool:
        """Count a tensor's memory as alive until it is freed; return whether it is new."""
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return False
        self._seen[storage] = None
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, size).atexit = False
        return True

    def _free(self, size: int) -> None:
        self.alive -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
