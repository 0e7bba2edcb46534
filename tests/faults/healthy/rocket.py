"""Calls of Rocket that are right, and what they must come to."""

import math
from functools import cache
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scipy.optimize import linprog
from scipy.stats import rankdata, spearmanr

from moebook.data import tasks
from moebook.experiments import pipeline
from moebook.experiments import rocket as arms
from moebook.methods import rocket
from moebook.methods.rocket import (
    apply,
    augment,
    bank,
    choose,
    loras,
    measure,
    score,
    shards,
)
from moebook.methods.rocket.case import Case, score_bank
from tests import tokens
from tests.faults.healthy import hosts
from tests.faults.healthy.evaluation import spoilt, table, true_answer
from tests.faults.healthy.loras import bank as made
from tests.faults.healthy.loras import host, logits, lora, merged, nats, right
from tests.faults.healthy.pesc import folder
from tests.faults.hostile import EVERY, Row, must, new_folder

CONFIG = rocket.Config(
    shots=2, candidates=3, experts=2, top_k=2, budget=3, threshold=0.9
)
TWO = rocket.Config(candidates=2, experts=2, top_k=2, lora_dropout=0.0)


def shots():
    return [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"}]


def drawn(rows, width=4, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)


def cosines(one, other):
    unit = [
        part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-30)
        for part in (one.astype(float), other.astype(float))
    ]
    return unit[0] @ unit[1].T


def numeric(*arrays):
    """Whether arrays are of finite numbers in two dimensions."""
    for array in arrays:
        if array.ndim != 2 or not array.size or array.dtype.kind != "f":
            raise ValueError("array")
        if not np.isfinite(array).all() or not np.isfinite(
            (array.astype(np.float32) ** 2).sum()
        ):
            raise ValueError("NaN")


def of_rows(shots, block):
    """Whether shots and rows, of which there may be none, are numbers of one kind."""
    numeric(shots, *([block] if len(block) else []))
    if block.ndim != 2 or block.dtype != shots.dtype:
        raise ValueError("rows")


def true_choose(shots, blocks, seed):
    """Alg. 2 as it is printed."""
    numeric(shots)
    numeric(*[part for part in blocks if len(part)])
    if len({part.dtype for part in (shots, *blocks)}) > 1:
        raise ValueError("dtype")
    pool = np.concatenate(blocks)
    near = cosines(pool, shots).max(1)
    order = sorted(range(len(pool)), key=lambda j: (-near[j], j))[:3]
    left = {*order}
    for i, j in combinations(order, 2):
        if {i, j} <= left and cosines(pool[[i]], pool[[j]])[0, 0] > 0.9:
            left.discard(j if near[i] > near[j] else i)
    chosen = [j for j in order if j in left]
    return np.array(chosen), near[chosen]


def chosen(shots, blocks, seed):
    found = augment.choose(shots, blocks, CONFIG, seed=seed)
    return found.index, found.similarity


def true_deduplicate(vectors, similarity, threshold, rule="standing"):
    numeric(vectors)
    if (
        similarity.shape != vectors.shape[:1]
        or not -1 <= threshold <= 1
        or rule != "standing"
    ):
        raise ValueError("similarity")
    if not np.isfinite(similarity.astype(float)).all():
        raise ValueError("NaN")
    near = cosines(vectors, vectors)
    alive = [True] * len(vectors)
    for i, j in combinations(range(len(vectors)), 2):
        if alive[i] and alive[j] and near[i, j] > threshold:
            alive[j if similarity[i] > similarity[j] else i] = False
    return np.flatnonzero(alive)


def true_density(shots, block, gamma):
    of_rows(shots, block)
    if shots.shape[1] != block.shape[1] or not gamma > 0 or not math.isfinite(gamma):
        raise ValueError(gamma)
    apart = ((block[:, None].astype(float) - shots[None].astype(float)) ** 2).sum(-1)
    kernel = np.exp(-apart / (2 * float(gamma) ** 2)) / (
        math.sqrt(2 * math.pi) * float(gamma)
    )
    return np.log(kernel.mean(1))


def true_hull(shots, block, components):
    """By linear programming: whether a point is a mean of the corners."""
    of_rows(shots, block)
    if (
        shots.shape[1] != block.shape[1]
        or components != int(components)
        or components < 1
    ):
        raise ValueError(components)
    centre = shots.mean(0)
    axes = np.linalg.svd(shots - centre, full_matrices=False)[2][:components]
    corners = (shots - centre) @ axes.T
    points = (block - centre) @ axes.T
    system = np.vstack([corners.T, np.ones(len(corners))])
    return np.array(
        [
            linprog(np.zeros(len(corners)), A_eq=system, b_eq=[*p, 1]).success
            for p in points
        ]
    )


def true_drawn(shots, blocks, budget):
    numeric(shots)
    numeric(*[part for part in blocks if len(part)])
    if len({(part.dtype, part.shape[1]) for part in (shots, *blocks)}) > 1:
        raise ValueError("dtype")
    if budget < 1 or budget != int(budget):
        raise ValueError(budget)
    pool = np.concatenate(blocks)
    near = cosines(pool, shots).max(1)
    order = sorted(range(len(pool)), key=lambda j: (-near[j], j))[:budget]
    return np.array(order), near[order], pool[order], len(pool)


def true_attached(model, loras):
    return logits(merged(model, loras[0])) if len(loras) == 1 else None


def attached(model, loras):
    with rocket.loras.attached(model, loras):
        return logits(model)


def true_built(model, loras, config):
    """Of one LoRA N times that LoRA."""
    if len(loras) != 2:
        raise ValueError("N")
    right(*loras)
    one, other = (logits(merged(host(), each)) for each in loras)
    if not torch.equal(one, other):
        raise ArithmeticError("two LoRAs")
    return one


def mixed():
    """A host with a mixture on it."""
    torch.manual_seed(0)
    return apply.build(host(), [lora("a"), lora("b", 1)], TWO)


@cache
def saved():
    return rocket.save(mixed(), folder())


@cache
def written():
    """A folder of LoRAs in PEFT's form."""
    place = new_folder() / "bank"
    place.mkdir()
    for name, one in made().items():
        loras.write(one, place / name)
    return place


def only(model, expert):
    with apply.only(model, expert):
        return logits(model)


def have_prompts(rows):
    """Whether each row has a prompt that is text."""
    return all(isinstance(row["prompt"], str) for row in rows)


def true_names(names):
    """All of the bank where none are named."""
    if not names:
        return list("abc")
    must({*names} <= {*"abc"})
    return sorted({*names})


def true_linears(model, targets):
    """The paths of the query projections, which alone are asked for."""
    if not targets:
        return []
    must({*targets} == {"q_proj"})
    return [f"model.layers.{n}.self_attn.q_proj" for n in range(2)]


def true_perplexities(model, bank, shots, reduction):
    right(*bank.values())
    if reduction not in ("mean", "sum") or not bank or not shots:
        raise ValueError(reduction)
    lines = []
    for one in bank.values():
        tuned = merged(host(), one)
        found = [nats(tuned, row) for row in shots]
        lines.append(
            [
                float(part.mean() if reduction == "mean" else part.sum())
                for part in found
            ]
        )
    return np.array(lines)


def perplexities(model, bank, shots, reduction, tokens=None):
    return score.log_perplexity(
        model, byte(), bank, shots, reduction=reduction, tokens=tokens
    ).to_numpy()


def byte():
    return tokens.byte_tokenizer()


def accuracies(model, bank, shots, limit):
    return score.accuracy(model, byte(), bank, shots, limit=limit).to_numpy()


def true_accuracies(model, bank, shots, limit):
    right(*bank.values())
    if limit is None or limit < 1 or limit != int(limit) or not bank or not shots:
        raise ValueError(limit)
    if not all(part.isfinite().all() for part in model.parameters()):
        raise ValueError("NaN")
    lines = []
    for one in bank.values():
        tuned = merged(host(), one)
        contexts = [
            [0, *byte()(f"### Human:\n{row['prompt']}\n### Assistant:\n")["input_ids"]]
            for row in shots
        ]
        if max(map(len, contexts)) > 100:
            raise ValueError("too long")
        texts = true_answer(tuned, contexts, [(limit, ())] * len(shots), 4)
        firsts = [
            (text.strip().splitlines() or [""])[0].removesuffix(".") for text in texts
        ]
        lines.append(
            [
                " ".join(t.split()) == row["answer"]
                for t, row in zip(firsts, shots, strict=True)
            ]
        )
    return np.array(lines)


def measured():
    """Log-perplexities and whether shots are solved, of three LoRAs and two shots."""
    nats = pd.DataFrame([[1.0, 2.0], [0.5, 3.0], [2.0, 2.5]], index=list("abc"))
    return nats, pd.DataFrame(
        [[True, False], [False, False], [True, True]], index=list("abc")
    )


def true_scores(log_perplexities, accuracies):
    lines = {}
    if list(log_perplexities.index) != list(accuracies.index) or not len(accuracies):
        raise ValueError("bank")
    if not log_perplexities.shape == accuracies.shape or not log_perplexities.size:
        raise ValueError("shots")
    for name in log_perplexities.index:
        nats = log_perplexities.loc[name].astype(float)
        right = accuracies.loc[name]
        if not np.isfinite(nats).all():
            continue
        lines[name] = [math.log(sum(math.exp(one) for one in nats)), right.mean()]
    return pd.DataFrame(lines, index=["log_perplexity", "accuracy"]).T


def scored():
    return score.scores(*measured())


def alike():
    return pd.DataFrame(
        [[1.0, 0.2, 0.1], [0.2, 1.0, 0.9], [0.1, 0.9, 1.0]], list("abc"), list("abc")
    )


def true_select(scores, similarities):
    """Alg. 1 as it is printed, over all groups of two."""
    names = sorted(scores.index)
    if (
        len(names) < 3
        or not {*names} <= {*similarities.index}
        or not {*names} <= {*similarities.columns}
    ):
        raise ValueError("bank")
    if not np.isfinite(scores.to_numpy(float)).all() or {*names} != {*"abc"}:
        raise ValueError("scores")
    cells = similarities.loc[names, names].to_numpy(float)
    if not np.isfinite(cells).all() or not (np.abs(cells) <= 1 + 1e-6).all():
        raise ValueError("similarities")
    if not np.allclose(cells, cells.T) or not scores.accuracy.between(0, 1).all():
        raise ValueError("similarities")
    nats = scores.log_perplexity[names].to_numpy(float)
    right = scores.accuracy[names].to_numpy(float)
    worth = rankdata(nats, "min") + rankdata(-right, "min")
    groups = list(combinations(range(3), 2))
    value = [cells[pair] for pair in groups]
    omega = [1 / v if v > 0 else np.inf for v in value]
    ranks = rankdata([-o for o in omega], "min")
    total = [
        worth[list(pair)].sum() + rank for pair, rank in zip(groups, ranks, strict=True)
    ]
    best = {names[n] for n in groups[int(np.argmin(total))]}
    order = sorted(range(3), key=lambda n: (worth[n], names[n]))
    return tuple(names[n] for n in order if names[n] in best)


def true_similarity(bank):
    """By the matrices themselves."""
    right(*bank.values())
    if not bank:
        raise ValueError("empty")
    rows = []
    for path in next(iter(bank.values())).down:
        products = [
            one.up[path].double() @ one.down[path].double() for one in bank.values()
        ]
        flat = torch.stack(products).flatten(1)
        cosine = torch.nn.functional.cosine_similarity
        rows.append(torch.stack([cosine(one, flat, dim=-1) for one in flat]))
    return torch.stack(rows).mean(0).numpy()


def true_diversity(cosines, form="ordered"):
    if (
        cosines.ndim != 1
        or not np.isfinite(cosines.astype(float)).all()
        or form != "ordered"
    ):
        raise ValueError(form)
    return np.array([1 / c if c > 0 else np.inf for c in cosines.astype(float)])


def true_drawn_shots(rows, shots, seed):
    if not isinstance(shots, int) or not 1 <= shots <= len(rows):
        raise ValueError(shots)
    return shots


def true_expand(rows, order):
    if order != "answer_first":
        raise ValueError(order)
    for row in rows:
        if not row["rationale"].strip():
            raise ValueError("no rationale")
    return [
        {**row, "answer": f"{row['answer']}\n{row['rationale'].strip()}"}
        for row in rows
    ]


def told():
    return [
        {"prompt": "1 + 1?", "answer": "2", "rationale": "One more."},
        {"prompt": "2 + 2?", "answer": "4", "rationale": "Two more."},
    ]


def generated(model, contexts, limit, batch):
    return score.generate(model, byte(), contexts, limit=limit, batch=batch)


def true_generated(model, contexts, limit, batch):
    return true_answer(model, contexts, [(limit, ())] * len(contexts), batch)


def case():
    nats, solved = measured()
    return Case("sums", 0, shots(), nats, nats + 1, solved, drawn(2), alike())


def tuned(loras, chosen, seed, max_length, steps, batch):
    model = host()
    history = pipeline.tune(
        model,
        byte(),
        loras,
        chosen,
        TWO,
        seed=seed,
        max_length=max_length,
        steps=steps,
        batch=batch,
        lr=1e-3,
        warmup=0.0,
    )
    return history.step


def outcomes():
    return {("sums", name): (0.1 * n, 0.2 * n + 0.1) for n, name in enumerate("abc")}


def true_split(experts, mixture):
    if experts.ndim != 2 or mixture.shape != experts.shape[1:] or not experts.size:
        raise ValueError("shapes")
    every = experts.astype(bool).all(0)
    anyone = experts.astype(bool).any(0)
    mixed = anyone & ~every
    errors = np.full(len(experts), np.nan)
    whole = np.nan
    if mixed.any():
        errors = 1 - experts.astype(bool)[:, mixed].mean(1)
        whole = 1 - mixture.astype(bool)[mixed].mean()
    return {
        "all right": every.mean(),
        "mixed": mixed.mean(),
        "all wrong": (~anyone).mean(),
        "best expert": errors.min(),
        "mean expert": errors.mean(),
        "worst expert": errors.max(),
        "mixture": whole,
    }


def true_embedded(size, seed, names):
    """So many of each set, all where there are fewer."""
    if not isinstance(size, int) or size < 1 or not isinstance(seed, int):
        raise ValueError(size)
    there = {name: tasks.find(name).available("train") for name in ("sums", "gcd")}
    return {name: min(size, most) for name, most in there.items() if name in names}


def true_foretold(cases, outcomes):
    nats, _ = measured()
    lines = []
    for name in nats.index:
        if ("sums", name) in outcomes:
            before, after = outcomes["sums", name]
            plain = math.log(sum(math.exp(one) for one in nats.loc[name]))
            lines.append([plain, plain + 1, before, after, after - before])
    names = ["bare answers", "with rationales", "before", "after", "gain"]
    return pd.DataFrame(lines, columns=names, dtype=float)


def frame():
    return measure.foretold({"sums": case()}, outcomes())


@cache
def opened():
    """A folder of open rows in two shards."""
    place = new_folder()
    for number, part in enumerate((drawn(5, seed=1), drawn(4, seed=2))):
        lists = pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), 4)
        texts = [f"{number}.{row}" for row in range(len(part))]
        made = pa.table({"embedding": lists, "prompt": texts, "answer": texts})
        pq.write_table(made, place / f"open-{number:05}-of-00002.parquet")
    return place


def sharded(shots, folder, to, seed):
    found = shards.choose(shots, folder, CONFIG, to, seed=seed)
    return found.index, found.similarity


def true_sharded(shots, folder, to, seed):
    if folder != opened():
        raise FileNotFoundError(folder)
    blocks = [drawn(5, seed=1), drawn(4, seed=2)]
    return true_choose(shots, [block.astype(shots.dtype) for block in blocks], seed)


def true_read(folder, index):
    if folder != opened() or index.ndim != 1 or index.dtype.kind not in "iu":
        raise ValueError("index")
    names = [f"0.{n}" for n in range(5)] + [f"1.{n}" for n in range(4)]
    if len(index) and not 0 <= index.min() <= index.max() < 9:
        raise IndexError(index)
    return [{"prompt": names[n], "answer": names[n]} for n in index.tolist()]


def trained(sets, rank, alpha, targets, dropout, max_length, seed, steps, batch):
    how = {
        "rank": rank,
        "alpha": alpha,
        "targets": targets,
        "dropout": dropout,
        "seed": seed,
        "max_length": max_length,
        "steps": steps,
        "batch": batch,
        "own_starts": True,
        "lr": 0.01,
        "warmup": 0.0,
    }
    return sorted(bank.train(host(), byte(), sets, **how))


def sets():
    return {"sums": shots(), "gcd": shots()[::-1]}


def arrays(one, other):
    """Whether two kinds are numbers alike."""
    return one.dtype == other.dtype


SEEDS = "negative | zero | huge"
ROWS = {
    "methods.rocket.augment.choose": Row(
        chosen,
        lambda: {
            "shots": drawn(2),
            "blocks": [drawn(5, seed=1), drawn(4, seed=2)],
            "seed": 0,
        },
        true_choose,
        fine={"seed": "zero | huge"},
    ),
    "methods.rocket.augment.peak": Row(
        lambda shots, size: augment.peak(shots, CONFIG, size) > 0,
        lambda: {"shots": drawn(2), "size": 10},
        fine={"shots": "short | long | zero | dtype"},
        settings=("size",),  # which may be large, and then takes its time
        more={"size": {"negative": -1, "zero": 0, "no whole number": 1.5}},
    ),
    "methods.rocket.augment.deduplicate": Row(
        augment.deduplicate,
        lambda: {
            "vectors": drawn(6, 3),
            "similarity": drawn(1, 6)[0],
            "threshold": 0.5,
            "rule": "standing",
        },
        true_deduplicate,
    ),
    "methods.rocket.augment.draw": Row(
        lambda shots, blocks, budget: augment.draw(shots, blocks, CONFIG, budget, 0),
        lambda: {
            "shots": drawn(2),
            "blocks": [drawn(5, seed=1), drawn(4, seed=2)],
            "budget": 3,
        },
        true_drawn,
    ),
    "methods.rocket.augment.log_density": Row(
        augment.log_density,
        lambda: {"shots": drawn(2), "block": drawn(5, seed=1), "gamma": 2.0},
        true_density,
        tolerance=1e-3,
    ),
    "methods.rocket.augment.inside_hull": Row(
        augment.inside_hull,
        lambda: {"shots": drawn(5), "block": 0.4 * drawn(6, seed=1), "components": 2},
        true_hull,
    ),
    "methods.rocket.bank.check": Row(
        bank.check,
        lambda: {"bank": made()},
        lambda bank: must(len(bank) > 1) and right(*bank.values()) and None,
        more={
            "bank": {
                "one": {"a": lora()},
                "twice": {"a": lora("a"), "b": lora("b")},
                "idle": {
                    "a": lora("a", up={p: 0 * t for p, t in lora().up.items()}),
                    "b": lora("b", 1),
                },
                "ranks": {"a": lora("a"), "b": lora("b", 1, 3)},
            }
        },
        settings=("bank",),
    ),
    "methods.rocket.bank.read": Row(
        lambda folder, model: sorted(bank.read(folder, model)),
        lambda: {"folder": written(), "model": host()},
        lambda folder, model: must(folder == written()) and list("abc"),
        more={
            "model": {"other": hosts.host(vocab_size=300, hidden_size=12, head_dim=6)}
        },
    ),
    "methods.rocket.bank.load": Row(
        lambda names: sorted(bank.load(host(), byte(), written(), names=names)),
        lambda: {"names": ["a", "b"]},
        true_names,
    ),
    "methods.rocket.bank.train": Row(
        trained,
        lambda: {
            "sets": sets(),
            "rank": 2,
            "alpha": 4.0,
            "targets": ["q_proj"],
            "dropout": 0.05,
            "max_length": 128,
            "seed": 0,
            "steps": 1,
            "batch": 2,
        },
        fine={
            "sets[sums]": "short | long | empty | unknown | nul",
            "seed": "zero | huge",
            "max_length": "huge",
            "batch": "huge",
            "targets": "long",
            "dropout": "zero",
            "sets": "unknown",
        },
    ),
    "methods.rocket.bank.hashes": Row(
        lambda rows: len(bank.hashes(rows)),
        lambda: {"rows": shots()},
        lambda rows: len({" ".join(row["prompt"].lower().split()) for row in rows}),
    ),
    "methods.rocket.bank.leaks": Row(
        lambda rows, task: bank.leaks(made(), rows, task=task)["shared"].tolist(),
        lambda: {"rows": shots(), "task": "sums"},
        lambda rows, task: must(have_prompts(rows)) and [0] * 3,
    ),
    "methods.rocket.bank.guarded": Row(
        lambda rows, task: sorted(bank.guarded(made(), rows, task=task)),
        lambda: {"rows": shots(), "task": "sums"},
        lambda rows, task: must(have_prompts(rows)) and sorted({*"abc"} - {task}),
    ),
    "methods.rocket.bank.embedded": Row(
        lambda size, seed, names: {
            k: len(v) for k, v in bank.embedded(size, seed=seed, names=names).items()
        },
        lambda: {"size": 2, "seed": 0, "names": ["gcd", "sums"]},
        true_embedded,
        several=("names",),
    ),
    "methods.rocket.bank.targets": Row(
        lambda names, source, split: [
            sorted(part) for part in bank.targets(names, source, bank.NOWHERE, split)
        ],
        lambda: {"names": ["gcd", "sums"], "source": "embedded", "split": "test"},
        fine={"names": "short | long"},
        several=("names",),
    ),
    "methods.rocket.bank.open_data": Row(
        lambda sets, size, source: len(
            bank.open_data(sets, size, source, bank.NOWHERE)
        ),
        lambda: {"sets": "gsm8k", "size": 2, "source": "embedded"},
        settings=("sets", "source", "size"),
        more={
            "size": {"negative": -1, "zero": 0, "no whole number": 1.5},
            "source": {"unknown": "no such"},
        },
    ),
    "methods.rocket.bank.source_rows": Row(
        lambda name, revision: len(bank.source_rows(name, revision)),
        lambda: {"name": "gsm8k", "revision": hub_folder()},
    ),
    "methods.rocket.measure.foretold": Row(
        measure.foretold,
        lambda: {"cases": {"sums": case()}, "outcomes": outcomes()},
        true_foretold,
        settings=("cases",),
    ),
    "methods.rocket.measure.correlations": Row(
        measure.correlations,
        lambda: {"frame": frame(), "one": ["bare answers"], "other": ["gain"]},
        lambda frame, one, other: true_correlations(frame, one, other),
    ),
    "methods.rocket.measure.repeated": Row(
        lambda tables: {
            t: part.correct for t, part in measure.repeated(tables).items()
        },
        lambda: {"tables": {"gcd": [table(), table()]}},
        lambda tables: {target: true_repeated(some) for target, some in tables.items()},
    ),
    "methods.rocket.measure.over_targets": Row(
        lambda tables, tested: measure.over_targets(tables, tested).score.sum(),
        lambda: {
            "tables": {"gcd": table()[:3], "sums": table()[3:]},
            "tested": {"gcd": "gcd", "sums": "sums"},
        },
        settings=("tables",),
        more={"tables": {"empty": {}, "no rows": {"gcd": table()[:0]}}},
    ),
    "methods.rocket.measure.untuned": Row(
        lambda model, bank, tasks, limit: {
            n: len(t)
            for n, t in measure.untuned(model, byte(), bank, tasks, limit=limit).items()
        },
        lambda: {"model": host(), "bank": {"a": lora()}, "tasks": ["gcd"], "limit": 1},
        settings=("bank", "tasks"),
        fine={"limit": "huge"},
        more={"model": {"nan": spoilt()}},
    ),
    "methods.rocket.measure.alone": Row(
        lambda model, task, limit: (
            measure.alone(model, byte(), task, limit=limit).shape
        ),
        lambda: {"model": mixed(), "task": "gcd", "limit": 1},
        settings=("task",),
        fine={"limit": "huge"},
        more={"model": {"plain": host()}},
    ),
    "methods.rocket.measure.split_cases": Row(
        measure.split_cases,
        lambda: {
            "experts": np.array([[True, False, True], [False, False, True]]),
            "mixture": np.array([True, False, True]),
        },
        true_split,
    ),
    "methods.rocket.loras.Lora": Row(
        lambda rank, alpha, down, up: attached(
            host(),
            [loras.Lora("a", rank, alpha, down, up)],
        ),
        lambda: {"rank": 2, "alpha": 4.0, "down": lora().down, "up": lora().up},
        lambda rank, alpha, down, up: logits(
            merged(
                host(),
                SimpleNamespace(rank=rank, alpha=alpha, down=down, up=up, base=None),
            )
        ),
    ),
    "methods.rocket.loras.linears": Row(
        lambda model, targets: sorted(loras.linears(model, targets)),
        lambda: {"model": host(), "targets": ["q_proj"]},
        true_linears,
    ),
    "methods.rocket.loras.attached": Row(
        attached,
        lambda: {"model": host(), "loras": [lora()]},
        true_attached,
        settings=("loras",),
        more={
            "loras": {"empty": []},
            "model": {"narrow": hosts.host(vocab_size=300, hidden_size=12, head_dim=6)},
        },
    ),
    "methods.rocket.loras.rotated": Row(
        lambda lora, seed: attached(host(), [loras.rotated(lora, seed)]),
        lambda: {"lora": lora(), "seed": 3},
        lambda lora, seed: must(seed >= 0) and logits(merged(host(), lora)),
        fine={"lora.base": "empty | unknown | nul | long"},
        tolerance=1e-3,
    ),
    "methods.rocket.loras.folders": Row(
        lambda folder: [path.name for path in loras.folders(folder)],
        lambda: {"folder": written()},
        lambda folder: must(folder == written()) and list("abc"),
    ),
    "methods.rocket.loras.read": Row(
        lambda folder: logits(merged(host(), loras.read(folder, host(), lora().base))),
        lambda: {"folder": written() / "a"},
        lambda folder: must(folder.name == "a") and logits(merged(host(), lora())),
    ),
    "methods.rocket.loras.write": Row(
        lambda folder: logits(
            merged(host(), loras.read(loras.write(lora(), folder), host(), lora().base))
        ),
        lambda: {"folder": folder("a")},
        lambda folder: logits(merged(host(), lora())),
    ),
    "methods.rocket.apply.build": Row(
        lambda model, loras, config: logits(apply.build(model, loras, config)),
        lambda: {"model": host(), "loras": [lora("a"), lora("a")], "config": TWO},
        true_built,
        settings=("config", "loras"),
        more={
            "loras": {"one": [lora()], "empty": [], "other": [lora(base="0" * 64)] * 2}
        },
    ),
    "methods.rocket.save": Row(
        lambda model, folder: logits(rocket.load(host(), rocket.save(model, folder))),
        lambda: {"model": mixed(), "folder": folder()},
        lambda model, folder: logits(mixed()),
        more={"model": {"plain": host()}},
    ),
    "methods.rocket.load": Row(
        lambda model, folder: logits(rocket.load(model, folder)),
        lambda: {"model": host(), "folder": saved()},
        lambda model, folder: must(folder == saved()) and logits(mixed()),
    ),
    "methods.rocket.apply.remove": Row(
        lambda model: logits(apply.remove(model)),
        lambda: {"model": mixed()},
        lambda model: logits(host()),
        more={"model": {"plain": host()}},
    ),
    "methods.rocket.apply.trained": Row(
        lambda model: len(apply.trained(model)),
        lambda: {"model": mixed()},
        lambda model: 12,
        more={"model": {"plain": host()}},
    ),
    "methods.rocket.apply.only": Row(
        only,
        lambda: {"model": mixed(), "expert": "b"},
        lambda model, expert: logits(
            merged(host(), {"a": lora("a"), "b": lora("b", 1)}[expert])
        ),
        tolerance=1e-3,
    ),
    "experiments.rocket.arms": Row(
        lambda strict: sorted(arms.arms(CONFIG, strict=strict)),
        lambda: {"strict": 0.5},
        fine={"strict": "zero | negative"},
    ),
    "experiments.rocket.tested": Row(
        arms.tested,
        lambda: {"targets": ["gcd", "sums"], "benchmarks": ["a", "b"]},
        lambda targets, benchmarks: (
            must(len({*targets}) == len(targets))
            and dict(zip(targets, benchmarks or targets, strict=True))
        ),
    ),
    "methods.rocket.case.score_bank": Row(
        lambda annotated, seed: (
            score_bank(
                host(),
                byte(),
                made(),
                Embedder(),
                annotated,
                CONFIG,
                task="sums",
                seed=seed,
            ).plain.shape
        ),
        lambda: {"annotated": told(), "seed": 0},
        settings=("annotated", "seed"),
        more={
            "annotated": {
                "few": told()[:1],
                "no rationale": [{"answer": "2"}, *told()[1:]],
            },
            "seed": {"no whole number": 1.5, "text": "0"},
        },
    ),
    "experiments.pipeline.experts": Row(
        lambda bank, best: pipeline.experts(
            case(), pipeline.Arm(config=CONFIG), bank, best=best
        ),
        lambda: {"bank": list("abc"), "best": "a"},
        fine={"best": EVERY, "bank": "long"},
    ),
    "experiments.pipeline.selected": Row(
        lambda bank: (
            pipeline.selected(case(), pipeline.Arm(config=CONFIG), bank).experts
        ),
        lambda: {"bank": list("abc")},
        fine={"bank": "long"},
    ),
    "experiments.pipeline.rows": Row(
        lambda pool, vectors: len(
            pipeline.rows(case(), pipeline.Arm(config=CONFIG), pool, vectors)
        ),
        lambda: {"pool": shots() * 3, "vectors": drawn(6, seed=1)},
        fine={"vectors": "zero", "pool[0]": EVERY},
    ),
    "experiments.pipeline.tune": Row(
        tuned,
        lambda: {
            "loras": [lora("a"), lora("b", 1)],
            "chosen": shots(),
            "seed": 0,
            "max_length": 128,
            "steps": 1,
            "batch": 2,
        },
        fine={
            "seed": "zero | huge",
            "max_length": "huge",
            "batch": "huge",
            "chosen": EVERY,
        },
        settings=("loras",),
    ),
    "methods.rocket.score.draw": Row(
        lambda rows, shots, seed: len(score.draw(rows, shots, seed)),
        lambda: {"rows": shots(), "shots": 1, "seed": 0},
        true_drawn_shots,
        fine={"seed": SEEDS},
    ),
    "methods.rocket.score.expand": Row(
        lambda rows, order: score.expand(rows, order=order),
        lambda: {"rows": told(), "order": "answer_first"},
        true_expand,
    ),
    "methods.rocket.score.write_rationales": Row(
        lambda rows, order: len(
            score.write_rationales(rows, wide(), byte(), order=order)
        ),
        lambda: {"rows": shots(), "order": "answer_first"},
        settings=("rows",),
        more={
            "rows": {
                "no prompt": [{"answer": "1"}],
                "a number": [{"prompt": "1", "answer": 1}],
            }
        },
    ),
    "methods.rocket.score.generate": Row(
        generated,
        lambda: {"model": host(), "contexts": [[0, 40, 50]], "limit": 3, "batch": 2},
        true_generated,
        more={"model": {"nan": spoilt()}},
    ),
    "methods.rocket.score.log_perplexity": Row(
        perplexities,
        lambda: {
            "model": host(),
            "bank": made(),
            "shots": shots(),
            "reduction": "mean",
        },
        true_perplexities,
        tolerance=1e-3,
        settings=("bank",),
        more={"bank": {"empty": {}, "one": {"a": lora()}}},
    ),
    "methods.rocket.score.log_perplexity of packs": Row(
        lambda tokens: perplexities(host(), made(), shots(), "sum", tokens),
        lambda: {"tokens": 64},
        lambda tokens: (
            must(tokens == int(tokens) and tokens > 0)
            and true_perplexities(host(), made(), shots(), "sum")
        ),
        tolerance=1e-3,
    ),
    "methods.rocket.score.accuracy": Row(
        accuracies,
        lambda: {"model": host(), "bank": {"a": lora()}, "shots": shots(), "limit": 2},
        true_accuracies,
        settings=("bank",),
        more={"model": {"nan": spoilt()}, "bank": {"empty": {}}},
    ),
    "methods.rocket.score.scores": Row(
        score.scores,
        lambda: dict(zip(("log_perplexities", "accuracies"), measured(), strict=True)),
        true_scores,
    ),
    "methods.rocket.choose.similarity": Row(
        lambda bank: choose.similarity(bank).to_numpy(),
        lambda: {"bank": made()},
        true_similarity,
        settings=("bank",),
        more={"bank": {"empty": {}, "ranks": {"a": lora("a"), "b": lora("b", 1, 3)}}},
    ),
    "methods.rocket.choose.diversity": Row(
        choose.diversity,
        lambda: {"cosines": np.array([0.5, 0.2, -0.1]), "form": "ordered"},
        true_diversity,
    ),
    "methods.rocket.choose.select": Row(
        lambda scores, similarities: (
            choose.select(scores, similarities, CONFIG).experts
        ),
        lambda: {"scores": scored(), "similarities": alike()},
        true_select,
    ),
    "methods.rocket.shards.choose": Row(
        sharded,
        lambda: {"shots": drawn(2), "folder": opened(), "to": folder(), "seed": 0},
        true_sharded,
        fine={"seed": "zero | huge", "to": "missing", "shots": "zero"},
    ),
    "methods.rocket.shards.read": Row(
        shards.read,
        lambda: {"folder": opened(), "index": np.array([7, 0, 3])},
        true_read,
    ),
}


class Embedder:
    """Stands in for a sentence encoder."""

    def blocks(self, rows, *, size):
        yield drawn(len(rows))


def wide():
    """A host that long prompts fit, and that is likely to write something."""
    return hosts.host(vocab_size=300, max_position_embeddings=1024)


def hub_folder():
    from tests.faults.healthy.data import folder as hub

    return hub()


def true_correlations(frame, one, other):
    correlations = {}
    for task in dict.fromkeys(frame.index.get_level_values("task")):
        part = frame.xs(task, level="task")
        for left in one:
            for right_ in other:
                pair = part[left].astype(float), part[right_].astype(float)
                if not all(np.isfinite(p).all() for p in pair):
                    raise ValueError("NaN")
                if len({*pair[0]}) > 1 and len({*pair[1]}) > 1:
                    correlations[left, right_, task] = spearmanr(*pair).statistic
    return np.array(list(correlations.values()))


def true_repeated(tables):
    if not tables or len({len(t) for t in tables}) > 1:
        raise ValueError("tables")
    for one in tables:
        if not one.correct.between(0, 1).all() or not len(one):
            raise ValueError("correct")
    return np.mean([one.correct.to_numpy(float) for one in tables], axis=0)
