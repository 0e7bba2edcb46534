"""Code, common sense, translation and language: tasks whose answers are words.

Code is what a Python expression returns, and how a function's docstring begins; common sense, kinds
of things (WordNet) and family relations; translation, numbers and sums in French and Spanish words
and names in German; language, requests turned into JSON (`requests.yaml`), licence families, and
whether a licence is copyleft.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from num2words import num2words

from moebook.data.tasks.mathematics import sums
from moebook.data.tasks.task import Item, shipped
from moebook.results import formed

EXPRESSIONS = 6_000
_WORDS = "apple bread cloud delta eagle flame grape house ivory lemon mango night ocean pearl queen"
FAMILIES, TOLD = 6_000, 1_200
_WOMEN = "Alice Bella Carol Diana Emma Fiona Grace Helen Irene Julia Laura Maria".split()
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
LARGEST = 9_999
_COPYLEFT = {"GNU", "Mozilla", "Eclipse", "CeCILL or EUPL"}
_PERMISSIVE = ("cc-by-", "pddl-", "cdla-permissive-", "cern-ohl-p-", "cecill-b-")


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


def isa() -> Iterator[Item]:
    """Yield nouns with one of ten kinds, and the way up to it."""
    for row in shipped("isa.jsonl"):
        chain = f"a kind of {row['chain']}, so " if row["chain"] else ""
        yield Item({"noun": row["noun"]}, row["kind"], f"{row['noun']}: {chain}{row['kind']}.")


def family(rng: random.Random) -> Item:
    """Tell of A, B, C and of D, who is also related to B but not asked about; facts shuffled."""
    people = [*rng.sample(_WOMEN, 4), *rng.sample(_MEN, 4)]
    rng.shuffle(people)
    a, b, c, d = people[:4]

    def word(relation: str, person: str) -> str:
        blood = relation.removesuffix("-in-law")
        return _RELATIONS[blood][person in _MEN] + relation.removeprefix(blood)

    first, second = rng.choice(sorted(_COMPOSED))
    near = word(first, a)
    far = word(second, b)
    other = word(rng.choice([r for r in ("parent", "child", "sibling") if r != first]), d)
    relations = ((a, near, b), (b, far, c), (d, other, b))
    facts = [f"{one} is the {relation} of {another}." for one, relation, another in relations]
    rng.shuffle(facts)
    answer = word(_COMPOSED[first, second], a)
    why = f"{a} is the {near} of the {far} of {c}, so {a} is the {answer} of {c}."
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
    """Yield families none of which is one of `kinship`, told the other way round: B's mother is A.

    One of the 1,199 tells the facts of one of `kinship` in another order.
    """
    rng, known = random.Random("kinship told"), {item.slots["facts"] for item in kinship()}
    for _ in range(TOLD):
        item = family(rng)
        facts = item.slots["facts"]
        if facts not in known:
            known.add(facts)
            turned = re.sub(r"(\w+) is the ([\w-]+) of (\w+)\.", r"\3's \2 is \1.", facts)
            yield Item(item.slots | {"facts": turned}, item.answer, item.rationale)


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
    for item in itertools.islice(sums(), 0, None, 3):
        total = words(int(item.answer), "fr")
        yield Item(item.slots, total, f"{item.rationale} {item.answer}: {total}.")


def names_de() -> Iterator[Item]:
    """Yield English names with the German ones."""
    for row in shipped("names_de.jsonl"):
        yield Item({"name": row["english"], "kind": row["kind"]}, row["german"])


def _requests(task: str, most: int, *, rationale: bool) -> Iterator[Item]:
    """Yield at most so many fillings of each wording; JSON keys stand in the wording's order."""
    with formed(Path(__file__).with_name("requests.yaml")) as file:
        for intent, wording in ((key, each) for key, part in file[task].items() for each in part):
            names = [part.split("}")[0] for part in wording.split("{")[1:]]
            fillings = list(itertools.product(*(file["slots"][name].split("|") for name in names)))
            random.Random(wording).shuffle(fillings)
            for values in fillings[:most]:
                slots = dict(zip(names, values, strict=True))
                answer = json.dumps({"intent": intent} | slots)
                why = f"The intent is {intent}; the slots are {', '.join(names)}."
                yield Item({"request": wording.format_map(slots)}, answer, why * rationale)


def intent_json() -> Iterator[Item]:
    """Yield requests with their intent and slots as JSON."""
    return _requests("intent_json", most=160, rationale=False)


def intent_new() -> Iterator[Item]:
    """Yield requests with intents that `intent_json` has not."""
    return _requests("intent_new", most=60, rationale=True)


def licence() -> Iterator[Item]:
    """Yield clauses with their family of licences."""
    for row in shipped("licence.jsonl"):
        yield Item({"clause": row["clause"]}, row["family"])


def reserved() -> set[str]:
    """Return the clauses, two thirds by their hash, that are left to `copyleft` in any training."""
    clauses = {row["clause"] for row in shipped("licence.jsonl")}
    return {text for text in clauses if hashlib.sha256(text.encode()).digest()[0] % 3}


def copyleft() -> Iterator[Item]:
    """Yield the reserved clauses of licences that are clearly of one of the two kinds."""
    apart = reserved()
    for row in shipped("licence.jsonl"):
        name, family = row["licence"], row["family"]
        free = family == "permissive" or name.startswith(_PERMISSIVE)
        free = free and not name.startswith("cc-by-sa-")
        if row["clause"] in apart and (free or family in _COPYLEFT):
            kind = "permissive" if free else "copyleft"
            yield Item({"clause": row["clause"]}, kind, f"The family is {family}: {kind}.")


POOLS = (
    python_eval, docstring, isa, kinship, kinship_told, numbers_fr, numbers_es, sums_fr, names_de,
    intent_json, intent_new, licence, copyleft,
)  # fmt: skip
