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
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

Op = tuple[torch.dtype, int, int]  # type of the result, FLOPs, bytes moved
Form = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape and strides of a tensor


class Known(NamedTuple):
    """What an op makes of tensors of some forms."""

    forms: tuple[Form, ...]  # of its results
    several: bool  # whether it returns a tuple
    op: Op
    place: int | None  # of what it changes and returns, among the tensors that it gets


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
            self.ops[known.op] += 1
            if known.place is not None:
                return _tensors((args, named))[known.place]
            results = tuple(_empty(form) for form in known.forms)
            for tensor in results:
                self._hold(tensor)
            return results if known.several else results[0]
        result = func(*args, **named)
        made = _tensors(result)
        fresh = [self._hold(tensor) for tensor in made]
        if any(fresh) or func._schema.is_mutable:
            count = flop_registry.get(func._overloadpacket, lambda *_, **__: 0)
            flops = count(*args, **named, out_val=result)
            given = _tensors((args, named))
            moved = sum(tensor.nbytes for tensor in given + made)
            op = (made[0].dtype if made else torch.float32, flops, moved)
            self.ops[op] += 1
            forms = tuple(map(_form, made))
            several = not isinstance(result, Tensor)
            if asked is not None and all(fresh) and _plain(result):
                _KNOWN[asked] = Known(forms, several, op, None)
            changed = [number for number, one in enumerate(given) if one is result]
            # What changes the form of a tensor, too, is asked otherwise from now on.
            if len(changed) == 1 and asked == _asked(func, args, named) is not None:
                _KNOWN[asked] = Known(forms, several, op, changed[0])
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
    """List the tensors in what an op gets or makes."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]


def _asked(func: Any, args: Any, named: dict[str, Any]) -> Hashable | None:
    """Return an op with the forms of what it gets, or None where its result may be a view.

    Nor is one remembered that is given what has no hash.
    """
    if not _knowable(func):
        return None
    asked = (func, _described(args), _described(tuple(named.items())))
    try:
        hash(asked)
    except TypeError:
        return None
    return asked


@cache
def _knowable(func: Any) -> bool:
    """Whether an op says that its results are new, or are what it changes."""
    schema = func._schema
    shared = [part.alias_info for part in (*schema.arguments, *schema.returns)]
    return all(alias is None or alias.is_write for alias in shared)


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
