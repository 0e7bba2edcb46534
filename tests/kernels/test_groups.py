"""groups: the best groups against Alg. 1's last lines in exact fractions."""

import math
import os
from fractions import Fraction
from importlib.util import find_spec
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebook.errors import Refusal
from moebook.kernels import groups

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
IMPLS = ("torch", "reference", *(["triton"] if find_spec("triton") else []))


def literal(similarity, worth, size, inverse=False):
    """(total, members, rank) of all groups, best first; sums are fractions."""
    listed = list(combinations(range(len(worth)), size))
    sums = [
        sum((Fraction(similarity[i][j]) for i, j in combinations(g, 2)), Fraction()) for g in listed
    ]
    keys = [(s < 0, s) for s in sums] if inverse else sums
    ordered = sorted(keys)
    ranks = [ordered.index(key) + 1 for key in keys]
    totals = [rank + sum(worth[m] for m in g) for rank, g in zip(ranks, listed, strict=True)]
    return sorted(zip(totals, listed, ranks, strict=True))


@st.composite
def problems(draw):
    count = draw(st.integers(1, 8))
    cosine = st.sampled_from([-0.5, 0.0, 0.25, 0.3, 0.9]) | st.floats(-1, 1, width=16)
    similarity = draw(
        st.lists(st.lists(cosine, min_size=count, max_size=count), min_size=count, max_size=count)
    )
    worth = draw(st.lists(st.integers(0, draw(st.integers(0, 9))), min_size=count, max_size=count))
    return (
        similarity,
        worth,
        draw(st.integers(1, count)),
        draw(st.integers(1, 6)),
        draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from(IMPLS))
def test_the_best_groups_are_those_of_the_literal_enumeration(problem, impl):
    similarity, worth, size, best, inverse = problem
    form = "inverse" if inverse else "ordered"
    made = torch.tensor(similarity).double().to(DEVICE), torch.tensor(worth).to(DEVICE)
    found = groups(*made, size, best=best, diversity=form, impl=impl)
    wanted = literal(torch.tensor(similarity).double().tolist(), worth, size, inverse)[:best]
    assert found.members.tolist() == [list(members) for _, members, _ in wanted]
    assert found.rank.tolist() == [rank for *_, rank in wanted]
    assert found.total.tolist() == [total for total, *_ in wanted]


@pytest.mark.parametrize("form", ["ordered", "inverse"])
@pytest.mark.parametrize("ties", [True, False])
def test_the_search_in_many_tiles_finds_what_the_enumeration_finds(form, ties):
    torch.manual_seed(0)
    noise = torch.randn(19, 19, dtype=torch.float64)
    similarity = (noise @ noise.T).round(decimals=0 if ties else 12).to(DEVICE)
    worth = torch.randint(2, 40, (19,)).to(DEVICE)
    for size, best in ((7, 3), (6, 40), (2, 1)):
        found = [groups(similarity, worth, size, best=best, diversity=form, impl=impl)
                 for impl in IMPLS]  # fmt: skip
        assert all(all(map(torch.equal, one, found[0])) for one in found[1:])


@pytest.mark.parametrize("impl", IMPLS)
def test_groups_of_nearly_all_candidates_are_few_and_so_are_their_halves(impl):
    torch.manual_seed(0)
    similarity, worth = torch.randn(30, 30).to(DEVICE), torch.arange(30).to(DEVICE)
    found = groups(similarity, worth, 28, best=1, impl=impl)
    pairs = similarity.double().triu(1)
    pairs = pairs + pairs.T  # without i and j a group lacks their pairs with all others
    lost = (pairs.sum(0)[:, None] + pairs.sum(0) - pairs)[*torch.triu_indices(30, 30, 1)]
    ranks = lost.argsort(descending=True).argsort() + 1
    gone = torch.combinations(torch.arange(30))
    totals = ranks.cpu() + 435 - gone.sum(1)
    assert found.total[0] == totals.min()
    assert {*range(30)} - {*found.members[0].tolist()} == {*gone[totals.argmin()].tolist()}


def test_products_in_less_than_float32_which_a_user_may_allow_change_no_group():
    torch.manual_seed(0)
    similarity = 0.9 + 0.005 * torch.randn(30, 30)
    worth = torch.randperm(30)
    wanted = groups(similarity, worth, 8, best=10, impl="torch")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        found = groups(similarity, worth, 8, best=10, impl="torch")
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("impl", IMPLS)
def test_where_all_is_equal_the_first_groups_come_first(impl):
    made = torch.full((12, 12), 0.1, device=DEVICE), torch.ones(12, device=DEVICE)
    found = groups(*made, 6, best=2, impl=impl)
    assert found.members.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6]]
    assert found.rank.tolist() == [1, 1] and found.total.tolist() == [7, 7]


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("form", ["ordered", "inverse"])
def test_of_fifty_million_groups_a_gpu_finds_what_the_cpu_finds(form):
    torch.manual_seed(0)
    noise = torch.nn.functional.normalize(torch.randn(38, 64))
    given_ones = (noise @ noise.T).cuda(), torch.randint(2, 76, (38,)).cuda()
    one, two = (groups(*given_ones, 8, diversity=form, impl=impl) for impl in ("triton", "torch"))
    assert all(map(torch.equal, one, two))


def test_fifty_million_groups_are_ranked():
    places = torch.arange(38.0).double()
    similarity = -(places[:, None] - places).abs() / 37  # the farther apart, the more diverse
    found = groups(similarity, torch.zeros(38), 8, best=3)
    assert math.comb(38, 8) == 48_903_492
    assert found.members[0].tolist() == [0, 1, 2, 3, 34, 35, 36, 37]
    assert found.rank.tolist() == [1, 2, 2]


def test_the_diagonal_and_what_lies_below_it_are_not_read():
    similarity = torch.rand(9, 9)
    below = similarity + torch.full((9, 9), torch.pi).tril()
    one, two = (groups(given, torch.arange(9), 4) for given in (similarity, below))
    assert all(map(torch.equal, one, two))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"similarity": torch.zeros(3, 4)}, r"E-SHAPE: groups: .* got \(3, 4\) and \(4,\)"),
        ({"worth": torch.zeros(3)}, r"E-SHAPE: groups: .* got \(4, 4\) and \(3,\)"),
        ({"size": 5}, "E-RANGE: groups: size is 5, expected 1 to 4"),
        ({"size": 0}, "E-RANGE: groups: size is 0, expected 1 to 4"),
        ({"best": 0}, "E-RANGE: groups: best is 0"),
        ({"best": 2.5}, "E-TYPE: groups: best is 2.5, expected a whole number"),
        ({"diversity": "inverted"}, "E-CHOICE: groups: unknown diversity 'inverted'"),
        ({"similarity": torch.full((4, 4), torch.nan)}, "E-NONFINITE: groups: similarity holds"),
        ({"worth": torch.full((4,), torch.inf)}, "E-NONFINITE: groups: worth holds"),
        ({"worth": torch.full((4,), 1e308, dtype=torch.float64)},
         "E-NONFINITE: groups: worth adds up beyond float64"),
        ({"similarity": torch.zeros(40, 40), "worth": torch.zeros(40), "size": 20},
         "E-RANGE: groups: 40 candidates have 137,846,528,820 groups of 20"),
    ],
)  # fmt: skip
def test_unusable_arguments_are_refused(change, message):
    usual = {"similarity": torch.zeros(4, 4), "worth": torch.zeros(4), "size": 2}
    with pytest.raises(Refusal, match=message):
        groups(**(usual | change))
