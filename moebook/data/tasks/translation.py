"""Translation: numbers in French and Spanish words, sums in French, names in German."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice

from num2words import num2words

from moebook.data.tasks.mathematics import sums
from moebook.data.tasks.task import Item, shipped

LARGEST = 9_999


@cache
def words(number: int, language: str) -> str:
    """Write a number in French ("fr", the spelling before the reform of 1990) or Spanish ("es")."""
    text: str = num2words(number, lang=language)
    return text


def _numbers(language: str) -> Iterator[Item]:
    """Yield all numbers from 1 to 9,999; the rationale adds up the decimal places."""
    for number in range(1, LARGEST + 1):
        high, low = number // 100 * 100, number % 100
        parts = [f"{part}: {words(part, language)}" for part in (high, low) if part]
        yield Item({"number": str(number)}, words(number, language), "; ".join(parts) + ".")


def numbers_fr() -> Iterator[Item]:
    """Yield numbers in French words."""
    return _numbers("fr")


def numbers_es() -> Iterator[Item]:
    """Yield numbers in Spanish words."""
    return _numbers("es")


def sums_fr() -> Iterator[Item]:
    """Yield every third sum of `sums` in French words: add, then translate."""
    for item in islice(sums(), 0, None, 3):
        total = words(int(item.answer), "fr")
        yield Item(item.slots, total, f"{item.rationale} {item.answer}: {total}.")


def names_de() -> Iterator[Item]:
    """Yield English names with the German ones."""
    for row in shipped("names_de.jsonl"):
        yield Item({"name": row["english"], "kind": row["kind"]}, row["german"])


POOLS = (numbers_fr, numbers_es, sums_fr, names_de)
