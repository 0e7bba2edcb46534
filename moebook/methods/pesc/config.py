"""The settings of PESC: every choice that the paper leaves open is a switch; three presets."""

from __future__ import annotations

import re
import warnings
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from moebook.errors import refuse
from moebook.settings import Presets, Share, Size, checked, settings

Target = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]
Weight = Annotated[float, Field(ge=0)]


@settings
class Config(Presets):
    """How a dense decoder is crafted into a sparse one and what of it trains (PESC Sec. 2, 3.1).

    The defaults are the preset ``fixed``; ``paper`` is the text and ``released`` its code. The
    recipe is no part of this (sequence 2048 or 512, batch 128 or 256, warm-up 0.03 or 200 steps).

    Attributes:
        down_init: ``down`` starts ``"kaiming"`` (released) or ``"zero"`` (the paper's omega_0 = 0,
            read literally: such adapters never receive a gradient). ``up`` is 0 in both.
        layers: Decoder layers to craft; None for all of them.
        balance: Eq. 10: ``"live"`` (probabilities over all experts), ``"kept"`` (the gates of
            Eq. 9, literally), ``"constant"`` (as released, the constant E/K without gradient),
            ``"none"``; its alpha is ``balance_weight``.
        host: What of the host trains: ``"frozen"`` nothing, ``"lora"`` LoRA, ``"qlora"`` LoRA over
            NF4 weights with double quantisation, ``"full"`` everything (for small bases).
    """

    experts: Size = 8  #: E, adapters a layer
    #: K, experts per token; with 1 only the balance loss reaches the routers.
    top_k: Size = 2
    #: R; the printed sizes imply 512, the released code trains 64.
    adapter_width: Size = 512
    #: Factor on the adapters' output in training (1 in Eq. 8).
    adapter_scale: float = 1.0
    served_scale: float = 1.0  #: the same in evaluation (0.25 as released)
    #: Dropped before ``down`` (0.1 as released; the paper is silent).
    adapter_dropout: Share = 0.1
    down_init: Literal["kaiming", "zero"] = "kaiming"
    layers: (
        Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None
    ) = None
    balance: Literal["live", "kept", "constant", "none"] = "live"
    #: alpha of Eq. 10.
    balance_weight: Weight = 0.01
    host: Literal["frozen", "lora", "qlora", "full"] = "qlora"
    lora_rank: Size = 64  #: LoRA's R; its settings are as released
    #: LoRA's alpha.
    lora_alpha: Weight = 16.0
    #: Dropped before each LoRA.
    lora_dropout: Share = 0.1
    #: The linear layers that get a LoRA.
    lora_targets: Annotated[tuple[Target, ...], Field(min_length=1)] = get_args(Target)

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            refuse(
                "E-RANGE",
                f"top_k is {self.top_k}, expected 1 to {self.experts} (experts)",
            )
        if self.top_k == 1 < self.experts:
            why = "top_k is 1: each token's gate is 1, only the balance loss reaches the routers"
            warnings.warn(f"W-ROUTER: {why}; take top_k=2", stacklevel=5)
        if self.layers and len(set(self.layers)) < len(self.layers):
            refuse("E-RANGE", f"layers names a layer twice: {self.layers}")

    LETTERS: ClassVar = {
        "n": "experts",
        "E": "experts",
        "K": "top_k",
        "R": "adapter_width",
        "alpha": "balance_weight",
    }
    PRESETS: ClassVar = {
        # Sec. 2.2: omega_0 is zero; Eq. 10 over the gates of Eq. 9.
        "paper": {"down_init": "zero", "adapter_dropout": 0.0, "balance": "kept"},
        "released": {"adapter_width": 64, "served_scale": 0.25, "balance": "constant"},
        "fixed": {},
    }


OPEN = "adapter_scale served_scale adapter_dropout down_init balance balance_weight".split()
GROUPS = {
    **dict.fromkeys(("humaneval", "mbpp", "solutions_mbpp"), "code"),
    **dict.fromkeys(("gsm8k", "hendrycks_math", "solutions_gsm8k"), "mathematics"),
    **dict.fromkeys(
        "piqa hellaswag winogrande arc_easy arc_challenge".split(), "common_sense"
    ),
    **dict.fromkeys(("openbookqa", "social_iqa", "boolq_closed"), "common_sense"),
    **dict.fromkeys(("nq_open", "triviaqa"), "knowledge"),
    "mmlu": "mmlu",
}
"""The paper's twelve benchmarks, by lm-eval's names, to the paper's group (Table 3), and ours.

HumanEval and MBPP run what the model wrote, in a sandbox (`evaluation.code`). MATH is
`hendrycks_math`: lm-eval's `minerva_math` has the paper's 4 shots, but needs further packages.
"""


HUB = re.compile(r"\w[\w.-]*/[\w.-]+@\w+")  # org/name@commit
SIZE = re.compile("(?<![0-9])(13|34)b(?![a-z0-9])")  # no part of 113b or of 34bit


@checked
def reading(name: str) -> dict[str, Any]:
    """Return how a preset reads what the paper leaves open: start, dropout, scales, balance loss.

    ``replace(config, **reading("paper"))`` keeps the sizes and the host's tuning of ``config``.
    """
    preset = Config.preset(name)
    return {field: getattr(preset, field) for field in OPEN}


@checked
def root(base: str, mix: str) -> str:
    """Name a run's values by base and mixture (Table 2): ``pesc``, ``pesc/34b/pro`` (IDAE-720K).

    A folder's last part tells the base's size; folders above it may be named after anything.
    """
    name = base
    if HUB.fullmatch(base):
        # Without the commit, whose digits may read 13b or 34b, too.
        name = base.partition("@")[0]
    found = SIZE.search(PurePath(name).name.lower())
    size = f"/{found[0]}" if found else ""
    return "pesc" + size + ("/pro" if mix == "idae-720k" else "")
