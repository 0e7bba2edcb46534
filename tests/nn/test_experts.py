"""Full experts: copies of one MLP are that MLP, and the fused form is a loop over experts."""

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from moebook.errors import Refusal
from moebook.nn import ExpertMoE, Experts, Router, Trace


def moe(experts=4, top_k=2, combine="renormalised", **changes):
    torch.manual_seed(0)
    mlp = LlamaMLP(
        LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=2, **changes)
    ).double()
    trace = Trace()
    router = Router(8, experts, top_k, layer=0, trace=trace, combine=combine, dtype=torch.float64)
    return mlp, ExpertMoE(router, Experts(mlp, experts))


def test_copies_behind_renormalised_gates_are_the_dense_mlp():
    mlp, block = moe()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(block(x), mlp(x))


def test_raw_probabilities_scale_the_dense_mlp_by_their_sum():
    mlp, block = moe(combine="probability")
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    probabilities = (
        F.linear(x, block.router.weight).softmax(-1).topk(2).values.sum(-1, keepdim=True)
    )
    torch.testing.assert_close(block(x), mlp(x) * probabilities)


def test_outputs_and_gradients_equal_a_loop_over_tokens():
    _, block = moe()
    with torch.no_grad():
        for weight in (block.experts.gate_up_proj, block.experts.down_proj):
            weight += torch.randn_like(weight)
    x = torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    rows = []
    for token in x[0]:
        logits = block.router.weight @ token
        kept = logits.argsort(descending=True)[:2]
        gates = logits[kept].exp() / logits[kept].exp().sum()
        row = torch.zeros(8, dtype=torch.float64)
        for gate, expert in zip(gates, kept.tolist(), strict=True):
            halves = block.experts.gate_up_proj[expert] @ token
            row = row + gate * (
                block.experts.down_proj[expert] @ (F.silu(halves[:12]) * halves[12:])
            )
        rows.append(row)
    want = torch.stack(rows).unsqueeze(0)
    got = block(x)
    torch.testing.assert_close(got, want)
    wanted = [x, *block.parameters()]
    pairs = [torch.autograd.grad(y.sin().sum(), wanted) for y in (got, want)]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b)


def test_an_mlp_with_biases_is_refused():
    with pytest.raises(Refusal, match="E-MODEL"):
        moe(mlp_bias=True)
