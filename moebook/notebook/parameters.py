"""Parameters of a notebook: declared in one cell, checked the same way wherever a value comes from.

The parameters cell holds one flat scalar a line, ``name: type = default  # help rule``, where type
is int, float, bool or str and the rule, which ends the comment, is one of::

    top_k: int = 2        # experts per token [1, 64]       both ends belong to the range
    share: float = 0.5    # of the rows, share (0, 1]       a round bracket leaves its end out
    width: int = 16       # adapter width, features [1, inf)
    base: str = "nano"    # base model {nano, smollm2}      choices

A float may be given as an int; nothing else is converted. Values that are not finite are refused.
"""

from __future__ import annotations

import ast
import io
import math
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moebook.errors import nearest, refuse

Scalar = bool | int | float | str
TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}

_NUMBER = r"([-+]?(?:inf|(?:\d[\d_]*)?\.?\d+(?:[eE][-+]?\d+)?))"
_RANGE = re.compile(rf"([\[(])\s*{_NUMBER}\s*,\s*{_NUMBER}\s*([\])])\s*$")
_CHOICES = re.compile(r"\{([^{}]+)\}\s*$")


@dataclass(frozen=True)
class Parameter:
    """One declared parameter; `check` says whether a value may take its place.

    Args:
        name: A Python identifier.
        type: int, float, bool or str.
        default: Its value when nobody sets it.
        help: The comment without the rule.
        rule: The rule as written, such as ``(0, 1]`` or ``{a, b}``; empty for none.
    """

    name: str
    type: type
    default: Scalar
    help: str = ""
    rule: str = ""

    def check(self, value: object, where: str) -> None:
        """Refuse a value of the wrong type or outside the rule.

        Args:
            value: What was given.
            where: Where it was given, for the message.

        Raises:
            Refusal: ``E-TYPE`` or ``E-RANGE``, with name, value and rule.
        """
        shown = repr(value)[:80]
        if not self._fits(value):
            refuse("E-TYPE", f"{where}: {self.name} = {shown}: {self._expected(value)}")
        if isinstance(value, str) and value.encode("utf-8", "ignore").decode() != value:
            refuse("E-TYPE", f"{where}: {self.name} = {shown}: expected text in UTF-8")
        if (isinstance(value, float) and not math.isfinite(value)) or not self._allows(value):
            note = f" ({self.help})" if self.help else ""
            refuse("E-RANGE", f"{where}: {self.name} = {shown}: {self._permitted(value)}{note}")

    def read(self, text: str, where: str) -> Scalar:
        """Turn the text of ``-p name=text`` into a checked value of this parameter's type."""
        value: Scalar = text
        if self.type is bool:
            value = {"true": True, "false": False}.get(text.lower(), text)
        elif self.type is not str:
            value = _number(text, self.type)
        self.check(value, where)
        return value

    def _fits(self, value: object) -> bool:
        """Say whether the type is right: a bool is no int, but an int is a float."""
        allowed = (int, float) if self.type is float else (self.type,)
        return type(value) in allowed

    def _expected(self, value: object) -> str:
        text = f"expected {self.type.__name__}, found {type(value).__name__}"
        if self.type is float and isinstance(value, str) and "e" in value.lower():
            return f"{text} (YAML reads 1e-5 as text: write 1.0e-5)"
        if self.type is bool and isinstance(value, str) and value.lower() in ("true", "false"):
            return f"{text} (papermill's -p gives text: use -y '{{{self.name}: {value.lower()}}}')"
        return text

    def _permitted(self, value: object) -> str:
        if self.choices:
            return nearest(str(value), map(str, self.choices))
        kind = "finite float" if self.type is float else self.type.__name__
        return f"expected {kind} in {self.rule}" if self.rule else f"expected {kind}"

    def _allows(self, value: object) -> bool:
        if match := _RANGE.fullmatch(self.rule):
            left, low, high, right = match.groups()
            assert isinstance(value, (int, float))
            above = value >= float(low) if left == "[" else value > float(low)
            return above and (value <= float(high) if right == "]" else value < float(high))
        return not self.rule or value in self.choices

    @property
    def choices(self) -> tuple[Scalar, ...]:
        """The values that the rule lists; empty when it is not a list."""
        match = _CHOICES.fullmatch(self.rule)
        texts = [text.strip() for text in match[1].split(",")] if match else []
        return tuple(text if self.type is str else _number(text, self.type) for text in texts)


def parse(source: str, where: str) -> dict[str, Parameter]:
    """Read a parameters cell.

    Args:
        source: Python text of annotated assignments and comments, nothing else.
        where: Names the notebook in a refusal.

    Returns:
        Name to `Parameter`, in the order of the cell.

    Raises:
        Refusal: ``E-NOTEBOOK`` for a cell that does not follow the grammar of this module,
            ``E-TYPE`` or ``E-RANGE`` for a default that breaks its own rule.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        refuse("E-NOTEBOOK", f"{where}, parameters cell, line {error.lineno}: {error.msg}")
    comments = _comments(source)
    declared: dict[str, Parameter] = {}
    for statement in statements:
        place = f"{where}, parameters cell, line {statement.lineno}"
        parameter = _declaration(statement, comments, place)
        if parameter.name in declared:
            refuse("E-NOTEBOOK", f"{place}: {parameter.name} is declared twice")
        parameter.check(parameter.default, place)
        declared[parameter.name] = parameter
    return declared


def listed(name: str, text: str, known: Iterable[str]) -> list[str]:
    """Split a parameter that lists names, with commas and without spaces; empty for none.

    Args:
        name: The parameter.
        text: Its value.
        known: The names that it may list, each once.

    Raises:
        Refusal: ``E-RANGE`` for a name that is unknown or stands twice.
    """
    names, choices = [part for part in text.split(",") if part], list(known)
    for place, one in enumerate(names):
        if one not in choices:
            refuse("E-RANGE", f"{name} lists '{one}': {nearest(one, choices)}")
        if one in names[:place]:
            refuse("E-RANGE", f"{name} lists '{one}' twice")
    return names


def _declaration(statement: ast.stmt, comments: Mapping[int, str], place: str) -> Parameter:
    if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
        refuse("E-NOTEBOOK", f"{place}: expected name: type = default  # help, unit, range")
    name, annotation = statement.target.id, ast.unparse(statement.annotation)
    if annotation not in TYPES:
        refuse("E-NOTEBOOK", f"{place}: type of {name}: {nearest(annotation, TYPES)}")
    kind, default = TYPES[annotation], literal(statement.value, f"{place}: default of {name}")
    text = comments.get(statement.end_lineno or statement.lineno, "")
    match = _CHOICES.search(text) or _RANGE.search(text)
    if match is None and text.endswith(("]", "}")):
        refuse(
            "E-NOTEBOOK", f"{place}: cannot read the rule that ends '{text}'; see [1, 64], {{a}}"
        )
    if match is not None and not _sensible(match, kind):
        refuse("E-NOTEBOOK", f"{place}: rule {match[0]} does not suit type {annotation}")
    rule = match[0].strip() if match else ""
    return Parameter(
        name, kind, default, text[: match.start() if match else None].strip(" ,"), rule
    )


def _sensible(match: re.Match[str], kind: type) -> bool:
    """Say whether a rule can apply: ranges to numbers, choices to all but bool."""
    if match.re is _RANGE:
        return kind in (int, float) and float(match[2]) <= float(match[3])
    texts = [text.strip() for text in match[1].split(",")]
    return kind is str or (kind is not bool and all(type(_number(t, kind)) is kind for t in texts))


def literal(node: ast.expr | None, where: str) -> Scalar:
    """Return the JSON scalar that an expression spells out; refuse one that must be computed."""
    try:
        value = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, (bool, int, float, str)):
        refuse("E-TYPE", f"{where} must be a plain int, float, bool or str")
    return value


def check(declared: Mapping[str, Parameter], values: Mapping[str, object], where: str) -> None:
    """Refuse values whose name is not declared, or that break their parameter's type or rule.

    Raises:
        Refusal: ``E-PARAMETER``, ``E-TYPE`` or ``E-RANGE``.
    """
    for name, value in values.items():
        find(declared, name, where).check(value, where)


def find(declared: Mapping[str, Parameter], name: object, where: str) -> Parameter:
    """Return the declared parameter of that name, or refuse with the nearest one."""
    if not isinstance(name, str) or name not in declared:
        refuse(
            "E-PARAMETER", f"{where}: unknown parameter {name!r}; {nearest(str(name), declared)}"
        )
    return declared[name]


def read_options(declared: Mapping[str, Parameter], texts: Iterable[str]) -> dict[str, Scalar]:
    """Turn the command line's ``name=value`` texts into checked values.

    Raises:
        Refusal: ``E-USAGE`` for a text without ``=`` or a name given twice, else as `check`.
    """
    values: dict[str, Scalar] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            refuse("E-USAGE", f"-p {text}: expected name=value, as in -p top_k=1")
        parameter = find(declared, name.strip(), "-p")
        if parameter.name in values:
            refuse("E-USAGE", f"-p {parameter.name} is given twice")
        values[parameter.name] = parameter.read(value.strip(), "-p")
    return values


def _number(text: str, kind: type) -> Scalar:
    """Read a number in Python's notation; text that is none comes back as it is."""
    try:
        number: Scalar = kind(text)
    except ValueError:
        return text
    return number


def _comments(source: str) -> dict[int, str]:
    """Map line numbers to the text of the comment that ends them."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokens
        if token.type == tokenize.COMMENT
    }
