"""Whatever a setting, record or checked function is given: a fitting value or one line, at once."""

import ast
import importlib
import inspect
import json
import math
import signal
import types
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from moebook import settings as ours
from moebook.errors import Refusal
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
KINDS = {kind.__name__: kind for kind in (ours.settings, ours.record, ours.checked)}
CHECKED = {
    f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}:{node.name}": mark.id
    for path in sorted((ROOT / "moebook").rglob("*.py"))
    for node in ast.parse(path.read_text()).body
    for mark in getattr(node, "decorator_list", ())
    if isinstance(mark, ast.Name) and mark.id in KINDS
}
"""Every settings class, record and checked function of the package: its place to its kind."""


EXAMPLES = 20  # of each class and function


class Nested(list):
    """A list within a list, 2,000 times; Hypothesis shows it in short."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("nested")


NESTED: list[Any] = []
for _ in range(2000):
    NESTED = Nested([NESTED])
JUNK = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**64,
    10**400,
    10**5000,
    0.5,
    -0.0,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "1",
    "nan",
    "x\ny\x1b[2J\x07",
    "\ud800",
    "x" * 10**5,
    b"x",
    (),
    [],
    {},
    {"a": 1},
    {1: {1: math.nan}},
    (math.nan,),
    [1, "x"],
    NESTED,
    object(),
    int,
]
NUMBERS = {
    "x": [1.0, 2.0],
    "input_ids": [[1, 2], [3]],
    "labels": [[1], [2, 3]],
    "length": [2, 1],
}
ARRAYS = st.tuples(
    st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 1.0, math.nan])
).map(lambda shape: np.full(shape[:2], shape[2]) + np.arange(shape[1]))
MADE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    str: st.text(max_size=5),
    Path: st.just(Path("nowhere")),
    int: st.integers(-2, 9),
    float: st.floats(-2, 9) | st.integers(-2, 9),
    np.ndarray: ARRAYS,
    pd.DataFrame: ARRAYS.map(pd.DataFrame),
    torch.Tensor: ARRAYS.map(torch.tensor),
    Dataset: st.sets(st.sampled_from(list(NUMBERS))).map(
        lambda names: Dataset.from_dict({name: NUMBERS[name] for name in names})
    ),
}


def parts(hint: Any) -> tuple[Any, list[Any]]:
    """A type without its annotations, and their limits."""
    if not hasattr(hint, "__metadata__"):
        return hint, []
    inner, limits = parts(hint.__origin__)
    more = (m.metadata if isinstance(m, FieldInfo) else [m] for m in hint.__metadata__)
    return inner, [*limits, *chain.from_iterable(more)]


def make(hint: Any) -> st.SearchStrategy[Any]:
    """Values that may suit a type."""
    bare, _ = parts(hint)
    kind = get_origin(bare)
    inner = get_args(bare)
    if kind is Literal:
        return st.sampled_from(inner)
    if kind in (Union, types.UnionType):
        return st.one_of(map(make, inner))
    if bare is type(None):
        return st.none()
    if kind is tuple and inner[-1] is not ...:
        return st.tuples(*map(make, inner))
    if kind in (tuple, Sequence):
        return st.lists(make(inner[0]), max_size=3).map(tuple)
    if kind in (dict, Mapping):
        return st.dictionaries(make(inner[0]), make(inner[1]), max_size=3)
    if hasattr(bare, "__pydantic_fields__"):
        return st.builds(made(bare), suiting(bare))
    return MADE.get(kind or bare, st.sampled_from(JUNK))


def made(kind: Any) -> Callable[[dict[str, Any]], Any]:
    """A maker of a nested value; what is refused stands for it as None, which is refused again."""

    def build(given: dict[str, Any]) -> Any:
        try:
            return kind(**given)
        except (Refusal, TypeError):
            return None

    return build


def hints(target: Any) -> dict[str, Any]:
    """Fields or arguments with their annotations."""
    every = get_type_hints(inspect.unwrap(target), include_extras=True)
    return {
        name: hint
        for name, hint in every.items()
        if name != "return" and get_origin(hint) is not ClassVar
    }


def suiting(target: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Keywords that may suit a target."""
    return st.fixed_dictionaries(
        {name: make(hint) for name, hint in hints(target).items()}
    )


def spoilt(target: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Keywords as `suiting` with up to two of them junk, absent, or unknown."""
    junk = st.sampled_from([*JUNK, ...])
    flaws = st.dictionaries(
        st.sampled_from([*hints(target), "unknown\n"]), junk, max_size=2
    )
    both = st.tuples(suiting(target), flaws).map(lambda pair: pair[0] | pair[1])
    return both.map(
        lambda given: {name: x for name, x in given.items() if x is not ...}
    )


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of its type and within its limits: an oracle without pydantic."""
    bare, limits = parts(hint)
    kind = get_origin(bare)
    inner = get_args(bare)
    if value is not None and not all(within(value, limit) for limit in limits):
        return False
    if kind is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if kind in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if kind in (tuple, Sequence) and (kind is Sequence or inner[-1] is ...):
        return isinstance(value, Sequence) and all(fits(one, inner[0]) for one in value)
    if kind is tuple:
        return len(value) == len(inner) and all(map(fits, value, inner))
    if kind in (dict, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else [(None, None)]
        return all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in pairs)
    if bare in (int, float):
        suits = isinstance(value, int if bare is int else (int, float))
        finite = suits and (isinstance(value, int) or math.isfinite(value))
        return finite and not isinstance(value, bool)
    return bare is Any or isinstance(value, kind or bare)


def within(value: Any, limit: Any) -> bool:
    """Whether a number or a length keeps a limit."""
    tests = {
        "gt": lambda x, y: x > y,
        "ge": lambda x, y: x >= y,
        "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y,
        "min_length": lambda x, y: len(x) >= y,
    }
    asked = [name for name in tests if hasattr(limit, name)]
    return all(tests[name](value, getattr(limit, name)) for name in asked)


def held(target: Any) -> bool:
    """Whether a class holds what JSON does not keep as it is, or `restored` makes tuples of."""

    def changed(hint: Any) -> bool:
        bare, _ = parts(hint)
        if get_origin(bare) in (Union, types.UnionType):
            return any(map(changed, get_args(bare)))
        return bare is Path or get_origin(bare) in (dict, list)

    return any(map(changed, hints(target).values()))


def controls(text: str) -> list[str]:
    """What of a text steers a terminal or cannot be encoded."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]


@contextmanager
def at_once(seconds: int = 20):
    """Stop what hangs."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("place", CHECKED)
def test_only_fitting_values_or_one_line_come_out(place, times, figures):
    module, _, name = place.partition(":")
    target = getattr(importlib.import_module(module), name)
    kind = CHECKED[place]

    @settings(
        max_examples=EXAMPLES * times,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(spoilt(target))
    def holds(given):
        figures("values", kind, examples=1)
        try:
            with at_once():
                value = target(**given)
        except Refusal as refusal:
            figures("values", kind, refused=1)
            assert not controls(str(refusal))
            assert len(str(refusal)) < 2000
            return
        figures("values", kind, accepted=1)
        assert all(
            fits(given[name], hint)
            for name, hint in hints(target).items()
            if name in given
        )
        if kind == "settings" and not held(target):
            plain = TypeAdapter(target).dump_python(value, mode="json")
            again = json.loads(json.dumps(plain, allow_nan=False))
            if again.keys() == {field.name for field in fields(target)}:
                assert ours.restored(target, again, "here") == value

    holds()


class Answer(BaseModel):
    """What a user's own function may check by pydantic."""

    grade: int


@ours.checked
def called(act: Callable[[], Any], times: int = 1) -> Any:
    return act()


@ours.settings
class Chosen:
    """Settings that hold a tuple."""

    layers: tuple[int, ...] = ()


@ours.record
class Kept:
    """A record, whose fields are positional too."""

    first: int = 0


@pytest.mark.parametrize(
    ("call", "given", "words"),
    [
        (called, (int, 1, "x"), "'x' is one .* without a name; .* are act, times"),
        (Chosen, ((1,),), r"\(1,\) is one .* without a name; the names are layers"),
        (Kept, (1, 2), "2 is one value too many without a name; the names are first"),
    ],
)
def test_values_too_many_without_a_name_are_refused(call, given, words):
    refused(f"E-TYPE: {words}", call, *given)


def test_what_a_users_function_raises_inside_a_call_stays_what_it_is():
    with pytest.raises(ValidationError, match="1 validation error for Answer"):
        called(lambda: Answer(grade="good"))
    refused("E-TYPE: times is 'x', expected a valid integer", called, int, times="x")
    # Also where it is refused in the name of a function or class of ours.
    refused("E-TYPE: first is 'x'", called, lambda: Kept("x"))


@pytest.mark.parametrize("layers", [(2**20000,), (1, -(2**1024))])
def test_a_number_beyond_all_floats_within_a_tuple_is_refused(layers):
    refused("E-RANGE: layers has a number of .* bits", Chosen, layers=layers)
