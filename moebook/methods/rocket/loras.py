"""One LoRA in memory, and its folder in PEFT's format: strictly checked before anything uses it.

PEFT itself loads renamed or missing keys, NaN, integer weights and regular expressions without a
word or with a mere warning. Here a folder is either exactly a LoRA of this base, or refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from moebook.errors import nearest, refuse
from moebook.models import checkpoint

SETTINGS, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
KEY = "base_model.model.{}.lora_{}.weight"
LARGEST_RANK, LARGEST_ALPHA = 512, 2.0**16
KEPT = ("data", "prompts", "training", "losses")  # of the provenance, in a folder's manifest
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_STARTS = (None, True, False, "gaussian", "orthogonal")  # others change the base's own weights
_FREE = {"base_model_name_or_path", "revision", "peft_version"}
_REQUIRED = ("peft_type", "r", "lora_alpha", "target_modules")


@dataclass(frozen=True, eq=False)
class Lora:
    """A LoRA ``W + scale * B A`` over linear layers of one base.

    Attributes:
        name: Its name in the bank.
        rank: R.
        alpha: LoRA's alpha.
        down: A ``[R, D]`` by path of the linear layer, paths in order.
        up: B ``[O, R]`` by the same paths.
        base: Fingerprint of the base, None where it is not known.
        rank_stabilised: Scale by alpha / sqrt R instead of alpha / R (rsLoRA).
        provenance: How it was made, where known: ``data`` (name), ``prompts`` (hashes),
            ``training`` (settings), ``losses`` (nats a token, one a step), ``base`` (the name that
            PEFT noted).
    """

    name: str
    rank: int
    alpha: float
    down: dict[str, Tensor]
    up: dict[str, Tensor]
    base: str | None = None
    rank_stabilised: bool = False
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
        """Hash of what it computes: alpha's scale, names and bytes of the factors (sha256)."""
        digest = hashlib.sha256(repr(self.scale).encode())
        for path in sorted(self.down):
            for tensor in (self.down[path], self.up[path]):
                digest.update(f"{path} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def idle(self) -> bool:
        """Whether ``B A`` is zero in every layer, as in a LoRA that was never trained."""
        return not any((self.up[p].double() @ self.down[p].double()).any() for p in self.down)


def linears(model: nn.Module, targets: tuple[str, ...] | list[str]) -> dict[str, nn.Module]:
    """Return the linear layers whose path is, or ends in, one of the target names, in order.

    Raises:
        Refusal: E-KEYS for a name that no linear layer of the model bears.
    """
    found = {}
    unused = set(targets)
    for path, module in model.named_modules():
        hits = {name for name in targets if path == name or path.endswith(f".{name}")}
        if hits and hasattr(module, "in_features") and hasattr(module, "out_features"):
            found[path] = module
            unused -= hits
    if unused:
        refuse("E-KEYS", f"the base has no linear layer named {sorted(unused)[:3]}")
    return found


def read(folder: Path, model: nn.Module, base: str) -> Lora:
    """Read a PEFT folder as a LoRA of this base, after all checks; nothing is fetched or run.

    Args:
        folder: ``adapter_config.json`` and ``adapter_model.safetensors``, ours (then with a
            manifest that ties it to its base) or anyone's.
        model: The base, unaltered.
        base: Its fingerprint.

    Raises:
        Refusal: E-NOFILE, E-PICKLE, E-FORMAT, E-CONFIG, E-RANGE, E-LIMIT, E-KEYS, E-SHAPE,
            E-NONFINITE, E-BASE, and E-MANIFEST or E-HASH for a changed folder of ours.
    """
    facts = checkpoint.verify(folder) if (folder / checkpoint.MANIFEST).is_file() else {}
    settings = _settings(folder / SETTINGS)
    checkpoint.check_base(folder, str(facts.get("base", base)), base)
    if (folder / PICKLE).is_file():
        if not (folder / TENSORS).is_file():
            refuse("E-PICKLE", f"{folder / PICKLE} can run code; save it as {TENSORS}")
        warnings.warn(f"W-PICKLE: {folder / PICKLE} is not read, {TENSORS} is", stacklevel=2)
    rank, layers = settings["r"], linears(model, settings["target_modules"])
    factors = {KEY.format(p, "A"): (rank, m.in_features) for p, m in layers.items()}
    factors |= {KEY.format(p, "B"): (m.out_features, rank) for p, m in layers.items()}
    expected = {name: torch.empty(shape, device="meta") for name, shape in factors.items()}
    tensors = checkpoint.read(folder / TENSORS, expected, exact=False)
    return Lora(
        name=folder.name,
        rank=rank,
        alpha=float(settings["lora_alpha"]),
        down={path: tensors[KEY.format(path, "A")] for path in layers},
        up={path: tensors[KEY.format(path, "B")] for path in layers},
        base=facts.get("base"),
        rank_stabilised=settings.get("use_rslora") is True,
        provenance=_provenance(facts, settings),
    )


def write(lora: Lora, folder: Path) -> Path:
    """Write a LoRA as a new PEFT folder with a manifest: PEFT reads it, and so does `read`.

    Raises:
        Refusal: E-EXISTS when the folder exists, E-NONFINITE for a tensor with NaN or infinity.
    """
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        use_rslora=lora.rank_stabilised,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    settings = {n: sorted(v) if isinstance(v, set) else v for n, v in config.to_dict().items()}
    tensors = {KEY.format(path, "A"): tensor for path, tensor in lora.down.items()}
    tensors |= {KEY.format(path, "B"): tensor for path, tensor in lora.up.items()}
    files = {
        TENSORS: checkpoint.packed(tensors),
        SETTINGS: json.dumps(settings, indent=1, sort_keys=True).encode(),
    }
    return checkpoint.write(folder, files, **{**lora.provenance, "base": lora.base})


def _provenance(facts: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    if facts:
        return {key: facts[key] for key in KEPT if key in facts}
    name = settings.get("base_model_name_or_path")
    return {"base": name} if name else {}


def _settings(path: Path) -> dict[str, Any]:
    """Read ``adapter_config.json`` and refuse every field that is not plain LoRA's."""
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing; expected a folder in PEFT's format")
    try:
        content = json.loads(path.read_bytes()[: 2**20])
    except (ValueError, RecursionError) as error:
        refuse("E-FORMAT", f"{path} is not JSON ({error}); fetch it again")
    if not isinstance(content, dict):
        refuse("E-FORMAT", f"{path}: expected a JSON object, found a {type(content).__name__}")
    for name in _REQUIRED:
        if name not in content:
            refuse("E-CONFIG", f"{path}: field '{name}' is missing")
    plain = LoraConfig().to_dict()
    rules = _rules(content)
    for name, value in content.items():
        if name not in plain:
            refuse("E-CONFIG", f"{path}: unknown field '{name}'; {nearest(name, plain)}")
        if name in rules:
            good, code, expected = rules[name]
        elif name in _FREE:
            good, code = value is None or (isinstance(value, str) and len(value) < 1000), "E-CONFIG"
            expected = "a short text or null"
        else:
            good = value is None or value is False or value in ({}, []) or value == plain[name]
            code, expected = "E-CONFIG", f"{plain[name]!r}: only plain LoRA can be read"
        if not good:
            refuse(code, f"{path}: {name} is {str(value)[:60]!r}, expected {expected}")
    return content


def _rules(content: dict[str, Any]) -> dict[str, tuple[bool, str, str]]:
    """What each field of plain LoRA must be: (holds, code, what was expected)."""
    rank, alpha = content["r"], content["lora_alpha"]
    dropout, targets = content.get("lora_dropout", 0), content["target_modules"]
    start = content.get("init_lora_weights")
    return {
        "peft_type": (content["peft_type"] == "LORA", "E-CONFIG", "'LORA'"),
        "task_type": (content.get("task_type") in (None, "CAUSAL_LM"), "E-CONFIG", "'CAUSAL_LM'"),
        "r": (
            type(rank) is int and 1 <= rank <= LARGEST_RANK,
            "E-RANGE",
            f"a whole number from 1 to {LARGEST_RANK}",
        ),
        "lora_alpha": (
            _number(alpha) and 0 < alpha <= LARGEST_ALPHA,
            "E-RANGE",
            f"a number above 0, at most {LARGEST_ALPHA:g}",
        ),
        "lora_dropout": (_number(dropout) and 0 <= dropout < 1, "E-RANGE", "a number in [0, 1)"),
        "target_modules": (_names(targets), "E-CONFIG", "a list of names (no regular expression)"),
        "auto_mapping": (_known_class(content.get("auto_mapping")), "E-CONFIG", "transformers'"),
        "use_rslora": (type(content.get("use_rslora")) is bool, "E-CONFIG", "true or false"),
        "inference_mode": (type(content.get("inference_mode")) is bool, "E-CONFIG", "a boolean"),
        "init_lora_weights": (
            any(start is each or (isinstance(each, str) and start == each) for each in _STARTS),
            "E-CONFIG",
            "a start that leaves the base's own weights alone",
        ),
    }


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _names(value: Any) -> bool:
    named = isinstance(value, list) and 0 < len(value) <= 100
    return named and all(isinstance(n, str) and len(n) < 200 and _NAME.fullmatch(n) for n in value)


def _known_class(value: object) -> bool:
    """Whether this names no class, or one of transformers (PEFT notes it; it is never imported)."""
    if not isinstance(value, dict):
        return value is None
    fits = set(value) == {"base_model_class", "parent_library"}
    return fits and str(value["parent_library"]).startswith("transformers.")
