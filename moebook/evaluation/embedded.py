"""The embedded tasks as lm-eval tasks: each item is generated from and scored in one pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task
from lm_eval.config.task import TaskConfig
from lm_eval.filters import build_filter_ensemble

from moebook.data import IGNORED, encode, tasks
from moebook.evaluation.model import PAIR, Pair


class Embedded(Task):
    """One of our tasks: greedy generation for the exact match, likelihood of the gold answer.

    A class and not lm-eval's YAML: a YAML task makes one kind of request, so that accuracy and
    likelihood would need two of them, and reads its rows from files; here both come from one pass
    over rows in memory. Items are tokenized by `data.encode`, exactly as training rows are, end
    token included; the ids travel in the document.

    Args:
        name: Key of `data.tasks.KNOWN`.
        tokenizer: The model's.
        split: train, validation or test.
        size: Items; all of the split when it holds fewer, or for None.
        format: Key of `data.encoding.FORMATS`.
    """

    VERSION = 1

    def __init__(
        self, name: str, tokenizer: Any, *, split: str, size: int | None, format: str
    ) -> None:
        self.source = tasks.find(name)
        available = self.source.available(split)
        rows = tasks.rows(name, split, min(size or available, available))
        encoded = encode(rows, tokenizer, format=format, max_length=sys.maxsize)
        self.docs = [{**row, PAIR: _parted(item)} for row, item in zip(rows, encoded, strict=True)]
        self._instances: list[Instance] | None = None
        self._filters = [build_filter_ensemble("none", [["take_first", None]])]
        self._config = TaskConfig(
            task=name,
            num_fewshot=0,
            generation_kwargs={"until": [], "max_gen_toks": self.source.max_new_tokens},
        )

    def has_training_docs(self) -> bool:
        """No examples are shown."""
        return False

    def has_validation_docs(self) -> bool:
        """The chosen split counts as the test split."""
        return False

    def has_test_docs(self) -> bool:
        """The chosen split."""
        return True

    def test_docs(self) -> list[dict[str, Any]]:
        """The items: rows of `data.tasks` with their token ids."""
        return self.docs

    def doc_to_text(self, doc: dict[str, Any]) -> str:
        """The question, before the chat format."""
        return str(doc["prompt"])

    def doc_to_target(self, doc: dict[str, Any]) -> str:
        """The gold answer."""
        return str(doc["answer"])

    def build_all_requests(
        self, *, limit: int | None = None, rank: int = 0, world_size: int = 1, **_: Any
    ) -> None:
        """Make the requests of all items, without lm-eval's bar, few-shot examples and cache."""
        items = self.doc_iterator(rank=rank, limit=limit, world_size=world_size)
        self._instances = [
            request
            for number, doc in items
            for request in self.construct_requests(
                doc, self.doc_to_text(doc), metadata=(self.task_name, number, 1)
            )
        ]

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kw: Any) -> list[Instance]:
        """Ask for a greedy continuation and for the likelihood of the gold answer."""
        ways = {
            "generate_until": (ctx, self.config.generation_kwargs),
            "loglikelihood": (ctx, self.doc_to_target(doc)),
        }
        return [
            Instance(request_type=way, doc=doc, arguments=arguments, idx=place, **kw)
            for place, (way, arguments) in enumerate(ways.items())
        ]

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
        """Compare after the task's normalisation; turn the likelihood into nats."""
        text, (loglikelihood, _) = results
        same = self.source.normalise(text) == self.source.normalise(doc["answer"])
        return {"exact_match": float(same), "nll_sum": -loglikelihood}

    def aggregation(self) -> dict[str, Callable[..., float]]:
        """Means over the items."""
        return {"exact_match": mean, "nll_sum": mean}

    def higher_is_better(self) -> dict[str, bool]:
        """Accuracy up, nats down."""
        return {"exact_match": True, "nll_sum": False}


def _parted(item: dict[str, list[int]]) -> Pair:
    """Split an encoded row where its labels begin."""
    border = item["labels"].count(IGNORED)
    return item["input_ids"][:border], item["input_ids"][border:]
