"""Milestones see the model as it is after so many steps, and leave no trace in its training."""

import pytest
import torch

from moebook.errors import Refusal
from moebook.training import fit
from moebook.training.milestones import milestones

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def noisy(model):
    """Measure in a way that runs the model in both modes and draws random numbers."""
    model.train()
    model(input_ids=torch.randint(3, 64, (2, 5)))
    return weights(model)


def test_a_milestone_holds_the_weights_after_as_many_steps(lora, rows):
    model = lora()
    with milestones(model, [0, 2, 5], weights) as found:
        fit(model, rows(), steps=5, batch=4, lr=1e-2, seed=3)
    assert sorted(found) == [0, 2, 5]
    assert torch.equal(found[0], weights(lora()))
    assert torch.equal(found[5], weights(model))
    short = lora()
    fit(short, rows(), steps=2, batch=4, lr=1e-2, warmup=0.0, seed=3)
    again = lora()
    with milestones(again, [2], weights) as found:
        fit(again, rows(), steps=5, batch=4, lr=1e-2, warmup=0.0, seed=3)
    assert torch.equal(found[2], weights(short))


def test_a_run_with_milestones_equals_the_run_without(lora, rows):
    plain, watched = lora(), lora()
    fit(plain, rows(), steps=4, batch=4, lr=1e-2, seed=3)
    with milestones(watched, range(5), noisy):
        fit(watched, rows(), steps=4, batch=4, lr=1e-2, seed=3)
    assert torch.equal(weights(plain), weights(watched))
    assert not watched.milestones


def test_parts_of_a_step_count_as_one(llama, rows):
    whole, parted = llama(), llama()
    with milestones(whole, [0, 1, 3], weights) as one:
        fit(whole, rows(), steps=3, batch=4, lr=1e-2, seed=3)
    with milestones(parted, [0, 1, 3], weights) as other:
        fit(parted, rows(), steps=3, batch=4, lr=1e-2, seed=3, accumulate=2)
    for step in (0, 1, 3):
        assert torch.allclose(one[step], other[step], atol=1e-4), step
    assert not torch.equal(one[1], one[3])


def test_a_step_that_training_did_not_reach_is_named(lora, rows):
    model = lora()
    with (
        pytest.raises(Refusal, match="E-RANGE: milestone at step 3: the training had 2 steps"),
        milestones(model, [1, 3], weights),
    ):
        fit(model, rows(), steps=2, batch=4, seed=3)


class Interrupt:
    """A penalty of 0 that stops the training in the pass of a step."""

    def __init__(self, step):
        self.left = step

    def __call__(self, model):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return torch.zeros(())


def test_a_resumed_run_is_measured_at_the_steps_of_the_whole_run(lora, rows, tmp_path):
    settings = {"steps": 10, "batch": 4, "lr": 1e-2, "seed": 3}
    straight = lora()
    with milestones(straight, [6, 8, 10], weights) as want:
        fit(straight, rows(), **settings)
    folder = {"output": tmp_path / "run", "every": 6}
    with pytest.raises(KeyboardInterrupt):
        fit(lora(), rows(), **settings, **folder, penalty=Interrupt(8))
    with (
        pytest.raises(Refusal, match="milestone at step 2: the training goes on from step 6"),
        milestones(model := lora(), [2, 8], weights),
    ):
        fit(model, rows(), **settings, **folder)
    for _ in range(2):  # from step 6, then a run that is finished already
        model = lora()
        with milestones(model, list(want), weights) as got:
            fit(model, rows(), **settings, **folder)
        assert all(torch.equal(got[step], want[step]) for step in want)
        want = {10: want[10]}


def test_an_error_in_training_comes_through_and_the_hook_is_gone(lora, rows):
    model = lora()
    with pytest.raises(ZeroDivisionError), milestones(model, [7], weights):
        raise ZeroDivisionError
    assert not model.milestones
