"""route: top-k, weights, and the grouping of slots by expert."""

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels import route
from moebook.kernels.route import reference

IMPLS = ("torch", "reference")


@pytest.mark.parametrize("impl", IMPLS)
def test_hand_worked_row_is_routed_and_weighted(impl):
    logits = torch.log(torch.tensor([[1.0, 3.0, 4.0, 2.0]], dtype=torch.float64))
    routing = route(logits, 2, impl=impl)
    assert routing.ids.tolist() == [[2, 1]]
    torch.testing.assert_close(routing.weights, torch.tensor([[4 / 7, 3 / 7]], dtype=torch.float64))
    raw = route(logits, 2, combine="probability", impl=impl)
    torch.testing.assert_close(raw.weights, torch.tensor([[0.4, 0.3]], dtype=torch.float64))


@pytest.mark.parametrize("impl", IMPLS)
def test_among_equal_logits_the_lower_expert_wins(impl):
    assert route(torch.zeros(3, 5), 2, impl=impl).ids.tolist() == [[0, 1]] * 3
    assert route(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), 3, impl=impl).ids.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(17, 5, 2), (1, 4, 4), (0, 3, 1), (9, 1, 1), (700, 8, 8), (90, 64, 6), (30, 300, 3)],
)
def test_fast_path_chooses_what_the_reference_chooses(tokens, experts, top_k, dtype):
    logits = torch.randn(tokens, experts).round(decimals=1).to(dtype)  # rounding makes ties
    for number in (torch.inf, -torch.inf, torch.nan, -torch.tensor(torch.nan), -0.0):
        logits[torch.rand(tokens, experts) < 0.03] = number
        logits[torch.rand(tokens, experts) < 0.03] = torch.finfo(dtype).min
    found, want = route(logits, top_k, impl="torch"), reference(logits, top_k)
    assert torch.equal(found.ids, want.ids)
    assert torch.equal(found.order, want.order)


def test_experts_of_minus_infinity_are_chosen_once_each_where_nothing_else_is_left():
    none = -torch.inf
    logits = torch.tensor([[none, 2.0, none, 1.0], [none, none, none, 0.0], [none] * 4])
    ids = route(logits, 3, impl="torch").ids
    assert ids.tolist() == [[1, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert torch.equal(ids, reference(logits, 3).ids)


def test_order_groups_slots_by_expert_and_keeps_token_order_within():
    routing = route(torch.randn(40, 6), 2)
    flat = routing.ids.flatten().tolist()
    assert routing.order.tolist() == sorted(range(80), key=lambda slot: (flat[slot], slot))
    assert routing.counts.tolist() == [flat.count(expert) for expert in range(6)]


@pytest.mark.parametrize("impl", IMPLS)
def test_shapes_are_inferred_on_meta(impl):
    routing = route(torch.zeros(7, 5, device="meta"), 3, impl=impl)
    assert {part.device.type for part in routing} == {"meta"}
    assert [tuple(part.shape) for part in routing] == [(7, 3), (7, 3), (21,), (5,)]


def test_weights_carry_the_softmax_gradient():
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    for combine in ("renormalised", "probability"):
        assert torch.autograd.gradcheck(lambda x, c=combine: route(x, 2, combine=c).weights, logits)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: route(torch.zeros(4), 1), "E-SHAPE"),
        (lambda: route(torch.zeros(4, 2), 3), "E-RANGE"),
        (lambda: route(torch.zeros(4, 2), 0), "E-RANGE"),
        (lambda: route(torch.zeros(4, 2), 2.0), "E-TYPE"),
        (lambda: route(torch.zeros(4, 2), 1, combine="sum"), "E-CHOICE"),
        (lambda: route(torch.zeros(4, 2), 1, impl="cuda"), "E-IMPL"),
    ],
)
def test_unusable_arguments_are_refused(call, code):
    with pytest.raises(Refusal, match=code):
        call()
