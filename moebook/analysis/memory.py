"""What a training step must hold in memory, counted tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one training step holds at its fullest, apart from work space."""

    parameters: int  # and buffers
    kept: int  # by autograd for the backward pass, parameters left out, each tensor once
    trained: int  # gradients and AdamW's two moments of the parameters that require a gradient

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.parameters + self.kept + self.trained


def step_memory(model: nn.Module, batch: Mapping[str, Tensor]) -> StepMemory:
    """Count the bytes of a training step with AdamW by one pass ``model(**batch)``, in its mode."""
    storages = (part.untyped_storage() for part in model.state_dict().values())
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}  # tied ones once
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.random.fork_rng():
        output = model(**batch)  # held until the end, else its storages could be used twice
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    del output
    return StepMemory(sum(weights.values()), sum(kept.values()), 3 * trained)
