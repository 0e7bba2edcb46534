"""Sentences of Markdown, for the tests that no page says too much at once."""

import re
from collections.abc import Iterator

MOST = 35  # words of a sentence


def long(text: str) -> Iterator[str]:
    """Yield the sentences of a page, its code, tables and headings aside, of too many words."""
    for other in (
        r"```[\s\S]*?```",
        r"\$\$[\s\S]*?\$\$",
        r"(?m)^(\||:::|#|:\w+:).*$",
    ):
        text = re.sub(other, "\n\n", text)
    text = re.sub(r"(?m)^\s*(- |\d+\. |: )", "\n\n", text)
    text = re.sub(r"\{[\w:]+\}`[^`]*`|`[^`]*`|\$[^$]*\$", "word", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?;:])\s+", " ".join(paragraph.split())):
            if len(sentence.split()) > MOST:
                yield sentence
