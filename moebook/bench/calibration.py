"""What the planner predicts beside what a training takes here: peak bytes and seconds of a step."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset

from moebook import models, planning, results, runtime
from moebook.bench.running import ceilings, slug
from moebook.bench.timing import Contender, timed
from moebook.errors import Refusal
from moebook.methods import pesc, rocket, upcycling
from moebook.models import register_experts
from moebook.models.anatomy import NAME
from moebook.planning import Training, methods
from moebook.training import fit

STEPS, PARTS = 2, 2  # of a training, whose second step has moments; of a step, that accumulate


class Case(NamedTuple):
    """A training of a base that is at hand; ``rows`` are those of a micro-batch."""

    name: str
    base: str
    method: methods.Method
    rows: int
    length: int
    checkpointing: bool = False


def cases() -> list[Case]:
    """List what is trained."""
    adapters = methods.pesc(pesc.Config(host="lora", lora_rank=16, adapter_width=32))
    mixed = methods.mixture(rocket.Config(), 16)
    return [
        Case("all parameters", "nano", methods.full(), 8, 256),
        Case("ESFT, a tenth of the experts", "nano-moe", methods.esft(0.1), 8, 256),
        Case("PESC with LoRA", "nano", adapters, 8, 256),
        Case("all parameters", "nano-moe", methods.full(), 8, 256),
        Case("four upcycled experts", "nano", methods.upcycling(upcycling.Config()), 8, 256),
        Case("all parameters, checkpointing", "nano", methods.full(), 8, 256, True),
        Case("mixture of four LoRAs", "nano", mixed, 8, 256),
        Case("LoRA", "nano-moe", methods.lora(8, 2.0), 8, 256),
        Case("PESC with LoRA, checkpointing", "smollm2", adapters, 1, 128, True),
        Case("all parameters", "smollm2", methods.full(), 1, 128),
    ]


def calibrate(device: str, folder: Path) -> Path:
    """Measure every case on a device; each is in the record below ``results/plan/`` at once."""
    place = runtime.resolve_device(device)
    roof, machine = ceilings(device), runtime.environment()
    name = machine["accelerator"] if place.type == "cuda" else machine["cpu"]
    told: dict[str, Any] = {
        "machine": name,
        "torch": machine["versions"]["torch"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": results.commit(folder),
        "roof": roof,
        "cases": [],
    }
    file = "cpu" if place.type == "cpu" else slug(name).lower()
    path = folder / planning.RECORDS / f"{file}.json"
    for case in runtime.progress(cases(), "plan", len(cases())):
        told["cases"].append(_measured(case, place, roof))
        results.write(path, json.dumps(told, indent=1) + "\n")
    return path


def _measured(case: Case, place: torch.device, roof: dict[str, float]) -> dict[str, Any]:
    """Train a case for a few steps; return prediction and measurement, or why it did not run.

    ``bytes`` are those of all tensors that were alive at once, ``resident`` what the process took
    from the system, or torch from a GPU, above what it had before.
    """
    head = {"case": case.name, "base": case.base, "rows": case.rows, "length": case.length}
    try:
        model = models.load(case.base, device=place)[0]
    except Refusal as refusal:
        return head | {"absent": refusal.message}
    register_experts()
    model.set_experts_implementation(NAME)
    model = case.method.make(model)
    if case.checkpointing:
        planning.recompute(model)
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 1000, (case.rows * PARTS, case.length)).tolist()
    train, brief = (Dataset.from_dict({"input_ids": rows, "labels": rows})
                    for rows in (ids, [ids[0][:8]]))  # fmt: skip
    fit(model, brief, steps=1)  # loads what is loaded at the first use
    runs = [partial(fit, model, train, steps=steps, batch=case.rows * PARTS, accumulate=PARTS)
            for steps in (STEPS, 2 * STEPS)]  # fmt: skip
    first, second = (timed(Contender("ours", run), place, watched=True) for run in runs)
    with planning.Tally([*model.parameters(), *model.buffers()]) as tally:
        runs[0]()
    weights = sum(part.nbytes for part in model.parameters())
    return head | {
        "predicted": _predicted(case, roof),
        "bytes": tally.peak,
        "resident": weights + (first.memory or 0),
        "seconds": (second.seconds - first.seconds) / STEPS,
    }


def _predicted(case: Case, roof: dict[str, float]) -> dict[str, float]:
    """Return what the planner says of a step: bytes by part, FLOPs, seconds at the roofline."""
    training = Training(host=case.base, method=case.method, length=case.length,
                        batch=case.rows * PARTS, steps=1)  # fmt: skip
    found = planning.size(training, case.rows, case.checkpointing)
    seconds = found.seconds({torch.float32: roof["flops"]}, roof["bytes"])
    state = planning.state(found, 2 * found.gradients) / roof["bytes"]
    return {
        "weights": found.weights,
        "gradients": found.gradients,
        "moments": 2 * found.gradients,
        "activations": found.activations,
        "flops": PARTS * found.flops,
        "seconds": PARTS * seconds + state,
    }
