"""Calls of the analyses that are right, and plain loops that they must agree with."""

import math
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from moebook.analysis import clusters, routers, routing
from moebook.methods import upcycling
from tests.faults.healthy import hosts
from tests.faults.healthy.kernels import draw
from tests.faults.healthy.nn import true_watched
from tests.faults.hostile import EVERY, Row

SEEDS = "zero | huge"  # of a seed: any that the library takes


def points():
    """Two layers of two far groups, 9 and 11 points."""
    made = draw(2, 20, 4) * 0.1
    made[:, 9:] += 10
    return made


def labels():
    return torch.tensor([0] * 9 + [1] * 11)


def true_purity(points, labels, seed):
    """By the two groups that are there, whatever they are called."""
    if (
        points.shape[1] != len(labels)
        or points.dim() != 3
        or not points.isfinite().all()
    ):
        raise ValueError("points")
    if not isinstance(seed, int) or not 0 <= seed < 2**32 or not len(labels):
        raise ValueError("seed")
    lines = []
    kinds = labels.unique()
    for layer, part in enumerate(points.double()):
        if (part.square().sum(-1) > 1e38).any() or len(kinds) > 2:
            raise OverflowError("distances")
        alike = part.std() < 1 or len(kinds) == 1
        side = torch.ones(len(part)).bool() if alike else part[:, 0] > part[:, 0].mean()
        right = 0
        for one in (side, ~side):
            right += float(max((labels[one] == kind).sum() for kind in kinds))
        largest = max((labels == kind).double().mean() for kind in kinds)
        lines.append((layer, right / len(labels), float(largest)))
    return pd.DataFrame(lines, columns=["layer", "purity", "largest"])


def true_project(points, method, seed):
    if method != "pca" or not 0 <= seed < 2**32 or not isinstance(seed, int):
        raise ValueError(method)
    if not points.isfinite().all() or points.dim() != 3 or points.shape[1] < 2:
        raise ValueError("points")
    planes = []
    for part in points.double():
        part = part - part.mean(0)
        plane = part @ torch.linalg.svd(part, full_matrices=False).Vh[:2].T
        planes.append(plane.abs() / plane.abs().max().clamp(min=1e-12))
    return torch.stack(planes)


def sizes(points, method, seed):
    """How far from 0 each coordinate is: an axis has no sign."""
    return np.abs(clusters.project(points, method, seed=seed))


def true_scale(logits):
    wide = logits.double()
    if wide.dim() < 2 or not wide.numel():
        raise ValueError("logits")
    return (wide - wide.mean(-1, keepdim=True)).square().mean().sqrt()


def model():
    """An upcycled host, whose routers are ours."""
    return upcycling.upcycle(hosts.host(), upcycling.Config(experts=4, top_k=2))


def true_decided(model, batch):
    return true_watched(hosts.sparse(), batch)


def true_activated(model, batches):
    by_layer = {}
    for batch in batches:
        for n, (_, ids, _, _) in true_decided(model, batch).items():
            chosen = torch.zeros(len(ids), 4).scatter(1, ids, 1)
            by_layer.setdefault(n, []).append(chosen)
    made = torch.stack([torch.cat(parts) for parts in by_layer.values()]).bool()
    if not made.shape[1]:
        raise ValueError("no tokens")
    return made


def true_statistics(model, batches):
    lines = []
    for n in range(2):
        parts = [true_decided(model, batch)[n] for batch in batches]
        logits = torch.cat([part[0] for part in parts])
        ids = torch.cat([part[1] for part in parts])
        if not len(logits):
            raise ValueError("no tokens")
        share = logits.double().softmax(-1)
        load = torch.bincount(ids.flatten(), minlength=4) / 1.0
        load = load / load.sum()
        entropy = -(share * share.log()).sum(-1).mean() / math.log(4)
        spread = -sum(float(s) * math.log(s) for s in load if s > 0) / math.log(4)
        lines.append((n, true_scale(logits), entropy, spread, load.max()))
    names = ["layer", "scale", "entropy", "load_entropy", "largest"]
    return pd.DataFrame([list(map(float, line)) for line in lines], columns=names)


def true_gradients(model, batch):
    """By the loss written out, without transformers' own."""
    weights = [
        layer.mlp.gate.weight for layer in model.requires_grad_(True).model.layers
    ]
    grads = torch.autograd.grad(true_loss(model, batch), weights)
    return pd.DataFrame(
        {"layer": [0, 1], "gradient": [float(grad.norm()) for grad in grads]}
    )


def true_loss(model, batch):
    """The loss written out."""
    ids = batch["input_ids"]
    labels = batch["labels"]
    if labels.shape != ids.shape or not ids.numel() or (labels < -100).any():
        raise ValueError("labels")
    true_watched(hosts.sparse(), {k: v for k, v in batch.items() if k != "labels"})
    mask = batch.get("attention_mask")
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


def true_reach(model, batch):
    loss = true_loss(model, batch)
    routers = []
    experts = []
    for name, weight in model.named_parameters():
        if ".router." in name:
            routers.append(weight)
        elif ".experts." in name:
            experts.append(weight)
    grads = torch.autograd.grad(loss, [*routers, *experts])
    sizes = [float(grad.norm()) for grad in grads]
    return math.hypot(*sizes[: len(routers)]) / math.hypot(*sizes[len(routers) :])


def true_state(model, batches, batch):
    table = true_statistics(model, batches)
    norms = true_gradients(model, batch).gradient
    means = {name: table[name].mean() for name in ("scale", "entropy", "load_entropy")}
    return {"gradient": math.hypot(*norms), **means}


def true_shares(model, batches):
    lines = []
    for domain, several in batches.items():
        counts = [[0] * 4, [0] * 4]
        for batch in several:
            for n, ids in enumerate(chosen_by(model, batch)):
                for expert in ids.flatten().tolist():
                    counts[n][expert] += 1
        for n, mine in enumerate(counts):
            path = f"model.layers.{n}.mlp.router"
            lines += [
                (n, path, domain, e, c, c / sum(mine)) for e, c in enumerate(mine)
            ]
    if not lines:
        raise ValueError("no batches")
    return pd.DataFrame(
        lines, columns=["layer", "router", "domain", "expert", "slots", "share"]
    )


def chosen_by(model, batch):
    """The experts of the real tokens by layer, from what the routers read."""
    true_watched(hosts.sparse(), batch)  # whether it is a batch
    read = []
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    layers = model.model.layers
    hooks = [
        one.mlp.register_forward_pre_hook(lambda _, x: read.append(x[0]))
        for one in layers
    ]
    model(**batch)
    for hook in hooks:
        hook.remove()
    weights = [layer.mlp.router.weight for layer in layers]
    pairs = zip(read, weights, strict=True)
    return [(x[mask] @ weight.T).topk(2).indices for x, weight in pairs]


def true_consistency(checkpoints):
    if len(checkpoints) < 2 or len({each.shape for each in checkpoints}) > 1:
        raise ValueError("checkpoints")
    if any(each.dtype != torch.bool or not each.any(-1).all() for each in checkpoints):
        raise ValueError("sets")
    scores = []
    for one, other in combinations(checkpoints, 2):
        inter = (one & other).sum(-1).double()
        union = (one | other).sum(-1).double()
        scores.append((inter / union).mean(-1))
    means = torch.stack(scores).mean(0)
    return pd.DataFrame({"layer": range(len(means)), "consistency": means.tolist()})


def sets(seed):
    """Which of 4 experts 3 tokens activate in 2 layers."""
    first = draw(2, 3, 4, seed=seed).argmax(-1, keepdim=True)
    return (
        torch.zeros(2, 3, 4)
        .scatter(2, torch.cat([first, (first + 1) % 4], 2), 1)
        .bool()
    )


def shares():
    """Two routers, two domains, three experts."""
    slots = {
        ("a", "x"): [3, 2, 1],
        ("a", "y"): [0, 4, 2],
        ("b", "x"): [2, 2, 2],
        ("b", "y"): [6, 0, 0],
    }
    lines = []
    for (router, domain), counts in slots.items():
        layer = int(router == "b")
        for expert, count in enumerate(counts):
            lines.append((layer, router, domain, expert, count, count / sum(counts)))
    columns = ["layer", "router", "domain", "expert", "slots", "share"]
    return pd.DataFrame(lines, columns=columns)


def by_router(frame):
    """The shares as lists by router and domain, or an error where they are none."""
    shares = {}
    for _, line in frame.iterrows():
        shares.setdefault((line.layer, line.router), {}).setdefault(line.domain, {})
        mine = shares[line.layer, line.router][line.domain]
        if line.expert in mine or line.slots < 0 or not math.isfinite(line.slots):
            raise ValueError("slots")
        mine[line.expert] = (line.slots, line.share)
    for domains in shares.values():
        for experts in domains.values():
            if {*experts} != {0, 1, 2} or abs(
                sum(s for _, s in experts.values()) - 1
            ) > 1e-6:
                raise ValueError("shares")
            if not all(0 <= share <= 1 for _, share in experts.values()):
                raise ValueError("shares")
    if not shares:
        raise ValueError("no rows")
    return shares


def over_domains(domains):
    """Each expert's share of a router's slots."""
    counts = [0, 0, 0]
    for experts in domains.values():
        for expert in range(3):
            counts[expert] += experts[expert][0]
    return [count / sum(counts) for count in counts]


def shares_of(experts):
    """The shares of the three experts, in order."""
    return [experts[expert][1] for expert in range(3)]


def true_load(frame):
    lines = []
    for (layer, router), domains in sorted(by_router(frame).items()):
        share = over_domains(domains)
        entropy = -sum(s * math.log(s) for s in share if s) / math.log(3)
        lines.append((layer, router, entropy, max(share)))
    return pd.DataFrame(lines, columns=["layer", "router", "entropy", "largest"])


def true_specialisation(frame):
    lines = []
    for (layer, router), domains in sorted(by_router(frame).items()):
        mean = np.mean([shares_of(experts) for experts in domains.values()], axis=0)
        for domain, experts in sorted(domains.items()):
            apart = np.abs(shares_of(experts) - mean).sum() / 2
            lines.append((layer, router, domain, apart))
    return pd.DataFrame(lines, columns=["layer", "router", "domain", "distance"])


def true_contrast(shares, one, other):
    gaps = []
    for domains in by_router(shares).values():
        gaps.append(np.subtract(shares_of(domains[one]), shares_of(domains[other])))
    gaps = np.array(gaps)
    return np.abs(gaps.mean(0)).sum() / 2, (np.abs(gaps).sum(1) / 2).mean()


def true_summary(shares):
    load = true_load(shares)
    apart = true_specialisation(shares)
    return {
        "load_entropy": load.entropy.mean(),
        "largest_share": load.largest.mean(),
        "specialisation": apart.distance.mean(),
    }


def true_panels(shares, most):
    if most != int(most) or most < 1:
        raise ValueError(most)
    layers = [0, 1] if most > 1 else [0]
    panels = {}
    for (layer, _), domains in by_router(shares).items():
        if layer in layers:
            rows = [shares_of(domains[name]) for name in sorted(domains)]
            panels[f"layer {layer}"] = np.array(rows).T
    return panels


def drawn_panels(shares, most):
    return {
        name: part.to_numpy().T for name, part in routing.panels(shares, most).items()
    }


def true_stacks(shares, most):
    true_panels(shares, most)
    found = by_router(shares)
    wanted = [0, 1] if most > 1 else [0]
    spread = {}
    for (layer, _), domains in found.items():
        if layer in wanted:
            spread[f"layer {layer}"] = np.array(over_domains(domains))
    return spread


ROWS = {
    "analysis.clusters.purity": Row(
        clusters.purity,
        lambda: {"points": points(), "labels": labels(), "seed": 0},
        true_purity,
        fine={"labels": "negative | out of range"},
    ),
    "analysis.clusters.project": Row(
        sizes,
        lambda: {"points": points(), "method": "pca", "seed": 0},
        true_project,
        tolerance=1e-3,
    ),
    "analysis.clusters.panels": Row(
        clusters.panels,
        lambda: {
            "points": points(),
            "labels": labels(),
            "names": ["a", "b"],
            "method": "pca",
            "seed": 0,
        },
        fine={
            "seed": SEEDS,
            "names[0]": EVERY,
            "points": "zero | huge | long | short",
            "labels": "zero",
        },
        several=("names",),
    ),
    "analysis.routers.logit_scale": Row(
        routers.logit_scale, lambda: {"logits": draw(5, 4)}, true_scale
    ),
    "analysis.routers.statistics": Row(
        routers.statistics,
        lambda: {"model": hosts.sparse(), "batches": [hosts.seen()]},
        true_statistics,
    ),
    "analysis.routers.gradients": Row(
        routers.gradients,
        lambda: {"model": hosts.sparse(), "batch": hosts.batch()},
        true_gradients,
        tolerance=1e-3,
    ),
    "analysis.routers.reach": Row(
        routers.reach,
        lambda: {"model": model(), "batch": hosts.batch()},
        true_reach,
        tolerance=1e-3,
    ),
    "analysis.routers.summary": Row(
        routers.summary,
        lambda: {
            "model": hosts.sparse(),
            "batches": [hosts.seen()],
            "batch": hosts.batch(),
        },
        true_state,
        tolerance=1e-3,
    ),
    "analysis.routers.activated": Row(
        routers.activated,
        lambda: {"model": hosts.sparse(), "batches": [hosts.seen()]},
        true_activated,
    ),
    "analysis.routers.consistency": Row(
        routers.consistency,
        lambda: {"checkpoints": [sets(0), sets(1), sets(2)]},
        true_consistency,
        several=("checkpoints",),
    ),
    "analysis.routers.overall": Row(
        routers.overall,
        lambda: {"watched": {0: sets(0), 5: sets(1)}, "steps": [0, 5]},
        lambda watched, steps: true_consistency(
            [watched[n] for n in steps]
        ).consistency.mean(),
    ),
    "analysis.routers.real_decisions": Row(
        lambda model, batch: [
            part[:3] for part in routers.real_decisions(model, batch)
        ],
        lambda: {"model": hosts.sparse(), "batch": hosts.seen()},
        lambda model, batch: [part[:3] for part in true_decided(model, batch).values()],
    ),
    "analysis.routers.decisions": Row(
        lambda model, batch: {
            n: d.real()[:4] for n, d in routers.decisions(model, batch).items()
        },
        lambda: {"model": hosts.sparse(), "batch": hosts.seen()},
        true_decided,
    ),
    "analysis.routing.shares": Row(
        routing.shares,
        lambda: {
            "model": model(),
            "batches": {"x": [hosts.seen()], "y": [hosts.seen()]},
        },
        true_shares,
    ),
    "analysis.routing.load": Row(routing.load, lambda: {"frame": shares()}, true_load),
    "analysis.routing.specialisation": Row(
        routing.specialisation, lambda: {"frame": shares()}, true_specialisation
    ),
    "analysis.routing.contrast": Row(
        routing.contrast,
        lambda: {"shares": shares(), "one": "x", "other": "y"},
        true_contrast,
    ),
    "analysis.routing.panels": Row(
        drawn_panels, lambda: {"shares": shares(), "most": 2}, true_panels
    ),
    "analysis.routing.stacks": Row(
        routing.stacks, lambda: {"shares": shares(), "most": 2}, true_stacks
    ),
    "analysis.routing.summary": Row(
        routing.summary, lambda: {"shares": shares()}, true_summary
    ),
}
