"""Cases of choosing among many: LoRAs of a bank, near rows, duplicates, groups, clusters."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import torch
from sklearn.preprocessing import normalize
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moebook import models
from moebook.bench.case import Case, Product, Run, number_format, peer, size_of
from moebook.data import IGNORED, encode, padded, tasks
from moebook.errors import refuse
from moebook.kernels.clusters import clusters
from moebook.kernels.groups import groups
from moebook.kernels.similarity import duplicates, nearest_rows
from moebook.methods.rocket import loras, scoring
from moebook.methods.rocket.loras import Lora

Array = np.ndarray[Any, Any]
Item = dict[str, Any]
TARGETS = ("q_proj", "v_proj")
LOOPED, LISTED = 10_000, 1_000_000
"""Most rows whose pairs the paper's loops are asked to compare, and groups itertools to list."""


def bank(device: torch.device, N: int, S: int, R: int, bits: int = 32) -> Case:
    """N LoRAs on the embedded base, the nats of S answers under each; PEFT's in so many bits."""
    model, tokenizer = models.load("nano", device=str(device))
    rows = [row for name in list(tasks.CATALOGUE)[:4] for row in tasks.rows(name, "train", S)]
    shots = rows[:: max(1, len(rows) // S)][:S]
    items = list(encode(shots, tokenizer, max_length=10**9))
    hosted, own_loras = _hosted(N, R, device)
    if bits == 64:
        hosted.double()
    case = Case(size_of(*model.parameters()))
    case.add("ours", lambda: scoring.log_perplexity(model, tokenizer, own_loras, shots))
    case.floor(_products(model, items, N, R), device, torch.float32)
    for name, batch in (("all shots at once", len(items)), ("shot by shot", 1)):
        case.add(f"set_adapter, {name}", partial(_by_peft, hosted, own_loras, items, batch))
    return case


def _by_peft(model: Any, names: dict[str, Lora], items: list[Item], size: int) -> Array:
    """Return transformers' own losses ``[N, S]`` in PEFT's way, ``size`` shots at a time."""
    nats = []
    for name in names:
        model.set_adapter(name)
        for batch in (items[at : at + size] for at in range(0, len(items), size)):
            ids, mask = padded([item["input_ids"] for item in batch], fill=0)
            labels, _ = padded([item["labels"] for item in batch], fill=IGNORED)
            ids, mask, targets = (part.to(model.device) for part in (ids, mask, labels[:, 1:]))
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            sums = losses.view_as(targets).double().sum(1)
            nats.append(sums / (targets != IGNORED).sum(1))
    return torch.cat(nats).view(len(names), -1).cpu().numpy()


def _hosted(number: int, rank: int, device: torch.device) -> tuple[Any, dict[str, Lora]]:
    """Put random LoRAs on q and v of the base by PEFT; return it, and the LoRAs as ours."""
    torch.manual_seed(0)
    peft = peer("peft")
    base, _ = models.load("nano", device=str(device))
    settings = {"r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    config = peft.LoraConfig(**settings, init_lora_weights=False)
    names = [f"lora{index:02d}" for index in range(number)]
    with warnings.catch_warnings():  # PEFT asks transformers for a flag by its old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
        model = peft.get_peft_model(base, config, adapter_name=names[0]).eval()
    for name in names[1:]:
        model.add_adapter(name, config)
    layers = loras.linears(base, TARGETS).items()

    def weights(part: str, name: str) -> dict[str, Tensor]:
        return {path: getattr(layer, part)[name].weight.detach() for path, layer in layers}

    factors = {name: (weights("lora_A", name), weights("lora_B", name)) for name in names}
    return model, {name: Lora(name, rank, float(rank), *both) for name, both in factors.items()}


def _products(model: Any, items: list[Item], number: int, rank: int) -> list[Product]:
    """List the products that scoring cannot do without: shared tokens once, then answers alone."""
    packs = scoring.packs(items, model.config.hidden_size)
    tokens = sum(len(pack.tokens) for pack in packs)
    places = number * sum(len(pack.answers.readers.unique()) for pack in packs)
    answers = number * sum(len(pack.answers.readers) for pack in packs)
    shared, ends = scoring.spared(model)
    last = {layer for part in ends for layer in part.modules()}
    shapes: Counter[tuple[int, int, int]] = Counter()
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            width, out = layer.in_features, layer.out_features
            rows = answers if path == "lm_head" else places if layer in last else number * tokens
            shapes[tokens if layer in shared else rows, width, out] += 1
            if path.endswith(TARGETS):
                shapes[rows, width, rank] += 1
                shapes[rows, rank, out] += 1
    return [Product(*shape, times) for shape, times in shapes.items()]


def nearest(device: torch.device, S: int, K: int, D: int, C: int) -> Case:
    """The C rows of a pool that are nearest to any of K shots (Rocket Eq. 11 to 13)."""
    rng = np.random.default_rng(0)
    pool, shots = (normalize(rng.standard_normal((n, D), dtype=np.float32)) for n in (S, K))
    dtype = number_format(device)
    rows, asked = (torch.from_numpy(part).to(device, dtype) for part in (pool, shots))

    def at_once() -> Array:
        near = (normalize(pool) @ shots.T).max(axis=1)
        first = np.argpartition(-near, C - 1)[:C]
        return first[np.argsort(-near[first], kind="stable")]

    def by_sklearn() -> Run:
        cosine = peer("sklearn.metrics.pairwise").cosine_similarity
        return lambda: np.argsort(-cosine(pool, shots).max(axis=1), kind="stable")[:C]

    case = Case(size_of(rows))
    case.add("ours", lambda: nearest_rows(rows, asked, C))
    case.floor([Product(S, D, K)], device, dtype)
    case.add("numpy, all at once", at_once, host=True)
    case.invite("scikit-learn", by_sklearn, host=True)
    util = partial(peer, "sentence_transformers.util")
    case.invite("semantic_search", lambda: partial(util().semantic_search, asked, rows, top_k=C))
    return case


def duplicated(device: torch.device, S: int, E: int, D: int) -> Case:
    """Alg. 2's near-duplicates among S rows, each near to one of E texts, against its two loops."""
    rng = np.random.default_rng(0)
    centres = normalize(rng.standard_normal((E, D), dtype=np.float32))
    chosen = centres[rng.integers(E, size=S)]
    noise = normalize(rng.standard_normal((S, D), dtype=np.float32))
    vectors, near = normalize(chosen + np.float32(0.3) * noise), rng.random(S).astype(np.float32)
    dtype = number_format(device)
    rows, key = torch.from_numpy(vectors).to(device, dtype), torch.from_numpy(near).to(device)
    case = Case(size_of(rows, key))
    case.add("ours", lambda: duplicates(rows, key, 0.9))
    case.floor([Product(S, D, S)], device, dtype)
    case.add("the paper's loops", lambda: literal_duplicates(vectors, near, 0.9), host=True)
    return case


def literal_duplicates(vectors: Array, near: Array, threshold: float) -> Array:
    """Run Alg. 2, lines 5 to 13, as two loops over the rows that are still there."""
    if len(vectors) > LOOPED:
        refuse("E-RANGE", f"would compare {len(vectors) ** 2:,} pairs one by one")
    unit = normalize(vectors)
    alive = [True] * len(unit)
    for i, j in permutations(range(len(unit)), 2):
        if alive[i] and alive[j] and unit[i] @ unit[j] > threshold:
            alive[j if near[i] > near[j] else i] = False
    return np.flatnonzero(alive)


def grouped(device: torch.device, M: int, N: int, G: int = 1000) -> Case:
    """The G best groups of N among M candidates (Rocket Alg. 1), against itertools."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((M, M)) / 20
    pairs, worth = noise @ noise.T, np.stack([rng.permutation(M) + 1 for _ in range(2)])
    alike, summed = (torch.from_numpy(part).to(device) for part in (pairs, worth.sum(axis=0)))
    case = Case(pairs.nbytes)
    ranked = partial(groups, alike, summed, N, best=G)
    case.add("ours", ranked)
    if (number := math.comb(M, N)) <= LISTED:
        case.add("itertools", partial(ranked, impl="reference"), host=True)
    else:
        case.absent["itertools"] = f"would hold {number:,} groups in memory, one by one"
    return case


def clustered(device: torch.device, S: int, D: int, E: int, L: int) -> Case:
    """One step of Lloyd's in all layers (the end of CRSU), from the same centres for everyone.

    scikit-learn's KMeans does more: it centres the points before, and labels them again behind.
    """
    torch.manual_seed(0)
    centres = torch.randn(L, E, D)
    points = centres[:, torch.arange(S) % E] + torch.randn(L, S, D)
    dtype = number_format(device)
    rows, starts = points.to(device, dtype), centres.to(device, dtype)
    layers = list(zip(points.numpy(), centres.numpy(), strict=True))

    def by_sklearn(kind: str, fit: str, **settings: Any) -> Run:
        make = partial(getattr(peer("sklearn.cluster"), kind), E, n_init=1, **settings)
        return lambda: [getattr(make(init=start), fit)(layer) for layer, start in layers]

    case = Case(size_of(rows))
    case.add("ours", lambda: clusters(rows, starts))
    case.floor([Product(S, D, E, L)], device, dtype)
    whole = partial(by_sklearn, "KMeans", "fit", max_iter=1)
    step = partial(by_sklearn, "MiniBatchKMeans", "partial_fit", compute_labels=False)
    case.invite("KMeans, one step and labels", whole, host=True)
    case.invite("MiniBatchKMeans", step, host=True)
    return case
