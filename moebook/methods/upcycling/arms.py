"""The arms of the paper's comparisons and of the laboratory: start, length, rule, steps."""

from __future__ import annotations

from dataclasses import dataclass

MAIN = {
    "dense": (1, ""), "su": (2, "random"), "trsu": (2, "trsu"), "su4": (4, "random"),
    "crsu": (4, "crsu"), "trsu3": (3, "trsu3"), "crsu2": (2, "crsu"), "su8": (8, "random"),
    "crsu8": (8, "crsu"),
}  # fmt: skip
"""Experts and start of the arms of Tables 1 to 7, by name."""

LABORATORY = {
    "kaiming": ("kaiming", "raw"), "wide": ("wide", "raw"), "random_matched": ("random", "matched"),
    "crsu_matched": ("crsu", "matched"), "ffn_input": ("ffn_input", "matched"),
    "trsu4": ("trsu", ""), "hidden": ("hidden", "raw"), "hidden_avg": ("hidden_avg", "raw"),
    "cheap_embed": ("cheap_embed", "raw"), "su4_renormalised": ("random", "raw"),
    "crsu_renormalised": ("crsu", ""),
}  # fmt: skip
"""Start and length of the further arms, all with four experts; no length: that of the main arms."""

LED = ("su4", "crsu")
"""The arms that are tested after each quarter (Table 5), and compared with the laboratory's."""


@dataclass(frozen=True)
class Arm:
    """One training among those that are compared.

    Attributes:
        path: Where its values stand below the notebook's: ``crsu``, or ``lab/wide``.
        experts: E; 1 is the dense model itself, without a router.
        start: Where the routers start; empty for the dense model.
        length: Of the start's rows, a scale of `scaled`.
        combine: A rule of `Config`.
        steps: Optimizer steps, a quarter of them in the laboratory.
        scored: Steps after which the model is tested.
        watched: Steps after which one looks which experts tokens activate.
    """

    path: str
    experts: int
    start: str
    length: str
    combine: str
    steps: int
    scored: tuple[int, ...]
    watched: tuple[int, ...]

    @property
    def laboratory(self) -> bool:
        """Whether it belongs to the laboratory."""
        return self.path.startswith("lab/")


def arms(steps: int, *, length: str = "raw", combine: str = "probability") -> dict[str, Arm]:
    """Return every arm by name.

    Args:
        steps: Of the main arms, at least 4.
        length: Of the rows that are centroids, unless the laboratory's table has another.
        combine: Of all arms but those whose name ends in ``renormalised``.
    """
    every, found = tuple(quarters(steps).values()), {}
    short = every[0]
    for name, (experts, start) in MAIN.items():
        rows = "raw" if start == "random" else length
        scored = every if name in LED else (steps,)
        watched = thirds(steps) if start else ()
        watched += thirds(short) if name in LED else ()
        found[name] = Arm(name, experts, start, rows, combine, steps, scored, watched)
    for name, (start, own) in LABORATORY.items():
        rule = "renormalised" if name.endswith("renormalised") else combine
        rows, watched = own or length, thirds(short)
        found[name] = Arm(f"lab/{name}", 4, start, rows, rule, short, (short,), watched)
    return found


def quarters(steps: int) -> dict[int, int]:
    """Return after how many steps a training has had 25, 50, 75 and 100 per cent of them."""
    return {part: max(1, steps * part // 100) for part in (25, 50, 75, 100)}


def thirds(steps: int) -> tuple[int, ...]:
    """Return the checkpoints of Table 6: the start, a third, two thirds and the end."""
    return tuple(steps * part // 3 for part in range(4))
