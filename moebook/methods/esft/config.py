"""ESFT's settings: how experts are scored and chosen, and what trains beside them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moebook.settings import Presets, settings

Pooling = Literal["tokens", "samples"]
Score = Literal["token", "gate"]


@settings
class Config(Presets):
    """How experts are scored and chosen, and what trains beside them (ESFT Sec. 3.3).

    Of the presets, ``paper`` is the text, ``released`` the authors' code, from which the
    published experts follow, and ``fixed``, the defaults, the same without its rounding.
    The paper's thresholds are 0.2 for the token score and 0.1 for the gate score
    (Sec. 4.3).

    An expert's relevance is the share of routed slots that it gets (``"token"``, Eq. 7)
    or the mean of its gates (``"gate"``, Eq. 6). Both are over all ``"tokens"``
    (released), or within each of the ``"samples"`` and then over these (as printed).
    The released code divides by no total: token scores sum to 1 anyway, gates only if
    renormalised.
    """

    #: What an expert is scored by, see above.
    score: Score = "token"
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.2  #: p of Eq. 8
    #: What scores are averaged over, see above.
    pooling: Pooling = "tokens"
    #: Whether p is a share of a layer's total, as the paper says.
    normalised: bool = False
    #: Of the scores, before the choice.
    decimals: Annotated[int, Field(ge=1, le=15)] | None = None
    shared_experts: bool = False  #: whether they train too
    #: All else, such as attention, norms and head (as released also routers).
    non_expert_modules: bool = False
    #: Whether the routers train too.
    router: bool = False

    LETTERS: ClassVar = {"p": "threshold"}
    PRESETS: ClassVar = {
        # Eq. 6 and 7 average within samples, Eq. 8 takes a share of the total.
        "paper": {"pooling": "samples", "normalised": True},
        "released": {"decimals": 4},
        "fixed": {},
    }
