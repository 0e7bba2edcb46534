"""Translation: numbers in French and Spanish words, sums in French, names in German."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from moebook.data.tasks.mathematics import sums
from moebook.data.tasks.task import Item, shipped

LARGEST = 9_999
_FRENCH = (
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize "
    "dix-sept dix-huit dix-neuf"
).split()
_FRENCH_TENS = "vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt".split()
_SPANISH = (
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez once doce trece catorce quince "
    "dieciséis diecisiete dieciocho diecinueve veinte veintiuno veintidós veintitrés veinticuatro "
    "veinticinco veintiséis veintisiete veintiocho veintinueve"
).split()
_SPANISH_TENS = "treinta cuarenta cincuenta sesenta setenta ochenta noventa".split()
_SPANISH_HUNDREDS = (
    "ciento doscientos trescientos cuatrocientos quinientos seiscientos setecientos ochocientos "
    "novecientos"
).split()


def french(number: int) -> str:
    """Write 0 to 9,999 in French words (the spelling before the reform of 1990)."""
    if number < 20:
        return _FRENCH[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        if tens in (7, 9):
            tens, ones = tens - 1, ones + 10
        if ones == 0:
            return "quatre-vingts" if tens == 8 else _FRENCH_TENS[tens - 2]
        link = " et " if ones in (1, 11) and tens < 8 else "-"
        return f"{_FRENCH_TENS[tens - 2]}{link}{_FRENCH[ones]}"
    if number < 1000:
        count, rest = divmod(number, 100)
        head = "cent" if count == 1 else f"{_FRENCH[count]} cent"
        return f"{head} {french(rest)}" if rest else head + "s" * (count > 1)
    count, rest = divmod(number, 1000)
    head = "mille" if count == 1 else f"{french(count)} mille"
    return f"{head} {french(rest)}" if rest else head


def spanish(number: int) -> str:
    """Write 0 to 9,999 in Spanish words."""
    if number < 30:
        return _SPANISH[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        head = _SPANISH_TENS[tens - 3]
        return f"{head} y {_SPANISH[ones]}" if ones else head
    if number == 100:
        return "cien"
    if number < 1000:
        count, rest = divmod(number, 100)
        head = _SPANISH_HUNDREDS[count - 1]
        return f"{head} {spanish(rest)}" if rest else head
    count, rest = divmod(number, 1000)
    head = "mil" if count == 1 else f"{spanish(count)} mil"
    return f"{head} {spanish(rest)}" if rest else head


def _numbers(words: Callable[[int], str]) -> Iterator[Item]:
    """Yield all numbers from 1 to 9,999; the rationale adds up the decimal places."""
    for number in range(1, LARGEST + 1):
        high, low = number // 100 * 100, number % 100
        parts = [f"{part}: {words(part)}" for part in (high, low) if part]
        yield Item({"number": str(number)}, words(number), "; ".join(parts) + ".")


def numbers_fr() -> Iterator[Item]:
    """Yield numbers in French words."""
    return _numbers(french)


def numbers_es() -> Iterator[Item]:
    """Yield numbers in Spanish words."""
    return _numbers(spanish)


def sums_fr() -> Iterator[Item]:
    """Yield every third sum of `sums` in French words: add, then translate."""
    for item in islice(sums(), 0, None, 3):
        words = french(int(item.answer))
        yield Item(item.slots, words, f"{item.rationale} {item.answer}: {words}.")


def names_de() -> Iterator[Item]:
    """Yield English names with the German ones."""
    for row in shipped("names_de.jsonl"):
        yield Item({"name": row["english"], "kind": row["kind"]}, row["german"])


POOLS = (numbers_fr, numbers_es, sums_fr, names_de)
