"""Relevance of each expert to a task, by the routing of a model (ESFT Eq. 6 and 7)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn

from moebook.analysis.routers import decisions
from moebook.data import padded
from moebook.errors import located, refuse
from moebook.kernels.dispatch import shapes
from moebook.methods.esft.config import Config, Pooling
from moebook.methods.esft.published import ByLayer, PublishedScores, from_json
from moebook.nn.routing import Decision
from moebook.settings import Count, Seed, checked

# What a layer's scores may sum to: they are rounded, some to two places.
LARGEST_SUM = 1.1


@dataclass(frozen=True)
class Scores:
    """Scores of all routed experts: finite, none negative, E alike in all decoder layers.

    By layer ``[E]`` float64: token is the share of its slots (Eq. 7), gate the mean gate
    (Eq. 6).
    """

    #: Shares of slots.
    token: dict[int, Tensor]
    #: Mean gates.
    gate: dict[int, Tensor]
    left_out: tuple[int, ...] = ()  #: layers passed over on reading

    def __post_init__(self) -> None:
        if self.token.keys() != self.gate.keys() or not self.token:
            odd = sorted(self.token.keys() ^ self.gate.keys())
            refuse(
                "E-KEYS",
                f"scores: token and gate must cover the same layers, not so: {odd}",
            )
        for layer, row in [*self.token.items(), *self.gate.items()]:
            shapes(f"layer {layer}", {"scores": (row, "E")}, empty="")
            if len(row) != self.experts:
                refuse(
                    "E-SHAPE",
                    f"layer {layer}: {len(row)} experts, others have {self.experts}",
                )
            if not (row.isfinite() & (row >= 0)).all():
                refuse(
                    "E-RANGE",
                    f"layer {layer} has a score that is negative or not finite",
                )
        # A token's gates are shares or probabilities, so no layer's sum can exceed 1.
        # Those of a router that weights each expert by a sigmoid of its own can.
        _check_sums("token", self.token, expected="1")
        _check_sums("gate", self.gate, expected="at most 1")

    @property
    def experts(self) -> int:
        """E, routed experts a layer."""
        return len(next(iter(self.token.values())))

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, without: Collection[int] = ()
    ) -> Scores:
        """Read the published JSON form, ``without`` some layers, such as those that never ran."""
        published = from_json(PublishedScores, path)
        token = _tensors(published.token_scores)
        gate = _tensors(published.gate_scores)
        for layer in sorted(without):
            for rows in (token, gate):
                if rows.pop(layer, None) is None:
                    refuse(
                        "E-KEYS",
                        f"{path} has no layer {layer} to leave out: {sorted(rows)}",
                    )
        return cls(token, gate, tuple(sorted(without)))


def _check_sums(name: str, rows: Mapping[int, Tensor], expected: str) -> None:
    for layer, row in rows.items():
        total = float(row.sum())
        if total > LARGEST_SUM:
            what = f"{name} scores sum to {total:.4g}, expected {expected}"
            refuse("E-RANGE", f"layer {layer}: {what}")


def _tensors(layers: ByLayer) -> dict[int, Tensor]:
    rows = {}
    # By number: the keys of JSON may stand in the order of texts, 10 before 9.
    for layer, scores in sorted(layers.items()):
        numbers = sorted(scores)
        if numbers != list(range(len(scores))):
            refuse(
                "E-KEYS", f"the scores of layer {layer} lack an expert of 0 to E - 1"
            )
        rows[layer] = torch.tensor([scores[e] for e in numbers], dtype=torch.float64)
    return rows


def tally(
    ids: Tensor, gates: Tensor, experts: int, mask: Tensor | None = None
) -> Tensor:
    """Sum one layer's routing of a batch over E experts, ``[2, 2, E + 1]``: pooling, score, expert.

    Ids and gates are ``[B, T, K]``; the mask ``[B, T]`` is true where a token is real. Behind the
    experts stands what `scored` divides by: how many tokens, or how many samples.
    """
    if mask is None:
        mask = torch.ones(ids.shape[:2], device=ids.device)
    samples, _, top_k = ids.shape
    # In float64, since all tokens of a task are summed.
    real = mask.double()  # [B, T], 1 where a token is real, 0 where it is padding

    # Eq. 7 (token score): a token gives 1/K to each expert that it chose.
    token_share = (real[..., None] / top_k).expand(ids.shape)  # [B, T, K]
    # Eq. 6 (gate score): it gives its gate.
    gate_share = gates.double() * real[..., None]  # [B, T, K]

    # What each sample's tokens give to each expert, by either score.
    shares = torch.stack([token_share, gate_share]).flatten(2)  # [2, B, T * K]
    chosen = ids.flatten(1).expand(2, -1, -1)  # [2, B, T * K]
    sums = real.new_zeros(2, samples, experts)
    sums.scatter_add_(2, chosen, shares)  # [2, B, E]

    # Pooled over tokens, as released, a long sample weighs more. Eq. 6 and 7 divide by
    # a sample's length L_j first, so all samples weigh the same.
    lengths = real.sum(1)  # [B], L_j
    over_tokens = sums.sum(1)  # [2, E]
    # A sample of padding alone has length 0 and adds nothing.
    over_samples = (sums / lengths.clamp(min=1)[:, None]).sum(1)  # [2, E]

    # The divisors, all tokens or the N_s real samples, are kept apart: batches add up.
    tokens = lengths.sum().expand(2, 1)
    real_samples = (lengths > 0).double().sum().expand(2, 1)
    by_tokens = torch.cat([over_tokens, tokens], dim=1)  # [2, E + 1]
    by_samples = torch.cat([over_samples, real_samples], dim=1)
    return torch.stack([by_tokens, by_samples]).cpu()  # [2, 2, E + 1]


def measure(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], config: Config | None = None
) -> Scores:
    """Score every routed expert of every sparse layer on a task's tokens (Eq. 6 and 7).

    Batches are from `samples`; padding does not count. Gates are those of the host, without a
    constant factor: renormalised over the K chosen in Mixtral, plain probabilities in DeepSeek-V2
    (Eq. 2).
    """
    config = config or Config()
    sums: dict[int, Tensor] = {}
    for batch in batches:
        for layer, seen in decisions(model, batch).items():
            experts = seen.logits.shape[-1]
            of_batch = tally(seen.ids, _gates(layer, seen), experts, seen.mask)
            sums[layer] = sums.get(layer, 0) + of_batch
    return scored(sums, config.pooling)


def check_gates(model: nn.Module) -> None:
    """Refuse a model on meta whose routers have no gates that `measure` could read."""
    # Many tokens: PhiMoE's weights are 1, as gates might be, unless two experts are nearly alike.
    batch = {"input_ids": torch.zeros(32, 8, dtype=torch.long)}
    for layer, seen in decisions(model, batch).items():
        _gates(layer, seen)


def _gates(layer: int, seen: Decision) -> Tensor:
    """Return a layer's gates ``[B, T, K]``, or say in which layer there are none."""
    with located(f"layer {layer}"):
        return seen.gates()


def scored(sums: Mapping[int, Tensor], pooling: Pooling) -> Scores:
    """Make scores of each layer's `tally`, summed over batches, averaged as ``pooling`` says."""
    token: dict[int, Tensor] = {}
    gate: dict[int, Tensor] = {}
    counted = 0.0
    for layer, (over_tokens, over_samples) in sums.items():
        pooled = over_samples if pooling == "samples" else over_tokens  # [2, E + 1]
        # Eq. 6 and 7: what each expert got, by how many gave.
        means = pooled[:, :-1] / pooled[:, -1:]  # [2, E]
        token[layer], gate[layer] = means
        counted += float(pooled[:, -1].sum())
    if not counted:
        refuse("E-DATA", "no real token was counted: the scores would be 0/0")
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
        refuse(
            "E-DATA",
            f"rows have {rows.column_names}, expected input_ids: see data.encode",
        )
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    texts: list[list[int]] = []
    if packed:
        stream: list[int] = []
        for place in order:
            if len(stream) >= count * length:
                break
            stream += rows[place]["input_ids"]
        stream = stream[: count * length]
        # Where the rows do not fill ``count`` samples, the last one is shorter.
        texts = [
            stream[start : start + length] for start in range(0, len(stream), length)
        ]
    else:
        for place in order:
            if len(texts) == count:
                break
            ids = rows[place]["input_ids"]
            if 0 < len(ids) <= length:
                texts.append(ids)
    if not texts:
        refuse("E-DATA", f"no sample of at most {length} tokens in {len(rows)} rows")
    batches = []
    for start in range(0, len(texts), batch):
        ids, mask = padded(texts[start : start + batch], pad_id)
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches
