"""Training: one visible loop over accelerate, its batches and its checkpoints."""

from moebook.training import processes
from moebook.training.batches import nats
from moebook.training.checkpoints import History
from moebook.training.loop import fit
from moebook.training.memory import step_memory
from moebook.training.precision import widen
from moebook.training.recipe import Recipe
from moebook.training.recomputing import recompute

__all__ = [
    "History",
    "Recipe",
    "fit",
    "nats",
    "recompute",
    "step_memory",
    "widen",
]

if processes.told_of_fsdp():
    from moebook.training.sharding import fit
