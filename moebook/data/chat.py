"""Chat formats of the papers, as pure functions from one exchange to the text read and learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebook.errors import nearest, refuse

ROLES = {
    "system": "system",
    "user": "prompt",
    "human": "prompt",
    "assistant": "answer",
    "gpt": "answer",
}


@dataclass(frozen=True)
class Format:
    """How one exchange becomes text.

    Args:
        render: Maps (prompt, answer, system) to (text before the answer, answer's text). An empty
            system leaves its block out. Special tokens are not text: see `bos`.
        bos: Whether the beginning-of-sequence token comes first. The end-of-sequence token always
            follows the answer and is learnt with it.
    """

    render: Callable[[str, str, str], tuple[str, str]]
    bos: bool


def camel(prompt: str, answer: str, system: str = "") -> tuple[str, str]:
    """PESC's form: `### Human:`, `### Assistant:`, each on a line of its own."""
    head = f"### System:\n{system}\n" if system else ""
    return f"{head}### Human:\n{prompt}\n### Assistant:\n", answer


def deepseek(prompt: str, answer: str, system: str = "") -> tuple[str, str]:
    """ESFT's form: `User: ...`, an empty line, `Assistant: ...`.

    The space after the colon opens the answer's text, not the prompt's, so that byte-pair
    tokenizers see the answer's first word as they do in running text.
    """
    head = f"{system}\n\n" if system else ""
    return f"{head}User: {prompt}\n\nAssistant:", f" {answer}"


FORMATS = {"camel": Format(camel, bos=True), "deepseek": Format(deepseek, bos=False)}


def find(name: str) -> Format:
    """Look a format up by name; E-DATA with the nearest name when there is none."""
    if name not in FORMATS:
        refuse("E-DATA", f"unknown chat format '{name}': {nearest(name, FORMATS)}")
    return FORMATS[name]


def exchange(messages: object, where: str) -> dict[str, str]:
    """Turn a list of messages into system (where there is one), prompt and answer.

    Args:
        messages: Dictionaries with role and content, or from and value: an optional system
            message, one of the user (or human), one of the assistant (or gpt).
        where: File and line, or data set and row, for the message of a refusal.

    Raises:
        Refusal: E-DATA for an unknown role, a missing or mistyped field, or another order.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        refuse("E-DATA", f"{where}: messages is {type(messages).__name__}, expected a list")
    turns = [_turn(message, where) for message in messages]
    found = [part for part, _ in turns]
    if found not in (["prompt", "answer"], ["system", "prompt", "answer"]):
        roles = ", ".join(found) or "nothing"
        refuse(
            "E-DATA",
            f"{where}: messages hold {roles}; expected at most one system message, "
            "then one prompt and one answer: split longer talks into exchanges",
        )
    return dict(turns)


def _turn(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        refuse("E-DATA", f"{where}: a message is {type(message).__name__}, expected an object")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        refuse("E-DATA", f"{where}: a message needs role and content as text")
    if role not in ROLES:
        refuse("E-DATA", f"{where}: unknown chat role '{role}': {nearest(role, ROLES)}")
    return ROLES[role], content
