"""Each claim's value is written by a cell of the notebook at each scale that the claim lists."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from moebook import evaluation, papers
from moebook.analysis import routing
from moebook.data.tasks import KNOWN
from moebook.methods import pesc
from moebook.notebook import sources

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = sources.find(ROOT, "pesc")
ALL = json.loads(NOTEBOOK.path.read_text(encoding="utf-8"))["cells"]
CELLS = ["".join(cell["source"]) for cell in ALL if cell["cell_type"] == "code"]
ARMS = next(cell for cell in CELLS if cell.startswith("main = pesc.Config.preset("))
BASES = {"13b": "meta-llama/Llama-2-13b-hf", "34b": "01-ai/Yi-34B"}
ROUTED = {"layer": 0, "router": "r", "domain": "code", "expert": [0, 1], "slots": 1, "share": 0.5}
LOADS = routing.summary(pd.DataFrame(ROUTED))
CASES = [(claim, scale) for claim in papers.claims("pesc") for scale in claim.scales]


def settings(scale: str, said: str) -> dict[str, Any]:
    """A scale's parameters, with those changed that the claim says to set."""
    found = {name: value.default for name, value in NOTEBOOK.parameters.items()}
    found |= NOTEBOOK.settings("nano" if scale == "study" else scale)
    named = re.findall(r"`(\w+)`", said)
    assert set(named) <= set(found), f"no such parameter: {named}"
    found |= {"arms": "all"} if "arms" in named else {}
    if "base" in named:
        found["base"] = next(base for size, base in BASES.items() if f"{size.upper()} base" in said)
    return found | ({"mix": "idae-720k"} if "mix" in named else {})


def arms(chosen: dict[str, Any]) -> list[str]:
    """The arms that the notebook's own cell makes of the parameters."""

    def pick(text: str, known: dict[str, Any]) -> dict[str, Any]:
        return {name: known[name] for name in (known if text == "all" else text.split(","))}

    run = SimpleNamespace(arms=pick)
    space = {"pesc": pesc, "replace": replace, "pd": pd, "run": run, **chosen}
    exec(ARMS, space)
    return list(space["configs"])


def domains(tasks: str) -> list[str]:
    """What accuracy is split into: the domains of the tasks."""
    names = tasks.split(",")
    kinds = [KNOWN[name].domain if name in KNOWN else "benchmark" for name in names]
    table = pd.DataFrame({"task": names, "domain": kinds, "correct": 1})
    return list(evaluation.by_benchmark(table, pesc.GROUPS).domain.unique())


def written(chosen: dict[str, Any]) -> str:
    """A pattern of all names that the notebook's cells record under these parameters."""
    source = "\n".join(CELLS)
    names = re.findall(r'run\.record\(f?"([^"]+)"', source)
    for path in re.findall(r'run\.scores\(f"([^"]+)"', source):
        names += [f"{path}/accuracy", f"{path}/nll", f"{path}/accuracy/{{domain}}"]
    filled = {
        "{root}": [pesc.root(chosen["base"], chosen["mix"])],
        "{arm}/{name}": [f"{arm}/{name}" for arm in arms(chosen) for name in LOADS],
        "{arm}": arms(chosen),
        "{domain}": domains(chosen["tasks"]),
        "{task}": [name for name in ("gsm8k",) if name in chosen["tasks"].split(",")],
    }
    patterns = []
    for name in map(re.escape, names):
        for place, choices in filled.items():
            name = name.replace(re.escape(place), f"(?:{'|'.join(map(re.escape, choices))})")
        patterns.append(re.sub(r"\\{\w+\\}", r"[\\w-]+", name))
    return "|".join(patterns)


@pytest.mark.parametrize(("claim", "scale"), CASES, ids=[f"{c.id}-{s}" for c, s in CASES])
def test_a_cell_writes_the_value_at_the_scale(claim: papers.Claim, scale: str) -> None:
    chosen = settings(scale, claim.why)
    assert re.fullmatch(written(chosen), claim.value), "no cell records it"
    if isinstance(claim.reference, str):
        smaller = {**chosen, "mix": settings(scale, "")["mix"]}
        pattern = f"{written(chosen)}|{written(smaller)}"  # of two runs, where `mix` is named
        assert re.fullmatch(pattern, claim.reference), "no cell records what it is compared with"


def test_a_larger_base_or_mixture_writes_no_value_of_the_7b_claims() -> None:
    other = settings("paper", "The parameter `base` names the 13B base.")
    assert not re.fullmatch(written(other), "pesc/sparse/accuracy")
    assert re.fullmatch(written(settings("paper", "")), "pesc/sparse/accuracy")
