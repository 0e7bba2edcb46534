"""The layout of sorted rows: each slot has a row of its own expert, and comes back to its token."""

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels import matmul, route
from moebook.kernels.route import lay_out


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(50, 3, 2), (7, 20, 3), (1, 2, 1)])
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


def sizes_of(dtype, numbers):
    """The sizes that segments of 1 to 2,999 rows get."""
    return [
        len(lay_out(route(torch.zeros(count, 1), 1), dtype, numbers).token)
        for count in range(1, 3000)
    ]


def test_bfloat16_segments_on_a_cpu_have_few_sizes_and_little_filling():
    sizes = sizes_of(torch.bfloat16, 1)
    assert all(count <= size <= count * 9 / 8 for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 90


def test_float32_segments_are_filled_up_where_their_products_are_compiled(monkeypatch):
    monkeypatch.setattr(matmul, "is_wider", lambda: True)
    sizes = sizes_of(torch.float32, matmul.ENOUGH // 1000)
    assert sizes[:1000] == list(range(1, 1001))
    assert sizes[1000:] == sizes_of(torch.bfloat16, 1)[1000:]
    monkeypatch.setattr(matmul, "is_wider", lambda: False)
    assert sizes_of(torch.float32, matmul.ENOUGH) == list(range(1, 3000))


def test_no_rows_make_no_segments():
    layout = lay_out(route(torch.zeros(0, 4), 2), torch.bfloat16, 1)
    assert layout.segments == []
    assert layout.combine(torch.zeros(0, 3)).shape == (0, 3)


def test_a_routing_without_counts_is_refused():
    with pytest.raises(Refusal, match="E-DEVICE: a routing on meta has no counts"):
        lay_out(route(torch.zeros(5, 4, device="meta"), 2), torch.float32, 1)
