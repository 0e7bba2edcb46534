"""Our dropout: its rate, independence and gradient, what repeats it, and where it is torch's."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moebook.methods import pesc, rocket
from moebook.models.lora import in_wrapper
from moebook.nn import Dropout, dropout

NUMBER = 2**22


def kept(share, seed=0, number=NUMBER):
    torch.manual_seed(seed)
    return dropout(torch.ones(number), share) != 0


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_the_rate_is_exact_to_a_65536th_at_each_place_of_a_word(share):
    """Five standard deviations of NUMBER / 4 draws; a rate rounded to 8 bits would be outside."""
    want = 1 - round(share * 2**16) / 2**16
    assert abs(want - (1 - share)) <= 2**-17
    lanes = kept(share).view(-1, 4)
    bound = 5 * math.sqrt(share * (1 - share) / len(lanes))
    assert ((lanes.double().mean(0) - want).abs() < bound).all()


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_elements_are_dropped_independently_of_their_neighbours(step):
    """The correlation of two independent sequences is N(0, 1 / NUMBER)."""
    mask = kept(0.5).double() - 0.5
    assert abs(4 * (mask[step:] * mask[:-step]).mean()) < 5 / math.sqrt(NUMBER)


def test_masks_have_the_distribution_of_torchs_dropout():
    """Rows of 64: how many are kept follows the binomial distribution, by chi-squared of 0.999."""
    torch.manual_seed(3)
    ours = (dropout(torch.ones(2**15, 64), 0.1) != 0).sum(1)
    torch.manual_seed(3)
    theirs = (nn.functional.dropout(torch.ones(2**15, 64), 0.1) != 0).sum(1)
    counts = [
        torch.bincount(part, minlength=65)[50:65].double() for part in (ours, theirs)
    ]
    both = sum(counts)
    used = both >= 20
    statistic = ((counts[0] - counts[1]).square() / both)[used].sum()
    assert statistic < {12: 32.9, 13: 34.5, 14: 36.1, 15: 37.7}[int(used.sum())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 5), (0, 4), ()])
def test_what_stays_is_scaled_and_its_gradient_has_the_same_mask_and_scale(
    shape, dtype
):
    x = (torch.rand(shape, dtype=torch.float64) + 1).to(dtype).requires_grad_()
    y = dropout(x, 0.25)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.backward(torch.full_like(y, 3))
    scale = torch.tensor(1 / (1 - 0.25), dtype=dtype)
    mask = y != 0
    assert torch.equal(y, torch.where(mask, x * scale, 0))
    assert torch.equal(
        x.grad, torch.where(mask, 3 * scale, torch.zeros((), dtype=dtype))
    )


def test_the_mean_of_the_output_and_of_the_gradient_is_that_of_the_input():
    x = torch.ones(NUMBER, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(5)
    y = dropout(x, 0.1)
    y.sum().backward()
    bound = 5 * math.sqrt(0.1 / 0.9 / NUMBER)
    assert abs(y.mean() - 1) < bound
    assert abs(x.grad.mean() - 1) < bound
    assert torch.equal(x.grad, y.detach())


def test_the_seed_decides_and_every_call_draws_anew():
    assert torch.equal(kept(0.1, seed=4), kept(0.1, seed=4))
    assert not torch.equal(kept(0.1, seed=4), kept(0.1, seed=5))
    torch.manual_seed(4)
    x = torch.ones(64, 64)
    assert not torch.equal(dropout(x, 0.1), dropout(x, 0.1))


def test_a_pass_that_is_computed_again_draws_the_same():
    x = torch.ones(64, 8, requires_grad=True)
    layer = Dropout(0.3).train()
    checkpoint(lambda h: layer(h) * h, x, use_reentrant=False).sum().backward()
    values = {round(value, 4) for value in x.grad.unique().tolist()}
    assert values == {0.0, round(2 / (1 - round(0.3 * 2**16) / 2**16), 4)}


def test_the_module_is_torchs_outside_of_training_and_at_the_ends():
    x = torch.randn(8, 8)
    assert Dropout(0.5).eval()(x) is x
    assert torch.equal(Dropout(0.0).train()(x), x)
    assert torch.equal(Dropout(1.0).train()(x), torch.zeros(8, 8))
    assert dropout(torch.empty(4, 4, device="meta"), 0.5).is_meta


def test_the_mask_is_drawn_where_the_input_is_whatever_torchs_default_device():
    x = torch.ones(8, 8)
    torch.manual_seed(0)
    want = dropout(x, 0.5)
    torch.manual_seed(0)
    with torch.device("meta"):
        assert torch.equal(dropout(x, 0.5), want)


def test_elsewhere_than_on_a_cpu_it_is_torchs(monkeypatch):
    asked = []
    monkeypatch.setattr(
        nn.functional, "dropout", lambda x, share: asked.append(share) or x
    )
    dropout(torch.empty(4, device="meta"), 0.5)
    dropout(torch.empty(4), 0.5)
    assert asked == [0.5]


def test_every_lora_that_is_put_on_has_it(tiny):
    config = rocket.bank.LoraConfig(
        r=2, lora_dropout=0.2, target_modules=["q_proj", "v_proj"]
    )
    settings = pesc.Config(experts=2, adapter_width=4, lora_rank=2, host="lora")
    for model in (in_wrapper(tiny(), config), pesc.prepare(tiny(), settings)):
        drops = [part for part in model.modules() if isinstance(part, nn.Dropout)]
        assert drops
        assert {type(part) for part in drops} == {Dropout}
        assert all(
            type(part) is Dropout
            for part in copy.deepcopy(model).modules()
            if isinstance(part, nn.Dropout)
        )
