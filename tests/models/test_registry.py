"""Our experts in transformers' own mixtures: same loss, same gradients, same generated tokens."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moebook import models
from moebook.errors import Refusal
from moebook.kernels import experts

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "intermediate_size": 24, "pad_token_id": 0,
         "eos_token_id": 1}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "deepseek_v2": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
                    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
                    "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 16, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                  "head_dim": 16},
}  # fmt: skip


def tiny(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    for parameter in model.parameters():  # some families start so small that nothing would show
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_generation_equal_those_of_transformers(family, monkeypatch):
    rows = []

    def counted(x, *args):
        rows.append(len(x))
        return experts(x, *args)

    monkeypatch.setattr(models.registry, "experts", counted)
    models.register_experts()
    model = tiny(family).train()
    ids = torch.randint(2, 64, (2, 9))
    seen = {}
    for implementation in ("eager", "moebook"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        tokens = model.eval().generate(ids[:, :4], max_new_tokens=6, do_sample=False)
        seen[implementation] = (loss, grads, tokens)
        model.train()
    (loss, grads, tokens), (own_loss, own_grads, own_tokens) = seen.values()
    torch.testing.assert_close(own_loss, loss, rtol=1e-10, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(own_grads[name], grad, rtol=1e-8, atol=1e-10)
    assert any("experts" in name and grad.abs().sum() > 0 for name, grad in grads.items())
    assert torch.equal(own_tokens, tokens)
    # Ours ran: all 18 tokens in training, then two prompts of four, then two tokens at a time.
    assert {18, 8, 2} == set(rows)


def test_experts_of_another_form_are_refused():
    models.register_experts()
    sizes = {**SIZES, "head_dim": 16}
    config = AutoConfig.for_model("gpt_oss", **sizes, num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("moebook")
    with pytest.raises(Refusal, match="E-MODEL: GptOssExperts: experts implementation 'moebook'"):
        model(input_ids=torch.tensor([[3, 4]]))
