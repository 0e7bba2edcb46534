"""groups in exact fractions; clusters and bank_scoring against plain loops in float64."""

import math
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebook.kernels.bank_scoring import LOGITS, Answers, bank_scoring
from moebook.kernels.clusters import ROWS, clusters
from moebook.kernels.groups import groups
from tests.refusals import refused

IMPLS = ("numba", "reference")
impls = pytest.mark.parametrize("impl", ["torch", "reference"])


def literal(similarity, worth, size, inverse=False):
    """(total, members, rank) of all groups, best first; reads above the diagonal alone."""
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


@pytest.mark.parametrize(("form", "ties"), [*product(["ordered", "inverse"], [True, False])])
def test_a_search_that_cuts_its_list_finds_what_the_enumeration_finds(form, ties):
    torch.manual_seed(0)
    noise = torch.randn(19, 19, dtype=torch.float64)
    alike = (noise @ noise.T).round(decimals=0 if ties else 12)
    worth = torch.randint(2, 40, (19,))
    for size, best in ((7, 3), (6, 40), (2, 1)):
        one, two = (groups(alike, worth, size, best=best, diversity=form, impl=i) for i in IMPLS)
        assert all(map(torch.equal, one, two))


def test_fifty_million_groups_are_ranked_and_equal_ones_go_by_their_members():
    found = groups(torch.full((12, 12), 0.1), torch.ones(12), 6, best=2)
    assert found.members.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6]]
    assert found.rank.tolist() == [1, 1] and found.total.tolist() == [7, 7]
    places = torch.arange(38.0).double()
    similarity = -(places[:, None] - places).abs() / 37  # the farther apart, the more diverse
    found = groups(similarity, torch.zeros(38), 8, best=3)
    assert found.members[0].tolist() == [0, 1, 2, 3, 34, 35, 36, 37]
    assert math.comb(38, 8) == 48_903_492 and found.rank.tolist() == [1, 2, 2]


FAR = 1, 60, 4, 3  # of points far from the origin
CLOUDS = [  # L, S, D, E; of the fifth more centres than points, of the last three several blocks
    (2, 9, 4, 3), (1, 1, 5, 2), (3, 7, 1, 1), (1, 0, 3, 2), (2, 5, 3, 9), FAR,
    (1, 150, 40, 17), (1, ROWS["cpu"] + 3, 2, 3), (2, ROWS["cpu"] + 3, 200, 12),
]  # fmt: skip


def cloud(shape, dtype=torch.float32):
    L, S, D, E = shape
    torch.manual_seed(0)
    return torch.randn(L, S, D).to(dtype), torch.randn(L, E, D).to(dtype)


def nearest_by_loops(points, centres):
    """Ids, sums, counts and inertia by loops over points, in float64."""
    points, centres = points.detach().double(), centres.double()
    (L, S, _), E = points.shape, centres.shape[1]
    ids, counts = torch.zeros(L, S, dtype=torch.int64), torch.zeros(L, E, dtype=torch.int64)
    sums, inertia = torch.zeros_like(centres), torch.zeros(L, dtype=torch.float64)
    for layer, place in np.ndindex(L, S):
        far = [float((points[layer, place] - c).square().sum()) for c in centres[layer]]
        ids[layer, place] = near = far.index(min(far))
        sums[layer, near] += points[layer, place]
        counts[layer, near] += 1
        inertia[layer] += far[near]
    return ids, sums, counts, inertia


@impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", CLOUDS)
def test_points_go_to_their_nearest_centre_and_are_summed_there(shape, dtype, impl):
    points, centres = cloud(shape, dtype)
    if shape == FAR:
        points, centres = points + 300, 5 * centres + 300
    found = clusters(points.requires_grad_(), centres, impl=impl)
    assert not any(part.requires_grad for part in (*found, found.means(centres)))
    ids, sums, counts, inertia = nearest_by_loops(points, centres)
    assert torch.equal(found.ids, ids) and torch.equal(found.counts, counts)
    torch.testing.assert_close(found.sums, sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.inertia, inertia, rtol=1e-5, atol=1e-6)


@impls
def test_of_equally_near_centres_the_first_wins_and_idle_ones_stay(impl):
    points = torch.tensor([[[0.0, 1.0], [0.0, 3.0]]])
    centres = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]])
    found = clusters(points, centres, impl=impl)
    assert found.ids.tolist() == [[1, 1]] and found.inertia.tolist() == [2 + 10]
    assert found.means(centres).tolist() == [[[9, 9], [0, 2], [-1, 0], [1, 0]]]


@pytest.mark.gpu
def test_two_runs_on_a_gpu_are_equal_and_find_what_the_cpu_finds():
    points, centres = cloud((2, 20_000, 64, 9))
    one, two = (clusters(points.cuda(), centres.cuda()) for _ in range(2))
    assert all(map(torch.equal, one, two))
    for ours, wanted in zip(one, clusters(points, centres), strict=True):
        torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-5, atol=1e-3)


BANKS = [  # N, T, D, V, lengths; one without an answer, one without an adapter, two of more blocks
    (3, 7, 8, 11, (2, 1, 3)), (1, 4, 5, 1, (2,)), (2, 5, 3, 300, (4, 0, 2)), (2, 3, 4, 9, ()),
    (0, 3, 4, 9, (1, 2)), (5, 30, 40, 70, (20, 1)), (5, 30, 200, 700, (20, 1)),
]  # fmt: skip


def asked(shape):
    N, T, D, V, lengths = shape
    torch.manual_seed(0)
    places = torch.randint(T, (sum(lengths),)), torch.randint(V, (sum(lengths),))
    answers = Answers(*places, torch.tensor(lengths, dtype=torch.int64))
    return torch.randn(N, T, D), torch.randn(V, D), answers


def nats_by_loops(hidden, head, answers):
    """Sum over each answer's tokens, one at a time, in float64."""
    hidden, head = hidden.double(), head.double()
    sums = torch.zeros(len(hidden), len(answers.lengths), dtype=torch.float64)
    samples = torch.arange(len(answers.lengths)).repeat_interleave(answers.lengths)
    for adapter, token in np.ndindex(len(hidden), len(samples)):
        logits = head @ hidden[adapter, answers.readers[token]]
        total = (logits - logits.max()).exp().sum().log() + logits.max()
        sums[adapter, samples[token]] += total - logits[answers.targets[token]]
    return sums


@impls
@pytest.mark.parametrize("shape", BANKS)
def test_answers_have_the_nats_that_a_loop_finds(shape, impl):
    hidden, head, answers = asked(shape)
    wanted = nats_by_loops(hidden, head, answers)
    nats = bank_scoring(hidden, head, answers, impl=impl)
    torch.testing.assert_close(nats, wanted, rtol=1e-5, atol=1e-5)
    leaves = hidden.double().requires_grad_(), head.double().requires_grad_()
    exact = bank_scoring(*leaves, answers, impl=impl)
    assert not exact.requires_grad
    torch.testing.assert_close(exact, wanted, rtol=1e-12, atol=1e-12)


def test_a_token_among_equal_logits_costs_their_logarithm_and_an_adapter_may_diverge():
    for V in (2, LOGITS["cpu"] + 1):  # the latter is above a block
        answers = Answers(torch.tensor([0, 1]), torch.tensor([V - 1, 0]), torch.tensor([1, 1]))
        nats = bank_scoring(torch.ones(1, 2, 1), torch.ones(V, 1), answers)
        torch.testing.assert_close(nats, torch.full((1, 2), float(V)).log().double())
    hidden, head, answers = asked(BANKS[0])
    hidden[1] = torch.nan
    nats = bank_scoring(hidden, head, answers)
    assert nats[1].isnan().all()
    torch.testing.assert_close(nats[[0, 2]], nats_by_loops(hidden, head, answers)[[0, 2]])


def scored(hidden, head, **answers):
    return bank_scoring(hidden, head, Answers(**answers))


FORTY = {"similarity": torch.zeros(40, 40), "worth": torch.zeros(40)}


@pytest.mark.parametrize(("op", "change", "message"), [
    (groups, {"similarity": torch.zeros(3, 4)}, r"E-SHAPE: groups: .* got \(3, 4\), \(4,\)"),
    (groups, {"size": 5}, "E-RANGE: groups: size is 5, expected 1 to 4"),
    (groups, {"best": 0}, "E-RANGE: groups: best is 0"),
    (groups, {"best": 2.5}, "E-TYPE: groups: best is 2.5, expected a whole number"),
    (groups, {"diversity": "inverted"}, "E-CHOICE: groups: unknown diversity 'inverted'"),
    (groups, {"similarity": torch.full((4, 4), torch.nan)}, "E-NONFINITE: groups: similarity"),
    (groups, {"worth": torch.full((4,), torch.inf)}, "E-NONFINITE: groups: worth holds"),
    (groups, {"worth": torch.tensor([1e308] * 4, dtype=torch.float64)}, "E-NONFINITE: .* adds"),
    (groups, FORTY | {"size": 20}, "E-RANGE: .* 40 candidates have 137,846,528,820 groups"),
    (groups, FORTY | {"worth": torch.arange(40) * 1e6, "size": 7},
     r"E-RANGE: groups: best is 1,000 and worth runs from 0 to 3.9e\+07"),
    (clusters, {"centres": torch.zeros(1, 2, 4)}, "E-SHAPE: clusters: "),
    (clusters, {"centres": torch.zeros(1, 0, 3)}, "E-SHAPE: clusters: "),
    (clusters, {"points": torch.full((1, 2, 3), torch.nan)}, "E-NONFINITE: clusters: "),
    (clusters, {"centres": torch.full((1, 2, 3), torch.inf)}, "E-NONFINITE: clusters: "),
    (scored, {"head": torch.zeros(11, 9)}, "E-SHAPE: bank_scoring: expected hidden"),
    (scored, {"targets": torch.zeros(5).long()}, "E-SHAPE: bank_scoring: expected hidden"),
    (scored, {"lengths": torch.tensor([2, 1])}, "E-SHAPE: bank_scoring: lengths sum to 3"),
    (scored, {"readers": torch.tensor([0, 1, 2, 3, 4, 7])}, "E-RANGE: .* readers .* 0 to 6"),
    (scored, {"targets": torch.tensor([0, -1, 2, 3, 4, 7])}, "E-RANGE: .* targets .* 0 to 10"),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(op, change, message):
    hidden, head, answers = asked(BANKS[0])
    usual = {
        groups: {"similarity": torch.zeros(4, 4), "worth": torch.zeros(4), "size": 2},
        clusters: {"points": torch.zeros(1, 2, 3), "centres": torch.zeros(1, 2, 3)},
        scored: {"hidden": hidden, "head": head, **answers._asdict()},
    }
    refused(message, op, **usual[op] | change)
