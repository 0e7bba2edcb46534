"""groups: the best groups against Alg. 1's last lines in exact fractions."""

import math
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebook.errors import Refusal
from moebook.kernels.groups import groups

IMPLS = ("numba", "reference")


def literal(similarity, worth, size, inverse=False):
    """(total, members, rank) of all groups, best first; sums are fractions."""
    listed = list(combinations(range(len(worth)), size))
    sums = [sum(Fraction(similarity[i][j]) for i, j in combinations(g, 2)) for g in listed]
    keys = [(s < 0, s) for s in sums] if inverse else sums
    ordered = sorted(keys)
    ranks = [ordered.index(key) + 1 for key in keys]
    totals = [rank + sum(worth[m] for m in g) for rank, g in zip(ranks, listed, strict=True)]
    return sorted(zip(totals, listed, ranks, strict=True))


@st.composite
def problems(draw):
    count = draw(st.integers(1, 8))
    cosine = st.sampled_from([-0.5, 0.0, 0.25, 0.3, 0.9]) | st.floats(-1, 1, width=16)
    row = st.lists(cosine, min_size=count, max_size=count)
    similarity = draw(st.lists(row, min_size=count, max_size=count))
    worth = draw(st.lists(st.integers(0, draw(st.integers(0, 9))), min_size=count, max_size=count))
    return similarity, worth, draw(st.integers(1, count)), draw(st.integers(1, 6))


@settings(max_examples=150, deadline=None)
@given(problems(), st.booleans(), st.sampled_from(IMPLS))
def test_the_best_groups_are_those_of_the_literal_enumeration(problem, inverse, impl):
    similarity, worth, size, best = problem
    form = "inverse" if inverse else "ordered"
    tensors = torch.tensor(similarity).double(), torch.tensor(worth)
    found = groups(*tensors, size, best=best, diversity=form, impl=impl)
    wanted = literal(tensors[0].tolist(), worth, size, inverse)[:best]
    assert found.members.tolist() == [list(members) for _, members, _ in wanted]
    assert found.rank.tolist() == [rank for *_, rank in wanted]
    assert found.total.tolist() == [total for total, *_ in wanted]


@pytest.mark.parametrize("form", ["ordered", "inverse"])
@pytest.mark.parametrize("ties", [True, False])
def test_a_search_that_cuts_its_list_finds_what_the_enumeration_finds(form, ties):
    torch.manual_seed(0)
    noise = torch.randn(19, 19, dtype=torch.float64)
    similarity = (noise @ noise.T).round(decimals=0 if ties else 12)
    worth = torch.randint(2, 40, (19,))
    for size, best in ((7, 3), (6, 40), (2, 1)):
        found = [groups(similarity, worth, size, best=best, diversity=form, impl=impl)
                 for impl in IMPLS]  # fmt: skip
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("impl", IMPLS)
def test_where_all_is_equal_the_first_groups_come_first(impl):
    made = torch.full((12, 12), 0.1), torch.ones(12)
    found = groups(*made, 6, best=2, impl=impl)
    assert found.members.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6]]
    assert found.rank.tolist() == [1, 1] and found.total.tolist() == [7, 7]


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
        ({"similarity": torch.zeros(3, 4)}, r"E-SHAPE: groups: .* got \(3, 4\), \(4,\)"),
        ({"size": 5}, "E-RANGE: groups: size is 5, expected 1 to 4"),
        ({"best": 0}, "E-RANGE: groups: best is 0"),
        ({"best": 2.5}, "E-TYPE: groups: best is 2.5, expected a whole number"),
        ({"diversity": "inverted"}, "E-CHOICE: groups: unknown diversity 'inverted'"),
        ({"similarity": torch.full((4, 4), torch.nan)}, "E-NONFINITE: groups: similarity holds"),
        ({"worth": torch.full((4,), torch.inf)}, "E-NONFINITE: groups: worth holds"),
        ({"worth": torch.full((4,), 1e308, dtype=torch.float64)},
         "E-NONFINITE: groups: worth adds up beyond float64"),
        ({"similarity": torch.zeros(40, 40), "worth": torch.zeros(40), "size": 20},
         "E-RANGE: groups: 40 candidates have 137,846,528,820 groups of 20"),
        ({"similarity": torch.zeros(40, 40), "worth": torch.arange(40) * 1e6, "size": 7},
         r"E-RANGE: groups: best is 1,000 and worth runs from 0 to 3.9e\+07"),
    ],
)  # fmt: skip
def test_unusable_arguments_are_refused(change, message):
    usual = {"similarity": torch.zeros(4, 4), "worth": torch.zeros(4), "size": 2}
    with pytest.raises(Refusal, match=message):
        groups(**(usual | change))
