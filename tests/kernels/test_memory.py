"""Kept memory is handed out again when nothing shares it any more, and never before."""

import copy
import gc

import pytest
import torch
from torch.nn import functional as F

from moebook.kernels import Bank, experts, route
from moebook.kernels.memory import LARGE, gradient_like


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.ones(LARGE // 4, 2))


def test_memory_comes_back_when_the_last_tensor_that_shares_it_is_gone(weight):
    first = gradient_like(weight)
    place, row = first.data_ptr(), first[3]
    assert gradient_like(weight).data_ptr() != place
    del first
    assert gradient_like(weight).data_ptr() != place, "a row of it is still held"
    array = row.numpy()
    del row
    assert gradient_like(weight).data_ptr() != place, "an array of it is still held"
    del array
    again = gradient_like(weight)
    assert again.data_ptr() == place
    assert (again.shape, again.dtype) == (weight.shape, weight.dtype)


def test_small_frozen_and_computed_weights_get_new_memory(weight):
    small = torch.nn.Parameter(torch.ones(2, 3))
    for tensor in (small, weight.detach(), weight * 2):
        grad = gradient_like(tensor)
        assert grad.shape == tensor.shape
        grad.fill_(1)
    assert copy.deepcopy(weight).equal(weight)


def test_a_changed_weight_gets_memory_of_its_new_size(weight):
    gradient_like(weight)
    weight.data = torch.ones(LARGE // 2, 3, dtype=torch.bfloat16)
    gc.collect()
    grad = gradient_like(weight)
    assert (grad.shape, grad.dtype) == (weight.shape, torch.bfloat16)


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
