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


NONE = -torch.inf


@both
@pytest.mark.parametrize(
    ("logits", "ids"),
    [
        ([[0] * 5] * 3, [[0, 1]] * 3),
        ([[1, 2, 2, 0]], [[1, 2, 0]]),
        # Experts of minus infinity are chosen once each where nothing else is left.
        ([[NONE, 2, NONE, 1], [NONE, NONE, NONE, 0], [NONE] * 4],
         [[1, 3, 0], [3, 0, 1], [0, 1, 2]]),
    ],
)  # fmt: skip
def test_among_equal_logits_the_lower_expert_wins(logits, ids, impl):
    assert route(torch.tensor(logits).float(), len(ids[0]), impl=impl).ids.tolist() == ids


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


@pytest.mark.parametrize("combine", ["renormalised", "probability"])
def test_weights_carry_the_softmax_gradient(combine):
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: route(x, 2, combine=combine).weights, logits)


@pytest.mark.parametrize(
    ("top_k", "combine", "code"),
    [(3, "probability", "E-RANGE"), (0, "probability", "E-RANGE"), (2.0, "probability", "E-TYPE"),
     (1, "sum", "E-CHOICE")],
)  # fmt: skip
def test_unusable_arguments_are_refused(top_k, combine, code):
    with pytest.raises(Refusal, match=code):
        route(torch.zeros(4, 2), top_k, combine=combine)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(50, 3, 2), (7, 20, 3), (1, 2, 1), (0, 4, 2)])
def test_rows_lie_in_the_segment_of_their_expert_and_sum_to_their_token(sizes, dtype):
    tokens, experts, top_k = sizes
    torch.manual_seed(0)
    routing = route(torch.randn(tokens, experts), top_k)
    layout = lay_out(routing, dtype, 1)
    expert_of = torch.full((len(layout.token),), -1)
    for expert, rows in layout.segments:
        assert (expert_of[rows] == -1).all()
        expert_of[rows] = expert
    assert (expert_of >= 0).all()
    assert len(layout.place.unique()) == tokens * top_k
    assert torch.equal(expert_of[layout.place], routing.ids)
    assert (layout.token[layout.place] == torch.arange(tokens)[:, None]).all()
    gates = layout.spread(routing.weights)
    assert torch.equal(gates[layout.place].squeeze(2), routing.weights)
    assert gates.sum().item() == pytest.approx(tokens, rel=1e-5)
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
    counts = [*range(1, 70), *range(70, 3000, 37), 1000, 1001]
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[:, None]
    routing = grouped(ids, torch.ones(ids.shape), len(counts))

    def sizes_of(dtype, numbers):
        segments = lay_out(routing, dtype, numbers).segments
        return [rows.stop - rows.start for _, rows in segments]

    sizes = sizes_of(torch.bfloat16, 1)
    for count, size in zip(counts, sizes, strict=True):
        assert count <= size <= count * 9 / 8
        assert size % 2 ** max(size.bit_length() - 4, 0) == 0, "four significant bits"
    monkeypatch.setattr(matmul, "is_wider", lambda: True)
    few = zip(counts, sizes, strict=True)
    wide = [count if count <= 1000 else size for count, size in few]
    assert sizes_of(torch.float32, matmul.ENOUGH // 1000) == wide
    monkeypatch.setattr(matmul, "is_wider", lambda: False)
    assert sizes_of(torch.float32, matmul.ENOUGH) == counts
