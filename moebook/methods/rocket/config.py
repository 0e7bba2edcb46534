"""The settings of Rocket: where paper and code disagree there is a switch; three presets."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moebook.errors import refuse
from moebook.settings import Count, Presets, Share, settings

Bandwidth = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Of a Gaussian kernel over embeddings: beyond these limits all rows are alike, or none are."""


@settings
class Config(Presets):
    """How K shots choose experts and data, and how the mixture is put together.

    The defaults are the preset ``fixed``. ``paper`` is the text read literally. ``released`` is
    what the authors' code does, with Alg. 1 in place of its fixed lists of experts.

    Attributes:
        reduction: Eq. 1's exponent: ``"mean"`` over the answer's tokens (released) or ``"sum"``
            (the paper's text, which ranks by length).
        rationale: Whether Phi (Eq. 3) puts the answer first (Fig. 3) or the rationale (Table 8).
        compare, cosine: Eq. 6 compares the matrices B A, or A and B apart and by the absolute value
            of their cosines (released); ``"absolute"`` takes that of the cosines of B A too.
        diversity: ``"inverse"`` orders groups by Eq. 6 as printed, which turns over where the mean
            cosine is negative; ``"ordered"`` by the mean cosine itself, the least one first.
        ranking: As in Alg. 1, or each of the three sums of ranks is brought to [0, 1] over all
            groups first, since that of diversity has the widest range.
        sampler: How open data are drawn: by the largest cosine over the shots (Eq. 13), the least
            Euclidean distance to their centroid (released), at random, out of their hull (Eq. 16)
            or by their density (Eq. 17).
        duplicates: Which rows stay, see `augment.deduplicate`.
        components: Principal axes of the shots in which the hull is taken: K points span at most
            K - 1 dimensions, so in the encoder's own space no other text lies inside.
        gate_input: A gate reads the layer's input (released) or each expert's output (Eq. 9).
    """

    shots: Count = 50  #: K, annotated rows
    reduction: Literal["mean", "sum"] = "mean"
    rationale: Literal["answer_first", "rationale_first"] = "answer_first"
    compare: Literal["product", "factors"] = "product"
    cosine: Literal["signed", "absolute"] = "signed"
    diversity: Literal["ordered", "inverse"] = "ordered"
    ranking: Literal["sum", "normalised"] = "sum"
    candidates: Count = 8  #: M, LoRAs to choose from
    experts: Count = 4  #: N, LoRAs of the mixture, at most M
    top_k: Count = 2  #: k, LoRAs per token, at most N
    sampler: Literal["maximum", "centroid", "random", "hull", "kde"] = "maximum"
    budget: Count = 1000  #: C, open rows to draw (5000 as released)
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.9  #: tau, of duplicates' cosine
    duplicates: Literal["standing", "any", "index", "repr", "keep"] = "standing"
    gamma: Bandwidth = 2.0  #: bandwidth of Eq. 17
    components: Count = 2
    gate_input: Literal["layer", "expert"] = "layer"
    #: Whether alpha / R counts (as released it does not).
    lora_scale: Literal["applied", "omitted"] = "applied"
    lora_dropout: Share = 0.05  #: before the experts, in training (0.05 as released)

    def __post_init__(self) -> None:
        if self.experts > self.candidates:
            limit = f"1 to {self.candidates} (candidates, M)"
            refuse("E-RANGE", f"experts (N) is {self.experts}, expected {limit}")
        if self.top_k > self.experts:
            refuse(
                "E-RANGE",
                f"top_k is {self.top_k}, expected 1 to {self.experts} (experts, N)",
            )

    LETTERS: ClassVar = {
        "K": "shots",
        "M": "candidates",
        "N": "experts",
        "k": "top_k",
        "C": "budget",
        "tau": "threshold",
    }
    PRESETS: ClassVar = {
        "paper": {
            "reduction": "sum",  # Eq. 1
            "diversity": "inverse",  # Eq. 6
            "gate_input": "expert",  # Eq. 9
            "lora_dropout": 0.0,  # the paper names none
        },
        "released": {
            "rationale": "rationale_first",
            "compare": "factors",
            "cosine": "absolute",
            "sampler": "centroid",
            "budget": 5000,
            "duplicates": "index",
            "lora_scale": "omitted",
        },
        "fixed": {},
    }
