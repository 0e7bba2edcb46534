"""What a training step must hold in memory, counted tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one training step holds at its fullest, apart from work space.

    Attributes:
        parameters: All parameters and buffers.
        kept: What autograd keeps for the backward pass, parameters left out, each tensor once.
        trained: Gradients and AdamW's two moments of the parameters that require a gradient.
    """

    parameters: int
    kept: int
    trained: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.parameters + self.kept + self.trained


def step_memory(model: nn.Module, batch: Mapping[str, Tensor]) -> StepMemory:
    """Count the bytes of a training step with AdamW by one forward pass; nothing is changed.

    Args:
        model: Called as ``model(**batch)`` in the mode it is in.
        batch: ``input_ids``, ``attention_mask`` and ``labels``.
    """
    own = {part.untyped_storage().data_ptr() for part in model.state_dict().values()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, _same), torch.random.fork_rng():
        output = model(**batch)  # held until the end, else its storages could be used twice
    storages = (part.untyped_storage() for part in model.state_dict().values())
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}  # tied weights once
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    del output
    return StepMemory(sum(held.values()), sum(kept.values()), 3 * trained)


def _same(tensor: Tensor) -> Tensor:
    return tensor
