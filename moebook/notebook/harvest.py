"""What an executed notebook left in its outputs: values, curves, notes, and the run of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moebook import results
from moebook.errors import refuse, refuse_unknown
from moebook.notebook import parameters, sources
from moebook.notebook.session import CURVE, NOTE, RECORDED, VALUE, injected
from moebook.notebook.sources import Notebook
from moebook.results.runs import Run, restored

NOTES = {"environment": dict, "modules": dict, "rows": dict, "files": dict,
         "arms": list, "known": list}  # fmt: skip


def code_cells(notebook: Any) -> list[tuple[int, Any]]:
    """Number the code cells from 1, as a fresh kernel does."""
    return list(enumerate((c for c in notebook["cells"] if c["cell_type"] == "code"), start=1))


def values(notebook: Any, mime: str = VALUE) -> tuple[Any, ...]:
    """Return what a notebook's `Run.record` calls left, or those of `Run.curve`, in order."""
    return tuple(restored(RECORDED[mime], x, where) for where, x in _outputs(notebook, mime))


def notes(notebook: Any) -> dict[str, Any]:
    """Gather what a notebook notes of its run: environment, modules, arms, rows, files."""
    facts: dict[str, Any] = {name: kind() for name, kind in NOTES.items()}
    for where, content in _outputs(notebook, NOTE):
        for name, fact in content.items() if isinstance(content, dict) else [("", content)]:
            if not isinstance(fact, NOTES.get(name, ())):
                refuse("E-OUTPUT", f"{where}: malformed note of the run; execute it again")
            facts[name] = facts[name] | fact if isinstance(fact, dict) else fact
    return facts


def _outputs(notebook: Any, mime: str) -> Iterator[tuple[str, Any]]:
    for number, cell in code_cells(notebook):
        for output in cell.get("outputs", []):
            if mime in output.get("data", {}):
                yield f"In [{number}]", output["data"][mime]


def seconds(executed: Any) -> dict[str, Any]:
    """Read the time of the run and of each code cell, as papermill measured them."""
    took = {str(number): cell["metadata"].get("papermill", {}).get("duration")
            for number, cell in code_cells(executed)}  # fmt: skip
    total = executed["metadata"].get("papermill", {}).get("duration")
    return {"seconds": total, "cell_seconds": took}


def harvest(
    executed: Any, source: Notebook, protocol: str, folder: Path, manifest: Mapping[str, Any]
) -> Run:
    """Make a run of what an executed notebook left; the ``manifest`` has all ``parameters``."""
    facts, given = notes(executed), manifest["parameters"]
    lock = results.digest(results.part(folder, "requirements.lock"))
    code = {"notebook": results.files.source(source.path), "lock": lock}
    known = {"environment": facts["environment"], "known_arms": facts["known"]}
    known |= {"files": facts["files"]} if facts["files"] else {}
    return Run(
        notebook=source.name,
        protocol=protocol,
        tier=given["tier"],
        seed=given.get("seed", 0),
        values=values(executed),
        curves=values(executed, CURVE),
        arms=tuple(facts["arms"]),
        settings=sources.design(given),
        rows=facts["rows"],
        code={**code, "modules": facts["modules"]},
        manifest={**manifest, **known},
    )


def read_notebook(path: Path, folder: Path) -> Run:
    """Read an executed notebook as a run whose protocol is unknown (``mine``)."""
    if not path.is_file():
        refuse("E-NOFILE", f"no file {path}; give an executed notebook, such as my_run.ipynb")
    beside = path.with_suffix(".parquet")  # as `moebook run` leaves it: it knows cost and day
    if beside.is_file():
        run = results.read_run(beside)
        if run.manifest.get("executed") == results.digest(path):
            return replace(run, protocol="mine")
    source = sources.read(path)
    executed = results.read_ipynb(path)
    recorded = values(executed)
    if not recorded:
        refuse("E-RUN", f"{path.name} holds no recorded values; execute it first")
    name, known = recorded[0].name.split("/")[0], sources.notebooks(folder)
    refuse_unknown(name, known, "E-NOTEBOOK", f"{path.name} records values of '{name}';")
    # papermill's cell is tagged, also in copies whose other metadata are gone
    tagged = [cell["source"] for cell in executed["cells"]
              if "injected-parameters" in cell["metadata"].get("tags", [])]  # fmt: skip
    given = injected(tagged[-1], path.name) if tagged else {}
    parameters.check(source.parameters, given, path.name)
    manifest = {"parameters": source.defaults | given, "overrides": {}, "peak_memory": None}
    manifest |= seconds(executed)
    if date := executed["metadata"].get("papermill", {}).get("end_time"):
        manifest["date"] = date
    return replace(harvest(executed, source, "mine", folder, manifest), notebook=name)
