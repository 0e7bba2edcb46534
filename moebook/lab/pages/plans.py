"""``moebook plan``: what the trainings of a notebook need; and the book's table of the papers'."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from moebook import experiments, lists, storage, together
from moebook.data import tasks
from moebook.errors import refuse_unknown
from moebook.lab import papers, planning
from moebook.lab.pages.pages import page
from moebook.lab.planning import Plan, Training, methods
from moebook.lab.planning.methods import Method
from moebook.lab.run import parameters, sources
from moebook.methods import rocket, upcycling
from moebook.methods.rivals import table
from moebook.methods.rocket import bank
from moebook.models.anatomy import anatomy, sparse_layers
from moebook.models.skeleton import configuration, skeleton

Given = Mapping[str, Any]
Arms = Iterator[tuple[str, Method, dict[str, Any]]]
ONE, RECORD = "h100", f"{planning.RECORDS}/papers.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NOTES = """\
GB are 1e9 bytes a GPU at the peak of a step, by part, then all of it laid out in other ways (FSDP2
over two GPUs where one is asked for). "engine": DDP's buckets, FSDP2's gathered layers; "beside":
what the notebook holds beside; "paged": moments that main memory takes when the GPU is full,
not in the sum. Assumptions: hours are at half of the roofline (--efficiency), with the change and
without traffic between GPUs; rows are as long as may be (--tokens sets the mean); a price is a
middle one of May 2026 (--price). Tests are not counted."""
# Tokens a row where no parameter says it.
LENGTH = {
    "bases": 256,
    "rocket": 1024,
    "rivals": 1024,
    "banks": 1024,
}


def trainings(notebook: str, given: Given) -> list[Training]:
    """List what a notebook trains with these parameters, an entry an arm, each a run of its own.

    Of the rows only the most tokens are known; tests, and choosing of experts and rows, are left
    out.
    """
    message = f"{notebook} trains nothing that a plan is known for;"
    refuse_unknown(notebook, TRAINED, "E-NOTEBOOK", message)
    if notebook in experiments.CHECKS:
        experiments.check(notebook, given)
    # Bytes a parameter of the host that the notebook holds beside what trains: pesc the base, esft
    # what it copies, together the base in float32, router_init a copy in 16 bits as well.
    dtype = DTYPES.get(given.get("dtype", ""), torch.float32)
    copies = {"pesc": dtype.itemsize, "esft": dtype.itemsize, "together": 4}
    copies["router_init"] = 4 + dtype.itemsize
    base = skeleton(configuration(given["base"]))
    usual: dict[str, Any] = {
        name: given[name]
        for name in ("batch", "steps", "accumulate", "optimizer", "checkpointing")
        if name in given
    }
    usual |= {
        "host": given["base"],
        "length": given.get("max_length", LENGTH.get(notebook)),
    }
    usual |= {
        "dtype": dtype,
        "beside": copies.get(notebook, 0) * float(base.num_parameters()),
    }
    if notebook in ("router_init", "together"):  # theirs is the dtype of products
        usual |= {"dtype": torch.float32, "autocast": dtype == torch.bfloat16}
    return [
        Training(**usual | {"name": name, "method": method} | own)
        for name, method, own in TRAINED[notebook](given)
    ]


def _bases(given: Given) -> Arms:
    rows = len(tasks.CATALOGUE) * given["train_rows"] * given["epochs"]
    yield "all parameters", methods.full(), {"steps": -(-rows // given["batch"])}


def _pesc(given: Given) -> Arms:
    tries = len(lists.rates("rates", given["rates"])) * given["rate_steps"]
    for name, arm in experiments.pesc.check(given).items():
        yield name, methods.of_arm(arm, given), {"steps": given["steps"] + tries}


def _router_init(given: Given) -> Arms:
    tries = len(lists.rates("rates", given["rates"])) * given["rate_steps"]
    for name, arm in experiments.router_init.check(given).items():
        yield (
            name,
            methods.of_arm(arm, given),
            {"steps": arm.recipe(given)["steps"] + tries},
        )


def _rocket(given: Given) -> Arms:
    names = "shots candidates experts top_k budget threshold"
    main = rocket.Config.preset(
        given["preset"], **{name: given[name] for name in names.split()}
    )
    known = experiments.rocket.arms(main, strict=given["strict"])
    turns, tried = len(given["targets"].split(",")), len(_listed(given["rates"]))
    for name in _arms(given, known):
        if arm := known[name]:
            rows = arm.config.shots + arm.config.budget * arm.open_data
            steps = -(-rows * given["epochs"] // given["batch"]) or given["steps"]
            again = given["repeats"] if name == "mixture" else 1
            own = {
                "steps": steps,
                "turns": turns * (again + (tried if tried > 1 else 0)),
            }
            yield name, methods.mixture(arm.config, given["bank_rank"]), own


def _banks(given: Given) -> Arms:
    """Plan the mixtures; the LoRAs of the two banks are trained before, one after another."""
    config = experiments.banks.main(given)
    turns = len(given["targets"].split(",")) * given["draws"]
    for name in experiments.banks.check(given):
        method = methods.mixture(config, rocket.bank.RECIPE["rank"])
        yield name, method, {"turns": turns * len(experiments.banks.kinds(name))}


def _rivals(given: Given) -> Arms:
    """Plan each rival as a mixture of the LoRAs that it sees, all of them trained: the most."""
    whole, how = (
        len(bank.SOURCES),
        {name: given[name] for name in ("experts", "top_k", "rate")},
    )
    sizes = {"whole": whole, "with_target": whole + 1, "chosen": given["experts"]}
    known = table.arms(whole, searches=given["searches"], **how)
    turns = len(given["targets"].split(",")) * (1 + len(_listed(given["rates"])))
    for name in _arms(given, known):
        if known[name].rated:
            experts = sizes[known[name].bank]
            config = rocket.Config(
                candidates=experts, experts=experts, top_k=min(2, experts)
            )
            yield name, methods.mixture(config, 16), {"turns": turns}


def _esft(given: Given) -> Arms:
    known = experiments.esft.known(given)
    printed = {
        score: papers.printed.hyperparameters("esft", "paper")[f"threshold_{score}"][
            "value"
        ]
        for score in ("gate", "token")
    }
    tries = len(_listed(given["rates"])) * -(-given["steps"] // 2)
    for name in _arms(given, known):
        arm, scale = known[name], given["lora_scale"]
        if arm.method == "fft":
            method = methods.full()
        elif arm.method == "lora":
            method = methods.lora(int(arm.size), scale, attention=arm.attention)
        else:  # the share at the paper's threshold is in proportion to another one
            share = methods.esft_share(arm.method) * arm.size / printed[arm.method]
            method = methods.esft(min(1.0, share))
        turns = len(given["tasks"].split(",")) if arm.main else 1
        yield name, method, {"turns": turns, "steps": given["steps"] + tries}


def _together(given: Given) -> Arms:
    """Plan arms by what trains in them; how routers start and what chooses takes no memory.

    A second training, on equal FLOPs, counts as many steps as the first.
    """
    base, top_k = skeleton(configuration(given["base"])), given["top_k"]
    names = "parameters adapters copies experts top_k".split()
    config = together.Config(**{name: given[name] for name in names})
    setup = together.Setup(
        base, None, dict.fromkeys(given["tasks"].split(","), ()), config
    )
    sparse = any(layer.kind == "sparse" for layer in anatomy(base).layers)
    known = experiments.together.arms(sparse=sparse)
    layers = sparse_layers(base) if sparse else []
    routed = sum(p.numel() for layer in layers for p in layer.experts.parameters())
    copied = upcycling.Config(experts=config.copies, top_k=min(top_k, config.copies))
    again, tried = _listed(given["again"]), len(_listed(given["rates"]))
    tries = tried * given["rate_share"] if tried > 1 else 0
    for name in _arms(given, known):
        arm, plain = known[name], known["pesc" if name.startswith("pesc") else name]
        if name in ("su", "trsu", "crsu", "esft"):
            method = methods.upcycling(copied)
        elif name in ("token", "gate", "random_gate"):
            method = methods.esft(min(1.0, config.parameters / routed))
        elif plain.bank or name == "mixlora":
            sized = arm if arm.bank else known["rocket"]
            count = config.experts if sized.chosen else len(setup.rows)
            sizes = rocket.Config(
                experts=count, top_k=min(top_k, count), candidates=count
            )
            rank = experiments.crafts.bank_rank(
                setup, sized.bank, chosen=sized.chosen, gates=sized.gates
            )
            method = methods.mixture(sizes, rank)
        else:
            made = partial(lambda make, host: make(setup, host, {}), plain.make)
            method = Method((name, config), made)
        yield (
            name,
            method,
            {"steps": round(given["steps"] * (1 + tries + (name in again)))},
        )


TRAINED: dict[str, Callable[[Given], Arms]] = {
    "bases": _bases,
    "pesc": _pesc,
    "router_init": _router_init,
    "rocket": _rocket,
    "rivals": _rivals,
    "esft": _esft,
    "together": _together,
    "banks": _banks,
}


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _arms(given: Given, known: Mapping[str, Any]) -> list[str]:
    return lists.arms(given["arms"], known)


def plans(notebook: str, given: Given, gpu: str, **how: Any) -> list[Plan]:
    """Plan every training of a notebook on a machine such as ``h200x8``."""
    on = planning.machine(gpu)
    return [
        planning.plan(training, on, **how) for training in trainings(notebook, given)
    ]


def report(
    name: str, protocol: str, options: list[str], gpu: str, folder: Path, **how: Any
) -> str:
    """Return the text of ``moebook plan`` for a notebook at a protocol."""
    notebook = sources.find(folder, name)
    given = parameters.read_options(notebook.parameters, options)
    values = notebook.defaults | notebook.settings(protocol) | given
    on, found = planning.machine(gpu), plans(name, values, gpu, **how)
    head = f"{name} at {protocol} on {on}, {on.gpu.memory / 1e9:.0f} GB each: {values['base']}"
    frame = pd.DataFrame({plan.name: _column(plan) for plan in found})
    hours = sum(plan.seconds for plan in found) / 3600
    table = frame.to_string(line_width=100)
    return "\n\n".join([head, table, f"{hours:.1f} hours in all", NOTES])


def _column(plan: Plan) -> dict[str, str]:
    """Return a plan as a column of text, GB by part and by layout."""
    parts = {"all": plan.need.total, **vars(plan.need)}
    parts |= {name: need.total for name, need in plan.layouts.items()}
    return {
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
    lines, known = [], sources.notebooks(folder)
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
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
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
        )


def errors(path: Path) -> pd.DataFrame:
    """Read a record back: a line a case that ran, with bytes, seconds, and the errors of both.

    ``efficiency`` is the roofline's time over the one measured. A time is predicted at the
    geometric mean of the other cases' efficiencies, so that no case predicts itself.
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
