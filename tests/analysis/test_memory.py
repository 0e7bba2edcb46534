"""Memory of a training step, against bytes counted by hand."""

import torch
from torch import nn

from moebook.analysis.memory import step_memory


def test_bytes_are_those_counted_by_hand():
    linear = [nn.Linear(*size, bias=False) for size in ((4, 8), (8, 2))]
    model, batch = nn.Sequential(linear[0], nn.Tanh(), linear[1]), {"input": torch.randn(5, 4)}
    linear[0].requires_grad_(False)
    half = step_memory(model, batch)
    assert half.parameters == 4 * (4 * 8 + 8 * 2)
    assert half.trained == 3 * 4 * 8 * 2
    assert half.kept == 4 * 5 * 8  # what the second layer reads; the frozen part keeps nothing
    model.requires_grad_(True)
    more = step_memory(model, batch)
    assert more.kept == 4 * (5 * 4 + 5 * 8)  # and the input; tanh's output is the same tensor
    assert more.trained == 3 * more.parameters
    assert more.total == more.parameters + more.kept + more.trained


def test_counting_changes_neither_gradients_nor_random_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    step_memory(model, {"input": torch.ones(2, 4)})
    assert torch.equal(torch.rand(3), expected)
    assert model[0].weight.grad is None
