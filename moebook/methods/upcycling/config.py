"""The settings of sparse upcycling: each choice that the paper leaves open is a switch."""

from __future__ import annotations

from dataclasses import dataclass

from moebook.errors import refuse
from moebook.kernels.route import COMBINE
from moebook.methods import settings


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a dense decoder becomes a sparse one with full experts (router-initialisation Sec. 4).

    What ``combine`` does at step 0, while all experts are copies of the dense FFN:

    - ``"probability"`` (Eq. 2 as printed): each sparse layer puts out the dense FFN's output times
      ``s``, the sum of the token's K largest probabilities, between K/E and 1. So the upcycled
      model is NOT the dense one until training has made up for it. The router's gradient lives,
      also with K = 1.
    - ``"renormalised"`` (Mixtral, and so what mergekit writes): the weights sum to 1, the model is
      the dense one exactly. But with K = 1 the only weight is the constant 1 and the language-model
      loss never reaches the router; with K = 2 and equal experts it does not at step 0 either (the
      two outputs are the same, so shifting weight between them changes nothing). Then only the
      balance loss moves the router. Noise in the experts brings the gradient of K = 2 to life.

    Measured on ``nano`` (4 layers of width 128, E = 4, routers N(0, 0.02^2), held-out rows of eight
    tasks; dense loss 4.34 nats): ``"probability"`` starts at 6.50 (K = 1) and 4.92 (K = 2) with
    router gradients of norm 3.7 and 1.6; ``"renormalised"`` at 4.34 with 0 (K = 1) and 7e-8
    (K = 2, rounding). With probabilities it is the routers' certainty that decides the start: N(0,
    1), which chooses as blindly but surely, starts at 4.51 (K = 1).

    Attributes:
        experts: E, copies of the FFN a layer, at least 1 (2 or 4 in the paper).
        top_k: K, experts per token, 1 to E (1 in the paper).
        combine: ``"probability"`` or ``"renormalised"``, see above.
        noise: Standard deviation of Gaussian noise on each expert's weights, as a share of the
            standard deviation of the dense tensor that it is added to; 0 (the paper's) copies.
        layers: Decoder layers to upcycle; None for all of them (the paper's).
        balance_weight: alpha of Eq. 3, at least 0. The paper never gives it; 0.01 is that of the
            Switch Transformer, which it follows.
        seed: Of the noise, and of the random router that `upcycle` draws when it is given none.

    Raises:
        Refusal: E-RANGE, E-TYPE or E-CHOICE, naming the field and its value.
    """

    experts: int = 4
    top_k: int = 1
    combine: str = "probability"
    noise: float = 0.0
    layers: tuple[int, ...] | None = None
    balance_weight: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        settings.whole("experts", self.experts, 1)
        settings.whole("top_k", self.top_k, 1)
        settings.whole("seed", self.seed, 0)
        if self.top_k > self.experts:
            refuse("E-RANGE", f"top_k is {self.top_k}, expected 1 to {self.experts} (experts)")
        settings.chosen("combine", self.combine, COMBINE)
        settings.real("noise", self.noise, "[0, inf)")
        settings.real("balance_weight", self.balance_weight, "[0, inf)")
        settings.layers(self.layers)
