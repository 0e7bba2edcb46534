"""The settings of PESC: each choice that the paper leaves open is a switch; three presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moebook.errors import refuse
from moebook.methods import settings

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHOICES = {
    "down_init": ("kaiming", "zero"),
    "balance": ("live", "constant", "none"),
    "host": ("frozen", "lora", "qlora", "full"),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a dense decoder is crafted into a sparse one and what of it trains (PESC Sec. 2, 3.1).

    The defaults are the preset ``fixed``. What the paper and its code disagree on in training alone
    (sequence 2048 or 512, batch 128 or 256, warm-up ratio 0.03 or 200 steps) is not part of the
    model and stands with the papers' hyper-parameters.

    Attributes:
        experts: E, adapters a layer, at least 1.
        top_k: K, experts per token, 1 to E (2 in the paper).
        adapter_width: R, 1 to D. 512 is what the printed sizes imply; the released code trains 64.
        adapter_scale: Factor on the adapters' output in training (1 in Eq. 8).
        served_scale: The same in evaluation mode. The released code trains with 1 and merges with
            0.25, so what is served is not what was trained.
        adapter_dropout: Share in [0, 1) dropped before ``down`` (0.1 as released; the paper is
            silent).
        down_init: Start of ``down``: ``"kaiming"`` (released) or ``"zero"`` (the paper's omega_0 =
            0, read literally: such adapters never receive a gradient). ``up`` is 0 in both.
        layers: Decoder layers to craft; None for all of them.
        balance: Eq. 10: ``"live"`` (probabilities over all experts), ``"constant"`` (as released,
            the constant E/K without gradient), ``"none"``.
        balance_weight: alpha of Eq. 10, at least 0.
        host: What of the host trains: ``"frozen"`` nothing, ``"lora"`` LoRA, ``"qlora"`` LoRA over
            NF4 weights with double quantisation, ``"full"`` everything (for bases of a few million
            weights).
        lora_rank, lora_alpha, lora_dropout, lora_targets: LoRA's settings, as released.

    Raises:
        Refusal: E-RANGE, E-TYPE or E-CHOICE, naming the field and its value.
    """

    experts: int = 8
    top_k: int = 2
    adapter_width: int = 512
    adapter_scale: float = 1.0
    served_scale: float = 1.0
    adapter_dropout: float = 0.1
    down_init: str = "kaiming"
    layers: tuple[int, ...] | None = None
    balance: str = "live"
    balance_weight: float = 0.01
    host: str = "qlora"
    lora_rank: int = 64
    lora_alpha: float = 16.0
    lora_dropout: float = 0.1
    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            settings.chosen(name, getattr(self, name), choices)
        for name in ("experts", "top_k", "adapter_width", "lora_rank"):
            settings.whole(name, getattr(self, name), 1)
        if self.top_k > self.experts:
            refuse("E-RANGE", f"top_k is {self.top_k}, expected 1 to {self.experts} (experts)")
        for name in ("adapter_scale", "served_scale"):
            settings.real(name, getattr(self, name))
        for name in ("balance_weight", "lora_alpha"):
            settings.real(name, getattr(self, name), "[0, inf)")
        for name in ("adapter_dropout", "lora_dropout"):
            settings.real(name, getattr(self, name), "[0, 1)")
        targets = self.lora_targets
        if not isinstance(targets, tuple) or not targets or not set(targets) <= set(LORA_TARGETS):
            refuse("E-CHOICE", f"lora_targets is {targets!r}, expected some of {LORA_TARGETS}")
        settings.layers(self.layers)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Config:
        """Return a named set of settings, with single fields changed.

        ``paper`` is the text read literally: every adapter weight starts at zero, no adapter
        dropout. ``released`` is the authors' code: width 64, the constant balance loss, scale 1 in
        training and 0.25 when served. ``fixed`` is what the paper means and what works: the
        defaults.

        Raises:
            Refusal: E-CHOICE for an unknown preset or field.
        """
        return settings.preset(cls, PRESETS, name, changes)


def reading(name: str) -> dict[str, Any]:
    """Return how a preset reads what the paper leaves open: start, dropout, scales, balance loss.

    Sizes and the host's tuning are left out: ``replace(config, **reading("paper"))`` differs
    from ``config`` by the reading alone.

    Raises:
        Refusal: E-CHOICE for an unknown preset.
    """
    preset = Config.preset(name)
    return {field: getattr(preset, field) for field in OPEN}


OPEN = (
    "adapter_scale", "served_scale", "adapter_dropout", "down_init", "balance", "balance_weight",
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"down_init": "zero", "adapter_dropout": 0.0},
    "released": {"adapter_width": 64, "served_scale": 0.25, "balance": "constant"},
    "fixed": {},
}
