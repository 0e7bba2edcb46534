"""A LoRA in memory, its folder in PEFT's format, and several of them attached to one base.

PEFT itself loads renamed or missing keys, NaN and integer weights without a word or with a mere
warning. Here a folder is either exactly a LoRA of this base, or refused: the layers that its
settings adapt, by lists or patterns as PEFT reads them, are those that its tensors are of.
"""

from __future__ import annotations

import difflib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import peft
import regex
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor, nn
from torch.nn import functional as F

from moebook.errors import located, refuse, shown
from moebook.kernels.dispatch import FLOATS, shapes
from moebook.kernels.matmul import wide
from moebook.models import checkpoint
from moebook.models.anatomy import anatomy, beside
from moebook.models.lora import SETTINGS, TENSORS, write_folder
from moebook.settings import FINITE, Positive, Seed, checked, record, settings
from moebook.storage import read_json

__all__ = [
    "Lora",
    "attached",
    "check_fits",
    "folders",
    "read",
    "write",
]

PICKLE = "adapter_model.bin"
KEY = "base_model.model.{}.lora_{}.weight"


def _factor(tensor: Tensor) -> Tensor:
    """Widen a factor of a LoRA; one of whole numbers is refused, which would be cut off ones."""
    if tensor.dtype not in FLOATS:
        raise PydanticCustomError(
            "dtype", "expected floating-point numbers of 16 bits at least"
        )
    return wide(tensor)


# Its dtype first: whether a number of 8 bits is finite torch does not say.
Factors = dict[str, Annotated[Tensor, AfterValidator(_factor), FINITE]]
NOTED = "base as PEFT notes it"  # in which LoRAs of one group may differ
SECONDS = 0.5  # of the processor, for all patterns of one file of settings together
ALL = "all-linear"  # what PEFT takes for all linear layers but the head
Rank = Annotated[int, Field(ge=1, le=4096)]
Alpha = Annotated[float, Field(gt=0, le=2**16)]
Text = Annotated[str, Field(max_length=1000)]
Texts = Annotated[list[Text], Field(max_length=10_000)]
Pattern = Annotated[str, Field(max_length=10_000)]  # a regular expression
Name = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$", max_length=200)]
Value = TypeVar("Value")


@settings
class Plain:
    """The fields of ``adapter_config.json`` that plain LoRA has; any other must be unused."""

    peft_type: Literal["LORA"]
    r: Rank
    lora_alpha: Alpha
    target_modules: Texts | Pattern
    exclude_modules: Texts | Pattern | None = None
    layers_to_transform: Annotated[list[int], Field(max_length=10_000)] | int | None = (
        None
    )
    layers_pattern: Annotated[list[Name], Field(max_length=100)] | Name | None = None
    rank_pattern: dict[Pattern, Rank] | None = None
    alpha_pattern: dict[Pattern, Alpha] | None = None
    task_type: Literal["CAUSAL_LM", None] = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    inference_mode: bool = False
    # Other starts alter the base's own weights.
    init_lora_weights: Literal[True, False, None, "gaussian", "orthogonal"] = True
    fan_in_fan_out: bool = False  # which PEFT takes back for `nn.Linear`
    # Notes on the base's class, by which nothing is imported here.
    auto_mapping: Any = None
    base_model_name_or_path: Text | None = None
    revision: Text | None = None
    peft_version: Text | None = None


@record
class Facts:
    """What the manifest of a LoRA's folder keeps of it, where known."""

    base: str | None = None
    data: str | None = None
    prompts: list[str] | None = None
    training: dict[str, Any] | None = None
    losses: list[float] | None = None


@record
class Lora:
    """A LoRA ``W + scale * B A`` over linear layers of one base, in float32 or wider, as PEFT's.

    ``provenance`` tells how it was made, where known: ``data`` (name), ``prompts`` (hashes),
    ``training`` (settings), ``losses`` (nats a token, one a step), ``base`` (as PEFT noted it).
    """

    #: What it is called in its bank.
    name: str
    rank: Annotated[int, Field(ge=1)]  #: R
    #: Numerator of its scale.
    alpha: Positive
    down: Factors  #: A [R, D] by path of the linear layer, in order
    up: Factors  #: B [O, R] by the same paths
    base: str | None = None  #: fingerprint of the base, None where it is not known
    #: Scale by alpha / sqrt R instead of alpha / R (rsLoRA).
    rank_stabilised: bool = False
    #: How it was made, see above.
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        label = f"LoRA '{self.name}'"
        odd = sorted(self.down.keys() ^ self.up.keys())
        if odd:
            refuse(
                "E-KEYS",
                f"{label}: layer {odd[0]} has one factor, expected both, down and up",
            )
        if not self.down:
            refuse(
                "E-KEYS", f"{label} adapts no layer, expected factors of one at least"
            )
        for path, down in self.down.items():
            factors = {"down": (down, "R D"), "up": (self.up[path], "O R")}
            rank = shapes(f"{label}, {path}", factors, empty="")["R"]
            if rank != self.rank:
                refuse(
                    "E-SHAPE",
                    f"{label}: rank is {self.rank}, layer {path} has rank {rank}",
                )

    @property
    def scale(self) -> float:
        """The number that B A is multiplied by, alpha / R or alpha / sqrt R."""
        return _scale(self.alpha, self.rank, self.rank_stabilised)

    @property
    def targets(self) -> tuple[str, ...]:
        """Last names of the linear layers, sorted, as in ``("q_proj", "v_proj")``."""
        return tuple(sorted({path.rpartition(".")[2] for path in self.down}))

    @property
    def digest(self) -> str:
        """Hash of what it computes, by alpha's scale, names and bytes of the factors."""
        return f"{self.scale!r} {checkpoint.hashed(self._tensors())}"

    def _tensors(self) -> dict[str, Tensor]:
        """Return the factors by PEFT's names."""
        down = {KEY.format(path, "A"): tensor for path, tensor in self.down.items()}
        up = {KEY.format(path, "B"): tensor for path, tensor in self.up.items()}
        return down | up

    @property
    def idle(self) -> bool:
        """Whether ``B A`` is zero in every layer, as in a LoRA that was never trained."""
        for path in self.down:
            # In float64, where products of tiny factors do not vanish.
            added = self.up[path].double() @ self.down[path].double()
            if added.any():
                return False
        return True


def _scale(alpha: float, rank: int, rank_stabilised: bool) -> float:
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def linears(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """Return the linear layers whose path is, or ends in, one of the target names, in order."""
    layers = {}
    unused = set(targets)
    for path, module in model.named_modules():
        hits = {name for name in targets if path == name or path.endswith(f".{name}")}
        if hits and hasattr(module, "in_features") and hasattr(module, "out_features"):
            layers[path] = module
            unused -= hits
    if unused:
        refuse("E-KEYS", f"the base has no linear layer named {sorted(unused)[:3]}")
    return layers


def zeros(
    layers: Mapping[str, nn.Module], rank: int, *count: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return A ``[R, D]`` and B ``[O, R]`` of zeros by path, or so many of each, ``[N, R, D]``."""
    down: dict[str, Tensor] = {}
    up: dict[str, Tensor] = {}
    for path, layer in layers.items():
        down[path] = torch.zeros(*count, rank, layer.in_features)
        up[path] = torch.zeros(*count, layer.out_features, rank)
    return down, up


def check_alike(group: Sequence[Lora], *, ranks: bool = True) -> None:
    """Refuse LoRAs that cannot stand in one group, saying in what; in ``ranks`` if so set."""
    if not group:
        refuse("E-BANK", "no LoRA is given, expected one at least")
    first: dict[str, tuple[Lora, object]] = {}  # who first told it, and what it is
    for lora in group:
        for what, told in _kind(lora, ranks=ranks).items():
            owner, wanted = first.setdefault(what, (lora, told))
            if told != wanted:
                names = f"'{owner.name}' and '{lora.name}'"
                pair = f"{wanted} and {told}"
                fix = "keep one kind"
                if what == NOTED:
                    fix += f", or edit base_model_name_or_path in {SETTINGS} if they are one"
                refuse("E-BANK", f"{names} differ in {what}: {pair}; {fix}")
        odd = sorted(group[0].down.keys() ^ lora.down.keys())
        if odd:
            names = f"'{group[0].name}' and '{lora.name}'"
            refuse("E-BANK", f"{names} differ in layers: {odd[0]}")
    check_widths(group)


def check_widths(group: Iterable[Lora]) -> None:
    """Refuse LoRAs whose A or B are of linear layers of other widths, by their paths."""
    first: dict[str, tuple[Lora, tuple[int, int]]] = {}  # who first adapts it, D and O
    for lora in group:
        for path, down in lora.down.items():
            widths = (down.shape[1], lora.up[path].shape[0])
            owner, wanted = first.setdefault(path, (lora, widths))
            if widths != wanted:
                names = f"'{owner.name}' and '{lora.name}'"
                pair = f"{path} is [D, O] = {[*wanted]} and {[*widths]}"
                refuse("E-SHAPE", f"{names}: {pair}; take LoRAs of one base")


def _kind(lora: Lora, *, ranks: bool) -> dict[str, object]:
    """What LoRAs of one group have alike. A base that is not known is no difference."""
    kind: dict[str, object] = {"targets": lora.targets, "layers": len(lora.down)}
    if ranks:
        kind = {"rank": lora.rank, **kind}
    if lora.base:
        kind["base"] = lora.base
    noted = lora.provenance.get("base")
    if noted:
        # A folder here may be written in several ways.
        kind[NOTED] = os.path.realpath(noted) if os.path.isdir(noted) else noted
    return kind


def check_fits(model: nn.Module, loras: Sequence[Lora]) -> None:
    """Refuse LoRAs whose factors do not fit the base's linear layers."""
    modules = dict(model.named_modules())
    for lora in loras:
        for path, down in lora.down.items():
            layer = modules.get(path)
            sizes = (
                getattr(layer, "in_features", None),
                getattr(layer, "out_features", None),
            )
            wanted = down.shape[1], lora.up[path].shape[0]
            if None in sizes:
                refuse(
                    "E-KEYS",
                    f"'{lora.name}' adapts {path}, no linear layer of the base",
                )
            if sizes != wanted:
                turns = f"turns {wanted[0]} numbers into {wanted[1]} at {path}"
                refuse(
                    "E-SHAPE",
                    f"'{lora.name}' {turns}, the base {sizes[0]} into {sizes[1]}",
                )


def check_mixable(model: nn.Module, loras: Sequence[Lora]) -> None:
    """Refuse LoRAs that do not fit the base, or adapt what is in none of its decoder's layers.

    `attached` runs those, on the head too; Rocket scores and mixes in the layers alone.
    """
    check_fits(model, loras)
    inside: set[nn.Module] = set()
    for layer in anatomy(model).layers:
        inside.update(layer.block.modules())
    for lora in loras:
        for path in lora.down:
            if model.get_submodule(path) not in inside:
                place = f"'{lora.name}' adapts {path}, outside of the decoder's layers"
                refuse("E-KEYS", f"{place}; leave it out, or train it on the layers")


@contextmanager
def attached(model: nn.Module, loras: Sequence[Lora]) -> Iterator[None]:
    """Run the base with N alike LoRAs in this block: rows in N equal parts, one part a LoRA.

    Equals PEFT's LoRA, and a mixture of one, without LoRA's own dropout, by forward hooks.
    """
    check_alike(loras)
    check_fits(model, loras)
    with ExitStack() as hooks:
        for path in loras[0].down:
            linear = model.get_submodule(path)
            # A' [N, D, R] and scale B' [N, R, O], as `_adding` multiplies them; in
            # float32 beside a base in 16 bits, as in PEFT.
            down = torch.stack([lora.down[path] for lora in loras]).mT.to(
                **beside(linear.weight)
            )
            up = torch.stack([lora.up[path] * lora.scale for lora in loras]).mT.to(down)
            hooks.enter_context(linear.register_forward_hook(_adding(down, up)))
        yield


def _adding(down: Tensor, up: Tensor) -> Callable[..., Tensor]:
    """Make the hook that adds ``x A_n B_n`` to the n-th part of the rows, or to one row for all."""

    def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        loras = len(down)
        if len(output) != 1 and len(output) % loras:
            held = f"{loras} LoRAs, expected an equal part of the rows for each"
            refuse("E-SHAPE", f"attached: {len(output)} rows for {held}")
        # Each LoRA has a part of the rows; a single row is read by all of them.
        parts = 1 if len(output) == 1 else loras
        x = args[0].unflatten(0, (parts, -1)).flatten(1, -2)  # [parts, B T, D]
        base = output.unflatten(0, (parts, -1)).flatten(1, -2)  # [parts, B T, O]
        x = x.to(down.dtype).expand(loras, -1, -1)
        base = base.expand(loras, -1, -1)

        low = torch.bmm(x, down)  # [N, B T, R]
        if base.dtype == up.dtype:
            total = torch.baddbmm(base, low, up)  # [N, B T, O]
        else:  # added in the wider dtype, rounded once
            total = (base + torch.bmm(low, up)).to(output.dtype)
        return total.view(-1, *output.shape[1:])

    return add


def folders(folder: str | Path) -> list[Path]:
    """Return the PEFT folders of a folder, sorted by name."""
    place = checkpoint.place(os.path.expanduser(folder))
    paths = sorted(path.parent for path in place.glob(f"[!.]*/{SETTINGS}"))
    return paths or refuse(
        "E-BANK", f"{folder} holds no LoRA; expected folders with {SETTINGS}"
    )


def read(folder: Path, model: nn.Module, base: str) -> Lora:
    """Read a PEFT folder as a LoRA of the unaltered base of this fingerprint; nothing is run."""
    checkpoint.place(folder)
    manifest = checkpoint.verify(folder) if checkpoint.sealed(folder) else {}
    with located(folder):
        known = [key for key in Facts.__annotations__ if key in manifest]
        facts = Facts(**{key: manifest[key] for key in known})
    plain = _plain(folder / SETTINGS)
    checkpoint.check_base(folder, facts.base or base, base)
    _refuse_pickle(folder)

    # By its settings: the names and, on meta, the shapes that its tensors must have.
    patterns = _Patterns(folder / SETTINGS)
    layers = _adapted(plain, model, patterns)
    ranks = patterns.chosen(plain.rank_pattern or {}, layers, plain.r)
    alphas = patterns.chosen(plain.alpha_pattern or {}, layers, plain.lora_alpha)
    expected: dict[str, Tensor] = {}
    for path, layer in layers.items():
        size = ranks[path]
        expected[KEY.format(path, "A")] = torch.empty(
            size, layer.in_features, device="meta"
        )
        expected[KEY.format(path, "B")] = torch.empty(
            layer.out_features, size, device="meta"
        )
    tensors = checkpoint.read(folder / TENSORS, expected, exact=False)
    down = {path: tensors[KEY.format(path, "A")] for path in layers}
    up = {path: tensors[KEY.format(path, "B")] for path in layers}

    rank, alpha = _made_alike(plain, ranks, alphas, down, up)
    provenance: dict[str, Any] = {}
    for key, value in vars(facts).items():
        if key != "base" and value is not None:
            provenance[key] = value
    if plain.base_model_name_or_path and not manifest:
        provenance["base"] = plain.base_model_name_or_path
    return Lora(
        folder.name,
        rank,
        alpha,
        down,
        up,
        facts.base,
        rank_stabilised=plain.use_rslora,
        provenance=provenance,
    )


def _made_alike(
    plain: Plain,
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    down: dict[str, Tensor],
    up: dict[str, Tensor],
) -> tuple[int, float]:
    """Bring factors by path to one rank and one scale, which a `Lora` has; return rank and alpha.

    Zeros fill A and B up to the largest rank, which leaves B A alone; B takes the ratio of scales.
    """
    if len({*ranks.values()}) == len({*alphas.values()}) == 1:
        return next(iter(ranks.values())), next(iter(alphas.values()))
    rank = max(ranks.values())
    alpha = plain.lora_alpha
    scale = _scale(alpha, rank, plain.use_rslora)
    for path in down:
        missing = rank - ranks[path]
        own = _scale(alphas[path], ranks[path], plain.use_rslora)
        down[path] = F.pad(wide(down[path]), (0, 0, 0, missing))  # [R, D]
        up[path] = F.pad(wide(up[path]) * (own / scale), (0, missing))  # [O, R]
    return rank, alpha


def _refuse_pickle(folder: Path) -> None:
    """Refuse weights that can run code; pass them over where safe ones stand beside."""
    pickle = folder / PICKLE
    if not pickle.is_file():
        return
    if not (folder / TENSORS).is_file():
        refuse("E-PICKLE", f"{pickle} can run code; save it as {TENSORS}")
    warnings.warn(f"W-PICKLE: {pickle} is not read, {TENSORS} is", stacklevel=3)


def _adapted(
    plain: Plain, model: nn.Module, patterns: _Patterns
) -> dict[str, nn.Module]:
    """Return the base's linear layers that PEFT adapts by these settings, in order.

    Names that the base lacks are passed over, as PEFT does, unless it lacks them all. Lists are
    PEFT's to read, patterns are not: its search for a stranger's may take for ever.
    """
    targets = plain.target_modules
    excluded = plain.exclude_modules
    layers = {}
    for path, module in model.named_modules():
        if hasattr(module, "in_features") and hasattr(module, "out_features"):
            layers[path] = module
    try:
        lists = LoraConfig(
            target_modules=targets,
            exclude_modules=excluded,
            layers_to_transform=plain.layers_to_transform,
            layers_pattern=plain.layers_pattern,
        )
    except ValueError as error:
        refuse("E-CONFIG", f"{patterns.where}: PEFT refuses it: {error}")
    chosen = set(layers)
    if isinstance(targets, str):
        # Found by ourselves: to PEFT, which heeds the lists, every layer is a target.
        lists.target_modules = set(layers)
        if targets.lower() == ALL:
            head = model.get_output_embeddings()
            chosen = {path for path in layers if layers[path] is not head}
        else:
            chosen = patterns.whole(targets, layers)
    if isinstance(excluded, str):
        lists.exclude_modules = None
        chosen -= patterns.whole(excluded, layers)
    adapted = {}
    for path, layer in layers.items():
        if path in chosen and check_target_module_exists(lists, path):
            adapted[path] = layer
    if not adapted:
        named = f"target_modules {shown(targets)} fit no linear layer of the base"
        refuse("E-KEYS", f"{patterns.where}: {named}; is it of another base?")
    return adapted


class _Patterns:
    """The regular expressions of one file of settings, with a limit on the time that they take."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.end = time.process_time() + SECONDS

    def whole(self, pattern: str, paths: Iterable[str]) -> set[str]:
        """Return the paths that are, from beginning to end, what a pattern describes."""
        return self._found(pattern, regex.fullmatch, paths)

    def chosen(
        self, values: Mapping[str, Value], paths: Iterable[str], otherwise: Value
    ) -> dict[str, Value]:
        """Return each path's value: that of the first pattern of its end, or the usual one."""
        given = dict.fromkeys(paths, otherwise)
        left = set(given)
        for pattern, value in values.items():
            for path in self._found(rf"(.*\.)?({pattern})$", regex.match, left):
                given[path] = value
                left.remove(path)
        return given

    def _found(
        self, pattern: str, match: Callable[..., Any], paths: Iterable[str]
    ) -> set[str]:
        """Return the paths that match, or refuse a pattern that is none or takes too long."""
        try:
            matching = set()
            for path in paths:
                # To `regex` a negative timeout means no limit.
                seconds = max(self.end - time.process_time(), 1e-3)
                if match(pattern, path, timeout=seconds):
                    matching.add(path)
            return matching
        except (
            regex.error,
            TimeoutError,
            RecursionError,
            MemoryError,
            OverflowError,
        ) as error:
            problem = f"{type(error).__name__}: {error!s:.100}; name the layers in full"
            refuse("E-CONFIG", f"{self.where}: pattern {shown(pattern)}: {problem}")


@checked
def rotated(lora: Lora, seed: Seed) -> Lora:
    """Give a LoRA other factors of the same ``B A``: ``B Q^T`` and ``Q A``, Q orthogonal.

    Q ``[R, R]`` is drawn for each layer. What the LoRA computes stays, and so do the cosines of
    its ``B A`` with others'. What its A and B, each by itself, have in common with theirs goes.
    """
    generator = torch.Generator().manual_seed(seed)
    down = {}
    up = {}
    for path, before in lora.down.items():
        # B Q' Q A = B A. Turned in float64, so that each factor is rounded once.
        square = torch.randn(lora.rank, lora.rank, generator=generator).double()
        turn = torch.linalg.qr(square).Q  # orthogonal
        down[path] = (turn @ before.double()).to(before.dtype)
        up[path] = (lora.up[path].double() @ turn.T).to(before.dtype)
    return replace(lora, down=down, up=up)


def write(lora: Lora, folder: Path) -> Path:
    """Write a LoRA as a new PEFT folder with a manifest: PEFT reads it, and so does `read`."""
    checkpoint.place(folder)
    facts = {**lora.provenance, "base": lora.base}
    form: dict[str, Any] = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.down),
        "use_rslora": lora.rank_stabilised,
    }
    return write_folder(folder, form, lora._tensors(), **facts)


def _plain(path: Path) -> Plain:
    """Read ``adapter_config.json`` and refuse every field that plain LoRA has no use for."""
    content = read_json(path)
    every = LoraConfig().to_dict()  # PEFT's fields, at their defaults
    known = Plain.__annotations__
    for name, value in content.items():
        unused = (
            value is None
            or value is False
            or value in ({}, [])
            or value == every.get(name)
        )
        if name in known or unused:
            continue
        guess = difflib.get_close_matches(name, every, n=1, cutoff=0.8)
        expected = f"{every.get(name)!r}, as plain LoRA has it"
        if name not in every:
            unknown = f"which PEFT {peft.__version__} does not know"
            expected = f"none, {unknown}"
            if guess:
                expected = f"{unknown}: did you mean '{guess[0]}'?"
        refuse("E-CONFIG", f"{path}: {name} is {shown(value)}, expected {expected}")
    with located(path):
        return Plain(**{name: content[name] for name in known if name in content})
