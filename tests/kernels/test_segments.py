"""The layout of sorted rows: each slot has a row of its own expert, and comes back to its token."""

import pytest
import torch

from moebook.kernels import route
from moebook.kernels.segments import lay_out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(50, 3, 2), (7, 20, 3), (1, 2, 1)])
def test_rows_lie_in_the_segment_of_their_expert_and_sum_to_their_token(
    tokens, experts, top_k, dtype
):
    torch.manual_seed(0)
    routing = route(torch.randn(tokens, experts), top_k)
    layout = lay_out(routing, dtype)
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


def test_bfloat16_segments_on_a_cpu_have_few_sizes_and_little_filling():
    counts = range(1, 3000)
    sizes = set()
    for count in counts:
        routing = route(torch.zeros(count, 1), 1)
        size = len(lay_out(routing, torch.bfloat16).token)
        assert count <= size <= count * 9 / 8
        assert len(lay_out(routing, torch.float32).token) == count
        sizes.add(size)
    assert len(sizes) < 90


def test_no_rows_make_no_segments():
    layout = lay_out(route(torch.zeros(0, 4), 2), torch.bfloat16)
    assert layout.segments == []
    assert layout.combine(torch.zeros(0, 3)).shape == (0, 3)
