"""Relevance of each expert to a task: gate score (Eq. 6) and token score (Eq. 7), in one pass."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from datasets import Dataset
from pydantic import Field
from torch import Tensor, nn

from moebook import results
from moebook.data import padded
from moebook.errors import refuse
from moebook.methods.esft.config import Config, Pooling, from_json
from moebook.models.anatomy import Layer, anatomy
from moebook.nn import Decision, observe
from moebook.settings import checked, settings

Count = Annotated[int, Field(ge=1)]
ByExpert = Annotated[dict[int, float], Field(min_length=1)]
ByLayer = Annotated[dict[int, ByExpert], Field(min_length=1)]


def sparse_layers(model: nn.Module) -> list[Layer]:
    """Return the layers that hold routed experts, or refuse a dense model."""
    layers = [layer for layer in anatomy(model).layers if layer.kind == "sparse"]
    if not layers:
        refuse(
            "E-MODEL",
            f"{type(model).__name__} is dense: ESFT needs a mixture of experts"
            " (Mixtral, DeepSeek-V2, OLMoE, Qwen-MoE, or one upcycled here)",
        )
    return layers


def decisions(
    model: nn.Module, batches: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[int, Decision]]:
    """Yield each batch's routing by layer number; the decoder alone runs, without the head."""
    routers = {layer.index: layer.router for layer in sparse_layers(model)}
    decoder = anatomy(model).decoder
    for batch in batches:
        yield from observe(decoder, routers, batch).items()


@dataclass(frozen=True)
class Scores:
    """Scores of all routed experts, by decoder layer: finite, none negative, E alike in all layers.

    Attributes:
        token: Layer -> ``[E]`` float64, share of the layer's routed slots (Eq. 7); they sum to 1.
        gate: Layer -> ``[E]`` float64, mean gate (Eq. 6); they sum to a token's mean total gate.
    """

    token: dict[int, Tensor]
    gate: dict[int, Tensor]

    def __post_init__(self) -> None:
        if self.token.keys() != self.gate.keys() or not self.token:
            odd = sorted(self.token.keys() ^ self.gate.keys())
            refuse("E-KEYS", f"scores: token and gate must cover the same layers, not so: {odd}")
        for kind in ("token", "gate"):
            for layer, row in getattr(self, kind).items():
                where = f"{kind} score of layer {layer}"
                if len(row) != self.experts:
                    refuse("E-SHAPE", f"{where}: {len(row)} experts, others have {self.experts}")
                if not (row.isfinite() & (row >= 0)).all():
                    refuse("E-RANGE", f"{where}: expected finite numbers from 0, not {row.min()}")

    @property
    def experts(self) -> int:
        """E, routed experts a layer."""
        return len(next(iter(self.token.values())))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the published JSON form (kind -> layer -> expert -> score), whole or not at all."""
        published = {
            f"{kind}_scores": {
                layer: dict(enumerate(row.tolist())) for layer, row in getattr(self, kind).items()
            }
            for kind in ("token", "gate")
        }
        results.write(Path(path), json.dumps(published))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scores:
        """Read the published JSON form."""
        published = from_json(_Published, path)
        return cls(_rows(published.token_scores, path), _rows(published.gate_scores, path))


@settings
class _Published:
    token_scores: ByLayer
    gate_scores: ByLayer


def _rows(layers: ByLayer, path: str | os.PathLike[str]) -> dict[int, Tensor]:
    for layer, scores in layers.items():
        if sorted(scores) != list(range(len(scores))):
            refuse("E-KEYS", f"{path}: layer {layer} lacks an expert of 0 to E - 1")
    return {
        layer: torch.tensor([scores[expert] for expert in sorted(scores)], dtype=torch.float64)
        for layer, scores in layers.items()
    }


class Tally:
    """Running sums of one layer's routing: both scores and both poolings at once, for E experts."""

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

    def scores(self, pooling: Pooling = "tokens") -> Tensor:
        """Return token score and gate score, ``[2, E]``, averaged as ``pooling`` says."""
        if pooling == "tokens":
            return self._sums[0] / self.tokens
        return self._sums[1] / self.samples


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
    """
    tallies: dict[int, Tally] = {}
    for layer, seen in decisions(model, batches):
        tally = tallies.setdefault(layer, Tally(seen.logits.shape[-1]))
        tally.add(seen.ids, seen.gates, seen.mask)
    return _scores(tallies, (config or Config()).pooling)


@checked
def replay(
    path: str | os.PathLike[str],
    *,
    experts: Count = 64,
    top_k: Count = 6,
    pooling: Pooling = "tokens",
) -> Scores:
    """Score experts from routing that the authors published: a check without their model.

    The accumulation is that of `measure`.

    Args:
        path: Text, gzipped where its name ends in .gz. A line is the decoder layer, the sample, the
            K experts of each of the sample's tokens, an empty field, and their gates; tabs between.
        experts: E; 64 in DeepSeek-V2-Lite.
        top_k: K; 6 there.
        pooling: As in `Config`.
    """
    tallies: dict[int, Tally] = {}
    for layer, ids, gates in _lines(Path(path), experts, top_k):
        tallies.setdefault(layer, Tally(experts)).add(ids, gates)
    return _scores(tallies, pooling)


def _scores(tallies: Mapping[int, Tally], pooling: Pooling) -> Scores:
    if not any(tally.tokens for tally in tallies.values()):
        refuse("E-DATA", "no real token was counted: the scores would be 0/0")
    pairs = {layer: tally.scores(pooling) for layer, tally in tallies.items()}
    return Scores(*({layer: pair[kind] for layer, pair in pairs.items()} for kind in (0, 1)))


def _lines(path: Path, experts: int, top_k: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield layer, ids and gates ``[1, T, K]`` of each line."""
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing: expected the published routing of a task")
    number, wanted = 0, f"{top_k} experts a token, from 0 to {experts - 1}, and as many gates"
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                head, _, tail = line.partition("\t\t")
                layer, _, *ids = map(int, head.split("\t"))
                gates = torch.tensor([*map(float, tail.split("\t"))], dtype=torch.float64)
                if len(ids) != len(gates) or len(ids) % top_k or not {*ids} <= {*range(experts)}:
                    raise ValueError(f"{len(ids)} experts and {len(gates)} gates")
                yield layer, torch.tensor(ids).view(1, -1, top_k), gates.view(1, -1, top_k)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        refuse("E-FORMAT", f"{path}:{number}: {error}; expected {wanted}")


@checked
def samples(
    rows: Dataset,
    *,
    count: Count = 32,
    length: Count = 4096,
    packed: bool = True,
    batch: Count = 4,
    pad_id: int = 0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Draw the samples that experts are scored on (Sec. 3.3, "Data Sampling").

    Args:
        rows: Encoded rows with ``input_ids``, in training form: prompt and answer.
        count: Samples; 32 in the paper. Where the rows are too few, fewer are made.
        length: Tokens a sample; 4096 in the paper.
        packed: Whether a sample is rows one after the other, cut at ``length`` (the paper: "32
            concatenated samples"). Else a sample is one row, left whole, and those longer than
            ``length`` are passed over (as the published logs look).
        batch: Samples a batch.
        pad_id: Token that fills short samples on the right; masked.
        seed: Decides the order of the rows.

    Returns:
        Batches with ``input_ids`` and ``attention_mask`` ``[B, T]``, for `measure`.
    """
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
