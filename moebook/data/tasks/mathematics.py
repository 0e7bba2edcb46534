"""Mathematics: equations (in words too), divisors (plus a number too), sums, products, stories."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, product

from moebook.data.tasks.task import Item, shipped


def _equation(a: int, b: int, x: int) -> tuple[int, str]:
    """Return c of a x + b = c, and how the equation is solved."""
    c = a * x + b
    why = f"{a}x = {c} {'-+'[b < 0]} {abs(b)} = {a * x}, so x = {a * x} / {a} = {x}."
    return c, why


def equations() -> Iterator[Item]:
    """Yield a x + b = c with a 2..9, b -15..20 without 0, x 1..12."""
    for a, b, x in product(range(2, 10), [*range(-15, 0), *range(1, 21)], range(1, 13)):
        c, why = _equation(a, b, x)
        yield Item({"equation": f"{a}x {'+-'[b < 0]} {abs(b)} = {c}"}, str(x), why)


def equation_words() -> Iterator[Item]:
    """Yield a x + b = c in words, with c from 0 and summands b that `equations` has not."""
    for a, b, x in product(range(2, 10), [*range(-30, -15), *range(21, 31)], range(1, 13)):
        c, why = _equation(a, b, x)
        if c >= 0:
            sign = "minus" if b < 0 else "plus"
            yield Item({"a": str(a), "sign": sign, "b": str(abs(b)), "c": str(c)}, str(x), why)


def gcd() -> Iterator[Item]:
    """Yield pairs up to 180, at most 300 for each common divisor from 1 to 12, 1 not favoured."""
    for divisor in range(1, 13):
        pairs = [
            (divisor * p, divisor * q)
            for q in range(2, 180 // divisor + 1)
            for p in range(1, q)
            if math.gcd(p, q) == 1
        ]
        step = max(1, len(pairs) // 300)
        for index, (a, b) in enumerate(pairs[::step][:300]):
            first, second = (a, b) if index % 2 else (b, a)
            why = f"{a} = {divisor} * {a // divisor} and {b} = {divisor} * {b // divisor}."
            yield Item({"a": str(first), "b": str(second)}, str(divisor), why)


def gcd_plus() -> Iterator[Item]:
    """Yield every fourth pair of `gcd` plus a number from 2 to 99: a divisor, then a sum."""
    for place, item in enumerate(islice(gcd(), 0, None, 4)):
        first, second, more = item.slots["a"], item.slots["b"], 2 + 37 * place % 98
        total = str(int(item.answer) + more)
        why = f"gcd({first}, {second}) = {item.answer}, {item.answer} + {more} = {total}."
        yield Item({"a": first, "b": second, "c": str(more)}, total, why)


def sums() -> Iterator[Item]:
    """Yield a + b with 2 <= a <= b <= 99, in either order."""
    for a in range(2, 100):
        for b in range(a, 100):
            first, second = (a, b) if (a + b) % 2 else (b, a)
            ones, tens = first % 10 + second % 10, first // 10 * 10 + second // 10 * 10
            why = f"{tens} + {ones} = {a + b}."
            yield Item({"a": str(first), "b": str(second)}, str(a + b), why)


def products() -> Iterator[Item]:
    """Yield a * b with 2 <= a <= 30 and a <= b <= 99, in either order."""
    for a in range(2, 31):
        for b in range(a, 100):
            first, second = (a, b) if (a + b) % 2 else (b, a)
            tens, ones = b // 10 * 10, b % 10
            parts = f"{a} * {tens} = {a * tens}, {a} * {ones} = {a * ones}"
            why = f"{parts}, {a * tens} + {a * ones} = {a * b}."
            yield Item({"a": str(first), "b": str(second)}, str(a * b), why)


def gsm_symbolic() -> Iterator[Item]:
    """Yield grade-school word problems with their solutions."""
    for row in shipped("gsm_symbolic.jsonl"):
        yield Item({"question": row["question"]}, row["answer"], row["rationale"])


POOLS = (equations, equation_words, gcd, gcd_plus, sums, products, gsm_symbolic)
