"""Calls of Rocket's rivals that are right, and what they must come to."""

import math
from functools import cache

import numpy as np
import torch
from datasets import Dataset
from torch.nn import functional as F

from moebook.methods.rivals import (
    arrow,
    lorahub,
    mixing,
    mixlora,
    pems,
    phatgoose,
    pi_tuning,
    poly,
    smear,
    table,
    tuning,
    vanilla,
)
from moebook.methods.rivals import rocket as mixture
from moebook.methods.rivals.tuning import Data
from moebook.methods.rocket.loras import attached
from tests.faults.healthy import hosts
from tests.faults.healthy.loras import bank, host, logits, lora, merged, right
from tests.faults.healthy.pesc import folder
from tests.faults.hostile import Row, must

N = 3
R = 2
D = 4
OUT = 5
SEARCH = lorahub.Config(budget=8)
RECIPE = {"lr": 1e-3, "steps": 1, "batch": 3, "warmup": 0.0, "seed": 0}
OTHER = {"empty": {}, "one": {"a": lora()}, "twice": {"a": lora("a"), "b": lora("b")}}


@cache
def rows(most=300, labels=True):
    """Encoded rows that the host knows."""
    torch.manual_seed(4)
    ids = [torch.randint(3, most, (5 + i % 4,)).tolist() for i in range(6)]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": ids, "length": list(map(len, ids))}
    )


def data():
    return Data(rows(), sources=dict.fromkeys("abc", rows()), pad_id=2)


def squared(weights):
    """A loss whose least value lies at 1, 0.5 and -1."""
    return float(((weights - np.array([1.0, 0.5, -1.0])) ** 2).sum())


def found(loss, size, seed):
    return lorahub.search(loss, size, SEARCH, seed=seed).shape


def true_found(loss, size, seed):
    """Of how many numbers the answer is, if the loss tells one from another."""
    if not isinstance(size, int) or size != 3 or not 0 <= seed < 2**32:
        raise ValueError(size)
    if not math.isfinite(loss(np.zeros(3))) or not math.isfinite(loss(np.ones(3))):
        raise ValueError("loss")
    return (3,)


def true_folded(weights):
    """Reflected once at the wall, then cut off at the other."""
    folded = []
    for weight in weights.flatten().tolist():
        size = 3.0 - abs(weight) if abs(weight) > 1.5 else abs(weight)
        folded.append(math.copysign(1, weight) * size if weight else 0.0)
    return np.clip(np.array(folded).reshape(weights.shape), -1.5, 1.5)


def mixed(bank, weights, mix):
    return logits(merged(host(), mixing.merged(bank, weights, mix=mix)))


def true_mixed(bank, weights, mix):
    """By the sums of the matrices themselves."""
    right(*bank.values())
    if weights.shape != (len(bank),) or not weights.isfinite().all() or not bank:
        raise ValueError("weights")
    if (
        weights.dtype not in (torch.float16, torch.float32, torch.float64)
        or mix != "outputs"
    ):
        raise ValueError("weights")
    model = host()
    for weight, one in zip(weights.tolist(), bank.values(), strict=True):
        for path, down in one.down.items():
            linear = model.get_submodule(path)
            delta = weight * one.scale * (one.up[path].double() @ down.double())
            linear.weight.data = (linear.weight.double() + delta).float()
    return logits(model)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pointed(down, up, names):
    """Directions without their sign."""
    return arrow.prototypes({"l": (down, up)}, names)["l"].abs()


def true_pointed(down, up, names):
    if down.dim() != 3 or up.dim() != 3 or not len(down) == len(up) == len(names):
        raise ValueError("shapes")
    if not down.numel() or not up.numel():
        raise ValueError("empty")
    whole = up.double() @ down.double()
    values, right_ = torch.linalg.svd(whole, full_matrices=False)[1:]
    if not (values[:, 0] > 0).all() or not whole.isfinite().all():
        raise ValueError("idle")
    return right_[:, 0].abs()


def fisher(one, rows_, form):
    return pi_tuning.fisher(host(), one, rows_, form=form)


def true_fisher(one, rows_, form):
    """One row after another, by autograd."""
    right(one)
    if form != "row" or not len(rows_):
        raise ValueError(form)
    total = {}
    for ids, labels in zip(rows_["input_ids"], rows_["labels"], strict=True):
        if (
            len(ids) != len(labels)
            or not {*ids, *labels} <= {-100, *range(300)}
            or len(ids) < 2
        ):
            raise ValueError("row")
        model = host().requires_grad_(False)
        deltas = {}
        for path, down in one.down.items():
            a = down.clone().requires_grad_()
            b = one.up[path].clone().requires_grad_()
            deltas[path] = a, b
            linear = model.get_submodule(path)
            linear.register_forward_hook(
                lambda _, x, y, a=a, b=b: y + one.scale * (x[0] @ a.T @ b.T)
            )
        said = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        F.cross_entropy(said, torch.tensor(labels[1:]), reduction="sum").backward()
        for path, pair in deltas.items():
            for name, part in zip("AB", pair, strict=True):
                seen = total.get(f"{path}.{name}", 0)
                total[f"{path}.{name}"] = seen + part.grad.double() ** 2 / len(rows_)
    return {f"{p}.{x}": total[f"{p}.{x}"] for x in "AB" for p in one.down}


def true_alike(one, other, eps):
    if one.keys() != other.keys() or not one or not eps >= 0 or not math.isfinite(eps):
        raise ValueError("tasks")
    cosines = []
    for name, left in one.items():
        second = other[name]
        if left.shape != second.shape or not (
            left.isfinite().all() and second.isfinite().all()
        ):
            raise ValueError("shape")
        if (left.double() < 0).any() or (second.double() < 0).any():
            raise ValueError("no squares")
        a = left.double().flatten()
        b = second.double().flatten()
        total = (a + b + eps).clamp(min=1e-300)
        cosines.append(F.cosine_similarity(a / total, b / total, dim=0))
    return float(torch.stack(cosines).mean())


def tasks(seed):
    return {
        "l.A": drawn(R, D, seed=seed) ** 2,
        "l.B": drawn(OUT, R, seed=seed + 1) ** 2,
    }


def true_scores(x, vectors):
    if x.shape[-1:] != vectors.shape[1:] or vectors.dim() != 2 or not vectors.numel():
        raise ValueError("shapes")

    def normed(part):
        part = part.double()
        spread = part.var(-1, unbiased=False, keepdim=True)
        return (part - part.mean(-1, keepdim=True)) / (spread + 1e-5).sqrt()

    return normed(x) @ normed(vectors).T / math.sqrt(vectors.shape[1])


def tuned(module, config, settings=()):
    """A row of a rival: whatever the bank and recipe, it answers, or refuses."""

    def call(bank, train, **recipe):
        model = host()
        module.tuned(
            model, bank, Data(train, pad_id=2, sources=data().sources), config, **recipe
        )
        return logits(model).isfinite().all()

    return Row(
        call,
        lambda: {"bank": bank(), "train": rows(), **RECIPE},
        lambda **_: True,
        settings=("bank", "train", "batch", "steps", "warmup", *settings),
        more={
            "bank": OTHER,
            "train": {"empty": rows().select([]), "unknown": rows(10**6)},
        },
    )


def attached_alone(one, learnt=False):
    return logits(tuning.alone(host(), one, learnt=learnt).model)


@cache
def saved(name):
    """The folder of a rival whose weights depend on the input."""
    module = {
        "arrow": arrow,
        "smear": smear,
        "phatgoose": phatgoose,
        "mixlora": mixlora,
    }[name]
    how = {"top_k": 2} if name in ("arrow", "phatgoose") else {}
    how |= {"steps": 2} if name == "phatgoose" else {}
    done = module.tuned(
        host(), bank(), data(), module.Config.preset("bank", **how), **RECIPE
    )
    return done.save(folder(name))


def loaded(name):
    module = {
        "arrow": arrow,
        "smear": smear,
        "phatgoose": phatgoose,
        "mixlora": mixlora,
    }[name]
    return Row(
        lambda model, folder: logits(module.load(model, folder).model).isfinite().all(),
        lambda: {"model": host(), "folder": saved(name)},
        lambda model, folder: must(folder == saved(name)),
        more={
            "model": {"other": hosts.host(vocab_size=300, hidden_size=12, head_dim=6)}
        },
    )


def on_shots(one, train):
    return tuning.on_shots(host(), one, Data(train, pad_id=2))


def true_on_shots(one, train):
    total = 0.0
    count = 0
    with torch.no_grad(), attached(host(), [one]) as _:
        pass
    model = merged(host(), one)
    for ids, labels in zip(train["input_ids"], train["labels"], strict=True):
        if len(ids) != len(labels) or not {*ids, *labels} <= {-100, *range(300)}:
            raise ValueError("row")
        with torch.no_grad():
            said = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
        total += float(F.cross_entropy(said, torch.tensor(labels[1:]), reduction="sum"))
        count += len(labels) - 1
    return total / count


ROWS = {
    "methods.rivals.lorahub.search": Row(
        found,
        lambda: {"loss": squared, "size": 3, "seed": 0},
        true_found,
        more={
            "loss": {
                "nan": lambda weights: math.nan,
                "nan later": lambda weights: math.nan if weights.any() else 1.0,
                "inf": lambda weights: math.inf,
            }
        },
    ),
    "methods.rivals.lorahub.folded": Row(
        lorahub.folded,
        lambda: {"weights": np.array([0.5, -2.0, 1.7, 9.0])},
        true_folded,
    ),
    "methods.rivals.mixing.merged": Row(
        mixed,
        lambda: {
            "bank": bank(),
            "weights": torch.tensor([0.5, -0.2, 0.1]),
            "mix": "outputs",
        },
        true_mixed,
        settings=("bank", "mix"),
        tolerance=1e-3,
    ),
    "methods.rivals.mixing.fresh_like": Row(
        lambda seed: [
            one.down for one in mixing.fresh_like(bank(), seed=seed).values()
        ],
        lambda: {"seed": 0},
        fine={"seed": "zero | huge"},
    ),
    "methods.rivals.arrow.prototypes": Row(
        pointed,
        lambda: {
            "down": drawn(N, R, D),
            "up": drawn(N, OUT, R, seed=1),
            "names": list("abc"),
        },
        true_pointed,
        tolerance=1e-3,
    ),
    "methods.rivals.pi_tuning.fisher": Row(
        fisher,
        lambda: {"one": lora(), "rows_": rows(), "form": "row"},
        true_fisher,
        settings=("one",),
        tolerance=1e-2,
    ),
    "methods.rivals.pi_tuning.fishers": Row(
        lambda bank, train: sorted(
            pi_tuning.fishers(
                host(), bank, Data(rows(), sources=train, pad_id=2), pi_tuning.Config()
            )
        ),
        lambda: {"bank": {"a": lora()}, "train": {"a": rows()}},
        lambda bank, train: must({*bank} <= {*train}) and sorted({*bank}),
        settings=("bank", "train"),
        more={
            "train": {
                "missing": {},
                "unknown": {"a": rows(10**6)},
                "empty": {"a": rows()[:0]},
            }
        },
    ),
    "methods.rivals.pi_tuning.similarity": Row(
        lambda one, other, eps: pi_tuning.similarity(one, other, eps=eps),
        lambda: {"one": tasks(0), "other": tasks(5), "eps": 0.0},
        true_alike,
    ),
    "methods.rivals.phatgoose.scores": Row(
        phatgoose.scores,
        lambda: {"x": drawn(2, D), "vectors": drawn(N, D, seed=1)},
        true_scores,
        tolerance=1e-3,
    ),
    "methods.rivals.phatgoose.gates": Row(
        lambda seed: sorted(
            phatgoose.gates(
                host(), {"a": lora()}, data(), phatgoose.Config(steps=2), seed=seed
            )["a"].vectors
        ),
        lambda: {"seed": 0},
        fine={"seed": "zero | huge"},
    ),
    "methods.rivals.smear.prompted": Row(
        lambda tokens: prompted(tokens),
        lambda: {"tokens": 3},
        fine={"tokens": "huge"},
    ),
    "methods.rivals.table.arms": Row(
        lambda **how: sorted(table.arms(**how)),
        lambda: {"size": 12, "rate": 0.01, "searches": 40, "experts": 4, "top_k": 2},
        fine={"size": "huge", "rate": "huge", "searches": "huge", "experts": "huge"},
    ),
    "methods.rivals.table.tuned": Row(
        lambda lr, seed: (
            logits(
                table.tuned(
                    host(),
                    table.Arm(rival="smear", rated="smear"),
                    bank(),
                    data(),
                    table.Shipped(),
                    lr=lr,
                    seed=seed,
                    steps=2,
                    batch=3,
                ).model
            )
            .isfinite()
            .all()
        ),
        lambda: {"lr": 1e-3, "seed": 0},
        lambda lr, seed: True,
    ),
    "methods.rivals.tuning.Data": Row(
        lambda shots: len(Data(rows(), pad_id=2).first(shots)),
        lambda: {"shots": 2},
        lambda shots: must(isinstance(shots, int) and 1 <= shots <= 6) and shots,
    ),
    "methods.rivals.tuning.alone": Row(
        attached_alone,
        lambda: {"one": lora()},
        lambda one: logits(merged(host(), one)),
        settings=("one",),
        more={"one": {"other": lora(base="0" * 64)}},
        tolerance=1e-3,
    ),
    "methods.rivals.tuning.on_shots": Row(
        on_shots,
        lambda: {"one": lora(), "train": rows()},
        true_on_shots,
        settings=("one",),
    ),
    "methods.rivals.arrow.tuned": tuned(arrow, arrow.Config(top_k=2)),
    "methods.rivals.lorahub.tuned": tuned(lorahub, SEARCH, ("lr",)),
    "methods.rivals.mixlora.tuned": tuned(mixlora, mixlora.Config.preset("bank")),
    "methods.rivals.pems.tuned": tuned(pems, pems.Config()),
    "methods.rivals.phatgoose.tuned": tuned(
        phatgoose, phatgoose.Config(steps=2, batch=3, rows="target"), ("lr",)
    ),
    "methods.rivals.pi_tuning.tuned": tuned(pi_tuning, pi_tuning.Config()),
    "methods.rivals.poly.tuned": tuned(poly, poly.Config()),
    "methods.rivals.rocket.tuned": tuned(
        mixture, mixture.Config(candidates=3, experts=3, top_k=2)
    ),
    "methods.rivals.smear.tuned": tuned(smear, smear.Config()),
    "methods.rivals.vanilla.tuned": tuned(vanilla, vanilla.Config.preset("random")),
    "methods.rivals.arrow.load": loaded("arrow"),
    "methods.rivals.mixlora.load": loaded("mixlora"),
    "methods.rivals.phatgoose.load": loaded("phatgoose"),
    "methods.rivals.smear.load": loaded("smear"),
}


def prompted(tokens):
    done = smear.tuned(host(), bank(), data(), smear.Config(), **RECIPE)
    with smear.prompted(done, tokens):
        return logits(done.model)
