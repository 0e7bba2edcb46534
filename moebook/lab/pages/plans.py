"""``moebook plan``: what the trainings of a notebook need; and the book's table of the papers'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moebook import runtime, storage
from moebook.errors import refuse
from moebook.lab import papers, planning
from moebook.lab.pages.filling import page
from moebook.lab.planning import Plan
from moebook.lab.planning.trainings import trainings
from moebook.lab.run import parameters, sources

ONE = "h100"
RECORD = f"{planning.RECORDS}/papers.json"
NOTES = """\
GB are 1e9 bytes a GPU at the peak of a step, by part, then all of it laid out in other ways (FSDP2
over two GPUs where one is asked for). "engine": DDP's buckets, FSDP2's gathered layers; "beside":
what the notebook holds beside; "paged": moments that main memory takes when the GPU is full,
not in the sum. Assumptions: hours are at half of the roofline (--efficiency), with the change and
without traffic between GPUs; rows are as long as may be (--tokens sets the mean); a price is a
middle one of May 2026 (--price). Not counted: tests, the
choice of experts and rows, PHATGOOSE's gates."""


def plans(
    notebook: str,
    given: Mapping[str, Any],
    gpu: str,
    *,
    tokens: int | None = None,
    **how: Any,
) -> list[Plan]:
    """Plan every training of a notebook on a machine such as ``h200x8``.

    ``tokens`` is the mean of a row; of a training whose rows are shorter by rule, its most.
    """
    on = planning.machine(gpu)
    asked = trainings(notebook, given)
    longest = max(training.length for training in asked)
    if tokens is not None and tokens > longest:
        most = f"rows have at most {longest} tokens"
        name = " (max_length)" if given.get("max_length") == longest else ""
        refuse("E-RANGE", f"--tokens {tokens}: {most}{name}")
    found: list[Plan] = []
    for training in asked:
        mean = None if tokens is None else min(tokens, training.length)
        found.append(planning.plan(training, on, tokens=mean, **how))
    return found


def report(
    name: str, protocol: str, options: list[str], gpu: str, folder: Path, **how: Any
) -> str:
    """Return the text of ``moebook plan`` for a notebook at a protocol."""
    notebook = sources.find(folder, name)
    given = parameters.read_options(notebook.parameters, options)
    values = notebook.defaults | notebook.settings(protocol) | given
    on = planning.machine(gpu)
    planned = plans(name, values, gpu, **how)
    head = f"{name} at {protocol} on {on}, {on.gpu.memory / 1e9:.0f} GB each: {values['base']}"
    frame = pd.DataFrame({plan.name: _column(plan) for plan in planned})
    hours = sum(plan.seconds for plan in planned) / 3600
    table = frame.to_string(line_width=100)
    return "\n\n".join([head, table, f"{hours:.1f} hours in all", NOTES])


def _column(plan: Plan) -> dict[str, str]:
    """Return a plan as a column of text, GB by part and by layout."""
    parts = {"all": plan.need.total, **vars(plan.need)}
    parts |= {name: need.total for name, need in plan.layouts.items()}
    return {
        "length of a row": str(plan.length),
        "GB, the model alone": f"{plan.alone / 1e9:.1f}",
        "parameters": f"{plan.parameters:,}",
        "trained": f"{plan.trained:,}",
        "rows a micro-batch": str(plan.way.rows),
        **{f"GB, {name}": f"{size / 1e9:.1f}" for name, size in parts.items()},
        "fits": "yes" if plan.fits else "no",
        "smallest change": plan.change or "-",
        "GB, with it": f"{plan.chosen_need.total / 1e9:.1f}",
        "GPUs": str(plan.chosen.count),
        "tokens": f"{plan.tokens:.2e}",
        "FLOPs": f"{plan.flops:.2e}",
        "hours": f"{plan.seconds / 3600:.2f}",
        "dollars": "no price" if plan.dollars is None else f"{plan.dollars:,.0f}",
    }


def record(folder: Path) -> Path:
    """Plan the papers' settings on one GPU of 80 GB and on what comes nearest to their hardware."""
    lines = []
    known = sources.notebooks(folder)
    for asked in _settings():
        notebook = known[asked["notebook"]]
        values = notebook.defaults | notebook.settings("paper") | asked["changes"]
        parameters.check(notebook.parameters, asked["changes"], "plans.yaml")
        on_each = {
            place: asdict(plans(notebook.name, values, gpu)[0])
            for place, gpu in (("one", ONE), ("own", asked["gpu"]))
        }
        lines.append({"setting": asked["setting"], **on_each})
    told = {
        "date": runtime.now(),
        "plans": lines,
        "commit": storage.commit(folder),
        "code": _code(),
    }
    path = folder / RECORD
    storage.write(path, json.dumps(told, indent=1) + "\n")
    return path


def shown(folder: Path) -> str:
    """Return the page's tables: the papers' settings, and how far measurements are from plans."""
    path = folder / RECORD
    # A machine's measurements each.
    others = sorted({*storage.files.own(path.parent, "*.json")} - {path})
    with storage.formed(path):
        told = storage.read_json(path) if path.is_file() else {"plans": []}
        hardware = {
            name: papers.printed.hyperparameters(name, "paper")["hardware"]["value"]
            for name in papers.PAPERS
        }
        stated = {one["setting"]: one for one in _settings()}
        printed = papers.wide("esft", "figure_4")
        rows = printed.filter(like="memory").iterrows()
        return page(
            "plan",
            lines=told["plans"],
            hardware=hardware,
            stated=stated,
            told=told,
            memory={arm: row.dropna().tolist() for arm, row in rows},
            minutes=printed["training time"],
            machines=[(storage.read_json(other), errors(other)) for other in others],
            behind=told.get("code") != _code(),
            efficiency=planning.EFFICIENCY,
            gpus=planning.GPUS,
        )


def errors(path: Path) -> pd.DataFrame:
    """Read a record back: a line a case that ran, with bytes, seconds, and the errors of both.

    ``efficiency`` is the roofline's time over the one measured. A time is predicted at the
    geometric mean of the other cases' efficiencies, so that no case predicts itself; of one
    case alone no time is predicted (NaN).
    """
    with storage.formed(path):
        lines = [
            line for line in storage.read_json(path)["cases"] if "predicted" in line
        ]
        frame = pd.DataFrame(lines)
        predicted = pd.DataFrame(list(frame.pop("predicted")))
        parts = ["weights", "gradients", "moments", "activations"]
        frame["predicted bytes"] = predicted[parts].sum(axis=1)
        frame["efficiency"] = predicted["seconds"] / frame["seconds"]
        logs = np.log(frame["efficiency"])
        others = np.exp((logs.sum() - logs) / (len(logs) - 1))
        frame["predicted seconds"] = predicted["seconds"] / others
        for what in ("bytes", "seconds"):
            frame[f"error of {what}"] = frame[f"predicted {what}"] / frame[what] - 1
        return frame


def _settings() -> list[dict[str, Any]]:
    return list(storage.read_yaml(Path(__file__).with_name("plans.yaml")))


def _code() -> str:
    return storage.files.code(Path(planning.__file__).parent)
