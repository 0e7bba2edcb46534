"""nearest_rows against a loop in float64, duplicates against Alg. 2's lines 5 to 13."""

import importlib
import os
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from moebook.kernels.similarity import (
    COSINES,
    SIEVED,
    duplicates,
    largest,
    nearest_rows,
)
from tests.refusals import refused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed"
)
impls = pytest.mark.parametrize("impl", ["torch", "reference"])
rules = pytest.mark.parametrize("rule", ["standing", "any"])
KERNEL = "moebook.kernels._triton.duplicates"


def drawn(rows, width, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(rows, width, dtype=torch.float64).to(dtype)


def best_by_loops(pool, shots, count):
    """(row, cosine) of the best rows: a loop over rows and shots; 0 where a row is zero."""
    units = [shot / shot.norm() for shot in shots.double()]
    rows = pool.double()
    cosines = []
    for row in rows:
        largest_product = max(float(row @ shot) for shot in units)
        cosines.append(largest_product / (row.norm().item() or 1))
    order = sorted(range(len(cosines)), key=lambda row: -cosines[row])[:count]  # stable
    return order, [cosines[row] for row in order]


@impls
@pytest.mark.parametrize(
    ("rows", "shots", "width", "count"),
    [
        (200, 9, 12, 7),
        (50, 3, 5, 50),
        (1, 1, 1, 1),
        (30, 1, 8, 99),
        (40, 60, 3, 1),
        (0, 2, 4, 3),
    ],
)
def test_the_rows_are_those_of_the_loop(rows, shots, width, count, impl):
    pool = drawn(rows, width, dtype=torch.float64)
    asked = drawn(shots, width, 1, torch.float64)
    pool[rows // 2 : rows // 2 + 1] = 0
    wanted, cosines = best_by_loops(pool, asked, count)
    found = nearest_rows(pool.requires_grad_(), asked, count, impl=impl)
    assert found.index.tolist() == wanted
    assert found.seen == rows
    torch.testing.assert_close(found.key, torch.tensor(cosines, dtype=torch.float64))
    assert torch.equal(found.vectors, pool[found.index])
    assert not found.key.requires_grad
    assert not found.vectors.requires_grad


def test_sieved_blocks_lose_no_row_and_are_as_near_to_float64_as_the_reference():
    pool = drawn(9000, 96)
    asked = drawn(SIEVED, 96, 1)
    found = nearest_rows(pool, asked, 9000, impl="torch").key
    plain = nearest_rows(pool, asked, 9000, impl="reference").key
    exact = nearest_rows(pool.double(), asked.double(), 9000, impl="reference").key
    assert (found - exact).norm() <= 2 * (plain - exact).norm()
    pool = drawn(30_000, 16)
    shots = drawn(SIEVED, 16, 1)
    pool[::3] = pool[0]  # a third of the pool ties
    exact = (normalize(pool.double()) @ normalize(shots.double()).T).amax(1)
    found = nearest_rows(pool, shots, 500)
    least = exact.topk(500).values[-1]
    assert (exact[found.index] >= least - 1e-6).all()
    assert set((exact > least + 1e-6).nonzero().squeeze(1).tolist()) <= set(
        found.index.tolist()
    )
    assert torch.equal(found.index, nearest_rows(pool, shots, 500).index)


@impls
@pytest.mark.parametrize("place", [4096, 8500])
@pytest.mark.parametrize("significand", [1, 1.25, 192 / 128, 193 / 128, 200 / 128])
def test_a_row_whose_factors_and_product_bfloat16_rounds_down_is_found(
    significand, place, impl
):
    # Numbers lie just below the middle of two in bfloat16, the shots' by 2^-8 of themselves.
    # From 192 / 128 on so does 127 / 128 of the significand, which is their product.
    below = 2.0**-8 - 2.0**-12
    powers = torch.tensor([2.0**-2] * 15 + [2.0**-3] * 3 + [2.0**-4] * 2)
    rest = torch.tensor([0.0231])  # with which a shot has length 1
    shot = (1 + below) * powers
    pool = torch.zeros(9000, 21)
    pool[place, :20] = (significand + below) * powers  # its cosine is 0.9997
    pool[7] = torch.cat([shot, -0.4 * rest])  # 0.9995
    shots = torch.cat([shot, rest]).expand(SIEVED, -1)
    assert nearest_rows(pool, shots, 1, impl=impl).index.tolist() == [place]


@impls
def test_of_equal_rows_the_earlier_are_taken_16_bits_may_be_long_and_nan_is_named(impl):
    pool = torch.eye(4).repeat(2000, 1)
    found = nearest_rows(pool, torch.eye(4)[:1].repeat(10, 1), 5, impl=impl)
    assert found.index.tolist() == [0, 4, 8, 12, 16]
    assert found.key.tolist() == [1] * 5
    rows = (drawn(6, 4096) * 2000).half()  # longer than 16 bits can say
    found = nearest_rows(rows, rows[:2], 2, impl=impl)
    assert sorted(found.index.tolist()) == [0, 1]
    assert found.key.tolist() == pytest.approx([1, 1], abs=1e-3)
    pool = drawn(9000, 4)
    for bad in (torch.nan, torch.inf):
        pool[8500, 1] = bad
        refused(
            "E-NONFINITE: row 8500 of the pool",
            nearest_rows,
            pool,
            drawn(9, 4),
            3,
            impl=impl,
        )


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_stream_equals_a_full_sort_with_ties_to_the_earlier_row_and_none_of_minus_infinity(
    size,
):
    pool = drawn(300, 2)
    key = pool[:, 0].round(decimals=1)
    rounded = lambda rows, _: (torch.arange(len(rows)), rows[:, 0].round(decimals=1))  # noqa: E731
    found = largest(pool.split(size), rounded, 25)
    assert (
        found.index.tolist()
        == sorted(range(300), key=lambda row: (-key[row], row))[:25]
    )
    assert found.seen == 300
    assert torch.equal(found.vectors, pool[found.index])
    never = torch.arange(3), torch.full((3,), -torch.inf)
    assert largest([pool], lambda *_: never, 2).vectors.shape == (0, 2)


def test_a_stream_takes_the_memory_of_its_best_rows_and_a_block_and_no_square_is_held(
    sizes,
):
    shots = drawn(9, 8)
    block = drawn(5000, 8)
    with sizes:
        found = nearest_rows((block + number for number in range(20)), shots, 100)
    assert found.seen == 100_000
    assert sizes.largest == block.numel()
    rows = drawn(20_000, 4)
    with sizes:
        duplicates(rows, torch.rand(20_000), 0.9999)
    assert sizes.largest <= COSINES["cpu"]


def literal(near, key, rule):
    """Alg. 2 as it is printed, on a table of who is near to whom; or each pair by itself."""
    left = set(range(len(key)))
    for i in range(len(key)):
        for j in range(len(key)):
            if (
                i != j
                and near[i][j]
                and ({i, j} <= left if rule == "standing" else i < j)
            ):
                left.discard(j if key[i] > key[j] else i)
    return sorted(left)


def near_by_fractions(vectors, threshold):
    """Whether x.y > tau |x| |y|, squared, so that no root is taken."""
    rows = [list(map(Fraction, row)) for row in vectors]

    def near(x, y):
        product = sum(a * b for a, b in zip(x, y, strict=True))
        bound = Fraction(threshold) ** 2 * sum(a * a for a in x) * sum(b * b for b in y)
        is_beyond = product**2 > bound
        if threshold >= 0:
            return product > 0 and is_beyond
        return product >= 0 or not is_beyond

    return [[near(x, y) for y in rows] for x in rows]


@st.composite
def problems(draw):
    count = draw(st.integers(0, 9))
    width = draw(st.integers(1, 3))
    row = st.lists(st.integers(-2, 2), min_size=width, max_size=width)
    vectors = draw(st.lists(row, min_size=count, max_size=count))
    key = draw(
        st.lists(
            st.integers(0, draw(st.integers(0, 9))), min_size=count, max_size=count
        )
    )
    # No cosine of such vectors is within 1e-4 of these.
    return vectors, width, key, draw(st.sampled_from([-0.123, 0.151, 0.55, 0.913]))


@settings(max_examples=200, deadline=None)
@given(
    problems(),
    st.sampled_from(["standing", "any"]),
    st.sampled_from(["torch", "reference"]),
)
def test_the_rows_that_stay_are_those_of_the_literal_loops(problem, rule, impl):
    vectors, width, key, threshold = problem
    rows = torch.tensor(vectors, dtype=torch.float64).reshape(len(key), width)
    found = duplicates(rows, torch.tensor(key), threshold, rule=rule, impl=impl)
    assert found.tolist() == literal(near_by_fractions(vectors, threshold), key, rule)


@rules
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    "problem",
    [
        (1500, 4, torch.float64, 0.3),
        (1500, 4, torch.float64, 0.8),
        (700, 64, torch.float32, 0.8),
    ],
)
def test_many_blocks_keep_what_the_literal_loops_keep(problem, ordered, rule):
    count, width, dtype, threshold = problem
    rows = (drawn(50, width).repeat(count // 50, 1) + 0.5 * drawn(count, width, 1)).to(
        dtype
    )
    key = drawn(count, 1)[:, 0]
    if ordered:
        key = key.sort(descending=True).values
    cosines = normalize(rows.double()) @ normalize(rows.double()).T
    assert not (
        (cosines - threshold).abs() < 1e-7
    ).any()  # too close to call in float32
    wanted = literal((cosines > threshold).tolist(), key.tolist(), rule)
    assert duplicates(rows, key, threshold, rule=rule).tolist() == wanted
    assert len(wanted) < 600


@impls
def test_on_a_chain_the_two_rules_differ_and_of_equal_keys_the_earlier_goes(impl):
    # Each row is near to the next alone.
    angles = torch.deg2rad(torch.tensor([0.0, 20, 40]))
    chain = torch.stack([angles.cos(), angles.sin()], 1)
    key = torch.tensor([0.9, 0.8, 0.7])
    chain.requires_grad_()
    assert duplicates(chain, key, 0.9, impl=impl).tolist() == [0, 2]
    assert duplicates(chain, key, 0.9, rule="any", impl=impl).tolist() == [0]
    assert duplicates(torch.ones(2, 3), torch.ones(2), 0.9, impl=impl).tolist() == [1]


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (
            nearest_rows,
            {"shots": torch.zeros(0, 4)},
            r"E-SHAPE: nearest_rows: .* got \(0, 4\)",
        ),
        (
            nearest_rows,
            {"shots": torch.full((2, 4), 1e20)},
            "E-NONFINITE: .* shots .* too large",
        ),
        (
            nearest_rows,
            {"pool": torch.full((9, 4), 1e20)},
            "E-NONFINITE: row 0 of the pool",
        ),
        (
            nearest_rows,
            {"pool": [torch.tensor(1.0)]},
            r"E-SHAPE: .* got \(2, 4\), \(\)",
        ),
        (
            nearest_rows,
            {"pool": np.ones((9, 4))},
            "E-TYPE: .*: the pool holds a ndarray",
        ),
        (nearest_rows, {"pool": []}, "E-DATA: the pool is empty"),
        (nearest_rows, {"pool": None}, "E-TYPE: .*: the pool is a NoneType"),
        (nearest_rows, {"pool": 3}, "E-TYPE: .*: the pool is a int, not tensors"),
        (nearest_rows, {"count": 0}, "E-RANGE: .* count is 0, expected at least 1"),
        (
            nearest_rows,
            {"count": 2.0},
            "E-TYPE: .* count is 2.0, expected a whole number",
        ),
        (
            duplicates,
            {"threshold": 1.5},
            "E-RANGE: .*: threshold is 1.5, expected -1 to 1",
        ),
        (
            duplicates,
            {"threshold": float("nan")},
            "E-RANGE: duplicates: threshold is nan",
        ),
        (duplicates, {"rule": "all"}, "E-CHOICE: duplicates: unknown rule 'all'"),
        (
            duplicates,
            {"vectors": torch.full((4, 2), 1e20)},
            "E-NONFINITE: .* vectors .* too large",
        ),
        (
            duplicates,
            {"key": torch.full((4,), torch.inf)},
            "E-NONFINITE: duplicates: key",
        ),
    ],
)
def test_what_they_cannot_use_is_refused(op, change, message):
    usual = {
        nearest_rows: {"pool": torch.ones(9, 4), "shots": torch.ones(2, 4), "count": 3},
        duplicates: {
            "vectors": torch.ones(4, 2),
            "key": torch.ones(4),
            "threshold": 0.9,
        },
    }
    refused(message, op, **usual[op] | change)


@pytest.mark.gpu
@triton
@pytest.mark.parametrize("dtype", DTYPES)
@rules
def test_many_rows_of_each_cluster_but_one_go_on_a_gpu(rule, dtype, monkeypatch):
    monkeypatch.setattr(f"{KERNEL}.MARKS", 7000 * 20_000)  # three blocks and a rest
    torch.manual_seed(0)
    rows = torch.randn(5000, 384).repeat(4, 1) + 0.1 * torch.randn(20_000, 384)
    key = torch.rand(20_000)  # cosines are above 0.9 in a cluster, below 0.5 elsewhere
    wanted = key.view(4, 5000).argmax(0) * 5000 + torch.arange(5000)
    found = duplicates(
        rows.to("cuda", dtype), key.cuda(), 0.7, rule=rule, impl="triton"
    )
    assert torch.equal(found.cpu(), wanted.sort().values)


@triton
def test_triton_holds_a_bit_for_each_pair_of_a_block_and_takes_many_rows(
    monkeypatch, sizes
):
    monkeypatch.setattr(f"{KERNEL}.MARKS", 300 * 600)
    rows = drawn(600, 3).to(DEVICE)
    key = torch.rand(600, device=DEVICE)
    with sizes:
        found = duplicates(rows, key, 0.9999, impl="triton")
    assert sizes.largest <= 300 * 640 / 8  # bytes; rows end in a tile
    assert torch.equal(found, duplicates(rows, key, 0.9999, impl="torch"))
    kernel = importlib.import_module(KERNEL)
    grids = []  # more tiles than a grid's second side

    class Recorded:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **settings: None

    monkeypatch.setattr(kernel, "_mark", Recorded())
    rows = torch.ones(1, 1, device=DEVICE).expand(4_300_000, 1)
    assert not len(kernel.near(rows, 1, 0.5)[0])
    (grid,) = grids
    assert 65_535 < grid[0] < 2**31
    assert grid[1:] in ((), (1,))
