"""Calls of upcycling that are right, and what they must come to."""

from functools import cache

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from moebook.methods import upcycling
from moebook.methods.upcycling import config as arms
from moebook.methods.upcycling.representations import Representations
from moebook.methods.upcycling.starts import Start
from moebook.models.checkpoint import fingerprint
from tests import tokens
from tests.faults.healthy import hosts
from tests.faults.healthy.kernels import draw
from tests.faults.healthy.pesc import folder, logits
from tests.faults.hostile import Row

SAME = upcycling.Config(experts=4, top_k=2, combine="renormalised")
CONFIGS = {"layers": upcycling.Config(layers=(5,))}
L = 2
D = 8
E = 4


def start():
    """Routers of the host's shape."""
    return Start(draw(L, E, D))


def states(tensor="attention_output"):
    """Two tasks' points, far apart, of the host."""
    points = 0.1 * draw(L, 12, D)
    points[:, 7:] += 10
    labels = torch.tensor([0] * 7 + [1] * 5)
    return Representations(points, labels, ("a", "b"), tensor, base())


@cache
def base():
    return fingerprint(hosts.host())


def upcycled(config=SAME):
    """A sparse model whose experts differ."""
    torch.manual_seed(0)
    model = upcycling.upcycle(hosts.host(), config, start())
    for layer in model.model.layers:
        for weight in layer.mlp.experts.parameters():
            weight.data += 0.1 * torch.randn_like(weight)
    return model


@cache
def saved():
    return upcycling.save(upcycled(), folder())


def true_upcycled(model, config, start):
    """Renormalised gates over equal experts are the dense host."""
    if start.weights.shape != (L, E, D) or not start.weights.isfinite().all():
        raise ValueError("start")
    if config.layers is not None or not start.weights.is_floating_point():
        raise ValueError("config")
    if start.base not in (None, base()):
        raise ValueError("base")
    return logits(hosts.host())


def exported(model, folder, form):
    place = upcycling.export(model, folder, form=form)
    return logits(AutoModelForCausalLM.from_pretrained(place).eval())


def batched(rows, size, pad_id):
    return list(upcycling.batches(rows, size, pad_id=pad_id))


def true_batched(rows, size, pad_id):
    """Pad the rows of each batch to its longest, by hand."""
    batches = []
    lines = list(zip(rows["input_ids"], rows["labels"], strict=True))
    if size != int(size) or size < 1 or not isinstance(pad_id, int):
        raise ValueError(size)
    for ids, labels in lines:
        if len(ids) != len(labels) or not ids:
            raise ValueError("row")
    for at in range(0, len(lines), size):
        part = lines[at : at + size]
        longest = max(len(ids) for ids, _ in part)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for ids, labels in part:
            missing = longest - len(ids)
            batch["input_ids"].append(ids + [pad_id] * missing)
            batch["attention_mask"].append([1] * len(ids) + [0] * missing)
            batch["labels"].append(labels + [-100] * missing)
        batches.append({name: torch.tensor(part) for name, part in batch.items()})
    return batches


def collected(model, tasks, tensor, limit, tokens, share, seed):
    made = upcycling.collect(
        model, tasks, tensor=tensor, limit=limit, tokens=tokens, share=share, seed=seed
    )
    return {"points": made.points, "labels": made.labels}


def attended(model, ids, mask):
    """What the attention of each layer puts out."""
    read = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda _, __, out: read.append(out[0]))
        for layer in model.model.layers
    ]
    model(input_ids=ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return read


def true_collected(model, tasks, tensor, limit, tokens, share, seed):
    """What attention puts out for every real token, in order."""
    if (tensor, tokens, share) != ("attention_output", "each", 1.0) or not tasks:
        raise ValueError(tensor)
    if (
        limit != int(limit)
        or limit < 1
        or limit > 10**6
        or not isinstance(seed, int)
        or seed < 0
    ):
        raise ValueError(limit)
    points = [[], []]
    labels = []
    for number, batches in enumerate(tasks.values()):
        before = len(labels)
        for batch in batches:
            ids = batch["input_ids"]
            mask = batch.get("attention_mask", torch.ones_like(ids))
            if mask.shape != ids.shape or not {*mask.flatten().tolist()} <= {0, 1}:
                raise ValueError("mask")
            read = attended(model, ids, mask)
            for layer, out in enumerate(read):
                points[layer] += list(out[mask.bool()])
            labels += [number] * int(mask.sum())
        if len(labels) == before or len(labels) - before > limit:
            raise ValueError("no tokens, or a draw")
    return {
        "points": torch.stack([torch.stack(part) for part in points]),
        "labels": torch.tensor(labels),
    }


def true_hardest(model, tasks, share, pad_id):
    hardest = {}
    if not 0 < share <= 1 or not isinstance(pad_id, int) or not 0 <= pad_id < 48:
        raise ValueError(share)
    for name, rows in tasks.items():
        scores = []
        for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
            if (
                not {*ids} <= {*range(48)}
                or not {*labels} <= {-100, *range(48)}
                or len(ids) != len(labels)
            ):
                raise ValueError("row")
            said = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
            scores.append(
                float(
                    F.cross_entropy(said, torch.tensor(labels[1:]), ignore_index=-100)
                )
            )
        count = int(share * len(scores) + 1e-9)
        if not count or not all(np.isfinite(scores)):
            raise ValueError("too few")
        best = sorted(sorted(range(len(scores)), key=lambda n: -scores[n])[:count])
        hardest[name] = rows.select(best)
    return hardest


def hardest(model, tasks, share, pad_id):
    return upcycling.hardest(model, tasks, share=share, pad_id=pad_id)


def clouds(texts, tensor, max_length, seed):
    how = {"tensor": tensor, "max_length": max_length, "seed": seed}
    return upcycling.clouds(small(), tokens.byte_tokenizer(), texts, **how)


def prompted(model, rows, experts, mode, max_length):
    how = {"mode": mode, "max_length": max_length}
    return upcycling.prompted(
        model, tokens.byte_tokenizer(), rows, experts, **how
    ).weights


def su(experts, kind, seed):
    return upcycling.su(hosts.host(), experts, kind=kind, seed=seed).weights


def right(states):
    """Whether representations are whole."""
    shape = states.points.shape
    if (
        len(shape) != 3
        or states.labels.shape != shape[1:2]
        or not states.points.isfinite().all()
    ):
        raise ValueError("points")
    if (
        states.labels.dtype not in (torch.int64, torch.int32)
        or not states.points.numel()
    ):
        raise ValueError("labels")
    if not {*states.labels.tolist()} <= {*range(len(states.tasks))} or not all(
        states.tasks
    ):
        raise ValueError("labels")
    if (
        len({*states.tasks}) < len(states.tasks)
        or not states.points.is_floating_point()
    ):
        raise ValueError("tasks")
    return states


def true_trsu(states, seed):
    right(states)
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(seed)
    groups = [
        states.points.double()[:, states.labels == n] for n in range(len(states.tasks))
    ]
    if not all(group.shape[1] for group in groups):
        raise ValueError("no points")
    return torch.stack([group.mean(1) for group in groups], 1)


def true_crsu(states, experts, seed):
    """The two far groups, whichever comes first."""
    right(states)
    if experts != 2 or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(experts)
    wide = states.points.double()
    if not (wide.flatten(0, 1).std() > 1 and (wide.abs() < 1e18).all()):
        raise ArithmeticError("no two groups")
    far = wide[..., :].mean(-1) > 5
    means = []
    for part, mine in zip(wide, far, strict=True):
        means.append(torch.stack([part[~mine].mean(0), part[mine].mean(0)]))
    return torch.stack(means)


def ordered(start):
    """A start's rows by their first number."""
    return torch.stack([part[part[:, 0].sort().indices] for part in start.weights])


def true_levelled(start, inputs, top_k):
    """The sum of the kept probabilities is 1 in the mean over the inputs."""
    right(inputs)
    weights = start.weights.double()
    if inputs.tensor != "ffn_input" or not weights.isfinite().all():
        raise ValueError("inputs")
    if start.base not in (None, inputs.base) or not start.weights.is_floating_point():
        raise ValueError("base")
    sizes = (weights.shape[0], weights.shape[2])
    if sizes != (inputs.points.shape[0], inputs.points.shape[2]):
        raise ValueError("shape")
    if not 1 <= top_k <= weights.shape[1]:
        raise ValueError("top_k")
    shares = []
    for points, weight in zip(inputs.points.double(), weights, strict=True):
        exps = (points @ weight.T - (points @ weight.T).amax(-1, keepdim=True)).exp()
        largest = exps.sort(-1, descending=True).values[:, :top_k]
        shares.append((largest.sum(-1) / exps.sum(-1)).mean())
    return 1 / torch.stack(shares)


def true_scaled(start, scale, inputs):
    """The logits of the inputs then spread by 1."""
    right(inputs)
    weights = start.weights.double()
    if (
        scale != "matched"
        or inputs.tensor != "ffn_input"
        or not weights.isfinite().all()
    ):
        raise ValueError(scale)
    if start.base not in (None, inputs.base) or not start.weights.is_floating_point():
        raise ValueError("base")
    if (
        weights.shape[0] != inputs.points.shape[0]
        or weights.shape[2] != inputs.points.shape[2]
    ):
        raise ValueError("shape")
    rows = []
    for points, weight in zip(inputs.points.double(), weights, strict=True):
        logits = points @ weight.T
        spread = (logits - logits.mean(-1, keepdim=True)).square().mean().sqrt()
        if not spread > 0:
            raise ValueError("equal")
        rows.append(weight / spread)
    return torch.stack(rows)


def prompts():
    return [{"task": "a", "prompt": "one and two"}, {"task": "b", "prompt": "three"}]


def small():
    return hosts.host(vocab_size=300)


def true_prompted(model, rows, experts, mode, max_length):
    """Each expert the unit vector of its prompt's last token, as each layer reads it."""
    tokenizer = tokens.byte_tokenizer()
    tasks = sorted({row["task"] for row in rows})
    if (
        mode != "hidden"
        or experts != len(tasks)
        or max_length < 1
        or max_length != int(max_length)
    ):
        raise ValueError(mode)
    layers = [[] for _ in range(L)]
    for task in tasks:
        last = [[] for _ in range(L)]
        for row in rows:
            if row["task"] != task:
                continue
            ids = tokenizer(
                tokenizer.bos_token + row["prompt"], add_special_tokens=False
            )["input_ids"]
            ids = ids[:max_length]
            if len(ids) < 2:
                raise ValueError("no tokens")
            states = model(
                input_ids=torch.tensor([ids]), output_hidden_states=True
            ).hidden_states
            for n in range(L):
                last[n].append(states[n][0, -1])
        for n in range(L):
            layers[n].append(F.normalize(torch.stack(last[n]).mean(0), dim=0))
    return torch.stack([torch.stack(part) for part in layers])


def step_zero(starts, batch):
    return upcycling.step_zero(hosts.host(), starts, batch)["loss"]


def true_step_zero(starts, batch):
    """Of renormalised gates nothing is lost; of probabilities what the models' own losses say."""
    from tests.faults.healthy.analysis import true_loss

    dense = float(true_loss(hosts.host(), batch))
    losses = []
    for rule in ("renormalised", "probability"):
        for k in (1, 2):
            for start in starts.values():
                if start.weights.shape[::2] != (L, D):
                    raise ValueError("start")
                config = upcycling.Config(
                    experts=start.weights.shape[1], top_k=k, combine=rule
                )
                model = upcycling.upcycle(hosts.host(), config, start)
                losses.append(float(true_loss(model, batch)) - dense)
    return np.array(losses)


def true_balance(attention_mask):
    """The first choices alone count."""
    model = upcycled()
    total = 0
    if attention_mask.shape[0] != 2 or attention_mask.shape[1] < 5:
        raise ValueError("mask")
    model(**hosts.seen())
    real = attention_mask[:, -5:].flatten().bool()
    for layer in model.model.layers:
        decision = layer.mlp.router.trace.decisions[layer.mlp.router.layer]
        ids = decision.ids[real][:, 0]
        share = decision.logits[real].double().softmax(-1)
        count = max(len(ids), 1)
        total = (
            total
            + 4
            * (torch.bincount(ids, minlength=4) / count * share.sum(0) / count).sum()
        )
    return 0.01 * total


def balance_loss(attention_mask):
    model = upcycled()
    model(**hosts.seen())
    return upcycling.balance_loss(model, attention_mask)


def tasks():
    return {"a": [hosts.seen()], "b": [{"input_ids": torch.tensor([[5, 6, 7]])}]}


ROWS = {
    "methods.upcycling.upcycle": Row(
        lambda model, config, start: logits(upcycling.upcycle(model, config, start)),
        lambda: {"model": hosts.host(), "config": SAME, "start": start()},
        true_upcycled,
        settings=("config",),
        more={"config": CONFIGS},
        tolerance=1e-3,
    ),
    "methods.upcycling.save": Row(
        lambda model, folder: logits(
            upcycling.load(hosts.host(), upcycling.save(model, folder))
        ),
        lambda: {"model": upcycled(), "folder": folder()},
        lambda model, folder: logits(upcycled()),
        more={"model": {"dense": hosts.host()}},
    ),
    "methods.upcycling.load": Row(
        lambda model, folder: logits(upcycling.load(model, folder)),
        lambda: {"model": hosts.host(), "folder": saved()},
        lambda model, folder: logits(upcycled()),
    ),
    "methods.upcycling.export": Row(
        exported,
        lambda: {"model": upcycled(), "folder": folder("exported"), "form": "mixtral"},
        lambda model, folder, form: logits(upcycled()),
        tolerance=1e-3,
        more={"model": {"dense": hosts.host()}},
    ),
    "methods.upcycling.batches": Row(
        batched, lambda: {"rows": hosts.rows(), "size": 4, "pad_id": 2}, true_batched
    ),
    "methods.upcycling.collect": Row(
        collected,
        lambda: {
            "model": hosts.host(),
            "tasks": tasks(),
            "tensor": "attention_output",
            "limit": 20,
            "tokens": "each",
            "share": 1.0,
            "seed": 0,
        },
        true_collected,
        fine={"share": "huge"},
    ),
    "methods.upcycling.clouds": Row(
        clouds,
        lambda: {
            "texts": {"a": ["one", "two"], "b": ["three"]},
            "tensor": "attention_output",
            "max_length": 8,
            "seed": 0,
        },
        fine={
            "texts[a]": "short | long | nul | unknown",
            "texts": "missing | unknown",
            "max_length": "huge",
            "seed": "zero | huge",
        },
    ),
    "methods.upcycling.hardest": Row(
        hardest,
        lambda: {
            "model": hosts.host(),
            "tasks": {"a": hosts.rows()},
            "share": 0.5,
            "pad_id": 2,
        },
        true_hardest,
    ),
    "methods.upcycling.trsu": Row(
        lambda states, seed: upcycling.trsu(states, seed=seed).weights,
        lambda: {"states": states(), "seed": 0},
        true_trsu,
        tolerance=1e-3,
    ),
    "methods.upcycling.trsu of more": Row(
        lambda states, experts: upcycling.trsu(states, experts).weights,
        lambda: {"states": states(), "experts": 2},
        settings=("states",),
    ),
    "methods.upcycling.crsu": Row(
        lambda states, experts, seed: ordered(
            upcycling.crsu(states, experts, seed=seed)
        ),
        lambda: {"states": states(), "experts": 2, "seed": 0},
        true_crsu,
        tolerance=1e-3,
    ),
    "methods.upcycling.prompted": Row(
        prompted,
        lambda: {
            "model": small(),
            "rows": prompts(),
            "experts": 2,
            "mode": "hidden",
            "max_length": 20,
        },
        true_prompted,
        tolerance=1e-3,
    ),
    "methods.upcycling.scaled": Row(
        lambda start, scale, inputs: (
            upcycling.scaled(start, scale, inputs=inputs).weights
        ),
        lambda: {"start": start(), "scale": "matched", "inputs": states("ffn_input")},
        true_scaled,
        tolerance=1e-3,
    ),
    "methods.upcycling.levelled": Row(
        lambda start, inputs, top_k: upcycling.levelled(start, inputs, top_k).factors,
        lambda: {"start": start(), "inputs": states("ffn_input"), "top_k": 2},
        true_levelled,
        tolerance=1e-3,
    ),
    "methods.upcycling.su": Row(
        su,
        lambda: {"experts": 3, "kind": "normal", "seed": 0},
        fine={"seed": "zero | huge"},
    ),
    "methods.upcycling.balance_loss": Row(
        balance_loss,
        lambda: {"attention_mask": hosts.batch()["attention_mask"]},
        true_balance,
        fine={"attention_mask": "long"},
    ),
    "methods.upcycling.step_zero": Row(
        step_zero,
        lambda: {"starts": {"one": start()}, "batch": hosts.batch()},
        true_step_zero,
        tolerance=1e-2,
    ),
    "methods.upcycling.arms": Row(
        upcycling.arms,
        lambda: {"steps": 40, "length": "raw", "combine": "probability"},
        fine={"steps": "huge"},
    ),
    "methods.upcycling.quarters": Row(
        arms.quarters,
        lambda: {"steps": 40},
        lambda steps: {n: steps * n // 100 for n in (25, 50, 75, 100)},
    ),
    "methods.upcycling.doublings": Row(
        arms.doublings,
        lambda: {"steps": 40},
        lambda steps: (
            [0, *(2**n for n in range(2000) if 2**n < steps), steps]
            if steps >= 1
            else None
        ),
    ),
    "methods.upcycling.thirds": Row(
        arms.thirds,
        lambda: {"steps": 40},
        lambda steps: (0, steps // 3, 2 * steps // 3, steps) if steps >= 1 else None,
    ),
}
