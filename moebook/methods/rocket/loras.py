"""A LoRA in memory, its folder in PEFT's format, and several of them attached to one base.

PEFT itself loads renamed or missing keys, NaN, integer weights and regular expressions without a
word or with a mere warning. Here a folder is either exactly a LoRA of this base, or refused.
"""

from __future__ import annotations

import difflib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import peft
import torch
from peft import LoraConfig
from pydantic import AfterValidator, Field
from torch import Tensor, nn

from moebook.errors import located, refuse, shown
from moebook.kernels.matmul import wide
from moebook.models import checkpoint
from moebook.models.anatomy import beside
from moebook.results import read_json
from moebook.settings import FINITE, record, settings

SETTINGS, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
KEY = "base_model.model.{}.lora_{}.weight"
Factors = dict[str, Annotated[Tensor, FINITE, AfterValidator(wide)]]
Name = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z_]\w*(\.\w+)*$")]
Text = Annotated[str, Field(max_length=1000)] | None
# The base's class and module, which PEFT notes: one of transformers, never imported here.
Mapped = dict[str, Annotated[str, Field(pattern=r"^transformers\.|^[A-Z]\w*$")]]


@settings
class Plain:
    """The fields of ``adapter_config.json`` that plain LoRA has; any other must be unused."""

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1, le=4096)]
    lora_alpha: Annotated[float, Field(gt=0, le=2**16)]
    target_modules: Annotated[list[Name], Field(min_length=1, max_length=100)]
    task_type: Literal["CAUSAL_LM", None] = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    inference_mode: bool = False
    # Other starts alter the base's own weights.
    init_lora_weights: Literal[True, False, None, "gaussian", "orthogonal"] = True
    auto_mapping: Mapped | None = None
    base_model_name_or_path: Text = None
    revision: Text = None
    peft_version: Text = None


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

    name: str
    rank: Annotated[int, Field(ge=1)]  # R
    alpha: float
    down: Factors  # A [R, D] by path of the linear layer, in order
    up: Factors  # B [O, R] by the same paths
    base: str | None = None  # fingerprint of the base, None where it is not known
    rank_stabilised: bool = False  # scale by alpha / sqrt R instead of alpha / R (rsLoRA)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """Factor on B A: alpha / R, or alpha / sqrt R."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    @property
    def targets(self) -> tuple[str, ...]:
        """Last names of the linear layers, sorted: ``("q_proj", "v_proj")``."""
        return tuple(sorted({path.rpartition(".")[2] for path in self.down}))

    @property
    def digest(self) -> str:
        """Hash of what it computes: alpha's scale, names and bytes of the factors."""
        return f"{self.scale!r} {checkpoint.hashed(self._tensors())}"

    def _tensors(self) -> dict[str, Tensor]:
        """Return the factors by PEFT's names."""
        tensors = {KEY.format(path, "A"): tensor for path, tensor in self.down.items()}
        return tensors | {KEY.format(path, "B"): tensor for path, tensor in self.up.items()}

    @property
    def idle(self) -> bool:
        """Whether ``B A`` is zero in every layer, as in a LoRA that was never trained."""
        return not any((self.up[p].double() @ self.down[p].double()).any() for p in self.down)


def linears(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """Return the linear layers whose path is, or ends in, one of the target names, in order."""
    layers, unused = {}, set(targets)
    for path, module in model.named_modules():
        hits = {name for name in targets if path == name or path.endswith(f".{name}")}
        if hits and hasattr(module, "in_features") and hasattr(module, "out_features"):
            layers[path] = module
            unused -= hits
    if unused:
        refuse("E-KEYS", f"the base has no linear layer named {sorted(unused)[:3]}")
    return layers


@contextmanager
def attached(model: nn.Module, loras: Sequence[Lora]) -> Iterator[None]:
    """Run the base with N alike LoRAs in this block: rows in N equal parts, one part a LoRA.

    Equals PEFT's LoRA, and a mixture of one, without LoRA's own dropout, by forward hooks.
    """
    with ExitStack() as hooks:
        for path in loras[0].down:
            linear = model.get_submodule(path)
            down = torch.stack([lora.down[path] for lora in loras]).mT.to(**beside(linear.weight))
            up = torch.stack([lora.up[path] * lora.scale for lora in loras]).mT.to(down)
            hooks.enter_context(linear.register_forward_hook(_adding(down, up)))
        yield


def _adding(down: Tensor, up: Tensor) -> Callable[..., Tensor]:
    """Make the hook that adds ``x A_n B_n`` to the n-th part of the rows, or to one row for all."""

    def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        loras, parts = len(down), 1 if len(output) == 1 else len(down)
        x, base = (t.unflatten(0, (parts, -1)).flatten(1, -2) for t in (args[0], output))
        low = torch.bmm(x.to(down.dtype).expand(loras, -1, -1), down)  # [N, B T, D] -> [N, B T, R]
        base = base.expand(loras, -1, -1)
        if base.dtype == up.dtype:
            return torch.baddbmm(base, low, up).view(-1, *output.shape[1:])
        return (base + torch.bmm(low, up)).to(output.dtype).view(-1, *output.shape[1:])

    return add


def folders(folder: str | Path) -> list[Path]:
    """Return the PEFT folders of a folder, sorted by name."""
    paths = sorted(path.parent for path in Path(folder).glob(f"[!.]*/{SETTINGS}"))
    return paths or refuse("E-BANK", f"{folder} holds no LoRA; expected folders with {SETTINGS}")


def read(folder: Path, model: nn.Module, base: str) -> Lora:
    """Read a PEFT folder as a LoRA of the unaltered base of this fingerprint; nothing is run."""
    manifest = checkpoint.verify(folder) if checkpoint.sealed(folder) else {}
    with located(folder):
        facts = Facts(**{key: manifest[key] for key in Facts.__annotations__ if key in manifest})
    plain = _plain(folder / SETTINGS)
    checkpoint.check_base(folder, facts.base or base, base)
    if (folder / PICKLE).is_file():
        if not (folder / TENSORS).is_file():
            refuse("E-PICKLE", f"{folder / PICKLE} can run code; save it as {TENSORS}")
        warnings.warn(f"W-PICKLE: {folder / PICKLE} is not read, {TENSORS} is", stacklevel=2)
    rank, layers = plain.r, linears(model, plain.target_modules)
    shapes = {KEY.format(path, "A"): (rank, part.in_features) for path, part in layers.items()}
    shapes |= {KEY.format(path, "B"): (part.out_features, rank) for path, part in layers.items()}
    expected = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    tensors = checkpoint.read(folder / TENSORS, expected, exact=False)
    provenance = {key: v for key, v in vars(facts).items() if key != "base" and v is not None}
    if plain.base_model_name_or_path and not manifest:
        provenance["base"] = plain.base_model_name_or_path
    down = {path: tensors[KEY.format(path, "A")] for path in layers}
    up = {path: tensors[KEY.format(path, "B")] for path in layers}
    kept: dict[str, Any] = {"rank_stabilised": plain.use_rslora, "provenance": provenance}
    return Lora(folder.name, rank, plain.lora_alpha, down, up, facts.base, **kept)


def write(lora: Lora, folder: Path) -> Path:
    """Write a LoRA as a new PEFT folder with a manifest: PEFT reads it, and so does `read`."""
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets),
        use_rslora=lora.rank_stabilised, task_type="CAUSAL_LM", inference_mode=True,
    )  # fmt: skip
    settings = {n: sorted(v) if isinstance(v, set) else v for n, v in config.to_dict().items()}
    text = json.dumps(settings, indent=1, sort_keys=True).encode()
    files = {TENSORS: checkpoint.packed(lora._tensors()), SETTINGS: text}
    return checkpoint.write(folder, files, **{**lora.provenance, "base": lora.base})


def _plain(path: Path) -> Plain:
    """Read ``adapter_config.json`` and refuse every field that plain LoRA has no use for."""
    content, every, known = read_json(path), LoraConfig().to_dict(), Plain.__annotations__
    for name, value in content.items():
        unused = value is None or value is False or value in ({}, []) or value == every.get(name)
        if name in known or unused:
            continue
        guess = difflib.get_close_matches(name, every, n=1, cutoff=0.8)
        expected = f"{every.get(name)!r}, as plain LoRA has it"
        if name not in every:
            unknown = f"which PEFT {peft.__version__} does not know"
            expected = f"{unknown}: did you mean '{guess[0]}'?" if guess else f"none, {unknown}"
        refuse("E-CONFIG", f"{path}: {name} is {shown(value)}, expected {expected}")
    with located(path):
        return Plain(**{name: content[name] for name in known if name in content})
