"""Mixtures of tasks, and the guard against test items among training rows."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping

from moebook.data import tasks
from moebook.errors import refuse


def mixture(sizes: Mapping[str, int], split: str, seed: int = 0) -> list[dict[str, str]]:
    """Draw rows of several tasks and shuffle them together.

    Args:
        sizes: Rows by task name, each 1 to what the split holds.
        split: train, validation or test.
        seed: Decides draw, wording and order.

    Raises:
        Refusal: E-DATA for an empty mixture, an unknown task or split, or too many rows.
    """
    if not sizes:
        refuse("E-DATA", "the mixture names no task; expected at least one, as {'gcd': 200}")
    rows = [row for name, size in sizes.items() for row in tasks.rows(name, split, size, seed)]
    random.Random(f"mixture/{split}/{seed}").shuffle(rows)
    return rows


def hashes(rows: Iterable[Mapping[str, str]]) -> set[str]:
    """Hash each row's prompt (sha256; case and spacing do not count)."""
    plain = (" ".join(row["prompt"].casefold().split()) for row in rows)
    return {hashlib.sha256(prompt.encode()).hexdigest() for prompt in plain}


def refuse_leak(
    train: Iterable[Mapping[str, str]], evaluation: Iterable[Mapping[str, str]]
) -> None:
    """Refuse evaluation rows whose prompts were trained on (E-LEAK with the count)."""
    held_out = hashes(evaluation)
    shared = hashes(train) & held_out
    if shared:
        refuse(
            "E-LEAK",
            f"{len(shared)} of {len(held_out)} evaluation prompts are among the "
            "training prompts; remove them from one of the two",
        )
