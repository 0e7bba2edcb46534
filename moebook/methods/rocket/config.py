"""The settings of Rocket: where paper and code disagree there is a switch; three presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moebook.errors import refuse
from moebook.methods import settings

CHOICES = {
    "reduction": ("mean", "sum"),
    "rationale": ("answer_first", "rationale_first"),
    "compare": ("product", "factors"),
    "cosine": ("signed", "absolute"),
    "diversity": ("ordered", "inverse"),
    "ranking": ("sum", "normalised"),
    "sampler": ("maximum", "centroid", "random", "hull", "kde"),
    "duplicates": ("standing", "any", "index", "repr", "keep"),
    "gate_input": ("layer", "expert"),
    "lora_scale": ("applied", "omitted"),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """How experts and data are chosen by K shots, and how the mixture is put together.

    The defaults are the preset ``fixed``.

    Attributes:
        shots: K, at least 1 (50 in the paper).
        reduction: Eq. 1's exponent: ``"mean"`` over the answer's tokens (released) or ``"sum"``
            (the paper's text, which ranks by length).
        rationale: Whether Phi (Eq. 3) puts the answer first (Fig. 3) or the rationale (Table 8).
        compare: Eq. 6 compares ``"product"``, the matrices B A, or ``"factors"``, A and B apart
            and by the absolute value of their cosines (released).
        cosine: ``"signed"`` as Eq. 6 has it, or ``"absolute"``.
        diversity: ``"inverse"`` orders groups by Eq. 6 as printed, which turns over where the mean
            cosine is negative; ``"ordered"`` by the mean cosine itself, the least one first, which
            is the same order wherever Eq. 6 means something.
        ranking: ``"sum"`` as in Alg. 1, or ``"normalised"``: each of the three sums of ranks is
            brought to [0, 1] over all groups first, since that of diversity has the widest range.
        candidates: M, at least N (8).
        experts: N, at least 1 (4).
        top_k: k, experts per token, 1 to N (2).
        sampler: How open data are drawn: ``"maximum"`` cosine over the shots (Eq. 13),
            ``"centroid"``: least Euclidean distance to the shots' centroid (released),
            ``"random"``, ``"hull"`` (Eq. 16), ``"kde"`` (Eq. 17).
        budget: C, at least 1 (1000; released 5000).
        threshold: tau, in [-1, 1]; two rows are duplicates when their cosine is larger (0.9).
        duplicates: Which rows stay, see `augmentation.deduplicate`: ``"standing"`` is Alg. 2 line
            by line, ``"any"`` SemDeDup's rule, ``"index"`` as released, ``"repr"`` the Repr
            filter, ``"keep"`` keeps all.
        gamma: Bandwidth of Eq. 17, above 0.
        components: Principal axes of the shots in which the hull is taken, at least 1. K points
            span at most K - 1 dimensions, so in the encoder's own space no other text lies inside.
        gate_input: What a gate reads: the ``"layer"``'s input (released) or each ``"expert"``'s
            output (Eq. 9).
        lora_scale: Whether alpha / r is ``"applied"`` or ``"omitted"`` (released).
        lora_dropout: Share in [0, 1) dropped before the experts in training (0.05 as released).

    Raises:
        Refusal: E-CHOICE, E-TYPE or E-RANGE, naming the field and its value.
    """

    shots: int = 50
    reduction: str = "mean"
    rationale: str = "answer_first"
    compare: str = "product"
    cosine: str = "signed"
    diversity: str = "ordered"
    ranking: str = "sum"
    candidates: int = 8
    experts: int = 4
    top_k: int = 2
    sampler: str = "maximum"
    budget: int = 1000
    threshold: float = 0.9
    duplicates: str = "standing"
    gamma: float = 2.0
    components: int = 2
    gate_input: str = "layer"
    lora_scale: str = "applied"
    lora_dropout: float = 0.05

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            settings.chosen(name, getattr(self, name), choices)
        for name in ("shots", "candidates", "experts", "top_k", "budget", "components"):
            settings.whole(name, getattr(self, name), 1)
        if self.experts > self.candidates:
            refuse(
                "E-RANGE",
                f"experts (N) is {self.experts}, expected 1 to {self.candidates} (candidates, M)",
            )
        if self.top_k > self.experts:
            refuse("E-RANGE", f"top_k is {self.top_k}, expected 1 to {self.experts} (experts, N)")
        settings.real("threshold", self.threshold, "[-1, 1]")
        settings.real("lora_dropout", self.lora_dropout, "[0, 1)")
        settings.real("gamma", self.gamma, "(0, inf)")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Config:
        """Return a named set of settings, with single fields changed.

        ``paper`` is the text read literally. ``released`` is what the authors' code does, with
        Alg. 1 in place of its fixed lists of experts. ``fixed`` is the defaults.

        Raises:
            Refusal: E-CHOICE for an unknown preset or field.
        """
        return settings.preset(cls, PRESETS, name, changes)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "reduction": "sum",
        "diversity": "inverse",
        "gate_input": "expert",
        "lora_dropout": 0.0,
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
