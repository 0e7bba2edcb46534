"""balance_loss: Eq. 10 worked by hand, masked, with a gradient that lives (or does not)."""

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels import balance_loss, route

both = pytest.mark.parametrize("impl", ["torch", "reference"])


def one_hot_logits(experts, chosen, height=60.0):
    logits = torch.zeros(len(chosen), experts, dtype=torch.float64)
    logits[range(len(chosen)), chosen] = height
    return logits


@both
def test_value_is_1_for_uniform_and_E_over_K_for_collapsed_routing(impl):
    two = torch.full((6, 8), -60.0, dtype=torch.float64)
    two[:, :2] = 0.0
    for logits, top_k, want in (
        (one_hot_logits(4, [0, 1, 2, 3]), 1, 1.0),
        (one_hot_logits(4, [2, 2, 2, 2]), 1, 4.0),
        (two, 2, 4.0),
    ):
        value = balance_loss(logits, route(logits, top_k).ids, impl=impl)
        assert value.item() == pytest.approx(want, abs=1e-12)


@both
def test_three_tokens_worked_by_hand(impl):
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.3, 0.6]]).double())
    # top-1: experts 0, 0, 2, so f = (2/3, 0, 1/3); p = (1.3, 0.9, 0.8) / 3
    want = 3 * (2 / 3 * 1.3 / 3 + 1 / 3 * 0.8 / 3)
    assert balance_loss(logits, route(logits, 1).ids, impl=impl).item() == pytest.approx(want)
    # without the last token: f = (1, 0, 0), p = (0.6, 0.3, 0.1)
    mask = torch.tensor([1, 1, 0])
    masked = balance_loss(logits, route(logits, 1).ids, mask=mask, impl=impl)
    assert masked.item() == pytest.approx(3 * 0.6)


@both
def test_padding_has_no_influence_on_value_or_gradient(impl):
    logits = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(9) < 6
    ids = route(logits, 2).ids
    masked = balance_loss(logits, ids, mask=mask, impl=impl)
    short = balance_loss(logits[:6], ids[:6], impl=impl)
    assert masked.item() == pytest.approx(short.item(), abs=1e-12)
    (grad,) = torch.autograd.grad(masked, logits)
    assert grad[6:].abs().max() == 0
    assert grad[:6].abs().max() > 0
    assert balance_loss(logits, ids, mask=torch.zeros(9), impl=impl).item() == 0


@both
def test_gradient_equals_the_numerical_one_with_the_load_held_fixed(impl):
    logits = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    ids = route(logits, 2).ids
    assert torch.autograd.gradcheck(lambda x: balance_loss(x, ids, impl=impl), logits)


def test_the_released_form_is_the_constant_E_over_K_without_a_gradient():
    for spread in (0.0, 5.0):
        logits = (torch.randn(50, 8) * spread).double().requires_grad_()
        value = balance_loss(logits, route(logits, 2).ids, form="constant")
        assert value.item() == pytest.approx(8 / 2, abs=1e-12)
        (grad,) = torch.autograd.grad(value, logits)
        assert grad.abs().max() < 1e-15
        (live,) = torch.autograd.grad(balance_loss(logits, route(logits, 2).ids), logits)
        assert spread == 0 or live.abs().max() > 1e-4


def test_unusable_arguments_are_refused():
    logits, ids = torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64)
    for kwargs, code in (
        ({"form": "dead"}, "E-CHOICE"),
        ({"impl": "c"}, "E-IMPL"),
        ({"mask": torch.ones(3)}, "E-SHAPE"),
    ):
        with pytest.raises(Refusal, match=code):
            balance_loss(logits, ids, **kwargs)
    for wrong in ((logits[:, :0], ids), (logits, ids[:, :0]), (logits, ids[:2])):
        with pytest.raises(Refusal, match=r"E-SHAPE: balance_loss: expected logits \[T, E\]"):
            balance_loss(*wrong)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_sixteen_bits_more_slots_count_than_the_largest_number(impl, dtype):
    logits = torch.randn(70_000, 4).to(dtype).requires_grad_()
    ids = route(logits, 2).ids.int()
    value = balance_loss(logits, ids, impl=impl)
    assert value.dtype == dtype
    want = balance_loss(logits.double(), ids)
    assert value.item() == pytest.approx(want.item(), rel=0.01)
    (grad,) = torch.autograd.grad(value * 1024, logits)
    (wide,) = torch.autograd.grad(want * 1024, logits)
    torch.testing.assert_close(grad, wide, rtol=0.02, atol=1e-4)
