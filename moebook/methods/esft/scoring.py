"""ESFT's settings; relevance of each expert to a task (Eq. 6, 7); the choice of experts (Eq. 8).

Experts are scored by the routing of a model, or by what the authors published of DeepSeek-V2-Lite.
"""

from __future__ import annotations

import gzip
import os
import random
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from datasets import Dataset
from pydantic import Field
from torch import Tensor, nn

from moebook.analysis.routers import decisions
from moebook.data import padded
from moebook.errors import located, refuse
from moebook.kernels.dispatch import shapes
from moebook.models import checkpoint
from moebook.results import read_json
from moebook.settings import Count, Kind, Place, Presets, Seed, Size, checked, settings

Pooling = Literal["tokens", "samples"]
Score = Literal["token", "gate"]
Group = tuple[int, ...]
Expert = Annotated[int, Field(ge=0)]
Experts = Annotated[tuple[Expert, ...], Field(min_length=1, strict=False)]  # JSON has lists
FLAGS = ("shared_experts", "non_expert_modules", "router")
MOST = 1.1  # what a layer's scores may sum to: they are rounded, some to two places
SLACK = 1e-9  # what sums of decimal scores may lack by rounding, and still count as p
SCORES = "results/expert_scores"  # in a clone of the authors' repository
ByLayer = dict[int, Annotated[dict[int, float], Field(min_length=1)]]


@settings
class Config(Presets):
    """How experts are scored and chosen, and what trains beside them (ESFT Sec. 3.3).

    Of the presets, ``paper`` is the text, ``released`` the authors' code, from which the published
    experts follow, and ``fixed``, the defaults, the same without its rounding. The paper's
    thresholds are 0.2 for the token score and 0.1 for the gate score (Sec. 4.3).

    An expert's relevance is the share of routed slots that it gets (``"token"``, Eq. 7) or the mean
    of its gates (``"gate"``, Eq. 6), over all ``"tokens"`` (released) or within each of the
    ``"samples"`` and then over these (as printed). The released code divides by no total: token
    scores sum to 1 anyway, gates only if renormalised.
    """

    score: Score = "token"
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.2  # p of Eq. 8
    pooling: Pooling = "tokens"
    normalised: bool = False  # whether p is a share of a layer's total, as the paper says
    decimals: Annotated[int, Field(ge=1, le=15)] | None = None  # of scores before the choice
    shared_experts: bool = False  # whether they train too
    non_expert_modules: bool = False  # all else: attention, norms, head (released: and routers)
    router: bool = False

    LETTERS: ClassVar = {"p": "threshold"}
    PRESETS: ClassVar = {
        "paper": {"pooling": "samples", "normalised": True},
        "released": {"decimals": 4},
        "fixed": {},
    }


@dataclass(frozen=True)
class Scores:
    """Scores of all routed experts: finite, none negative, E alike in all decoder layers.

    By layer ``[E]`` float64: token is the share of its slots (Eq. 7), gate the mean gate (Eq. 6).
    """

    token: dict[int, Tensor]
    gate: dict[int, Tensor]
    left_out: tuple[int, ...] = ()  # layers passed over on reading

    def __post_init__(self) -> None:
        if self.token.keys() != self.gate.keys() or not self.token:
            odd = sorted(self.token.keys() ^ self.gate.keys())
            refuse("E-KEYS", f"scores: token and gate must cover the same layers, not so: {odd}")
        for layer, row in [*self.token.items(), *self.gate.items()]:
            shapes(f"layer {layer}", {"scores": (row, "E")}, empty="")
            if len(row) != self.experts:
                refuse("E-SHAPE", f"layer {layer}: {len(row)} experts, others have {self.experts}")
            if not (row.isfinite() & (row >= 0)).all():
                refuse("E-RANGE", f"layer {layer} has a score that is negative or not finite")
        # A token's gates are shares or probabilities, so no layer's can exceed the one token. Those
        # of a router that weights each expert by a sigmoid of its own can.
        for name, expected in (("token", "1"), ("gate", "at most 1")):
            for layer, row in getattr(self, name).items():
                if (total := float(row.sum())) > MOST:
                    what = f"{name} scores sum to {total:.4g}, expected {expected}"
                    refuse("E-RANGE", f"layer {layer}: {what}")

    @property
    def experts(self) -> int:
        """E, routed experts a layer."""
        return len(next(iter(self.token.values())))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, without: Collection[int] = ()) -> Scores:
        """Read the published JSON form, ``without`` some layers, such as those that never ran."""
        published = from_json(_Published, path)
        token, gate = map(_tensors, (published.token_scores, published.gate_scores))
        for layer, rows in product(sorted(without), (token, gate)):
            if rows.pop(layer, None) is None:
                refuse("E-KEYS", f"{path} has no layer {layer} to leave out: {sorted(rows)}")
        return cls(token, gate, tuple(sorted(without)))


@settings
class _Published:
    token_scores: ByLayer
    gate_scores: ByLayer


def from_json(kind: type[Kind], path: str | os.PathLike[str]) -> Kind:
    """Make settings from a JSON object in a file; keys that are numbers become numbers."""
    content = read_json(Path(path))
    with located(path):
        return kind(**{name: _numbered(value) for name, value in content.items()})


def _numbered(value: Any) -> Any:
    """Make keys that are digits numbers, at any depth, but for two that become one."""
    if not isinstance(value, dict):
        return value
    parts = {int(k) if k.isdecimal() and len(k) < 10 else k: v for k, v in value.items()}
    if len(parts) < len(value):
        refuse("E-FORMAT", "a key stands twice in one object")
    return {key: _numbered(part) for key, part in parts.items()}


def _tensors(layers: ByLayer) -> dict[int, Tensor]:
    rows = {}
    for layer, scores in sorted(layers.items()):
        if sorted(scores) != list(range(len(scores))):
            refuse("E-KEYS", f"the scores of layer {layer} lack an expert of 0 to E - 1")
        rows[layer] = torch.tensor([scores[e] for e in sorted(scores)], dtype=torch.float64)
    return rows


def tally(ids: Tensor, gates: Tensor, experts: int, mask: Tensor | None = None) -> Tensor:
    """Sum one layer's routing of a batch over E experts, ``[2, 2, E + 1]``: pooling, score, expert.

    Ids and gates are ``[B, T, K]``; the mask ``[B, T]`` is true where a token is real. Behind the
    experts stands what `scored` divides by: how many tokens, or how many samples.
    """
    real = torch.ones(ids.shape[:2], device=ids.device) if mask is None else mask
    weight = real.double().unsqueeze(2)
    lengths, rows = weight.sum((1, 2)), weight.new_zeros(2, len(ids), experts)
    for row, each in zip(rows, (weight / ids.shape[2], gates.double() * weight), strict=True):
        row.scatter_add_(1, ids.flatten(1), each.expand(ids.shape).flatten(1))
    sums = torch.stack([rows.sum(1), (rows / lengths.clamp(min=1)[:, None]).sum(1)])
    counts = torch.stack([lengths.sum(), (lengths > 0).sum()]).view(2, 1, 1)
    return torch.cat([sums, counts.expand(2, 2, 1)], 2).cpu()


def measure(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], config: Config | None = None
) -> Scores:
    """Score every routed expert of every sparse layer on a task's tokens (Eq. 6 and 7).

    Batches are from `samples`; padding does not count. Gates are those of the host, without a
    constant factor: renormalised over the K chosen in Mixtral, plain probabilities in DeepSeek-V2
    (Eq. 2).
    """
    sums: dict[int, Tensor] = {}
    for batch in batches:
        for layer, seen in decisions(model, batch).items():
            with located(f"layer {layer}"):
                gates = seen.gates()
            part = tally(seen.ids, gates, seen.logits.shape[-1], seen.mask)
            sums[layer] = sums.get(layer, 0) + part
    return scored(sums, (config or Config()).pooling)


def scored(sums: Mapping[int, Tensor], pooling: Pooling) -> Scores:
    """Make scores of each layer's `tally`, summed over batches, averaged as ``pooling`` says."""
    pairs = {layer: part[int(pooling == "samples")] for layer, part in sums.items()}
    if not any(pair[:, -1].any() for pair in pairs.values()):
        refuse("E-DATA", "no real token was counted: the scores would be 0/0")
    token, gate = ({n: pair[kind, :-1] / pair[kind, -1] for n, pair in pairs.items()}
                   for kind in (0, 1))  # fmt: skip
    return Scores(token, gate)


@checked
def samples(
    rows: Dataset,
    *,
    count: Count = 32,
    length: Count = 4096,
    packed: bool = True,
    batch: Count = 4,
    pad_id: int = 0,
    seed: Seed = 0,
) -> list[dict[str, Any]]:
    """Draw the samples that experts are scored on (Sec. 3.3, "Data Sampling"), for `measure`.

    A sample is encoded rows one after the other, cut at ``length`` (the paper: "32 concatenated
    samples" of 4096 tokens), or unless ``packed`` one whole row, longer ones left out.
    """
    if "input_ids" not in rows.column_names:
        refuse("E-DATA", f"rows have {rows.column_names}, expected input_ids: see data.encode")
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    drawn = (rows[place]["input_ids"] for place in order)
    texts: list[list[int]] = []
    if packed:
        stream: list[int] = []
        while len(stream) < count * length and (ids := next(drawn, None)) is not None:
            stream += ids
        end = min(len(stream), count * length)
        texts = [stream[at : at + length] for at in range(0, end, length)]
    else:
        texts = [ids for ids in drawn if 0 < len(ids) <= length][:count]
    if not texts:
        refuse("E-DATA", f"no sample of at most {length} tokens in {len(rows)} rows")
    parts = (padded(texts[at : at + batch], pad_id) for at in range(0, len(texts), batch))
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in parts]


@settings
class Selection:
    """Which experts of each layer train, the best first, at least one a layer; and what beside."""

    experts: Annotated[dict[int, Experts], Field(min_length=1)]
    shared_experts: bool = False
    non_expert_modules: bool = False
    router: bool = False
    left_out: Annotated[tuple[Expert, ...], Field(strict=False)] = ()  # of the scores' layers

    def __post_init__(self) -> None:
        for layer, ids in self.experts.items():
            if len(set(ids)) < len(ids):
                refuse("E-RANGE", f"layer {layer}: an expert stands twice in {ids}")

    @property
    def count(self) -> int:
        """Selected experts in all layers together."""
        return sum(map(len, self.experts.values()))

    def published(self) -> dict[str, object]:
        """Return the published JSON form; our own keys, the last two, stand only when needed."""
        values = {**vars(self), "experts": {str(n): list(ids) for n, ids in self.experts.items()}}
        return {k: v for k, v in values.items() if v or k not in ("router", "left_out")}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Selection:
        """Read the published JSON form."""
        return from_json(cls, path)


def _check_groups(groups: Mapping[int, Sequence[Group]], rows: Mapping[int, Tensor]) -> None:
    """Refuse groups that do not hold each expert of each layer once."""
    for layer, row in rows.items():
        members = sorted(chain.from_iterable(groups.get(layer, ())))
        if members != list(range(len(row))):
            wanted = f"0 to {len(row) - 1}, each once"
            refuse("E-KEYS", f"groups of layer {layer} hold experts {members}, expected {wanted}")


def select(
    scores: Scores, config: Config, *, groups: Mapping[int, Sequence[Group]] | None = None
) -> Selection:
    """Take the best experts of each layer until their scores reach p (Eq. 8).

    Among equal scores the lower number comes first; each layer gets at least one expert. A total
    that misses p by rounding (of ``decimals``, or in float64) counts as p, one that misses it by
    more is refused. With ``groups`` by layer, whole groups are taken by their members' sums.
    """
    rows = getattr(scores, config.score)
    if groups is not None:
        _check_groups(groups, rows)
    experts = {}
    for layer, row in rows.items():
        units = [(expert,) for expert in range(len(row))] if groups is None else groups[layer]
        experts[layer] = tuple(e for unit in _taken(row, units, config, layer) for e in unit)
    flags = {name: getattr(config, name) for name in FLAGS}
    return Selection(experts=experts, left_out=scores.left_out, **flags)


@checked
def random_selection(selection: Selection, experts: Size, seed: int | str) -> Selection:
    """Replace the experts by random ones of ``experts`` (E), as many in each layer (Table 3)."""
    rng = random.Random(f"esft/random/{seed}")
    counts = {layer: len(ids) for layer, ids in selection.experts.items()}
    if (most := max(counts.values())) > experts:
        refuse("E-RANGE", f"experts is {experts}, but a layer of the selection has {most}")
    drawn = {layer: tuple(rng.sample(range(experts), n)) for layer, n in counts.items()}
    return replace(selection, experts=drawn)


def _taken(row: Tensor, units: Sequence[Group], config: Config, layer: int) -> list[Group]:
    """Return the best units of a layer whose scores ``row [E]`` reach p together."""
    total = float(row.sum())
    if total <= 0:
        hint = f"leave it out: Scores.load(path, without=[{layer}])"
        refuse("E-DATA", f"layer {layer}: its experts were never used, the scores are 0/0; {hint}")
    values = row / total if config.normalised else row
    slack = SLACK
    if config.decimals is not None:
        rounded = [round(value, config.decimals) for value in values.tolist()]
        values = torch.tensor(rounded, dtype=torch.float64)
        slack += len(row) * 0.5 * 10.0**-config.decimals
    merged = torch.stack([values[list(unit)].sum() for unit in units])
    order = merged.argsort(descending=True, stable=True)
    reached = merged[order].cumsum(0)
    if reached[-1] < config.threshold - slack:
        best = f"all {config.score} scores together are {float(reached[-1]):.4f}"
        refuse("E-RANGE", f"layer {layer}: {best}, below p = {config.threshold}: normalise them")
    count = min(int((reached < config.threshold - SLACK).sum()) + 1, len(order))
    return [units[unit] for unit in order[:count].tolist()]


def published(folder: str | os.PathLike[str], tasks: Iterable[str]) -> dict[str, list[Path]]:
    """Find the published files of tasks: that of the scores first, then those of the routing.

    The ``folder`` is a clone of the authors' repository, or has ``<task>.scores.json`` and, where
    there is routing, ``<task>.routing.txt.gz``; ``$NAME`` in it is read from the environment.
    """
    place, found = Path(os.path.expandvars(folder)), dict[str, list[Path]]()
    for task in tasks:
        clone = checkpoint.place(place / SCORES / task)
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
            if half in (None, sample % 2):
                sums[layer] = sums.get(layer, 0) + tally(ids, gates, experts)
    return scored(dict(sorted(sums.items())), pooling)


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
                known = all(0 <= expert < experts for expert in ids)
                if len(ids) != len(gates) or len(ids) % top_k or not known:
                    raise ValueError(f"{len(ids)} experts and {len(gates)} gates")
                chosen = torch.tensor(ids).view(1, -1, top_k)
                twice = (chosen.sort().values.diff() == 0).any()
                if twice or not ((gates >= 0) & (gates <= 1.01)).all():  # which may be rounded
                    raise ValueError("an expert twice for a token, or a gate outside [0, 1]")
                yield layer, sample, chosen, gates.view(1, -1, top_k)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        refuse("E-FORMAT", f"{path}:{number}: {error}; expected {wanted}")
