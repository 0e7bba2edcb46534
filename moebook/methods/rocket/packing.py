"""Samples packed for one pass without padding; what several of them begin with is computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moebook.data import IGNORED
from moebook.kernels.bank_scoring import Answers

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
        own = items[line]["input_ids"][:-1]
        fresh = len(own) - _shared(before, own)
        if size + fresh > limit:
            groups.append([])
            size, fresh = 0, len(own)
        groups[-1].append(line)
        size, before = size + fresh, own
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
        own, first = items[line]["input_ids"], items[line]["labels"].count(IGNORED)
        path = path[: _shared(before, own[:-1])]
        for place in range(len(path), len(own) - 1):
            parents.append(path[-1] if path else len(tokens))
            path = [*path, len(tokens)]
            tokens.append(own[place])
            positions.append(place)
        readers += path[first - 1 :]
        targets += own[first:]
        lengths.append(len(own) - first)
        before = own[:-1]
    seen = np.eye(len(tokens), dtype=bool)
    for node, parent in enumerate(parents):
        seen[node] |= seen[parent]
    answers = Answers(torch.tensor(readers), torch.tensor(targets), torch.tensor(lengths))
    ids, places = torch.tensor(tokens), torch.tensor(positions)
    return Pack(lines, ids, places, torch.from_numpy(seen), answers)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two samples begin with alike."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
