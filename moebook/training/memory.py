"""Bytes that a training step holds, counted by one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moebook.nn.batch import check_batch
from moebook.runtime import random_states_kept
from moebook.training.precision import widen


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one training step holds at its fullest, apart from work space."""

    parameters: int  # and buffers
    # By autograd for the backward pass, parameters left out, each tensor once.
    kept: int
    # Gradients, and AdamW's two moments, of the parameters that require a gradient.
    trained: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.parameters + self.kept + self.trained


def step_memory(model: nn.Module, batch: Mapping[str, Tensor]) -> StepMemory:
    """Count the bytes of a training step with AdamW by one pass ``model(**batch)``, in its mode.

    What trains becomes float32 or wider first, as in `fit`. The model may be any module; a batch
    of token ids ``[B, T]`` is checked.
    """
    # Any other module is called with whatever it takes.
    if hasattr(model, "get_input_embeddings"):
        check_batch("step_memory", model, batch, needs=["labels"])
    widen(model)

    # By address, so that tied weights, and what autograd keeps twice, count once.
    weights: dict[int, int] = {}
    for part in model.state_dict().values():
        storage = part.untyped_storage()
        weights[storage.data_ptr()] = storage.nbytes()
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def as_it_is(tensor: Tensor) -> Tensor:
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, as_it_is),
        random_states_kept(),
    ):
        # Held until all is counted, else an address could be used twice.
        output = model(**batch)
    trained = sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if parameter.requires_grad
    )
    del output
    return StepMemory(
        parameters=sum(weights.values()),
        kept=sum(kept.values()),
        trained=3 * trained,
    )
