"""Raw rows of the hub's data sets become prompt and answer: the templates of Rocket's Table 8.

Each function maps (raw row, where it stands) to prompt, answer and, where there is one, system or
rationale. Multiple choice is asked with letters and answered with letter and text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from moebook.data import chat, files
from moebook.errors import refuse

Row = dict[str, str]


def pair(prompt: str, answer: str, system: str = "") -> Callable[[Mapping[str, Any], str], Row]:
    """Make the mapping of a data set whose fields are the prompt and the answer themselves."""

    def row(raw: Mapping[str, Any], where: str) -> Row:
        found = {"prompt": files.text(raw, prompt, where), "answer": files.text(raw, answer, where)}
        told = files.text(raw, system, where, default="") if system else ""
        return found | ({"system": told} if told else {})

    return row


def conversation(raw: Mapping[str, Any], where: str) -> Row:
    """Take the one exchange of a ShareGPT row (from: system, human, gpt)."""
    if "conversations" not in raw:
        refuse("E-DATA", f"{where}: field 'conversations' is missing; the row has {', '.join(raw)}")
    return chat.exchange(raw["conversations"], where)


def arc(raw: Mapping[str, Any], where: str) -> Row:
    """AI2 reasoning challenge; choices numbered 1 to 4 are lettered."""
    question, answer = _choices(raw, where)
    return {"prompt": f"Question: {question}\nAnswer:", "answer": answer}


def commonsense_qa(raw: Mapping[str, Any], where: str) -> Row:
    """CommonsenseQA: question and five choices, nothing around them."""
    question, answer = _choices(raw, where)
    return {"prompt": question, "answer": answer}


def siqa(raw: Mapping[str, Any], where: str) -> Row:
    """Social IQa: a context, a question and three choices; labels are 1 to 3."""
    texts = [files.text(raw, f"answer{letter}", where) for letter in "ABC"]
    label = files.text(raw, "label", where).strip()
    context, question = (files.text(raw, name, where) for name in ("context", "question"))
    answer = _chosen(texts, label, ["1", "2", "3"], where)
    return {"prompt": f"{context}\n{question}\n{_listed(texts)}", "answer": answer}


def piqa(raw: Mapping[str, Any], where: str) -> Row:
    """PIQA: a goal and two ways to it; the label is 0 or 1."""
    texts = [files.text(raw, name, where) for name in ("sol1", "sol2")]
    goal = files.text(raw, "goal", where)
    answer = _chosen(texts, raw.get("label"), [0, 1], where)
    return {"prompt": f"Question: {goal}\n{_listed(texts)}\nAnswer:", "answer": answer}


def boolq(raw: Mapping[str, Any], where: str) -> Row:
    """BoolQ: a passage and a question to be answered by A. Yes or B. No."""
    answer = raw.get("answer")
    if not isinstance(answer, bool):
        refuse("E-DATA", f"{where}: field 'answer' is {type(answer).__name__}, expected a boolean")
    passage, question = (files.text(raw, name, where) for name in ("passage", "question"))
    prompt = f"{passage}\nQuestion: {question}\n{_listed(['Yes', 'No'])}\nAnswer:"
    return {"prompt": prompt, "answer": "A. Yes" if answer else "B. No"}


def gsm8k(raw: Mapping[str, Any], where: str) -> Row:
    """GSM8K: the final number is the answer, and the worked solution before it the rationale.

    Table 8 prints the worked solution as the answer. Eq. 5 compares answers, and two right
    solutions differ in words; `rationales.expand` joins the two for whoever trains on the solution.
    """
    solution = files.text(raw, "answer", where)
    worked, mark, number = solution.rpartition("\n#### ")
    if not mark or not final_number(number):
        refuse("E-DATA", f"{where}: field 'answer' has no last line '#### number'")
    return {
        "prompt": f"Question: {files.text(raw, 'question', where)}",
        "answer": number.strip(),
        "rationale": worked,
    }


def final_number(text: str) -> str:
    """Return the last number of a text, plainly written (-1,080.50 as -1080.5); "" without one."""
    whole = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
    found = re.findall(rf"(?:(?<!\w)-)?(?:{whole}(?:\.\d+)?|\.\d+)", text.replace("\u2212", "-"))
    return format(Decimal(found[-1].replace(",", "")).normalize(), "f") if found else ""


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


def _choices(raw: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Read question, choices (label and text) and answerKey into question with list, answer."""
    choices = raw.get("choices")
    if not isinstance(choices, Mapping) or not {"label", "text"} <= set(choices):
        refuse("E-DATA", f"{where}: field 'choices' needs label and text")
    texts = [files.clean(str(choice), "choices", where) for choice in choices["text"]]
    key = files.text(raw, "answerKey", where)
    question = f"{files.text(raw, 'question', where)}\n{_listed(texts)}"
    return question, _chosen(texts, key, choices["label"], where)


def _chosen(texts: Sequence[str], label: object, labels: Sequence[object], where: str) -> str:
    """Return the choice that the label names, with its letter."""
    known = list(labels)[: len(texts)]
    if label not in known:
        refuse(
            "E-DATA",
            f"{where}: answer {label!r} is none of {known}; unlabelled splits cannot be used",
        )
    return _lettered(texts, known.index(label))


def _listed(texts: Sequence[str]) -> str:
    return "\n".join(_lettered(texts, index) for index in range(len(texts)))


def _lettered(texts: Sequence[str], index: int) -> str:
    return f"{chr(ord('A') + index)}. {texts[index]}"
