"""nearest: the rows of a pool most similar to some shots, against a loop in float64."""

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from moebook.errors import Refusal
from moebook.kernels import largest, nearest
from moebook.kernels.nearest import SIEVED

IMPLS = ("torch", "reference")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def drawn(rows, width, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(rows, width, dtype=torch.float64).to(dtype)


def literal(pool, shots, count, form):
    """(cosine, row) of the best rows: a loop over rows and shots; 0 where a row is zero."""
    found = []
    for row in pool.double():
        cosines = [
            float(row @ shot / (row.norm() * shot.norm())) if row.norm() and shot.norm() else 0.0
            for shot in shots.double()
        ]
        found.append(max(cosines) if form == "maximum" else sum(cosines) / len(cosines))
    order = sorted(range(len(found)), key=lambda row: (-found[row], row))[:count]
    return order, [found[row] for row in order]


@pytest.mark.parametrize("form", ["maximum", "mean"])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("rows", "shots", "width", "count"),
    [(200, 9, 12, 7), (50, 3, 5, 50), (1, 1, 1, 1), (30, 1, 8, 99), (40, 60, 3, 1)],
)
def test_the_rows_are_those_of_the_loop(rows, shots, width, count, impl, form):
    pool, asked = drawn(rows, width, dtype=torch.float64), drawn(shots, width, 1, torch.float64)
    pool[rows // 2] = 0
    wanted, cosines = literal(pool, asked, count, form)
    found = nearest(pool, asked, count, form=form, impl=impl)
    assert found.index.tolist() == wanted and found.seen == rows
    torch.testing.assert_close(found.key, torch.tensor(cosines, dtype=torch.float64))
    assert torch.equal(found.vectors, pool[found.index])


@pytest.mark.parametrize("shots", [10, SIEVED])
def test_cosines_of_large_blocks_are_as_near_to_float64_as_the_reference(shots):
    pool, asked = drawn(9000, 96), drawn(shots, 96, 1)
    found, plain = (nearest(pool, asked, 9000, impl=impl).key for impl in IMPLS)
    exact = nearest(pool.double(), asked.double(), 9000, impl="reference").key
    assert (found - exact).norm() <= 2 * (plain - exact).norm()


def test_the_sieve_of_many_blocks_loses_no_row():
    pool, shots = drawn(30_000, 16), drawn(SIEVED, 16, 1)
    pool[::3] = pool[0]  # a third of the pool ties
    exact = (F.normalize(pool.double()) @ F.normalize(shots.double()).T).amax(1)
    found = nearest(pool, shots, 500)
    least = exact.topk(500).values[-1]
    assert (exact[found.index] >= least - 1e-6).all()
    assert set((exact > least + 1e-6).nonzero().squeeze(1).tolist()) <= set(found.index.tolist())
    assert torch.equal(found.index, nearest(pool, shots, 500).index)


@pytest.mark.parametrize("impl", IMPLS)
def test_of_equal_rows_the_earlier_ones_are_taken(impl):
    pool = torch.eye(4).repeat(2000, 1)
    found = nearest(pool, torch.eye(4)[:1].repeat(10, 1), 5, impl=impl)
    assert found.index.tolist() == [0, 4, 8, 12, 16] and found.key.tolist() == [1] * 5


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_stream_equals_a_full_sort_with_ties_to_the_earlier_row(size):
    pool = drawn(300, 2)
    key = pool[:, 0].round(decimals=1)
    found = largest(
        pool.split(size),
        lambda rows, floor: (torch.arange(len(rows)), rows[:, 0].round(decimals=1)),
        25,
    )
    assert found.index.tolist() == sorted(range(300), key=lambda row: (-key[row], row))[:25]
    assert found.seen == 300
    assert torch.equal(found.vectors, pool[found.index])


def test_rows_of_key_minus_infinity_never_come():
    pool = drawn(10, 2)
    found = largest([pool], lambda rows, floor: (torch.arange(3), torch.full((3,), -torch.inf)), 2)
    assert found.vectors.shape == (0, 2)


def test_a_stream_is_held_in_the_memory_of_its_best_rows_and_a_block(sizes):
    shots, block = drawn(9, 8), drawn(5000, 8)
    with sizes:
        found = nearest((block + number for number in range(20)), shots, 100)
    assert found.seen == 100_000
    assert sizes.largest == block.numel()


@pytest.mark.parametrize("shots", [2, SIEVED])
@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_that_is_returned_has_a_gradient(impl, shots):
    pool, asked = drawn(9000, 4).requires_grad_(), drawn(shots, 4, 1).requires_grad_()
    found = nearest(pool, asked, 3, impl=impl)
    assert not found.key.requires_grad and not found.vectors.requires_grad


def test_an_empty_pool_has_no_rows():
    assert len(nearest(drawn(0, 4), drawn(2, 4), 3).index) == 0
    with pytest.raises(Refusal, match="E-DATA: nearest: the pool is empty"):
        nearest([], drawn(2, 4), 3)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_in_16_bits_may_be_longer_than_these_can_say(impl):
    rows = (drawn(6, 4096) * 2000).half()
    found = nearest(rows, rows[:2], 2, impl=impl)
    assert sorted(found.index.tolist()) == [0, 1]
    assert found.key.tolist() == pytest.approx([1, 1], abs=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_that_is_not_finite_is_named(impl, bad):
    pool = drawn(9000, 4)
    pool[8500, 1] = bad
    with pytest.raises(Refusal, match="E-NONFINITE: nearest: row 8500 of the pool"):
        nearest(pool, drawn(9, 4), 3, impl=impl)


@triton
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # NumPy's
def test_triton_takes_the_earlier_of_equal_rows_and_names_a_row_that_is_not_finite():
    pool = torch.eye(4, device=DEVICE).repeat(30, 1)
    found = nearest(pool, pool[:1], 5, impl="triton")
    assert found.index.tolist() == [0, 4, 8, 12, 16] and found.key.tolist() == [1] * 5
    for bad in (torch.nan, torch.inf, 1e20):
        pool[77, 1] = bad
        with pytest.raises(Refusal, match="E-NONFINITE: nearest: row 77 of the pool"):
            nearest(pool, torch.ones(2, 4, device=DEVICE), 5, impl="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shots": torch.zeros(0, 4)}, r"E-SHAPE: nearest: shots must be .* got \(0, 4\)"),
        ({"shots": torch.ones(2, 5)}, r"E-SHAPE: nearest: .* got \(9, 4\) and \(2, 5\)"),
        ({"pool": torch.ones(4)}, r"E-SHAPE: nearest: .* got \(4,\) and \(2, 4\)"),
        (
            {"shots": torch.ones(2, 4).double()},
            "E-DTYPE: .* pool is .*32, shots is .*64: cast one",
        ),
        ({"shots": torch.ones(2, 4).int()}, "E-DTYPE: nearest: shots is torch.int32"),
        ({"pool": torch.ones(9, 4, device="meta")}, "E-DEVICE: .* pool lies on meta, shots on cpu"),
        ({"shots": torch.full((2, 4), torch.nan)}, "E-NONFINITE: nearest: shots"),
        ({"shots": torch.full((2, 4), 1e20)}, "E-NONFINITE: nearest: shots hold .* too large"),
        ({"pool": torch.full((9, 4), 1e20)}, "E-NONFINITE: nearest: row 0 of the pool"),
        ({"pool": [torch.tensor(1.0)]}, r"E-SHAPE: nearest: expected blocks .*, got \(\)"),
        ({"pool": np.ones((9, 4))}, "E-SHAPE: nearest: expected blocks .*, got ndarray"),
        ({"count": 0}, "E-RANGE: nearest: count is 0, expected at least 1"),
        ({"count": 2.0}, "E-TYPE: nearest: count is 2.0, expected a whole number"),
        ({"form": "max"}, "E-CHOICE: nearest: unknown form 'max'; did you mean 'maximum'"),
        ({"impl": "cuda"}, "E-IMPL: nearest: no implementation impl='cuda'"),
    ],
)
def test_unusable_arguments_are_refused(change, message):
    usual = {"pool": torch.ones(9, 4), "shots": torch.ones(2, 4), "count": 3}
    with pytest.raises(Refusal, match=message):
        nearest(**(usual | change))
