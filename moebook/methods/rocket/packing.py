"""One pass over several samples under several LoRAs: no padding, no product that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from moebook.data import IGNORED
from moebook.kernels.bank_scoring import Answers
from moebook.kernels.matmul import product
from moebook.models.anatomy import anatomy

Item = Mapping[str, Any]


class Pack(NamedTuple):
    """Samples as a tree of T tokens: each token sees those before it in its own sample alone.

    Attributes:
        lines: S numbers of samples, in the order of their answers.
        tokens: ``[T]`` int64; the last token of a sample predicts nothing and is left out.
        positions: ``[T]`` int64, the place of a token in its samples.
        seen: ``[T, T]``, true where the token of the row sees that of the column.
        answers: Where the answers stand in the tree.
    """

    lines: list[int]
    tokens: Tensor
    positions: Tensor
    seen: Tensor
    answers: Answers


def packs(items: Sequence[Item], limit: int) -> list[Pack]:
    """Pack samples in the order of their tokens, so that those with a common beginning meet.

    Args:
        items: Samples with ``input_ids`` and ``labels``, whose answer stands at the end.
        limit: Most tokens of a pack; a longer sample has one to itself.
    """
    groups: list[list[int]] = []
    before: list[int] = []
    size = limit
    for line in sorted(range(len(items)), key=lambda line: items[line]["input_ids"]):
        ids = items[line]["input_ids"][:-1]
        fresh = len(ids) - _shared(before, ids)
        if size + fresh > limit:
            groups.append([])
            size, fresh = 0, len(ids)
        groups[-1].append(line)
        size, before = size + fresh, ids
    return [_pack(items, lines) for lines in groups]


def _pack(items: Sequence[Item], lines: list[int]) -> Pack:
    """Grow the tree sample by sample: what a sample shares with the one before it stands there."""
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []  # the token before; the first of a sample has itself
    readers: list[int] = []
    targets: list[int] = []
    lengths: list[int] = []
    path: list[int] = []
    before: list[int] = []
    for line in lines:
        ids, first = items[line]["input_ids"], items[line]["labels"].count(IGNORED)
        path = path[: _shared(before, ids[:-1])]
        for place in range(len(path), len(ids) - 1):
            parents.append(path[-1] if path else len(tokens))
            path = [*path, len(tokens)]
            tokens.append(ids[place])
            positions.append(place)
        readers += path[first - 1 :]
        targets += ids[first:]
        lengths.append(len(ids) - first)
        before = ids[:-1]
    seen = np.eye(len(tokens), dtype=bool)
    for token, parent in enumerate(parents):
        seen[token] |= seen[parent]
    answers = Answers(torch.tensor(readers), torch.tensor(targets), torch.tensor(lengths))
    ids, places = torch.tensor(tokens), torch.tensor(positions)
    return Pack(lines, ids, places, torch.from_numpy(seen), answers)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two samples begin with alike."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Products(TorchFunctionMode):
    """Linear layers multiply on a CPU, in this block, by `kernels.matmul`: without a gradient."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Take the call of a linear layer; leave any other as it is."""
        if func is not F.linear or kwargs or args[0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        y = product(x.flatten(0, -2), weight.T).unflatten(0, x.shape[:-1])
        return y if bias is None else y.add_(bias)


@contextmanager
def trimmed(model: nn.Module, loras: int, tokens: int, places: Tensor) -> Iterator[None]:
    """Leave out, in this block, what scoring one pack under N LoRAs can do without.

    Inside `attached`, with one row a LoRA and the same tokens in all rows, when hidden states are
    read at some places alone. Products before the first LoRA are then of one row, and the last
    layer needs keys and values everywhere, but its queries and what follows at the places alone:
    zeros stand for the others, which nobody reads.

    Args:
        model: The base.
        loras: N, rows of the batch.
        tokens: T, tokens of a row.
        places: int64, the places in [0, T) whose hidden states are read, each once.
    """
    shared, ends = spared(model)

    def filled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.new_zeros(loras, tokens, output.shape[-1]).index_copy_(1, places, output)

    with ExitStack() as hooks:
        for part in shared:
            before = part.register_forward_pre_hook(lambda _, args: args[0][:1])
            after = part.register_forward_hook(lambda _, args, output: output.expand(loras, -1, -1))
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        for part in ends:
            before = part.register_forward_pre_hook(lambda _, args: args[0][:, places])
            hooks.callback(before.remove)
            hooks.callback(part.register_forward_hook(filled).remove)
        yield


def spared(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the parts that `trimmed` runs for one row alone, and those for the places alone."""
    layers = anatomy(model).layers
    ends = _parts(layers[-1].attention, "q_proj", "o_proj")
    ends += [layers[-1].mlp] if layers[-1].kind == "dense" else []
    return _parts(layers[0].attention, "q_proj", "k_proj", "v_proj"), ends


def _parts(module: nn.Module | None, *names: str) -> list[nn.Module]:
    parts = (getattr(module, name, None) for name in names)
    return [part for part in parts if isinstance(part, nn.Module)]
