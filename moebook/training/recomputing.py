"""Gradient checkpointing: activations are computed again in the backward pass, to save memory."""

from __future__ import annotations

import warnings
from typing import Any


def recompute(model: Any) -> None:
    """Let a model of transformers keep no activations inside its layers when it trains."""
    # Transformers is changing a name, and warns of it.
    with warnings.catch_warnings(action="ignore"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
