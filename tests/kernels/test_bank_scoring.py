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


def drawn(shape, dtype=torch.float32):
    N, T, D, V, lengths = shape
    torch.manual_seed(0)
    places = torch.randint(T, (sum(lengths),)), torch.randint(V, (sum(lengths),))
    answers = Answers(*places, torch.tensor(lengths, dtype=torch.int64))
    return torch.randn(N, T, D).to(dtype), torch.randn(V, D).to(dtype), answers


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
    torch.testing.assert_close(
        bank_scoring(hidden, head, answers, impl=impl), wanted, rtol=1e-5, atol=1e-5
    )
    leaves = hidden.double().requires_grad_(), head.double().requires_grad_()
    exact = bank_scoring(*leaves, answers, impl=impl)
    assert not exact.requires_grad
    torch.testing.assert_close(exact, wanted, rtol=1e-12, atol=1e-12)


def test_two_equal_logits_cost_one_bit():
    hidden, head = torch.ones(1, 1, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    answers = Answers(torch.tensor([0, 0]), torch.tensor([1, 0]), torch.tensor([2]))
    nats = bank_scoring(hidden, head, answers)
    assert nats.item() == pytest.approx(2 * torch.tensor(2.0).log().item())


def test_a_vocabulary_above_a_block_is_scored_whole():
    V = LOGITS["cpu"] + 1
    head = torch.zeros(V, 1)
    answers = Answers(torch.tensor([0, 1]), torch.tensor([V - 1, 0]), torch.tensor([1, 1]))
    nats = bank_scoring(torch.ones(1, 2, 1), head, answers)
    torch.testing.assert_close(nats, torch.full((1, 2), float(V)).log().double())


def test_an_adapter_that_diverged_leaves_the_others_alone():
    hidden, head, answers = drawn(SHAPES[0])
    hidden[1] = torch.nan
    nats = bank_scoring(hidden, head, answers)
    assert nats[1].isnan().all()
    torch.testing.assert_close(nats[[0, 2]], looped(hidden, head, answers)[[0, 2]])


def refused(**changes):
    hidden, head, answers = drawn(SHAPES[0])
    answers = answers._replace(**{k: v for k, v in changes.items() if k in Answers._fields})
    bank_scoring(changes.get("hidden", hidden), changes.get("head", head), answers)


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
    with pytest.raises(Refusal, match=message):
        refused(**changes)
