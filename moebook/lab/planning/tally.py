"""A dry run: a training step on the meta device, op by op, without a byte of weights."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

Op = tuple[torch.dtype, int, int]  # type of the result, FLOPs, bytes moved
Form = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape and strides of a tensor


class Known(NamedTuple):
    """What an op makes of tensors of some forms."""

    forms: tuple[Form, ...]  # of its results
    several: bool  # whether it returns a tuple
    op: Op


# On meta an op's result follows from the forms of what it gets. Torch works most of them out
# in Python; a plan runs the same few hundred ops many thousand times.
_KNOWN: dict[Hashable, Known] = {}


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
        named = kwargs or {}
        asked = _asked(func, args, named)
        known = _KNOWN.get(asked) if asked is not None else None
        if known is not None:
            results = tuple(_empty(form) for form in known.forms)
            for tensor in results:
                self._hold(tensor)
            self.ops[known.op] += 1
            return results if known.several else results[0]
        result = func(*args, **named)
        given = _tensors((args, kwargs))
        made = _tensors(result)
        fresh = [self._hold(tensor) for tensor in made]
        if any(fresh) or func._schema.is_mutable:
            count = flop_registry.get(func._overloadpacket, lambda *_, **__: 0)
            flops = count(*args, **named, out_val=result)
            moved = sum(tensor.nbytes for tensor in given + made)
            op = (made[0].dtype if made else torch.float32, flops, moved)
            self.ops[op] += 1
            if asked is not None and all(fresh) and _plain(result):
                several = not isinstance(result, Tensor)
                _KNOWN[asked] = Known(tuple(map(_form, made)), several, op)
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


def _asked(func: Any, args: Any, named: dict[str, Any]) -> Hashable | None:
    """Return an op with the forms of what it gets, or None where its result may be no new tensor.

    Nor is one remembered that is given what has no hash.
    """
    if not _makes(func):
        return None
    asked = (func, _described(args), _described(tuple(named.items())))
    try:
        hash(asked)
    except TypeError:
        return None
    return asked


@cache
def _makes(func: Any) -> bool:
    """Whether an op says that it changes nothing and that its results are new."""
    schema = func._schema
    return not any(part.alias_info for part in (*schema.arguments, *schema.returns))


def _described(thing: Any) -> Any:
    """Put a form in the place of each tensor; a number goes with its type, since 1 == 1.0."""
    if isinstance(thing, Tensor):
        return _form(thing)
    if isinstance(thing, list | tuple):
        return tuple(map(_described, thing))
    return type(thing), thing


def _form(tensor: Tensor) -> Form:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(form: Form) -> Tensor:
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _plain(result: Any) -> bool:
    """Whether a result is tensors alone, each the whole of its memory, as `_empty` makes them."""
    results = (result,) if isinstance(result, Tensor) else result
    if not isinstance(results, tuple) or not results:
        return False
    for tensor in results:
        if type(tensor) is not Tensor or tensor.device.type != "meta":
            return False
        again = _empty(_form(tensor)).untyped_storage().nbytes()
        if again != tensor.untyped_storage().nbytes():
            return False
    return True
