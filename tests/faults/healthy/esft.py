"""Calls of ESFT that are right, and what they must come to."""

import json
import math
from functools import cache
from itertools import chain, combinations, permutations
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from moebook import evaluation
from moebook.experiments import esft as experiment
from moebook.experiments import specialists
from moebook.methods import esft
from moebook.methods.esft import grouping
from tests.faults.healthy import hosts
from tests.faults.healthy.analysis import true_watched
from tests.faults.healthy.evaluation import table
from tests.faults.healthy.pesc import folder, logits
from tests.faults.hostile import EVERY, Row, must, new_folder

L = 2
E = 4
CONFIG = esft.Config(score="gate", threshold=0.5)


def scores(shift=0):
    """Scores of two layers and four experts, each layer's sum 1."""
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).double().roll(shift)
    return esft.Scores({0: row, 1: row.flip(0)}, {0: row.flip(0), 1: row})


def whole(scores):
    """Whether scores are ones."""
    if scores.token.keys() != scores.gate.keys() or not scores.token:
        raise ValueError("layers")
    for row in (*scores.token.values(), *scores.gate.values()):
        if (
            row.dim() != 1
            or len(row) != E
            or not (row >= 0).all()
            or not row.isfinite().all()
        ):
            raise ValueError("row")
        if row.double().sum() > 1.1:
            raise ValueError("sum")
    return scores


def selection():
    return esft.Selection(experts={0: (1, 3), 1: (0,)})


MISFITS = {
    "experts": esft.Selection(experts={0: (4,), 1: (0,)}),
    "layers": esft.Selection(experts={0: (1,)}),
}


def specialised():
    """A mixture whose chosen experts have moved."""
    torch.manual_seed(0)
    model = esft.specialise(hosts.sparse(), selection())
    for parameter in esft.trained(model).values():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@cache
def saved():
    return esft.save(specialised(), folder())


def true_select(scores, config):
    """Take the best until p is reached."""
    experts = {}
    for layer, row in whole(scores).gate.items():
        order = sorted(range(E), key=lambda e, row=row: (-float(row[e]), e))
        taken = []
        total = 0.0
        for expert in order:
            if total < 0.5 - 1e-9:
                taken.append(expert)
                total += float(row[expert])
        if total < 0.5 - 1e-9:
            raise ValueError("below p")
        experts[layer] = tuple(taken)
    return esft.Selection(experts=experts)


def true_random(selection, experts, seed):
    """As many of each layer, whichever they are."""
    if not isinstance(experts, int) or experts < 2 or experts > 2**20:
        raise ValueError(experts)
    return {layer: len(ids) for layer, ids in selection.experts.items()}


def drawn(selection, experts, seed):
    made = esft.random_selection(selection, experts, seed).experts
    assert all(0 <= expert < experts for expert in chain(*made.values()))
    return {layer: len({*ids}) for layer, ids in made.items()}


def true_measure(model, batches):
    """Shares of slots and means of gates over all real tokens."""
    token = torch.zeros(L, E).double()
    gate = torch.zeros(L, E).double()
    count = 0
    for batch in batches:
        seen = true_watched(model, batch)
        for n, (_, ids, gates, _) in seen.items():
            for experts, shares in zip(ids.tolist(), gates.tolist(), strict=True):
                for expert, share in zip(experts, shares, strict=True):
                    token[n, expert] += 0.5
                    gate[n, expert] += share
        count += len(ids)
    if not count:
        raise ValueError("no tokens")
    return [*(token / count), *(gate / count)]


def measured(model, batches):
    made = esft.measure(model, batches)
    return [*made.token.values(), *made.gate.values()]


def true_samples(rows, count, length, packed, batch, pad_id, seed):
    """How many tokens there are, whatever their order."""
    whole_numbers = [count, length, batch, pad_id, seed]
    if (
        not all(isinstance(number, int) for number in whole_numbers)
        or min(count, length, batch) < 1
    ):
        raise ValueError("sizes")
    if not 0 <= seed < 2**32:
        raise ValueError(seed)
    lengths = [len(ids) for ids in rows["input_ids"]]
    return min(sum(lengths), count * length)


def sampled(rows, **how):
    return int(sum(part["attention_mask"].sum() for part in esft.samples(rows, **how)))


def together():
    """How often experts serve one token, symmetric."""
    made = torch.tensor(
        [[0, 5, 1, 0], [5, 0, 0, 2], [1, 0, 0, 6], [0, 2, 6, 0]]
    ).double()
    return {0: made, 1: made.clone()}


def true_partition(cooccurrence, size):
    """The pair whose rows are most alike first."""
    if cooccurrence.shape != (E, E) or size != 2 or not cooccurrence.isfinite().all():
        raise ValueError("counts")
    wide = cooccurrence.double()
    if (wide < 0).any() or (wide != wide.T).any():
        raise ValueError("counts")
    rows = wide / wide.norm(dim=1, keepdim=True).clamp(min=1e-300)
    left = list(range(E))
    groups = []
    while left:
        best = max(
            combinations(left, 2),
            key=lambda pair: round(float(rows[pair[0]] @ rows[pair[1]]), 9),
        )
        groups.append(best)
        left = [e for e in left if e not in best]
    return tuple(groups)


def true_counts(selections):
    """How many experts of each layer, by layer; nothing of no selection."""
    chosen = [picked.experts for picked in selections.values()]
    layers = sorted({layer for experts in chosen for layer in experts})
    return pd.DataFrame(
        {layer: [len(experts[layer]) for experts in chosen] for layer in layers}
    )


def true_similarity(cooccurrence):
    """The cosines of rows two by two; an unused expert is like none."""
    must(cooccurrence.shape == (E, E) and bool(cooccurrence.isfinite().all()))
    rows = cooccurrence.double()
    alike = torch.zeros(E, E).double()
    for one, other in permutations(range(E), 2):
        lengths = rows[one].norm() * rows[other].norm()
        if lengths > 0:
            alike[one, other] = rows[one] @ rows[other] / lengths * grouping.UNIT
    return alike


def true_cooccurrence(model, batches):
    counts = torch.zeros(L, E, E).double()
    for batch in batches:
        for n, (_, ids, _, _) in true_watched(model, batch).items():
            for one, other in ids.tolist():
                counts[n, one, other] += 1
                counts[n, other, one] += 1
    if not counts.any():
        raise ValueError("no tokens")
    return dict(enumerate(counts))


def grouped(model, counts, size):
    groups = esft.group(model, counts, size)
    weights = [layer.mlp.gate.weight for layer in model.model.layers]
    return [groups, *weights]


def true_grouped(model, counts, size):
    if {*counts} != {0, 1}:
        raise ValueError("layers")
    found = {n: true_partition(part, size) for n, part in counts.items()}
    weights = []
    for n, layer in enumerate(model.model.layers):
        weight = layer.mlp.gate.weight.detach().clone()
        for group in found[n]:
            weight[list(group)] = weight[list(group)].mean(0)
        weights.append(weight)
    return [found, *weights]


def routing():
    """A file of published routing: two layers, one sample, two tokens."""
    path = new_folder() / "toy.routing.txt"
    path.write_text("0\t0\t0\t1\t1\t2\t\t.5\t.25\t.5\t.125\n1\t0\t2\t0\t\t.5\t.5\n")
    return path


def replayed(path, experts, top_k, pooling, half):
    made = esft.replay(path, experts=experts, top_k=top_k, pooling=pooling, half=half)
    return [*made.token.values(), *made.gate.values()]


def true_replayed(path, experts, top_k, pooling, half):
    """By hand, for the file above."""
    must((experts, top_k, pooling, half) == (3, 2, "tokens", 0))
    must(path.name == "toy.routing.txt")
    rows = [
        [1 / 4, 2 / 4, 1 / 4],
        [1 / 2, 0, 1 / 2],
        [1 / 4, 0.75 / 2, 0.125 / 2],
        [0.5, 0, 0.5],
    ]
    return [torch.tensor(row) for row in rows]


def clone():
    """A folder with the published scores of a task."""
    place = new_folder()
    rows = {"token_scores": {"0": {"0": 1.0}}, "gate_scores": {"0": {"0": 1.0}}}
    (place / "toy.scores.json").write_text(json.dumps(rows))
    return place


def true_published(folder, tasks):
    files = {task: [Path(folder) / f"{task}.scores.json"] for task in tasks}
    if not all(path.is_file() for path in chain(*files.values())):
        raise FileNotFoundError(folder)
    return files


def round_trip(batch):
    return esft.round_trip(specialised(), batch)["base unchanged"]


def true_round_trip(batch):
    true_watched(hosts.sparse(), batch)
    return 1.0


def true_sweep(thresholds_gate, thresholds_token, ranks, group_sizes):
    def read(text, kind):
        values = [kind(part) for part in text.split(",")]
        if values != sorted({*values}):
            raise ValueError(text)
        return values

    gate = read(thresholds_gate, float)
    lora = read(ranks, int)
    if len(gate) != len(lora):
        raise ValueError("as many")
    return {
        "gate": gate,
        "token": read(thresholds_token, float),
        "lora": lora,
        "groups": read(group_sizes, int),
    }


TRIED = {"gate": [0.1, 0.3], "token": [0.2], "lora": [4, 8], "groups": [2]}
USUAL = {"lora": 8, "gate": 0.1, "token": 0.2}


def true_concentration(scores):
    rows = torch.stack([*whole(scores).gate.values()]).double()
    if not (rows.sum(1) > 0).all():
        raise ValueError("unused")
    return (
        (rows / rows.sum(1, keepdim=True)).sort(descending=True).values.mean(0).tolist()
    )


def true_half_mass(scores):
    shares = {}
    for layer, row in whole(scores).gate.items():
        order = sorted(row.tolist(), reverse=True)
        total = 0.0
        taken = 0
        if not sum(order) > 0:
            raise ValueError("unused")
        for value in order:
            if total < sum(order) / 2 - 1e-12:
                total = total + value
                taken = taken + 1
        shares[layer] = taken / len(row)
    return shares


def true_overlap(first, second, top):
    if not first or not second or not isinstance(top, int) or not 1 <= top <= E:
        raise ValueError(top)

    def best(row):
        return {*sorted(range(E), key=lambda e: (-float(row[e]), e))[:top]}

    cells = {}
    for column, other in second.items():
        theirs = [best(row) for row in whole(other).gate.values()]
        cells[column] = {}
        for name, one in first.items():
            ours = [best(row) for row in whole(one).gate.values()]
            shared = [len(a & b) for a, b in zip(ours, theirs, strict=True)]
            cells[column][name] = np.mean(shared)
    return pd.DataFrame(cells)


def names(files):
    """The names of files, by task."""
    return {task: [path.name for path in paths] for task, paths in files.items()}


def shares():
    """How many of four experts are chosen: lines of scores and tasks, columns layers."""
    lines = {
        ("gate", "law"): [1, 2, 3],
        ("gate", "code"): [2, 2, 2],
        ("token", "law"): [3, 1, 1],
    }
    return pd.DataFrame(lines).T / E


def true_spread(shares):
    lines = list(shares.to_numpy().tolist())
    if not lines or not all(0 <= value <= 1 for value in chain(*lines)):
        raise ValueError("shares")

    def mean(line, places):
        return sum(line[n] for n in places) / max(len(places), 1)

    found = {}
    for (score, _), line in zip(shares.index, lines, strict=True):
        found.setdefault(score, []).extend(line)
    count = shares.shape[1]
    parts = np.array_split(np.arange(count), 3)
    outer = [*parts[0], *parts[2]]
    middle = [mean(line, parts[1]) for line in lines]
    return {
        **{k: np.array(v) for k, v in found.items()},
        "layers/middle": np.array(middle),
        "layers/outer": np.array([mean(line, outer) for line in lines]),
    }


def front():
    """Accuracy and scores of general items after three checkpoints."""
    return np.array([0.2, 0.5, 0.7]), np.array([[1.0, 0.5], [0.9, 0.4], [0.4, 0.3]])


def true_equal(one, other):
    """Both read at the same accuracy: with one front twice, nothing is left."""
    for solved, kept in (one, other):
        if (
            len(solved) != len(kept)
            or not len(solved)
            or solved.ndim != 1
            or kept.ndim != 2
        ):
            raise ValueError("front")
        if not (np.isfinite(solved).all() and np.isfinite(kept).all()) or not kept.size:
            raise ValueError("front")
    if one[1].shape[1] != other[1].shape[1] or solved.dtype.kind not in "fiub":
        raise ValueError("items")
    level = min(one[0].max(), other[0].max())
    return read(one, level) - read(other, level)


def read(front, level):
    solved, kept = (np.asarray(part, float) for part in front)
    mean = kept.mean(1)
    best = [
        i
        for i in np.argsort(solved, kind="stable")
        if mean[i] >= mean[solved >= solved[i]].max()
    ]
    return np.array(
        [np.interp(level, solved[best], kept[best, n]) for n in range(kept.shape[1])]
    )


def tables():
    return {("gate", "law"): table(), ("token", "law"): table()}


def cost(train, batch, lr):
    made = specialists.cost(
        esft.specialise(hosts.sparse(), selection()),
        train,
        batch=batch,
        lr=lr,
        seed=0,
        pad_id=2,
    )
    return {name: value for name, value in made.items() if name != "time"}


def mixed(task, alignment, share, seed):
    return len(esft.mix(task, alignment, share, seed))


def true_mixed(task, alignment, share, seed):
    wanted = math.floor(len(task) * share / (1 - share) + 0.5)
    if (
        not 0 <= share < 1
        or wanted > len(alignment)
        or not isinstance(seed, int)
        or seed < 0
    ):
        raise ValueError(share)
    if task.column_names != alignment.column_names:
        raise ValueError("columns")
    return len(task) + wanted


SEEDS = "negative | zero | huge"
ROWS = {
    "experiments.esft.sweep": Row(
        lambda **texts: experiment.sweep(texts),
        lambda: {
            "thresholds_gate": "0.1,0.3",
            "thresholds_token": "0.2",
            "ranks": "4,8",
            "group_sizes": "2",
        },
        true_sweep,
        more={
            "ranks": {"order": "8,4", "number": "4", "nan": "nan,8"},
            "thresholds_gate": {"nan": "0.1,nan"},
        },
    ),
    "experiments.esft.start": Row(
        lambda given: logits(
            experiment.start(
                hosts.sparse(), experiment.arms(TRIED, USUAL)["gate"], given, together()
            )
        ),
        lambda: {"given": {"selection": selection()}},
        lambda given: logits(hosts.sparse()),
        settings=("given",),
        more={"given": {kind: {"selection": bad} for kind, bad in MISFITS.items()}},
    ),
    "methods.esft.full": Row(
        lambda model: all(p.requires_grad for p in esft.full(model).parameters()),
        lambda: {"model": hosts.sparse()},
        more={"model": {"dense": hosts.host(), "specialised": specialised()}},
    ),
    "methods.esft.lora": Row(
        lambda rank, scale, attention: logits(
            esft.lora(hosts.sparse(), rank=rank, scale=scale, attention=attention)
        ),
        lambda: {"rank": 2, "scale": 2.0, "attention": True},
        lambda rank, scale, attention: logits(hosts.sparse()),
        tolerance=1e-3,
    ),
    "methods.esft.rows": Row(
        lambda targets, alignment, size, split, revisions, seed: {
            name: len(rows)
            for name, rows in esft.rows(
                targets, alignment, size, split=split, revisions=revisions, seed=seed
            ).items()
        },
        lambda: {
            "targets": ["gcd"],
            "alignment": ["sums"],
            "size": 2,
            "split": "train",
            "revisions": "",
            "seed": 0,
        },
        fine={
            "seed": SEEDS,
            "targets": "long | empty | short",
            "alignment": "long | empty | short",
            "size": "huge",
            "revisions": "empty",
        },
        several=("targets", "alignment"),
    ),
    "methods.esft.mix": Row(
        mixed,
        lambda: {
            "task": hosts.rows(),
            "alignment": hosts.rows(),
            "share": 0.5,
            "seed": 0,
        },
        true_mixed,
        fine={"task": "missing", "alignment": "missing"},
    ),
    "experiments.specialists.cost": Row(
        cost,
        lambda: {"train": hosts.rows(), "batch": 3, "lr": 1e-3},
        fine={"batch": "huge"},
        settings=("lr", "train"),
    ),
    "methods.esft.measure": Row(
        measured,
        lambda: {"model": hosts.sparse(), "batches": [hosts.seen()]},
        true_measure,
    ),
    "methods.esft.Scores": Row(
        lambda token, gate: vars(esft.Scores(token, gate)),
        lambda: {"token": scores().token, "gate": scores().gate},
        lambda token, gate: vars(whole(esft.Scores(token, gate))),
    ),
    "methods.esft.select": Row(
        lambda scores, config: esft.select(scores, config).experts,
        lambda: {"scores": scores(), "config": CONFIG},
        lambda scores, config: true_select(scores, config).experts,
        settings=("config",),
    ),
    "methods.esft.random_selection": Row(
        drawn,
        lambda: {"selection": selection(), "experts": 4, "seed": 0},
        true_random,
        fine={"seed": SEEDS},
        settings=("selection",),
    ),
    "methods.esft.samples": Row(
        sampled,
        lambda: {
            "rows": hosts.rows(),
            "count": 2,
            "length": 8,
            "packed": True,
            "batch": 2,
            "pad_id": 0,
            "seed": 0,
        },
        true_samples,
        fine={"rows.labels": EVERY, "rows.length": EVERY},
    ),
    "methods.esft.replay": Row(
        replayed,
        lambda: {
            "path": routing(),
            "experts": 3,
            "top_k": 2,
            "pooling": "tokens",
            "half": 0,
        },
        true_replayed,
        settings=("half",),
    ),
    "methods.esft.published": Row(
        lambda folder, tasks: names(esft.published(folder, tasks)),
        lambda: {"folder": clone(), "tasks": ["toy"]},
        lambda folder, tasks: names(true_published(folder, tasks)),
    ),
    "methods.esft.cooccurrence": Row(
        esft.cooccurrence,
        lambda: {"model": hosts.sparse(), "batches": [hosts.seen()]},
        true_cooccurrence,
    ),
    "methods.esft.partition": Row(
        esft.partition,
        lambda: {"cooccurrence": together()[0], "size": 2},
        true_partition,
    ),
    "methods.esft.grouping.similarity": Row(
        grouping.similarity,
        lambda: {"cooccurrence": together()[0]},
        true_similarity,
    ),
    "methods.esft.group": Row(
        grouped,
        lambda: {"model": hosts.sparse(), "counts": together(), "size": 2},
        true_grouped,
    ),
    "methods.esft.grouping.check": Row(
        grouping.check,
        lambda: {"model": hosts.sparse(), "sizes": [2]},
        lambda model, sizes: must({*sizes} <= {1, 2}) and None,
        fine={"sizes": "empty"},
    ),
    "methods.esft.specialise": Row(
        lambda model, selection: logits(esft.specialise(model, selection)),
        lambda: {"model": hosts.sparse(), "selection": selection()},
        lambda model, selection: logits(hosts.sparse()),
        settings=("selection",),
        more={
            "selection": MISFITS,
            "model": {"dense": hosts.host()},
        },
    ),
    "methods.esft.save": Row(
        lambda model, folder: logits(
            esft.load(hosts.sparse(), esft.save(model, folder))
        ),
        lambda: {"model": specialised(), "folder": folder()},
        lambda model, folder: logits(specialised()),
        more={"model": {"plain": hosts.sparse()}},
    ),
    "methods.esft.load": Row(
        lambda model, folder: logits(esft.load(model, folder)),
        lambda: {"model": hosts.sparse(), "folder": saved()},
        lambda model, folder: logits(specialised()),
    ),
    "methods.esft.merge": Row(
        lambda model: logits(esft.merge(model)),
        lambda: {"model": specialised()},
        lambda model: logits(specialised()),
        more={"model": {"plain": hosts.sparse()}},
    ),
    "methods.esft.restore": Row(
        lambda model: logits(esft.restore(model)),
        lambda: {"model": specialised()},
        lambda model: logits(hosts.sparse()),
        more={"model": {"plain": hosts.sparse()}},
    ),
    "methods.esft.trained": Row(
        lambda model: len(esft.trained(model)),
        lambda: {"model": specialised()},
        lambda model: 4,
        more={"model": {"plain": hosts.sparse()}},
    ),
    "methods.esft.round_trip": Row(
        round_trip, lambda: {"batch": hosts.seen()}, true_round_trip
    ),
    "methods.esft.concentration": Row(
        esft.concentration, lambda: {"scores": scores()}, true_concentration
    ),
    "methods.esft.half_mass": Row(
        esft.half_mass, lambda: {"scores": scores()}, true_half_mass
    ),
    "methods.esft.overlap": Row(
        esft.overlap,
        lambda: {
            "first": {"a": scores()},
            "second": {"a": scores(1), "b": scores(2)},
            "top": 2,
        },
        true_overlap,
    ),
    "methods.esft.switches": Row(
        esft.switches,
        lambda: {
            "pooled": {"tokens": scores(), "samples": scores(1)},
            "thresholds": {"gate": 0.5},
        },
        settings=("pooled",),
        more={"pooled": {"missing": {"tokens": scores()}, "empty": {}}},
    ),
    "methods.esft.counts": Row(
        esft.counts,
        lambda: {"selections": {("gate", "law"): selection()}},
        true_counts,
    ),
    "methods.esft.spread": Row(esft.spread, lambda: {"shares": shares()}, true_spread),
    "methods.esft.by_arm": Row(
        lambda tables, tests: {
            arm: part.score.sum() for arm, part in esft.by_arm(tables, tests).items()
        },
        lambda: {"tables": tables(), "tests": ["gcd", "sums"]},
        settings=("tables",),
        fine={"tests": EVERY},
        several=("tests",),
        more={"tables": {"empty": {}, "no rows": {("gate", "law"): table()[:0]}}},
    ),
    "methods.esft.front": Row(
        esft.front,
        lambda: {"tables": [table(), table()], "target": "gcd"},
        lambda tables, target: true_front(tables, target),
        several=("tables",),
    ),
    "methods.esft.at_equal_accuracy": Row(
        esft.at_equal_accuracy,
        lambda: {"one": front(), "other": front()},
        true_equal,
        own={"one": "empty | short | long", "other": "empty | short | long"},
    ),
}


def true_front(tables, target):
    solved = []
    general = []
    for answers in tables:
        if (
            not answers.correct.between(0, 1).all()
            or answers.correct.isna().any()
            or not len(answers)
        ):
            raise ValueError("correct")
        mine = answers[answers.asked == target]
        rest = answers[answers.asked != target]
        if not len(mine) or not len(rest):
            raise ValueError("no rows")
        solved.append(mine.correct.mean())
        general.append(
            evaluation.by_benchmark(rest, {name: name for name in rest.asked}).score
        )
    if not tables or len({len(part) for part in general}) > 1:
        raise ValueError("items")
    return np.array(solved), np.array(general)
