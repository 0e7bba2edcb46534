"""Sentences of Markdown and of pages, for the tests that none says too much at once."""

import re
from collections.abc import Iterator

import lxml.html

MOST = 35  # words of a sentence
HEADINGS = "h1 h2 h3 h4".split()
STOPS = ".!?"
BLOCKS = "p li td th dd dt figcaption caption summary div br".split()


def long(text: str, stops: str = STOPS) -> Iterator[str]:
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
    ends = rf"(?<=[{stops}])\**\s+"
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(ends, " ".join(paragraph.split())):
            if len(sentence.split()) > MOST:
                yield sentence


def read(html: str) -> str:
    """Return what a rendered page says, a paragraph for each block; code and formulas are words."""
    (article,) = lxml.html.fromstring(html).iter("article")
    numbers = article.xpath(".//*[@class='caption-number']")
    for silent in [*numbers, *article.iter("pre", "script", "svg", *HEADINGS)]:
        silent.drop_tree()
    formulas = article.xpath(".//*[contains(@class, 'math ')]")
    for word in [*formulas, *article.iter("code")]:
        word.clear(keep_tail=True)
        word.text = "word"
    for block in article.iter(*BLOCKS):
        block.text = f"\n\n{block.text or ''}"
        block.tail = f"\n\n{block.tail or ''}"
    return str(article.text_content())
