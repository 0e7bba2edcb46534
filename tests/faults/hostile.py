"""Hostile values, made of a healthy one by kind, and what a call with one of them comes to."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor, nn

from moebook.errors import Refusal

Arguments = dict[str, Any]
# Which argument, what kind, and what makes the bad value.
Flaw = tuple[str, str, Callable[[], Any]]
EVERY = "*"
_SCRATCH = tempfile.TemporaryDirectory()  # it goes when this process ends
FORM = "another form"  # a kind that is no fault: the result must be that of the healthy call


@dataclass(frozen=True)
class Row:
    """A public function, a call of it that is right, and what any accepted call must give."""

    call: Callable[..., Any]
    healthy: Callable[[], Arguments]  # anew for each call
    # What the same arguments come to by another way; a wrong argument may have no truth and raise.
    truth: Callable[..., Any] | None = None
    # By argument, the kinds of values (names with spaces between, or EVERY) that are no fault of
    # it, where no other way is known: the result must then have the form of the healthy call's.
    fine: Mapping[str, str] = field(default_factory=dict)
    # By argument, further values by kind, beside those that `flaws` makes.
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # By argument, kinds that may end in the library's own error: what is of a wrong type.
    own: Mapping[str, str] = field(default_factory=dict)
    # Arguments that stay as they are: checked by another test.
    settings: tuple[str, ...] = ()
    # Arguments of several values, which may come in any form that can be gone through.
    several: tuple[str, ...] = ()
    tolerance: float = 1e-4


def new_folder() -> Path:
    """Make an empty folder, which stays as long as the tests run."""
    return Path(tempfile.mkdtemp(dir=_SCRATCH.name))


def must(fits: bool) -> bool:
    """Raise where arguments have no truth: what is called with them has to refuse them."""
    if not fits:
        raise ValueError("no truth")
    return True


def flaws(value: Any, place: str) -> Iterator[Flaw]:
    """Yield the hostile values that stand for one, those of its parts included."""
    if isinstance(value, (bool, nn.Module)) or value is None:
        return
    if isinstance(value, (Tensor, np.ndarray)):
        yield from _of_array(value, place)
    elif isinstance(value, Dataset):
        yield from _of_rows(value, place)
    elif isinstance(value, pd.DataFrame):
        yield from _of_frame(value, place)
    elif isinstance(value, int):
        numbers = {"negative": -1, "zero": 0, "no whole number": 1.5, "huge": 10**9}
        yield from ((place, kind, lambda bad=bad: bad) for kind, bad in numbers.items())
        yield from ((place, "huge", lambda: 10**30), (place, "nan", lambda: math.nan))
    elif isinstance(value, float):
        numbers = {
            "nan": math.nan,
            "inf": math.inf,
            "negative": -1.0,
            "zero": 0.0,
            "huge": 1e308,
        }
        yield from ((place, kind, lambda bad=bad: bad) for kind, bad in numbers.items())
        yield from ((place, "inf", lambda: -math.inf), (place, "huge", lambda: 10**400))
    elif isinstance(value, str):
        texts = {"empty": "", "unknown": "no such", "nul": "a\0b", "long": "x" * 5000}
        yield from ((place, kind, lambda bad=bad: bad) for kind, bad in texts.items())
    elif isinstance(value, Path):
        names = {"missing": "no such", "nul": "a\0b", "long": "x" * 5000}
        yield from (
            (place, k, lambda bad=bad: value.parent / bad) for k, bad in names.items()
        )
    elif isinstance(value, Mapping):
        yield from _of_mapping(value, place)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, part in zip(value._fields, value, strict=True):
            for where, kind, make in flaws(part, f"{place}.{name}"):
                yield (
                    where,
                    kind,
                    lambda make=make, n=name: _rebuilt(value, **{n: make()}),
                )
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            for where, kind, make in flaws(
                getattr(value, one.name), f"{place}.{one.name}"
            ):
                yield (
                    where,
                    kind,
                    lambda make=make, n=one.name: replace(value, **{n: make()}),
                )
    elif isinstance(value, (list, tuple)):
        yield from _of_sequence(value, place)


def _rebuilt(value: Any, **changes: Any) -> Any:
    """A named tuple with other parts, made as a user makes it."""
    return type(value)(**{**value._asdict(), **changes})


def _of_array(value: Any, place: str) -> Iterator[Flaw]:
    array = isinstance(value, np.ndarray)
    tensor = torch.from_numpy(value) if array else value.detach()

    def as_given(bad: Tensor) -> Any:
        return bad.numpy() if array else bad

    for kind, bad in _tensors(tensor):
        yield place, kind, lambda bad=bad: as_given(bad.clone())
    if array:
        yield place, "dtype", lambda: value.astype(str)
        yield place, "dtype", lambda: value.astype(object)


def _tensors(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    for dim in range(value.dim()):
        yield "empty", value.narrow(dim, 0, 0)
        if value.shape[dim] > 1:
            yield "short", value.narrow(dim, 0, value.shape[dim] - 1)
        if value.shape[dim] > 0:
            yield "long", torch.cat([value, value.narrow(dim, 0, 1)], dim)
    yield "dimensions", value[None]
    if value.dim():
        yield "dimensions", value[0]
    first = (0,) * value.dim()
    if value.is_floating_point():
        for kind, number in (("nan", math.nan), ("inf", math.inf), ("inf", -math.inf)):
            yield kind, _with(value, first, number)
        yield "zero", torch.zeros_like(value)
        yield "huge", value * (1e30 if value.dtype != torch.float16 else 1e4)
        dtypes = (
            torch.int64,
            torch.bool,
            torch.complex64,
            torch.float16,
            torch.float64,
        )
    else:
        if value.dtype != torch.bool:
            yield "negative", _with(value, first, -1)
            yield "out of range", _with(value, first, 10**9)
            yield "zero", torch.zeros_like(value)
        dtypes = (torch.float32, torch.bool, torch.complex64, torch.int32, torch.uint8)
    for dtype in dtypes:
        if dtype != value.dtype:
            yield "dtype", value.to(dtype)


def _with(value: Tensor, place: tuple[int, ...], number: float) -> Tensor:
    changed = value.clone()
    changed[place] = number
    return changed


def _of_rows(value: Dataset, place: str) -> Iterator[Flaw]:
    yield place, "empty", lambda: value.select([])
    for name in value.column_names:
        column = value[name]
        rest = value.remove_columns(name)
        yield f"{place}.{name}", "missing", lambda rest=rest: rest
        if not isinstance(column[0], list):
            continue
        bad = {
            "short": column[0][:-1],
            "negative": [-7, *column[0][1:]],
            "out of range": [10**9, *column[0][1:]],
            "empty": [],
        }
        for kind, first in bad.items():
            made = {**value.to_dict(), name: [first, *column[1:]]}
            yield f"{place}.{name}", kind, lambda made=made: Dataset.from_dict(made)


def _of_frame(value: pd.DataFrame, place: str) -> Iterator[Flaw]:
    yield place, "empty", lambda: value.iloc[:0]
    yield place, "short", lambda: value.iloc[:-1]
    yield place, "long", lambda: pd.concat([value, value.iloc[:1]])
    for name in value.columns:
        at = f"{place}.{name}"
        yield at, "missing", lambda name=name: value.drop(columns=name)
        if pd.api.types.is_numeric_dtype(value[name]) and value[name].dtype != bool:
            for kind, number in (("nan", math.nan), ("inf", math.inf)):
                yield at, kind, lambda n=name, x=number: _first(value, n, x)
            yield at, "negative", lambda n=name: _first(value, n, -7.0)
            yield at, "dtype", lambda n=name: value.assign(**{str(n): "x"})


def _first(frame: pd.DataFrame, name: Any, number: float) -> pd.DataFrame:
    changed = frame.copy()
    changed[name] = changed[name].astype(float)
    changed.iloc[0, list(frame.columns).index(name)] = number
    return changed


def _of_mapping(value: Mapping[Any, Any], place: str) -> Iterator[Flaw]:
    yield place, "empty", dict
    first = next(iter(value), None)
    if first is None:
        return
    if len(value) > 1:
        yield place, "missing", lambda: {k: v for k, v in value.items() if k != first}
    named = not isinstance(first, (int, tuple))
    odd = "no such" if named else 10**6
    if not isinstance(first, tuple):
        yield (
            place,
            "unknown",
            lambda: {
                **{k: v for k, v in value.items() if k != first},
                odd: value[first],
            },
        )
    tensors = isinstance(value[first], Tensor)
    for name in value if tensors or isinstance(value[first], (str, int)) else [first]:
        for where, kind, make in flaws(value[name], f"{place}[{name}]"):
            yield where, kind, lambda make=make, name=name: {**value, name: make()}


def _of_sequence(value: Sequence[Any], place: str) -> Iterator[Flaw]:
    kind = type(value)
    yield place, "empty", kind
    if not value:
        return
    yield place, "short", lambda: kind(value[:-1])
    yield place, "long", lambda: kind([*value, value[0]])
    for where, what, make in flaws(value[0], f"{place}[0]"):
        yield where, what, lambda make=make: kind([make(), *value[1:]])


# What a call comes to

REFUSED = "refused"
RIGHT = "right"
OWN = "the library's own error"
FOREIGN = "foreign"
WRONG = "silently wrong"


@dataclass(frozen=True)
class Outcome:
    """What a hostile call came to, and of what it was made."""

    name: str
    argument: str
    kind: str
    what: str
    told: str = ""

    def __str__(self) -> str:
        return f"{self.name}({self.argument}: {self.kind}) is {self.what}: {self.told}"


def outcomes(name: str, row: Row, share: float = 1.0) -> Iterator[Outcome]:
    """Make a row's healthy call and all hostile ones, or a share of them drawn by its name."""
    whole = row.call(**row.healthy())
    if row.truth is not None:
        truth = row.truth(**row.healthy())
        assert not differs(whole, truth, row.tolerance), (
            f"{name}: the healthy call is not right"
        )
    calls = list(hostile_calls(row))
    if share < 1:
        calls = random.Random(name).sample(calls, math.ceil(share * len(calls)))
    for argument, flaw in (*calls, *_forms(row)):
        yield _outcome(name, row, whole, argument, flaw)


def _forms(row: Row) -> Iterator[tuple[str, Flaw]]:
    """Yield the arguments of several values as a view and as a generator of the same."""
    for argument in row.several:
        value = row.healthy()[argument]
        for form in (_view, _generator):
            if isinstance(value, Mapping):
                yield argument, (argument, FORM, partial(_each, form, value))
            else:
                yield argument, (argument, FORM, partial(form, value))


def _view(values: Sequence[Any]) -> Any:
    return dict(enumerate(values)).values()


def _generator(values: Sequence[Any]) -> Any:
    return (value for value in values)


def _each(form: Callable[..., Any], values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: form(part) for name, part in values.items()}


def hostile_calls(row: Row) -> Iterator[tuple[str, Flaw]]:
    """Yield each argument of a row with each of its hostile values."""
    for argument, value in row.healthy().items():
        if argument not in row.settings:
            for flaw in flaws(value, argument):
                yield argument, flaw
        for kind, bad in row.more.get(argument, {}).items():
            yield argument, (argument, kind, lambda bad=bad: bad)


def _outcome(name: str, row: Row, whole: Any, argument: str, flaw: Flaw) -> Outcome:
    place, kind, make = flaw
    about = name, place, kind
    # What a call was given it may have changed.
    kept = row.healthy() if row.truth else {}
    try:
        kept[argument] = make()
        result = row.call(**{**row.healthy(), argument: make()})
    except Refusal as refusal:
        one = "\n" not in str(refusal) and len(str(refusal)) < 2500 and kind != FORM
        return Outcome(*about, REFUSED if one else FOREIGN, str(refusal))
    except Exception as error:  # whatever is no refusal of ours
        if excuses(row.own, place, kind):
            return Outcome(*about, OWN, f"{type(error).__name__}: {str(error)[:300]}")
        return Outcome(*about, FOREIGN, f"{type(error).__name__}: {str(error)[:300]}")
    problem = _problem(row, kept, whole, result, place, kind)
    return Outcome(*about, WRONG if problem else RIGHT, problem)


def _problem(
    row: Row, given: Arguments, whole: Any, result: Any, place: str, kind: str
) -> str:
    """Say why an accepted call is not right; "" where it is."""
    if kind == FORM:
        return differs(result, whole, row.tolerance)
    if excuses(row.fine, place, kind):
        same = form(result) == form(whole)
        return "" if same else f"another form: {form(result)}, healthy {form(whole)}"
    if row.truth is not None:
        try:
            truth = row.truth(**given)
        except Exception as error:
            return f"accepted, where the truth is {type(error).__name__}: {str(error)[:200]}"
        # Of 16 bits.
        return differs(result, truth, 0.02 if kind == "dtype" else row.tolerance)
    shows = any(not np.isfinite(part).all() for part in numbers(result))
    if kind in ("nan", "inf", "huge") and shows:
        return ""
    if kind == "dtype":
        return differs(result, whole, 0.01)
    return f"accepted: {str(result)[:200]}"


def excuses(table: Mapping[str, str], place: str, kind: str) -> bool:
    """Whether a row names a kind of value for an argument, or for what holds it."""
    for argument, kinds in table.items():
        if place == argument or place.startswith((f"{argument}.", f"{argument}[")):
            return kinds == EVERY or kind in kinds.split(" | ")
    return False


def leaves(value: Any) -> Iterator[Any]:
    """All parts of a result that are no container."""
    if isinstance(value, nn.Module):
        yield from value.state_dict().values()
    elif isinstance(value, pd.DataFrame):
        yield tuple(map(str, value.columns))
        for name in value.columns:
            yield from leaves(value[name])
    elif isinstance(value, pd.Series):
        yield value.to_numpy()
    elif isinstance(value, Dataset):
        yield from leaves(value.to_dict())
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name)
            yield from leaves(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from leaves({one.name: getattr(value, one.name) for one in fields(value)})
    elif isinstance(value, (set, frozenset)):
        yield from leaves(sorted(value))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def numbers(value: Any) -> list[np.ndarray]:
    """The numbers of a result, in float64."""
    arrays = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu()
            wide = torch.complex128 if leaf.is_complex() else torch.float64
            leaf = leaf.to(wide).numpy()
        if isinstance(leaf, (bool, int, float, np.number, np.bool_)):
            leaf = np.array(float(leaf))
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            arrays.append(leaf.astype(complex if leaf.dtype.kind == "c" else float))
    return arrays


def form(value: Any) -> list[str]:
    """The kinds of a result's parts, without what they hold."""
    kinds = {int: "number", float: "number", np.float64: "number", np.int64: "number"}
    return sorted(
        {kinds.get(type(leaf), type(leaf).__name__) for leaf in leaves(value)}
    )


def differs(result: Any, truth: Any, tolerance: float) -> str:
    """Say in what a result differs from the truth; a number that is not finite deceives nobody."""
    found = numbers(result)
    wanted = numbers(truth)
    if [part.shape for part in found] != [part.shape for part in wanted]:
        return f"shapes {[p.shape for p in found]}, the truth has {[p.shape for p in wanted]}"
    for part, right in zip(found, wanted, strict=True):
        if part.dtype.kind == "c" or right.dtype.kind == "c":
            return "complex numbers"
        with np.errstate(all="ignore"):
            size = max(np.abs(right[np.isfinite(right)]).max(initial=0.0), 1e-30)
            off = np.abs(part - right) > tolerance * size
        silent = np.isfinite(part) & (off | np.isnan(right))
        if silent.any():
            place = tuple(np.argwhere(silent)[0])
            return f"{part[place]} at {place}, the truth is {right[place]}"
    texts = [leaf for leaf in leaves(result) if isinstance(leaf, str)]
    true_texts = [leaf for leaf in leaves(truth) if isinstance(leaf, str)]
    if texts != true_texts:
        return f"texts {texts[:5]}, the truth has {true_texts[:5]}"
    return ""
