"""Phi (Eq. 3): answers expanded by a rationale, taken from the data or written by a chat model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from moebook.data import chat
from moebook.errors import refuse
from moebook.methods.rocket import generation
from moebook.methods.settings import chosen

Row = Mapping[str, str]
MARK = "The answer is "
_TASK = (
    "Read the question and answer. According to the answer, present your thought about the "
    "solution.\n\n- {order}\n- Your explanation should not exceed three sentences.\n\n"
    "Question: {question}\n\nAnswer: {answer}."
)
ORDERS = {
    "answer_first": "Please think step by step and provide the answer first then with its "
    "explanation.",
    "rationale_first": "Please think step by step and provide the explanation first then with the "
    "answer.",
}


def expand(rows: Sequence[Row], *, order: str = "answer_first") -> list[dict[str, str]]:
    """Put each row's own rationale into its answer: Phi for data that carry rationales.

    ``answer_first`` gives two lines, answer and rationale, so that a task which reads the first
    line of an answer still does; ``rationale_first`` gives the rationale and then, on the last
    line, "The answer is ..." (the form of Table 8's example).

    Raises:
        Refusal: E-CHOICE for another order, E-DATA for a row without a rationale.
    """
    chosen("order", order, ORDERS)
    expanded = []
    for number, row in enumerate(rows):
        told = row.get("rationale", "").strip()
        if not told:
            refuse("E-DATA", f"row {number} has no rationale; write them first or score without")
        first = f"{row['answer']}\n{told}"
        last = f"{told}\n{MARK}{row['answer']}"
        expanded.append({**row, "answer": first if order == "answer_first" else last})
    return expanded


def answer(text: str, *, order: str = "answer_first") -> str:
    """Take the answer out of a response of this order: the post-processing f of Eq. 5.

    A response that lacks the mark of ``rationale_first`` is its own answer, so that it can still
    be counted as right or wrong.

    Raises:
        Refusal: E-CHOICE for another order.
    """
    chosen("order", order, ORDERS)
    if order == "rationale_first":
        return text.rpartition(MARK)[2].strip()
    return text.strip().partition("\n")[0].strip()


def write(
    rows: Sequence[Row],
    model: nn.Module,
    tokenizer: Any,
    *,
    order: str = "answer_first",
    limit: int = 200,
) -> list[dict[str, str]]:
    """Have a chat model write the rationale of each row, with the prompt of Fig. 3.

    The second order's instruction is ours: the paper prints only the first, though its example
    (Table 8) is of the second. A tokenizer without a chat template is asked in PESC's form.

    Args:
        rows: With prompt and answer.
        model: Any causal language model tuned to follow instructions (the paper used
            WizardLM2-8x22B).
        tokenizer: Its tokenizer.
        order: What the prompt asks for.
        limit: Most tokens of a rationale.

    Returns:
        The rows with ``rationale``, for `expand`.

    Raises:
        Refusal: E-CHOICE for another order, E-DATA when the model writes nothing for a row.
    """
    chosen("order", order, ORDERS)
    contexts = [_context(row, tokenizer, order) for row in rows]
    texts = generation.greedy(model, tokenizer, contexts, limit=limit)
    for number, text in enumerate(texts):
        if not text.strip():
            refuse("E-DATA", f"row {number}: the model wrote no rationale; take another model")
    return [{**row, "rationale": text.strip()} for row, text in zip(rows, texts, strict=True)]


def _context(row: Row, tokenizer: Any, order: str) -> list[int]:
    asked = _TASK.format(order=ORDERS[order], question=row["prompt"], answer=row["answer"])
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": asked}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))
    form = chat.find("camel")
    ids = tokenizer.encode(form.render(asked, "", "")[0], add_special_tokens=False)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*start, *ids]
