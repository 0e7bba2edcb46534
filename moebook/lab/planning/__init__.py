"""What a training needs, before it runs: bytes a device, FLOPs, hours, cost, and what would fit."""

from moebook.lab.planning import methods
from moebook.lab.planning.cost import (
    EFFICIENCY,
    GPUS,
    Machine,
    Plan,
    machine,
    plan,
    state,
)
from moebook.lab.planning.dry import Size, Training, dry_run, size
from moebook.lab.planning.tally import Tally

__all__ = [
    "Machine",
    "Plan",
    "Size",
    "Training",
    "dry_run",
    "machine",
    "methods",
    "plan",
    "size",
]

RECORDS = "results/plan"
"""Folder of the papers' plans, and of what was measured, a file a machine."""
