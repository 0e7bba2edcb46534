"""Arrow: a LoRA is wanted where a token lies along the direction that the LoRA amplifies most.

``score_n = |v_n . x|`` with ``v_n`` the top right singular vector of ``B_n A_n``; a softmax over a
token's k largest scores weights the LoRAs, in each layer anew. No row is needed and nothing is
trained. Ostapenko et al. (2024), Towards Modular LLMs by Building and Reusing a Library of LoRAs,
arXiv 2405.11157; code: microsoft/mttl. k = 4 is mttl's README's; that it is the paper's too, as is
temperature 1, we did not verify in its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from moebook.errors import refuse
from moebook.kernels.dispatch import shapes
from moebook.methods.rivals import mixing, tuning
from moebook.methods.rivals.tuning import Data, Tuned
from moebook.methods.rocket.bank import Bank, check
from moebook.settings import Count, Positive, Presets, settings

__all__ = [
    "Config",
    "attach",
    "load",
    "tuned",
]


@settings
class Config(Presets):
    """How scores become weights, and what may be tuned. The defaults are the preset ``bank``.

    ``paper`` trains nothing; so does ``released``, the defaults of mttl's class, with all LoRAs
    at once, and ``peft``, whose users get three and their outputs mixed. ``bank`` tunes four a
    token, as Rocket must have.

    Attributes:
        mix: The factors of a token's LoRAs (mttl, and a survey's reading of the paper), or their
            outputs (PEFT), which is the faster.
        top_k: LoRAs a token uses; None for all (the default of mttl's class).
        temperature: The scores are divided by it.
        tune: Nothing (paper), or the LoRAs on the target's rows: Rocket's row saw them, and there
            is nothing else to train.
        prototypes: Taken from the LoRAs before, or again after the tuning.
    """

    mix: Literal["factors", "outputs"] = "factors"
    top_k: Count | None = 4
    temperature: Positive = 1.0
    tune: Literal["none", "experts"] = "experts"
    prototypes: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        if (self.tune, self.prototypes) == ("none", "after"):
            refuse(
                "E-CHOICE",
                "prototypes is 'after', but tune is 'none': set it to 'experts'",
            )

    PRESETS: ClassVar = {
        "paper": {"tune": "none"},
        "released": {"tune": "none", "top_k": None},
        "peft": {"tune": "none", "top_k": 3, "mix": "outputs"},
        "bank": {},
    }


@settings
class Origin(tuning.Origin):
    """What a model that Arrow routes was made from."""

    method: ClassVar[str] = "arrow"
    config: Config


class Arrow(nn.Module):
    """A token's weights ``[.., N]``: the softmax over its k largest ``|v_n . x| / T``, else 0."""

    def __init__(self, prototypes: Tensor, config: Config) -> None:
        super().__init__()
        self.top_k = config.top_k or len(prototypes)
        self.temperature = config.temperature
        self.register_buffer("prototypes", prototypes)  # [N, D]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., N]`` for ``x [..., D]``."""
        # |v_n . x|, since the sign of a singular vector is arbitrary: [..., N].
        scores = (x.to(self.prototypes.dtype) @ self.prototypes.mT).abs()
        return mixing.strongest(scores / self.temperature, self.top_k)


def prototypes(
    factors: Mapping[str, tuple[Tensor, Tensor]], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return what each LoRA amplifies most, ``[N, D]``, of A ``[N, R, D]`` and B ``[N, O, R]``.

    ``B A`` is not formed. With ``A' = Q T`` and ``B = P S`` its singular values are those of the
    R x R matrix ``S T'``, and Q turns that one's right vectors back. Exact, in float64 (mttl: three
    small SVDs). PEFT takes 15 power steps from a random start: over 40 random LoRAs of rank 16 the
    mean cosine with the truth was 0.84. The sign is arbitrary.
    """
    by_path = {}
    for path, (down, up) in factors.items():
        pair = {"down": (down, "N R D"), "up": (up, "N O R")}
        count = shapes(f"prototypes, {path}", pair, empty="")["N"]
        if count != len(names):
            refuse(
                "E-SHAPE",
                f"prototypes, {path}: factors of {count} LoRAs, {len(names)} names",
            )
        if not (down.isfinite().all() and up.isfinite().all()):
            refuse("E-NONFINITE", f"prototypes, {path}: factors hold NaN or infinity")
        # A' = Q T: [N, D, R] and [N, R, R]; shapes are those for R <= D and O.
        q, t = torch.linalg.qr(down.detach().double().mT)
        s = torch.linalg.qr(up.detach().double()).R  # B = P S
        # B A = P (S T') Q', P and Q orthonormal. The largest value comes first.
        _, values, right = torch.linalg.svd(s @ t.mT)  # [N, R], [N, R, R]
        # `check` refuses B A = 0 in all layers, but a prototype is needed in each. Where
        # terms of B A cancel, rounding leaves a direction of noise: in float64 some 1e-16
        # of |B| |A| a term. Factors trained in float32 are rounded by 6e-8 themselves.
        sizes = torch.linalg.matrix_norm(s) * torch.linalg.matrix_norm(t)  # |B| |A|
        has_one = values[:, 0] > 1e-12 * sizes  # [N]
        idle = [name for name, has in zip(names, has_one, strict=True) if not has]
        if idle:
            refuse(
                "E-BANK",
                f"'{idle[0]}' has B A = 0 in {path}, so no direction: leave it out",
            )
        # The right vector of the largest value, turned back: Q v, [N, D].
        by_path[path] = (q @ right[:, 0, :, None]).squeeze(-1)
    return by_path


def attach(model: nn.Module, bank: Bank, config: Config, *, seed: int = 0) -> Tuned:
    """Put the bank on the base, routed by its own directions; nothing is drawn by the seed."""
    check(bank, ranks=config.mix == "factors")
    mixing.check_choice(config.top_k or 1, bank)
    # The scales and zeros that `stack` puts into A and B leave directions as they are.
    parts = mixing.stack(bank, config.mix)
    factors = {path: (parts.down[path], parts.up[path]) for path in parts.down}
    start = prototypes(factors, tuple(bank))
    return tuning.attach(
        model,
        bank,
        lambda path, _: Arrow(start[path], config),
        mix=config.mix,
        learnt=_learnt(config),
        kind=Origin,
        config=config,
        seed=seed,
    )


def _learnt(config: Config) -> bool:
    """Say whether the LoRAs train."""
    return config.tune == "experts"


def tuned(
    model: nn.Module, bank: Bank, data: Data, config: Config, **recipe: Any
) -> Tuned:
    """Put the bank on the base, and tune the LoRAs if so set."""
    done = tuning.fit(attach(model, bank, config), data, **recipe)
    if config.prototypes == "after":
        factors = {path: (part.down, part.up) for path, part in done.parts.items()}
        # Tuning may leave a LoRA without a direction: then the rival comes off again.
        with tuning.undone(done):
            last = prototypes(factors, tuple(bank))
        for path, part in done.parts.items():
            part.weigh.prototypes.copy_(last[path])
    return done


def load(model: nn.Module, folder: str | Path) -> Tuned:
    """Restore what `Tuned.save` wrote onto its base."""
    return tuning.load_routed(model, folder, Origin, Arrow, _learnt)
