"""route: top-k, weights, slots grouped by expert, the rows' layout and the way back; balance_loss.

The balance loss is Eq. 10 worked by hand, masked, with a gradient that lives (or does not).
"""

from functools import partial

import pytest
import torch

from moebook.kernels import balance_loss, grouped, matmul, route
from moebook.kernels.route import lay_out, reference
from tests.refusals import refused

both = pytest.mark.parametrize("impl", ["torch", "reference"])
NONE = -torch.inf


@both
def test_hand_worked_row_is_routed_and_weighted(impl):
    logits = torch.log(torch.tensor([[1.0, 3.0, 4.0, 2.0]], dtype=torch.float64))
    routing = route(logits, 2, impl=impl)
    assert routing.ids.tolist() == [[2, 1]]
    torch.testing.assert_close(
        routing.weights, torch.tensor([[4 / 7, 3 / 7]], dtype=torch.float64)
    )
    raw = route(logits, 2, combine="probability", impl=impl)
    torch.testing.assert_close(
        raw.weights, torch.tensor([[0.4, 0.3]], dtype=torch.float64)
    )


@both
@pytest.mark.parametrize(
    ("logits", "ids"),
    [
        ([[0] * 5] * 3, [[0, 1]] * 3),
        ([[1, 2, 2, 0]], [[1, 2, 0]]),
        # Experts of minus infinity are chosen once each where nothing else is left.
        (
            [[NONE, 2, NONE, 1], [NONE, NONE, NONE, 0], [NONE] * 4],
            [[1, 3, 0], [3, 0, 1], [0, 1, 2]],
        ),
    ],
)
def test_among_equal_logits_the_lower_expert_wins(logits, ids, impl):
    assert (
        route(torch.tensor(logits).float(), len(ids[0]), impl=impl).ids.tolist() == ids
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16]
)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [
        (17, 5, 2),
        (1, 4, 4),
        (0, 3, 1),
        (9, 1, 1),
        (700, 8, 8),
        (90, 64, 6),
        (30, 300, 3),
    ],
)
def test_fast_path_chooses_what_the_reference_chooses(tokens, experts, top_k, dtype):
    # Rounding makes ties.
    logits = torch.randn(tokens, experts).round(decimals=1).to(dtype)
    for number in (torch.inf, -torch.inf, torch.nan, -torch.tensor(torch.nan), -0.0):
        logits[torch.rand(tokens, experts) < 0.03] = number
        logits[torch.rand(tokens, experts) < 0.03] = torch.finfo(dtype).min
    ours = route(logits, top_k, impl="torch")
    want = reference(logits, top_k)
    assert torch.equal(ours.ids, want.ids)
    assert torch.equal(ours.order, want.order)


def test_order_groups_slots_by_expert_and_keeps_token_order_within():
    routing = route(torch.randn(40, 6), 2)
    flat = routing.ids.flatten().tolist()
    assert routing.order.tolist() == sorted(
        range(80), key=lambda slot: (flat[slot], slot)
    )
    assert routing.counts.tolist() == [flat.count(expert) for expert in range(6)]
    assert all(map(torch.equal, grouped(routing.ids, routing.weights, 6), routing))


@both
def test_shapes_are_inferred_on_meta(impl):
    routing = route(torch.zeros(7, 5, device="meta"), 3, impl=impl)
    assert {part.device.type for part in routing} == {"meta"}
    assert [tuple(part.shape) for part in routing] == [(7, 3), (7, 3), (21,), (5,)]
    layout = lay_out(routing, torch.float32, 1)  # as if each expert had as many
    assert [rows.stop - rows.start for _, rows in layout.segments] == [5, 4, 4, 4, 4]
    assert len(layout.parts(1)) == 1
    assert layout.token.is_meta


@pytest.mark.parametrize("combine", ["renormalised", "probability"])
def test_weights_carry_the_softmax_gradient(combine):
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: route(x, 2, combine=combine).weights, logits
    )


IDS = torch.zeros(4, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (route, {"top_k": 4}, "E-RANGE"),
        (route, {"top_k": 0}, "E-RANGE"),
        (route, {"top_k": 2.0}, "E-TYPE"),
        (route, {"combine": "sum"}, "E-CHOICE"),
        (balance_loss, {"form": "dead"}, "E-CHOICE"),
        (balance_loss, {"mask": torch.ones(3)}, "E-SHAPE"),
        (balance_loss, {"mask": torch.tensor([1, 0, 2, 1])}, "E-RANGE: .* 0 to 2, exp"),
        (balance_loss, {"mask": torch.full((4,), 0.5)}, "E-RANGE"),
        (balance_loss, {"mask": torch.full((4,), torch.nan)}, "E-RANGE"),
        (
            balance_loss,
            {"logits": torch.zeros(4, 0)},
            r"E-SHAPE: .*: expected logits \[T, E\]",
        ),
        (balance_loss, {"ids": IDS[:, :0]}, "E-SHAPE"),
        (balance_loss, {"ids": IDS[:2]}, "E-SHAPE"),
    ],
)
def test_unusable_arguments_are_refused(function, changes, message):
    right = {"top_k": 1} if function is route else {"ids": IDS}
    refused(message, function, **{"logits": torch.zeros(4, 3), **right, **changes})


def test_segments_that_are_compiled_have_few_sizes_and_little_filling(monkeypatch):
    counts = [*range(1, 70), *range(70, 3000, 37), 1000, 1001]
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[:, None]
    routing = grouped(ids, torch.ones(ids.shape), len(counts))

    def sizes_of(*of):
        return [rows.stop - rows.start for _, rows in lay_out(routing, *of).segments]

    sizes = sizes_of(torch.bfloat16, 1)
    for count, size in zip(counts, sizes, strict=True):
        assert count <= size <= count * 9 / 8
        assert size % 2 ** max(size.bit_length() - 4, 0) == 0, "four significant bits"
    monkeypatch.setattr(matmul, "is_wider", lambda: True)
    wide = [c if c <= 1000 else size for c, size in zip(counts, sizes, strict=True)]
    assert sizes_of(torch.float32, matmul.ENOUGH // 1000) == wide
    monkeypatch.setattr(matmul, "is_wider", lambda: False)
    assert sizes_of(torch.float32, matmul.ENOUGH) == counts


@both
@pytest.mark.parametrize(
    ("experts", "chosen", "want"),
    [
        (4, [[0], [1], [2], [3]], 1),
        (4, [[2]] * 4, 4),
        (8, [[0, 1]] * 6, 4),
    ],
)
def test_value_is_1_for_uniform_and_E_over_K_for_collapsed_routing(
    experts, chosen, want, impl
):
    ids = torch.tensor(chosen)
    logits = torch.zeros(len(ids), experts, dtype=torch.float64).scatter(1, ids, 60.0)
    value = balance_loss(logits, route(logits, ids.shape[1]).ids, impl=impl)
    assert value.item() == pytest.approx(want, abs=1e-12)


@both
def test_three_tokens_worked_by_hand(impl):
    logits = torch.log(
        torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.3, 0.6]]).double()
    )
    ids = route(logits, 1).ids
    # top-1: experts 0, 0, 2, so f = (2/3, 0, 1/3); p = (1.3, 0.9, 0.8) / 3
    want = 3 * (2 / 3 * 1.3 / 3 + 1 / 3 * 0.8 / 3)
    assert balance_loss(logits, ids, impl=impl).item() == pytest.approx(want)
    # without the last token: f = (1, 0, 0), p = (0.6, 0.3, 0.1)
    masked = balance_loss(logits, ids, mask=torch.tensor([1, 1, 0]), impl=impl)
    assert masked.item() == pytest.approx(3 * 0.6)


@both
def test_the_kept_form_averages_the_gates_by_expert(impl):
    logits = torch.log(
        torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.3, 0.6]]).double()
    )
    ids = route(logits, 2).ids
    # f = (2, 3, 1) / 6; the gates of 7 : 2, 5 : 4 and 6 : 3 give p = (4/3, 1, 2/3) / 3
    want = 3 * (2 * 4 / 3 + 3 * 1 + 1 * 2 / 3) / 18
    kept = partial(balance_loss, ids=ids, form="kept", impl=impl)
    assert kept(logits).item() == pytest.approx(want)
    assert kept(logits, mask=torch.tensor([1, 1, 0])).item() == pytest.approx(3 / 2)
    assert torch.autograd.gradcheck(kept, logits.requires_grad_())


@both
def test_padding_has_no_influence_on_value_or_gradient_which_is_the_numerical_one(impl):
    logits = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(9) < 6
    ids = route(logits, 2).ids
    masked = balance_loss(logits, ids, mask=mask, impl=impl)
    short = balance_loss(logits[:6], ids[:6], impl=impl)
    assert masked.item() == pytest.approx(short.item(), abs=1e-12)
    (grad,) = torch.autograd.grad(masked, logits)
    assert grad[6:].abs().max() == 0 < grad[:6].abs().max()
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


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_sixteen_bits_more_slots_count_than_the_largest_number(impl, dtype):
    logits = torch.randn(70_000, 4).to(dtype).requires_grad_()
    ids = route(logits, 2).ids.int()
    value = balance_loss(logits, ids, impl=impl)
    want = balance_loss(logits.double(), ids)
    assert value.dtype == dtype
    assert value.item() == pytest.approx(want.item(), rel=0.01)
    grads = [torch.autograd.grad(each * 1024, logits)[0] for each in (value, want)]
    torch.testing.assert_close(*grads, rtol=0.02, atol=1e-4)
