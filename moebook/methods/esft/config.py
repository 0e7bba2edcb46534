"""The settings of ESFT: each choice that paper and code disagree on is a switch; three presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moebook.methods import settings

CHOICES = {"score": ("token", "gate"), "pooling": ("tokens", "samples")}
FLAGS = ("normalised", "shared_experts", "non_expert_modules", "router")


@dataclass(frozen=True, kw_only=True)
class Config:
    """How experts are scored and chosen, and what trains beside them (ESFT Sec. 3.3).

    The defaults are the preset ``fixed``. The paper's thresholds are 0.2 for the token score and
    0.1 for the gate score (Sec. 4.3).

    Attributes:
        score: Relevance of an expert: ``"token"``, the share of routed slots that it gets (Eq. 7),
            or ``"gate"``, the mean of its gates (Eq. 6).
        threshold: p of Eq. 8, in (0, 1]: the best experts of a layer are taken until their scores
            reach it.
        pooling: Average over all ``"tokens"`` (released), or within each of the ``"samples"`` and
            then over these (Eq. 6 and 7 as printed).
        normalised: Whether a layer's scores are divided by their sum first, so that p is a share
            of the total as the paper says. The released code does not; the token scores sum to 1
            anyway, the gate scores only where the host renormalises its gates.
        decimals: Places to which scores are rounded before the choice (released: 4), or None.
        shared_experts: Whether the shared experts train too.
        non_expert_modules: Whether all else outside the MoE layers' experts and routers trains too:
            attention, norms, embeddings, dense layers, head.
        router: Whether the routers train too (the released code counts them to the former).

    Raises:
        Refusal: E-RANGE, E-TYPE or E-CHOICE, naming the field and its value.
    """

    score: str = "token"
    threshold: float = 0.2
    pooling: str = "tokens"
    normalised: bool = False
    decimals: int | None = None
    shared_experts: bool = False
    non_expert_modules: bool = False
    router: bool = False

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            settings.chosen(name, getattr(self, name), choices)
        for name in FLAGS:
            settings.flag(name, getattr(self, name))
        settings.real("threshold", self.threshold, "(0, 1]")
        if self.decimals is not None:
            settings.whole("decimals", self.decimals, 1, 15)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Config:
        """Return a named set of settings, with single fields changed.

        ``paper`` is the text: averages within samples, p a share of the total. ``released`` is the
        authors' code, from which the published experts follow: averages over tokens, four decimals,
        plain sums. ``fixed`` is the same without the rounding: the defaults.

        Raises:
            Refusal: E-CHOICE for an unknown preset or field.
        """
        return settings.preset(cls, PRESETS, name, changes)


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"pooling": "samples", "normalised": True},
    "released": {"decimals": 4},
    "fixed": {},
}
