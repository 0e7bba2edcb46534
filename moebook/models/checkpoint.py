"""The one checkpoint: what a method changed, what it was made from, and proof that it is whole.

A folder is written under a temporary name beside its target, sealed (`MANIFEST.json` holds the
sha256 and the size of every file and all settings, `MANIFEST.sha256` the hash of the manifest; all
of it is on the disk), then renamed. What bears the final name is therefore whole, and `verify`
tells when any byte was changed afterwards. Tensors are safetensors, the rest is JSON: no pickle.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
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


Made = TypeVar("Made", bound=Origin)


def origin_or_none(model: nn.Module, kind: type[Made]) -> Made | None:
    """Return what a method made a model from, also inside a wrapper (DDP, PEFT), or None."""
    kept = (module.__dict__.get(kind.method) for module in model.modules())
    return next((each for each in kept if isinstance(each, kind)), None)


def origin(model: nn.Module, kind: type[Made]) -> Made:
    """Return what a method made a model from, or refuse one that it did not make (E-MODEL)."""
    made = origin_or_none(model, kind)
    if made is None:
        refuse("E-MODEL", f"the model has not been through {kind.method} yet")
    return made


def save(
    folder: str | os.PathLike[str],
    made: Origin,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write what a method changed in a model, and its origin, to a new folder, or nothing.

    Args:
        folder: Must not exist yet.
        made: The model's origin.
        tensors: What was changed, by name.
        files: More content by name.

    Raises:
        Refusal: E-EXISTS; E-NONFINITE naming a tensor that holds NaN or infinity.
    """
    facts = TypeAdapter(type(made)).dump_python(made, mode="json")
    content = {TENSORS: packed(tensors), **(files or {})}
    return write(Path(folder), content, form=f"{made.method}/2", version=__version__, **facts)


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    kind: type[Made],
    restore: Callable[[nn.Module, Made], Mapping[str, Tensor]],
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

    Raises:
        Refusal: E-NOFILE, E-MANIFEST, E-HASH, E-FORMAT, E-BASE, E-KEYS, E-SHAPE or E-NONFINITE.
    """
    folder = Path(folder)
    if not folder.is_dir():
        refuse("E-NOFILE", f"{folder} is missing: expected a checkpoint of {kind.method}")
    facts = verify(folder)
    if facts.get("form") not in (f"{kind.method}/1", f"{kind.method}/2"):
        refuse("E-FORMAT", f"{folder} is no checkpoint of {kind.method}")
    stored = {field.name: facts[field.name] for field in fields(kind) if field.name in facts}
    made = restored(kind, {**stored, **given}, folder)
    before = origin_or_none(model, kind)
    check_base(folder, made.base, before.base if before else fingerprint(model))
    content = read(folder / TENSORS, restore(hollow(model), made))
    with torch.no_grad():
        for name, tensor in restore(model, made).items():
            tensor.copy_(content[name])
    return model


def hollow(model: nn.Module) -> nn.Module:
    """Copy a model without its values: shapes and dtypes on the meta device."""
    owned = itertools.chain(model.parameters(), model.buffers())
    memo: dict[int, Any] = {id(tensor): _meta(tensor) for tensor in owned}
    memo |= {id(each): each for each in vars(model).values() if isinstance(each, Origin)}
    return copy.deepcopy(model, memo)


def _meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty


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


def check_base(folder: Path, wanted: str, base: str) -> None:
    """Refuse a base whose fingerprint is not the one that a folder belongs to (E-BASE)."""
    if base != wanted:
        refuse("E-BASE", f"{folder} belongs to base {wanted[:12]}..., this base is {base[:12]}...")


def packed(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the tensors as safetensors, or refuse NaN and infinity (E-NONFINITE)."""
    _check_finite(tensors, "cannot be saved")
    return safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})


def read(path: Path, expected: Mapping[str, Tensor], *, exact: bool = True) -> dict[str, Tensor]:
    """Read safetensors of exactly the expected names, shapes and dtypes, from memory, not a map.

    Args:
        path: The file.
        expected: Tensors of any device, "meta" included.
        exact: Else any floating-point type of 16 bits or more will do.

    Raises:
        Refusal: E-NOFILE, E-LIMIT (nothing is read then), E-FORMAT, E-NONFINITE, E-KEYS with counts
            and first names, or E-SHAPE with the first misfit.
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
        refuse(
            "E-KEYS",
            f"{path}: {len(missing)} tensors missing {missing[:3]},"
            f" {len(surplus)} surplus {surplus[:3]}",
        )
    for name, want in expected.items():
        got = tensors[name]
        wide = got.is_floating_point() and got.element_size() >= 2
        if got.shape != want.shape or not (got.dtype == want.dtype if exact else wide):
            told = f"{name} is {tuple(got.shape)} {got.dtype}"
            kind = want.dtype if exact else "16 bits or more"
            refuse("E-SHAPE", f"{path}: {told}, expected {tuple(want.shape)} of {kind}")
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

    Args:
        folder: Complete except for its manifest.
        facts: JSON values to keep beside the hashes: form, settings, recipe, seeds.
    """
    paths = sorted(folder.iterdir())
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

    A folder without `MANIFEST.sha256` was sealed before version 1.1, and is taken without it.

    Raises:
        Refusal: E-MANIFEST when the manifest is missing, unreadable, changed or names another set
            of plain files than the folder holds; E-PATH for a link; E-HASH for a changed file.
    """
    manifest = _manifest(folder)
    named = set(manifest["files"])
    present = {path.name for path in folder.iterdir()} - {MANIFEST, DIGEST}
    if named != present:
        odd = sorted(named ^ present)[:3]
        refuse("E-MANIFEST", f"{folder}: {MANIFEST} and folder disagree on {odd}; {_REPAIR}")
    for name, expected in manifest["files"].items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            refuse("E-PATH", f"{path}: expected a plain file")
        if (digest := _digest(path)) != expected:
            size = manifest.get("sizes", {}).get(name, "unknown")
            refuse(
                "E-HASH",
                f"{path}: has {path.stat().st_size} bytes and sha256 {digest[:12]}, {MANIFEST} "
                f"says {size} and {expected[:12]}; {_REPAIR}",
            )
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
