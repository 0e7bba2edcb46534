"""What a reader can move: a table and its numbers, to which book/_static/move.js gives handles.

Without scripts the table stands alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from moebook.lab import papers
from moebook.lab.pages.filling import page
from moebook.lab.records import Run, store
from moebook.methods import pesc, rocket
from moebook.methods.pesc.measure import HOSTS
from moebook.models.skeleton import configuration

SIZES = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
           num_key_value_heads""".split()


def sizes() -> str:
    """Return the sizes of PESC's hosts, as `pesc.counts` gives and as the paper prints them."""
    config = pesc.Config()
    hosts = []
    claims = {claim.value: claim for claim in papers.claims("pesc")}
    for host, name in HOSTS.items():
        counted = pesc.counts(config, host)
        public = configuration(name)
        shape = {size: getattr(public, size) for size in SIZES}
        printed = {
            n: claims[f"pesc/counts/{host}/{n}"].claimed for n in ("total", "activated")
        }
        hosts.append({"name": host, **shape, **counted._asdict(), "printed": printed})
    return page("sizes", hosts=hosts, config=config)


def experts(folder: Path) -> str:
    """Return the scores of all experts that runs of ESFT's routing recorded, task by task."""
    public = papers.printed.hyperparameters("esft", "released")
    tasks = []
    published = 3 * public["hidden_size"]["value"] * public["expert_width"]["value"]
    for run, task, scores in _recorded("routing", "scores", folder):
        values = {value.name: value.value for value in run.values}
        trained = {
            score: values[f"routing/{score}/{task}/experts_trained"] for score in scores
        }
        tasks.append(
            {
                "name": _name(run, task),
                "scores": scores,
                "trained": trained,
                "parameters": values.get("routing/expert/parameters", published),
                "p": {score: run.settings[f"p_{score}"] for score in scores},
            }
        )
    return page("experts", tasks=tasks)


def selection(folder: Path) -> str:
    """Return what runs of Rocket recorded of the bank on K shots, target by target."""
    targets = []
    for run, target, bank in _recorded("rocket", "bank", folder):
        loras = list(bank["nats"])
        start = {
            name: run.settings[name]
            for name in ("shots", "candidates", "experts", "top_k")
        }
        nats, share = (pd.DataFrame(bank[unit]).T for unit in ("nats", "share"))
        cosines = pd.DataFrame(
            {name: bank["correlation"][name][: len(loras)] for name in loras}
        )
        scores = rocket.score.scores(nats, share)
        chosen = rocket.choose.select(
            scores, cosines.set_axis(loras), rocket.Config(**start)
        )
        lines = chosen.candidates.to_dict("index")
        fixed = {
            "loras": loras,
            "start": start,
            "lines": lines,
            "experts": chosen.experts,
        }
        targets.append({"name": _name(run, target), **bank, **fixed})
    return page("selection", targets=targets)


def _recorded(
    notebook: str, kind: str, folder: Path
) -> list[tuple[Run, str, dict[str, Any]]]:
    """Find curves ``notebook/kind/task/measure/key``: run, task, and points by measure and key."""
    curves = []
    pools = store.pools(notebook, folder, shown=True).values()
    for pool in sorted(pools, key=lambda pool: pool.rank, reverse=True):
        tasks: dict[str, dict[str, Any]] = {}
        for curve in pool.last.curves:
            root, what, *path = curve.name.split("/", 4)
            if (root, what) == (notebook, kind):
                task, measure, key = path
                tasks.setdefault(task, {}).setdefault(measure, {})[key] = curve.y
        curves += [(pool.last, task, measured) for task, measured in tasks.items()]
    return curves


def _name(run: Run, task: str) -> str:
    """Name a task, the base and the scale, as the reader chooses it."""
    base = str(run.settings["base"]).partition("@")[0].rpartition("/")[2]
    name = f"{task} on {base}"
    return name if run.tier in store.COMMITTED else f"{name}, this build"
