"""State of routers, ours and transformers', against plain loops; Jaccard indices made by hand."""

import math

import pytest
import torch
import transformers as tr

from moebook.analysis.routers import (
    activated,
    consistency,
    decisions,
    gradients,
    logit_scale,
    overall,
    statistics,
    summary,
)
from moebook.errors import Refusal
from moebook.methods import upcycling

SIZE = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3,
    "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                 "head_dim": 8},
}  # fmt: skip
FAMILIES = ["upcycled", *EXPERTS]
REAL = [(0, t) for t in range(7)] + [(1, t) for t in range(3)]  # rows and columns of real tokens


def model_of(family):
    torch.manual_seed(0)
    if family in EXPERTS:
        config = getattr(tr, f"{family}Config")(**SIZE, **EXPERTS[family])
        return getattr(tr, f"{family}ForCausalLM")(config).eval()
    dense = tr.LlamaForCausalLM(tr.LlamaConfig(**SIZE)).eval()
    start = upcycling.su(dense, 4, kind="wide")
    return upcycling.upcycle(dense, upcycling.Config(top_k=2), start)


def routers_of(model):
    return [getattr(layer.mlp, "router", None) or layer.mlp.gate for layer in model.model.layers]


@pytest.fixture
def batch():
    torch.manual_seed(1)
    mask = torch.arange(7) < torch.tensor([[7], [3]])
    ids = torch.randint(3, 40, (2, 7)).where(mask, 2)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def by_hand(model, batch):
    """The logits of each layer's real tokens, as lists."""
    inputs = {}
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda m, args, out, i=i: inputs.update({i: args[0]}))
    model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return [[(router.weight @ inputs[i][place]).tolist() for place in REAL]
            for i, router in enumerate(routers_of(model))]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_equal_a_loop_over_real_tokens(family, batch):
    model = model_of(family).train()
    frame = statistics(model, [batch, batch])
    assert model.training
    for i, tokens in enumerate(by_hand(model, batch)):
        squares, nats, chosen = [], [], []
        for logits in tokens:
            middle = sum(logits) / 4
            squares += [(each - middle) ** 2 for each in logits]
            total = sum(math.exp(each) for each in logits)
            nats.append(-sum(math.exp(z) / total * (z - math.log(total)) for z in logits))
            chosen += sorted(range(4), key=lambda e, z=logits: -z[e])[:2]
        shares = [chosen.count(e) / 20 for e in range(4)]
        load = -sum(s * math.log(s) for s in shares if s) / math.log(4)
        assert frame.scale[i] == pytest.approx(math.sqrt(sum(squares) / 40), rel=1e-4)
        assert frame.entropy[i] == pytest.approx(sum(nats) / 10 / math.log(4), rel=1e-4)
        assert frame.load_entropy[i] == pytest.approx(load, rel=1e-4)
        assert frame.largest[i] == pytest.approx(max(shares))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_backward_and_leave_nothing_behind(family, batch):
    model = model_of(family)
    frame = gradients(model, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(**batch).loss.backward()
    for router, gradient in zip(routers_of(model), frame.gradient, strict=True):
        assert gradient == pytest.approx(router.weight.grad.norm().item(), rel=1e-5)
        assert gradient > 0


def test_a_summary_averages_over_layers_and_takes_the_norm_over_all_weights(batch):
    model, layers = model_of("upcycled"), statistics(model_of("upcycled"), [batch])
    means = summary(model, [batch], batch)
    assert list(means) == ["gradient", "scale", "entropy", "load_entropy"]
    for name in ("scale", "entropy", "load_entropy"):
        assert means[name] == pytest.approx((layers[name][0] + layers[name][1]) / 2)
    model(**batch).loss.backward()
    every = torch.cat([router.weight.grad.flatten() for router in routers_of(model)])
    assert means["gradient"] == pytest.approx(every.norm().item(), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_decisions_and_activated_experts_are_the_largest_logits_of_real_tokens(family, batch):
    model = model_of(family)
    short = {"input_ids": batch["input_ids"][:1, :5]}
    sets, chosen = activated(model, [batch, short]), decisions(model, batch)
    assert sets.shape == (2, 10 + 5, 4)
    for i, tokens in enumerate(by_hand(model, batch)):
        torch.testing.assert_close(chosen[i].logits, torch.tensor(tokens), rtol=1e-4, atol=1e-4)
        best = torch.tensor(tokens).topk(2).indices
        assert torch.equal(chosen[i].ids, best)
        for token, experts in zip(sets[i], best.tolist(), strict=False):
            assert token.nonzero().flatten().tolist() == sorted(experts)


def test_logit_scale_ignores_what_all_experts_share():
    logits = torch.tensor([[1.0, -1.0], [3.0, -3.0]])
    assert logit_scale(logits) == pytest.approx(math.sqrt(5))
    assert logit_scale(logits + 100) == pytest.approx(math.sqrt(5))


def test_models_that_have_no_live_routers_are_refused(batch):
    dense = tr.LlamaForCausalLM(tr.LlamaConfig(**SIZE))
    with pytest.raises(Refusal, match="E-MODEL: the model has no routers"):
        statistics(dense, [batch])
    for measure in (statistics, activated):
        with pytest.raises(Refusal, match="E-DATA: no tokens"):
            measure(model_of("Mixtral"), [])
    with pytest.raises(Refusal, match="does not require a gradient"):
        gradients(model_of("Mixtral").requires_grad_(False), batch)


def sets(*tokens):
    """One layer of activated experts out of 4 for each token."""
    return torch.tensor([[[e in token for e in range(4)] for token in tokens]])


FIRST, SECOND, THIRD = sets({0, 1}, {2, 3}), sets({0, 1}, {1, 2}), sets({2, 3}, {1, 2})


@pytest.mark.parametrize(
    ("over", "score"),
    [
        ("pairs", (1 + 1 / 3 + 0 + 1 / 3 + 0 + 1) / 6),
        ("successive", (1 + 1 / 3 + 0 + 1) / 4),
        ("joint", (0 / 4 + 1 / 3) / 2),
    ],
)
def test_consistency_is_the_mean_jaccard_index_of_the_tokens(over, score):
    frame = consistency([FIRST, SECOND, THIRD], over=over)
    assert frame.consistency.tolist() == pytest.approx([score])


def test_top_1_consistency_is_the_share_of_tokens_that_kept_their_expert():
    one, two = sets({0}, {1}, {2}, {3}), sets({0}, {1}, {2}, {0})
    assert consistency([one, two]).consistency[0] == pytest.approx(0.75)
    torch.manual_seed(0)
    hot = torch.nn.functional.one_hot
    unrelated = [hot(torch.randint(4, (3, 5000)), 4).bool() for _ in range(3)]
    assert consistency(unrelated).consistency.tolist() == pytest.approx([0.25] * 3, abs=0.02)


def test_overall_is_the_mean_over_layers_at_the_chosen_steps():
    watched = {0: torch.cat([FIRST, FIRST]), 5: THIRD, 9: torch.cat([FIRST, SECOND])}
    assert overall(watched, (0, 9)) == pytest.approx((1 + (1 + 1 / 3) / 2) / 2)


def test_checkpoints_that_cannot_be_compared_are_refused():
    for checkpoints, changes, code in (
        ([FIRST], {}, "E-DATA"),
        ([FIRST, FIRST[:, :1]], {}, "E-SHAPE"),
        ([FIRST, SECOND], {"over": "pair"}, "E-CHOICE: over is 'pair'"),
    ):
        with pytest.raises(Refusal, match=code):
            consistency(checkpoints, **changes)
