"""bank scoring: nats of answers against a loop over tokens in float64."""

import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels.bank_scoring import LOGITS, Answers, bank_scoring

SHAPES = [  # N, T, D, V, lengths
    (3, 7, 8, 11, (2, 1, 3)),
    (1, 4, 5, 1, (2,)),
    (2, 5, 3, 300, (4, 0, 2)),  # a sample without an answer
    (2, 3, 4, 9, ()),
    (0, 3, 4, 9, (1, 2)),  # no adapter
    (5, 30, 40, 70, (20, 1)),  # more than one block of everything
]


def drawn(shape):
    N, T, D, V, lengths = shape
    torch.manual_seed(0)
    places = torch.randint(T, (sum(lengths),)), torch.randint(V, (sum(lengths),))
    answers = Answers(*places, torch.tensor(lengths, dtype=torch.int64))
    return torch.randn(N, T, D), torch.randn(V, D), answers


def looped(hidden, head, answers):
    """Sum over each answer's tokens, one at a time, in float64."""
    hidden, head = hidden.double(), head.double()
    sums = torch.zeros(len(hidden), len(answers.lengths), dtype=torch.float64)
    for adapter in range(len(hidden)):
        token = 0
        for sample, length in enumerate(answers.lengths.tolist()):
            for _ in range(length):
                logits = head @ hidden[adapter, answers.readers[token]]
                highest = logits.max()
                total = highest + (logits - highest).exp().sum().log()
                sums[adapter, sample] += total - logits[answers.targets[token]]
                token += 1
    return sums


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("shape", [*SHAPES, (5, 30, 200, 700, (20, 1))])
def test_answers_have_the_nats_that_a_loop_finds(shape, impl):
    hidden, head, answers = drawn(shape)
    wanted = looped(hidden, head, answers)
    nats = bank_scoring(hidden, head, answers, impl=impl)
    torch.testing.assert_close(nats, wanted, rtol=1e-5, atol=1e-5)
    leaves = hidden.double().requires_grad_(), head.double().requires_grad_()
    exact = bank_scoring(*leaves, answers, impl=impl)
    assert not exact.requires_grad
    torch.testing.assert_close(exact, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("V", [2, LOGITS["cpu"] + 1])  # the latter is above a block
def test_a_token_among_equal_logits_costs_the_logarithm_of_their_number(V):
    answers = Answers(torch.tensor([0, 1]), torch.tensor([V - 1, 0]), torch.tensor([1, 1]))
    nats = bank_scoring(torch.ones(1, 2, 1), torch.ones(V, 1), answers)
    torch.testing.assert_close(nats, torch.full((1, 2), float(V)).log().double())


def test_an_adapter_that_diverged_leaves_the_others_alone():
    hidden, head, answers = drawn(SHAPES[0])
    hidden[1] = torch.nan
    nats = bank_scoring(hidden, head, answers)
    assert nats[1].isnan().all()
    torch.testing.assert_close(nats[[0, 2]], looped(hidden, head, answers)[[0, 2]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": torch.zeros(11, 9)}, "E-SHAPE: bank_scoring: expected hidden"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "E-SHAPE: bank_scoring: expected hidden"),
        ({"lengths": torch.tensor([2, 1])}, "E-SHAPE: bank_scoring: lengths sum to 3"),
        ({"readers": torch.tensor([0, 1, 2, 3, 4, 7])}, "E-RANGE: .* readers .* expected 0 to 6"),
        ({"targets": torch.tensor([0, -1, 2, 3, 4, 7])}, "E-RANGE: .* targets .* expected 0 to 10"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    hidden, head, answers = drawn(SHAPES[0])
    given = {"head": head, **answers._asdict(), **changes}
    with pytest.raises(Refusal, match=message):
        bank_scoring(hidden, given.pop("head"), Answers(**given))
