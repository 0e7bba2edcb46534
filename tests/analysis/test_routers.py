"""State of routers: against plain loops, on our routers and transformers' own."""

import math

import pytest
import torch
import transformers as tr

from moebook.analysis.routers import decisions, gradients, logit_scale, statistics, summary
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


def model_of(family):
    torch.manual_seed(0)
    if family in EXPERTS:
        config = getattr(tr, f"{family}Config")(**SIZE, **EXPERTS[family])
        return getattr(tr, f"{family}ForCausalLM")(config).eval()
    dense = tr.LlamaForCausalLM(tr.LlamaConfig(**SIZE)).eval()
    return upcycling.upcycle(
        dense, upcycling.Config(top_k=2), upcycling.random(dense, 4, kind="wide")
    )


def batch():
    torch.manual_seed(1)
    mask = torch.arange(7) < torch.tensor([[7], [3]])
    ids = torch.randint(3, 40, (2, 7)).where(mask, 2)
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.where(mask, -100),
    }


@pytest.mark.parametrize("family", ["upcycled", *EXPERTS])
def test_statistics_equal_a_loop_over_real_tokens(family):
    model = model_of(family).train()
    frame = statistics(model, [batch(), batch()])
    assert model.training
    inputs = {}
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda m, args, out, i=i: inputs.update({i: args[0]}))
    model.eval()(input_ids=batch()["input_ids"], attention_mask=batch()["attention_mask"])
    for i, layer in enumerate(model.model.layers):
        router = layer.mlp.router if family == "upcycled" else layer.mlp.gate
        squares, nats, chosen = [], [], []
        for row, token in [(0, t) for t in range(7)] + [(1, t) for t in range(3)]:
            logits = (router.weight @ inputs[i][row, token]).tolist()
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


@pytest.mark.parametrize("family", ["upcycled", *EXPERTS])
def test_gradients_are_those_of_backward_and_leave_nothing_behind(family):
    model = model_of(family)
    frame = gradients(model, batch())
    assert all(parameter.grad is None for parameter in model.parameters())
    model(**batch()).loss.backward()
    for i, layer in enumerate(model.model.layers):
        router = layer.mlp.router if family == "upcycled" else layer.mlp.gate
        assert frame.gradient[i] == pytest.approx(router.weight.grad.norm().item(), rel=1e-5)
        assert frame.gradient[i] > 0


def test_a_summary_averages_over_layers_and_takes_the_norm_over_all_weights():
    model, layers = model_of("upcycled"), statistics(model_of("upcycled"), [batch()])
    found = summary(model, [batch()], batch())
    assert list(found) == ["gradient", "scale", "entropy", "load_entropy"]
    for name in ("scale", "entropy", "load_entropy"):
        assert found[name] == pytest.approx((layers[name][0] + layers[name][1]) / 2)
    model(**batch()).loss.backward()
    every = torch.cat([layer.mlp.router.weight.grad.flatten() for layer in model.model.layers])
    assert found["gradient"] == pytest.approx(every.norm().item(), rel=1e-5)


def test_decisions_leave_padding_out_and_take_the_largest_logits():
    for each in decisions(model_of("upcycled"), batch()):
        assert each.logits.shape == (10, 4)
        assert torch.equal(each.ids, each.logits.topk(2).indices)


def test_logit_scale_ignores_what_all_experts_share():
    logits = torch.tensor([[1.0, -1.0], [3.0, -3.0]])
    assert logit_scale(logits) == pytest.approx(math.sqrt(5))
    assert logit_scale(logits + 100) == pytest.approx(math.sqrt(5))


def test_models_that_have_no_live_routers_are_refused():
    dense = tr.LlamaForCausalLM(tr.LlamaConfig(**SIZE))
    with pytest.raises(Refusal, match="E-MODEL: the model has no routers"):
        statistics(dense, [batch()])
    with pytest.raises(Refusal, match="E-DATA: no tokens"):
        statistics(model_of("Mixtral"), [])
    with pytest.raises(Refusal, match="does not require a gradient"):
        gradients(model_of("Mixtral").requires_grad_(False), batch())
