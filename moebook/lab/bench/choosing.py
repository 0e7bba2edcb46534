"""Cases of choosing: LoRAs of a bank, nearest rows, duplicates."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import torch
from sklearn.preprocessing import normalize
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moebook import models
from moebook.data import IGNORED, encode, padded, tasks
from moebook.errors import refuse
from moebook.kernels.similarity import duplicates, nearest_rows
from moebook.lab.bench.case import (
    Case,
    Product,
    Run,
    Shapes,
    listed,
    number_format,
    peer,
    size_of,
)
from moebook.methods.rocket import loras, score
from moebook.methods.rocket.loras import Lora

Array = np.ndarray[Any, Any]
Item = dict[str, Any]
TARGETS = ("q_proj", "v_proj")
LOOPED = 10_000  # rows up to which the paper's loops are asked to compare all pairs


def bank(device: torch.device, N: int, S: int, R: int, bits: int = 32) -> Case:
    """N LoRAs on the embedded base: nats of S answers under each; PEFT in ``bits``."""
    model, tokenizer = models.load("nano", device=str(device))
    rows = []
    for name in list(tasks.CATALOGUE)[:4]:
        rows += tasks.rows(name, "train", S)
    every = max(1, len(rows) // S)
    shots = rows[::every][:S]
    items = list(encode(shots, tokenizer, max_length=10**9))
    hosted, own_loras = _hosted(N, R, device)
    if bits == 64:
        hosted.double()
    by_peft = partial(_by_peft, hosted, own_loras, items)
    case = Case(size_of(*model.parameters()))
    case.add("ours", partial(score.log_perplexity, model, tokenizer, own_loras, shots))
    case.floor(_products(model, items, N, R), device, torch.float32)
    case.add("set_adapter, all shots at once", partial(by_peft, len(items)))
    case.add("set_adapter, shot by shot", partial(by_peft, 1))
    return case


def _by_peft(model: Any, names: dict[str, Lora], items: list[Item], size: int) -> Array:
    """Transformers' own losses ``[N, S]`` in PEFT's way, ``size`` shots at a time."""
    nats = []
    for name in names:
        model.set_adapter(name)
        for start in range(0, len(items), size):
            nats.append(_nats(model, items[start : start + size]))
    return torch.cat(nats).view(len(names), -1).cpu().numpy()


def _nats(model: Any, items: list[Item]) -> Tensor:
    """The mean loss of a token of each answer, ``[B]``."""
    ids, mask = padded([item["input_ids"] for item in items], fill=0)  # [B, T] each
    labels, _ = padded([item["labels"] for item in items], fill=IGNORED)
    ids = ids.to(model.device)
    mask = mask.to(model.device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    # A token's logits are those of the next one.
    logits = logits[:, :-1]  # [B, T - 1, V]
    targets = labels[:, 1:].to(model.device)  # [B, T - 1]
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    sums = losses.view_as(targets).double().sum(1)  # 0 where a label is ignored
    return sums / (targets != IGNORED).sum(1)


def _hosted(
    number: int, rank: int, device: torch.device
) -> tuple[Any, dict[str, Lora]]:
    """Put random LoRAs on q and v of the base by PEFT; return both, LoRAs as ours."""
    torch.manual_seed(0)
    peft = peer("peft")
    base, _ = models.load("nano", device=str(device))
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=list(TARGETS),
        init_lora_weights=False,
    )
    names = [f"lora{index:02d}" for index in range(number)]
    with warnings.catch_warnings():  # PEFT asks transformers for a flag by its old name
        renamed = "`is_gradient_checkpointing` is"
        warnings.filterwarnings("ignore", renamed, FutureWarning)
        model = peft.get_peft_model(base, config, adapter_name=names[0]).eval()
    for name in names[1:]:
        model.add_adapter(name, config)

    own = {}
    layers = loras.linears(base, TARGETS)
    for name in names:
        down: dict[str, Tensor] = {}
        up: dict[str, Tensor] = {}
        for path, layer in layers.items():
            down[path] = layer.lora_A[name].weight.detach()
            up[path] = layer.lora_B[name].weight.detach()
        own[name] = Lora(name, rank, float(rank), down, up)
    return model, own


def _products(model: Any, items: list[Item], number: int, rank: int) -> list[Product]:
    """The products that scoring needs: shared tokens once, then answers alone."""
    packs = score.packs(items, model.config.hidden_size)
    tokens = sum(len(pack.tokens) for pack in packs)
    places = number * sum(len(pack.answers.readers.unique()) for pack in packs)
    answers = number * sum(len(pack.answers.readers) for pack in packs)
    shared, ends = score.spared(model)
    last = set()
    for end in ends:
        last.update(end.modules())
    shapes = Shapes()
    for path, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if path == "lm_head":
            rows = answers
        elif layer in last:
            rows = places
        else:
            rows = number * tokens
        width = layer.in_features
        out = layer.out_features
        shapes[tokens if layer in shared else rows, width, out] += 1
        if path.endswith(TARGETS):
            shapes[rows, width, rank] += 1
            shapes[rows, rank, out] += 1
    return listed(shapes)


def _unit(rng: np.random.Generator, rows: int, width: int) -> Array:
    """Random rows of length 1."""
    return normalize(rng.standard_normal((rows, width), dtype=np.float32))


def nearest(device: torch.device, S: int, K: int, D: int, C: int) -> Case:
    """The C rows of a pool that are nearest to any of K shots (Rocket Eq. 11 to 13)."""
    rng = np.random.default_rng(0)
    pool = _unit(rng, S, D)
    shots = _unit(rng, K, D)
    dtype = number_format(device)
    rows = torch.from_numpy(pool).to(device, dtype)
    asked = torch.from_numpy(shots).to(device, dtype)

    def at_once() -> Array:
        similarity = (normalize(pool) @ shots.T).max(axis=1)
        first = np.argpartition(-similarity, C - 1)[:C]
        return first[np.argsort(-similarity[first], kind="stable")]

    def by_sklearn() -> Run:
        cosine = peer("sklearn.metrics.pairwise").cosine_similarity
        return lambda: np.argsort(-cosine(pool, shots).max(axis=1), kind="stable")[:C]

    def by_sentence_transformers() -> Run:
        util = peer("sentence_transformers.util")
        return partial(util.semantic_search, asked, rows, top_k=C)

    case = Case(size_of(rows))
    case.add("ours", lambda: nearest_rows(rows, asked, C))
    case.floor([Product(S, D, K)], device, dtype)
    case.add("numpy, all at once", at_once, host=True)
    case.invite("scikit-learn", by_sklearn, host=True)
    case.invite("semantic_search", by_sentence_transformers)
    return case


def duplicated(device: torch.device, S: int, E: int, D: int) -> Case:
    """Alg. 2's duplicates among S rows, each near one of E texts, against its loops."""
    rng = np.random.default_rng(0)
    centres = _unit(rng, E, D)
    chosen = centres[rng.integers(E, size=S)]
    vectors = normalize(chosen + np.float32(0.3) * _unit(rng, S, D))
    similarity = rng.random(S).astype(np.float32)
    dtype = number_format(device)
    rows = torch.from_numpy(vectors).to(device, dtype)
    key = torch.from_numpy(similarity).to(device)
    loops = partial(literal_duplicates, vectors, similarity, 0.9)
    case = Case(size_of(rows, key))
    case.add("ours", lambda: duplicates(rows, key, 0.9))
    case.floor([Product(S, D, S)], device, dtype)
    case.add("the paper's loops", loops, host=True)
    return case


def literal_duplicates(vectors: Array, similarity: Array, threshold: float) -> Array:
    """Run Alg. 2, lines 5 to 13, as two loops over the rows that are still there."""
    if len(vectors) > LOOPED:
        refuse("E-RANGE", f"would compare {len(vectors) ** 2:,} pairs one by one")
    unit = normalize(vectors)
    alive = [True] * len(unit)
    for i, j in permutations(range(len(unit)), 2):
        if alive[i] and alive[j] and unit[i] @ unit[j] > threshold:
            # The one that is nearer to the shots stays.
            alive[j if similarity[i] > similarity[j] else i] = False
    return np.flatnonzero(alive)
