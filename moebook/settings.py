"""Settings and arguments checked where they are made, by pydantic; its errors become one line."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import GenericAlias
from typing import (
    Annotated,
    Any,
    ClassVar,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
)

import numpy as np
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    validate_call,
)
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from moebook.errors import located, nearest, refuse, refuse_unknown, shown

Kind = TypeVar("Kind")
Given = ParamSpec("Given")
# Strict: True is no number, "3" neither. A whole number serves as a float.
CHECKS = ConfigDict(
    strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, extra="forbid"
)
CODES = {
    "literal_error": "E-CHOICE",
    "unexpected_keyword_argument": "E-CHOICE",
    "not_finite": "E-NONFINITE",
    "dtype": "E-DTYPE",
    "name": "E-PATH",
    "table": "E-DATA",
}
NO_LETTERS: Mapping[str, str] = {}
RANGES = ("greater_than", "less_than", "too_", "finite_number")


def _finite(values: Any) -> Any:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "biufc":
            raise PydanticCustomError("dtype", "expected numbers")
        finite = np.isfinite(values).all()
    else:
        finite = values.isfinite().all()
    if not finite:
        raise PydanticCustomError("not_finite", "expected neither NaN nor infinity")
    return values


def _name_of_a_file(place: Any) -> Any:
    name = os.fspath(place)
    if "\0" in name:
        raise PydanticCustomError("name", "expected a name without NUL")
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in name.split(os.sep)):
        raise PydanticCustomError(
            "name", f"expected names of at most {LONGEST_NAME} bytes"
        )
    return place


def _at_home(place: Any) -> Any:
    name = os.fspath(place)
    return os.path.expanduser(name) if name.startswith("~") else place


SIZE = 2**20  # the largest width, rank or number of experts, which no model comes near
LONGEST_NAME = 255  # bytes, on the file systems of Linux, macOS and Windows
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=SIZE)]
"""Stands for what memory is taken by: a module's widths, ranks and experts."""
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What NumPy and scikit-learn take for a seed."""
FINITE = AfterValidator(_finite)
"""Stands in the annotation of a tensor or an array without NaN and infinity."""
NAMED = AfterValidator(_name_of_a_file)
"""Stands in the annotation of the name of a file or folder, which need not be there."""
Place = Annotated[str | os.PathLike[str], NAMED, AfterValidator(_at_home)]
"""Stands in the annotation of a file or folder: the function gets ``~`` as the user's home."""


def _gathered(values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise PydanticCustomError(
            "iterable", "expected several values, such as a list of them"
        )
    return tuple(values)


class _Gathered:
    """Lets pydantic check an iterable whole, where its own check of one goes on in the function."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        (kind,) = get_args(source)
        # A type that is known only now: `tuple[kind, ...]` is no annotation to mypy.
        several = handler.generate_schema(GenericAlias(tuple, (kind, ...)))
        return core_schema.no_info_before_validator_function(_gathered, several)


Each = Annotated[Iterable[Kind], _Gathered()]
"""Stands for whatever holds several values of a kind: a list, a dictionary's keys or a view of its
values, a generator. The function gets a tuple of them."""


def columns(
    texts: str = "", *, numbers: str = "", shares: str = "", lacking: str = ""
) -> AfterValidator:
    """Return what stands in the annotation of a table, which has rows and columns of these names.

    Names stand with spaces between. Columns of ``numbers`` are finite, and in [0, 1]
    those of ``shares``; those of ``lacking`` may hold NaN, where something was not
    measured.
    """
    finite = [*numbers.split(), *shares.split()]
    numeric = [*finite, *lacking.split()]
    wanted = [*texts.split(), *numeric]

    def check(table: Any) -> Any:
        missing = [name for name in wanted if name not in table.columns]
        if missing:
            have = ", ".join(map(str, table.columns)) or "none"
            _refuse_table(f"with columns {have}, expected one with '{missing[0]}'")
        twice = table.columns[table.columns.duplicated()]
        if len(twice):
            _refuse_table(f"with two columns '{twice[0]}', expected one")
        if not len(table):
            _refuse_table("without rows, expected at least one")
        for name in texts.split():
            if table[name].isna().any():  # a group by it would lack these rows
                _refuse_table(f"with a row that has no '{name}'")
        for name in numeric:
            column = table[name]
            if column.dtype.kind not in "biuf":
                _refuse_table(
                    f"whose column '{name}' is {column.dtype}, expected numbers"
                )
            if (abs(column) == math.inf).any():
                _refuse_table(f"with infinity in column '{name}'")
            if name in finite and column.isna().any():
                _refuse_table(f"with NaN in column '{name}'")
        for name in shares.split():
            if not table[name].between(0, 1).all():
                _refuse_table(f"with numbers outside [0, 1] in column '{name}'")
        return table

    return AfterValidator(check)


def _refuse_table(problem: str) -> NoReturn:
    raise PydanticCustomError("table", "{text}", {"text": f"a table {problem}"})


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(kind: type[Kind]) -> type[Kind]:
    """Make a class a frozen dataclass with keywords only, whose fields are checked by their types.

    Limits and choices stand in the annotations: ``Annotated[float, Field(gt=0,
    le=1)]``, ``Literal["token", "gate"]``. What concerns several fields stands in
    ``__post_init__``. A bad value is refused with its field's name: E-CHOICE, E-RANGE
    or E-TYPE. ``LETTERS`` of the class, if it has them, are a paper's letters and the
    fields that they stand for: who gives a letter is told the field.
    """
    return _checked_class(kind, kw_only=True)


@dataclass_transform(frozen_default=True)
def record(kind: type[Kind]) -> type[Kind]:
    """Make a class a frozen, checked dataclass as `settings` does, with positional fields too."""
    return _checked_class(kind, kw_only=False)


def _checked_class(kind: type[Kind], *, kw_only: bool) -> type[Kind]:
    made: Any = dataclass(frozen=True, kw_only=kw_only, config=CHECKS)(kind)
    names = [field.name for field in fields(made)]
    letters = getattr(kind, "LETTERS", {})
    made.__init__ = _told(made.__init__, kind.__name__, names, own=1, letters=letters)
    return made


def checked(function: Callable[Given, Kind]) -> Callable[Given, Kind]:
    """Check a function's arguments by their annotations, as `settings` checks fields."""
    names = list(inspect.signature(function).parameters)
    validated = validate_call(config=CHECKS)(function)
    call: Callable[Given, Kind] = _told(validated, function.__qualname__, names)
    return call


def _told(
    function: Any,
    title: str,
    names: Sequence[str],
    own: int = 0,
    letters: Mapping[str, str] = NO_LETTERS,
) -> Any:
    """Tell in one line what is wrong with the arguments ``names``, behind ``own`` others.

    ``title`` is what pydantic calls the function or class. Whole numbers of more than
    1,023 bits, for which floats, JSON and messages have no room, are refused too, also
    in a list or tuple.
    """

    @functools.wraps(function)
    def call(*args: Any, **values: Any) -> Any:
        by_position = zip(names, args[own:], strict=False)
        for name, value in (*by_position, *values.items()):
            parts = value if isinstance(value, list | tuple) else [value]
            if int not in {*map(type, parts)}:  # most long ones hold floats
                continue
            for part in parts:
                if type(part) is int and part.bit_length() >= 1024:
                    have = f"{name} has a number of {part.bit_length()} bits"
                    refuse("E-RANGE", f"{have}, expected at most 1023")
        with in_one_line(names, letters, title):
            return function(*args, **values)

    return call


@contextmanager
def in_one_line(
    known: Sequence[str],
    letters: Mapping[str, str] = NO_LETTERS,
    title: str | None = None,
) -> Iterator[None]:
    """Turn pydantic's first error into one line; ``known`` are the fields or arguments in order.

    With a ``title``, only errors that pydantic gives this title: others come from what a user's own
    function does inside the call, and stay what they are.
    """
    try:
        yield
    except ValidationError as problem:
        if title not in (None, problem.title):
            raise
        first = problem.errors()[0]
        kind = first["type"]
        if kind == "unexpected_positional_argument":
            extra = f"{shown(first['input'])} is one value too many without a name"
            refuse("E-TYPE", f"{extra}; the names are {', '.join(known)}")
        # The place of the value: an argument's number or name, then what is inside of it.
        top, *rest = first["loc"]
        argument = known[top] if isinstance(top, int) else top
        name = ".".join(map(str, [argument, *rest]))
        code = CODES.get(kind, "E-RANGE" if kind.startswith(RANGES) else "E-TYPE")
        if kind == "unexpected_keyword_argument":
            hint = f"; {nearest(name, known)}"
            if name in letters:
                hint = f": the paper's {name} is '{letters[name]}' here"
            refuse(code, f"unknown setting '{name}'{hint}")
        if kind.startswith("missing"):
            refuse(code, f"{name} is missing")
        if kind == "table":  # whose rows would say nothing
            refuse(code, f"{name} is {first['msg']}")
        expected = first["msg"].replace("Input should be", "expected")
        for side in ("greater", "less"):
            expected = expected.replace(f"expected {side}", f"expected a number {side}")
        refuse(code, f"{name} is {shown(first['input'])}, {expected}")


class Presets:
    """Settings that have named sets of values."""

    # By name, what differs from the defaults.
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]]

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the settings of a preset, with single fields changed."""
        refuse_unknown(name, cls.PRESETS, "E-CHOICE", f"unknown preset '{name}';")
        return cls(**{**cls.PRESETS[name], **changes})


def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists into tuples, as settings have them; JSON and YAML know lists alone."""
    given = {**values}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    return given


def restored(kind: type[Kind], values: Mapping[str, Any], where: object) -> Kind:
    """Make settings again from what JSON kept of them; all fields must be given."""
    known: dict[str, Any] = kind.__pydantic_fields__  # type: ignore[attr-defined]
    odd = values.keys() ^ known.keys()
    if odd:
        name = min(odd)
        problem = f"setting '{name}' is missing or unknown"
        refuse("E-FORMAT", f"{where}: {problem}; {nearest(name, known)}")
    given = tuples(values)
    for name, value in values.items():
        if isinstance(value, dict) and is_dataclass(known[name].annotation):
            given[name] = restored(known[name].annotation, value, where)
    with located(where):
        return kind(**given)
