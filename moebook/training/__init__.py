"""Training: one visible loop over accelerate, its batches and its checkpoints."""

from moebook.training.batches import nats
from moebook.training.loop import History, Recipe, fit, step_memory
