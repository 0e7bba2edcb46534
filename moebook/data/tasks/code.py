"""Code: what a Python expression returns, and how a function's docstring begins."""

from __future__ import annotations

import random
from collections.abc import Iterator

from moebook.data.tasks.task import Item, shipped

EXPRESSIONS = 6_000
_WORDS = "apple bread cloud delta eagle flame grape house ivory lemon mango night ocean pearl queen"


def _drawn(rng: random.Random) -> list[tuple[str, object]]:
    """Draw one expression of each form with its value, worked out here and not by `eval`."""
    xs = [rng.randint(0, 20) for _ in range(rng.randint(3, 5))]
    a, b, c, d = (rng.randint(2, 30) for _ in range(4))
    i, j = sorted(rng.sample(range(len(xs) + 1), 2))
    v, word, other = rng.choice(xs), rng.choice(_WORDS.split()), rng.choice(_WORDS.split())
    k, letter = rng.randint(1, 4), rng.choice(word)
    guess = rng.choice([v, a])
    return [
        (f"len({xs[i:j]})", j - i),
        (f"max({xs})", max(xs)),
        (f"min({xs})", min(xs)),
        (f"sum({xs[:3]})", sum(xs[:3])),
        (f"sorted({xs[:3]})", sorted(xs[:3])),
        (f"{xs}[{i}:{j}]", xs[i:j]),
        (f"{xs}[-{j}]", xs[-j]),
        (f"{xs}.index({v})", xs.index(v)),
        (f"{xs[::-1]}[{len(xs) - 1 - i if i < len(xs) else 0}]", xs[i] if i < len(xs) else xs[-1]),
        (f"{guess} in {xs}", guess in xs),
        (f"{a} % {b % 9 + 2}", a % (b % 9 + 2)),
        (f"{a} // {b % 9 + 2}", a // (b % 9 + 2)),
        (f"{a} > {b} and {c} > {d}", a > b and c > d),
        (f"{a} > {b} or {c} > {d}", a > b or c > d),
        (f"{word!r}[{k}]", word[k]),
        (f"{word!r}[:{k}]", word[:k]),
        (f"{word!r}[-{k}:]", word[-k:]),
        (f"len({word[:k]!r} + {other!r})", k + len(other)),
        (f"{word!r}.upper()", word.upper()),
        (f"{word!r}.index({letter!r})", word.index(letter)),
        (f"{word[:k]!r} + {other[:2]!r}", word[:k] + other[:2]),
        (f"list(range({a % 9}, {a % 9 + 2 * k}, 2))", list(range(a % 9, a % 9 + 2 * k, 2))),
        (f"{letter!r} in {other!r}", letter in other),
        (f"{letter!r} * {k}", letter * k),
    ]


def python_eval() -> Iterator[Item]:
    """Yield distinct expressions, the forms in turn."""
    rng = random.Random("python_eval")
    seen: set[str] = set()
    while len(seen) < EXPRESSIONS:
        for text, value in _drawn(rng):
            if text not in seen:
                seen.add(text)
                yield Item({"expression": text}, repr(value))


def docstring() -> Iterator[Item]:
    """Yield functions with the first sentence of their docstring."""
    for row in shipped("docstring.jsonl"):
        yield Item({"code": row["code"]}, row["summary"])


POOLS = (python_eval, docstring)
