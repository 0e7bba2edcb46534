"""A model in memory: likelihoods and greedy answers, in batches sorted by length."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from numbers import Integral
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moebook.data import IGNORED, encode, padded
from moebook.errors import refuse, shown
from moebook.kernels.bank_scoring import token_nats
from moebook.kernels.dispatch import natural
from moebook.models.conventions import check, end_tokens, keeps_cache, reads_prompt
from moebook.nn import plain
from moebook.nn.batch import longest, vocabulary
from moebook.runtime import progress
from moebook.settings import SIZE

Pair = tuple[list[int], list[int]]  # a context, and what follows it
Limit = tuple[int, tuple[str, ...]]  # most new tokens of an answer, strings that end it
Drawn = tuple[float, Sequence[Random]]  # temperature above 0, a generator a context


class InMemory:
    """Any causal language model in evaluation mode, wrapped or not, and its tokenizer.

    One that keeps no cache for rows of several lengths (Mamba, RWKV, RecurrentGemma,
    BLOOM) reads all tokens again for each that it writes, which is slow; what is not
    causal is refused.

    Ours, not lm-eval's own HFLM, whose generation took 2.2 times as long on 200 embedded
    items on a CPU (ended rows stay in its batches). ``batch`` is B, sequences a forward
    pass.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, batch: int) -> None:
        super().__init__()
        natural("InMemory", "batch", batch)
        if tokenizer.eos_token_id is None:
            missing = "the tokenizer has no end-of-sequence token"
            refuse("E-DATA", f"{missing}; set tokenizer.eos_token")
        self.model = model
        self.tokenizer = tokenizer
        self.batch = batch
        self._device = next(model.parameters()).device
        self.longest = longest(model)
        self.ends = end_tokens(model, tokenizer)
        self._closing = _closing_tokens(tokenizer)
        check(model)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters lie."""
        return self._device

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
        """Tokenize as the tokenizer does, without a second beginning and an end."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        ids = list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))
        return ids[: len(ids) - self._closing] if add_special_tokens else ids

    def pairs(self, rows: Sequence[Mapping[str, str]], format: str) -> list[Pair]:
        """Tokenize rows as for training; what follows a context has the end token."""
        encoded = encode(rows, self.tokenizer, format=format, max_length=sys.maxsize)
        pairs = []
        for line in encoded:
            ids = line["input_ids"]
            border = line["labels"].count(IGNORED)
            pairs.append((ids[:border], ids[border:]))
        return pairs

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return the log-probability of what follows each context; is it the greedy?

        What follows must have a token: the likelihood of none is 1, more than any
        answer's.
        """
        for before, scored in pairs:
            if not scored:
                text = self.tokenizer.decode(before[-20:])
                refuse(
                    "E-DATA",
                    f"an answer behind {text!r} has no token; expected one to score",
                )
        pairs = self._fitting(pairs)
        lengths = [len(before) + len(scored) for before, scored in pairs]
        by_length = sorted(range(len(pairs)), key=lengths.__getitem__)
        scores: dict[int, tuple[float, bool]] = {}
        with plain(self.model):
            for rows in self._batches([by_length], "likelihood"):
                batch = self._score([pairs[row] for row in rows])
                scores.update(zip(rows, batch, strict=True))
        return [scores[row] for row in range(len(pairs))]

    def answer(
        self,
        contexts: Sequence[list[int]],
        limits: Sequence[Limit],
        drawn: Drawn | None = None,
    ) -> list[str]:
        """Continue each context up to an end token, a stop string or the limit.

        Where the model's length comes before the limit, the answer ends there. A context
        is cut only where the model cannot read it whole; then it leaves room for the
        limit, as with lm-eval. Tokens are the likeliest, or ``drawn``, each context's by
        its own generator: what shares a batch changes nothing but roundings.
        """
        pairs: list[Pair] = [(ids, []) for ids in contexts]
        return [text for text, _ in self._answered(pairs, limits, drawn)]

    def examine(
        self, pairs: Sequence[Pair], limits: Sequence[Limit]
    ) -> list[tuple[str, float]]:
        """Return what `answer` and `score` give, reading a context once if possible."""
        if reads_prompt(self.model) or not keeps_cache(self.model):
            pairs = self._fitting(pairs)
            texts = self.answer([before for before, _ in pairs], limits)
            values = [value for value, _ in self.score(pairs)]
            return list(zip(texts, values, strict=True))
        return self._answered(pairs, limits)

    def _answered(
        self, pairs: Sequence[Pair], limits: Sequence[Limit], drawn: Drawn | None = None
    ) -> list[tuple[str, float]]:
        """Return each row's answer, and the log-probability of what was to follow."""
        if len(limits) != len(pairs):
            counts = f"{len(pairs)} contexts have {len(limits)} limits"
            refuse("E-SHAPE", f"{counts}, expected as many")
        for most, _ in limits:
            natural("answer", "limit", most, SIZE, "new tokens")
        pairs = self._fitting(pairs, [most for most, _ in limits])
        write = self._continued if keeps_cache(self.model) else self._rereading
        # Rows of a batch have the same limit, and about as many tokens.
        lengths = [len(before) for before, _ in pairs]
        order = sorted(range(len(pairs)), key=lambda row: (limits[row], lengths[row]))
        groups = [list(group) for _, group in groupby(order, key=limits.__getitem__)]
        answers: dict[int, tuple[str, float]] = {}
        with plain(self.model):
            for rows in self._batches(groups, "generation"):
                most, stops = limits[rows[0]]
                batch = [pairs[row] for row in rows]
                mosts = [min(most, self._left(before)) for before, _ in batch]
                written = write(batch, mosts, stops, _of_rows(drawn, rows))
                answers.update(zip(rows, written, strict=True))
        return [answers[row] for row in range(len(pairs))]

    @torch.no_grad()
    def _score(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        ids, mask = self._padded(
            [before + scored for before, scored in pairs], left=False
        )
        # Logits are needed from the last token of the shortest context on.
        first = min(len(before) for before, _ in pairs) - 1
        targets = ids[:, first + 1 :]  # [B, places]
        inputs = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]}
        if reads_prompt(self.model):
            inputs["labels"] = _behind_prompts(ids[:, first:-1], pairs, first)
        # As in `Batches.collate`.
        places = torch.arange(first, ids.shape[1] - 1, device=ids.device)
        logits = self.model(**inputs, logits_to_keep=places, use_cache=False).logits
        log_probabilities = _numbers(-token_nats(logits, targets))  # [B, places]
        hits = logits.argmax(-1) == targets
        scores = []
        for line, (before, scored) in enumerate(pairs):
            start = len(before) - 1 - first
            answer = slice(start, start + len(scored))
            total = log_probabilities[line, answer].double().sum().item()
            scores.append((total, bool(hits[line, answer].all())))
        return scores

    @torch.no_grad()
    def _continued(
        self,
        pairs: list[Pair],
        mosts: list[int],
        stops: tuple[str, ...],
        drawn: Drawn | None,
    ) -> list[tuple[str, float]]:
        """Take a token again and again; rows that have ended leave the batch."""
        ids, mask, positions = self._placed([before for before, _ in pairs])
        # Logits are needed of the last place alone.
        last = torch.tensor([-1], device=ids.device)
        cache = None
        going = list(range(len(pairs)))  # rows that have not ended
        taken: list[list[int]] = [[] for _ in pairs]
        scores: list[float] = []
        for _ in range(max(mosts)):
            if mask.shape[1] > self.longest:
                # The longest have ended. Some models (GPT-Neo) take no more columns than
                # positions, not even of padding: the others are read anew, without it.
                read = [pairs[row][0] + taken[row] for row in going]
                ids, mask, positions = self._placed(read)
                cache = None
            inputs = {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": positions,
            }
            out = self.model(
                **inputs, past_key_values=cache, use_cache=True, logits_to_keep=last
            )
            if not scores:  # the contexts have been read, and nothing else
                following = [scored for _, scored in pairs]
                scores = self._following(out, mask, positions, following)
            cache = out.past_key_values
            tokens = _next(out.logits[:, -1], going, drawn)  # [rows going]
            for row, token in zip(going, tokens.tolist(), strict=True):
                taken[row].append(token)
            lines = []
            for line, row in enumerate(going):
                if not self._ended(taken[row], mosts[row], stops):
                    lines.append(line)
            if not lines:
                break
            if len(lines) < len(going):
                left = torch.tensor(lines, device=self.device)
                cache.batch_select_indices(left)
                tokens = tokens[left]
                mask = mask[left]
                positions = positions[left]
                going = [going[line] for line in lines]
            ids = tokens[:, None]
            positions = positions[:, -1:] + 1
            mask = F.pad(mask, (0, 1), value=1)
        texts = [self._text(tokens, stops) for tokens in taken]
        return list(zip(texts, scores, strict=True))

    @torch.no_grad()
    def _rereading(
        self,
        pairs: list[Pair],
        mosts: list[int],
        stops: tuple[str, ...],
        drawn: Drawn | None,
    ) -> list[tuple[str, float]]:
        """Take token after token as `_continued`, by a pass over all tokens so far.

        Rows are filled up on the right, where no causal model looks, so they need no
        mask and no positions. What follows the contexts is not scored (NaN).
        """
        taken: list[list[int]] = [[] for _ in pairs]
        going = list(range(len(pairs)))
        for _ in range(max(mosts)):
            read = [(pairs[row][0], taken[row]) for row in going]
            logits = self._last_logits(read)
            tokens = _next(logits, going, drawn)
            for row, token in zip(going, tokens.tolist(), strict=True):
                taken[row].append(token)
            left = []
            for row in going:
                if not self._ended(taken[row], mosts[row], stops):
                    left.append(row)
            going = left
            if not going:
                break
        return [(self._text(tokens, stops), math.nan) for tokens in taken]

    def _last_logits(self, rows: list[Pair]) -> Tensor:
        """Return the logits ``[B, V]`` behind each row's last token."""
        ids, mask = self._padded([before + after for before, after in rows], left=False)
        last = mask.sum(1) - 1
        first = int(last.min())
        places = torch.arange(first, ids.shape[1], device=ids.device)
        inputs = {"input_ids": ids, "logits_to_keep": places}
        if reads_prompt(self.model):
            inputs["attention_mask"] = mask
            inputs["labels"] = _behind_prompts(ids[:, first:], rows, first)
        logits = self.model(**inputs, use_cache=False).logits
        return logits[torch.arange(len(rows), device=ids.device), last - first]

    def _following(
        self, out: Any, mask: Tensor, places: Tensor, scored: list[list[int]]
    ) -> list[float]:
        """Log-probability of what follows contexts that were read; leaves the cache."""
        ids, real = self._padded(scored, left=False)  # [B, count]
        count = ids.shape[1]
        logits = out.logits[:, -1:]
        if count > 1:
            after = places[:, -1:] + torch.arange(1, count, device=ids.device)
            # Padding alone may lie behind the last position that the model knows.
            after = after.clamp(max=self.longest - 1)
            rest = self.model(
                input_ids=ids[:, :-1],
                attention_mask=torch.cat([mask, real[:, :-1]], 1),
                position_ids=after,
                past_key_values=deepcopy(out.past_key_values),
                use_cache=True,
            )
            logits = torch.cat([logits, rest.logits], 1)
        targets = ids.masked_fill(real == 0, IGNORED)
        nats = _numbers(token_nats(logits[:, :count], targets))
        return (-nats.double().sum(1)).tolist()

    def _ended(self, tokens: list[int], most: int, stops: tuple[str, ...]) -> bool:
        if len(tokens) >= most or tokens[-1] in self.ends:
            return True
        text = self.tokenizer.decode(tokens) if stops else ""
        return any(stop in text for stop in stops)

    def _left(self, before: list[int]) -> int:
        """Count the tokens that the model can write behind a context; the last is not read."""
        return self.longest + 1 - len(before)

    def _text(self, tokens: list[int], stops: tuple[str, ...]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        ends = [text.find(stop) for stop in stops if stop in text]
        return text[: min(ends, default=len(text))]

    def _placed(self, rows: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Fill rows up on the left; return ids, mask and positions ``[B, T]``."""
        ids, mask = self._padded(rows, left=True)
        return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)

    def _padded(self, rows: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
        ids, mask = padded(rows, self.eot_token_id, left=left)
        return ids.to(self.device), mask.to(self.device)

    def _batches(self, groups: list[list[int]], label: str) -> Iterable[list[int]]:
        batches = []
        for group in groups:
            for start in range(0, len(group), self.batch):
                batches.append(group[start : start + self.batch])
        return progress(batches, label, len(batches))

    def refuse_longer(self, scored: Sequence[int], where: str) -> None:
        """Refuse an answer of more tokens than the model takes (E-RANGE)."""
        if len(scored) > self.longest:
            have = f"{where}: its answer has {len(scored)} tokens"
            takes = f"the model takes {self.longest}"
            refuse("E-RANGE", f"{have}, {takes}; leave it out, or shorten it")

    def _fitting(
        self, pairs: Sequence[Pair], rooms: Sequence[int] | None = None
    ) -> list[Pair]:
        """Cut contexts on the left that the model cannot read whole with what is scored.

        One with nothing to score leaves ``rooms`` tokens to write, once it is cut.
        """
        known = vocabulary(self.model)
        fitting = []
        cut = 0
        for row, (before, scored) in enumerate(pairs):
            _check_tokens([*before, *scored], known)
            if not before:
                missing = "a context has no token"
                refuse("E-DATA", f"{missing}; expected one at least, as the first")
            self.refuse_longer(scored, f"row {row}")
            kept = before
            if max(1, len(scored)) > self._left(before):
                room = rooms[row] if rooms and not scored else len(scored)
                # The last token is not read.
                most = max(1, self.longest + 1 - room)
                kept = before[-most:]
                cut += 1
            fitting.append((kept, scored))
        if cut:
            text = f"{cut} of {len(pairs)} prompts were cut on the left"
            text += f" to fit the model's {self.longest} tokens"
            warnings.warn(f"W-LONG: {text}", stacklevel=3)
        return fitting


def _behind_prompts(ids: Tensor, rows: Sequence[Pair], first: int) -> Tensor:
    """Return tokens from a ``first`` place on as labels, without those of the contexts."""
    labels = ids.clone()
    for line, (before, _) in enumerate(rows):
        labels[line, : len(before) - first] = IGNORED
    return labels


def _closing_tokens(tokenizer: Any) -> int:
    """Count the special tokens that a tokenizer puts behind a text, as BERT's [SEP]."""
    text = tokenizer.encode("a", add_special_tokens=False)
    closed = tokenizer.encode("a", add_special_tokens=True)
    special = len(closed) - len(text)
    for start in range(special + 1):
        if closed[start : start + len(text)] == text:
            return special - start
    return 0


def _numbers(values: Tensor) -> Tensor:
    """Return what was computed; refuse NaN: a model without numbers has no answer."""
    if values.isnan().any():
        why = "its weights are NaN or far too large"
        refuse("E-NONFINITE", f"the model's logits are NaN: {why}")
    return values


def _check_tokens(ids: list[int], known: int) -> None:
    """Refuse token ids that a model does not know."""
    for token in ids:
        is_whole = type(token) is int or (  # asked first, since it is quick
            isinstance(token, Integral) and not isinstance(token, bool)
        )
        if not is_whole or not 0 <= token < known:
            what = f"{shown(token)} is no token, the model knows 0 to {known - 1}"
            refuse("E-VOCAB", f"a context or an answer: {what}: use its own tokenizer")


def _of_rows(drawn: Drawn | None, rows: list[int]) -> Drawn | None:
    """Return the temperature with the generators of some rows alone; None to draw nothing."""
    if drawn is None:
        return None
    temperature, draws = drawn
    return temperature, [draws[row] for row in rows]


def _next(logits: Tensor, rows: list[int], drawn: Drawn | None) -> Tensor:
    """Choose each row's next token ``[B]``, of logits ``[B, V]``: the best, or one that is drawn.

    A number of [0, 1) is drawn, and falls among the tokens' shares, which are laid end to end.
    """
    if drawn is None:
        best = logits.argmax(-1)
        _numbers(logits.gather(-1, best.unsqueeze(-1)))  # NaN is the largest of all
        return best
    temperature, draws = drawn
    shares = _numbers((logits.double() / temperature).softmax(-1).cumsum(-1))  # [B, V]
    points = shares.new_tensor([[draws[row].random()] for row in rows])
    tokens = torch.searchsorted(shares, points)[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)
