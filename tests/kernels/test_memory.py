"""Kept memory is handed out again when nothing shares it any more, and never before."""

import threading

import pytest
import torch
from torch.nn import functional as F

from moebook.kernels import Bank, experts, matmul, route
from moebook.kernels.matmul import LARGE, empty

ONE = torch.zeros(1)
SHAPE = (LARGE // 4, 2)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(matmul, "_free", {})


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
    matmul._free.clear()  # else another would do
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
    assert matmul._free == {}


def test_no_more_is_kept_than_is_allowed_and_the_longest_free_goes_first(monkeypatch):
    monkeypatch.setattr(matmul, "FREE", 5 * LARGE)
    held = [empty((LARGE * size // 4,), ONE) for size in (2, 1, 2, 6)]
    places = [tensor.data_ptr() for tensor in held]

    def kept():
        return [block.ctypes.data for block in matmul._free.values()]

    for _ in range(3):
        held.pop(0)
    assert kept() == places[:3]
    other = empty((LARGE * 3 // 4,), ONE)
    del other
    assert kept()[0] == places[2], "3 were too much: the first two went"
    assert [len(block) // LARGE for block in matmul._free.values()] == [2, 3]
    held.pop()
    assert kept() == [], "more than is allowed by itself"


def test_threads_never_share_a_block():
    wrong = []

    def work(number):
        for _ in range(50):
            mine = empty((LARGE // 4,), ONE).fill_(number)
            if not (mine == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(matmul._free) <= 8, "each held one while it took another"


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_training_is_bitwise_what_it_is_in_new_memory(optimizer, set_to_none, monkeypatch):
    def train(large):
        """Two passes a step; gradients of one step and of one pass are held to the end."""
        monkeypatch.setattr(matmul, "LARGE", large)
        torch.manual_seed(0)
        bank = Bank(*(torch.nn.Parameter(torch.randn(4, *s)) for s in ((12, 8), (8, 6))))
        steps, held = optimizer(bank, lr=0.01), []
        for step in range(4):
            for _ in range(2):
                x = torch.randn(30, 8, requires_grad=True)
                y = experts(x, route(x[:, :4], 2), bank, F.silu)
                y.square().mean().backward()
                held += [x.grad, y.detach()]
                held += [weight.grad for weight in bank if step == 1 and set_to_none]
            steps.step()
            steps.zero_grad(set_to_none=set_to_none)
        return [*held, *(weight.detach() for weight in bank)]

    pairs = zip(train(1), train(2**60), strict=True)
    assert all(torch.equal(kept, new) for kept, new in pairs)
    assert matmul._free


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
