"""The badge under a notebook's title: what its run really cost, from the run beside it.

It is a Sphinx extension (``extra_extensions`` in _config.yml), which adds the badge while a page is
read: the executed copies stay as they ran, hash for hash.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from moebook import results
from moebook.notebook.overview import duration, size
from moebook.results import Run

SMOKE = (
    ":::{warning}\nThis page was executed at tier `smoke`, which tests that everything runs:"
    " its numbers mean nothing.\n:::\n"
)


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("source-read", _insert)
    return {"parallel_read_safe": True}


def _insert(app: Any, docname: str, source: list[str]) -> None:
    """Put the badge after the first cell of an executed notebook that measures."""
    path = Path(app.srcdir) / f"{docname}.parquet"
    if not docname.startswith("notebooks/") or docname.endswith("_findings"):
        return
    app.env.note_dependency(str(path))
    run, notebook = results.read_run(path), json.loads(source[0])
    text = badge(run) + recorded(run, Path(app.srcdir).parent)
    notebook["cells"].insert(1, {"cell_type": "markdown", "metadata": {}, "source": text})
    source[0] = json.dumps(notebook)


def recorded(run: Run, folder: Path) -> str:
    """Lead from a live page to the pools of its notebook, each with its seeds.

    Args:
        run: The page's run.
        folder: The project.
    """
    pools = results.pools(run.notebook, folder)
    if not pools:
        return ""
    told = ", ".join(f"{name} ({seeds(len(pool.seeds))})" for name, pool in pools.items())
    findings = sorted((folder / "notebooks").glob(f"*_{run.notebook}_findings.ipynb"))
    where = f"[the findings]({findings[0].name})" if findings else "[the records](../records.md)"
    return f"\nThis page is one run. Runs at full size: {told}; what they say: {where}.\n"


def seeds(number: int) -> str:
    """Write a number of seeds."""
    return f"{number} seed" + "s" * (number != 1)


def badge(run: Run) -> str:
    """Return the badge of a run as Markdown with a little HTML."""
    manifest, machine = run.manifest, run.manifest["environment"]
    facts = {
        "tier": run.tier,
        "seed": run.seed,
        "ran in": duration(manifest["seconds"]),
        "peak memory": (peak := manifest["peak_memory"]) and size(peak),
        "cores": f"{machine['cores']} × {machine['cpu']}",
        "accelerator": machine["accelerator"],
        "date": manifest["date"][:10],
        "commit": commit(run),
        "set by the reader": ", ".join(f"{k} = {v}" for k, v in manifest["overrides"].items()),
    }
    shown = {k: v for k, v in facts.items() if v not in (None, "")}
    items = "".join(f"<li>{k} <b>{html.escape(str(v))}</b></li>" for k, v in shown.items())
    note = SMOKE if run.tier == "smoke" else ""
    return f'{note}\n<ul class="moe-cost" aria-label="What this run cost">{items}</ul>\n'


def commit(run: Run) -> str:
    """Write a run's commit: seven digits, and whether files differed from it."""
    found = run.manifest.get("commit")
    if found is None:
        return "unknown"
    return f"{found['id'][:7]}{' with changes' if found['dirty'] else ''}"
