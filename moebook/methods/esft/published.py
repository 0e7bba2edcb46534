"""What ESFT's authors published of DeepSeek-V2-Lite: how it routes their tasks, and the scores."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moebook.errors import refuse
from moebook.methods.esft.scoring import Count, Pooling, Scores, Tally, scored
from moebook.settings import checked

SCORES = "results/expert_scores"  # in a clone of their repository


def published(folder: str | os.PathLike[str], tasks: Iterable[str]) -> dict[str, list[Path]]:
    """Find the published files of tasks: that of the scores first, then those of the routing.

    The ``folder`` is a clone of the authors' repository, or has ``<task>.scores.json`` and, where
    there is routing, ``<task>.routing.txt.gz``; ``$NAME`` in it is read from the environment.
    """
    place, found = Path(os.path.expandvars(folder)), dict[str, list[Path]]()
    for task in tasks:
        clone = place / SCORES / task
        scores, routing = clone / "summary.json", sorted(clone.glob("expert_weights_*.txt"))
        if not clone.is_dir():
            scores, routing = place / f"{task}.scores.json", [*place.glob(f"{task}.routing.txt*")]
        if not scores.is_file():
            refuse("E-NOFILE", f"no published scores of '{task}' in {folder}; give the folder of a "
                   f"clone of the authors' repository, which holds {SCORES}")  # fmt: skip
        found[task] = [scores, *routing]
    return found


@checked
def replay(
    *paths: str | os.PathLike[str],
    experts: Count = 64,
    top_k: Count = 6,
    pooling: Pooling,
    half: Literal[0, 1] | None = None,
) -> Scores:
    """Score experts from routing that the authors published, as `measure` does: E ``experts``, K.

    A file is text or .gz. A line is the decoder layer, the sample, the K experts of each of the
    sample's tokens, an empty field, and their gates; tabs between. In a clone's files, one a layer,
    a line begins with the experts. With ``half``, every second sample counts.
    """
    tallies: dict[int, Tally] = {}
    for path in paths:
        for layer, sample, ids, gates in _lines(Path(path), experts, top_k):
            if half in (None, sample % 2):
                tallies.setdefault(layer, Tally(experts)).add(ids, gates)
    return scored(dict(sorted(tallies.items())), pooling)


def _lines(path: Path, experts: int, top_k: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield layer, sample, ids and gates ``[1, T, K]`` of each line."""
    number, wanted = 0, f"{top_k} experts a token of 0 to {experts - 1}, and as many gates"
    named = re.search(r"expert_weights_(\d{1,9})\.txt$", path.name)
    try:
        if not path.is_file():
            refuse("E-NOFILE", f"{path} is missing: expected the published routing of a task")
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                head, _, tail = line.partition("\t\t")
                start = [int(named[1]), number - 1] if named else []
                layer, sample, *ids = (*start, *map(int, head.split("\t")))
                gates = torch.tensor([*map(float, tail.split("\t"))], dtype=torch.float64)
                if len(ids) != len(gates) or len(ids) % top_k or not {*ids} <= {*range(experts)}:
                    raise ValueError(f"{len(ids)} experts and {len(gates)} gates")
                chosen = torch.tensor(ids).view(1, -1, top_k)
                twice = (chosen.sort().values.diff() == 0).any()
                if twice or not ((gates >= 0) & (gates <= 1.01)).all():  # which may be rounded
                    raise ValueError("an expert twice for a token, or a gate outside [0, 1]")
                yield layer, sample, chosen, gates.view(1, -1, top_k)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        refuse("E-FORMAT", f"{path}:{number}: {error}; expected {wanted}")
