"""The one checkpoint: what a method changed, its source, proof that it is whole.

A folder is written under a temporary name, sealed (`MANIFEST.json` holds all settings
and the sha256 of every file, `MANIFEST.sha256` its own), synced, then renamed: what
bears the final name is whole, and `verify` tells of any byte changed afterwards.
Safetensors and JSON alone: no pickle.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor, nn

from moebook import __version__
from moebook.errors import refuse, saving
from moebook.settings import Place, checked, restored, settings
from moebook.storage import digest, locked, read_json
from moebook.storage.files import DATA, foreign

MANIFEST = "MANIFEST.json"
DIGEST = "MANIFEST.sha256"
TENSORS = "trained.safetensors"
_REPAIR = "restore the folder, or delete it where it can be made again"
_WRAPPING = re.compile(r"^base_model\.model\.|\.(base_layer|original_module)(?=\.)")
_ADDED = re.compile(r"\.(lora_\w+|modules_to_save)\.")


@settings
class Origin:
    """What a model was made from, by fingerprint; kept as ``model.<method>``."""

    method: ClassVar[str] = ""
    base: str


Kind = TypeVar("Kind", bound=Origin)


def origin_or_none(model: nn.Module, kind: type[Kind]) -> Kind | None:
    """What a method made a model from, also inside a wrapper (DDP, PEFT), or None."""
    for module in model.modules():
        origin = vars(module).get(kind.method)
        if isinstance(origin, kind):
            return origin
    return None


def origin(model: nn.Module, kind: type[Kind]) -> Kind:
    """What a method made a model from; refuses one that it did not make (E-MODEL)."""
    missing = f"the model has not been through {kind.method} yet"
    return origin_or_none(model, kind) or refuse("E-MODEL", missing)


def origins(model: nn.Module) -> dict[str, Any]:
    """What all methods made a model from, as JSON, by the methods' names; seldom more than two."""
    found: dict[str, Any] = {}
    for module in model.modules():
        for made_from in vars(module).values():
            if isinstance(made_from, Origin):
                found[made_from.method] = _told(made_from)
    return found


def _told(source: Origin) -> Any:
    """Return an origin as JSON."""
    return TypeAdapter(type(source)).dump_python(source, mode="json")


@checked
def place(folder: Place) -> Path:
    """Return a folder's path, or refuse a name that no file system holds."""
    return Path(folder)


def save(
    folder: str | os.PathLike[str],
    source: Origin,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a model's origin, what a method changed, and more files into a folder.

    The manifest's ``dtypes`` are those of the tensors.
    """
    facts = _told(source)
    facts["dtypes"] = sorted({str(tensor.dtype) for tensor in tensors.values()})
    content = {TENSORS: packed(tensors), **(files or {})}
    target = place(folder)
    facts |= {"form": f"{source.method}/2", "version": __version__}
    with saving(folder):
        return write(target, content, **facts)


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    kind: type[Kind],
    restore: Callable[[nn.Module, Kind], Mapping[str, Tensor]],
    **given: Any,
) -> nn.Module:
    """Put a checkpoint that `save` wrote on its base, in place and bit for bit.

    What was trained comes back in float32, as `training.fit` makes it, on a base in 16
    bits too. ``restore`` gives a base the form that an origin tells and returns the
    tensors to fill; it is tried on a `hollow` copy first, so that a refusal leaves the
    model untouched. ``given`` holds fields of the origin that the manifest lacks. The
    model may be one that the method has altered.
    """
    folder = place(folder)
    if not folder.is_dir():
        refuse(
            "E-NOFILE", f"{folder} is missing: expected a checkpoint of {kind.method}"
        )
    facts = verify(folder)
    form = f"{kind.method}/2"
    if facts.get("form") != form:
        refuse(
            "E-FORMAT",
            f"{folder} is no checkpoint of form {form}; save the model again",
        )
    stored = {}
    for field in fields(kind):
        if field.name in facts:
            stored[field.name] = facts[field.name]
    source = restored(kind, {**stored, **given}, folder)
    before = origin_or_none(model, kind)
    check_base(folder, source.base, before.base if before else fingerprint(model))
    # On meta first: sizes that the file does not hold are refused before they are made.
    with torch.device("meta"):
        wanted = restore(hollow(model), source)
    content = read(folder / TENSORS, wanted)
    with torch.no_grad():
        for name, tensor in restore(model, source).items():
            tensor.data = tensor.to(content[name].dtype)
            tensor.copy_(content[name])
    return model


def hollow(model: nn.Module) -> nn.Module:
    """Copy a model without its values: shapes and dtypes on the meta device."""
    memo: dict[int, Any] = {id(part): part.to("meta") for part in model.buffers()}
    for part in model.parameters():
        memo[id(part)] = nn.Parameter(part.detach().to("meta"), part.requires_grad)
    memo |= {
        id(part): part for part in vars(model).values() if isinstance(part, Origin)
    }
    return copy.deepcopy(model, memo)


def fingerprint(model: nn.Module) -> str:
    """Hash names, shapes, dtypes and bytes of the base's parameters, by name.

    A PEFT wrapper's own parameters are left out and its renaming of the base's is
    undone. Tied parameters count once, buffers not at all.
    """
    weights = {}
    for name, weight in model.named_parameters():
        if not _ADDED.search(name):
            weights[_WRAPPING.sub("", name)] = weight
    return hashed(weights)


def hashed(tensors: Mapping[str, Tensor]) -> str:
    """Hash tensors as `fingerprint` does (sha256): dtypes matter, places do not.

    On meta there are no bytes to hash.
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if not tensor.is_meta:
            flat = tensor.cpu().contiguous().reshape(-1)
            total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def check_base(folder: Path | str, wanted: str, base: str) -> None:
    """Refuse a base whose fingerprint is not a folder's (E-BASE)."""
    if base != wanted:
        belongs = f"{folder} belongs to base {wanted[:12]}..."
        refuse("E-BASE", f"{belongs}, this base is {base[:12]}...")


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the tensors as safetensors, or refuse NaN and infinity (E-NONFINITE)."""
    check_finite(tensors, "cannot be saved")
    on_cpu = {}
    for name, tensor in tensors.items():
        on_cpu[name] = tensor.detach().cpu().contiguous()
    return safetensors.torch.save(on_cpu)


def unpacked(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, read into memory, or E-FORMAT."""
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing; expected it beside its settings")
    try:
        return safetensors.torch.load(path.read_bytes())
    except SafetensorError as error:
        refuse("E-FORMAT", f"{path} is not safetensors ({error}); fetch it again")


def read(
    path: Path, expected: Mapping[str, Tensor], *, exact: bool = True
) -> dict[str, Tensor]:
    """Read safetensors of exactly the expected names, shapes and dtypes.

    ``expected`` may be on the meta device. In place of 16 bits float32 will do, which
    is what training makes of them; unless ``exact``, any float of 16 bits or more will.
    """
    limit = 8 * sum(tensor.numel() for tensor in expected.values()) + 2**20
    size = path.stat().st_size if path.is_file() else 0
    if size > limit:
        most = f"expected at most {limit} for this base"
        refuse("E-LIMIT", f"{path} has {size} bytes, {most}")
    tensors = unpacked(path)
    missing = sorted(expected.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - expected.keys())
    if missing or surplus:
        lacks = f"{len(missing)} tensors missing {missing[:3]}"
        refuse("E-KEYS", f"{path}: {lacks}, {len(surplus)} surplus {surplus[:3]}")
    for name, wanted in expected.items():
        tensor = tensors[name]
        if exact:
            widened = torch.promote_types(wanted.dtype, torch.float32)
            fits = tensor.dtype in (wanted.dtype, widened)
            dtypes = str(wanted.dtype)
        else:
            fits = tensor.is_floating_point() and tensor.element_size() >= 2
            dtypes = "16 bits or more"
        if tensor.shape != wanted.shape or not fits:
            kind = f"{tuple(tensor.shape)} {tensor.dtype}"
            expected_kind = f"{tuple(wanted.shape)} of {dtypes}"
            refuse("E-SHAPE", f"{path}: {name} is {kind}, expected {expected_kind}")
    check_finite(tensors, str(path))
    return tensors


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors that hold NaN or infinity (E-NONFINITE)."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            refuse("E-NONFINITE", f"{where}: {name} holds NaN or infinity")


def write(target: Path, files: Mapping[str, bytes], **facts: Any) -> Path:
    """Write files and facts (JSON values) into a new, sealed folder, or E-EXISTS."""
    if target.exists():
        refuse(
            "E-EXISTS", f"{target} exists already: choose another folder or remove it"
        )
    with building(target, **facts) as stage:
        for name, content in files.items():
            (stage / name).write_bytes(content)
    return target


@contextmanager
def building(target: Path, **facts: Any) -> Iterator[Path]:
    """Give a folder to fill; then seal it with facts and commit it, or drop it."""
    stage = target.with_name(f".stage-{target.name}")
    with locked(target.with_name(f".{target.name}.lock"), wait=True):
        shutil.rmtree(stage, ignore_errors=True)  # of one that was killed
        stage.mkdir()
        try:
            yield stage
            seal(stage, **facts)
            commit(stage, target)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise


def seal(folder: Path, **facts: Any) -> None:
    """Write hashes and facts (JSON values) of a flat folder; sync every byte."""
    paths = list(folder.iterdir())
    measured = {
        "files": {path.name: digest(path) for path in paths},
        "sizes": {path.name: path.stat().st_size for path in paths},
    }
    manifest = json.dumps({**facts, **measured}, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(manifest)
    (folder / DIGEST).write_text(f"{digest(folder / MANIFEST)}  {MANIFEST}\n")
    for path in (*folder.iterdir(), folder):
        _sync(path)


def commit(stage: Path, target: Path) -> None:
    """Give a sealed folder its final name: the instant at which it comes to exist."""
    os.rename(stage, target)
    _sync(target.parent)


def sealed(folder: Path) -> bool:
    """Whether a folder claims to be one of ours, which `verify` then has to confirm."""
    return (folder / MANIFEST).exists() or (folder / DIGEST).exists()


def verify(folder: Path) -> dict[str, Any]:
    """Check a sealed folder, its manifest first; return that."""
    path = folder / MANIFEST
    if not (folder / DIGEST).is_file() or not path.is_file():
        trusted = f"sha256sum {MANIFEST} > {DIGEST} there seals a folder that you trust"
        lacks = f"{folder} lacks {MANIFEST} or its {DIGEST}"
        refuse("E-MANIFEST", f"{lacks}: {_REPAIR}; {trusted}")
    if (folder / DIGEST).read_bytes() != f"{digest(path)}  {MANIFEST}\n".encode():
        refuse("E-MANIFEST", f"{path} is not the one that {DIGEST} seals; {_REPAIR}")
    manifest = read_json(path)
    files = manifest.get("files")
    odd = _disagreeing(folder, files) if isinstance(files, dict) else ["files"]
    if odd:
        disagree = f"{MANIFEST} and folder disagree on {odd[:3]}"
        refuse("E-MANIFEST", f"{folder}: {disagree}; {_REPAIR}")
    for name, expected in manifest["files"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            refuse("E-PATH", f"{path}: expected a plain file")
        actual = digest(path)
        if actual != expected:
            changed = f"{actual!s:.12} was sealed as {expected!s:.12}"
            refuse("E-HASH", f"{path}: {changed}; {_REPAIR}")
    return manifest


def _disagreeing(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Name what is sealed and not there, or there and not sealed.

    What desktops and editors leave (``.DS_Store``, ``x~``) does not count unless it is
    data.
    """
    disagreeing = set(files)
    for path in folder.iterdir():
        if path.name in (MANIFEST, DIGEST):
            continue
        if path.name in files:
            disagreeing.remove(path.name)
        elif not foreign(path.name) or path.suffix in DATA:
            disagreeing.add(path.name)
    return sorted(disagreeing)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
