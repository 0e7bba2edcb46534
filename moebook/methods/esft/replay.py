"""Scores from routing that the authors published of DeepSeek-V2-Lite."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moebook.errors import refuse
from moebook.methods.esft.config import Pooling
from moebook.methods.esft.score import Scores, scored, tally
from moebook.models import checkpoint
from moebook.settings import Each, Place, Size, checked

SCORES = "results/expert_scores"  # in a clone of the authors' repository
LARGEST_GATE = 1.01  # gates may be rounded


@checked
def published(folder: Place, tasks: Each[str]) -> dict[str, list[Path]]:
    """Find the published files of tasks: that of the scores first, then those of the routing.

    The ``folder`` is a clone of the authors' repository, or has ``<task>.scores.json`` and, where
    there is routing, ``<task>.routing.txt.gz``; ``$NAME`` in it is read from the environment.
    """
    place = Path(os.path.expandvars(folder))
    files: dict[str, list[Path]] = {}
    for task in tasks:
        clone = checkpoint.place(place / SCORES / task)
        if clone.is_dir():
            scores = clone / "summary.json"
            routing = sorted(clone.glob("expert_weights_*.txt"))
        else:
            scores = place / f"{task}.scores.json"
            routing = [*place.glob(f"{task}.routing.txt*")]
        if not scores.is_file():
            refuse(
                "E-NOFILE",
                f"no published scores of '{task}' in {folder}; give the folder of a clone of "
                f"the authors' repository, which holds {SCORES}",
            )
        files[task] = [scores, *routing]
    return files


@checked
def replay(
    *paths: Place,
    experts: Size = 64,
    top_k: Size = 6,
    pooling: Pooling,
    half: Literal[0, 1] | None = None,
) -> Scores:
    """Score experts from routing that the authors published, as `measure` does: E ``experts``, K.

    A file is text or .gz. A line is the decoder layer, the sample, the K experts of each of the
    sample's tokens, an empty field, and their gates; tabs between. In a clone's files, one a layer,
    a line begins with the experts. With ``half``, every second sample counts.
    """
    sums: dict[int, Tensor] = {}
    for path in paths:
        for layer, sample, ids, gates in _lines(Path(path), experts, top_k):
            if half is None or sample % 2 == half:
                sums[layer] = sums.get(layer, 0) + tally(ids, gates, experts)
    # A clone's files come in the order of their names, layer 10 before 9.
    return scored(dict(sorted(sums.items())), pooling)


def _lines(
    path: Path, experts: int, top_k: int
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield layer, sample, ids and gates ``[1, T, K]`` of each line."""
    number = 0
    of_layer = re.search(r"expert_weights_(\d{1,9})\.txt$", path.name)
    try:
        if not path.is_file():
            refuse(
                "E-NOFILE",
                f"{path} is missing: expected the published routing of a task",
            )
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                # The empty field between experts and gates makes two tabs.
                head, _, tail = line.partition("\t\t")
                numbers = [int(field) for field in head.split("\t")]
                if of_layer:
                    # A clone tells the layer by the file and the sample by the line.
                    numbers = [int(of_layer[1]), number - 1, *numbers]
                layer, sample, *ids = numbers
                gates = torch.tensor(
                    [float(field) for field in tail.split("\t")], dtype=torch.float64
                )
                yield layer, sample, *_routing(ids, gates, experts, top_k)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        wanted = f"{top_k} experts a token of 0 to {experts - 1}, and as many gates"
        refuse("E-FORMAT", f"{path}:{number}: {error}; expected {wanted}")


def _routing(
    ids: list[int], gates: Tensor, experts: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """Shape a sample's experts and gates ``[1, T, K]``; raise where they are no routing."""
    known = all(0 <= expert < experts for expert in ids)
    if len(ids) != len(gates) or len(ids) % top_k or not known:
        raise ValueError(f"{len(ids)} experts and {len(gates)} gates")
    chosen = torch.tensor(ids).view(1, -1, top_k)  # [1, T, K]
    # Once sorted, equal experts of a token stand side by side.
    twice = (chosen.sort().values.diff() == 0).any()
    in_range = ((gates >= 0) & (gates <= LARGEST_GATE)).all()
    if twice or not in_range:
        raise ValueError("an expert twice for a token, or a gate outside [0, 1]")
    return chosen, gates.view(1, -1, top_k)
