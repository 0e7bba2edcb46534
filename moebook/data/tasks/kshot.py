"""Tasks to be met with a few annotated rows only: near to a task of the catalogue, never inside it.

Rocket's K-shot targets, with ``numbers_es`` of the catalogue. No item of theirs is an item of a
catalogue's task in other words, so that a model trained on the catalogue has not seen them:
equations in words have summands outside those of ``equations``, families are none of
``kinship``'s, requests have intents that ``intent_json`` has not, and two thirds of the clauses are
kept apart for ``copyleft`` (`reserved`; whoever trains on ``licence`` leaves them out).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator

from moebook.data.tasks.common_sense import family, kinship
from moebook.data.tasks.language import same_json
from moebook.data.tasks.task import Item, Task, shipped

MOST, FAMILIES = 60, 1_200  # requests of one wording; families
_SLOTS = {
    "place": "the airport|the station|the hospital|the museum|the harbour|the stadium|home|work",
    "time": "six|noon|8:15|half past ten|2 pm|midnight|quarter to five",
    "level": "two|three|four|five|seven|eight|nine",
    "device": "radio|television|phone|speaker|laptop",
    "dish": "lasagne|onion soup|apple cake|paella|dumplings|omelette|fish stew",
    "guests": "two|three|four|six|eight",
    "topic": "football|science|the elections|the stock market|cinema|technology",
    "room": "kitchen|bedroom|hall|garage|office|bathroom",
    "degrees": "17|18|19|20|21|22|23",
    "phrase": "thank you|good morning|where is the bank|I am lost|one coffee please|see you soon",
    "language": "Spanish|Italian|Polish|Greek|Turkish|Dutch",
}
_INTENTS = {
    "taxi": (
        "get me a taxi to {place}",
        "I need a ride to {place} at {time}",
        "order a cab to {place} for {guests}",
    ),
    "volume": (
        "turn the {device} to {level}",
        "set the volume of the {device} to {level}",
        "the {device} is too loud, make it {level}",
    ),
    "recipe": (
        "how do I cook {dish}?",
        "show me a recipe of {dish} for {guests}",
        "I want to make {dish} in the {room}",
    ),
    "news": (
        "what is new in {topic}?",
        "read me the news about {topic} at {time}",
        "anything about {topic} on the {device}?",
    ),
    "heating": (
        "heat the {room} to {degrees} degrees",
        "I want {degrees} degrees in the {room} at {time}",
        "it is cold in the {room}, make it {degrees}",
    ),
    "translate": (
        "how do you say {phrase} in {language}?",
        "translate {phrase} into {language}",
        "say {phrase} in {language} on the {device}",
    ),
}
_COPYLEFT = {"GNU", "Mozilla", "Eclipse", "CeCILL or EUPL"}
_PERMISSIVE = ("cc-by-", "pddl-", "cdla-permissive-", "cern-ohl-p-", "cecill-b-")


def _equation_words() -> Iterator[Item]:
    """Yield a x + b = c with a 2..9, b -30..-16 or 21..30, x 1..12 and c from 0."""
    summands = [*range(-30, -15), *range(21, 31)]
    for a, b, x in itertools.product(range(2, 10), summands, range(1, 13)):
        if (c := a * x + b) >= 0:
            sign, size = ("minus", "plus")[b > 0], abs(b)
            why = f"{a}x = {c} {'-+'[b < 0]} {size} = {a * x}, so x = {a * x} / {a} = {x}."
            yield Item({"a": str(a), "sign": sign, "b": str(size), "c": str(c)}, str(x), why)


def _kinship_told() -> Iterator[Item]:
    """Yield families whose facts are told the other way round: B's mother is A."""
    rng, known = random.Random("kinship told"), {item.slots["facts"] for item in kinship()}
    for _ in range(FAMILIES):
        item = family(rng)
        facts = item.slots["facts"]
        if facts not in known:
            known.add(facts)
            turned = re.sub(r"(\w+) is the ([\w-]+) of (\w+)\.", r"\3's \2 is \1.", facts)
            yield Item(item.slots | {"facts": turned}, item.answer, item.rationale)


def _intent_new() -> Iterator[Item]:
    """Yield at most 60 fillings of each wording, as ``intent_json`` does."""
    for intent, wordings in _INTENTS.items():
        for wording in wordings:
            names = [part.split("}")[0] for part in wording.split("{")[1:]]
            fillings = list(itertools.product(*(_SLOTS[name].split("|") for name in names)))
            random.Random(wording).shuffle(fillings)
            for values in fillings[:MOST]:
                slots = dict(zip(names, values, strict=True))
                why = f"The intent is {intent}; the slots are {', '.join(names)}."
                answer = json.dumps({"intent": intent} | slots)
                yield Item({"request": wording.format_map(slots)}, answer, why)


def reserved() -> set[str]:
    """Return the clauses kept apart for ``copyleft``: two thirds of all, by their hash."""
    clauses = {row["clause"] for row in shipped("licence.jsonl")}
    return {text for text in clauses if hashlib.sha256(text.encode()).digest()[0] % 3}


def _copyleft() -> Iterator[Item]:
    """Yield the reserved clauses of licences that are clearly of one of the two kinds."""
    kept = reserved()
    for row in shipped("licence.jsonl"):
        licence, family = row["licence"], row["family"]
        free = family == "permissive" or licence.startswith(_PERMISSIVE)
        free = free and not licence.startswith("cc-by-sa-")
        if row["clause"] in kept and (free or family in _COPYLEFT):
            kind = "permissive" if free else "copyleft"
            yield Item({"clause": row["clause"]}, kind, f"The family is {family}: {kind}.")


TASKS = (
    Task(
        name="equation_words",
        domain="mathematics",
        source="generated by this file",
        licence="Apache-2.0",
        description="A linear equation told in words; the solution is 1 to 12.",
        templates=(
            "{a} times a number {sign} {b} is {c}. What is the number?",
            "Which number, times {a} and {sign} {b}, gives {c}?",
        ),
        pool=_equation_words,
        max_new_tokens=4,
        rationales=True,
    ),
    Task(
        name="kinship_told",
        domain="common_sense",
        source="generated by this file",
        licence="Apache-2.0",
        description="How two people are related, from three facts told the other way round.",
        templates=(
            "{facts} What is {a} to {c}?",
            "{facts} And {c}'s relative {a} is the",
        ),
        pool=_kinship_told,
        max_new_tokens=12,
        rationales=True,
    ),
    Task(
        name="intent_new",
        domain="language",
        source="generated by this file",
        licence="Apache-2.0",
        description="A spoken request as JSON, with intents that `intent_json` has not.",
        templates=(
            "Turn this request into JSON: {request}",
            "{request}\nGive intent and slots.",
            "Parse: {request}",
        ),
        pool=_intent_new,
        max_new_tokens=48,
        normalise=same_json,
        rationales=True,
    ),
    Task(
        name="copyleft",
        domain="language",
        source="ScanCode LicenseDB 32.5.0, open licences",
        licence="CC-BY-4.0",
        description="Whether a clause comes from a copyleft or from a permissive licence.",
        templates=(
            "Is this clause from a copyleft or a permissive licence? {clause}",
            "{clause}\nCopyleft or permissive?",
            "Copyleft or permissive: {clause}",
        ),
        pool=_copyleft,
        max_new_tokens=8,
        rationales=True,
    ),
)
