"""duplicates: which rows stay, against Alg. 2's lines 5 to 13 over fractions."""

import importlib
import os
from fractions import Fraction
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebook.errors import Refusal
from moebook.kernels import duplicates
from moebook.kernels.duplicates import COSINES

IMPLS = ("torch", "reference")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]


def literal(near, key, standing):
    """Alg. 2 as it is printed, on a table of who is near to whom; or each pair by itself."""
    left = set(range(len(key)))
    for i in range(len(key)):
        for j in range(len(key)):
            if i != j and near[i][j] and ({i, j} <= left if standing else i < j):
                left.discard(j if key[i] > key[j] else i)
    return sorted(left)


def near_by_fractions(vectors, threshold):
    """Whether x.y > tau |x| |y|, squared, so that no root is taken."""
    rows = [[Fraction(number) for number in row] for row in vectors]

    def near(x, y):
        product = sum(a * b for a, b in zip(x, y, strict=True))
        bound = Fraction(threshold) ** 2 * sum(a * a for a in x) * sum(b * b for b in y)
        above = product**2 > bound
        return (
            above
            if threshold >= 0 and product > 0
            else threshold < 0 and (product >= 0 or not above)
        )

    return [[near(x, y) for y in rows] for x in rows]


@st.composite
def problems(draw):
    count, width = draw(st.integers(0, 9)), draw(st.integers(1, 3))
    number = st.integers(-2, 2)
    vectors = draw(
        st.lists(st.lists(number, min_size=width, max_size=width), min_size=count, max_size=count)
    )
    key = draw(st.lists(st.integers(0, draw(st.integers(0, 9))), min_size=count, max_size=count))
    # No cosine of such vectors is within 1e-4 of these.
    return (
        vectors,
        width,
        key,
        draw(st.sampled_from([-0.123, 0.151, 0.55, 0.913])),
        draw(st.booleans()),
    )


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from(IMPLS))
def test_the_rows_that_stay_are_those_of_the_literal_loops(problem, impl):
    vectors, width, key, threshold, standing = problem
    wanted = literal(near_by_fractions(vectors, threshold), key, standing)
    given_rows = torch.tensor(vectors, dtype=torch.float64).reshape(len(key), width)
    found = duplicates(given_rows, torch.tensor(key), threshold, impl=impl,
                       rule="standing" if standing else "any")  # fmt: skip
    assert found.tolist() == wanted


@pytest.mark.parametrize("rule", ["standing", "any"])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("threshold", [0.3, 0.8])
def test_many_blocks_keep_what_the_literal_loops_keep(threshold, ordered, rule):
    torch.manual_seed(0)
    rows = torch.randn(1500, 4, dtype=torch.float64)  # more than one block either way
    key = torch.randint(100, (1500,))
    key = key.sort(descending=True).values if ordered else key
    cosines = torch.nn.functional.normalize(rows) @ torch.nn.functional.normalize(rows).T
    wanted = literal((cosines > threshold).tolist(), key.tolist(), rule == "standing")
    assert duplicates(rows, key, threshold, rule=rule).tolist() == wanted
    assert len(wanted) < 600


@pytest.mark.parametrize("rule", ["standing", "any"])
def test_large_blocks_in_float32_keep_what_the_literal_loops_keep(rule):
    torch.manual_seed(0)
    rows = torch.randn(50, 64).repeat(14, 1) + 0.5 * torch.randn(700, 64)
    key = torch.rand(700)
    unit = torch.nn.functional.normalize(rows.double())
    cosines = unit @ unit.T
    assert not ((cosines - 0.8).abs() < 1e-6).any()  # too close to call in float32
    wanted = literal((cosines > 0.8).tolist(), key.tolist(), rule == "standing")
    assert duplicates(rows, key, 0.8, rule=rule).tolist() == wanted
    assert 50 <= len(wanted) < 600


@pytest.mark.parametrize("impl", IMPLS)
def test_on_a_chain_the_two_rules_differ(impl):
    angles = torch.deg2rad(torch.tensor([0.0, 20, 40]))  # each is near to the next alone
    chain, key = torch.stack([angles.cos(), angles.sin()], 1), torch.tensor([0.9, 0.8, 0.7])
    assert duplicates(chain, key, 0.9, impl=impl).tolist() == [0, 2]
    assert duplicates(chain, key, 0.9, rule="any", impl=impl).tolist() == [0]


@pytest.mark.parametrize("impl", IMPLS)
def test_of_two_with_equal_keys_the_earlier_goes(impl):
    assert duplicates(torch.ones(2, 3), torch.ones(2), 0.9, impl=impl).tolist() == [1]


def test_no_square_is_held(sizes):
    torch.manual_seed(0)
    rows = torch.randn(20_000, 4)
    with sizes:
        duplicates(rows, torch.rand(20_000), 0.9999)
    assert sizes.largest <= COSINES["cpu"]


@pytest.mark.parametrize("impl", IMPLS)
def test_vectors_may_require_a_gradient(impl):
    vectors = torch.ones(600, 3, requires_grad=True)
    assert duplicates(vectors, torch.arange(600), 0.9, impl=impl).tolist() == [599]


@TRITON
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["standing", "any"])
@pytest.mark.parametrize(
    ("count", "width", "threshold", "block"),
    [(150, 3, 0.8, 70), (40, 70, 0.05, 16), (70, 2, -1, 70), (1, 1, 0.5, 9), (0, 2, 0.5, 9)],
)
def test_triton_keeps_what_the_literal_loops_keep(
    count, width, threshold, block, rule, dtype, monkeypatch
):
    kernel = importlib.import_module("moebook.kernels._triton.duplicates")
    monkeypatch.setattr(kernel, "MARKS", block * count)
    torch.manual_seed(0)
    rows, key = torch.randn(count, width).to(dtype), torch.randint(30, (count,))
    unit = torch.nn.functional.normalize(rows.double())
    cosines = unit @ unit.T
    near = cosines > threshold
    close = (cosines - threshold).abs() < 1e-6  # too close to call in float32: there are none
    assert not close.triu(1).any() or threshold == -1
    wanted = literal(near.tolist(), key.tolist(), rule == "standing")
    given_rows, keys = rows.to(DEVICE), key.to(DEVICE)
    found = duplicates(given_rows, keys, threshold, rule=rule, impl="triton")
    assert found.tolist() == wanted
    assert torch.equal(found, duplicates(given_rows, keys, threshold, rule=rule, impl="triton"))


@pytest.mark.gpu
@TRITON
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["standing", "any"])
def test_many_rows_of_each_cluster_but_one_go_on_a_gpu(rule, dtype, monkeypatch):
    kernel = importlib.import_module("moebook.kernels._triton.duplicates")
    monkeypatch.setattr(kernel, "MARKS", 7000 * 20_000)  # three blocks and a rest
    torch.manual_seed(0)
    rows = torch.randn(5000, 384).repeat(4, 1) + 0.1 * torch.randn(20_000, 384)
    key = torch.rand(20_000)  # cosines are above 0.9 in a cluster, below 0.5 elsewhere
    wanted = key.view(4, 5000).argmax(0) * 5000 + torch.arange(5000)
    found = duplicates(rows.to("cuda", dtype), key.cuda(), 0.7, rule=rule, impl="triton")
    assert torch.equal(found.cpu(), wanted.sort().values)


@TRITON
def test_triton_holds_a_bit_for_each_pair_of_a_block(monkeypatch, sizes):
    kernel = importlib.import_module("moebook.kernels._triton.duplicates")
    monkeypatch.setattr(kernel, "MARKS", 300 * 600)
    torch.manual_seed(0)
    rows, key = torch.randn(600, 3, device=DEVICE), torch.rand(600, device=DEVICE)
    with sizes:
        found = duplicates(rows, key, 0.9999, impl="triton")
    assert sizes.largest <= 300 * 640 / 8  # bytes; rows end in a tile
    assert torch.equal(found, duplicates(rows, key, 0.9999, impl="torch"))


@TRITON
def test_triton_takes_more_rows_than_a_grids_second_side_has_tiles(monkeypatch):
    kernel = importlib.import_module("moebook.kernels._triton.duplicates")
    grids = []

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **settings: None

    monkeypatch.setattr(kernel, "_mark", Recorded())
    rows = torch.ones(1, 1, device=DEVICE).expand(4_300_000, 1)
    assert not len(kernel.near(rows, 1, 0.5)[0])
    (grid,) = grids
    assert 65_535 < grid[0] < 2**31 and grid[1:] in ((), (1,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": torch.ones(4)}, r"E-SHAPE: duplicates: .* got \(4,\) and \(4,\)"),
        ({"key": torch.ones(3)}, r"E-SHAPE: duplicates: .* got \(4, 2\) and \(3,\)"),
        ({"vectors": torch.ones(4, 2).int()}, "E-DTYPE: duplicates: vectors is torch.int32"),
        ({"key": torch.ones(4, device="meta")}, "E-DEVICE: .* key lies on meta, vectors on cpu"),
        ({"threshold": 1.5}, "E-RANGE: duplicates: threshold is 1.5, expected -1 to 1"),
        ({"threshold": float("nan")}, "E-RANGE: duplicates: threshold is nan"),
        ({"rule": "all"}, "E-CHOICE: duplicates: unknown rule 'all'"),
        ({"vectors": torch.full((4, 2), torch.nan)}, "E-NONFINITE: duplicates: vectors"),
        ({"vectors": torch.full((4, 2), 1e20)}, "E-NONFINITE: duplicates: vectors .* too large"),
        ({"key": torch.full((4,), torch.inf)}, "E-NONFINITE: duplicates: key"),
        ({"impl": "cuda"}, "E-IMPL: duplicates: no implementation impl='cuda'"),
    ],
)
def test_unusable_arguments_are_refused(change, message):
    usual = {"vectors": torch.ones(4, 2), "key": torch.ones(4), "threshold": 0.9}
    with pytest.raises(Refusal, match=message):
        duplicates(**(usual | change))
