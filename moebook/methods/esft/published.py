"""The raw routing that the authors published for a task, as scores: a check without their model."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from moebook.errors import refuse
from moebook.methods.esft.scoring import Scores, Tally
from moebook.methods.settings import whole


def replay(
    path: str | os.PathLike[str], *, experts: int = 64, top_k: int = 6, pooling: str = "tokens"
) -> Scores:
    """Score experts from published routing, by the same accumulation as `measure` (Eq. 6 and 7).

    Args:
        path: Text, gzipped where its name ends in .gz. A line is the decoder layer, the sample, the
            K experts of each of the sample's tokens, an empty field, and their gates; tabs between.
        experts: E; 64 in DeepSeek-V2-Lite.
        top_k: K; 6 there.
        pooling: As in `Config`.

    Raises:
        Refusal: E-NOFILE, E-FORMAT with file and line for a line of another form and with the file
            for one that cannot be read to its end, E-RANGE for ``experts`` or ``top_k``, E-CHOICE
            for ``pooling``, and those of `Scores`.
    """
    whole("experts", experts, 1)
    whole("top_k", top_k, 1, experts)
    tallies: dict[int, Tally] = {}
    for layer, ids, gates in _lines(Path(path), experts, top_k):
        tallies.setdefault(layer, Tally(experts)).add(ids, gates)
    pairs = {layer: tally.scores(pooling) for layer, tally in tallies.items()}
    return Scores(*({layer: pair[kind] for layer, pair in pairs.items()} for kind in (0, 1)))


def _lines(path: Path, experts: int, top_k: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield layer, ids and gates ``[1, T, K]`` of each line."""
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing: expected the published routing of a task")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield _parsed(line, f"{path}:{number}", experts, top_k)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        refuse(
            "E-FORMAT",
            f"{path} cannot be read to its end ({error}); expected text in UTF-8, gzipped where its"
            " name ends in .gz: fetch it again",
        )


def _parsed(line: str, where: str, experts: int, top_k: int) -> tuple[int, Tensor, Tensor]:
    """Return layer, ids and gates ``[1, T, K]`` of a line."""
    head, _, tail = line.rstrip("\n").partition("\t\t")
    try:
        layer, _, *ids = map(int, head.split("\t"))
        gates = [float(gate) for gate in tail.split("\t")]
    except ValueError as error:
        refuse("E-FORMAT", f"{where}: {error}")
    if len(ids) != len(gates) or len(ids) % top_k or not {*ids} <= {*range(experts)}:
        refuse(
            "E-FORMAT",
            f"{where}: {len(ids)} experts and {len(gates)} gates; expected as many of both,"
            f" {top_k} a token, and experts from 0 to {experts - 1}",
        )
    shape = (1, -1, top_k)
    return (
        layer,
        torch.tensor(ids).view(shape),
        torch.tensor(gates, dtype=torch.float64).view(shape),
    )
