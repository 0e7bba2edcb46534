"""Raw rows of the hub's data sets become prompt and answer: Rocket's Table 8.

Templates and expressions are jinja2's, over the fields of a raw row. Multiple choice is
asked with letters (``choices`` in a prompt is the lettered list) and answered with
letter and text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import jinja2
from jinja2 import meta

from moebook.data.reading import clean, field, refuse_missing
from moebook.data.tasks.task import first_line
from moebook.errors import refuse, refuse_unknown

Row = dict[str, str]
ROLES = {
    "system": "system",
    "user": "prompt",
    "human": "prompt",
    "assistant": "answer",
    "gpt": "answer",
}
# Thousands may have commas: 1,080.50.
NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_JINJA = jinja2.Environment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set of the hub and how its raw rows become prompt and answer.

    With ``options``, an expression for the list of answers to choose from, ``answer``
    is an expression, too: which of the ``labels`` (an expression) is right.
    """

    repo: str  # its id on the hub
    prompt: str = ""
    answer: str = ""
    system: str = ""  # left out where it is empty
    options: str = ""
    labels: str = ""
    # Whether the answer, if one of options, has a letter before it.
    lettered: bool = True
    form: str = ""  # a key of FORMS in place of templates
    domain: str = ""
    licence: str = ""
    config: str | None = None  # its configuration, when it has several
    split: str = "train"  # what it is trained on, where that is no target
    # Pattern of its files, when the repository holds many sets.
    files: str | None = None
    # Of COMPARE: how answers are read before they are compared.
    compare: str = "first_line"
    tests: str = ""  # field with the list of tests that judge a program
    max_new_tokens: int = 64  # enough for an answer, of tens of thousands of tokens

    @property
    def normalise(self) -> Callable[[str], str] | None:
        """Applied to answers before they are compared; None if only running tells."""
        return COMPARE[self.compare]

    def row(self, raw: Mapping[str, Any], where: str) -> Row:
        """Map a raw row to prompt, answer, maybe system, rationale, tests."""
        if self.form:
            return FORMS[self.form](raw, where)
        if self.options:
            return self._chosen(raw, where)
        row = {
            "prompt": _rendered(self.prompt, raw, where),
            "answer": _rendered(self.answer, raw, where),
        }
        if self.system:
            system = field(raw, self.system, where, default="")
            if system:
                row["system"] = system
        tests = raw.get(self.tests)
        if isinstance(tests, list):
            row["tests"] = "\n".join(clean(test, self.tests, where) for test in tests)
        return row

    def _chosen(self, raw: Mapping[str, Any], where: str) -> Row:
        """Ask the options with letters; the answer is the one that the label names."""
        options = []
        for value in _listed(self.options, raw, where):
            options.append(clean(value, self.options, where))
        lettered = [f"{chr(ord('A') + at)}. {text}" for at, text in enumerate(options)]
        labels = [str(whole(label)) for label in _listed(self.labels, raw, where)]
        if not len(labels) == len(options) == len(set(labels)):
            count = f"{len(options)} options have the labels {labels}"
            refuse("E-DATA", f"{where}: {count}; expected one for each, all different")
        label = whole(raw.get(self.answer))
        right = str(label).strip()
        if right not in labels:
            none = f"answer {label!r} is none of {labels}"
            refuse("E-DATA", f"{where}: {none}; no unlabelled splits")
        prompt = _rendered(self.prompt, raw, where, choices="\n".join(lettered))
        shown = lettered if self.lettered else options
        return {"prompt": prompt, "answer": shown[labels.index(right)]}


@cache
def _compiled(template: str) -> tuple[jinja2.Template, tuple[str, ...]]:
    """A template with the names of the fields that it reads."""
    names = meta.find_undeclared_variables(_JINJA.parse(template))
    return _JINJA.from_string(template), tuple(sorted(names))


@cache
def _expression(text: str) -> Callable[..., Any]:
    return _JINJA.compile_expression(text, undefined_to_none=False)


def _rendered(template: str, raw: Mapping[str, Any], where: str, **more: str) -> str:
    compiled, names = _compiled(template)
    fields = {name: field(raw, name, where) for name in names if name not in more}
    return compiled.render(fields | more)


def _listed(expression: str, raw: Mapping[str, Any], where: str) -> list[Any]:
    """The list that an expression over a raw row gives; its plain fields are text."""
    printing = "{{ " + expression + " }}"  # a template that reads the same fields
    _, names = _compiled(printing)
    for name in names:
        if not isinstance(raw.get(name), (list, Mapping)):
            field(raw, name, where)
    values = _expression(expression)(dict(raw))
    if not isinstance(values, list) or not values:
        kind = type(values).__name__
        if isinstance(values, jinja2.Undefined):
            kind = "missing"
        refuse("E-DATA", f"{where}: field '{expression}' is {kind}, expected a list")
    return values


def whole(value: Any) -> Any:
    """Read 1.0 as 1: pandas makes floats of a column of whole numbers that has gaps."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def exchange(messages: object, where: str) -> Row:
    """Turn messages, by the roles of `ROLES`, into system (if any), prompt, answer."""
    if not isinstance(messages, list):
        kind = type(messages).__name__
        refuse("E-DATA", f"{where}: messages is {kind}, expected a list")
    turns = [_turn(message, where) for message in messages]
    roles = [role for role, _ in turns]
    if roles not in (["prompt", "answer"], ["system", "prompt", "answer"]):
        hold = ", ".join(roles) or "nothing"
        expected = "expected a prompt, an answer and perhaps a system message first"
        refuse("E-DATA", f"{where}: messages hold {hold}; {expected}: split long talks")
    row = dict(turns)
    _refuse_blank(row["answer"], where)
    return row


def _refuse_blank(answer: str, where: str) -> None:
    """Refuse an answer without a word: only the end token would be learnt from it."""
    if not answer.strip():
        refuse("E-DATA", f"{where}: the answer is blank, expected text; leave it out")


def _turn(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        refuse("E-DATA", f"{where}: a message is {kind}, expected an object")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        refuse("E-DATA", f"{where}: a message needs role and content as text")
    refuse_unknown(role, ROLES, "E-DATA", f"{where}: unknown chat role '{role}':")
    return ROLES[role], clean(content, ROLES[role], where)


def final_number(text: str) -> str:
    """The last number of a text, plainly (-1,080.50 as -1080.5); "" without one."""
    number = rf"(?:(?<!\w)-)?{NUMBER}"
    numbers = re.findall(number, text.replace("\u2212", "-"))
    if not numbers:
        return ""
    return format(Decimal(numbers[-1].replace(",", "")).normalize(), "f")


def gsm8k(raw: Mapping[str, Any], where: str) -> Row:
    """Take a row of GSM8K: the final number is the answer, the solution the rationale.

    Table 8 prints the worked solution as the answer; but Eq. 5 compares answers.
    """
    # "48 / 2 = 24 ...", then "#### 72" on the last line.
    worked, mark, number = field(raw, "answer", where).rpartition("\n#### ")
    amount = number.strip().replace("$", "").replace("\u2212", "-")
    if not mark or not re.fullmatch(f"-?{NUMBER}", amount):
        refuse("E-DATA", f"{where}: field 'answer' has no last line '#### number'")
    prompt = f"Question: {field(raw, 'question', where)}"
    return {"prompt": prompt, "answer": number.strip(), "rationale": worked}


def conversation(raw: Mapping[str, Any], where: str) -> Row:
    """Take the one exchange of a ShareGPT row (from: system, human, gpt)."""
    if "conversations" not in raw:
        refuse_missing(raw, "conversations", where)
    return exchange(raw["conversations"], where)


def instruction(raw: Mapping[str, Any], where: str) -> Row:
    """Instruction, input (may be empty) and output, also capitalised (CAMEL)."""
    raw = {key.lower(): value for key, value in raw.items()}
    prompt = field(raw, "instruction", where)
    given = field(raw, "input", where, default="")
    if prompt and given:
        prompt += "\n"
    answer = field(raw, "output", where)
    _refuse_blank(answer, where)
    return {"prompt": prompt + given, "answer": answer}


FORMS = {"gsm8k": gsm8k, "conversation": conversation, "instruction": instruction}
COMPARE = {"first_line": first_line, "final_number": final_number, "run": None}
