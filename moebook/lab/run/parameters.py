"""Parameters of a notebook: declared in one cell, checked the same way wherever a value comes from.

The parameters cell holds one flat scalar a line, ``name: type = default  # help rule``, where type
is int, float, bool or str and the rule, which ends the comment, is one of::

    top_k: int = 2        # experts per token [1, 64]       both ends belong to the range
    share: float = 0.5    # of the rows, share (0, 1]       a round bracket leaves its end out
    width: int = 16       # adapter width, features [1, inf)
    base: str = "nano"    # base model {nano, smollm2}      choices
    rates: str = ""       # learning rates, or "" (0, 1)    numbers with commas, each in it
    mix: str = "own"      # training data {own, *.jsonl}    the second is a file's name

A float may be given as a finite int, and a list of one number as that number, since papermill's
``-p rates 0.001`` and YAML make numbers of both. Blanks around the commas of a list go; nothing
else is converted.
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moebook import lists
from moebook.errors import located, nearest, printable, refuse, refuse_unknown, shown

Scalar = bool | int | float | str
TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}

_NUMBER = r"([-+]?(?:inf|(?:\d[\d_]*)?\.?\d+(?:[eE][-+]?\d+)?))"
_RANGE = re.compile(rf"([\[(])\s*{_NUMBER}\s*,\s*{_NUMBER}\s*([\])])\s*$")
_CHOICES = re.compile(r"\{([^{}]+)\}\s*$")
# Texts that name one thing, which may have commas and blanks in its name; so do folders.
_ONE_NAME = ("base", "encoder", "new", "published", "second")


@dataclass(frozen=True)
class Parameter:
    """One declared parameter, with the rule as written, such as ``(0, 1]``; empty for none."""

    name: str
    type: type
    default: Scalar
    help: str = ""
    rule: str = ""

    @property
    def lists_numbers(self) -> bool:
        """Whether it is a text that lists numbers, each of which the rule is about."""
        return self.type is str and _RANGE.fullmatch(self.rule) is not None

    def taken(self, value: Any) -> Any:
        """Return a value as this parameter takes it.

        A number is a list of one number, and a list has no blanks around its commas.
        """
        if self.lists_numbers and type(value) in (int, float):
            return repr(value)
        if isinstance(value, str) and self._may_list:
            return lists.tight(value)
        return value

    @property
    def _may_list(self) -> bool:
        """Whether it is a text that may list several values."""
        is_one = self.name in _ONE_NAME or self.name.endswith("_folder")
        return self.type is str and not self.choices and not is_one

    def check(self, value: object, where: str) -> None:
        """Refuse a value of the wrong type (E-TYPE) or outside the rule (E-RANGE)."""
        value = self.taken(value)
        given = f"{where}: {self.name} = {shown(value)[:80]}"
        if type(value) is not self.type and (self.type, type(value)) != (float, int):
            refuse("E-TYPE", f"{given}: {self._expected(value)}")
        if isinstance(value, str) and printable(value) != value:
            refuse(
                "E-TYPE",
                f"{given}: expected one line of text without control characters",
            )
        if self.lists_numbers:
            self._check_numbers(str(value), where)
        elif not self._allows(value):
            note = f" ({self.help})" if self.help else ""
            refuse("E-RANGE", f"{given}: {self._permitted(value)}{note}")

    def _check_numbers(self, text: str, where: str) -> None:
        with located(where):
            numbers = lists.numbers(self.name, text)
        for number in numbers:
            if not self._allows(number):
                expected = f"expected numbers in {self.rule}, with commas between"
                refuse("E-RANGE", f"{where}: {self.name} lists {number:g}: {expected}")

    def read(self, text: str, where: str) -> Scalar:
        """Turn the text of ``-p name=text`` into a checked value of this parameter's type."""
        if self.type is bool:
            value: Scalar = {"true": True, "false": False}.get(text.lower(), text)
        else:
            value = _number(text, self.type)
        self.check(value, where)
        taken: Scalar = self.taken(value)
        return taken

    @property
    def choices(self) -> tuple[Scalar, ...]:
        """The values that the rule lists; empty when it is not a list."""
        match = _CHOICES.fullmatch(self.rule)
        texts = match[1].split(",") if match else []
        return tuple(_number(text.strip(), self.type) for text in texts)

    def _allows(self, value: Any) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if not self.rule:
            return True
        match = _RANGE.fullmatch(self.rule)
        if match is None:
            return any(_is(value, choice) for choice in self.choices)
        left, low, high, right = match.groups()
        # A square bracket takes its end in, a round one leaves it out.
        above = value >= float(low) if left == "[" else value > float(low)
        below = value <= float(high) if right == "]" else value < float(high)
        return above and below

    def _expected(self, value: object) -> str:
        text = f"expected {self.type.__name__}, found {type(value).__name__}"
        word = str(value).lower()
        is_number = isinstance(_number(str(value), float), float)
        if self.type is float and isinstance(value, str) and "e" in word and is_number:
            return f"{text} (YAML reads 1e-5 as text: write 1.0e-5)"
        if self.type is str and type(value) in (int, float):
            return f"{text} (papermill's -p gives a number: use -r {self.name} {value})"
        if self.type is bool and word in ("true", "false"):
            return (
                f"{text} (papermill's -p gives text: use -y '{{{self.name}: {word}}}')"
            )
        return text

    def _permitted(self, value: object) -> str:
        if self.choices:
            return nearest(str(value), map(str, self.choices))
        kind = "finite float" if self.type is float else self.type.__name__
        return f"expected {kind} in {self.rule}" if self.rule else f"expected {kind}"


def _is(value: Scalar, choice: Scalar) -> bool:
    """Whether a value is a choice, or ends as ``*.jsonl`` says that a file's name does."""
    if isinstance(choice, str) and isinstance(value, str) and choice.startswith("*."):
        return value.endswith(choice[1:]) and value != choice[1:]
    return value == choice


def statements(source: str, where: str) -> list[ast.stmt]:
    """Parse the source of a cell; it is refused with the line that breaks, if Python tells it."""
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        place = where if line is None else f"{where}, line {line}"
        reason = getattr(error, "msg", "") or str(error) or "nested too deeply"
        refuse("E-NOTEBOOK", f"{place}: {reason}")


def parse(source: str, where: str) -> dict[str, Parameter]:
    """Read a parameters cell by the grammar of this module; it is refused with its line."""
    lines = statements(source, f"{where}, parameters cell")
    comments = _comments(source)
    declared: dict[str, Parameter] = {}
    for statement in lines:
        place = f"{where}, parameters cell, line {statement.lineno}"
        comment = comments.get(statement.end_lineno or statement.lineno, "")
        parameter = _declaration(statement, comment, place)
        if parameter.name in declared:
            refuse("E-NOTEBOOK", f"{place}: {parameter.name} is declared twice")
        parameter.check(parameter.default, place)
        declared[parameter.name] = parameter
    return declared


def _comments(source: str) -> dict[int, str]:
    """Return the comments of a cell by the numbers of their lines."""
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, _ = token.start
            comments[line] = token.string.lstrip("# ").rstrip()
    return comments


def _declaration(statement: ast.stmt, comment: str, place: str) -> Parameter:
    """Read one line of a parameters cell, with the comment that ends it."""
    if not isinstance(statement, ast.AnnAssign) or not isinstance(
        statement.target, ast.Name
    ):
        expected = "name: type = default  # help, unit, range"
        refuse("E-NOTEBOOK", f"{place}: expected {expected}")
    name = statement.target.id
    annotation = getattr(statement.annotation, "id", "")
    refuse_unknown(annotation, TYPES, "E-NOTEBOOK", f"{place}: type of {name}:")
    default = literal(statement.value, f"{place}: default of {name}")
    match = _CHOICES.search(comment) or _RANGE.search(comment)
    if match:
        help_text = comment[: match.start()]
        rule = match[0].strip()
    elif comment.endswith(("]", "}")):
        form = "see [1, 64], {a}"
        refuse("E-NOTEBOOK", f"{place}: cannot read the rule '{comment}'; {form}")
    else:
        help_text = comment
        rule = ""
    parameter = Parameter(name, TYPES[annotation], default, help_text.strip(" ,"), rule)
    if not _suits(parameter):
        refuse("E-NOTEBOOK", f"{place}: rule {rule} does not suit type {annotation}")
    return parameter


def _suits(parameter: Parameter) -> bool:
    """Whether a parameter's rule can be one of its type: a rising range, choices of it.

    The range of a text is that of the numbers that it lists.
    """
    interval = _RANGE.fullmatch(parameter.rule)
    if interval:
        _, low, high, _ = interval.groups()
        return parameter.type is not bool and float(low) <= float(high)
    if not parameter.rule:
        return True
    if parameter.type is bool:
        return False
    return all(type(choice) is parameter.type for choice in parameter.choices)


def literal(node: ast.expr | None, where: str) -> Scalar:
    """Return the JSON scalar that an expression spells out; refuse one that must be computed."""
    value = None
    if node is not None:
        # What cannot be evaluated is refused below, as None is.
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(node)
    if not isinstance(value, (bool, int, float, str)):
        refuse("E-TYPE", f"{where} must be a plain int, float, bool or str")
    return value


def _number(text: str, kind: type) -> Any:
    """Read a number in Python's notation; text that is none comes back as it is."""
    try:
        return kind(text)
    except ValueError:
        return text


def check(
    declared: Mapping[str, Parameter], values: Mapping[str, object], where: str
) -> dict[str, Any]:
    """Return values as their parameters take them (`Parameter.taken`).

    Refused are names that are not declared, and what breaks a parameter's type or rule.
    """
    taken: dict[str, Any] = {}
    for name, value in values.items():
        parameter = _find(declared, name, where)
        parameter.check(value, where)
        taken[name] = parameter.taken(value)
    return taken


def read_options(
    declared: Mapping[str, Parameter], texts: Iterable[str]
) -> dict[str, Scalar]:
    """Turn the command line's ``name=value`` texts into checked values."""
    values: dict[str, Scalar] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            refuse("E-USAGE", f"-p {text}: expected name=value, as in -p top_k=1")
        parameter = _find(declared, name.strip(), "-p")
        if parameter.name in values:
            refuse("E-USAGE", f"-p {parameter.name} is given twice")
        values[parameter.name] = parameter.read(value.strip(), "-p")
    return values


def _find(declared: Mapping[str, Parameter], name: str, where: str) -> Parameter:
    refuse_unknown(
        name, declared, "E-PARAMETER", f"{where}: unknown parameter {name!r};"
    )
    return declared[name]
