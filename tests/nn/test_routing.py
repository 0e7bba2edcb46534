"""Routers, their trace of a training pass, what hooks read of any model's, and full experts."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moebook.errors import Refusal
from moebook.kernels import route
from moebook.nn import Router, Trace, balance, evaluating, observe, routers
from tests.refusals import refused

BATCH = {
    "input_ids": torch.arange(12).view(2, 6),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trace = Trace()
        self.blocks = nn.ModuleList(Router(6, 4, 2, layer=i, trace=self.trace) for i in (0, 1))
        self.trace.follow(self)

    def forward(self, x, attention_mask=None):
        if x.isnan().any():
            raise ValueError("NaN")
        return sum(block(x).weights.sum() for block in self.blocks)

    def tokens(self):
        return [len(decision.ids) for decision in self.trace.decisions.values()]


def test_each_pass_replaces_the_one_before_and_a_copy_has_a_trace_of_its_own():
    decoder = Decoder()
    decoder(torch.randn(1, 3, 6))
    first = decoder.trace.decisions
    decoder(torch.randn(1, 5, 6), attention_mask=torch.ones(1, 5))
    assert decoder.tokens() == [5, 5] and decoder.trace.decisions is not first
    assert decoder.trace.attention_mask.shape == (1, 5)
    twin = copy.deepcopy(decoder)
    assert twin.trace.decisions == {}
    twin(torch.randn(1, 4, 6))
    assert twin.blocks[0].trace is twin.trace
    assert (twin.tokens(), decoder.tokens()) == ([4, 4], [5, 5])
    for training in (True, False):
        twin.train(training)(torch.randn(1, 3, 6))
        graphs = {decision.logits.requires_grad for decision in twin.trace.decisions.values()}
        assert graphs == {training}, "logits keep their graph in training alone"


def test_nothing_is_recorded_outside_a_pass_even_after_one_that_failed():
    decoder = Decoder()
    decoder.blocks[0](torch.randn(3, 6))
    assert decoder.trace.decisions == {}
    with pytest.raises(ValueError, match="NaN"):
        decoder(torch.full((1, 1, 6), torch.nan))
    decoder.blocks[0](torch.randn(3, 6))
    assert decoder.trace.decisions == {}
    for blocks in (decoder.blocks, [Router(6, 4, 2, layer=3)]):
        refused(r"E-MODEL: the router of layer \d has not run", balance, blocks)


def test_the_mask_of_a_cached_pass_is_the_end_of_the_whole_mask():
    trace = Trace()
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    assert trace.padding(2, mask).tolist() == [True, False]
    assert trace.padding(8, mask).tolist() == mask.flatten().bool().tolist()
    assert trace.padding(8, torch.zeros(2, 1, 4, 4)) is None
    refused("E-SHAPE", trace.padding, 10, mask)


def test_router_is_float32_under_autocast_and_reads_half_precision():
    router = Router(6, 4, 2, layer=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert router(torch.randn(2, 3, 6)).weights.dtype == torch.float32
    assert router(torch.randn(2, 3, 6).bfloat16()).weights.dtype == torch.float32


class Embedded(nn.Module):
    """Our routers over an embedding, in another order than their layers'; the last is never run."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.gates = nn.ModuleList(Router(6, 4, 2, layer=i) for i in (1, 0, 2))

    def forward(self, input_ids, attention_mask=None, use_cache=True):
        x = self.embedding(input_ids)
        self.gates[1](x), self.gates[0](x, torch.arange(48.0).view(12, 4))


def test_observed_are_logits_choices_gates_and_real_tokens_of_our_routers():
    model = Embedded()
    assert [gate.layer for gate in routers(model)] == [0, 1, 2]
    seen = observe(model, dict(enumerate(routers(model))), BATCH)
    assert seen.keys() == {0, 1}
    logits = F.linear(model.embedding(BATCH["input_ids"]), model.gates[0].weight)
    logits = logits + torch.arange(48.0).view(2, 6, 4)
    wanted = route(logits.flatten(0, 1), 2)
    assert torch.equal(seen[1].logits, logits) and not seen[1].logits.requires_grad
    assert torch.equal(seen[1].ids.flatten(0, 1), wanted.ids)
    assert torch.equal(seen[1].gates.flatten(0, 1), wanted.weights)
    assert torch.equal(seen[1].mask, BATCH["attention_mask"].bool())
    assert torch.equal(seen[0].real().ids, seen[0].ids[seen[0].mask])
    assert not any(gate._forward_hooks for gate in model.gates)
    with pytest.raises(Refusal, match=r"E-SHAPE: attention_mask \(2, 5\)"):
        observe(model, {}, BATCH | {"attention_mask": torch.ones(2, 5)})
    refused("E-MODEL: Embedding does not return", observe, model, {0: model.embedding}, BATCH)


@pytest.mark.parametrize("training", [True, False])
def test_every_module_gets_its_own_mode_back(training):
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    model.train(training)[0].train(not training)
    before = [module.training for module in model.modules()]
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == before
