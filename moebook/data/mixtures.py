"""Mixtures of tasks, and the guard against test items among training rows."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence

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


def draw(names: Iterable[str], split: str, most: int, seed: int = 0) -> list[dict[str, str]]:
    """Draw a `mixture` of up to `most` rows a task, fewer where its split holds fewer."""
    sizes = {name: min(most, tasks.find(name).available(split)) for name in names}
    return mixture(sizes, split, seed)


def by_domain(rows: Iterable[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Sort rows into their domains, in the order of the domains' names."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["domain"], []).append(row)
    return dict(sorted(found.items()))


def hashes(rows: Iterable[Mapping[str, str]]) -> set[str]:
    """Hash each row's prompt (sha256; case and spacing do not count)."""
    plain = (" ".join(row["prompt"].casefold().split()) for row in rows)
    return {hashlib.sha256(prompt.encode()).hexdigest() for prompt in plain}


def hold_out(
    rows: Sequence[dict[str, str]], size: int
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Split shuffled rows in those to train on and the first `size`, which are held out.

    Data sets that answer a prompt several times, as MetaMathQA does, have some of their prompts on
    both sides of any split of rows: what shares its prompt with a held-out row is left out.
    """
    held_out = list(rows[:size])
    asked = hashes(held_out)
    return [row for row in rows[size:] if not hashes([row]) & asked], held_out


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
