"""The settings of sparse upcycling, and the arms of the paper's comparisons and the laboratory."""

from __future__ import annotations

from itertools import product
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from moebook.errors import refuse
from moebook.settings import Count, Seed, Size, checked, settings

Rule = Literal["renormalised", "probability", "scaled"]
Length = Literal["raw", "unit", "matched"]


@settings
class Config:
    """How a dense decoder becomes a sparse one with full experts (router-initialisation Sec. 4).

    ``"probability"`` (Eq. 2 as printed) makes a layer's output at step 0 the dense FFN's times the
    sum of the token's K largest probabilities, between K/E and 1. That is NOT the dense model, but
    the router has a gradient, even with K = 1. Where the host norms what its FFN puts out (Gemma 2,
    OLMo 2), that factor cancels. ``"renormalised"`` (Mixtral, mergekit): the weights sum to 1, so
    the model is the dense one.

    Where the sum is 1 or cancels, the language-model loss never reaches the router with K = 1. With
    K > 1 it does once the experts differ: with ``noise`` at once, else after the first step.

    ``"scaled"`` (ours) is Eq. 2 with one factor a layer on the experts' outputs. By it a start that
    is `levelled` makes up for the probabilities' sum at step 0, in the mean over tokens. None of
    ``layers`` stands for all of them (the paper's).
    """

    experts: Size = 4  #: E, copies of the FFN per layer (2 or 4 in the paper)
    top_k: Size = 1  #: K, experts per token
    #: How a token's experts are weighted, see above.
    combine: Rule = "probability"
    #: Deviation, as a share of the weights'.
    noise: Annotated[float, Field(ge=0, le=1000)] = 0.0
    #: Decoder layers to upcycle; None for all of them.
    layers: (
        Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None
    ) = None
    #: alpha of Eq. 3, not given; Switch's.
    balance_weight: Annotated[float, Field(ge=0)] = 0.01
    seed: Seed = 0  #: of the noise, and of routers without a start

    LETTERS: ClassVar = {
        "N": "experts",
        "E": "experts",
        "K": "top_k",
        "k": "top_k",
        "alpha": "balance_weight",
    }

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            refuse(
                "E-RANGE",
                f"top_k is {self.top_k}, expected 1 to {self.experts} (experts)",
            )
        if len(set(self.layers or ())) < len(self.layers or ()):
            refuse("E-RANGE", f"layers names a layer twice: {self.layers}")


# What an arm's name may end with: its own rule, whichever the others have.
RULES: tuple[Rule, ...] = ("renormalised", "scaled")
# Experts, start, and the length of its rows; "" is the length that was asked for.
MAIN: dict[str, tuple[int, str, Length | Literal[""]]] = {
    "dense": (1, "", ""),  # Tables 1 and 2
    "su": (2, "random", ""),  # Tables 1, 6 and 7
    "trsu": (2, "trsu", ""),  # Tables 1, 3 and 7
    "su4": (4, "random", ""),  # Tables 2, 5 and 6
    "crsu": (4, "crsu", ""),  # Tables 2 and 4 to 6
    "trsu3": (3, "trsu3", ""),  # Table 3
    "crsu2": (2, "crsu", ""),  # Tables 4 and 6
    "su8": (8, "random", ""),  # Table 6
    "crsu8": (8, "crsu", ""),  # Tables 4 and 6
}
# The pairs of Tables 1 and 2 once more, under each of the rules.
_RULED = product(RULES, ("su", "trsu", "su4", "crsu"))
MAIN |= {f"{name}_{rule}": MAIN[name] for rule, name in _RULED}
LABORATORY: dict[str, tuple[int, str, Length | Literal[""]]] = {
    "kaiming": (4, "kaiming", "raw"),
    "wide": (4, "wide", "raw"),
    "random_matched": (4, "random", "matched"),
    "crsu_matched": (4, "crsu", "matched"),
    "ffn_input": (4, "ffn_input", "matched"),
    "trsu4": (4, "trsu", ""),
    "hidden": (4, "hidden", "raw"),
    "hidden_avg": (4, "hidden_avg", "raw"),
    "cheap_embed": (4, "cheap_embed", "raw"),
}
# Tested after each quarter (Table 5), compared with the laboratory's.
LED = ("su4", "crsu", "su4_renormalised", "crsu_renormalised")


class Arm(NamedTuple):
    """One of the trainings that are compared; the dense model has one expert and no start."""

    path: str  # where its values are recorded: crsu, lab/wide
    experts: int
    start: str
    length: Length  # a scale of `scaled`
    combine: Rule
    steps: int
    scored: tuple[int, ...]  # steps after which the model is tested
    watched: tuple[int, ...]  # steps after which its routing is recorded
    # Steps after which its loss on held-out rows shows how it recovers from its start.
    recovery: tuple[int, ...]

    @property
    def laboratory(self) -> bool:
        """Whether it belongs to the laboratory."""
        return self.path.startswith("lab/")


@checked
def arms(
    steps: Count,
    *,
    length: Length = "raw",
    combine: Rule = "probability",
) -> dict[str, Arm]:
    """Return every arm by name: Tables 1 to 7, and the laboratory with a quarter of the steps."""
    parts = tuple(quarters(steps).values())
    table: dict[str, Arm] = {}
    for name, (experts, start, fixed) in (MAIN | LABORATORY).items():
        lab = name in LABORATORY
        led = name in LED
        last = parts[0] if lab else steps
        # The dense arm has no routing to watch.
        watched = thirds(last) if start else ()
        if led:
            # The laboratory's arms, compared with these, end after a quarter.
            watched += thirds(parts[0])
        # "crsu_scaled" ends on a rule, "crsu_matched" on none.
        named = name.rpartition("_")[2]
        table[name] = Arm(
            path=f"lab/{name}" if lab else name,
            experts=experts,
            start=start,
            length=fixed or length,
            combine=named if named in RULES else combine,
            steps=last,
            scored=parts if led else (last,),
            watched=watched,
            recovery=() if lab else doublings(last),
        )
    return table


@checked
def doublings(steps: Count) -> tuple[int, ...]:
    """Return 0, 1, 2, 4 and so on, and the last step: where most of a recovery is seen."""
    places = [0]
    step = 1
    while step < steps:
        places.append(step)
        step *= 2
    return (*places, steps)


@checked
def quarters(steps: Count) -> dict[int, int]:
    """Return the steps after which 25, 50, 75 and 100 per cent of a training are done."""
    # A training of fewer than 4 steps has no whole quarter: it counts as one step.
    return {part: max(1, steps * part // 100) for part in (25, 50, 75, 100)}


@checked
def thirds(steps: Count) -> tuple[int, ...]:
    """Return the checkpoints of Table 6: the start, a third, two thirds and the end."""
    return tuple(steps * part // 3 for part in range(4))
