"""What a notebook calls: `begin` after its parameters cell, and `Run.record` for each result.

The check happens inside the notebook, so that plain papermill, an interactive session and
``moebook run`` refuse the same values: papermill by itself runs on with the defaults when a name
is wrong, and does not look at types.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebook import runtime
from moebook.errors import refuse
from moebook.notebook import parameters
from moebook.notebook.parameters import Parameter
from moebook.results import Value, rounded

VALUE = "application/vnd.moebook.value+json"
ENVIRONMENT = "application/vnd.moebook.environment+json"
GLUE = "application/papermill.record/"
"""MIME types of what no page shows: a recorded value, the machine and versions that it was
measured with, and the prefix under which the book's {glue} finds either (and hides it)."""


@dataclass(frozen=True)
class Run:
    """A checked and seeded run of a notebook.

    Args:
        tier: The scale at which it runs, one of `results.TIERS`.
    """

    tier: str

    def record(
        self,
        name: str,
        value: float,
        unit: str,
        seed: int | None = None,
        items: Iterable[float] | None = None,
    ) -> None:
        """Keep one result: an output that no page shows and that record.json is made of.

        In the book, {glue} finds it by its name, or by ``name@seed`` where there is a seed.

        Args:
            name: Slash path such as ``pesc/sparse/accuracy``, once (or once a seed) in a notebook.
            value: A finite number; NumPy's and torch's scalars are taken too.
            unit: One of `results.UNITS`.
            seed: The seed that gave the value, where the notebook runs several.
            items: The numbers, one per test row, whose mean is ``value``; kept `rounded`.

        Raises:
            Refusal: ``E-VALUE`` when these do not fit together.
        """
        numbers = None if items is None else tuple(map(rounded, items))
        kept = Value(name, float(value), unit, None if seed is None else int(seed), numbers)
        _leave(kept.key, {VALUE: kept.to_json(), f"{GLUE}text/plain": repr(kept.value)})


def begin(cells: Sequence[str], names: Mapping[str, Any]) -> Run:
    """Check a notebook's parameters, seed everything, note the environment, and start its run.

    Call it as ``run = notebook.begin(In, globals())`` in the cell after the parameters. The
    parameters cell is found among the executed cells: the latest that holds nothing but annotated
    assignments, ``tier`` among them. Cells after it that begin with ``# Parameters`` are what
    papermill injected.

    Args:
        cells: The sources executed so far, IPython's ``In``.
        names: The variables as they are now, ``globals()``.

    Raises:
        Refusal: ``E-PARAMETER``, ``E-TYPE`` or ``E-RANGE`` for a wrong parameter, ``E-NOTEBOOK``
            when there is no parameters cell.
    """
    index, declared = _declared(cells)
    for source in cells[index + 1 :]:
        if source.lstrip().startswith("# Parameters"):
            parameters.check(declared, injected(source), "injected parameters")
    missing = [name for name in declared if name not in names]
    if missing:
        refuse("E-PARAMETER", f"parameter {missing[0]} is not set; run the parameters cell again")
    parameters.check(declared, {name: names[name] for name in declared}, "parameters")
    if "seed" in declared:
        runtime.seed_everything(names["seed"])
    _leave("environment", {ENVIRONMENT: runtime.environment()})
    gc.freeze()  # transformers' Trainer looks for garbage after each fit; not among the imports
    return Run(names["tier"])


def _leave(name: str, bundle: Mapping[str, Any]) -> None:
    """Leave an output in the executed notebook that {glue} finds by its name and no page shows."""
    from IPython.display import display

    display(bundle, metadata={"scrapbook": {"name": name, "mime_prefix": GLUE}}, raw=True)


def _declared(cells: Sequence[str]) -> tuple[int, dict[str, Parameter]]:
    """Find the parameters cell; return its position and what it declares."""
    for index in reversed(range(len(cells))):
        if _declares_tier(cells[index]):
            return index, parameters.parse(cells[index], "notebook")
    refuse("E-NOTEBOOK", "no parameters cell was executed: lines of name: type = default  # help")


def _declares_tier(source: str) -> bool:
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return False
    targets = [s.target for s in statements if isinstance(s, ast.AnnAssign)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return len(targets) == len(statements) and "tier" in names


def injected(source: str) -> dict[str, object]:
    """Read a cell that papermill injected, which may hold nothing but ``name = literal``.

    Raises:
        Refusal: ``E-PARAMETER`` for anything else.
    """
    found: dict[str, object] = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = parameters.literal(value, f"injected {name}")
            case _:
                refuse("E-PARAMETER", f"injected line {statement.lineno} is not name = value")
    return found
