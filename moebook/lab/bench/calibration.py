"""What the planner predicts of a step and what one takes here: bytes, seconds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset

from moebook import models, runtime, storage
from moebook.errors import Refusal
from moebook.lab import planning
from moebook.lab.bench.running import ceilings, slug
from moebook.lab.bench.timing import Contender, timed
from moebook.lab.planning import Training, methods
from moebook.methods import pesc, rocket, upcycling
from moebook.models import register_experts
from moebook.models.anatomy import NAME
from moebook.training import fit, recompute

STEPS = 2  # of a training: at the second the optimiser has moments
PARTS = 2  # of a step: micro-batches whose gradients add up
DTYPE = torch.float32  # of all weights, and of what is computed with them


class Case(NamedTuple):
    """A training of a base that is at hand; ``rows`` are those of a micro-batch."""

    name: str
    base: str
    method: methods.Method
    rows: int = 8
    length: int = 256
    checkpointing: bool = False


def cases() -> list[Case]:
    """List what is trained."""
    adapters = methods.pesc(pesc.Config(host="lora", lora_rank=16, adapter_width=32))
    mixed = methods.mixture(rocket.Config(), 16)
    return [
        Case("all parameters", "nano", methods.full()),
        Case("ESFT, a tenth of the experts", "nano-moe", methods.esft(0.1)),
        Case("PESC with LoRA", "nano", adapters),
        Case("all parameters", "nano-moe", methods.full()),
        Case("four upcycled experts", "nano", methods.upcycling(upcycling.Config())),
        Case(
            "all parameters, checkpointing", "nano", methods.full(), checkpointing=True
        ),
        Case("mixture of four LoRAs", "nano", mixed),
        Case("LoRA", "nano-moe", methods.lora(8, 2.0)),
        Case(
            "PESC with LoRA, checkpointing",
            "smollm2",
            adapters,
            1,
            128,
            checkpointing=True,
        ),
        Case("all parameters", "smollm2", methods.full(), 1, 128),
    ]


def calibrate(device: str, folder: Path) -> Path:
    """Measure every case on a device; ``results/plan/`` has each as soon as it ran."""
    place = runtime.resolve_device(device)
    roof = ceilings(device, DTYPE)
    machine = runtime.environment()
    name = machine["accelerator"] if place.type == "cuda" else machine["cpu"]
    record: dict[str, Any] = {
        "machine": name,
        "torch": machine["versions"]["torch"],
        "date": runtime.now(),
        "commit": storage.commit(folder),
        "roof": roof,
        "cases": [],
    }
    file = "cpu" if place.type == "cpu" else slug(name).lower()
    path = folder / planning.RECORDS / f"{file}.json"
    for case in runtime.progress(cases(), "plan", len(cases())):
        record["cases"].append(_measured(case, place, roof))
        storage.write(path, json.dumps(record, indent=1) + "\n")
    return path


def _measured(
    case: Case, place: torch.device, roof: dict[str, float]
) -> dict[str, Any]:
    """Train a case for a few steps; return what was predicted and measured, or why not.

    ``bytes`` are those of all tensors that were alive at once, ``resident`` what the
    process took from the system, or torch from a GPU, above what it had before.
    """
    head = {
        "case": case.name,
        "base": case.base,
        "rows": case.rows,
        "length": case.length,
    }
    try:
        model, _ = models.load(case.base, device=place, dtype=DTYPE)
    except Refusal as refusal:
        return head | {"absent": refusal.message}
    register_experts()
    model.set_experts_implementation(NAME)
    model = case.method.make(model)
    if case.checkpointing:
        recompute(model)

    batch = case.rows * PARTS
    ids = np.random.default_rng(0).integers(3, 1000, (batch, case.length)).tolist()
    train = Dataset.from_dict({"input_ids": ids, "labels": ids})
    brief = [ids[0][:8]]
    warm_up = Dataset.from_dict({"input_ids": brief, "labels": brief})
    fit(model, warm_up, steps=1, warmup=0.0)  # loads what is loaded at the first use

    # The longer run less the shorter one: a step without what a training begins with.
    run = partial(fit, model, train, batch=batch, accumulate=PARTS)
    short = partial(run, steps=STEPS)
    long = partial(run, steps=2 * STEPS)
    first = timed(Contender("ours", short), place, watched=True)
    second = timed(Contender("ours", long), place, watched=True)
    with planning.Tally([*model.parameters(), *model.buffers()]) as tally:
        short()
    weights = sum(weight.nbytes for weight in model.parameters())
    return head | {
        "predicted": _predicted(case, roof),
        "bytes": tally.peak,
        "resident": weights + (first.memory or 0),
        "seconds": (second.seconds - first.seconds) / STEPS,
    }


def _predicted(case: Case, roof: dict[str, float]) -> dict[str, float]:
    """What the planner says of a step: bytes by part, FLOPs, roofline seconds."""
    training = Training(
        host=case.base,
        method=case.method,
        dtype=DTYPE,
        length=case.length,
        batch=case.rows * PARTS,
        steps=1,
    )
    size = planning.size(training, case.rows, case.checkpointing)
    moments = 2 * size.gradients  # AdamW's
    seconds = size.seconds({DTYPE: roof["flops"]}, roof["bytes"])
    update = planning.state(size, moments) / roof["bytes"]
    return {
        "weights": size.weights,
        "gradients": size.gradients,
        "moments": moments,
        "activations": size.activations,
        "flops": PARTS * size.flops,
        "seconds": PARTS * seconds + update,
    }
