"""Templates of Table 8 that `data.raw` does not have: raw rows become prompt and answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moebook.data import files
from moebook.errors import refuse

Row = dict[str, str]


def instruction(raw: Mapping[str, Any], where: str) -> Row:
    """Instruction, input (may be empty) and output, in small letters or capitalised (CAMEL)."""
    fields = {key.lower(): value for key, value in raw.items()}
    asked = files.text(fields, "instruction", where)
    context = files.text(fields, "input", where, default="")
    return {
        "prompt": f"{asked}\n{context}" if context else asked,
        "answer": files.text(fields, "output", where),
    }


def winogrande(raw: Mapping[str, Any], where: str) -> Row:
    """WinoGrande: the sentence with either name in its gap; which of the two is a good one."""
    gap, texts = files.text(raw, "sentence", where), []
    for name in ("option1", "option2"):
        texts.append(gap.replace("_", files.text(raw, name, where)))
    answer = _chosen(texts, raw.get("answer"), ["1", "2"], where)
    choices = _listed(texts)
    prompt = f"Which of the following is a good sentence:\n{choices}\nAnswer:"
    return {"prompt": prompt, "answer": answer}


def race(raw: Mapping[str, Any], where: str) -> Row:
    """RACE: an article, a question, four options."""
    texts = _texts(raw, "options", where)
    article, question = (files.text(raw, name, where) for name in ("article", "question"))
    answer = _chosen(texts, raw.get("answer"), ["A", "B", "C", "D"], where)
    return {"prompt": f"{article}\n{question}\n{_listed(texts)}", "answer": answer}


def mathqa(raw: Mapping[str, Any], where: str) -> Row:
    """MathQA: the problem with its options on one line; the rationale is what is answered."""
    problem, options = (files.text(raw, name, where) for name in ("Problem", "options"))
    return {
        "prompt": f"{problem}\n{options}",
        "answer": files.text(raw, "Rationale", where).strip('"'),
    }


def hellaswag(raw: Mapping[str, Any], where: str) -> Row:
    """HellaSwag: a context and four endings; the label is a digit."""
    texts = _texts(raw, "endings", where)
    context = files.text(raw, "ctx", where)
    answer = _chosen(texts, str(raw.get("label")), ["0", "1", "2", "3"], where)
    asked = "Question: Which ending makes the most sense?"
    return {"prompt": f"{context}\n{asked}\n{_listed(texts)}", "answer": answer}


def _texts(raw: Mapping[str, Any], name: str, where: str) -> list[str]:
    found = raw.get(name)
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        refuse("E-DATA", f"{where}: field '{name}' is {type(found).__name__}, expected a list")
    return [files.clean(str(text), name, where) for text in found]


def _chosen(texts: list[str], label: object, labels: list[str], where: str) -> str:
    if label not in labels[: len(texts)]:
        refuse("E-DATA", f"{where}: answer {label!r} is none of {labels[: len(texts)]}")
    return _lettered(texts, labels.index(str(label)))


def _listed(texts: list[str]) -> str:
    return "\n".join(_lettered(texts, place) for place in range(len(texts)))


def _lettered(texts: list[str], place: int) -> str:
    return f"{chr(ord('A') + place)}. {texts[place]}"
