"""The trace of a model's routers: one pass, its mask, no graph kept, nothing outside a pass."""

import copy

import pytest
import torch
from torch import nn

from moebook.errors import Refusal
from moebook.nn import Router, Trace, routers


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


def test_each_pass_replaces_the_one_before():
    decoder = Decoder()
    decoder(torch.randn(1, 3, 6))
    first = decoder.trace.decisions
    decoder(torch.randn(1, 5, 6), attention_mask=torch.ones(1, 5))
    assert [len(d.ids) for d in decoder.trace.decisions.values()] == [5, 5]
    assert decoder.trace.decisions is not first
    assert decoder.trace.attention_mask.shape == (1, 5)


def test_nothing_is_recorded_outside_a_pass_even_after_one_that_failed():
    decoder = Decoder()
    decoder.blocks[0](torch.randn(3, 6))
    assert decoder.trace.decisions == {}
    with pytest.raises(ValueError, match="NaN"):
        decoder(torch.full((1, 1, 6), torch.nan))
    decoder.blocks[0](torch.randn(3, 6))
    assert decoder.trace.decisions == {}


def test_logits_keep_their_graph_in_training_alone():
    decoder = Decoder()
    x = torch.randn(1, 3, 6)
    decoder(x)
    assert all(d.logits.requires_grad for d in decoder.trace.decisions.values())
    decoder.eval()(x)
    assert not any(d.logits.requires_grad for d in decoder.trace.decisions.values())


def test_a_copied_model_has_a_trace_of_its_own():
    decoder = Decoder()
    decoder(torch.randn(1, 3, 6))
    twin = copy.deepcopy(decoder)
    assert twin.trace.decisions == {}
    twin(torch.randn(1, 4, 6))
    assert twin.blocks[0].trace is twin.trace
    assert [len(d.ids) for d in twin.trace.decisions.values()] == [4, 4]
    assert [len(d.ids) for d in decoder.trace.decisions.values()] == [3, 3]


def test_the_mask_of_a_cached_pass_is_the_end_of_the_whole_mask():
    trace = Trace()
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    assert trace.padding(2, mask).tolist() == [True, False]
    assert trace.padding(8, mask).tolist() == mask.flatten().bool().tolist()
    assert trace.padding(8, torch.zeros(2, 1, 4, 4)) is None
    with pytest.raises(Refusal, match="E-SHAPE"):
        trace.padding(10, mask)


def test_router_is_float32_under_autocast_and_reads_half_precision():
    router = Router(6, 4, 2, layer=0, trace=Trace())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert router(torch.randn(2, 3, 6)).weights.dtype == torch.float32
    assert router(torch.randn(2, 3, 6).bfloat16()).weights.dtype == torch.float32


def test_routers_come_in_the_order_of_their_layers():
    model = nn.ModuleList([Router(6, 4, 2, layer=i, trace=Trace()) for i in (2, 0, 1)])
    assert [router.layer for router in routers(model)] == [0, 1, 2]
