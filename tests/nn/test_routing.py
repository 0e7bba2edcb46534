"""Routers, their trace of a training pass, what hooks read of any model's, and full experts."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moebook.analysis.routers import decisions
from moebook.errors import Refusal
from moebook.kernels import route
from moebook.models.anatomy import sparse_layers
from moebook.nn import Router, Trace, balance, evaluating, hooked, observe, routers
from moebook.nn.routing import Decision
from tests.families import SCALE, kinds, of_family
from tests.refusals import refused

BATCH = {
    "input_ids": torch.arange(12).view(2, 6),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trace = Trace()
        self.blocks = nn.ModuleList(
            Router(6, 4, 2, layer=i, trace=self.trace) for i in (0, 1)
        )
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
    assert decoder.tokens() == [5, 5]
    assert decoder.trace.decisions is not first
    assert decoder.trace.attention_mask.shape == (1, 5)
    decoder(torch.randn(1, 5, 6))
    assert decoder.trace.attention_mask is None
    twin = copy.deepcopy(decoder)
    assert twin.trace.decisions == {}
    twin(torch.randn(1, 4, 6))
    assert twin.blocks[0].trace is twin.trace
    assert (twin.tokens(), decoder.tokens()) == ([4, 4], [5, 5])
    for training in (True, False):
        twin.train(training)(torch.randn(1, 3, 6))
        graphs = {
            decision.logits.requires_grad for decision in twin.trace.decisions.values()
        }
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
    words = "E-DTYPE: Router: dtype is torch.bfloat16, expected float32 or float64"
    refused(words, Router, 6, 4, 2, layer=0, dtype=torch.bfloat16)


class Embedded(nn.Module):
    """Our routers over an embedding, in another order than their layers'; the last is never run."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.gates = nn.ModuleList(Router(6, 4, 2, layer=i) for i in (1, 0, 2))

    def forward(self, input_ids, attention_mask=None, use_cache=True):
        x = self.embedding(input_ids)
        self.gates[1](x)
        self.gates[0](x, torch.arange(48.0).view(12, 4))


def test_observed_are_logits_choices_gates_and_real_tokens_of_our_routers():
    model = Embedded()
    assert [gate.layer for gate in routers(model)] == [0, 1, 2]
    seen = observe(model, dict(enumerate(routers(model))), BATCH)
    assert seen.keys() == {0, 1}
    logits = F.linear(model.embedding(BATCH["input_ids"]), model.gates[0].weight)
    logits = logits + torch.arange(48.0).view(2, 6, 4)
    wanted = route(logits.flatten(0, 1), 2)
    assert torch.equal(seen[1].logits, logits)
    assert not seen[1].logits.requires_grad
    assert torch.equal(seen[1].ids.flatten(0, 1), wanted.ids)
    assert torch.equal(seen[1].gates().flatten(0, 1), wanted.weights)
    assert torch.equal(seen[1].mask, BATCH["attention_mask"].bool())
    assert torch.equal(seen[0].real().ids, seen[0].ids[seen[0].mask])
    assert not any(gate._forward_hooks for gate in model.gates)
    with pytest.raises(Refusal, match=r"E-SHAPE: observe: .*got \(2, 6\), \(2, 5\)"):
        observe(model, {}, BATCH | {"attention_mask": torch.ones(2, 5)})
    refused("E-TYPE: observe: the batch is a list", observe, model, {}, [BATCH])
    refused(
        "E-DATA: observe: .*expected input_ids", observe, model, {}, {"input_ids": None}
    )
    refused(
        "E-MODEL: Embedding does not return",
        observe,
        model,
        {0: model.embedding},
        BATCH,
    )


# What of transformers' mixtures is not read, and why.
UNREAD = {
    "dbrx": "E-MODEL: no decoder layers found",
    "doge": "E-MODEL: .* holds a gated MLP and 'router_gate.weight'",
    "gemma4_text": "E-MODEL: .* holds a gated MLP and 'router'",
    "inkling_text": "E-MODEL: InklingTopkRouter does not return",  # shared experts compete
    "jetmoe": "E-MODEL: .* neither a gated MLP",
    "llama4_text": "E-MODEL: Llama4Router does not return",  # it scales what experts read
    "nemotron_h": "E-MODEL: .* neither a gated MLP",
    "phimoe": "E-MODEL: the router's weights are neither shares",  # one softmax for each choice
    "zaya": "E-MODEL: ZayaRouter does not return",
}
TOKENS = {
    "input_ids": torch.arange(3, 21).view(2, 9),
    "attention_mask": torch.ones(2, 9, dtype=torch.long),
}


def plain(model):
    """Leave of each block what its experts put out: no shared experts, no norm behind."""
    for layer in sparse_layers(model):
        for parameter in () if layer.shared is None else layer.shared.parameters():
            nn.init.zeros_(parameter)
        if hasattr(layer.mlp, "post_mlp_layernorm"):  # A.X-K1
            layer.mlp.post_mlp_layernorm = nn.Identity()
    return model


def ratio(one, other):
    """The constant by which one tensor exceeds another, which is a multiple of it."""
    constant = float((one * other).sum() / (other * other).sum())
    torch.testing.assert_close(
        one, constant * other, rtol=1e-4, atol=1e-4 * float(one.abs().max())
    )
    return constant


@torch.no_grad()
@pytest.mark.parametrize("kind", kinds())
def test_gates_times_the_experts_outputs_are_each_familys_block(kind):
    """The oracle: hooks on blocks and experts, and each expert run by itself with a weight of 1."""
    if kind in UNREAD:
        with pytest.raises(Refusal, match=UNREAD[kind]):
            for seen in decisions(of_family(kind), TOKENS).values():
                seen.gates()
        return
    model = plain(of_family(kind))
    layers = {layer.index: layer for layer in sparse_layers(model)}
    put_out = {}
    given = {}
    blocks = {index: layer.mlp for index, layer in layers.items()}
    experts = {index: layer.experts for index, layer in layers.items()}

    def keep(index, _, output):  # GPT-OSS puts out its router's scores too
        put_out[index] = output[0] if isinstance(output, tuple) else output

    with (
        hooked(blocks, keep),
        hooked(experts, lambda index, args, _: given.update({index: args})),
    ):
        seen = decisions(model, TOKENS)
    assert seen.keys() == layers.keys()
    for index, decision in seen.items():
        gates = decision.gates().flatten(0, 1).float()
        x, ids, weights = given[index]
        assert torch.equal(ids, decision.ids.flatten(0, 1))
        whole = torch.zeros_like(x)
        for choice, one in enumerate(torch.eye(ids.shape[1])):
            alone = layers[index].experts(x, ids, one.expand(ids.shape))
            whole += gates[:, [choice]] * alone
        assert ratio(weights, gates) == pytest.approx(decision.factor, rel=1e-5)
        assert decision.factor == pytest.approx(1) or decision.factor == pytest.approx(
            SCALE
        )
        assert abs(ratio(put_out[index].flatten(0, 1), whole)) > 0.1
        assert (gates >= 0).all()
        assert (gates <= 1 + 1e-6).all()


class Times(nn.Module):
    """A router whose weights are another's times a number that bears a name of its own."""

    def __init__(self, router, number):
        super().__init__()
        self.router = router
        self.boost = number

    def forward(self, *given):
        logits, weights, ids = self.router(*given)
        return logits, weights * self.boost, ids


@pytest.mark.parametrize("factor", [0.5, 2.826, 16.0])
@pytest.mark.parametrize(
    "kind", ["mixtral", "olmoe", "deepseek_v2", "deepseek_v3", "afmoe"]
)
def test_a_factor_of_any_name_is_no_part_of_the_gates(kind, factor):
    """Also where the pass tells nothing: of one token, and by a router of zeros."""
    for tokens, dtype, zeros in (
        ({"input_ids": torch.tensor([[5]])}, torch.float32, False),
        (TOKENS, torch.float32, True),
        (TOKENS, torch.bfloat16, False),
    ):
        model = of_family(kind, dtype)
        *_, layer = sparse_layers(model)
        for parameter in layer.router.parameters():
            nn.init.normal_(parameter, std=0.0 if zeros else 0.3)
        before = torch.get_rng_state()
        plain = observe(model, {0: layer.router}, tokens)[0]
        times = Times(layer.router, factor)
        setattr(layer.mlp, "gate" if kind != "afmoe" else "router", times)
        scaled = observe(model, {0: times}, tokens)[0]
        assert scaled.factor == pytest.approx(factor * plain.factor, rel=1e-4)
        assert torch.equal(scaled.ids, plain.ids)
        probabilities = plain.logits.softmax(-1).gather(-1, plain.ids)
        if kind not in ("olmoe", "deepseek_v2"):  # the others renormalise
            weights = plain.weights.float()
            probabilities = weights / weights.sum(-1, keepdim=True)
        rounding = 1e-5 if dtype == torch.float32 else 0.01
        for gates in (plain.gates().float(), scaled.gates().float()):
            torch.testing.assert_close(gates, probabilities, rtol=rounding, atol=0)
        assert torch.equal(torch.get_rng_state(), before)


def test_weights_that_are_no_gates_times_a_constant_are_refused_when_gates_are_asked_for():
    logits = torch.randn(7, 4)
    ids = torch.tensor([[0, 1]] * 7)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x):
            logits = self.layer(x.flatten(0, -2))
            weights, ids = logits.square().topk(2)
            return logits, weights, ids

    model = Embedded()
    model.gates[0] = Odd()
    model.forward = lambda input_ids, **_: model.gates[0](model.embedding(input_ids))
    seen = observe(model, {0: model.gates[0]}, BATCH)[0]
    assert seen.real().ids.shape == (10, 2)
    refused("E-MODEL: the router's weights are neither", seen.gates)
    weights = torch.rand(7, 2)
    assert Decision(logits, ids, weights).gates() is weights


@pytest.mark.parametrize("training", [True, False])
def test_every_module_gets_its_own_mode_back(training):
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    model.train(training)[0].train(not training)
    before = [module.training for module in model.modules()]
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == before
