"""What the embedded tasks ask: a function enumerates the items of each, always alike.

Mathematics: equations (in words too), divisors (plus a number too), sums, products.
Code: what an expression returns. Common sense: family relations. Language: requests
turned into JSON, copyleft or not. Translation: numbers and sums in words. The other
tasks have their items in files that ship.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator
from copy import copy
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from string import Formatter
from typing import Any

from moebook.data.tasks.task import Item, Pool, shipped
from moebook.errors import extra
from moebook.storage import formed

EXPRESSIONS = 6_000
FAMILIES = 6_000
TOLD = 1_200  # families told the other way round
_WORDS = """
    apple bread cloud delta eagle flame grape house
    ivory lemon mango night ocean pearl queen
""".split()
_WOMEN = (
    "Alice Bella Carol Diana Emma Fiona Grace Helen Irene Julia Laura Maria".split()
)
_MEN = "Adam Brian Carl David Edwin Frank George Henry Ivan James Kevin Martin".split()
_RELATIONS = {  # relation: (of a woman, of a man)
    "parent": ("mother", "father"),
    "child": ("daughter", "son"),
    "sibling": ("sister", "brother"),
    "spouse": ("wife", "husband"),
    "grandparent": ("grandmother", "grandfather"),
    "grandchild": ("granddaughter", "grandson"),
    "nibling": ("niece", "nephew"),
    "pibling": ("aunt", "uncle"),
}
_COMPOSED = {  # A is the first of B, B is the second of C: A is this of C
    ("parent", "parent"): "grandparent",
    ("parent", "sibling"): "parent",
    ("parent", "spouse"): "parent-in-law",
    ("child", "child"): "grandchild",
    ("child", "sibling"): "nibling",
    ("child", "parent"): "sibling",
    ("sibling", "parent"): "pibling",
    ("sibling", "child"): "child",
    ("sibling", "sibling"): "sibling",
    ("sibling", "spouse"): "sibling-in-law",
    ("spouse", "child"): "child-in-law",
    ("spouse", "sibling"): "sibling-in-law",
}
_COPYLEFT = {"GNU", "Mozilla", "Eclipse", "CeCILL or EUPL"}
_PERMISSIVE = ("cc-by-", "pddl-", "cdla-permissive-", "cern-ohl-p-", "cecill-b-")
LARGEST = 9_999
MILLION = 10**6


def _shipped(file: str, answer: str, **slots: str) -> Iterator[Item]:
    """Yield an item a row of a file that ships, by the fields of answer and slots."""
    for row in shipped(file):
        texts = {slot: row[field] for slot, field in slots.items()}
        yield Item(texts, row[answer], row.get("rationale", ""))


def general(name: str) -> Iterator[Item]:
    """Yield the questions of one of the general tasks, such as ``general_order``."""
    for row in shipped("general.jsonl"):
        if name == f"general_{row['skill']}":
            yield Item({"question": row["question"]}, row["answer"])


def _equation(a: int, b: int, x: int) -> tuple[int, str]:
    """Return c of a x + b = c, and how the equation is solved."""
    c = a * x + b
    other_sign = "+" if b < 0 else "-"
    why = f"{a}x = {c} {other_sign} {abs(b)} = {a * x}, so x = {a * x} / {a} = {x}."
    return c, why


def equations() -> Iterator[Item]:
    """Yield a x + b = c with a 2..9, b -15..20 without 0, x 1..12."""
    summands = [*range(-15, 0), *range(1, 21)]
    for a, b, x in product(range(2, 10), summands, range(1, 13)):
        c, why = _equation(a, b, x)
        sign = "-" if b < 0 else "+"
        yield Item({"equation": f"{a}x {sign} {abs(b)} = {c}"}, str(x), why)


def equation_words() -> Iterator[Item]:
    """Yield a x + b = c in words, with c from 0 and b that `equations` has not."""
    summands = [*range(-30, -15), *range(21, 31)]
    for a, b, x in product(range(2, 10), summands, range(1, 13)):
        c, why = _equation(a, b, x)
        if c >= 0:
            sign = "minus" if b < 0 else "plus"
            slots = {"a": str(a), "sign": sign, "b": str(abs(b)), "c": str(c)}
            yield Item(slots, str(x), why)


def _pair(a: int, b: int, turned: bool) -> dict[str, str]:
    """Two numbers as slots, in one order or the other."""
    first, second = (b, a) if turned else (a, b)
    return {"a": str(first), "b": str(second)}


def gcd() -> Iterator[Item]:
    """Yield pairs up to 180, at most 300 a divisor from 1 to 12, 1 not favoured."""
    for divisor in range(1, 13):
        pairs = []
        for q in range(2, 180 // divisor + 1):
            for p in range(1, q):
                if math.gcd(p, q) == 1:
                    pairs.append((divisor * p, divisor * q))
        step = max(1, len(pairs) // 300)
        for index, (a, b) in enumerate(pairs[::step][:300]):
            p = a // divisor
            q = b // divisor
            why = f"{a} = {divisor} * {p} and {b} = {divisor} * {q}."
            yield Item(_pair(a, b, index % 2 == 0), str(divisor), why)


def gcd_plus() -> Iterator[Item]:
    """Yield every fourth pair of `gcd` plus a number: a divisor, then a sum."""
    for place, item in enumerate(islice(gcd(), 0, None, 4)):
        divisor = item.answer
        more = 2 + 37 * place % 98
        total = str(int(divisor) + more)
        why = "gcd({a}, {b}) = ".format_map(item.slots)
        why += f"{divisor}, {divisor} + {more} = {total}."
        yield Item(item.slots | {"c": str(more)}, total, why)


def sums() -> Iterator[Item]:
    """Yield a + b with 2 <= a <= b <= 99, in either order."""
    for a in range(2, 100):
        for b in range(a, 100):
            ones = a % 10 + b % 10
            why = f"{a + b - ones} + {ones} = {a + b}."
            yield Item(_pair(a, b, (a + b) % 2 == 0), str(a + b), why)


def products() -> Iterator[Item]:
    """Yield a * b with 2 <= a <= 30 and a <= b <= 99, in either order."""
    for a in range(2, 31):
        for b in range(a, 100):
            ones = b % 10
            tens = b - ones
            why = f"{a} * {tens} = {a * tens}, {a} * {ones} = {a * ones}, "
            why += f"{a * tens} + {a * ones} = {a * b}."
            yield Item(_pair(a, b, (a + b) % 2 == 0), str(a * b), why)


def _drawn(rng: random.Random) -> list[tuple[str, object]]:
    """Draw an expression of each form with its value, worked out without `eval`."""
    xs = [rng.randint(0, 20) for _ in range(rng.randint(3, 5))]
    a, b, c, d = (rng.randint(2, 30) for _ in range(4))
    i, j = sorted(rng.sample(range(len(xs) + 1), 2))
    v = rng.choice(xs)
    word = rng.choice(_WORDS)
    other = rng.choice(_WORDS)
    k = rng.randint(1, 4)
    letter = rng.choice(word)
    guess = rng.choice([v, a])
    divisor = b % 9 + 2
    start = a % 9
    backwards = xs[::-1]
    place = len(xs) - 1 - i if i < len(xs) else 0
    return [
        (f"len({xs[i:j]})", j - i),
        (f"max({xs})", max(xs)),
        (f"min({xs})", min(xs)),
        (f"sum({xs[:3]})", sum(xs[:3])),
        (f"sorted({xs[:3]})", sorted(xs[:3])),
        (f"{xs}[{i}:{j}]", xs[i:j]),
        (f"{xs}[-{j}]", xs[-j]),
        (f"{xs}.index({v})", xs.index(v)),
        (f"{backwards}[{place}]", backwards[place]),
        (f"{guess} in {xs}", guess in xs),
        (f"{a} % {divisor}", a % divisor),
        (f"{a} // {divisor}", a // divisor),
        (f"{a} > {b} and {c} > {d}", a > b and c > d),
        (f"{a} > {b} or {c} > {d}", a > b or c > d),
        (f"{word!r}[{k}]", word[k]),
        (f"{word!r}[:{k}]", word[:k]),
        (f"{word!r}[-{k}:]", word[-k:]),
        (f"len({word[:k]!r} + {other!r})", k + len(other)),
        (f"{word!r}.upper()", word.upper()),
        (f"{word!r}.index({letter!r})", word.index(letter)),
        (f"{word[:k]!r} + {other[:2]!r}", word[:k] + other[:2]),
        (
            f"list(range({start}, {start + 2 * k}, 2))",
            [start + 2 * n for n in range(k)],
        ),
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


def isa() -> Iterator[Item]:
    """Yield nouns with one of ten kinds, and the way up to it."""
    for row in shipped("isa.jsonl"):
        noun = row["noun"]
        kind = row["kind"]
        way = f"a kind of {row['chain']}, so " if row["chain"] else ""
        yield Item({"noun": noun}, kind, f"{noun}: {way}{kind}.")


def family(rng: random.Random) -> Item:
    """Tell of A, B, C and of D, related to B but not asked about; facts shuffled."""
    people = [*rng.sample(_WOMEN, 4), *rng.sample(_MEN, 4)]
    rng.shuffle(people)
    a, b, c, d = people[:4]

    def word(relation: str, person: str) -> str:
        blood = relation.removesuffix("-in-law")
        woman, man = _RELATIONS[blood]
        return (man if person in _MEN else woman) + relation.removeprefix(blood)

    first, second = rng.choice(sorted(_COMPOSED))
    a_of_b = word(first, a)
    b_of_c = word(second, b)
    others = [name for name in ("parent", "child", "sibling") if name != first]
    d_of_b = word(rng.choice(others), d)
    facts = [
        f"{a} is the {a_of_b} of {b}.",
        f"{b} is the {b_of_c} of {c}.",
        f"{d} is the {d_of_b} of {b}.",
    ]
    rng.shuffle(facts)
    answer = word(_COMPOSED[first, second], a)
    why = f"{a} is the {a_of_b} of the {b_of_c} of {c}, so {a} is the {answer} of {c}."
    return Item({"facts": " ".join(facts), "a": a, "c": c}, answer, why)


def kinship() -> Iterator[Item]:
    """Yield different families, always the same."""
    rng = random.Random("kinship")
    seen: set[str] = set()
    while len(seen) < FAMILIES:
        item = family(rng)
        if item.slots["facts"] not in seen:
            seen.add(item.slots["facts"])
            yield item


def kinship_told() -> Iterator[Item]:
    """Yield families not of `kinship`, told the other way round: B's mother is A.

    One of the 1,199 tells the facts of one of `kinship` in another order.
    """
    rng = random.Random("kinship told")
    known = {item.slots["facts"] for item in kinship()}
    for _ in range(TOLD):
        item = family(rng)
        facts = item.slots["facts"]
        if facts not in known:
            known.add(facts)
            fact = r"(\w+) is the ([\w-]+) of (\w+)\."
            turned = re.sub(fact, r"\3's \2 is \1.", facts)
            yield Item(item.slots | {"facts": turned}, item.answer, item.rationale)


def _requests(task: str, most: int, *, rationale: bool) -> Iterator[Item]:
    """Yield at most so many fillings of each wording in ``requests.yaml``.

    The intents of ``intent_new`` are none of ``intent_json``. Keys stand in the
    wording's order.
    """
    with formed(Path(__file__).with_name("requests.yaml")) as file:
        slots = file["slots"]
        for intent, wordings in file[task].items():
            for wording in wordings:
                names = [name for _, name, _, _ in Formatter().parse(wording) if name]
                choices = [slots[name].split("|") for name in names]
                fillings = list(product(*choices))
                random.Random(wording).shuffle(fillings)
                why = f"The intent is {intent}; the slots are {', '.join(names)}."
                for values in fillings[:most]:
                    filled = dict(zip(names, values, strict=True))
                    answer = json.dumps({"intent": intent} | filled)
                    request = {"request": wording.format_map(filled)}
                    yield Item(request, answer, why if rationale else "")


def reserved() -> set[str]:
    """The clauses, two thirds by their hash, that any training leaves to `copyleft`."""
    clauses = set()
    for row in shipped("licence.jsonl"):
        digest = hashlib.sha256(row["clause"].encode()).digest()
        if digest[0] % 3:
            clauses.add(row["clause"])
    return clauses


def copyleft() -> Iterator[Item]:
    """Yield the reserved clauses of licences that are clearly of one kind."""
    apart = reserved()
    for row in shipped("licence.jsonl"):
        name = row["licence"]
        family = row["family"]
        free = family == "permissive" or name.startswith(_PERMISSIVE)
        free = free and not name.startswith("cc-by-sa-")
        if row["clause"] in apart and (free or family in _COPYLEFT):
            kind = "permissive" if free else "copyleft"
            yield Item(
                {"clause": row["clause"]}, kind, f"The family is {family}: {kind}."
            )


@cache
def words(number: int, language: str) -> str:
    """Write a number below a million in French ("fr", before 1990) or Spanish ("es")."""
    text: str = _speller(language).to_cardinal(number)
    return text


@cache
def _speller(language: str) -> Any:
    """Return what num2words spells numbers below a million with.

    Its own looks at every power of ten up to the 600th for each part of a number.
    """
    with extra("notebook", "a task of numbers in words"):
        from num2words import CONVERTER_CLASSES

    speller = copy(CONVERTER_CLASSES[language])
    speller.cards = {
        number: name for number, name in speller.cards.items() if number <= MILLION
    }
    return speller


def _numbers(language: str) -> Iterator[Item]:
    """Yield all numbers from 1 to 9,999; the rationale adds up the decimal places."""
    for number in range(1, LARGEST + 1):
        low = number % 100
        parts = []
        for part in (number - low, low):
            if part:
                parts.append(f"{part}: {words(part, language)}")
        why = "; ".join(parts) + "."
        yield Item({"number": str(number)}, words(number, language), why)


def sums_fr() -> Iterator[Item]:
    """Yield every third sum of `sums` in French words: add, then translate."""
    for item in islice(sums(), 0, None, 3):
        total = words(int(item.answer), "fr")
        yield Item(item.slots, total, f"{item.rationale} {item.answer}: {total}.")


POOLS: dict[str, Pool] = {
    "equations": equations,
    "equation_words": equation_words,
    "gcd": gcd,
    "gcd_plus": gcd_plus,
    "sums": sums,
    "products": products,
    "python_eval": python_eval,
    "isa": isa,
    "kinship": kinship,
    "kinship_told": kinship_told,
    "copyleft": copyleft,
    "sums_fr": sums_fr,
    "gsm_symbolic": partial(
        _shipped, "gsm_symbolic.jsonl", "answer", question="question"
    ),
    "docstring": partial(_shipped, "docstring.jsonl", "summary", code="code"),
    "licence": partial(_shipped, "licence.jsonl", "family", clause="clause"),
    "names_de": partial(
        _shipped, "names_de.jsonl", "german", name="english", kind="kind"
    ),
    "intent_json": partial(_requests, "intent_json", most=160, rationale=False),
    "intent_new": partial(_requests, "intent_new", most=60, rationale=True),
    "numbers_fr": partial(_numbers, "fr"),  # in words
    "numbers_es": partial(_numbers, "es"),
}
