"""The calling form of all rivals: what they see, what they leave on the model, what it costs.

A rival is a module with

- ``Config``: its switches; ``Config.preset("paper" | "released" | "bank", **changes)`` names sets;
- ``tuned(model, bank, data, config, **recipe) -> Tuned``, which puts the rival on the base, in
  place, and trains it. A bank that nothing can be chosen from is refused (`bank.check`).
  ``recipe`` holds settings of `training.fit` (lr, steps or epochs, batch, seed), alike for all
  rivals; a rate of the mixing weights' own is ``config.rate``, None for that of all else;
- ``attach(model, bank, config, seed=0) -> Tuned``, which puts it on the base and trains nothing,
  where no row decides what is put on;
- ``load(model, folder) -> Tuned``, where the result depends on the input and is no single LoRA.

A `Tuned` model answers as any other, until ``detach`` takes the rival off again; the base's values
never move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
from datasets import Dataset as Rows
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moebook import training
from moebook.errors import refuse, shown
from moebook.kernels.dispatch import natural
from moebook.methods.rivals import mixing
from moebook.methods.rivals.mixing import Mix, Mixed
from moebook.methods.rocket import loras
from moebook.methods.rocket.bank import Bank
from moebook.methods.rocket.loras import Lora, linears
from moebook.models import checkpoint
from moebook.models.anatomy import beside, count
from moebook.models.lora import refuse_adapted
from moebook.nn import evaluating, hooked
from moebook.runtime import random_states_kept
from moebook.settings import Seed, Size, checked, settings

__all__ = [
    "Cost",
    "Data",
    "Origin",
    "Tuned",
    "load",
]

Weigh = Callable[[str, nn.Module], nn.Module]
"""Makes the part of `Mixed` that gives the weights, for a layer's path and the layer."""


@dataclass(frozen=True)
class Data:
    """What a rival may see of a target, encoded by `data.encode`."""

    shots: Rows  #: D_K, the annotated rows
    chosen: Rows | None = None  #: D_A, rows chosen from open data
    #: D_i, the rows behind each LoRA, by its name.
    sources: Mapping[str, Rows] = field(default_factory=dict)
    #: The token that fills short rows.
    pad_id: int = 0

    @property
    def rows(self) -> Rows:
        """D_K and D_A, which are trained on."""
        parts = [self.shots]
        if self.chosen:
            parts.append(self.chosen)
        return datasets.concatenate_datasets(parts)

    def first(self, shots: int) -> Rows:
        """Return so many of the K shots."""
        natural("first", "shots", shots)
        if shots > len(self.shots):
            refuse("E-KSHOT", f"have {len(self.shots)} shots, need {shots}")
        return self.shots.select(range(shots))

    def source(self, name: str) -> Rows:
        """Return the rows that a LoRA was trained on, or refuse their lack."""
        if name not in self.sources:
            needed = f"the rows that '{name}' was trained on are needed"
            refuse("E-DATA", f"{needed}: give them in sources")
        return self.sources[name]


@dataclass(frozen=True)
class Cost:
    """What a rival took: numbers trained, and tokens through the model, without padding."""

    #: Numbers that trained.
    trained: int = 0
    #: Tokens that were read forward.
    forward: int = 0
    #: Tokens that were read backward.
    backward: int = 0


@settings
class Origin(checkpoint.Origin):
    """What a model was mixed from, kept on the model under the rival's name.

    A rival whose weights depend on the input adds its ``config`` and a ``method`` of its own.

    Attributes:
        base: Fingerprint of the base.
    """

    method: ClassVar[str] = "rival"
    names: tuple[str, ...]  #: of the LoRAs, in the order of the weights
    #: The weights, as they were set or learnt.
    mix: Mix
    scale: float  #: on every B A
    #: R of the LoRAs.
    rank: Size
    paths: tuple[str, ...]  #: of the modules that were replaced


@dataclass(frozen=True, eq=False)
class Tuned:
    """A base with what a rival put into it: parts that keep the base's own as ``base_layer``."""

    #: The base with its parts.
    model: nn.Module
    #: What it was mixed from.
    origin: Origin
    #: What that took.
    cost: Cost = Cost()
    history: training.History | None = None  #: of the training, if any
    #: What follows its forward passes, to be removed with it.
    hooks: Sequence[RemovableHandle] = ()
    learning: Sequence[str] = ()  #: the base's parameters that trained, and `put` froze

    @property
    def parts(self) -> dict[str, Any]:
        """The modules put in, by path."""
        return {path: self.model.get_submodule(path) for path in self.origin.paths}

    @property
    def merges(self) -> bool:
        """Whether it is one LoRA, whose weights read no input."""
        return type(self.origin) is Origin

    @torch.no_grad()
    def weights(self, batch: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the weights ``[.., N]`` by path: a task's ``[N]``, or those that a batch gets."""
        if batch is None and not self.merges:
            what = f"the weights of {self.origin.method} depend on the input"
            refuse(
                "E-MODEL", f"{what}: give a batch to see them, keep the model by save"
            )
        parts = self.parts
        found = dict[str, Tensor]()
        with evaluating(self.model):
            if batch is None:
                # Such weights read no input, so any tensor will do for one.
                return {path: part.weigh(part.down) for path, part in parts.items()}
            readers = {path: part.weigh for path, part in parts.items()}
            with hooked(readers, lambda path, _, output: found.update({path: output})):
                self.model(**batch, use_cache=False)
        return found

    @torch.no_grad()
    def lora(self, name: str = "merged") -> Lora:
        """Merge a task's weights and LoRAs into one LoRA, or refuse weights that read the input."""
        weights = self.weights()
        mix = self.origin.mix
        factors = {
            path: mixing.joined(part.down, part.up, weights[path].to(part.down), mix)
            for path, part in self.parts.items()
        }
        return mixing.as_lora(
            factors, self.origin.scale, name=name, base=self.origin.base
        )

    def save(self, folder: str | Path) -> Path:
        """Write a new folder: a plain PEFT adapter if it is one LoRA, else our checkpoint."""
        if self.merges:
            place = checkpoint.place(folder)
            return loras.write(self.lora(place.name), place)
        return checkpoint.save(folder, self.origin, tensors(self.model, self.origin))

    @property
    def stored(self) -> int:
        """Bytes of the tensors that `save` writes."""
        lora = self.lora() if self.merges else None
        kept = [lora.down, lora.up] if lora else [tensors(self.model, self.origin)]
        return sum(tensor.nbytes for part in kept for tensor in part.values())

    def detach(self) -> nn.Module:
        """Take the rival off, in place: the base as it was, bit for bit, and what trained of it."""
        for hook in self.hooks:
            hook.remove()
        for path, part in self.parts.items():
            self.model.set_submodule(path, part.base_layer)
        for name in self.learning:
            self.model.get_parameter(name).requires_grad_(True)
        delattr(self.model, self.origin.method)
        return self.model


def tensors(model: nn.Module, origin: Origin) -> dict[str, Tensor]:
    """Return what a rival added to a model, by name, without the base's own."""
    own: dict[str, Tensor] = {}
    for path in origin.paths:
        part = model.get_submodule(path)
        # The part's own tensors, not detached: `checkpoint.load` fills what it gets.
        for name, tensor in part.state_dict(keep_vars=True).items():
            if not name.startswith("base_layer."):
                own[f"{path}.{name}"] = tensor
    return own


@checked
def attach(
    model: nn.Module,
    bank: Bank,
    weigh: Weigh,
    *,
    mix: Mix,
    learnt: bool,
    seed: Seed = 0,
    kind: type[Origin] = Origin,
    **facts: Any,
) -> Tuned:
    """Put a bank's LoRAs beside the linear layers that they adapt, in place, mixed by ``weigh``.

    ``learnt`` says whether the LoRAs train; what trains of ``weigh`` is its own matter, and all
    else is frozen. The ``seed`` decides what ``weigh`` draws; ``facts`` are what ``kind`` has
    beside the fields of `Origin`.
    """
    refuse_second(model)
    parts = mixing.stack(bank, mix)
    base = checkpoint.fingerprint(model)
    for name, lora in bank.items():
        # One that does not tell its base is taken for this one's, if it fits.
        checkpoint.check_base(f"'{name}'", lora.base or base, base)
    loras.check_fits(model, list(bank.values()))
    origin = kind(
        base=base,
        names=tuple(bank),
        mix=mix,
        scale=parts.scale,
        rank=parts.rank,
        paths=tuple(linears(model, list(parts.down))),
        **facts,
    )
    # The caller's random state stays as it is.
    with random_states_kept():
        torch.manual_seed(seed)
        return _install(model, origin, parts.down, parts.up, weigh, learnt=learnt)


def alone(model: nn.Module, lora: Lora, *, learnt: bool) -> Tuned:
    """Put one LoRA on the base, at its full strength."""
    one = mixing.Fixed(torch.ones(1))  # w = 1: y = W x + s B A x
    return attach(
        model, {lora.name: lora}, lambda *_: one, mix="outputs", learnt=learnt
    )


def _install(
    model: nn.Module,
    origin: Origin,
    down: Mapping[str, Tensor],
    up: Mapping[str, Tensor],
    weigh: Weigh,
    *,
    learnt: bool,
) -> Tuned:
    made = {}
    for path in origin.paths:
        linear = model.get_submodule(path)
        at = beside(linear.weight)  # on its device, in float32 or wider
        part = Mixed(
            linear,
            down[path].to(**at),
            up[path].to(**at),
            origin.scale,
            weigh(path, linear).to(**at),
            mix=origin.mix,
        )
        made[path] = part
        part.down.requires_grad_(learnt)
        part.up.requires_grad_(learnt)
    return put(model, origin, made)


def put(model: nn.Module, origin: Origin, made: Mapping[str, Any]) -> Tuned:
    """Freeze the base, and put in what was made of each of its modules, by path."""
    learning = [name for name, part in model.named_parameters() if part.requires_grad]
    # First all is frozen: what is put in says of itself what trains.
    model.requires_grad_(False)
    for path, part in made.items():
        model.set_submodule(path, part.train(part.base_layer.training))
    setattr(model, origin.method, origin)
    return Tuned(model, origin, learning=learning)


def load(
    model: nn.Module,
    folder: str | Path,
    kind: type[Origin],
    weigh: Callable[[Any], Weigh],
    *,
    learnt: Callable[[Any], bool],
) -> Tuned:
    """Restore what `Tuned.save` wrote onto its unaltered base, bit for bit, after all checks.

    ``weigh`` makes, from the origin that the folder holds, what `attach` was given; ``learnt``
    tells from its config whether the LoRAs train.
    """

    def install(host: nn.Module, origin: Any) -> Tuned:
        layers = linears(host, origin.paths)
        check_paths(folder, origin, layers)
        factors = loras.zeros(layers, origin.rank, len(origin.names))
        trains = learnt(origin.config)
        return _install(host, origin, *factors, weigh(origin), learnt=trains)

    return restored(model, folder, kind, install)


def restored(
    model: nn.Module,
    folder: str | Path,
    kind: type[Origin],
    install: Callable[[nn.Module, Any], Tuned],
) -> Tuned:
    """Restore what ``install`` makes of a base and the origin that a folder holds."""
    made: list[Tuned] = []

    def empty(host: nn.Module, origin: Origin) -> dict[str, Tensor]:
        # Called for a copy without values first, and last for the model.
        made.append(install(host, origin))
        return tensors(host, origin)

    refuse_second(model)
    # What is drawn here is written over: the caller's random state stays as it is.
    with random_states_kept():
        checkpoint.load(model, folder, kind, empty)
    return made[-1]


def check_paths(folder: str | Path, origin: Origin, paths: Iterable[str]) -> None:
    """Refuse an origin whose paths are not those of the modules that it would replace."""
    if sorted(origin.paths) != sorted(paths):
        told = f"paths are {shown(origin.paths)}"
        refuse("E-KEYS", f"{folder}: {told}, not those of the base; save it again")


def load_routed(
    model: nn.Module,
    folder: str | Path,
    kind: type[Any],
    router: Callable[[Tensor, Any], nn.Module],
    learnt: Callable[[Any], bool] = lambda _: False,
) -> Tuned:
    """Restore a rival whose router is made of a vector for each LoRA ``[N, D]`` and its config."""

    def weigh(origin: Any) -> Weigh:
        count = len(origin.names)
        return lambda _, part: router(
            torch.zeros(count, part.in_features), origin.config
        )

    return load(model, folder, kind, weigh, learnt=learnt)


def on_shots(model: nn.Module, lora: Lora, data: Data) -> float:
    """Return the mean nats a token on D_K with a LoRA, alone on the base."""
    with loras.attached(model, [lora]):
        return training.nats(model, data.shots, pad_id=data.pad_id)


def refuse_second(model: nn.Module) -> None:
    """Refuse a model that PEFT, a rival or Rocket has been put on already."""
    refuse_adapted(model)
    if any(hasattr(part, "base_layer") for part in model.modules()):
        refuse("E-MODEL", "the model holds a mixture already: detach() takes it off")


def fit(
    tuned: Tuned,
    data: Data,
    *,
    rows: Rows | None = None,
    rate: float | None = None,
    names: Sequence[str] = ("weigh",),
    spent: Cost = Cost(),
    **recipe: Any,
) -> Tuned:
    """Train what requires a gradient on D_K and D_A (or ``rows``) and add up the cost.

    ``rate`` is that of the parameters with one of ``names`` on their path; they do not decay. What
    was ``spent`` before counts too, and is all where nothing trains. A failure takes the rival off
    the model and is passed on.
    """
    model = tuned.model
    trained = count(model, trained=True)
    if not trained:
        return replace(tuned, cost=spent)
    with undone(tuned):
        rows = data.rows if rows is None else rows
        if rate is not None:
            recipe["rates"] = dict.fromkeys(names, rate)
        history = training.fit(model, rows, pad_id=data.pad_id, **recipe)
    tokens = history.tokens[-1]  # of all steps together
    cost = Cost(
        spent.trained + trained, spent.forward + tokens, spent.backward + tokens
    )
    return replace(tuned, cost=cost, history=history)


@contextmanager
def undone(tuned: Tuned) -> Iterator[None]:
    """Take the rival off the model again if this block fails."""
    try:
        yield
    except BaseException:  # an interrupt, too
        tuned.detach()
        raise
