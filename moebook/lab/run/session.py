"""What a notebook calls: `begin` after its parameters cell, then the methods of its `Run`.

The check happens inside the notebook, so that plain papermill, an interactive session
and ``moebook run`` refuse the same names and values.
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from html import escape
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from moebook import lists, runtime, storage
from moebook.errors import Refusal, nearest, refuse, shown
from moebook.lab import records
from moebook.lab.records.runs import Curve, Value, rounded
from moebook.lab.run import parameters
from moebook.lab.run.parameters import Parameter, Scalar
from moebook.settings import Presets

if TYPE_CHECKING:
    import pandas as pd

    from moebook.lab.records.store import Pool

# MIME types of what no page shows.
VALUE = "application/vnd.moebook.value+json"
CURVE = "application/vnd.moebook.curve+json"
RECORDED: dict[str, type[Value | Curve]] = {VALUE: Value, CURVE: Curve}
NOTE = "application/vnd.moebook.note+json"  # a fact about the run: machine, code, arms, rows
GLUE = "application/papermill.record/"  # prefix under which {glue} finds any of them, and hides it

Arm = TypeVar("Arm")
# A value's name, or two names: the first less the second.
Measure = str | tuple[str, str]
ABSENT = "–"
# A word of a headline that follows two recorded values: the words, value, less which.
SWITCH = re.compile(r"\{([^{}]+): (\S+) less (\S+)\}")
TEXT = 160  # characters of a text that a table's cell shows, unless a notebook says otherwise
# Unit to how a value of it is told, and a difference of two: the factor, the form.
TOLD = {
    "share": (100.0, "{:.1f} %", "{:+.1f} points"),
    "percent_points": (1.0, "{:+.1f} points", "{:+.1f} points"),
    "nats": (1.0, "{:.3f} nats", "{:+.3f} nats"),
    "count": (1.0, "{:,.0f}", "{:+,.0f}"),
    "bytes": (1e-6, "{:,.1f} MB", "{:+,.1f} MB"),
    "seconds": (1.0, "{:.3g} s", "{:+.3g} s"),
}


@dataclass
class Witness:
    """What the kernel of a run sees: the parameters that `begin` checked, and each cell that ran.

    An executed notebook shows texts that its reader may have changed since. So the
    kernel notes the parameters and a hash of each cell itself, and `publish` compares
    the texts with that.
    """

    parameters: Mapping[str, Scalar]  # as `begin` checked them
    names: Mapping[str, Any]  # the notebook's variables, as they are now
    cells: Sequence[str]  # the source of each cell that has run, from In[1] on
    # Parameters that a cell set anew.
    changed: dict[str, object] = field(default_factory=dict)
    noted: int = 1  # of the next cell to note
    recorded: dict[str, Value] = field(default_factory=dict)  # so far, by name

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
            before = self.parameters[name]
            pair = f"{shown(before)} for `begin`, and a cell made it {shown(now)}"
            fix = "set it in the parameters cell, and run all from there"
            refuse("E-PARAMETER", f"{name} was {pair}; {fix}")
        ran: dict[str, str] = {}
        for number in range(self.noted, len(self.cells)):
            ran[str(number)] = storage.files.cell_digest(self.cells[number])
        if ran:
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
    declared: Mapping[str, Parameter] = field(default_factory=dict)

    @property
    def settings(self) -> Mapping[str, Scalar]:
        """The notebook's parameters by name, as `begin` checked them."""
        return self.witness.parameters

    @property
    def changed(self) -> tuple[str, ...]:
        """The parameters whose values are not the declared defaults."""
        return tuple(
            name
            for name, parameter in self.declared.items()
            if self.settings[name] != parameter.default
        )

    def parameters(self, *names: str) -> pd.DataFrame:
        """Show parameters as a table: the value of each in this run, and what it does."""
        import pandas as pd

        lines: dict[str, dict[str, object]] = {}
        for name in names:
            parameter = self.declared[name]
            help_and_rule = f"{parameter.help} {parameter.rule}".strip()
            value = self.settings[name]
            if isinstance(value, str):  # a cell can break between names
                value = value.replace(",", ", ")
            lines[name] = {"value": value, "what it does": help_and_rule}
        return pd.DataFrame.from_dict(lines, orient="index")

    def beside(
        self, measures: Mapping[str, Measure], alike: Sequence[str] = ()
    ) -> pd.DataFrame | str:
        """Put this run's values beside those of the recorded runs on the same base.

        ``measures`` are a line's text to what it shows; ``alike`` names parameters, beside the
        base, that those runs share with this one. Of several studies the one that decides a
        difference stands beside it (`_recorded`). Lines of one value invite to compare them: one
        study speaks for all that it has. Intervals at 95 % are over seeds and test rows. No part
        of the run: where no recorded run can be read, it says why instead.
        """
        import pandas as pd

        named = {
            text: (measure,) if isinstance(measure, str) else measure
            for text, measure in measures.items()
        }
        same = {name: self.settings.get(name) for name in ("base", *alike)}
        pairs = [names for names in named.values() if len(names) > 1]
        try:
            levels = _recorded([n for n in named.values() if len(n) == 1], same)
            lines = {}
            for text, names in named.items():
                alone = len(names) == 1 and levels and levels.having(*names)
                pool = levels if alone else _recorded([names], same, pairs)
                lines[text] = self._beside(names, pool)
        except Refusal as refusal:
            return f"The recorded runs cannot be shown: {refusal.message}"
        return pd.DataFrame.from_dict(lines, orient="index")

    def headline(self, text: str, *, root: str, otherwise: str) -> str:
        """Write what a figure of this run shows: its words follow what the run recorded.

        ``{leads | trails | is level with: sparse/accuracy less dense/accuracy}`` is the
        word by where the interval of the difference over test rows lies, as in the prose
        of findings; ``root`` stands before the names, and ``0`` may be the second.
        ``otherwise`` is the headline of a run that lacks one of the values.
        """
        from moebook.intervals import place  # here, since SciPy takes a second

        recorded = {
            name.removeprefix(f"{root}/"): np.array([value.items or [value.value]])
            for name, value in self.witness.recorded.items()
        }
        recorded["0"] = np.zeros((1, 1))
        switches = SWITCH.findall(text)
        if not all(one in recorded and less in recorded for _, one, less in switches):
            return otherwise

        def word(found: re.Match[str]) -> str:
            effects = recorded[found[2]] - recorded[found[3]]
            return found[1].split("|")[place(effects)].strip()

        return SWITCH.sub(word, text)

    def _beside(self, names: Sequence[str], pool: Pool | None) -> dict[str, object]:
        """Return a line: this run's value, the recorded runs' mean and interval, their seeds."""
        mine = [self.witness.recorded.get(name) for name in names]
        present = [value for value in mine if value]
        line: dict[str, object] = dict.fromkeys(
            ("this run", "recorded runs", "95 % interval", "seeds", "study"), ABSENT
        )
        if len(present) == len(names):
            first, *rest = present
            number = first.value - sum(value.value for value in rest)
            line["this run"] = _told(number, first.unit, is_difference=bool(rest))
        if pool is None:
            return line

        # Here, since SciPy takes a second, which `moebook list` does not have.
        from moebook.intervals import interval

        alone = len(names) == 1
        effects = pool.effects(names[0], None if alone else names[1])
        unit = next(iter(pool.values(names[0]).values())).unit
        tell = functools.partial(_told, unit=unit, is_difference=not alone)
        line["recorded runs"] = tell(effects.mean())
        ends = interval(effects)
        if ends:
            ends = records.within(unit, ends, is_difference=not alone)
            low, high = map(tell, ends)
            low, *_ = low.split()  # the unit stands once
            line["95 % interval"] = f"{low} to {high}"
        return line | {"seeds": len(effects), "study": pool.protocol}

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
        hashes: dict[str, str] = {}
        for name, rows in drawn.items():
            text = json.dumps(rows, sort_keys=True)
            hashes[name] = storage.text_digest(text)
        _note(rows=hashes)

    def files(self, paths: Mapping[str, Path]) -> None:
        """Note the SHA-256 of files, by a name, that others published and this run reads."""
        _note(files={name: storage.digest(path) for name, path in paths.items()})

    def record(
        self, name: str, value: float, unit: str, items: Iterable[float] | None = None
    ) -> None:
        """Keep one result: an output that no page shows and that the run's file is made of.

        Its ``name`` is a slash path such as ``pesc/sparse/accuracy``, by which {glue}
        finds it, its ``unit`` one of `results.UNITS`; the finite ``value``, NumPy's and
        torch's too, is the mean of the ``items``, one per test row.
        """
        self.witness.note()
        numbers = None if items is None else rounded(items)
        measured = Value(name, float(value), unit, numbers)
        self.witness.recorded[name] = measured
        text = repr(measured.value)
        _leave(name, {VALUE: records.plain(measured), f"{GLUE}text/plain": text})

    def curve(
        self, name: str, y: Iterable[float], unit: str, x: Iterable[float] | None = None
    ) -> None:
        """Keep a line that a figure over seeds needs; its positions ``x`` are 1, 2, ... if None."""
        self.witness.note()
        heights = rounded(y)
        positions = range(1, len(heights) + 1) if x is None else x
        line = Curve(name, unit, tuple(map(float, positions)), heights)
        _leave(f"curve/{name}", {CURVE: records.plain(line)})

    def curves(
        self, name: str, lines: Mapping[Any, Iterable[float]], unit: str
    ) -> None:
        """Keep several lines, each by the name and its key."""
        for key, y in lines.items():
            self.curve(f"{name}/{key}", y, unit)

    def scores(self, name: str, table: pd.DataFrame, *, domains: bool = True) -> None:
        """Record what `evaluation.by_benchmark` found of an arm, as ``pesc/sparse/accuracy``."""
        self._score(name, "", table, table.score)
        if domains:
            for domain, rows in table.groupby("domain"):
                self._score(name, f"/{domain}", rows, rows.domain_score)

    def _score(
        self, name: str, place: str, rows: pd.DataFrame, items: pd.Series
    ) -> None:
        """Record the accuracy of some rows, and their nats where some were measured."""
        self.record(f"{name}/accuracy{place}", items.mean(), "share", items)
        nats = rows.nll.dropna()
        if len(nats):
            self.record(f"{name}/nll{place}", nats.mean(), "nats", nats)


def begin(cells: Sequence[str], names: MutableMapping[str, Any]) -> Run:
    """Check a notebook's parameters, seed everything, note machine and code, and start its run.

    Call it as ``run = begin(In, globals())`` in the cell after the parameters:
    with the sources executed so far and the variables as they are now. The parameters
    cell is the latest one that holds nothing but annotated assignments, ``tier`` among
    them. What these variables hold is noted as the run's parameters, and must stay:
    `Run.record` refuses where a cell has set one to another value. A list of one number
    that was given as a number becomes the text that its parameter is.
    """
    declared, values = _checked(cells, names)
    names.update(values)
    if "seed" in declared:
        runtime.seed_everything(names["seed"])
    witness = Witness(values, names, _as_written(cells))
    if os.environ.get(runtime.QUIET) != "1":  # somebody sits before it
        _tell_time(declared, values)
    _note(environment=runtime.environment())
    _note(parameters=values)
    if runtime.RESUME not in os.environ:  # else the runner knows when
        _note(begun=runtime.now())
    witness.note()
    _after_each_cell(witness)
    _show_tables()
    drawing = sys.modules.get("moebook.lab.plotting")
    if drawing:  # the first cell has imported it
        drawing.style()
    # transformers' Trainer looks for garbage after each fit; it need not among the imports.
    gc.freeze()
    return Run(names["tier"], witness, declared)


def _told(number: float, unit: str, *, is_difference: bool) -> str:
    """Write a number with its unit, as a reader says it: 0.239 as 23.9 %."""
    factor, plain, signed = TOLD.get(unit, (1.0, "{:.3g}", "{:+.3g}"))
    form = signed if is_difference else plain
    return records.minus(form.format(factor * float(number)))


def _recorded(
    lines: Sequence[Sequence[str]],
    same: Mapping[str, object],
    neighbours: Collection[Sequence[str]] = (),
) -> Pool | None:
    """Find the pool of the same settings that speaks for lines of a table; None without one.

    A line names the values that it compares. The pool counts that decides most claims about their
    values: elsewhere an arm of the same name may have learnt other tasks. Then come those that
    decide other claims, then those that have more of the lines, or of their ``neighbours`` in
    the table, then those of most seeds.
    """
    if not lines:
        return None
    notebook, _, _ = lines[0][0].partition("/")
    best: Pool | None = None
    best_rank = (0, False, 0, 0, 0)
    for pool, claims in _pools(notebook, storage.root()):
        settings = pool.runs[0].settings
        if any(settings.get(name) != value for name, value in same.items()):
            continue
        about = 0  # claims that the pool decides about a line's values
        for names in lines:
            for values in claims:
                if values.issuperset(names):
                    about += 1
        seeds = [len(pool.having(*names)) for names in lines]
        present = sum(count > 0 for count in seeds)  # lines that the pool has
        around = sum(bool(pool.having(*names)) for names in neighbours)
        # What stands first counts most.
        rank = (about, bool(claims), present, around, sum(seeds))
        if present and rank > best_rank:
            best = pool
            best_rank = rank
    return best


@functools.cache
def _pools(notebook: str, folder: Path) -> list[tuple[Pool, list[set[str]]]]:
    """Read a notebook's recorded runs, once, and of each claim that a pool decides its values."""
    from moebook.lab import papers
    from moebook.lab.run import sources

    source = sources.find(folder, notebook)
    pools: list[tuple[Pool, list[set[str]]]] = []
    for protocol, pool in sources.pools(notebook, folder).items():
        decided = source.decides(protocol) if protocol in source.protocols else []
        compared = [set(papers.claim(name).values) for name in decided]
        pools.append((pool, compared))
    return pools


def _checked(
    cells: Sequence[str], names: Mapping[str, Any]
) -> tuple[dict[str, Parameter], dict[str, Any]]:
    """Return what the parameters cell declares, and the values that its variables have."""
    index, declared = _declared(cells)
    missing = [name for name in declared if name not in names]
    if missing:
        fix = "run the parameters cell again"
        refuse("E-PARAMETER", f"parameter {missing[0]} is not set; {fix}")
    now = {name: names[name] for name in declared}
    values = parameters.check(declared, now, "parameters")
    given = _given(cells[index + 1 :])
    given = parameters.check(declared, given, "injected parameters")
    for name, value in given.items():
        now = values[name]
        if now != value:
            pair = f"given as {shown(value)}, and a cell made it {shown(now)}"
            fix = "take that cell away"
            refuse("E-PARAMETER", f"{name} was {pair} before `begin`; {fix}")
    return declared, values


def _tell_time(declared: Mapping[str, Parameter], values: Mapping[str, Any]) -> None:
    """Print what the notebook will take on this machine, if its time is on record."""
    from moebook.lab.run import pace

    expectation = pace.expected(declared, values)
    if expectation:
        print(expectation)


def _after_each_cell(witness: Witness) -> None:
    """Note hashes of the package's files that are loaded, now and after each cell that loads some.

    After each cell the ``witness`` looks whether it set a parameter to another value.
    """
    from IPython import get_ipython

    shell = get_ipython()
    noted: dict[str, str] = {}

    def note(*_: object) -> None:
        witness.look()
        now = storage.files.loaded(noted)
        if now:
            noted.update(now)
            _note(modules=now)

    note()
    if shell is None:
        return
    # A reader may call `begin` again in the same kernel: only the last witness looks on.
    previous = getattr(shell, "_moebook_note", None)
    if previous:
        shell.events.unregister("post_run_cell", previous)
    shell._moebook_note = note
    shell.events.register("post_run_cell", note)


def _show_tables() -> None:
    """Let a cell that ends in facts by name, a series or settings show a table, as frames do.

    Floats have the digits of `_number` in tables and alone.
    """
    import pandas as pd
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    pd.set_option("display.max_colwidth", TEXT)
    pd.set_option("display.float_format", _number)
    formatters = shell.display_formatter.formatters
    for kind in (dict, pd.Series, pd.DataFrame, Presets):
        formatters["text/html"].for_type(kind, table)
    plain = formatters["text/plain"]
    plain.for_type(float, lambda number, printer, cycle: printer.text(_number(number)))
    plain.for_type(str, lambda text, printer, cycle: printer.text(text))


def table(facts: Any) -> str | None:
    """Write a frame, or a line a name of a mapping, a series or settings, as an HTML table.

    None where there is no line: IPython shows it as a text. Rows and the characters of a text are
    as many as pandas' options ``display.max_rows`` and ``display.max_colwidth`` say.
    """
    import pandas as pd

    if isinstance(facts, pd.DataFrame):
        if not len(facts):
            return None
        formatters = []  # by place: two columns may have one name
        for kind in facts.dtypes:
            is_whole = pd.api.types.is_integer_dtype(kind)
            formatters.append(_count if is_whole else None)
        return _html(facts, formatters=formatters)
    lines = facts if isinstance(facts, (Mapping, pd.Series)) else vars(facts)
    if not len(lines):
        return None
    nested = isinstance(lines, Mapping) and all(
        isinstance(line, Mapping) for line in lines.values()
    )
    if nested:
        return _html(pd.DataFrame(lines).T)
    column = pd.Series(lines, dtype=object).to_frame("")
    return _html(column, header=False)


def _html(frame: pd.DataFrame, **how: Any) -> str:
    """Write a frame as HTML; pandas itself cuts rows there, but no text."""
    import pandas as pd

    rows = pd.get_option("display.max_rows")
    width = pd.get_option("display.max_colwidth")
    shown = frame.copy(deep=False)
    for place, kind in enumerate(frame.dtypes):
        if width is not None and pd.api.types.is_string_dtype(kind):
            cells = [_cut(cell, width) for cell in frame.iloc[:, place]]
            shown.isetitem(place, pd.Series(cells, frame.index, dtype=object))
    names = frame.index.names
    if None in names or frame.columns.names != [None]:
        return str(shown.to_html(max_rows=rows, float_format=_decimal, **how))
    # pandas gives the index's names a row of their own; here each heads its column.
    how |= {"index_names": False}
    html: str = shown.to_html(max_rows=rows, float_format=_decimal, **how)
    for name in names:
        html = html.replace("<th></th>", f"<th>{escape(str(name))}</th>", 1)
    return html


def _cut(cell: object, width: int) -> object:
    """Cut a text to so many characters; all else stays as it is."""
    if isinstance(cell, str) and len(cell) > width:
        return f"{cell[: width - 3]}..."
    return cell


def _number(value: float) -> str:
    """Write four digits, which can be read at a glance, and all of a count's."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _decimal(value: float) -> str:
    """Write a number of a table; alone it keeps its hyphen, as code that a reader may copy."""
    return records.minus(_number(value))


def _count(value: int) -> str:
    return records.minus(f"{value:,}")


def _note(**fact: Any) -> None:
    """Leave a fact about the run: environment, modules, arms or rows."""
    digest = storage.text_digest(json.dumps(fact))
    _leave(f"note/{digest[:12]}", {NOTE: fact})


def _leave(name: str, bundle: Mapping[str, Any]) -> None:
    """Leave an output in the executed notebook that {glue} finds by its name and no page shows."""
    from IPython.display import display

    metadata = {"scrapbook": {"name": name, "mime_prefix": GLUE}}
    display(bundle, metadata=metadata, raw=True)


def _declared(cells: Sequence[str]) -> tuple[int, dict[str, Parameter]]:
    """Find the parameters cell; return its position and what it declares."""
    for index in reversed(range(len(cells))):
        try:
            statements = ast.parse(cells[index]).body
        except SyntaxError:
            continue
        names: list[str] = []
        for statement in statements:
            if isinstance(statement, ast.AnnAssign):
                names.append(ast.unparse(statement.target))
        if len(names) == len(statements) and "tier" in names:
            return index, parameters.parse(cells[index], "notebook")
    expected = "lines of name: type = default  # help"
    refuse("E-NOTEBOOK", f"no parameters cell was executed: {expected}")


def _as_written(cells: Sequence[str]) -> Sequence[str]:
    """Return the cells without what IPython makes of its own syntax, where it keeps them."""
    from IPython import get_ipython

    shell = get_ipython()
    return cells if shell is None else shell.history_manager.input_hist_raw


def _given(cells: Sequence[str]) -> dict[str, object]:
    """Read what papermill injected: its cell follows the parameters cell. A kernel sees no tags."""
    if not cells:
        return {}
    first_line, _, _ = cells[0].lstrip().partition("\n")
    if first_line.strip() != "# Parameters":
        return {}
    return injected(cells[0], "notebook")


def injected(source: str, where: str) -> dict[str, object]:
    """Read a cell that papermill injected; it may hold nothing but ``name = literal``.

    The paths that papermill itself adds, by ``--inject-paths`` and its like, are left
    out.
    """
    values: dict[str, object] = {}
    for statement in parameters.statements(source, f"{where}, injected cell"):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith(
                "PAPERMILL_"
            ):
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = parameters.literal(value, f"{where}: injected {name}")
            case _:
                place = f"{where}, injected line {statement.lineno}"
                refuse("E-PARAMETER", f"{place}: expected name = value")
    return values
