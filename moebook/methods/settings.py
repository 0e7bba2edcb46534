"""What the methods' settings have in common: named presets, and checks that name the field."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from moebook.errors import nearest, refuse

Settings = TypeVar("Settings")


def preset(
    kind: type[Settings],
    presets: Mapping[str, Mapping[str, Any]],
    name: str,
    changes: Mapping[str, Any],
) -> Settings:
    """Make the settings of a named preset, with single fields changed.

    Args:
        kind: A dataclass.
        presets: By name, the fields in which each differs from the defaults.
        name: One of them.
        changes: Fields that go before the preset's.

    Raises:
        Refusal: E-CHOICE for an unknown preset or field; those of the settings themselves.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if name not in presets:
        refuse("E-CHOICE", f"unknown preset '{name}'; {nearest(name, presets)}")
    for field in changes:
        if field not in known:
            refuse("E-CHOICE", f"unknown setting '{field}'; {nearest(field, known)}")
    return kind(**{**presets[name], **changes})


def restored(kind: type[Settings], values: Mapping[str, Any], where: object) -> Settings:
    """Make settings again from what JSON kept of them (``dataclasses.asdict``).

    Raises:
        Refusal: E-FORMAT when a field is missing or unknown; those of the settings themselves.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if odd := sorted(values.keys() ^ known):
        refuse("E-FORMAT", f"{where}: setting '{odd[0]}' is missing or unknown; "
               f"{nearest(odd[0], known)}")  # fmt: skip
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def chosen(name: str, value: Any, choices: Collection[str]) -> None:
    """Refuse what is none of the choices, naming the nearest (E-CHOICE)."""
    if value not in choices:
        refuse("E-CHOICE", f"{name} is {value!r}; {nearest(value, choices)}")


def flag(name: str, value: object) -> None:
    """Refuse what is neither true nor false (E-TYPE)."""
    if not isinstance(value, bool):
        refuse("E-TYPE", f"{name} is {value!r}, expected true or false")


def whole(name: str, value: object, low: int, high: float = math.inf) -> None:
    """Refuse what is no whole number from ``low`` to ``high`` (E-TYPE, E-RANGE)."""
    if not isinstance(value, int) or isinstance(value, bool):
        refuse("E-TYPE", f"{name} is {value!r}, expected a whole number")
    if not low <= value <= high:
        limits = f"{low} or more" if high == math.inf else f"{low} to {high}"
        refuse("E-RANGE", f"{name} is {value}, expected {limits}")


def real(name: str, value: object, limits: str = "(-inf, inf)") -> None:
    """Refuse what is no finite number within limits such as ``"(0, 1]"`` (E-TYPE, E-RANGE)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse("E-TYPE", f"{name} is {value!r}, expected a number in {limits}")
    low, high = map(float, limits[1:-1].split(","))
    above = low < value or (limits[0] == "[" and value == low)
    below = value < high or (limits[-1] == "]" and value == high)
    if not (math.isfinite(value) and above and below):
        refuse("E-RANGE", f"{name} is {value}, expected a finite number in {limits}")


def layers(value: object) -> None:
    """Refuse a choice of decoder layers that is neither None (all) nor numbers, each once."""
    if value is None:
        return
    if not isinstance(value, tuple) or not value:
        refuse("E-TYPE", f"layers is {value!r}, expected a tuple of numbers or None for all")
    for layer in value:
        whole("layers", layer, 0)
    if len(set(value)) < len(value):
        refuse("E-RANGE", f"layers names a layer twice: {value}")
