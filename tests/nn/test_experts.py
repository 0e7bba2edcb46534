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


def test_an_mlp_with_biases_is_refused():
    with pytest.raises(Refusal, match="E-MODEL"):
        moe(mlp_bias=True)
