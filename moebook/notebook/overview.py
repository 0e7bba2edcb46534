"""The text of ``moebook list``: notebooks, parameters, protocols and what they cost."""

from __future__ import annotations

from pathlib import Path

from moebook import results
from moebook.errors import refuse
from moebook.notebook import sources
from moebook.notebook.parameters import Parameter
from moebook.notebook.sources import Notebook
from moebook.results import Pool, Run


def text(folder: Path) -> str:
    """Return one block a notebook of the project, in the order of their numbers."""
    blocks = [_block(notebook, folder) for notebook in sources.notebooks(folder).values()]
    return "\n\n".join(blocks) or f"no notebooks/NN_name.ipynb in {folder}"


def _block(notebook: Notebook, folder: Path) -> str:
    pools = results.pools(notebook.name, folder)
    if shown := results.live(notebook.name, folder):
        pools.setdefault(shown.runs[0].protocol, shown)
    width = max(len(name) for name in notebook.parameters)
    lines = [f"{notebook.name}  {notebook.title} (notebooks/{notebook.path.name})"]
    lines += [f"  {_parameter(p, width)}" for p in notebook.parameters.values()]
    for protocol in notebook.protocols:
        lines.append(f"  --on {protocol:<8} {_pool(pools.get(protocol))}")
    return "\n".join(lines)


def _pool(pool: Pool | None) -> str:
    """Say which runs a pool has, and what one of them cost."""
    if pool is None:
        return "not measured"
    seeds = f"seeds {', '.join(map(str, pool.seeds))}, each " if len(pool.seeds) > 1 else ""
    return seeds + cost(pool.last)


def _parameter(parameter: Parameter, width: int) -> str:
    start = f"-p {parameter.name:<{width}} {parameter.type.__name__:<5} = {parameter.default!r}"
    return f"{start}  {parameter.help} {parameter.rule}".rstrip()


def cost(run: Run) -> str:
    """Say what a run cost, from its manifest: time, peak memory, and on what.

    Raises:
        Refusal: ``E-RUN`` when the manifest does not say what it cost.
    """
    try:
        spent, memory = run.manifest["seconds"], run.manifest["peak_memory"]
        machine = run.manifest["environment"]
        hardware = machine["accelerator"] or f"{machine['cpu']}, {machine['cores']} cores"
        several = run.manifest.get("parameters", {}).get("seeds", 1)  # once one run had several
        share = f" for {several} seeds" if several > 1 else ""
        return f"{duration(spent)}{share}, {size(memory)} on {hardware}"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = f"the manifest of {run.notebook}, {run.protocol}, seed {run.seed}"
        refuse("E-RUN", f"{where} is incomplete ({type(error).__name__}: {error}); run it again")


def duration(seconds: float) -> str:
    """Write seconds as ``4.2 s``, ``3 min 20 s`` or ``1 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(bytes_: int | None) -> str:
    """Write bytes as MB or GB (powers of ten)."""
    if bytes_ is None:
        return "memory not measured"
    return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e9 else f"{bytes_ / 1e6:.0f} MB"
