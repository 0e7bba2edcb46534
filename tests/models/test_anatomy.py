"""Where transformers keeps its parts: dense and sparse families, wrappers, crafted layers."""

import peft
import pytest
import torch
import transformers as tr
from torch import nn

from moebook.errors import Refusal
from moebook.methods import pesc
from moebook.models.anatomy import anatomy

SIZE = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4}  # fmt: skip
SPARSE = {
    "Mixtral": {"intermediate_size": 24, "num_local_experts": 4},
    "Olmoe": {"intermediate_size": 24, "num_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": 4, "intermediate_size": 40},
    "DeepseekV2": {
        "moe_intermediate_size": 24, "n_routed_experts": 4, "intermediate_size": 40,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip


def build(family, **changes):
    config = getattr(tr, f"{family}Config")(**SIZE, **changes)
    with torch.device("meta"):
        return getattr(tr, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2"])
def test_dense_families_show_their_mlps(family):
    model = build(family, intermediate_size=40, head_dim=8)
    found = anatomy(model)
    assert found.hidden == 32
    assert found.decoder is model.model
    assert [(layer.index, layer.kind, layer.width) for layer in found.layers] == [
        (0, "dense", 40), (1, "dense", 40)]  # fmt: skip
    assert all(layer.mlp is layer.block.mlp for layer in found.layers)
    assert all(layer.attention is layer.block.self_attn for layer in found.layers)
    assert found.layers[0].router is None
    assert found.layers[0].experts is None


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_families_show_router_and_fused_experts(family):
    model = build(family, **SPARSE[family])
    layer = anatomy(model).layers[1]
    assert (layer.kind, layer.width) == ("sparse", 24)
    assert layer.router is layer.mlp.gate
    assert layer.experts.gate_up_proj.shape == (4, 48, 32)
    assert layer.experts.down_proj.shape == (4, 32, 24)
    assert (layer.shared is not None) == (family == "DeepseekV2")
    first = anatomy(model).layers[0]
    assert first.kind == ("dense" if family == "DeepseekV2" else "sparse")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT 0.21
def test_a_peft_wrapper_is_looked_through():
    model = build("Llama", intermediate_size=40)
    decoder = model.model
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert anatomy(wrapped).decoder is decoder


def test_experts_that_peft_adapts_are_shown_as_they_were():
    model = build("Mixtral", **SPARSE["Mixtral"])
    experts = [layer.experts for layer in anatomy(model).layers]
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=[
        "experts.gate_up_proj", "experts.down_proj"])  # fmt: skip
    layers = anatomy(peft.get_peft_model(model, lora)).layers
    assert all(layer.experts is mine for layer, mine in zip(layers, experts, strict=True))
    assert [(layer.kind, layer.width) for layer in layers] == [("sparse", 24)] * 2


def test_crafted_layers_are_sparse_with_a_shared_mlp():
    model = tr.LlamaForCausalLM(tr.LlamaConfig(**SIZE, intermediate_size=40))
    pesc.craft(model, pesc.Config(experts=3, adapter_width=4, layers=(1,)))
    dense, sparse = anatomy(model).layers
    assert (dense.kind, sparse.kind, sparse.width) == ("dense", "sparse", 40)
    assert sparse.router is sparse.mlp.router
    assert sparse.experts.down.shape == (3, 32, 4)
    assert type(sparse.shared).__name__ == "LlamaMLP"


def test_replacing_puts_another_module_into_the_block():
    layer = anatomy(build("Llama", intermediate_size=40)).layers[0]
    layer.replace(nn.Identity())
    assert isinstance(layer.block.mlp, nn.Identity)


def test_a_model_without_gated_mlps_is_refused_with_the_classes_seen():
    with torch.device("meta"):
        gpt2 = tr.GPT2LMHeadModel(tr.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=32))
        phi = tr.PhiForCausalLM(tr.PhiConfig(**SIZE, intermediate_size=40))
    with pytest.raises(Refusal, match=r"E-MODEL: no decoder layers.*GPT2MLP"):
        anatomy(gpt2)
    with pytest.raises(Refusal, match=r"E-MODEL: decoder layer 0 .*PhiMLP"):
        anatomy(phi)
