"""The settings of sparse upcycling, and the arms of the paper's comparisons and the laboratory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from moebook.errors import refuse
from moebook.settings import settings

Rule = Literal["renormalised", "probability"]


@settings
class Config:
    """How a dense decoder becomes a sparse one with full experts (router-initialisation Sec. 4).

    What ``combine`` does at step 0, while all experts are copies of the dense FFN:

    - ``"probability"`` (Eq. 2 as printed): a layer's output is the dense FFN's times the sum of the
      token's K largest probabilities, between K/E and 1, so the model is NOT the dense one. The
      router has a gradient, even with K = 1.
    - ``"renormalised"`` (Mixtral, and so what mergekit writes): the weights sum to 1, the model is
      the dense one. But with K = 1 (a constant weight) and with K = 2 and equal experts the
      language-model loss gives the router no gradient. Noise in the experts restores it for K = 2.

    Attributes:
        experts: E, copies of the FFN per layer (2 or 4 in the paper).
        top_k: K, experts per token (1 in the paper).
        combine: See above.
        noise: Standard deviation of Gaussian noise on each expert's weights, as a share of that of
            the dense tensor it is added to; 0 (the paper's) copies.
        layers: Decoder layers to upcycle; None for all of them (the paper's).
        balance_weight: alpha of Eq. 3, which the paper never gives; 0.01 is Switch's.
        seed: Of the noise, and of the random router that `upcycle` draws when it is given none.
    """

    experts: Annotated[int, Field(ge=1)] = 4
    top_k: Annotated[int, Field(ge=1)] = 1
    combine: Rule = "probability"
    noise: Annotated[float, Field(ge=0)] = 0.0
    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    balance_weight: Annotated[float, Field(ge=0)] = 0.01
    seed: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            refuse("E-RANGE", f"top_k is {self.top_k}, expected 1 to {self.experts} (experts)")
        if len(set(self.layers or ())) < len(self.layers or ()):
            refuse("E-RANGE", f"layers names a layer twice: {self.layers}")


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
"""Start and length of the laboratory's arms, all with four experts; "": the main arms' length."""

LED = ("su4", "crsu")
"""The arms that are tested after each quarter (Table 5) and compared with the laboratory's."""


@dataclass(frozen=True)
class Arm:
    """One of the trainings that are compared.

    ``path`` is where its values are recorded (``crsu``, ``lab/wide``); ``length`` a scale of
    `scaled`; ``scored`` the steps after which the model is tested, ``watched`` those after which
    its routing is recorded. The dense model has one expert and no start.
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
    """Return every arm by name; those of the laboratory train for a quarter of the steps.

    ``length`` is that of centroids, unless `LABORATORY` has another; ``combine`` the rule of all
    arms but those whose name ends in ``renormalised``.
    """
    every, table = tuple(quarters(steps).values()), {}
    short = every[0]
    for name, (experts, start) in MAIN.items():
        rows = "raw" if start == "random" else length
        scored = every if name in LED else (steps,)
        watched = (thirds(steps) if start else ()) + (thirds(short) if name in LED else ())
        table[name] = Arm(name, experts, start, rows, combine, steps, scored, watched)
    for name, (start, fixed) in LABORATORY.items():
        rule = "renormalised" if name.endswith("renormalised") else combine
        path, rows = f"lab/{name}", fixed or length
        table[name] = Arm(path, 4, start, rows, rule, short, (short,), thirds(short))
    return table


def quarters(steps: int) -> dict[int, int]:
    """Return the steps after which 25, 50, 75 and 100 per cent of a training are done."""
    return {part: max(1, steps * part // 100) for part in (25, 50, 75, 100)}


def thirds(steps: int) -> tuple[int, ...]:
    """Return the checkpoints of Table 6: the start, a third, two thirds and the end."""
    return tuple(steps * part // 3 for part in range(4))
