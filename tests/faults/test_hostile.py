"""Public functions and classes, called with hostile values: one line, or the right result.

The tables in `healthy` hold a healthy call of each and what it comes to by another way; `hostile`
makes the hostile values of its arguments. A push makes one call in 25, `MOEBOOK_FAULTS=25` makes
them all.
"""

import ast
import fnmatch
import inspect
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import iter_modules

import pytest

from tests.faults.hostile import FOREIGN, WRONG, excuses, hostile_calls, outcomes

TABLES = (
    "analysis",
    "data",
    "esft",
    "evaluation",
    "kernels",
    "nn",
    "pesc",
    "rivals",
    "rocket",
    "together",
    "training",
    "upcycling",
)
SHARE = 0.04  # of all hostile calls
PACKAGES = (
    "analysis",
    "data",
    "evaluation",
    "kernels",
    "methods",
    "models",
    "nn",
    "together",
    "training",
)
A_CHECK = "refuses values itself"
A_RESULT = "is made here, by a function that has a row"
BEHIND = "is called by functions that have rows, behind their checks"
OF_ITS_TAKER = "is checked by the functions that take it, which have rows"
NO_VALUES = (
    "takes a model or a folder alone, which tests/models and test_mutations.py change"
)
PROGRAMS = "runs programs, which the tests of the sandbox are about"
WITHOUT = {  # public names without a row, and why
    "data.hub.origin": BEHIND,
    "data.tasks.pools.general": BEHIND,
    "data.reading.refuse_missing": A_CHECK,
    "data.tasks.content": "hashes files that `find` has read",
    "data.tasks.is_file": "takes any text",
    "data.tasks.item.Item": A_RESULT,
    "data.tasks.label": "asks `find`, which has a row",
    "data.tasks.of_files": "asks `find`, which has a row",
    "data.tasks.own.*": "reads files, which tests/data/test_own.py damages",
    "data.tasks.task.Task": "stands in the catalogue, which a test reads",
    "data.templates.Source": "stands in the catalogue, which a test reads",
    "data.templates.whole": BEHIND,
    "evaluation.code.*": PROGRAMS,
    "evaluation.harness.*": "is lm-eval's side of `evaluation.evaluate` and `load`",
    "evaluation.inside.*": PROGRAMS,
    "evaluation.judge.Judge": "asks a server, which the judge's tests stand in for",
    "evaluation.judge.Reply": A_RESULT,
    "evaluation.sandbox.judged": PROGRAMS,
    "kernels.*.reference": BEHIND,
    "kernels.bank_scoring.Answers": OF_ITS_TAKER,
    "kernels.dispatch.*": A_CHECK,
    "kernels.experts.Bank": OF_ITS_TAKER,
    "kernels.groups.Groups": A_RESULT,
    "kernels.lora_mixture.mixture": BEHIND,
    "kernels.matmul.*": BEHIND,
    "kernels.similarity.Largest": A_RESULT,
    "kernels.similarity.l*": BEHIND,
    "kernels.similarity.near": BEHIND,
    "kernels.similarity.through": BEHIND,
    "kernels.similarity.unit": BEHIND,
    "methods.esft.compare.layers": NO_VALUES,
    "methods.esft.moved.*": NO_VALUES,
    "methods.esft.published.from_json": NO_VALUES,
    "methods.pesc.apply.trained": NO_VALUES,
    "methods.pesc.measure.matched": NO_VALUES,
    "methods.pesc.measure.printed_sizes": "takes nothing",
    "methods.rivals.*.attach": BEHIND,
    "methods.rivals.*.[A-Z]*": "is a part or a result of `tuned`, which has a row",
    "methods.rivals.mixing.*": BEHIND,
    "methods.rivals.mixlora.penalty": "takes checked settings alone",
    "methods.rivals.table.weights": BEHIND,
    "methods.rivals.tuning.*": BEHIND,
    "methods.rocket.augment.Augmentation": A_RESULT,
    "methods.rocket.augment.[Ee]ncoder": NO_VALUES,
    "methods.rocket.augment.native": BEHIND,
    "methods.rocket.bank.form": BEHIND,
    "methods.rocket.bank.make": BEHIND,
    "methods.rocket.bank.tune": BEHIND,
    "methods.rocket.bank.vacant": NO_VALUES,
    "methods.rocket.loras.check_*": A_CHECK,
    "methods.rocket.loras.zeros": BEHIND,
    "methods.rocket.apply.install": BEHIND,
    "methods.rocket.case.Case": A_RESULT,
    "methods.rocket.score.Pack": A_RESULT,
    "methods.rocket.score.Products": BEHIND,
    "methods.rocket.score.packs": BEHIND,
    "methods.rocket.score.spared": BEHIND,
    "methods.rocket.score.trimmed": BEHIND,
    "methods.rocket.choose.Selection": A_RESULT,
    "methods.rocket.shards.Scored": A_RESULT,
    "methods.rocket.shards.score": "is `score` by the shard, which has rows",
    "methods.rocket.shards.select": "is `choose` by the shard, which has rows",
    "methods.upcycling.measure.behind_norms": "takes nothing",
    "models.*": NO_VALUES,
    "nn.batch.*": A_CHECK,
    "nn.dropout.[Dd]ropout": "has a rate that the settings of all who use it check",
    "nn.experts.ChosenRows": BEHIND,
    "nn.lora.lora_step": BEHIND,
    "nn.passes.*": NO_VALUES,
    "nn.routing.Trace": A_RESULT,
    "nn.routing.routers": NO_VALUES,
    "together.budget.Flops": NO_VALUES,
    "together.combining.AsAdapters": A_RESULT,
    "together.combining.only": NO_VALUES,
    "together.combining.start_adapters": NO_VALUES,
    "together.combining.trained": NO_VALUES,
    "together.measure.stored": NO_VALUES,
    "together.measure.costs": "takes a Setup, whose parts are checked",
    "together.measure.transfer": "takes a Setup, whose parts are checked",
    "together.setup.Setup": "holds a base, checked settings and rows, checked where they are read",
    "training.precision.widen": NO_VALUES,
    "training.processes.*": BEHIND,
    "training.recomputing.recompute": NO_VALUES,
}


@pytest.mark.filterwarnings("ignore")  # numbers that overflow may be told of
@pytest.mark.parametrize("table", TABLES)
def test_a_hostile_value_is_refused_in_one_line_or_the_result_is_right(
    table, times, figures
):
    faults = []
    for name, row in import_module(f"tests.faults.healthy.{table}").ROWS.items():
        for outcome in outcomes(name, row, SHARE * times):
            figures("calls", table, calls=1, **{outcome.what: 1})
            if outcome.what in (FOREIGN, WRONG):
                faults.append(str(outcome))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("table", TABLES)
def test_every_row_makes_a_hostile_call_and_excuses_no_more_than_it_makes(table):
    for name, row in import_module(f"tests.faults.healthy.{table}").ROWS.items():
        calls = list(hostile_calls(row))
        assert calls, f"{name} makes no hostile call"
        for excused in (row.fine, row.own):
            assert not unused(excused, calls), name


def unused(excused, calls):
    """Which kinds of values a row excuses and makes no value of, by argument."""
    made = [(place, kind) for _, (place, kind, _) in calls]
    return [
        (argument, kind)
        for argument, kinds in excused.items()
        for kind in kinds.split(" | ")
        if not any(excuses({argument: kind}, *one) for one in made)
    ]


def taken(package):
    """Read which names a package's ``__init__`` takes from its modules, and which modules whole."""
    names = {}
    whole = set()
    for node in ast.walk(ast.parse(Path(package.__file__).read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
            package.__name__
        ):
            continue
        for alias in node.names:
            value = getattr(import_module(node.module), alias.name)
            if inspect.ismodule(value):
                whole.add(value.__name__)
            else:
                names.setdefault(node.module, []).append(value)
    return names, whole


def callables(values):
    """Name functions and classes by the place where they are defined."""
    return {
        f"{value.__module__}.{value.__name__}": value
        for value in values
        if inspect.isfunction(value) or inspect.isclass(value)
    }


def public(name):
    """Find what of a module, or a package's modules, others may call.

    Of a module that its package shows some names of, the others are inner ones.
    """
    module = import_module(name)
    own = [
        value
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", "") == name
    ]
    found = callables(own)
    if not hasattr(module, "__path__"):
        return found
    names, whole = taken(module)
    for values in names.values():
        found |= callables(values)
    for part in iter_modules(module.__path__, f"{name}."):
        inner = part.name.rpartition(".")[2].startswith("_")
        if not inner and (part.name not in names or part.name in whole):
            found |= public(part.name)
    return found


def named(row):
    """Find what a row's name stands for."""
    value = import_module("moebook")
    path = "moebook"
    for part in row.partition(" ")[0].split("."):
        path += f".{part}"
        if not hasattr(value, part):
            import_module(path)
        value = getattr(value, part)
    return inspect.unwrap(value)


def test_every_public_function_and_class_has_a_row_or_a_reason_why_not():
    tables = [import_module(f"tests.faults.healthy.{table}").ROWS for table in TABLES]
    rows = {id(named(row)) for row in chain(*tables)}
    lacking = set()
    for package in PACKAGES:
        for name, value in public(f"moebook.{package}").items():
            checked = hasattr(value, "__pydantic_fields__")  # by test_values.py
            if not checked and id(inspect.unwrap(value)) not in rows:
                lacking.add(name.removeprefix("moebook."))
    excused = set()
    for pattern in WITHOUT:
        names = fnmatch.filter(lacking, pattern)
        assert names, f"no such name lacks a row: {pattern}"
        excused |= {*names}
    assert sorted(lacking - excused) == [], "no row in tests/faults/healthy"
