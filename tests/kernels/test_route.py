"""route: top-k, weights, and slots grouped by expert; the layout of the rows and the way back."""

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels import grouped, matmul, route
from moebook.kernels.route import lay_out, reference

both = pytest.mark.parametrize("impl", ["torch", "reference"])


@both
def test_hand_worked_row_is_routed_and_weighted(impl):
    logits = torch.log(torch.tensor([[1.0, 3.0, 4.0, 2.0]], dtype=torch.float64))
    routing = route(logits, 2, impl=impl)
    assert routing.ids.tolist() == [[2, 1]]
    torch.testing.assert_close(routing.weights, torch.tensor([[4 / 7, 3 / 7]], dtype=torch.float64))
    raw = route(logits, 2, combine="probability", impl=impl)
    torch.testing.assert_close(raw.weights, torch.tensor([[0.4, 0.3]], dtype=torch.float64))


@both
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
    ours, want = route(logits, top_k, impl="torch"), reference(logits, top_k)
    assert torch.equal(ours.ids, want.ids)
    assert torch.equal(ours.order, want.order)


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
    again = grouped(routing.ids, routing.weights, 6)
    assert all(torch.equal(a, b) for a, b in zip(again, routing, strict=True))


@both
def test_shapes_are_inferred_on_meta(impl):
    routing = route(torch.zeros(7, 5, device="meta"), 3, impl=impl)
    assert {part.device.type for part in routing} == {"meta"}
    assert [tuple(part.shape) for part in routing] == [(7, 3), (7, 3), (21,), (5,)]
    with pytest.raises(Refusal, match="E-DEVICE: a routing on meta has no counts"):
        lay_out(routing, torch.float32, 1)


def test_weights_carry_the_softmax_gradient():
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    for combine in ("renormalised", "probability"):
        assert torch.autograd.gradcheck(lambda x, c=combine: route(x, 2, combine=c).weights, logits)


@pytest.mark.parametrize(
    ("shape", "top_k", "rest", "code"),
    [
        ((4,), 1, {}, "E-SHAPE"),
        ((4, 2), 3, {}, "E-RANGE"),
        ((4, 2), 0, {}, "E-RANGE"),
        ((4, 2), 2.0, {}, "E-TYPE"),
        ((4, 2), 1, {"combine": "sum"}, "E-CHOICE"),
        ((4, 2), 1, {"impl": "cuda"}, "E-IMPL"),
    ],
)
def test_unusable_arguments_are_refused(shape, top_k, rest, code):
    with pytest.raises(Refusal, match=code):
        route(torch.zeros(shape), top_k, **rest)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(50, 3, 2), (7, 20, 3), (1, 2, 1), (0, 4, 2)]
)
def test_rows_lie_in_the_segment_of_their_expert_and_sum_to_their_token(
    tokens, experts, top_k, dtype
):
    torch.manual_seed(0)
    routing = route(torch.randn(tokens, experts), top_k)
    layout = lay_out(routing, dtype, 1)
    where = {row: e for e, rows in layout.segments for row in range(rows.start, rows.stop)}
    assert sorted(where) == list(range(len(layout.token)))
    assert len(set(layout.place.flatten().tolist())) == tokens * top_k
    for token in range(tokens):
        for k in range(top_k):
            row = int(layout.place[token, k])
            assert where[row] == routing.ids[token, k]
            assert layout.token[row] == token
            assert layout.spread(routing.weights)[row] == routing.weights[token, k]
    assert layout.spread(routing.weights).sum().item() == pytest.approx(tokens, rel=1e-5)
    rows = torch.randn(len(layout.token), 2)
    torch.testing.assert_close(layout.combine(rows), rows[layout.place].sum(1))


def test_parts_join_neighbouring_segments_up_to_so_many_rows():
    torch.manual_seed(0)
    layout = lay_out(route(torch.randn(200, 20), 2), torch.float64, 1)
    for most in (1, 50, 1000):
        seen = [(expert, slice(part.rows.start + own.start, part.rows.start + own.stop))
                for part in layout.parts(most) for expert, own in part.segments]  # fmt: skip
        assert seen == layout.segments
        for part in layout.parts(most):
            assert part.rows.stop - part.rows.start <= most or len(part.segments) == 1


def test_rows_that_fill_up_repeat_the_last_one_of_their_segment():
    torch.manual_seed(0)
    routing = route(torch.randn(200, 3), 2)
    layout = lay_out(routing, torch.bfloat16, 1)
    gates = layout.spread(routing.weights)
    filling = 0
    for (_, rows), count in zip(layout.segments, routing.counts.tolist(), strict=True):
        own = layout.token[rows]
        assert (own[count:] == own[count - 1]).all()
        assert (gates[rows][count:] == 0).all()
        filling += len(own) - count
    assert filling == len(layout.token) - 400 > 0


def test_segments_that_are_compiled_have_few_sizes_and_little_filling(monkeypatch):
    def sizes_of(dtype, numbers):
        """The sizes that segments of 1 to 2,999 rows get."""
        routings = (route(torch.zeros(count, 1), 1) for count in range(1, 3000))
        return [len(lay_out(routing, dtype, numbers).token) for routing in routings]

    sizes = sizes_of(torch.bfloat16, 1)
    assert all(count <= size <= count * 9 / 8 for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 90
    monkeypatch.setattr(matmul, "is_wider", lambda: True)
    wide = sizes_of(torch.float32, matmul.ENOUGH // 1000)
    assert wide[:1000] == list(range(1, 1001)) and wide[1000:] == sizes[1000:]
    monkeypatch.setattr(matmul, "is_wider", lambda: False)
    assert sizes_of(torch.float32, matmul.ENOUGH) == list(range(1, 3000))
