"""The settings of ESFT: each choice that paper and code disagree on is a switch; three presets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from moebook import settings
from moebook.errors import Refusal, refuse

Kind = TypeVar("Kind")
Pooling = Literal["tokens", "samples"]
Score = Literal["token", "gate"]


@settings.settings
class Config:
    """How experts are scored and chosen, and what trains beside them (ESFT Sec. 3.3).

    The defaults are the preset ``fixed``. The paper's thresholds are 0.2 for the token score and
    0.1 for the gate score (Sec. 4.3).

    Attributes:
        score: Relevance of an expert: ``"token"``, the share of routed slots that it gets (Eq. 7),
            or ``"gate"``, the mean of its gates (Eq. 6).
        threshold: p of Eq. 8: the best experts of a layer are taken until their scores reach it.
        pooling: Average over all ``"tokens"`` (released), or within each of the ``"samples"`` and
            then over these (Eq. 6 and 7 as printed).
        normalised: Whether p is a share of a layer's total, as the paper says. The released code
            does not divide: the token scores sum to 1 anyway, gates only if renormalised.
        decimals: Places to which scores are rounded before the choice (released: 4), or None.
        shared_experts, router: Whether these train too.
        non_expert_modules: Whether all else trains too: attention, norms, embeddings, dense layers,
            head (and the routers, in the released code).
    """

    score: Score = "token"
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.2
    pooling: Pooling = "tokens"
    normalised: bool = False
    decimals: Annotated[int, Field(ge=1, le=15)] | None = None
    shared_experts: bool = False
    non_expert_modules: bool = False
    router: bool = False

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Config:
        """Return a named set of settings, with single fields changed.

        ``paper`` is the text, ``released`` the authors' code, from which the published experts
        follow, ``fixed`` the same without its rounding.
        """
        return settings.preset(cls, PRESETS, name, changes)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"pooling": "samples", "normalised": True},
    "released": {"decimals": 4},
    "fixed": {},
}


def from_json(kind: type[Kind], path: str | os.PathLike[str]) -> Kind:
    """Make settings from a JSON object in a file, whose keys that are numbers become numbers."""
    path = Path(path)
    if not path.is_file():
        refuse("E-NOFILE", f"{path} is missing")
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_numbered)
    except (ValueError, RecursionError) as error:
        refuse("E-FORMAT", f"{path} is not JSON: {error}")
    if not isinstance(content, dict):
        refuse("E-FORMAT", f"{path}: expected a JSON object")
    try:
        return kind(**{str(key): value for key, value in content.items()})
    except Refusal as problem:
        refuse(problem.code, f"{path}: {problem.message}")


def _numbered(pairs: list[tuple[str, Any]]) -> dict[str | int, Any]:
    numbered = {int(key) if key.isdecimal() else key: value for key, value in pairs}
    if len(numbered) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return numbered
