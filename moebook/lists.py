"""Parameters that hold several values in one text: names, learning rates, rates by name."""

from __future__ import annotations

import math
from collections.abc import Iterable

from moebook.errors import refuse, refuse_unknown

ALL = "all"  # what a parameter that lists arms says for all of them


def listed(name: str, text: str, known: Iterable[str]) -> list[str]:
    """Split a parameter that lists known names with commas, each once; empty for none."""
    names = [part for part in text.split(",") if part]
    choices = list(known)
    for place, one in enumerate(names):
        refuse_unknown(one, choices, "E-RANGE", f"{name} lists '{one}':")
        if one in names[:place]:
            refuse("E-RANGE", f"{name} lists '{one}' twice")
    return names


def arms(text: str, known: Iterable[str]) -> list[str]:
    """Return the arms that the parameter ``arms`` names: some known ones, or `ALL`."""
    return list(known) if text == ALL else listed("arms", text, known)


def rates(name: str, text: str) -> list[float]:
    """Split a parameter that lists learning rates with commas, each once; empty for none."""
    found: dict[str, float] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        rate = _rate(f"{name} lists '{part.strip()}'", part)
        if f"{rate:g}" in found:
            digits = (
                ""
                if rate == found[f"{rate:g}"]
                else ", to the six digits of a value's name"
            )
            refuse(
                "E-RANGE", f"{name} lists {rate:g} twice{digits}: give each rate once"
            )
        found[f"{rate:g}"] = rate
    return list(found.values())


def rates_by_name(
    name: str, text: str, known: Iterable[str] | None = None
) -> dict[str, float]:
    """Read a parameter that gives learning rates by name, ``dense=0.004, sparse=0.002``.

    Each name stands there once, and is a known one where these are given; empty for none.
    """
    found: dict[str, float] = {}
    choices = None if known is None else list(known)
    for part in text.split(","):
        if not part.strip():
            continue
        one, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals:
            refuse(
                "E-RANGE",
                f"{name} holds '{one}': expected name=rate, as in dense=0.001",
            )
        if choices is not None:
            refuse_unknown(one, choices, "E-RANGE", f"{name} names '{one}':")
        if one in found:
            refuse("E-RANGE", f"{name} names '{one}' twice: give it one rate")
        found[one] = _rate(f"{name} gives {one} '{number}'", number)
    return found


def _rate(given: str, text: str) -> float:
    """Read a learning rate: a number above 0 and below 1."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < 1:
        refuse(
            "E-RANGE", f"{given}: expected a number above 0 and below 1, as in 0.001"
        )
    return rate
