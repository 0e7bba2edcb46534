"""SMEAR: each example has its LoRAs merged by a router that reads the mean of the layer's input.

``m = mean_t x_t``, ``p = softmax(V LN(m) / T)``, ``A = sum_i p_i A_i``, ``B = sum_i p_i B_i``,
``y = W x + s B A x``; a router per layer. Muqeeth et al. (2023), Soft Merging of Experts with
Adaptive Routing, arXiv 2306.03745; code: r-three/smear, of bottleneck adapters in T5 alone, where
the mean runs over padding and the decoder's routers read the encoder's output.

For causal models we do as mttl's branch ``mhr_camera_ready`` does, which is not the authors' own:
the mean is of the prompt's tokens, since that of the row would see the answer in training and not
afterwards. What a prompt decided holds while its answer is written.

The prompt is what stands before a row's first label; without labels it is the whole row, or what
`prompted` says. With a cache it is what began the cache, which keeps the weights, so that they
follow rows that move or leave.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, DynamicLayer

from moebook.data.encoding import IGNORED
from moebook.errors import refuse
from moebook.kernels.dispatch import natural
from moebook.methods.rivals import mixing, tuning
from moebook.methods.rivals.tuning import Data, Tuned
from moebook.methods.rocket.bank import Bank, check
from moebook.settings import Positive, Presets, Share, settings

__all__ = [
    "Config",
    "attach",
    "load",
    "prompted",
    "tuned",
]

_AUTHORS = {"start": "random", "norm": "both", "expert_dropout": 0.1}


@settings
class Config(Presets):
    """How prompts are read, and what is trained. The defaults are the preset ``bank``.

    ``released`` is the authors' router over fresh LoRAs, ``paper`` the same on prompts alone,
    as the paper's encoder reads them; ``mttl`` has its file's temperature; ``bank`` starts from
    the bank.

    Attributes:
        start: The experts are the bank's LoRAs, or fresh ones of their shape (paper).
        trains: The routers alone, or the LoRAs too (paper).
        pool: m is the mean over the prompt's tokens, or over the whole row with answer and padding
            (released).
        norm: Of the input, with a bias on V (mttl), or of the input and of V's rows, these at a
            scale that starts at 0.01 (released).
        temperature: T; mttl's file for LLaMA has 0.1.
        expert_dropout: Share of the experts whose p is set to 0 in training, the rest renormalised
            (released: 0.1).
        rate: Learning rate of the routers; None for that of the LoRAs.
    """

    start: Literal["bank", "random"] = "bank"
    trains: Literal["router", "router + experts"] = "router + experts"
    pool: Literal["prompt", "all"] = "prompt"
    norm: Literal["input", "both"] = "input"
    temperature: Positive = 1.0
    expert_dropout: Share = 0.0
    rate: Positive | None = None

    PRESETS: ClassVar = {
        "paper": _AUTHORS,
        "released": {**_AUTHORS, "pool": "all"},
        "mttl": {"start": "random", "temperature": 0.1},
        "bank": {},
    }


@settings
class Origin(tuning.Origin):
    """What a model that SMEAR merges was made from."""

    method: ClassVar[str] = "smear"
    config: Config


class Kept(DynamicLayer):
    """Weights ``[B, 1, layers, N]`` as the last layer of a cache: they go where its rows go."""

    paths: tuple[str, ...] = ()  # of the layers

    def crop(self, tokens_to_remove: int) -> None:
        """Keep them, however many tokens are taken back."""


class Prompt:
    """Where the prompts of the last pass stand, and what each layer made of them.

    It stays after the pass: gradient checkpointing runs layers once more.
    """

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.tokens: int | None = None  # columns that are prompts, see `prompted`
        self.mask = torch.zeros(0)  # [B, T], true where a token is a prompt's
        self.held: dict[str, Tensor] = {}  # weights [B, N] by path, from the cache
        self.decided: dict[str, Tensor] = {}

    def follow(self, model: nn.Module) -> Sequence[RemovableHandle]:
        """Register the two hooks on a causal language model."""
        return (
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, with_kwargs=True),
        )

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> None:
        self.decided = {}
        named = _named(model, args, given)
        cache = named.get("past_key_values")
        if cache is not None and cache.is_compileable:
            fixed = "the cache is static, SMEAR keeps its weights in one that grows"
            refuse("E-MODEL", f"{fixed}: leave cache_implementation away")
        # If the prompt was read before, its weights stand in the cache.
        self.held = _held(cache)
        if not self.held:
            self.mask = self._prompts(named)

    def _prompts(self, given: Mapping[str, Any]) -> Tensor:
        """Say which tokens are a prompt's, ``[B, T]``."""
        ids = given.get("input_ids")
        if ids is None:
            refuse("E-MODEL", "SMEAR reads input_ids: give them, not inputs_embeds")
        seen = given.get("attention_mask")
        # transformers takes a mapping too, with a mask for each kind of layer.
        if seen is not None and (not isinstance(seen, Tensor) or seen.dim() != 2):
            refuse("E-MODEL", "SMEAR reads one example a row: an attention mask [B, T]")
        whole = torch.ones_like(ids, dtype=torch.bool)
        if self.pool == "all":
            return whole
        # A prompt is real tokens: the first columns, or those before the first label.
        real = whole if seen is None else seen.bool()
        labels = given.get("labels")
        if self.tokens is not None:
            return real & (whole.cumsum(1) <= self.tokens)
        if labels is not None:
            # Labels may be of the last columns alone: those before are of prompts.
            learnt = F.pad(labels != IGNORED, (ids.shape[1] - labels.shape[1], 0))
            return real & (learnt.cumsum(1) == 0)
        return real

    def _end(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        given: dict[str, Any],
        output: Any,
    ) -> None:
        # A pass that goes on from a cache decides nothing: a cache gets one such layer.
        if not self.decided:
            return
        cache = _named(model, args, given).get("past_key_values")
        if cache is None:  # then the pass may have made one
            cache = _made(output)
        if cache is not None and cache.get_seq_length():
            kept = Kept()
            kept.paths = tuple(self.decided)
            # [B, layers, N]; a cache has heads in front of tokens, so here one.
            weights = torch.stack([each.detach() for each in self.decided.values()], 1)
            kept.update(weights.unsqueeze(1), weights.unsqueeze(1))
            cache.layers.append(kept)


def _named(
    model: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a pass's arguments by name, also those that were given by place."""
    if not args:
        return dict(given)
    by_place = inspect.signature(model.forward).bind_partial(*args).arguments
    return {**by_place, **given}


def _made(output: Any) -> Any:
    """Return the cache in a pass's output, a plain tuple with ``return_dict=False``, or None."""
    if isinstance(output, tuple):
        return next((part for part in output if isinstance(part, Cache)), None)
    return getattr(output, "past_key_values", None)


def _held(cache: Any) -> dict[str, Tensor]:
    """Read the weights ``[B, N]`` by path off a cache that was begun with a prompt."""
    if cache is None or not cache.get_seq_length():
        return {}
    last = cache.layers[-1]
    if not isinstance(last, Kept):
        why = "the cache was begun without SMEAR"
        refuse("E-MODEL", f"{why}: begin it with its prompt")
    weights = last.keys[:, 0].unbind(1)  # [B, N] of each layer
    return dict(zip(last.paths, weights, strict=True))


class Router(nn.Module):
    """An example's weights ``[B, 1, N]``, by the mean of its prompt."""

    reads_prompt = True  # evaluation then says where prompts end

    def __init__(
        self, path: str, width: int, count: int, config: Config, prompt: Prompt
    ) -> None:
        super().__init__()
        self.path = path
        self.config = config
        self.prompt = prompt
        self.vectors = nn.Parameter(0.01 * torch.randn(count, width))  # V [N, D]
        self.norm = nn.LayerNorm(width)
        if config.norm == "both":
            self.norm_vectors = nn.LayerNorm(width, bias=False)
            nn.init.constant_(self.norm_vectors.weight, 0.01)
        else:
            self.bias = nn.Parameter(torch.zeros(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 1, N]`` for ``x [B, T, D]``."""
        if self.path in self.prompt.held:
            return self.prompt.held[self.path].unsqueeze(1)
        # m, the mean of the prompt's tokens; that of an empty prompt is 0.
        x = x.to(self.vectors.dtype)
        mask = self.prompt.mask.to(x)
        tokens = mask.sum(1, keepdim=True).clamp(min=1)  # [B, 1]
        mean = torch.einsum("bt,btd->bd", mask, x) / tokens  # [B, D]

        # p = softmax(V norm(m) / T), one for the whole example.
        if self.config.norm == "both":
            logits = F.linear(self.norm(mean), self.norm_vectors(self.vectors))
        else:
            logits = F.linear(self.norm(mean), self.vectors, self.bias)
        weights = (logits / self.config.temperature).softmax(-1)  # [B, N]
        if self.training and self.config.expert_dropout:
            stays = torch.rand_like(weights) >= self.config.expert_dropout
            # Where all would go, all stay: what is left must have a sum to divide by.
            stays = stays | ~stays.any(-1, keepdim=True)
            weights = weights * stays
            weights = weights / weights.sum(-1, keepdim=True)
        self.prompt.decided[self.path] = weights
        return weights.unsqueeze(1)


def attach(model: nn.Module, bank: Bank, config: Config, *, seed: int = 0) -> Tuned:
    """Put the bank and its routers on the base, which follow each forward pass by hooks."""
    check(bank)
    if config.start == "random":
        bank = mixing.fresh_like(bank, seed=seed)
    # One for all layers: which tokens are prompts is settled once a pass.
    prompt = Prompt(config.pool)
    result = tuning.attach(
        model,
        bank,
        lambda path, part: Router(path, part.in_features, len(bank), config, prompt),
        mix="factors",
        learnt=_learnt(config),
        seed=seed,
        kind=Origin,
        config=config,
    )
    return replace(result, hooks=prompt.follow(model))


def _learnt(config: Config) -> bool:
    """Say whether the LoRAs train too."""
    return config.trains != "router"


def tuned(
    model: nn.Module,
    bank: Bank,
    data: Data,
    config: Config,
    *,
    seed: int = 0,
    **recipe: Any,
) -> Tuned:
    """Put the bank and its routers on the base and train them."""
    result = attach(model, bank, config, seed=seed)
    return tuning.fit(result, data, rate=config.rate, seed=seed, **recipe)


def load(model: nn.Module, folder: str | Path) -> Tuned:
    """Restore what `Tuned.save` wrote onto its base."""
    prompts: list[Prompt] = []

    def weigh(origin: Origin) -> tuning.Weigh:
        # Called for a copy without values first, and last for the model.
        prompts.append(Prompt(origin.config.pool))
        count = len(origin.names)
        return lambda path, part: Router(
            path, part.in_features, count, origin.config, prompts[-1]
        )

    result = tuning.load(model, folder, Origin, weigh, learnt=_learnt)
    return replace(result, hooks=prompts[-1].follow(model))


@contextmanager
def prompted(result: Tuned, tokens: int) -> Iterator[None]:
    """Take the first so many columns for the prompts in this block, whatever the labels say."""
    natural("prompted", "tokens", tokens, 2**31)
    prompt = next(iter(result.parts.values())).weigh.prompt
    prompt.tokens = tokens
    try:
        yield
    finally:
        prompt.tokens = None
