"""What a user would pick instead: found by name, since none of it has to be installed."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import pandas as pd

from moebook.errors import refuse

PEERS = {
    "transformers": "experts: eager, batched_mm, grouped_mm; the balance loss",
    "peft": "LoRA beside a linear layer; a bank scored by a set_adapter loop",
    "sentence-transformers": "semantic_search: the nearest rows of a pool; pip install '.[bench]'",
    "scikit-learn": "k-means; cosine similarities",
    "numpy": "a whole matrix at once where we stream; the papers' loops",
    "torch": "grouped_mm, top-k and sort put together by hand; the dense product of the floor",
    "triton": "our own kernels on a GPU",
}
"""Distribution -> what it is compared on. `itertools` and the papers' loops need no package."""


def installed() -> pd.DataFrame:
    """List the peers: version (None where not installed) and what each is compared on."""
    rows = {name: [version(name), what] for name, what in PEERS.items()}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["version", "compared on"])


def version(name: str) -> str | None:
    """Return the version of an installed peer, else None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def module(name: str) -> Any:
    """Import a module of a peer, or one that needs peers, by its full name.

    Raises:
        Refusal: E-PEER where a package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        if missing == "moebook":
            raise
        refuse("E-PEER", f"{missing.replace('_', '-')} is not installed")
