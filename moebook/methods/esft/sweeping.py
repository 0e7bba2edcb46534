"""The values that a sweep tries (Fig. 6 and 7), read from text and checked before anything runs."""

from __future__ import annotations

from moebook.errors import refuse
from moebook.methods.settings import real, whole

RANKS = 512
"""The largest rank of LoRA in the paper's sweep (Sec. 6.2)."""


def sweep(
    thresholds_gate: str, thresholds_token: str, ranks: str, group_sizes: str
) -> dict[str, list[float]]:
    """Read the values of a sweep, numbers with commas between, each list rising.

    Thresholds of the gate score and ranks are compared place by place, so there must be as many.

    Args:
        thresholds_gate: p of ESFT-Gate, each in (0, 1].
        thresholds_token: p of ESFT-Token, each in (0, 1].
        ranks: Of LoRA, whole numbers from 1 to `RANKS`.
        group_sizes: Experts that share a gate, whole numbers from 2; see `grouping.check`.

    Returns:
        ``gate``, ``token``, ``lora`` and ``groups`` -> values.

    Raises:
        Refusal: E-TYPE for what is no such number, E-RANGE for a value outside its range, lists
            that do not rise, or unlike numbers of gate thresholds and ranks.
    """
    found = {
        "gate": _thresholds("thresholds_gate", thresholds_gate),
        "token": _thresholds("thresholds_token", thresholds_token),
        "lora": _sizes("ranks", ranks, 1, RANKS),
        "groups": _sizes("group_sizes", group_sizes, 2),
    }
    if len(found["gate"]) != len(found["lora"]):
        refuse(
            "E-RANGE",
            f"thresholds_gate has {len(found['gate'])} values ('{thresholds_gate}') and ranks"
            f" {len(found['lora'])} ('{ranks}'); expected as many, since they are compared in turn",
        )
    return found


def _thresholds(name: str, text: str) -> list[float]:
    found = _rising(name, text, float)
    for value in found:
        real(name, value, "(0, 1]")
    return found


def _sizes(name: str, text: str, low: int, high: float = float("inf")) -> list[float]:
    found = _rising(name, text, int)
    for value in found:
        whole(name, value, low, high)
    return found


def _rising(name: str, text: str, kind: type[int] | type[float]) -> list[float]:
    """Read the numbers of a text, or refuse one that is none or that does not rise."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        expected = "whole numbers" if kind is int else "numbers"
        refuse("E-TYPE", f"{name} is '{text}': {error}; expected {expected} with commas between")
    if found != sorted(set(found)):
        refuse("E-RANGE", f"{name} is '{text}', expected rising numbers, each once")
    return found
