"""Calls of training that are right, and losses written out that they must agree with."""

import torch
from torch.nn import functional as F

from moebook import training
from tests.faults.healthy import hosts
from tests.faults.hostile import EVERY, Row, new_folder


def fit(train, **recipe):
    """What a short training comes to, without its times."""
    history = training.fit(hosts.host(), train, **recipe)
    return {
        "step": history.step,
        "loss": history.loss,
        "milestones": history.milestones,
    }


def folder():
    """A folder that is not there yet, in one that is."""
    return new_folder() / "checkpoints"


def pairs(rows):
    """Ids and labels of rows that a host knows."""
    lines = list(zip(rows["input_ids"], rows["labels"], strict=True))
    if not lines:
        raise ValueError("no rows")
    for ids, labels in lines:
        known = {*ids, *labels} - {-100}
        if len(ids) != len(labels) or not known <= {*range(48)}:
            raise ValueError("row")
        if all(label == -100 for label in labels[1:]):
            raise ValueError("nothing to learn")
    return lines


def true_nats(model, rows, pad_id, batch):
    if (
        not isinstance(pad_id, int)
        or not 0 <= pad_id < 48
        or not isinstance(batch, int)
    ):
        raise ValueError(pad_id)
    if batch < 1:
        raise ValueError(batch)
    total = 0.0
    count = 0
    for ids, labels in pairs(rows):
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
        wanted = torch.tensor(labels[1:])
        total += F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
        count += int((wanted != -100).sum())
    return total / count


def spoilt():
    """A model of NaN."""
    model = hosts.host()
    model.lm_head.weight.data.fill_(torch.nan)
    return model


RECIPE = {"steps": 2, "batch": 3, "lr": 1e-3}
PENALTIES = {
    "several": lambda model: torch.ones(2),
    "no tensor": lambda model: 0.0,
    "nan": lambda model: torch.tensor(torch.nan),
    "one": lambda model: torch.tensor(1),
}
ROWS = {
    "training.nats": Row(
        training.nats,
        lambda: {"model": hosts.host(), "rows": hosts.rows(), "pad_id": 2, "batch": 4},
        true_nats,
        more={"model": {"nan": spoilt()}},
    ),
    "training.fit": Row(
        fit,
        lambda: {
            "train": hosts.rows(),
            "penalty": lambda model: model.lm_head.weight.mean(),
            "milestones": [([1, 2], lambda model: 1.0)],
            "label": "",
            "pad_id": 2,
            **RECIPE,
        },
        fine={
            "label": EVERY,
            "train.length": EVERY,
            "batch": "huge",
            "penalty": "one",
            "milestones": "empty | short | long | zero",
            "pad_id": "zero",
        },
        more={
            "penalty": PENALTIES,
            "milestones": {"negative": [([-1], print)], "out of range": [([3], print)]},
        },
        own={"milestones[0]": "empty | short | long"},
    ),
    "training.fit with checkpoints": Row(
        fit,
        lambda: {"train": hosts.rows(), "output": folder(), "every": 2, **RECIPE},
        fine={"every": "huge", "output": "missing"},
        settings=("train", *RECIPE),
    ),
    "training.step_memory": Row(
        lambda model, batch: vars(training.step_memory(model, batch)),
        lambda: {"model": hosts.host(), "batch": hosts.batch()},
        fine={
            "batch[input_ids]": "zero",
            "batch[labels]": "zero | negative",
            "batch[attention_mask]": "zero",
        },
    ),
}
