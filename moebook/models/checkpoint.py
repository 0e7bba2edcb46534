"""The one checkpoint: what a method changed, what it was made from, and proof that it is whole.

A folder is written under a temporary name beside its target, sealed (`MANIFEST.json` holds the
sha256 and the size of every file and all settings, `MANIFEST.sha256` the hash of the manifest; all
of it is on the disk), then renamed. What bears the final name is therefore whole, and `verify`
tells when any byte was changed afterwards. Tensors are safetensors, the rest is JSON: no pickle.
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
from moebook.errors import refuse
from moebook.settings import restored, settings

MANIFEST, DIGEST, TENSORS = "MANIFEST.json", "MANIFEST.sha256", "trained.safetensors"
_REPAIR = "restore the folder, or delete it where it can be made again"
_WRAPPING = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
_ADDED = re.compile(r"\.(lora_\w+|modules_to_save)\.")


@settings
class Origin:
    """What a model was made from; the model keeps it under the method's name, as ``model.pesc``.

    Each method adds its settings.

    Attributes:
        base: Fingerprint of the model before anything was changed.
    """

    method: ClassVar[str] = ""
    base: str


Kind = TypeVar("Kind", bound=Origin)


def origin_or_none(model: nn.Module, kind: type[Kind]) -> Kind | None:
    """Return what a method made a model from, also inside a wrapper (DDP, PEFT), or None."""
    origins = (vars(module).get(kind.method) for module in model.modules())
    return next((each for each in origins if isinstance(each, kind)), None)


def origin(model: nn.Module, kind: type[Kind]) -> Kind:
    """Return what a method made a model from, or refuse one that it did not make (E-MODEL)."""
    return origin_or_none(model, kind) or refuse(
        "E-MODEL", f"the model has not been through {kind.method} yet"
    )


def save(
    folder: str | os.PathLike[str],
    source: Origin,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a model's origin, what a method changed in it, and more files, by name.

    The folder must not exist yet; nothing is written when a tensor holds NaN or infinity.
    """
    facts = TypeAdapter(type(source)).dump_python(source, mode="json")
    content = {TENSORS: packed(tensors), **(files or {})}
    return write(Path(folder), content, form=f"{source.method}/2", version=__version__, **facts)


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    kind: type[Kind],
    restore: Callable[[nn.Module, Kind], Mapping[str, Tensor]],
    **given: Any,
) -> nn.Module:
    """Put a checkpoint on its base, in place and bit for bit, after all checks.

    Args:
        model: The base, or a model that the method made from it, if it can be made again.
        folder: Written by `save`.
        kind: The method's `Origin`.
        restore: Gives a base the form that an origin tells and returns the tensors to fill. It is
            tried first on a `hollow` copy, so that the model is untouched when it is refused.
        given: Fields of the origin that the manifest does not hold.
    """
    folder = Path(folder)
    if not folder.is_dir():
        refuse("E-NOFILE", f"{folder} is missing: expected a checkpoint of {kind.method}")
    facts = verify(folder)
    if facts.get("form") not in (f"{kind.method}/1", f"{kind.method}/2"):
        refuse("E-FORMAT", f"{folder} is no checkpoint of {kind.method}")
    stored = {field.name: facts[field.name] for field in fields(kind) if field.name in facts}
    source = restored(kind, {**stored, **given}, folder)
    before = origin_or_none(model, kind)
    check_base(folder, source.base, before.base if before else fingerprint(model))
    content = read(folder / TENSORS, restore(hollow(model), source))
    with torch.no_grad():
        for name, tensor in restore(model, source).items():
            tensor.copy_(content[name])
    return model


def hollow(model: nn.Module) -> nn.Module:
    """Copy a model without its values: shapes and dtypes on the meta device."""
    memo: dict[int, Any] = {id(part): part.to("meta") for part in model.buffers()}
    for part in model.parameters():
        memo[id(part)] = nn.Parameter(part.detach().to("meta"), part.requires_grad)
    memo |= {id(part): part for part in vars(model).values() if isinstance(part, Origin)}
    return copy.deepcopy(model, memo)


def fingerprint(model: nn.Module) -> str:
    """Hash names, shapes, dtypes and bytes of the base's parameters, sorted by name (sha256, hex).

    A PEFT wrapper does not change the answer: its own parameters are left out and its renaming of
    the base's is undone, so that an adapter can be tied to the base it was trained on. Tied
    parameters count once, buffers not at all. The device does not matter; the dtype does.
    """
    named = {
        _WRAPPING.sub("", name): parameter
        for name, parameter in model.named_parameters()
        if not _ADDED.search(name)
    }
    digest = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_base(folder: Path | str, wanted: str, base: str) -> None:
    """Refuse a base whose fingerprint is not the one that a folder belongs to (E-BASE)."""
    if base != wanted:
        refuse("E-BASE", f"{folder} belongs to base {wanted[:12]}..., this base is {base[:12]}...")


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the tensors as safetensors, or refuse NaN and infinity (E-NONFINITE)."""
    _check_finite(tensors, "cannot be saved")
    return safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})


def read(path: Path, expected: Mapping[str, Tensor], *, exact: bool = True) -> dict[str, Tensor]:
    """Read safetensors of exactly the expected names, shapes and dtypes, from memory, not a map.

    ``expected`` may be on the meta device; unless ``exact``, any floating-point type of 16 bits or
    more will do. A file that is too large for them is not read at all (E-LIMIT).
    """
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing; expected it beside its settings")
    limit = 8 * sum(tensor.numel() for tensor in expected.values()) + 2**20
    if (size := path.stat().st_size) > limit:
        refuse("E-LIMIT", f"{path} has {size} bytes, expected at most {limit} for this base")
    try:
        tensors = safetensors.torch.load(path.read_bytes())
    except SafetensorError as error:
        refuse("E-FORMAT", f"{path} is not safetensors ({error}); fetch it again")
    _check_finite(tensors, str(path))
    missing, surplus = sorted(expected.keys() - tensors), sorted(tensors.keys() - expected.keys())
    if missing or surplus:
        odd = f"{len(missing)} tensors missing {missing[:3]}, {len(surplus)} surplus {surplus[:3]}"
        refuse("E-KEYS", f"{path}: {odd}")
    for name, want in expected.items():
        got = tensors[name]
        wide = got.is_floating_point() and got.element_size() >= 2
        if got.shape != want.shape or not (got.dtype == want.dtype if exact else wide):
            kind = f"{tuple(want.shape)} of {want.dtype if exact else '16 bits or more'}"
            misfit = f"{name} is {tuple(got.shape)} {got.dtype}, expected {kind}"
            refuse("E-SHAPE", f"{path}: {misfit}")
    return tensors


def _check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            refuse("E-NONFINITE", f"{where}: {name} holds NaN or infinity")


def write(target: Path, files: Mapping[str, bytes], **facts: Any) -> Path:
    """Write files and facts (JSON values) into a new, sealed folder, or refuse E-EXISTS."""
    if target.exists():
        refuse("E-EXISTS", f"{target} exists already: choose another folder or remove it")
    with building(target, **facts) as stage:
        for name, content in files.items():
            (stage / name).write_bytes(content)
    return target


@contextmanager
def building(target: Path, **facts: Any) -> Iterator[Path]:
    """Give a folder to fill, then seal it with the facts and commit it; drop it when that fails."""
    stage = target.with_name(f".stage-{target.name}-{os.getpid()}")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        yield stage
        seal(stage, **facts)
        commit(stage, target)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def seal(folder: Path, **facts: Any) -> None:
    """Write the manifest of a flat folder of plain files and force every byte to the disk.

    ``facts`` are JSON values to keep beside the hashes: form, settings, recipe, seeds.
    """
    paths = list(folder.iterdir())
    measured = {
        "files": {path.name: _digest(path) for path in paths},
        "sizes": {path.name: path.stat().st_size for path in paths},
    }
    (folder / MANIFEST).write_text(json.dumps({**facts, **measured}, indent=1, sort_keys=True))
    (folder / DIGEST).write_text(f"{_digest(folder / MANIFEST)}  {MANIFEST}\n")
    for path in (*folder.iterdir(), folder):
        _sync(path)


def commit(stage: Path, target: Path) -> None:
    """Give a sealed folder its final name: the one instant at which it comes to exist."""
    os.rename(stage, target)
    _sync(target.parent)


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of a sealed folder against its manifest and return the manifest.

    A folder without `MANIFEST.sha256` is of the first form, and is taken without it. A manifest
    that is missing, changed or names other files than the folder holds is refused, and so are links
    and changed files.
    """
    manifest = _manifest(folder)
    present = {path.name for path in folder.iterdir()} - {MANIFEST, DIGEST}
    if odd := sorted(set(manifest["files"]) ^ present):
        refuse("E-MANIFEST", f"{folder}: {MANIFEST} and folder disagree on {odd[:3]}; {_REPAIR}")
    for name, expected in manifest["files"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            refuse("E-PATH", f"{path}: expected a plain file")
        if (digest := _digest(path)) != expected:
            here = f"{path.stat().st_size} bytes and sha256 {digest[:12]}"
            sealed = f"{manifest.get('sizes', {}).get(name)} and {expected[:12]}"
            refuse("E-HASH", f"{path}: has {here}, {MANIFEST} says {sealed}; {_REPAIR}")
    return manifest


def _manifest(folder: Path) -> dict[str, Any]:
    path, digest = folder / MANIFEST, folder / DIGEST
    try:
        manifest = json.loads(path.read_bytes())
        intact = not digest.exists() or digest.read_text() == f"{_digest(path)}  {MANIFEST}\n"
        if intact and all(isinstance(each, str) for each in manifest["files"].values()):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    refuse("E-MANIFEST", f"{path}: missing, changed or not a manifest; {_REPAIR}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
