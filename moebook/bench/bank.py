"""Cases of a bank of LoRAs scored on K shots: one packed pass against PEFT's loop."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moebook import models
from moebook.bench import peers
from moebook.bench.case import Axis, Case, Op, size_of
from moebook.bench.floors import Product
from moebook.data import IGNORED, encode, padded, tasks
from moebook.methods.rocket import loras, packing, scoring
from moebook.methods.rocket.loras import Lora

TARGETS = ("q_proj", "v_proj")
Item = dict[str, Any]


def _bank(device: torch.device, N: int, S: int, R: int, bits: int = 32) -> Case:
    """N LoRAs on the embedded base, the nats of S answers under each; PEFT's in so many bits."""
    model, tokenizer = models.load("nano", device=str(device))
    rows = [row for name in list(tasks.CATALOGUE)[:4] for row in tasks.rows(name, "train", S)]
    shots = rows[:: max(1, len(rows) // S)][:S]
    items = list(encode(shots, tokenizer, max_length=10**9))
    hosted, bank = _hosted(N, R, device)
    if bits == 64:
        hosted.double()
    case = Case(size_of(*model.parameters()))
    case.add("ours", lambda: scoring.log_perplexity(model, tokenizer, bank, shots))
    case.floor(_products(model, items, N, R), device, torch.float32)
    case.add("set_adapter, all shots at once", lambda: _looped(hosted, bank, items, len(items)))
    case.add("set_adapter, shot by shot", lambda: _looped(hosted, bank, items, 1))
    return case


def _looped(model: Any, bank: dict[str, Lora], items: list[Item], rows: int) -> Any:
    """Go PEFT's way: make each adapter the active one, and run ``rows`` shots at a time."""
    found = []
    for name in bank:
        model.set_adapter(name)
        parts = [nats(model, items[at : at + rows]) for at in range(0, len(items), rows)]
        found.append(torch.cat(parts).cpu().numpy())
    return np.stack(found)


def _hosted(number: int, rank: int, device: torch.device) -> tuple[Any, dict[str, Lora]]:
    """Put random LoRAs on q and v of the base by PEFT; return it, and the LoRAs as ours."""
    torch.manual_seed(0)
    peft = peers.module("peft")
    base, _ = models.load("nano", device=str(device))
    settings = {"r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
    config = peft.LoraConfig(**settings, init_lora_weights=False)
    first, *others = (f"lora{index:02d}" for index in range(number))
    with warnings.catch_warnings():  # PEFT asks transformers for a flag by its old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
        model = peft.get_peft_model(base, config, adapter_name=first).eval()
    for name in others:
        model.add_adapter(name, config)
    layers = loras.linears(base, TARGETS)

    def ours(name: str) -> Lora:
        down = {path: layer.lora_A[name].weight.detach() for path, layer in layers.items()}
        up = {path: layer.lora_B[name].weight.detach() for path, layer in layers.items()}
        return Lora(name, rank, float(rank), down, up)

    return model, {name: ours(name) for name in (first, *others)}


def nats(model: Any, batch: list[Item]) -> Tensor:
    """Return the mean nats a token of each answer, as transformers' own loss has them ``[B]``."""
    ids, mask = padded([item["input_ids"] for item in batch], fill=0)
    labels, _ = padded([item["labels"] for item in batch], fill=IGNORED)
    ids, mask, targets = (part.to(model.device) for part in (ids, mask, labels[:, 1:]))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none")
    return losses.double().sum(1) / (targets != IGNORED).sum(1)


def _products(model: Any, items: list[Item], number: int, rank: int) -> list[Product]:
    """List the products that scoring cannot do without.

    A token that several shots begin with runs once under each LoRA; before the first LoRA it runs
    once for all. Behind the last keys and values only places that predict an answer are needed.
    """
    made = packing.packs(items, model.config.hidden_size)
    tokens = sum(len(pack.tokens) for pack in made)
    places = number * sum(len(pack.answers.readers.unique()) for pack in made)
    answers = number * sum(len(pack.answers.readers) for pack in made)
    shared, ends = packing.spared(model)
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


BANK = Op(
    _bank,
    tiny={"bank": {"N": 2, "S": 3, "R": 2}},
    small={"bank": {"N": 8, "S": 10, "R": 16}},
    full={"bank": {"N": 38, "S": 20, "R": 16}},
    model={"bank": {"N": 38, "S": 50, "R": 16}},
    T=Axis("S", "answers", (5, 10, 20)),
    E=Axis("N", "LoRAs", (4, 8, 16)),
    N=Axis("R", "rank of a LoRA", (4, 16, 64)),
)
