"""Common sense: kinds of things (WordNet) and family relations."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from moebook.data.tasks.task import Item, shipped

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


POOLS = (isa, kinship, kinship_told)
