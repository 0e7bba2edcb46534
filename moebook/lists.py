"""Parameters that hold several values in one text: names, numbers, rates, rates by name.

Blanks around the commas do not count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from moebook.errors import refuse, refuse_unknown, shown

MOST_SEEDS = 1000  # in one call
ALL = "all"  # what a parameter that lists arms says for all of them


def listed(name: str, text: str, known: Iterable[str]) -> list[str]:
    """Split a parameter that lists known names with commas, each once; empty for none."""
    names = [part for part in _parts(name, text) if part]
    choices = list(known)
    for place, one in enumerate(names):
        refuse_unknown(one, choices, "E-RANGE", f"{name} lists '{one}':")
        if one in names[:place]:
            refuse("E-RANGE", f"{name} lists '{one}' twice")
    return names


def tight(text: str) -> str:
    """Leave out the blanks around the commas of a list, and at its ends."""
    return ",".join(part.strip() for part in text.split(","))


def arms(text: str, known: Iterable[str]) -> list[str]:
    """Return the arms that the parameter ``arms`` names: some known ones, or `ALL`."""
    return list(known) if text == ALL else listed("arms", text, known)


def numbers(name: str, text: str) -> list[float]:
    """Split a parameter that lists numbers with commas, each once; empty for none."""
    return _each_once(name, text, _number)


def rates(name: str, text: str) -> list[float]:
    """Split a parameter that lists learning rates with commas, each once; empty for none."""
    return _each_once(name, text, _rate)


def seeds(name: str, text: str) -> list[int]:
    """Read ``0-9``, ``3`` or ``0-2,7``; anything else is refused by its name (E-RANGE)."""
    spans: list[range] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", piece.strip())
        # Without a match, 1 > 0 is refused below.
        first = int(match[1]) if match else 1
        last = int(match[2] or match[1]) if match else 0
        if first > last:
            expected = "expected rising numbers, as in 0-9 or 3"
            refuse("E-RANGE", f"{name} {text}: '{piece}'; {expected}")
        spans.append(range(first, last + 1))
    # Counted before they are listed: a span may name a billion.
    count = sum(len(span) for span in spans)
    if count > MOST_SEEDS:
        most = f"expected at most {MOST_SEEDS:,} a call"
        why = "since each is a run of its own, of minutes or hours"
        refuse("E-RANGE", f"{name} {text} names {count:,} seeds; {most}, {why}")
    numbers: list[int] = []
    for span in spans:
        numbers += span
    repeated = [seed for seed in numbers if numbers.count(seed) > 1]
    if repeated:
        refuse("E-RANGE", f"{name} {text} names seed {repeated[0]} twice")
    return numbers


def _each_once(name: str, text: str, read: Callable[[str, str], float]) -> list[float]:
    """Read each part of a list; two are the same if recorded values would name them alike."""
    numbers: dict[str, float] = {}
    for part in _parts(name, text):
        if not part:
            continue
        number = read(f"{name} lists '{part}'", part)
        written = f"{number:g}"
        if written in numbers:
            equal = number == numbers[written]
            digits = "" if equal else ", to the six digits of a value's name"
            refuse("E-RANGE", f"{name} lists {written} twice{digits}: give each once")
        numbers[written] = number
    return list(numbers.values())


def rates_by_name(
    name: str, text: str, known: Iterable[str] | None = None
) -> dict[str, float]:
    """Read a parameter that gives learning rates by name, ``dense=0.004, sparse=0.002``.

    Each name stands there once, and is a known one where these are given; empty for none.
    """
    rates: dict[str, float] = {}
    choices = None if known is None else list(known)
    for part in _parts(name, text):
        if not part:
            continue
        key, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals:
            refuse(
                "E-RANGE",
                f"{name} holds '{key}': expected name=rate, as in dense=0.001",
            )
        if choices is not None:
            refuse_unknown(key, choices, "E-RANGE", f"{name} names '{key}':")
        if key in rates:
            refuse("E-RANGE", f"{name} names '{key}' twice: give it one rate")
        rates[key] = _rate(f"{name} gives {key} '{number}'", number)
    return rates


def _parts(name: str, text: str) -> list[str]:
    """Split a text at its commas; a list that is split already is refused (E-TYPE)."""
    if not isinstance(text, str):
        refuse("E-TYPE", f"{name} is {shown(text)}, expected a text with commas")
    return tight(text).split(",")


def _number(given: str, text: str) -> float:
    """Read a finite number."""
    number = _float(text)
    if not math.isfinite(number):
        refuse("E-RANGE", f"{given}: expected numbers with commas between, as in 0.1,1")
    return number


def _rate(given: str, text: str) -> float:
    """Read a learning rate: a number above 0 and below 1."""
    rate = _float(text)
    if not 0 < rate < 1:
        refuse(
            "E-RANGE", f"{given}: expected a number above 0 and below 1, as in 0.001"
        )
    return rate


def _float(text: str) -> float:
    """Read a number in Python's notation; a text that is none comes back as NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan
