"""What all arms share: a base, a mixture of tasks, sizes, and the recipe of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from datasets import Dataset as Rows
from pydantic import Field
from torch import nn

from moebook.data import encode, grouped
from moebook.methods import esft
from moebook.methods import upcycling as up
from moebook.methods.rocket.loras import Lora
from moebook.settings import Count, settings
from moebook.together import combining
from moebook.training import fit
from moebook.training.batches import Batches
from moebook.training.loop import History


@settings
class Config:
    """Sizes that arms share. Mixtures renormalise their weights, so that they start as the base."""

    parameters: Count = 158_000  #: numbers that train, where an arm's size is free
    adapters: Count = 8  #: E of PESC
    copies: Count = 4  #: E of the upcycled models
    experts: Count = 4  #: N, LoRAs of a mixture
    top_k: Count = 2  #: K of all of them
    shots: Count = 48  #: K of Rocket's choice
    #: p of ESFT on the models made sparse here.
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.5


@dataclass(frozen=True)
class Setup:
    """What all arms share: a base, a mixture of tasks, sizes, and the recipe of `training.fit`."""

    base: nn.Module  #: never trained; each arm gets a copy
    #: The base's tokenizer.
    tokenizer: Any
    rows: Mapping[str, Sequence[dict[str, str]]]  #: to train on, by task
    #: Sizes of the arms.
    config: Config
    #: Batch, schedule, warmup, clip.
    recipe: Mapping[str, Any] = field(default_factory=dict)
    #: Of the arms' starts and of training.
    seed: int = 0
    #: Chat format of the rows.
    format: str = "camel"
    #: Tokens of a row at most.
    max_length: int = 160

    @property
    def mixed(self) -> list[dict[str, str]]:
        """All rows, shuffled by the seed."""
        every = [row for part in self.rows.values() for row in part]
        return [
            every[i] for i in np.random.default_rng(self.seed).permutation(len(every))
        ]

    @cached_property
    def encoded(self) -> Rows:
        """All rows as tokens."""
        return self.encode(self.mixed)

    def encode(self, rows: Sequence[dict[str, str]]) -> Rows:
        """Encode rows as this base reads them."""
        return encode(
            rows, self.tokenizer, format=self.format, max_length=self.max_length
        )

    @property
    def pad_id(self) -> int:
        """The token that pads."""
        return self.tokenizer.pad_token_id or 0

    def batches(self, rows: Rows) -> Batches:
        """The batches that `fit` trains on."""
        return Batches(rows, self.recipe["batch"], seed=self.seed, pad_id=self.pad_id)

    def recipe_of(self, steps: int) -> dict[str, Any]:
        """Return the recipe of so many steps; a single one has no warm-up, at rate 0.

        How many steps a share of the budget buys, for a LoRA of a bank or a trial of a rate, is
        known only when its rows are.
        """
        alone = {"warmup": 0.0} if steps == 1 else {}
        return {**self.recipe, **alone, "steps": steps}

    def fit(self, model: nn.Module, rows: Rows, *, steps: int, **more: Any) -> History:
        """Train by the recipe."""
        plan = {**self.recipe_of(steps), "pad_id": self.pad_id, "seed": self.seed}
        return fit(model, rows, **plan | more)

    @cached_property
    def inputs(self) -> up.representations.Representations:
        """What routers read, by domain, on the first rows; it decides the length of a start."""
        # `mixed` is shuffled: its first rows are a sample of all tasks.
        return self.represent("ffn_input", grouped(self.mixed[:256]))

    def represent(self, tensor: Any, groups: Mapping[str, Sequence[Any]]) -> Any:
        """Collect what the base represents on groups of rows."""
        parts = {
            n: up.batches(self.encode(rows), pad_id=self.pad_id)
            for n, rows in groups.items()
        }
        return up.collect(self.base, parts, tensor=tensor, limit=2048, seed=self.seed)

    def start(self, kind: str, experts: int) -> up.starts.Start:
        """Draw SU's routers, or make TRSU's or CRSU's, all of one length."""
        if kind == "su":
            start = up.su(self.base, experts, seed=self.seed)
        elif kind == "trsu":
            groups = grouped(self.mixed[:512])
            start = up.trsu(
                self.represent("attention_output", groups), experts, seed=self.seed
            )
        else:
            states = self.represent("attention_output", {"all": self.mixed[:512]})
            start = up.crsu(states, experts, seed=self.seed)
        # A logit scale of 1 for each kind: none starts surer of its choices.
        return up.scaled(start, "matched", inputs=self.inputs)

    def as_adapters(self, loras: Sequence[Lora]) -> combining.AsAdapters:
        """Turn LoRAs into adapters, fitted on the first 64 rows."""
        some = self.encoded.select(range(min(64, len(self.encoded))))
        return combining.as_adapters(
            self.base, loras, up.batches(some, pad_id=self.pad_id)
        )

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The 32 samples of 128 tokens that ESFT scores experts on."""
        return esft.samples(
            self.encoded, count=32, length=128, pad_id=self.pad_id, seed=self.seed
        )
