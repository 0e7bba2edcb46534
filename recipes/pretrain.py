"""Pretraining of the embedded bases: corpus, tokenizer, a short loop, a manifest.

A bare loop and not the Trainer: on a CPU it is faster by two modest factors, and a run takes more
than an hour. The forward and backward passes run on bf16 copies of the float32 weights (1.13 times
as fast as autocast, 2.65 times as fast as float32, on one core of a CPU with AVX512-BF16), and each
thread works on windows of its own instead of sharing narrow products.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from typing_extensions import TypedDict

from moebook import storage
from moebook.errors import Refusal, refuse, shown
from moebook.kernels import balance_loss
from moebook.models import checkpoint
from moebook.runtime import environment, progress, resolve_device
from moebook.settings import Count, Positive, Seed, Share, checked, settings
from moebook.storage import formed
from recipes import corpus

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
FEWEST_TOKENS = 256 + len(SPECIAL)  # each byte is a token
TOKENIZER_SAMPLE = 6_000_000  # characters in all, shared out by the mixture
TOKENIZER = "tokenizer/tokenizer.json"  # in the folder of a pretraining
SAVE_EVERY = 200
PART = "15MB"  # at most, of a file of weights: a large base can be carried in parts
FIRST_LOSSES = 50  # kept in the manifest; a test repeats these steps

NotNegative = Annotated[float, Field(ge=0)]
Mixture = dict[str, NotNegative]


class Phase(TypedDict):
    """Steps whose windows have so many rows and tokens, and perhaps a mixture of their own."""

    steps: Count
    rows: Count
    length: Annotated[int, Field(ge=2)]  # a token, and one to predict
    mixture: NotRequired[Mixture]


@settings
class Recipe:
    """Everything a base is made from; the YAML beside the weights.

    Attributes:
        model_type: transformers' name of the architecture (llama, deepseek_v2 ...).
        config: Arguments of its configuration, ``max_position_embeddings`` among them.
        vocabulary: Tokens of the byte-level BPE, special ones included.
        mixture: Share of the windows by corpus source; they sum to 1.
        phases: Steps, rows and length of the windows, one after another, each with a mixture of
            its own where that differs.
        learning_rate: Peak; rises linearly over ``warmup`` steps, then falls linearly to zero.
        seed: Seed of the corpus, the initial weights and the order of the windows.
        balance: Weight of the balance loss of a sparse model's routers, summed over its layers.
    """

    model_type: str
    config: dict[str, Any]
    # Token files have 16 bits a token.
    vocabulary: Annotated[int, Field(ge=FEWEST_TOKENS, le=2**16)]
    mixture: Mixture
    phases: Annotated[list[Phase], Field(min_length=1)]
    learning_rate: Positive
    warmup: Count
    weight_decay: NotNegative
    betas: Annotated[list[Share], Field(min_length=2, max_length=2)]
    clip: Positive
    seed: Seed
    balance: NotNegative = 0.0

    def __post_init__(self) -> None:
        """Refuse mixtures, windows and a balance that do not fit the corpus or the model."""
        for mixture in (
            self.mixture,
            *(phase.get("mixture", self.mixture) for phase in self.phases),
        ):
            odd = mixture.keys() - corpus.SOURCES.keys()
            if odd or abs(sum(mixture.values()) - 1) > 1e-9:
                known = list(corpus.SOURCES)
                refuse(
                    "E-CONFIG", f"mixture must name {known} and sum to 1, got {mixture}"
                )
        if self.model_type not in CONFIG_MAPPING:
            have = f"model_type is {shown(self.model_type)}"
            refuse("E-CONFIG", f"{have}, which transformers does not know")
        positions = self.config.get("max_position_embeddings")
        longest = max(phase["length"] for phase in self.phases)
        if type(positions) is not int or positions < longest:
            have = f"config.max_position_embeddings is {shown(positions)}"
            expected = f"{longest}, the longest window, or more"
            refuse("E-CONFIG", f"{have}, expected {expected}")
        if self.balance and "num_experts_per_tok" not in self.config:
            have = f"balance is {self.balance}, and config has no num_experts_per_tok"
            refuse("E-CONFIG", f"{have}: expected 0 for a dense model")

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read a recipe; a missing, unknown or bad entry is refused with the file (E-CONFIG)."""
        if not path.is_file():
            refuse("E-NOFILE", f"no recipe at {path}; expected <base>/recipe.yaml")
        try:
            with formed(path) as content:
                if not isinstance(content, dict):
                    expected = "expected a mapping of model_type, config and the others"
                    refuse("E-CONFIG", f"holds {shown(content)}, {expected}")
                return cls(**content)
        except Refusal as refusal:
            refuse("E-CONFIG", f"{path}: {refusal.message}")

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return sum(phase["steps"] for phase in self.phases)

    def window(self, step: int) -> tuple[dict[str, float], int, int]:
        """Mixture, rows and length of the windows at a step."""
        for phase in self.phases:
            if step < phase["steps"]:
                break
            step -= phase["steps"]
        return phase.get("mixture", self.mixture), phase["rows"], phase["length"]

    def rate(self, step: int) -> float:
        """Learning rate at a step."""
        falling = (self.steps - step) / max(1, self.steps - self.warmup)
        return self.learning_rate * min((step + 1) / self.warmup, falling)


def train_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that splits numbers into single digits on a sample of the mixture."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    sample = []
    for source, share in recipe.mixture.items():
        left = int(TOKENIZER_SAMPLE * share)
        for text in corpus.documents(source, recipe.seed):
            sample.append(text[:left])
            left -= len(text)
            if left <= 0:
                break
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=recipe.config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **SPECIAL,
    )


def _keep(recipe: Path, work: Path) -> Path:
    """Keep a recipe as it is now beside what is made by it; another one's folder is refused."""
    kept = work / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8")
    if kept.is_file() and kept.read_text(encoding="utf-8") != text:
        fix = "move or delete it, or bring the recipe back"
        refuse("E-EXISTS", f"{work} was begun by another recipe than {recipe}; {fix}")
    storage.write(kept, text)
    return kept


def prepare(
    recipe: Recipe, work: Path
) -> tuple[PreTrainedTokenizerFast, dict[str, Any]]:
    """Make the tokenizer and the token files below ``work``, or take them when they are there."""
    if (work / "corpus" / "corpus.json").is_file():
        described = _described(work)
        with formed(work / "tokenizer"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
        return tokenizer, described
    tokenizer = train_tokenizer(recipe)
    tokenizer.save_pretrained(work / "tokenizer")

    def encode(texts: list[str]) -> list[list[int]]:
        return [row.ids for row in tokenizer.backend_tokenizer.encode_batch_fast(texts)]

    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    hashed = str(storage.digest(work / TOKENIZER))
    folder = work / "corpus"
    described = corpus.write(folder, encode, bos, eos, recipe.seed, hashed)
    return tokenizer, described


def _described(work: Path) -> dict[str, Any]:
    """What `corpus.write` tells of its token files, which must be here with their tokenizer."""
    folder = work / "corpus"
    file = folder / "corpus.json"
    digest = hashlib.sha256()
    with formed(file):
        described = storage.read_json(file)
        expected = described["sha256"]
        for name in described["tokens"]:
            path = folder / f"{name}.u16"
            digest.update(path.read_bytes() if path.is_file() else b"")
        hashed = described.get("tokenizer")
    fix = f"delete {folder} to make them again"
    if digest.hexdigest() != expected:
        refuse("E-HASH", f"{folder}: not the token files of {file.name}; {fix}")
    if storage.digest(work / TOKENIZER) != hashed:
        problem = f"{work / TOKENIZER}: not the tokenizer that {file} names"
        refuse("E-HASH", f"{problem}; {fix}")
    return described


def streams(work: Path, part: str) -> dict[str, np.ndarray]:
    """Map the token files of one part (train or held_out) into memory."""
    return {
        source: np.memmap(
            work / "corpus" / f"{source}.{part}.u16", dtype=np.uint16, mode="r"
        )
        for source in corpus.SOURCES
    }


def build_model(recipe: Recipe) -> PreTrainedModel:
    """Make the randomly initialised float32 model of a recipe; the seed fixes the weights."""
    torch.manual_seed(recipe.seed)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(
        recipe.model_type, vocab_size=recipe.vocabulary, **special, **recipe.config
    )
    # Eager attention was 1.54 times as fast as the fused one on a CPU at head width 32.
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def loss_of(
    model: PreTrainedModel, ids: torch.Tensor, balance: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean next-token loss in nats over token ids [B, T], and its sum with the balance loss."""
    # No copy of the logits.
    targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    out = model(input_ids=ids, use_cache=False, output_router_logits=balance > 0)
    logits = out.logits.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(
        logits, targets.flatten(), reduction="none"
    )
    loss = losses.float().sum() / ids[:, 1:].numel()
    if not balance:
        return loss, loss
    top_k = model.config.num_experts_per_tok
    penalty = sum(
        balance_loss(logits, logits.topk(top_k).indices) for logits in out.router_logits
    )
    return loss, loss + balance * penalty


@torch.no_grad()
def held_out_losses(model: PreTrainedModel, work: Path) -> dict[str, float]:
    """Measure the loss by source, nats a token, on windows of the held-out parts."""
    rows = 64
    length = min(256, model.config.max_position_embeddings)
    model.eval()
    losses = {}
    for source, stream in streams(work, "held_out").items():
        ids = torch.from_numpy(
            corpus.batch({source: stream}, {source: 1.0}, 0, 0, rows, length)
        )
        losses[source] = loss_of(model, ids.to(model.device))[0].item()
    model.train()
    return losses


class _Run:
    """Float32 weights, their bf16 copies and the optimizer; saved and restored as safetensors.

    Each of torch's threads works on windows of its own with a copy of its own, since products this
    narrow gain little from being shared out themselves (1.5 times as fast on two cores). A GPU has
    one copy, and as many tokens at once as its memory holds.
    """

    def __init__(
        self, recipe: Recipe, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.recipe = recipe
        on_cpu = device.type == "cpu"
        self.model = build_model(recipe).to(device)
        self.threads = torch.get_num_threads() if on_cpu else 1
        # At once: what stays in the cache, or in memory.
        self.tokens = 2048 if on_cpu else 32768
        self.copies = [
            build_model(recipe).to(device, dtype) for _ in range(self.threads)
        ]
        self.pool = ThreadPoolExecutor(self.threads)
        self.weights = list(self.model.parameters())
        groups = [
            {"params": [p for p in self.weights if p.dim() > 1]},
            {"params": [p for p in self.weights if p.dim() <= 1], "weight_decay": 0.0},
        ]
        options = {"betas": tuple(recipe.betas), "weight_decay": recipe.weight_decay}
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, **options)
        self.step = 0
        self.seconds = 0.0
        self.losses: list[float] = []

    def train(self, parts: dict[str, np.ndarray], end: int, path: Path) -> None:
        """Go on to the step ``end``, and save from time to time."""
        torch.set_num_threads(1)  # the run has its own
        steps = range(self.step, end)
        try:
            for _ in progress(steps, desc="pretrain", total=len(steps)):
                self.advance(parts)
                if self.step % SAVE_EVERY == 0 or self.step == end:
                    self.save(path)
        finally:
            torch.set_num_threads(self.threads)

    def advance(self, parts: dict[str, np.ndarray]) -> None:
        """Take one optimizer step; the loss, nats a token, joins ``losses``."""
        started = time.perf_counter()
        mixture, rows, length = self.recipe.window(self.step)
        ids = corpus.batch(parts, mixture, self.step, self.recipe.seed, rows, length)
        groups = zip(
            self.weights, *(copy.parameters() for copy in self.copies), strict=True
        )
        height = min(rows, max(1, self.tokens // length))
        pieces = torch.from_numpy(ids).to(self.model.device).split(height)
        shares = [pieces[thread :: self.threads] for thread in range(self.threads)]
        work = self.pool.map(self._backward, self.copies, shares, repeat(height))
        # Pieces of full height; the last may be a part of one.
        count = rows / height
        total = sum(work) / count
        for weight, *copies in groups:
            gradients = torch.stack([copy.grad for copy in copies]).float()
            weight.grad = gradients.sum(0) / count
        if not np.isfinite(total):
            refuse("E-NONFINITE", f"pretraining: loss {total} at step {self.step}")
        torch.nn.utils.clip_grad_norm_(self.weights, self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        self.optimizer.step()
        self.step += 1
        self.losses.append(total)
        self.seconds += time.perf_counter() - started

    def _backward(
        self, copy: PreTrainedModel, pieces: list[torch.Tensor], height: int
    ) -> float:
        """Accumulate the gradient of the pieces' losses on a copy of the weights as they are.

        A piece counts by its rows, 1 with the full height.
        """
        for mine, weight in zip(copy.parameters(), self.weights, strict=True):
            mine.data.copy_(weight.detach())
            mine.grad = torch.zeros_like(mine)
        total = 0.0
        for piece in pieces:
            loss, objective = loss_of(copy, piece, self.recipe.balance)
            weight = len(piece) / height
            (weight * objective).backward()
            total += weight * loss.item()
        return total

    def save(self, path: Path) -> None:
        """Write weights, moments, losses and seconds into one file, atomically."""
        tensors = {"losses": torch.tensor(self.losses, dtype=torch.float64)}
        tensors["seconds"] = torch.tensor(self.seconds)
        for i, weight in enumerate(self.weights):
            state = self.optimizer.state[weight]
            tensors |= {f"weight.{i}": weight.detach()}
            tensors |= {
                f"first.{i}": state["exp_avg"],
                f"second.{i}": state["exp_avg_sq"],
            }
        save_file(tensors, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def restore(self, path: Path) -> None:
        """Continue from a file that `save` wrote."""
        with formed(path):
            tensors = load_file(path)
        self.losses = tensors["losses"].tolist()
        self.seconds = tensors["seconds"].item()
        self.step = len(self.losses)
        for i, weight in enumerate(self.weights):
            weight.data.copy_(tensors[f"weight.{i}"])
            self.optimizer.state[weight] = {
                "step": torch.tensor(float(self.step)),
                "exp_avg": tensors[f"first.{i}"].to(weight.device),
                "exp_avg_sq": tensors[f"second.{i}"].to(weight.device),
            }

    def finish(
        self,
        tokenizer: PreTrainedTokenizerFast,
        recipe: Path,
        work: Path,
        out: Path,
        described: dict[str, Any],
    ) -> None:
        """Write recipe, weights (fp16), tokenizer and manifest, by one rename."""
        windows = [self.recipe.window(step) for step in range(self.recipe.steps)]
        with checkpoint.building(
            out,
            corpus=described,
            training_tokens=sum(rows * length for _, rows, length in windows),
            first_losses=self.losses[:FIRST_LOSSES],
            last_loss=float(np.mean(self.losses[-100:])),
            held_out_losses=held_out_losses(self.model, work),
            seconds=self.seconds,
            environment=environment(),
        ) as stage:
            shutil.copy(recipe, stage / "recipe.yaml")
            self.model.half().save_pretrained(stage, max_shard_size=PART)
            tokenizer.save_pretrained(stage)


@checked
def pretrain(
    recipe_file: Path,
    work: Path,
    out: Path,
    *,
    steps: Annotated[int, Field(ge=1)] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> list[float]:
    """Make a base from its recipe: corpus, tokenizer, training (resumable), weights, manifest.

    Args:
        recipe_file: The recipe's YAML.
        work: Folder for token files and the checkpoint; a second call goes on from there.
        out: New folder for the finished base; not made when ``steps`` ends the run early.
        steps: Stop after this many steps; None runs the whole recipe.
        dtype: Type of the forward and backward passes; weights and moments stay float32.
        device: Where it trains; only on a CPU does a run repeat to the bit.

    Returns:
        The training loss at every step so far, nats a token.
    """
    # To oneDNN each expert's number of rows is a shape of its own, and it keeps 1,024 compiled
    # products: a sparse model was 1.7 times as fast with room for all of them.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")
    recipe = Recipe.read(recipe_file)
    with storage.locked(work / ".lock"):
        if out.exists():
            fix = "move or delete it to make the base again"
            refuse("E-EXISTS", f"{out} exists already; {fix}")
        kept = _keep(recipe_file, work)
        tokenizer, described = prepare(recipe, work)
        run = _Run(recipe, dtype, resolve_device(device))
        path = work / "checkpoint.safetensors"
        if path.is_file():
            run.restore(path)
        end = recipe.steps if steps is None else min(steps, recipe.steps)
        run.train(streams(work, "train"), end, path)
        if end == recipe.steps:
            run.finish(tokenizer, kept, work, out, described)
    return run.losses
