"""A model in memory behind lm-eval: likelihoods and greedy answers in batches sorted by length."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn

from moebook.data import padded
from moebook.errors import refuse
from moebook.runtime import progress

Pair = tuple[list[int], list[int]]
PAIR = "token_pair"
"""Key of a document that brings its own token ids: those before the answer, and the answer's."""


class InMemory(TemplateLM):
    """Any causal language model with its tokenizer; the model may be altered or wrapped.

    Not lm-eval's wrapper of transformers models: that one loads models itself, tokenizes what we
    have tokenized as for training, and computes the logits of the whole prompt. A document that
    brings its ids (`PAIR`) is taken as it is; all others are tokenized as lm-eval does.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        tokenizer: Its tokenizer, with an end-of-sequence token.
        batch: B, sequences a forward pass.

    Raises:
        Refusal: ``E-DATA`` for a tokenizer without an end-of-sequence token.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, batch: int) -> None:
        super().__init__()
        if tokenizer.eos_token_id is None:
            refuse("E-DATA", "the tokenizer has no end-of-sequence token; set tokenizer.eos_token")
        self.model, self.tokenizer, self.batch = model, tokenizer, batch
        self._device = next(model.parameters()).device
        config: Any = model.config
        self.longest: int = getattr(config, "max_position_embeddings", None) or sys.maxsize

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokenize as the tokenizer does by itself, without a second beginning token."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def pair(self, doc: Any, context: str, continuation: str) -> Pair:
        """Token ids of a context and of what follows it."""
        if isinstance(doc, dict) and PAIR in doc:
            return doc[PAIR]
        if context:
            before, scored = self._encode_pair(context, continuation)
            return before, scored
        return [self.prefix_token_id], self.tok_encode(continuation, add_special_tokens=False)

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, in nats, and whether greedy decoding gives it."""
        pairs = [self.pair(request.doc, *request.args) for request in requests]
        return self._loglikelihood_tokens([(None, *pair) for pair in pairs])

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        """Log-probability of each whole text, in windows of the model's length."""
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.longest, 1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(nats for nats, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = self._fitting([(before, scored) for _, before, scored in requests], room=0)
        answers: list[Any] = [None] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        for chosen in self._batches([order], "likelihood"):
            for i, answer in zip(chosen, self._score([pairs[i] for i in chosen]), strict=True):
                answers[i] = answer
        return answers

    @torch.no_grad()
    def _score(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        """Sum the log-probabilities of what follows each context."""
        ids, mask = self._padded([before + scored for before, scored in pairs], left=False)
        first = min(len(before) for before, _ in pairs) - 1
        targets = ids[:, first + 1 :]
        logits = self.model(
            input_ids=ids[:, :-1],
            attention_mask=mask[:, :-1],
            logits_to_keep=targets.shape[1],
            use_cache=False,
        ).logits
        nats = -F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        hits = logits.argmax(-1) == targets
        answers = []
        for line, (before, scored) in enumerate(pairs):
            part = slice(len(before) - 1 - first, len(before) - 1 - first + len(scored))
            answers.append((nats[line, part].double().sum().item(), bool(hits[line, part].all())))
        return answers

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        """Continue each context greedily up to the end token, a stop string or the limit."""
        asked = [_limits(request.args[1]) for request in requests]
        contexts = [
            r.doc[PAIR][0] if PAIR in r.doc else self.tok_encode(r.args[0]) for r in requests
        ]
        texts = [""] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: (asked[i], len(contexts[i])))
        groups = [list(group) for _, group in groupby(order, key=lambda i: asked[i])]
        for chosen in self._batches(groups, "generation"):
            limit, stops = asked[chosen[0]]
            rows = self._fitting([(contexts[i], []) for i in chosen], room=limit)
            answers = self._greedy([before for before, _ in rows], limit, stops)
            for i, text in zip(chosen, answers, strict=True):
                texts[i] = text
        return texts

    @torch.no_grad()
    def _greedy(self, contexts: list[list[int]], limit: int, stops: tuple[str, ...]) -> list[str]:
        """Take the likeliest token again and again; rows that have ended leave the batch."""
        ids, mask = self._padded(contexts, left=True)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        going, cache = list(range(len(contexts))), None
        taken: list[list[int]] = [[] for _ in contexts]
        for _ in range(limit):
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, best = out.past_key_values, out.logits[:, -1].argmax(-1)
            for row, token in zip(going, best.tolist(), strict=True):
                taken[row].append(token)
            lines = [n for n, row in enumerate(going) if not self._ended(taken[row], stops)]
            if not lines:
                break
            if len(lines) < len(going):
                kept = torch.tensor(lines, device=self.device)
                cache.batch_select_indices(kept)
                best, mask, places = best[kept], mask[kept], places[kept]
                going = [going[n] for n in lines]
            ids, places, mask = best[:, None], places[:, -1:] + 1, F.pad(mask, (0, 1), value=1)
        return [self._text(tokens, stops) for tokens in taken]

    def _ended(self, tokens: list[int], stops: tuple[str, ...]) -> bool:
        if tokens[-1] == self.eot_token_id:
            return True
        return bool(stops) and any(stop in self.tokenizer.decode(tokens) for stop in stops)

    def _text(self, tokens: list[int], stops: tuple[str, ...]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text[: min([len(text), *(text.find(stop) for stop in stops if stop in text)])]

    def _padded(self, rows: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
        """Ids and mask, ``[B, T]``, filled up with the end token on one side."""
        ids, mask = padded(rows, self.eot_token_id, left=left)
        return ids.to(self.device), mask.to(self.device)

    def _batches(self, groups: list[list[int]], desc: str) -> Iterable[list[int]]:
        chunks = [
            group[at : at + self.batch]
            for group in groups
            for at in range(0, len(group), self.batch)
        ]
        return progress(chunks, desc, len(chunks))

    def _fitting(self, pairs: list[Pair], *, room: int) -> list[Pair]:
        """Cut contexts on the left to what the model can hold, as lm-eval does, and say so.

        Args:
            pairs: Contexts and what is scored after them.
            room: Tokens still to be generated.
        """
        fitting, cut = [], 0
        for before, scored in pairs:
            most = max(1, self.longest + 1 - room - len(scored))  # the last token is not read
            cut += len(before) > most
            fitting.append((before[-most:], scored))
        if cut:
            warnings.warn(
                f"W-LONG: {cut} of {len(pairs)} prompts were cut on the left to fit the model's "
                f"{self.longest} tokens",
                stacklevel=3,
            )
        return fitting


def _limits(asked: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Most new tokens and stop strings of a generation request."""
    until = asked.get("until") or []
    stops = (until,) if isinstance(until, str) else tuple(until)
    return int(asked.get("max_gen_toks") or asked.get("max_new_tokens") or 256), stops
