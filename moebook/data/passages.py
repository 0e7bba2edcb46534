"""Free text by domain out of the files that ship with the package, without prompts around it.

Prompts carry templates, by which even a network with random weights tells tasks apart. Whoever asks
what a network has learnt to tell apart needs text without them.
"""

from __future__ import annotations

import random
import re

from moebook.data.tasks.task import shipped
from moebook.errors import refuse

SOURCES = {
    "text": ("licence", ("clause",)),  # clauses of licences, as lawyers wrote them
    "code": ("docstring", ("code",)),  # functions of Python packages
    "mathematics": ("gsm_symbolic", ("question", "rationale")),  # word problems, worked out
}


def passages(size: int, seed: int = 0) -> dict[str, list[str]]:
    """Draw texts of each domain: text, code, mathematics.

    No two texts of a domain open alike, names and numbers set aside: the word problems were made
    from templates by their authors, and some differ in nothing else.

    Args:
        size: Texts a domain.
        seed: Decides the draw and the order.

    Raises:
        Refusal: E-RANGE for a size below 1 or above what a domain has.
    """
    return {domain: _drawn(domain, size, seed) for domain in SOURCES}


def _drawn(domain: str, size: int, seed: int) -> list[str]:
    texts = _texts(domain)
    random.Random(f"passages/{domain}/{seed}").shuffle(texts)
    apart = list({opening(text): text for text in texts}.values())
    if not 1 <= size <= len(apart):
        refuse("E-RANGE", f"passages: {size} texts of {domain}, expected 1 to {len(apart)}")
    return apart[:size]


def opening(text: str) -> str:
    """Return how a text begins, with its names and numbers struck out."""
    return re.sub(r"[A-Z]\w*|\d+", "", text)[:40]


def _texts(domain: str) -> list[str]:
    name, fields = SOURCES[domain]
    return [" ".join(row[field] for field in fields) for row in shipped(f"{name}.jsonl")]
