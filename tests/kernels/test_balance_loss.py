"""balance_loss: Eq. 10 worked by hand, masked, with a gradient that lives (or does not)."""

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels import balance_loss, route

both = pytest.mark.parametrize("impl", ["torch", "reference"])


@both
@pytest.mark.parametrize(
    ("experts", "chosen", "want"),
    [(4, [[0], [1], [2], [3]], 1), (4, [[2]] * 4, 4), (8, [[0, 1]] * 6, 4)],
)
def test_value_is_1_for_uniform_and_E_over_K_for_collapsed_routing(experts, chosen, want, impl):
    ids = torch.tensor(chosen)
    logits = torch.zeros(len(ids), experts, dtype=torch.float64).scatter(1, ids, 60.0)
    value = balance_loss(logits, route(logits, ids.shape[1]).ids, impl=impl)
    assert value.item() == pytest.approx(want, abs=1e-12)


@both
def test_three_tokens_worked_by_hand(impl):
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.3, 0.6]]).double())
    ids = route(logits, 1).ids
    # top-1: experts 0, 0, 2, so f = (2/3, 0, 1/3); p = (1.3, 0.9, 0.8) / 3
    want = 3 * (2 / 3 * 1.3 / 3 + 1 / 3 * 0.8 / 3)
    assert balance_loss(logits, ids, impl=impl).item() == pytest.approx(want)
    # without the last token: f = (1, 0, 0), p = (0.6, 0.3, 0.1)
    masked = balance_loss(logits, ids, mask=torch.tensor([1, 1, 0]), impl=impl)
    assert masked.item() == pytest.approx(3 * 0.6)


@both
def test_padding_has_no_influence_on_value_or_gradient_which_is_the_numerical_one(impl):
    logits = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    mask, ids = torch.arange(9) < 6, route(logits, 2).ids
    masked = balance_loss(logits, ids, mask=mask, impl=impl)
    short = balance_loss(logits[:6], ids[:6], impl=impl)
    assert masked.item() == pytest.approx(short.item(), abs=1e-12)
    (grad,) = torch.autograd.grad(masked, logits)
    assert grad[6:].abs().max() == 0
    assert grad[:6].abs().max() > 0
    assert balance_loss(logits, ids, mask=torch.zeros(9), impl=impl).item() == 0
    # The load, ids, is held fixed.
    assert torch.autograd.gradcheck(lambda x: balance_loss(x, ids, impl=impl), logits)


@pytest.mark.parametrize("spread", [0.0, 5.0])
def test_the_released_form_is_the_constant_E_over_K_without_a_gradient(spread):
    logits = (torch.randn(50, 8) * spread).double().requires_grad_()
    ids = route(logits, 2).ids
    value = balance_loss(logits, ids, form="constant")
    assert value.item() == pytest.approx(8 / 2, abs=1e-12)
    (grad,) = torch.autograd.grad(value, logits)
    assert grad.abs().max() < 1e-15
    (live,) = torch.autograd.grad(balance_loss(logits, ids), logits)
    assert spread == 0 or live.abs().max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "dead"}, "E-CHOICE"),
        ({"mask": torch.ones(3)}, "E-SHAPE"),
        ({"logits": torch.zeros(4, 0)}, r"E-SHAPE: balance_loss: expected logits \[T, E\]"),
        ({"ids": torch.zeros(4, 0, dtype=torch.int64)}, "E-SHAPE"),
        ({"ids": torch.zeros(2, 1, dtype=torch.int64)}, "E-SHAPE"),
    ],
)
def test_unusable_arguments_are_refused(changes, message):
    right = {"logits": torch.zeros(4, 3), "ids": torch.zeros(4, 1, dtype=torch.int64)}
    with pytest.raises(Refusal, match=message):
        balance_loss(**right | changes)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_sixteen_bits_more_slots_count_than_the_largest_number(impl, dtype):
    logits = torch.randn(70_000, 4).to(dtype).requires_grad_()
    ids = route(logits, 2).ids.int()
    value, want = balance_loss(logits, ids, impl=impl), balance_loss(logits.double(), ids)
    assert value.dtype == dtype
    assert value.item() == pytest.approx(want.item(), rel=0.01)
    grads = [torch.autograd.grad(each * 1024, logits)[0] for each in (value, want)]
    torch.testing.assert_close(*grads, rtol=0.02, atol=1e-4)
