"""The manifest of a run: what ran, with what, where, at what cost, and what came out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moebook import results, runtime
from moebook.errors import refuse
from moebook.notebook.parameters import Scalar
from moebook.results import Value

KINDS: dict[str, type | tuple[type, ...]] = {
    "hashes": dict,
    "parameters": dict,
    "overrides": dict,
    "environment": dict,
    "seconds": (int, float),
}
"""What those parts of a manifest are that are read again."""


@dataclass(frozen=True)
class Plan:
    """All that decides what a run gives; its `key` names the run.

    Args:
        notebook: Short name.
        tier: The scale.
        parameters: Every declared parameter with the value it will have.
        overrides: Those set by the reader over the tier's.
        hashes: sha256 of the ``notebook``, the ``package`` and the ``lock`` (None without a lock).
    """

    notebook: str
    tier: str
    parameters: Mapping[str, Scalar]
    overrides: Mapping[str, Scalar]
    hashes: Mapping[str, str | None]

    @property
    def key(self) -> str:
        """Hash of notebook, parameters, package, lock and tier: equal keys need no second run."""
        return key(self.tier, self.parameters, self.hashes)


def key(tier: str, parameters: Mapping[str, Any], hashes: Mapping[str, Any]) -> str:
    """Return the sha256 over a run's tier, parameters and the hashes of what it runs."""
    parts = {part: hashes.get(part) for part in ("notebook", "package", "lock")}
    text = json.dumps([tier, dict(parameters), parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def manifest(
    plan: Plan,
    *,
    folder: Path,
    texts: Mapping[str, str],
    values: tuple[Value, ...],
    cost: Mapping[str, Any],
    stripped: Mapping[str, int],
) -> dict[str, Any]:
    """Describe a finished run.

    Args:
        plan: What was run.
        folder: The project.
        texts: The texts written: ``executed`` (the published notebook) and ``record``.
        values: The recorded values.
        cost: ``seconds``, ``cell_seconds`` (by execution count) and ``peak_memory`` in bytes.
        stripped: What the filter left out, counted by kind.
    """
    written = {part: hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()}
    return {
        "notebook": plan.notebook,
        "tier": plan.tier,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "key": plan.key,
        "hashes": {**plan.hashes, **written},
        "parameters": dict(plan.parameters),
        "overrides": dict(plan.overrides),
        "commit": results.commit(folder),
        "environment": runtime.environment(),
        **cost,
        "values": {value.key: value.value for value in values},
        "stripped": dict(stripped),
    }


def check(manifest: Mapping[str, Any], where: str) -> None:
    """Refuse a manifest with a part that is not what `manifest` writes; parts may be missing.

    Args:
        manifest: A JSON object.
        where: Names its file in a refusal.

    Raises:
        Refusal: ``E-RECORD``.
    """
    wrong = [p for p, kind in KINDS.items() if p in manifest and not isinstance(manifest[p], kind)]
    if not wrong and not isinstance(manifest.get("environment", {}).get("versions", {}), dict):
        wrong = ["versions of the environment"]
    if wrong:
        refuse("E-RECORD", f"{where}: malformed {wrong[0]}; run the notebook again with --force")


def executed(record: Path) -> Path:
    """Name the executed notebook beside a record: of a live page, or of a committed run."""
    stem = record.name.removesuffix(".record.json")
    return record.with_name("notebook.ipynb" if stem == record.name else f"{stem}.ipynb")


def plan(
    notebook: str,
    tier: str,
    parameters: Mapping[str, Scalar],
    overrides: Mapping[str, Scalar],
    folder: Path,
) -> Plan:
    """Make a `Plan` with the hashes of the files as they are now."""
    accelerator = runtime.environment()["accelerator"] is not None
    hashes = results.current(notebook, folder, accelerator=accelerator)
    return Plan(notebook, tier, parameters, overrides, hashes)
