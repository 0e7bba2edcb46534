"""Kept memory is handed out again when nothing shares it any more, and never before."""

import pytest
import torch
from torch.nn import functional as F

from moebook.kernels import Bank, experts, memory, route
from moebook.kernels.memory import LARGE, empty

ONE = torch.zeros(1)
SHAPE = (LARGE // 4, 2)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(memory, "_blocks", [])


def test_memory_comes_back_when_the_last_tensor_that_shares_it_is_gone():
    first = empty(SHAPE, ONE)
    place, row = first.data_ptr(), first[3]
    assert place % 64 == 0
    assert empty(SHAPE, ONE).data_ptr() != place
    del first
    assert empty(SHAPE, ONE).data_ptr() != place, "a row of it is still held"
    array = row.numpy()
    del row
    assert empty(SHAPE, ONE).data_ptr() != place, "an array of it is still held"
    memory._blocks.pop()  # else the other one would do
    del array
    again = empty(SHAPE, ONE)
    assert again.data_ptr() == place
    assert (again.shape, again.dtype) == (SHAPE, torch.float32)


def test_a_block_serves_other_shapes_and_dtypes_that_fill_at_least_half_of_it():
    place = empty(SHAPE, ONE).data_ptr()
    other = empty((3, LARGE // 4), ONE.bfloat16())
    assert other.data_ptr() == place
    assert (other.shape, other.dtype) == ((3, LARGE // 4), torch.bfloat16)
    del other
    assert empty((SHAPE[0], 1), ONE.bfloat16()).data_ptr() != place, "a quarter of it"
    assert empty((SHAPE[0], 3), ONE).data_ptr() != place, "more than it"


def test_small_tensors_are_not_kept():
    assert empty((2, 3), ONE).shape == (2, 3)
    assert memory._blocks == []


def test_a_block_that_nobody_needs_any_more_goes_back(monkeypatch):
    monkeypatch.setattr(memory, "TAKES", 3)
    empty(SHAPE, ONE)
    for _ in range(5):
        empty((4 * SHAPE[0], 2), ONE)
    assert [len(block.memory) for block in memory._blocks] == [32 * SHAPE[0]]


def test_steps_accumulation_and_kept_gradients_are_right():
    torch.manual_seed(0)
    bank = Bank(*(torch.nn.Parameter(torch.randn(4, *s)) for s in ((512, 256), (256, 256))))
    xs = [torch.randn(30, 256) for _ in range(3)]
    routing = route(torch.randn(30, 4), 2)

    def gradients(x):
        return torch.autograd.grad(experts(x, routing, bank, F.silu).sum(), bank)

    want = [[grad.clone() for grad in gradients(x)] for x in xs]
    held = []
    for step, x in enumerate(xs):
        for parameter in bank:
            parameter.grad = None
        experts(x, routing, bank, F.silu).sum().backward()
        held.append([parameter.grad for parameter in bank] if step == 1 else None)
        assert all(torch.equal(p.grad, w) for p, w in zip(bank, want[step], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held[1], want[1], strict=True))
    experts(xs[0], routing, bank, F.silu).sum().backward()
    for parameter, a, b in zip(bank, want[2], want[0], strict=True):
        torch.testing.assert_close(parameter.grad, a + b)
