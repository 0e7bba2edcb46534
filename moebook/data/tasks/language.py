"""Language: requests turned into JSON (`requests.yaml`), licence families, copyleft or not."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from moebook.data.tasks.task import Item, shipped
from moebook.results import formed

_COPYLEFT = {"GNU", "Mozilla", "Eclipse", "CeCILL or EUPL"}
_PERMISSIVE = ("cc-by-", "pddl-", "cdla-permissive-", "cern-ohl-p-", "cecill-b-")


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


POOLS = (intent_json, intent_new, licence, copyleft)
