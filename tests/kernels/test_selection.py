"""groups in exact fractions; bank_scoring against plain loops in float64."""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moebook.kernels.bank_scoring import LOGITS, Answers, bank_scoring
from moebook.kernels.groups import groups
from tests.refusals import refused

impls = pytest.mark.parametrize("impl", ["torch", "reference"])


def literal(similarity, worth, size, inverse=False):
    """(total, members, rank) of all groups, best first; reads above the diagonal alone."""
    listed = list(combinations(range(len(worth)), size))
    keys = []
    for group in listed:
        alike = sum(Fraction(similarity[i][j]) for i, j in combinations(group, 2))
        # The largest inverse comes first, so negative sums come last.
        keys.append((alike < 0, alike) if inverse else alike)
    ordered = sorted(keys)
    groups = []
    for group, key in zip(listed, keys, strict=True):
        rank = ordered.index(key) + 1
        total = rank + sum(worth[member] for member in group)
        groups.append((total, group, rank))
    return sorted(groups)


@st.composite
def problems(draw):
    count = draw(st.integers(1, 8))
    cosine = st.sampled_from([-0.5, 0.0, 0.25, 0.3, 0.9]) | st.floats(-1, 1, width=16)
    row = st.lists(cosine, min_size=count, max_size=count)
    similarity = draw(st.lists(row, min_size=count, max_size=count))
    worth = draw(
        st.lists(
            st.integers(0, draw(st.integers(0, 9))), min_size=count, max_size=count
        )
    )
    return similarity, worth, draw(st.integers(1, count)), draw(st.integers(1, 6))


@settings(max_examples=150, deadline=None)
@given(problems(), st.booleans())
def test_the_best_groups_are_those_of_the_literal_enumeration(problem, inverse):
    similarity, worth, size, best = problem
    form = "inverse" if inverse else "ordered"
    tensors = torch.tensor(similarity).double(), torch.tensor(worth)
    found = groups(*tensors, size, best=best, diversity=form)
    wanted = literal(tensors[0].tolist(), worth, size, inverse)[:best]
    assert found.members.tolist() == [list(members) for _, members, _ in wanted]
    assert found.rank.tolist() == [rank for *_, rank in wanted]
    assert found.total.tolist() == [total for total, *_ in wanted]


def test_equal_groups_go_by_their_members_and_the_largest_search_is_whole():
    found = groups(torch.full((12, 12), 0.1), torch.ones(12), 6, best=2)
    assert found.members.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6]]
    assert found.rank.tolist() == [1, 1]
    assert found.total.tolist() == [7, 7]
    places = torch.arange(20.0).double()
    # The farther apart, the more diverse.
    similarity = -(places[:, None] - places).abs() / 19
    found = groups(similarity, torch.zeros(20), 8, best=3)
    assert found.members[0].tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert math.comb(20, 8) == 125_970
    assert found.rank.tolist() == [1, 2, 2]


BANKS = [  # N, T, D, V, lengths; one without an answer, one without an adapter, two of more blocks
    (3, 7, 8, 11, (2, 1, 3)),
    (1, 4, 5, 1, (2,)),
    (2, 5, 3, 300, (4, 0, 2)),
    (2, 3, 4, 9, ()),
    (0, 3, 4, 9, (1, 2)),
    (5, 30, 40, 70, (20, 1)),
    (5, 30, 200, 700, (20, 1)),
]


def asked(shape):
    N, T, D, V, lengths = shape
    torch.manual_seed(0)
    places = torch.randint(T, (sum(lengths),)), torch.randint(V, (sum(lengths),))
    answers = Answers(*places, torch.tensor(lengths, dtype=torch.int64))
    return torch.randn(N, T, D), torch.randn(V, D), answers


def nats_by_loops(hidden, head, answers):
    """Sum over each answer's tokens, one at a time, in float64."""
    hidden = hidden.double()
    head = head.double()
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
        answers = Answers(
            torch.tensor([0, 1]), torch.tensor([V - 1, 0]), torch.tensor([1, 1])
        )
        nats = bank_scoring(torch.ones(1, 2, 1), torch.ones(V, 1), answers)
        torch.testing.assert_close(nats, torch.full((1, 2), float(V)).log().double())
    hidden, head, answers = asked(BANKS[0])
    hidden[1] = torch.nan
    nats = bank_scoring(hidden, head, answers)
    assert nats[1].isnan().all()
    torch.testing.assert_close(
        nats[[0, 2]], nats_by_loops(hidden, head, answers)[[0, 2]]
    )


def scored(hidden, head, **answers):
    return bank_scoring(hidden, head, Answers(**answers))


FORTY = {"similarity": torch.zeros(40, 40), "worth": torch.zeros(40)}


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (
            groups,
            {"similarity": torch.zeros(3, 4)},
            r"E-SHAPE: groups: .* got \(3, 4\), \(4,\)",
        ),
        (groups, {"size": 5}, "E-RANGE: groups: size is 5, expected 1 to 4"),
        (groups, {"best": 0}, "E-RANGE: groups: best is 0"),
        (groups, {"best": 2.5}, "E-TYPE: groups: best is 2.5, expected a whole number"),
        (
            groups,
            {"diversity": "inverted"},
            "E-CHOICE: groups: unknown diversity 'inverted'",
        ),
        (
            groups,
            {"similarity": torch.full((4, 4), torch.nan)},
            "E-NONFINITE: groups: similarity",
        ),
        (
            groups,
            {"worth": torch.full((4,), torch.inf)},
            "E-NONFINITE: groups: worth holds",
        ),
        (
            groups,
            {"worth": torch.tensor([1e308] * 4, dtype=torch.float64)},
            "E-NONFINITE: .* adds",
        ),
        (
            groups,
            FORTY | {"size": 20},
            "E-RANGE: .* 40 candidates have 137,846,528,820 groups",
        ),
        (
            scored,
            {"head": torch.zeros(11, 9)},
            "E-SHAPE: bank_scoring: expected hidden",
        ),
        (
            scored,
            {"targets": torch.zeros(5).long()},
            "E-SHAPE: bank_scoring: expected hidden",
        ),
        (
            scored,
            {"lengths": torch.tensor([2, 1])},
            "E-SHAPE: bank_scoring: lengths sum to 3",
        ),
        (
            scored,
            {"readers": torch.tensor([0, 1, 2, 3, 4, 7])},
            "E-RANGE: .* readers .* 0 to 6",
        ),
        (
            scored,
            {"targets": torch.tensor([0, -1, 2, 3, 4, 7])},
            "E-RANGE: .* targets .* 0 to 10",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(op, change, message):
    hidden, head, answers = asked(BANKS[0])
    usual = {
        groups: {"similarity": torch.zeros(4, 4), "worth": torch.zeros(4), "size": 2},
        scored: {"hidden": hidden, "head": head, **answers._asdict()},
    }
    refused(message, op, **usual[op] | change)
