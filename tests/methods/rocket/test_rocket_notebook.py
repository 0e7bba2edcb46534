"""What the notebook sets and does, against the paper's settings and at the tiers of the hub."""

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from moebook import models, notebook, papers, runtime
from moebook.data import hub
from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.notebook import sources

ROOT = Path(__file__).parents[3]
BOOK = sources.find(ROOT, "rocket")
CELLS = ["".join(cell["source"]) for cell in json.loads(BOOK.path.read_text("utf-8"))["cells"]]
MODULES = {"rocket": rocket, "hub": hub, "pd": pd, "notebook": notebook, "models": models}


def cell(start):
    (found,) = (text for text in CELLS if text.startswith(start))
    return found


def values(tier):
    return {name: p.default for name, p in BOOK.parameters.items()} | BOOK.settings(tier)


def test_the_tier_paper_tunes_as_table_12_says():
    used, stated = values("paper"), papers.hyperparameters("rocket", "paper")
    for name in ("lr", "schedule", "weight_decay", "shots", "candidates", "experts"):
        assert used[name] == stated[name]["value"]
    assert used["batch"] == stated["batch"]["value"] * stated["accumulation"]["value"]
    assert '"weight_decay": weight_decay' in cell("fitting = ")


def test_the_claimed_average_is_that_of_the_tasks_that_the_notebook_meets():
    printed = papers.table("rocket", 1).query("row == 'Ours' and model == 'Mistral-7B'")
    questions = set(rocket.bank.QUESTIONS)
    mean = printed.value[printed.column.replace("PiQA", "PIQA").isin(questions)].mean()
    assert papers.claim("rocket.average").claimed == pytest.approx(mean / 100)
    for tier in ("gpu", "paper"):
        assert set(values(tier)["targets"].split(",")) == questions


def test_protocols_run_arms_that_there_are():
    for used in map(values, ("smoke", "cpu", "nano", "gpu", "paper")):
        given = {f.name: used[f.name] for f in fields(rocket.Config) if f.name in used}
        main = rocket.Config.preset(used["preset"], **given)
        known = rocket.pipeline.arms(main, strict=used["strict"])
        assert used["arms"] == "all" or notebook.listed("arms", used["arms"], known)


@pytest.mark.parametrize("tier", ["gpu", "paper"])
def test_rows_of_the_hub_are_trained_on_whole_and_tested_on_the_benchmarks_split(tier, monkeypatch):
    with pytest.raises(Refusal, match="E-PIN: allenai/ai2_arc: revision is None"):
        exec(cell("names, pins"), values(tier) | MODULES)

    def source_rows(name, revision, split="train"):
        return [{"task": name, "prompt": f"{split} {n}", "answer": "a"} for n in range(3)]

    monkeypatch.setattr(rocket.bank, "source_rows", source_rows)

    space = values(tier) | MODULES | {"run": SimpleNamespace(rows=lambda *, train, test: None)}
    exec(cell("names, pins"), space)
    assert len(space["pool"]) == 3 * len(space["pool_sets"].split(","))
    for name in space["names"]:
        assert [row["prompt"] for row in space["annotated"][name]] == [
            f"train {n}" for n in range(3)
        ]
        assert space["held_out"][name][0]["prompt"] == f"{rocket.bank.HELD_OUT[name]} 0"


def test_members_and_loras_to_retrain_are_names_of_the_bank():
    space = values("nano") | MODULES | {"bank": {"gcd": None, "sums": None}}
    with pytest.raises(Refusal, match="E-RANGE: retrain lists 'licence': one of: gcd, sums"):
        exec(cell("again = "), space)
    with pytest.raises(Refusal, match="E-RANGE: members lists 'foo'"):
        exec(cell("device = "), space | {"runtime": runtime, "members": "gcd,foo"})


def test_every_arm_meets_the_guarded_bank():
    assert "rocket.pipeline.experts(case, mixed[arm], clean[t]," in cell("mixed, chosen")
    assert "clean[t] |" in cell("prompt, cases")
