"""Calls of evaluation that are right, and plain loops that they must agree with."""

import math
from collections import Counter
from functools import cache
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch

from moebook import evaluation
from moebook.data.tasks import KNOWN
from moebook.evaluation import code, judge
from moebook.evaluation.model import InMemory
from tests import tokens
from tests.faults.healthy import hosts
from tests.faults.hostile import Row, must


def host():
    """A host that the tokenizer fits."""
    return hosts.host(vocab_size=300, max_position_embeddings=128)


def spoilt():
    """A model of NaN."""
    model = host()
    model.lm_head.weight.data.fill_(torch.nan)
    return model


def lm(model, batch=4):
    return InMemory(model, tokens.byte_tokenizer(), batch)


def true_answer(model, contexts, limits, batch):
    """Token after token, one context at a time, without a cache."""
    tokenizer = tokens.byte_tokenizer()
    texts = []
    for ids, (most, stops) in zip(contexts, limits, strict=True):
        taken = []
        if (
            not ids
            or not {*ids} <= {*range(300)}
            or most < 1
            or most != int(most)
            or batch < 1
        ):
            raise ValueError("context")
        while len(taken) < most and most < 1000:
            logits = model(input_ids=torch.tensor([[*ids, *taken]])).logits[0, -1]
            if not logits.isfinite().all():
                raise ValueError("NaN")
            taken.append(int(logits.argmax()))
            if taken[-1] == tokenizer.eos_token_id:
                break
        text = tokenizer.decode(taken, skip_special_tokens=True)
        if stops:
            raise ValueError("stops")
        texts.append(text)
    return texts


def true_score(model, pairs, batch):
    scores = []
    for before, after in pairs:
        known = {*before, *after} <= {*range(300)}
        if not before or not after or not known or batch < 1:
            raise ValueError("pair")
        logs = (
            model(input_ids=torch.tensor([[*before, *after]]))
            .logits[0]
            .double()
            .log_softmax(-1)
        )
        if not logs.isfinite().all():
            raise ValueError("NaN")
        places = range(len(before) - 1, len(before) + len(after) - 1)
        total = sum(
            float(logs[n, token]) for n, token in zip(places, after, strict=True)
        )
        greedy = all(
            int(logs[n].argmax()) == t for n, t in zip(places, after, strict=True)
        )
        scores.append((total, greedy))
    return scores


def evaluate(model, tasks, limit, **how):
    return evaluation.evaluate(
        model, tokens.byte_tokenizer(), tasks, limit=limit, **how
    )


@cache
def _table():
    return evaluate(host(), ["gcd", "sums"], 3)


def table():
    """What was evaluated of two tasks, with some right answers."""
    return _table().assign(correct=[1, 0, 1, 0, 0, 1])


def true_by_benchmark(table, domains):
    lines = checked(table)
    names = list(dict.fromkeys(line.task for line in lines))
    if not all(isinstance(domain, str) for domain in domains.values()):
        raise ValueError("domains")
    found = table.assign(benchmark=[line.task for line in lines])
    found["domain"] = [domains.get(line.task, line.domain) for line in lines]
    size = Counter(line.task for line in lines)
    found["weight"] = [len(lines) / len(names) / size[line.task] for line in lines]
    found["score"] = [
        line.correct * w for line, w in zip(lines, found.weight, strict=True)
    ]
    inside = {}
    for line, domain in zip(lines, found.domain, strict=True):
        inside.setdefault(domain, set()).add(line.task)
    count = {domain: sum(d == domain for d in found.domain) for domain in inside}
    found["domain_score"] = [
        line.correct * count[d] / len(inside[d]) / size[line.task]
        for line, d in zip(lines, found.domain, strict=True)
    ]
    return found


def checked(table):
    """The lines of a table, or an error where they are none."""
    lines = list(table.itertuples())
    if not lines or not all(math.isfinite(line.correct) for line in lines):
        raise ValueError("correct")
    if not all(isinstance(line.task, str) and 0 <= line.correct <= 1 for line in lines):
        raise ValueError("correct")
    return lines


def true_summary(table, base):
    lines = checked(table)
    by_name = {}
    for name in dict.fromkeys(line.asked for line in lines):
        mine = [line for line in lines if line.asked == name]
        right = np.array([m.correct for m in mine])
        plain = np.array([m.unnormalised for m in mine])
        error = right.std(ddof=1) / math.sqrt(len(right)) if len(right) > 1 else np.nan
        chance = np.mean([m.chance for m in mine])
        by_name[name] = [plain.mean(), right.mean(), error, chance, len(mine), np.nan]
    names = [
        "accuracy",
        "normalised",
        "its standard error",
        "chance",
        "rows",
        "published",
    ]
    return pd.DataFrame.from_dict(by_name, orient="index", columns=names)


@cache
def _arms():
    one = evaluation.by_benchmark(table())
    return {
        "one": one,
        "other": one.assign(score=one.score[::-1].to_numpy(), nll=one.nll + 1),
    }


def arms():
    """Two arms over the same items."""
    return dict(_arms())


def true_paired(tables, pairs, columns):
    factors = {"score": 100.0, "nll": 1.0}
    means = {}
    for one, other in pairs:
        for column in columns:
            if one in tables and other in tables:
                items = [
                    list(zip(tables[n].task, tables[n].item, strict=True))
                    for n in (one, other)
                ]
                if items[0] != items[1]:
                    raise ValueError("items")
                gaps = [
                    factors[column] * (x - y)
                    for x, y in zip(
                        tables[one][column], tables[other][column], strict=True
                    )
                ]
                gaps = [gap for gap in gaps if column == "score" or not math.isnan(gap)]
                if not np.isfinite(gaps).all():
                    raise ValueError("NaN")
                means[one, other, column] = sum(gaps) / len(gaps)
    return list(means.values())


def true_pass_at(k, samples, passed):
    """By the share of all draws of k that hold none that passes."""
    if not 1 <= k <= samples <= 100 or not 0 <= passed <= samples:
        raise ValueError("k")
    draws = list(combinations(range(samples), k))
    return 1 - sum(all(n >= passed for n in draw) for draw in draws) / len(draws)


def generous():
    """A judge that gives every answer all points."""
    return SimpleNamespace(scores=lambda kind, rows: [1.0] * len(rows))


def graded():
    return table().assign(grade=[1.0, 0.5, 0.5, 0.0, 0.25, 1.0])


def true_agreement(table):
    lines = {}
    for name in dict.fromkeys(table.task):
        part = [line for line in checked(table) if line.task == name]
        if not all(0 <= line.grade <= 1 for line in part):
            raise ValueError("grades")
        right = [line.grade for line in part if line.correct == 1]
        wrong = [line.grade for line in part if line.correct == 0]
        if len(right) + len(wrong) < len(part):
            raise ValueError("correct")
        pairs = [(r > w) + (r == w) / 2 for r, w in product(right, wrong)]
        area = sum(pairs) / len(pairs) if pairs else np.nan
        correct = np.mean([line.correct for line in part])
        grade = np.mean([line.grade for line in part])
        lines[name] = [len(part), correct, grade, area]
    return pd.DataFrame.from_dict(lines, orient="index")


CONTEXTS = [[0, 40, 50, 60], [0, 70]]
ROWS = {
    "evaluation.model.InMemory": Row(
        lambda model, contexts, limits, batch: lm(model, batch).answer(
            contexts, limits
        ),
        lambda: {
            "model": host(),
            "contexts": CONTEXTS,
            "limits": [(3, ()), (2, ())],
            "batch": 4,
        },
        true_answer,
        more={"model": {"nan": spoilt()}},
        own={"limits[0]": "empty | short | long"},
    ),
    "evaluation.model.InMemory that scores": Row(
        lambda model, pairs, batch: lm(model, batch).score(pairs),
        lambda: {
            "model": host(),
            "pairs": [([0, 40, 50], [60, 1]), ([0, 70], [5])],
            "batch": 4,
        },
        true_score,
        more={"model": {"nan": spoilt()}},
        own={"pairs[0]": "empty | short | long"},
    ),
    "evaluation.evaluate": Row(
        evaluate,
        lambda: {
            "model": host(),
            "tasks": ["gcd"],
            "limit": 2,
            "split": "test",
            "format": "camel",
            "batch_size": 4,
            "data": "",
        },
        fine={"limit": "huge", "batch_size": "huge", "data": "empty"},
        more={"model": {"nan": spoilt()}},
        settings=("tasks",),
    ),
    "evaluation.by_benchmark": Row(
        evaluation.by_benchmark,
        lambda: {"table": table(), "domains": {"gcd": "numbers"}},
        true_by_benchmark,
    ),
    "evaluation.summary": Row(
        evaluation.summary, lambda: {"table": table(), "base": "no such"}, true_summary
    ),
    "evaluation.load": Row(
        lambda names, data: sorted(evaluation.load(names, data)),
        lambda: {"names": ["gcd", "sums"], "data": ""},
        lambda names, data: must({*names} <= {*KNOWN}) and [],
        # An unknown name is looked for in all of lm-eval's: seconds.
        settings=("names", "data"),
        more={"data": {"nul": "a\0b", "long": "x" * 5000, "missing": "no such"}},
        several=("names",),
    ),
    "evaluation.paired": Row(
        lambda tables, pairs, columns: evaluation.paired(tables, pairs, columns)[
            "difference"
        ],
        lambda: {
            "tables": arms(),
            "pairs": [("one", "other")],
            "columns": ["score", "nll"],
        },
        lambda tables, pairs, columns: np.array(true_paired(tables, pairs, columns)),
        own={"pairs[0]": "empty | short | long"},
        several=("pairs", "columns"),
    ),
    "evaluation.code.pass_at": Row(
        code.pass_at, lambda: {"k": 2, "samples": 5, "passed": 3}, true_pass_at
    ),
    "evaluation.judge.graded": Row(
        judge.graded,
        lambda: {
            "judge": generous(),
            "table": pd.DataFrame(
                {
                    "task": ["sums_fr", "numbers_fr"],
                    "answer": [
                        KNOWN[name].rows("test", 1)[0]["answer"]
                        for name in ("sums_fr", "numbers_fr")
                    ],
                    "output": ["deux", "trois"],
                }
            ),
        },
        lambda judge, table: table.assign(grade=1.0),
        settings=("judge",),
    ),
    "evaluation.judge.agreement": Row(
        judge.agreement, lambda: {"table": graded()}, true_agreement
    ),
}
