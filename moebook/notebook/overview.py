"""The text of ``moebook list``: notebooks, parameters, tiers and what they cost when measured."""

from __future__ import annotations

from pathlib import Path

from moebook import results
from moebook.errors import refuse
from moebook.notebook import sources
from moebook.notebook.parameters import Parameter
from moebook.notebook.sources import Notebook
from moebook.results import Record


def text(folder: Path) -> str:
    """Return one block a notebook of the project, in the order of their numbers."""
    blocks = [_block(notebook, folder) for notebook in sources.notebooks(folder).values()]
    return "\n\n".join(blocks) or f"no notebooks/NN_name.ipynb in {folder}"


def _block(notebook: Notebook, folder: Path) -> str:
    records = results.records(notebook.name, folder)
    width = max(len(name) for name in notebook.parameters)
    lines = [f"{notebook.name}  {notebook.title} (notebooks/{notebook.path.name})"]
    lines += [f"  {_parameter(p, width)}" for p in notebook.parameters.values()]
    for tier in notebook.tiers:
        path = results.record_path(folder, notebook.path.stem, tier).relative_to(folder)
        where = str(path).replace("record.json", "manifest.json")
        lines.append(f"  --tier {tier:<7}{cost(records.get(tier), where)}")
    return "\n".join(lines)


def _parameter(parameter: Parameter, width: int) -> str:
    start = f"-p {parameter.name:<{width}} {parameter.type.__name__:<5} = {parameter.default!r}"
    return f"{start}  {parameter.help} {parameter.rule}".rstrip()


def cost(record: Record | None, where: str) -> str:
    """Say what a record's run cost, from its manifest: time, peak memory, and on what.

    Args:
        record: With its manifest; None for what never ran.
        where: Names the manifest's file in a refusal.

    Raises:
        Refusal: ``E-RECORD`` when the manifest does not say what it cost.
    """
    if record is None:
        return "not measured"
    try:
        spent, memory = record.manifest["seconds"], record.manifest["peak_memory"]
        machine = record.manifest["environment"]
        hardware = machine["accelerator"] or f"{machine['cpu']}, {machine['cores']} cores"
        overrides = " ".join(f"-p {k}={v}" for k, v in record.manifest["overrides"].items())
        return f"{duration(spent)}, {size(memory)} on {hardware} {overrides}".rstrip()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        refuse("E-RECORD", f"{where} is incomplete ({what}); run the notebook again with --force")


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
