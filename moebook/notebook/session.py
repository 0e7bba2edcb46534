"""What a notebook calls: `begin` after its parameters cell, then the methods of its `Run`.

The check happens inside the notebook, so that plain papermill, an interactive session and
``moebook run`` refuse the same names and values.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moebook import lists, results, runtime
from moebook.errors import nearest, refuse, shown
from moebook.notebook import parameters
from moebook.notebook.parameters import Parameter, Scalar
from moebook.results.runs import Curve, Value, rounded
from moebook.settings import Presets

if TYPE_CHECKING:
    import pandas as pd

# MIME types of what no page shows.
VALUE = "application/vnd.moebook.value+json"
CURVE = "application/vnd.moebook.curve+json"
RECORDED: dict[str, type[Value | Curve]] = {VALUE: Value, CURVE: Curve}
NOTE = "application/vnd.moebook.note+json"  # a fact about the run: machine, code, arms, rows
GLUE = "application/papermill.record/"  # prefix under which {glue} finds any of them, and hides it

Arm = TypeVar("Arm")


@dataclass
class Witness:
    """What the kernel of a run sees: the parameters that `begin` checked, and each cell that ran.

    An executed notebook shows texts that its reader may have changed since. So the kernel notes the
    parameters and a hash of each cell itself, and `publish` compares the texts with that.
    """

    parameters: Mapping[str, Scalar]  # as `begin` checked them
    names: Mapping[str, Any]  # the notebook's variables, as they are now
    cells: Sequence[str]  # the source of each cell that has run, from In[1] on
    changed: dict[str, object] = field(default_factory=dict)  # parameters that a cell set anew
    noted: int = 1  # of the next cell to note

    def look(self) -> None:
        """Remember the parameters that have another value than `begin` checked."""
        for name, value in self.parameters.items():
            now = self.names.get(name, value)
            if not _is_still(value, now):
                self.changed[name] = now

    def note(self) -> None:
        """Note the cells that have run since the last note; refuse changed parameters."""
        self.look()
        for name, now in self.changed.items():
            pair = f"{shown(self.parameters[name])} for `begin`, and a cell made it {shown(now)}"
            fix = "set it in the parameters cell, and run all from there"
            refuse("E-PARAMETER", f"{name} was {pair}; {fix}")
        numbers = range(self.noted, len(self.cells))
        if ran := {str(n): results.files.cell_digest(self.cells[n]) for n in numbers}:
            _note(cells=ran)
        self.noted = len(self.cells)


def _is_still(value: Scalar, now: object) -> bool:
    """Whether a variable holds its parameter's value, or what a text names (arms, a device)."""
    if isinstance(value, str):
        return now == value or not isinstance(now, str)
    return isinstance(now, Number) and now == value


@dataclass(frozen=True)
class Run:
    """A checked and seeded run of a notebook at one scale, one of `results.TIERS`."""

    tier: str
    witness: Witness = field(default_factory=lambda: Witness({}, {}, ()))

    @property
    def settings(self) -> Mapping[str, Scalar]:
        """The notebook's parameters by name, as `begin` checked them."""
        return self.witness.parameters

    def arms(self, text: str, known: Mapping[str, Arm]) -> dict[str, Arm]:
        """Return the known arms that ``text``, the parameter ``arms``, names, and note them."""
        names = lists.arms(text, known)
        if not names:
            refuse("E-RANGE", f"arms is empty; {nearest('', [lists.ALL, *known])}")
        chosen = {name: known[name] for name in known if name in names}
        _note(arms=list(chosen), known=list(known))
        return chosen

    def rows(self, **drawn: Any) -> None:
        """Note hashes of the rows it trains on (``train=``) and is tested on (``test=``)."""
        texts = {name: json.dumps(rows, sort_keys=True) for name, rows in drawn.items()}
        _note(rows={k: hashlib.sha256(text.encode()).hexdigest() for k, text in texts.items()})

    def files(self, paths: Mapping[str, Path]) -> None:
        """Note the SHA-256 of files, by a name, that others published and this run reads."""
        _note(files={name: results.digest(path) for name, path in paths.items()})

    def record(
        self, name: str, value: float, unit: str, items: Iterable[float] | None = None
    ) -> None:
        """Keep one result: an output that no page shows and that the run's file is made of.

        Its ``name`` is a slash path such as ``pesc/sparse/accuracy``, by which {glue} finds it, its
        ``unit`` one of `results.UNITS`; the finite ``value``, NumPy's and torch's too, is the mean
        of the ``items``, one per test row.
        """
        self.witness.note()
        numbers = None if items is None else rounded(items)
        measured = Value(name, float(value), unit, numbers)
        _leave(name, {VALUE: results.plain(measured), f"{GLUE}text/plain": repr(measured.value)})

    def curve(
        self, name: str, y: Iterable[float], unit: str, x: Iterable[float] | None = None
    ) -> None:
        """Keep a line that a figure over seeds needs; its positions ``x`` are 1, 2, ... if None."""
        self.witness.note()
        heights = rounded(y)
        positions = range(1, len(heights) + 1) if x is None else x
        line = Curve(name, unit, tuple(map(float, positions)), heights)
        _leave(f"curve/{name}", {CURVE: results.plain(line)})

    def curves(self, name: str, lines: Mapping[Any, Iterable[float]], unit: str) -> None:
        """Keep several lines, each by the name and its key."""
        for key, y in lines.items():
            self.curve(f"{name}/{key}", y, unit)

    def scores(self, name: str, table: pd.DataFrame, *, domains: bool = True) -> None:
        """Record what `evaluation.by_benchmark` found of an arm, as ``pesc/sparse/accuracy``."""
        parts = {f"/{domain}": part for domain, part in table.groupby("domain") if domains}
        scores = {"": table.score} | {place: part.domain_score for place, part in parts.items()}
        for place, items in scores.items():
            self.record(f"{name}/accuracy{place}", items.mean(), "share", items)
            nats = parts.get(place, table).nll.dropna()
            if len(nats):
                self.record(f"{name}/nll{place}", nats.mean(), "nats", nats)


def begin(cells: Sequence[str], names: Mapping[str, Any]) -> Run:
    """Check a notebook's parameters, seed everything, note machine and code, and start its run.

    Call it as ``run = notebook.begin(In, globals())`` in the cell after the parameters: with the
    sources executed so far and the variables as they are now. The parameters cell is the latest
    one that holds nothing but annotated assignments, ``tier`` among them. What these variables hold
    is noted as the run's parameters, and must stay: `Run.record` refuses where a cell has set one
    to another value.
    """
    index, declared = _declared(cells)
    if missing := [name for name in declared if name not in names]:
        refuse("E-PARAMETER", f"parameter {missing[0]} is not set; run the parameters cell again")
    values = {name: names[name] for name in declared}
    parameters.check(declared, values, "parameters")
    given = _given(cells[index + 1 :])
    parameters.check(declared, given, "injected parameters")
    for name, value in given.items():
        if values[name] != value:
            pair = f"given as {shown(value)}, and a cell made it {shown(values[name])}"
            refuse("E-PARAMETER", f"{name} was {pair} before `begin`; take that cell away")
    if "seed" in declared:
        runtime.seed_everything(names["seed"])
    witness = Witness(values, names, _as_written(cells))
    if os.environ.get(runtime.QUIET) != "1":  # somebody sits before it
        _tell_time(declared, values)
    _note(environment=runtime.environment())
    _note(parameters=values)
    if runtime.RESUME not in os.environ:  # else the runner knows when
        _note(begun=datetime.now(UTC).isoformat(timespec="seconds"))
    witness.note()
    _after_each_cell(witness)
    _show_tables()
    if drawing := sys.modules.get("moebook.plotting"):  # which the first cell has imported
        drawing.style()
    gc.freeze()  # transformers' Trainer looks for garbage after each fit; not among the imports
    return Run(names["tier"], witness)


def _tell_time(declared: Mapping[str, Parameter], values: Mapping[str, Any]) -> None:
    """Print what the notebook will take on this machine, if its time is on record."""
    from moebook.notebook import pace

    if told := pace.expected(declared, values):
        print(told)


def _after_each_cell(witness: Witness) -> None:
    """Note hashes of the package's files that are loaded, now and after each cell that loads some.

    After each cell the ``witness`` looks whether it set a parameter to another value.
    """
    from IPython import get_ipython

    shell, noted = get_ipython(), dict[str, str]()

    def note(*_: object) -> None:
        witness.look()
        if now := results.files.loaded(noted):
            noted.update(now)
            _note(modules=now)

    note()
    if shell is not None:
        if previous := getattr(shell, "_moebook_note", None):
            shell.events.unregister("post_run_cell", previous)
        shell._moebook_note = note
        shell.events.register("post_run_cell", note)


def _show_tables() -> None:
    """Let a cell that ends in facts by name, a series or settings show a table, as frames do."""
    import pandas as pd
    from IPython import get_ipython

    if (shell := get_ipython()) is not None:
        formatters = shell.display_formatter.formatters
        for kind in (dict, pd.Series, Presets):
            formatters["text/html"].for_type(kind, table)
        formatters["text/plain"].for_type(float, lambda x, p, cycle: p.text(f"{x:.4g}"))
        formatters["text/plain"].for_type(str, lambda text, p, cycle: p.text(text))


def table(facts: Any) -> str:
    """Write a mapping, a series or settings as an HTML table, a line a name."""
    import pandas as pd

    lines = facts if isinstance(facts, (Mapping, pd.Series)) else vars(facts)
    nested = isinstance(lines, Mapping) and all(isinstance(x, Mapping) for x in lines.values())
    frame = pd.DataFrame(lines).T if nested else pd.Series(lines, dtype=object).to_frame("")
    return frame.to_html(header=nested, float_format="{:.4g}".format)


def _note(**fact: Any) -> None:
    """Leave a fact about the run: environment, modules, arms or rows."""
    _leave(f"note/{hashlib.sha256(json.dumps(fact).encode()).hexdigest()[:12]}", {NOTE: fact})


def _leave(name: str, bundle: Mapping[str, Any]) -> None:
    """Leave an output in the executed notebook that {glue} finds by its name and no page shows."""
    from IPython.display import display

    display(bundle, metadata={"scrapbook": {"name": name, "mime_prefix": GLUE}}, raw=True)


def _declared(cells: Sequence[str]) -> tuple[int, dict[str, Parameter]]:
    """Find the parameters cell; return its position and what it declares."""
    for index in reversed(range(len(cells))):
        try:
            statements = ast.parse(cells[index]).body
        except SyntaxError:
            continue
        targets = [ast.unparse(s.target) for s in statements if isinstance(s, ast.AnnAssign)]
        if len(targets) == len(statements) and "tier" in targets:
            return index, parameters.parse(cells[index], "notebook")
    refuse("E-NOTEBOOK", "no parameters cell was executed: lines of name: type = default  # help")


def _as_written(cells: Sequence[str]) -> Sequence[str]:
    """Return the cells without what IPython makes of its own syntax, where it keeps them."""
    from IPython import get_ipython

    shell = get_ipython()
    return cells if shell is None else shell.history_manager.input_hist_raw


def _given(cells: Sequence[str]) -> dict[str, object]:
    """Read what papermill injected: its cell follows the parameters cell. A kernel sees no tags."""
    first = cells[0] if cells else ""
    named = first.lstrip().partition("\n")[0].strip() == "# Parameters"
    return injected(first, "notebook") if named else {}


def injected(source: str, where: str) -> dict[str, object]:
    """Read a cell that papermill injected; it may hold nothing but ``name = literal``.

    The paths that papermill itself adds, by ``--inject-paths`` and its like, are left out.
    """
    values: dict[str, object] = {}
    for statement in parameters.statements(source, f"{where}, injected cell"):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("PAPERMILL_"):
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = parameters.literal(value, f"{where}: injected {name}")
            case _:
                place = f"{where}, injected line {statement.lineno}"
                refuse("E-PARAMETER", f"{place}: expected name = value")
    return values
