"""Relevance of each expert to a task: gate score (Eq. 6) and token score (Eq. 7), in one pass."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moebook import results
from moebook.errors import refuse
from moebook.methods.esft.config import CHOICES, Config
from moebook.methods.esft.files import layer_of, read_json
from moebook.methods.esft.routing import (
    Decisions,
    check_layers,
    experts_of,
    observe,
    sparse_layers,
)
from moebook.methods.settings import chosen

KINDS = ("token", "gate")


@dataclass(frozen=True)
class Scores:
    """Scores of all routed experts, by decoder layer.

    Attributes:
        token: Layer -> ``[E]`` float64, share of the layer's routed slots (Eq. 7); they sum to 1.
        gate: Layer -> ``[E]`` float64, mean gate (Eq. 6); they sum to a token's mean total gate.

    Raises:
        Refusal: E-KEYS when the two do not cover the same layers, E-SHAPE when layers differ in E,
            E-NONFINITE or E-RANGE for a score that is not finite or negative.
    """

    token: dict[int, Tensor]
    gate: dict[int, Tensor]

    def __post_init__(self) -> None:
        if self.token.keys() != self.gate.keys() or not self.token:
            odd = sorted(self.token.keys() ^ self.gate.keys())
            refuse("E-KEYS", f"scores: token and gate must cover the same layers, not so: {odd}")
        sizes = {len(row) for kind in KINDS for row in getattr(self, kind).values()}
        if len(sizes) > 1:
            refuse("E-SHAPE", f"scores: layers differ in their number of experts: {sorted(sizes)}")
        for kind in KINDS:
            for layer, row in getattr(self, kind).items():
                where = f"{kind} score of layer {layer}"
                if not row.isfinite().all():
                    expert = int((~row.isfinite()).nonzero()[0])
                    refuse("E-NONFINITE", f"{where}, expert {expert} is {float(row[expert])}")
                if row.min() < 0:
                    expert = int(row.argmin())
                    refuse("E-RANGE", f"{where}, expert {expert} is {float(row[expert])}: negative")

    @property
    def experts(self) -> int:
        """E, routed experts a layer."""
        return len(next(iter(self.token.values())))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the published JSON form (kind -> layer -> expert -> score), whole or not at all."""
        published = {
            f"{kind}_scores": {
                str(layer): {str(expert): score for expert, score in enumerate(row.tolist())}
                for layer, row in getattr(self, kind).items()
            }
            for kind in KINDS
        }
        results.write(Path(path), json.dumps(published))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module | None = None) -> Scores:
        """Read the published JSON form, and check that it fits the model where one is given.

        Raises:
            Refusal: E-NOFILE, E-FORMAT, E-TYPE, E-KEYS for missing experts or layers, E-SHAPE for
                another number of experts than the model's, and those of the class.
        """
        found = read_json(Path(path))
        if set(found) != {f"{kind}_scores" for kind in KINDS}:
            refuse("E-FORMAT", f"{path}: expected the keys token_scores and gate_scores")
        scores = cls(*(_rows(found[f"{kind}_scores"], Path(path)) for kind in KINDS))
        if model is not None:
            layers = sparse_layers(model)
            check_layers(f"{path}", scores.token, layers)
            if scores.experts != (want := experts_of(layers[0])):
                refuse("E-SHAPE", f"{path}: {scores.experts} experts a layer, the model has {want}")
        return scores


class Tally:
    """Adds up one layer's routing batch by batch; both scores and both poolings at once.

    Args:
        experts: E.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.samples = 0
        self.tokens = 0
        self._sums = torch.zeros(2, 2, experts, dtype=torch.float64)  # pooling, kind, expert

    def add(self, ids: Tensor, gates: Tensor, mask: Tensor | None = None) -> None:
        """Count a batch.

        Args:
            ids: ``[B, T, K]`` chosen experts of each token.
            gates: ``[B, T, K]``.
            mask: ``[B, T]``, true where a token is real; by default all are. A row without a real
                token does not count as a sample.
        """
        real = torch.ones(ids.shape[:2], device=ids.device) if mask is None else mask
        weight = real.double().unsqueeze(2)
        flat, top_k = ids.flatten(1), ids.shape[2]
        kinds = [(weight / top_k).expand(ids.shape), gates.double() * weight]
        rows = torch.stack(
            [weight.new_zeros(len(ids), self.experts).scatter_add_(1, flat, k.flatten(1))
             for k in kinds], 1,
        )  # fmt: skip
        lengths = weight.sum((1, 2))
        self.tokens += int(lengths.sum())
        self.samples += int((lengths > 0).sum())
        self._sums[0] += rows.sum(0).cpu()
        self._sums[1] += (rows / lengths.clamp(min=1)[:, None, None]).sum(0).cpu()

    def scores(self, pooling: str = "tokens") -> tuple[Tensor, Tensor]:
        """Return token score and gate score, ``[E]`` each, averaged as ``pooling`` says.

        Raises:
            Refusal: E-CHOICE for an unknown pooling, E-DATA when nothing was counted.
        """
        chosen("pooling", pooling, CHOICES["pooling"])
        if not self.tokens:
            refuse("E-DATA", "no real token was counted: the scores would be 0/0")
        token, gate = self._sums[0 if pooling == "tokens" else 1]
        count = self.tokens if pooling == "tokens" else self.samples
        return token / count, gate / count


def measure(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], config: Config | None = None
) -> Scores:
    """Score every routed expert of every sparse layer on a task's tokens (Eq. 6 and 7).

    One pass, no routing stored: what grows is two sums per expert and pooling. Padding does not
    count, shared experts are left out. Gates are those of the host: renormalised over the K chosen
    in Mixtral, plain probabilities in DeepSeek-V2 (Eq. 2).

    Args:
        model: A mixture that transformers can load (Mixtral, DeepSeek-V2 and V3, OLMoE, Qwen2 and
            Qwen3 MoE ...) or one upcycled here.
        batches: Each with ``input_ids`` and, where padded, ``attention_mask`` ``[B, T]``; a row is
            a sample. See `samples`.
        config: Only ``pooling`` matters here.

    Returns:
        Both scores.

    Raises:
        Refusal: E-MODEL for a dense model or a router that is not understood, E-DATA when there is
            no token.
    """
    pooling = (config or Config()).pooling
    tallies = {layer.index: Tally(experts_of(layer)) for layer in sparse_layers(model)}

    def note(layer: int, seen: Decisions) -> None:
        tallies[layer].add(seen.ids, seen.gates, seen.mask)

    observe(model, batches, note)
    pooled = {layer: tally.scores(pooling) for layer, tally in tallies.items()}
    return Scores(*({layer: pair[kind] for layer, pair in pooled.items()} for kind in (0, 1)))


def _rows(layers: Any, path: Path) -> dict[int, Tensor]:
    """Return layer -> ``[E]`` from layer -> expert -> score, both with decimal keys."""
    if not isinstance(layers, dict) or not layers:
        refuse("E-FORMAT", f"{path}: expected layer -> expert -> score")
    rows = {}
    for key, scores in layers.items():
        layer = layer_of(key, path)
        if not isinstance(scores, dict) or not scores:
            refuse("E-FORMAT", f"{path}: layer {layer} holds no experts with their scores")
        wanted = [str(expert) for expert in range(len(scores))]
        if set(scores) != set(wanted):
            odd = sorted(set(scores) ^ set(wanted))[0]
            refuse("E-KEYS", f"{path}: layer {layer} lacks an expert of 0 to E - 1, see '{odd}'")
        if not all(isinstance(s, int | float) and not isinstance(s, bool) for s in scores.values()):
            refuse("E-TYPE", f"{path}: layer {layer} holds a score that is not a number")
        try:
            row = [float(scores[expert]) for expert in wanted]
        except OverflowError:
            refuse("E-RANGE", f"{path}: layer {layer} holds a score too large for a float")
        rows[layer] = torch.tensor(row, dtype=torch.float64)
    return rows
