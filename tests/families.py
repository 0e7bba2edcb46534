"""Every family of mixtures that transformers ships as a causal language model, tiny and random."""

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SCALE = 2.5  # of all factors on gates, whatever a family calls them
# What a configuration gets of these is what it has a field or an alias for.
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    "sliding_window": 8,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk_blocks": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "gated_norm_rank": 8,
    # state spaces and linear attention
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    # widths of FFNs
    "intermediate_size": 24,
    "dense_intermediate_size": 24,
    "ffn_hidden_size": 24,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    # experts
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "num_experts_per_token": 3,
    "moe_topk": 3,
    "moe_k": 3,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 2,
    "zero_expert_num": 4,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_end_index": 2,
    "router_hidden_size": 16,
    "routed_scaling_factor": SCALE,
    "router_scaling_factor": SCALE,
    "route_scale": SCALE,
    "moe_routed_scaling_factor": SCALE,
}
MLA = {"num_key_value_heads": 4, "head_dim": 4}  # of attention with a low rank
OWN = {
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "doge": {"is_moe": True, "num_experts": 16},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16},
    },
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 12},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 3,
        "moe_intermediate_size": 16,
        "hidden_size_per_layer_input": 0,
        "per_layer_config": {},
    },
    "jamba": {"use_mamba_kernels": False},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 0,
    },
    "longcat_flash": {"num_hidden_layers": 6},  # of its own count, two in a block
    "zaya": {"num_experts_per_tok": 1},
}


def kinds():
    """Return the model types, text alone, whose configuration speaks of experts."""
    sparse = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        module = model_type_to_module_name(kind)
        path = (
            Path(transformers.__file__).parent
            / f"models/{module}/configuration_{module}.py"
        )
        twin = f"{kind}_text"  # the text part of a model with several
        if twin in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or not path.is_file():
            continue
        if "_expert" in path.read_text():
            sparse.append(kind)
    return sparse


def of_family(kind, dtype=torch.float32, **changes):
    """Return a random model of a family, D = 32, of 3 layers, 8 experts, 3 of them a token."""
    torch.manual_seed(0)
    usual = AutoConfig.for_model(kind)
    known = {*usual.to_dict(), *getattr(usual, "attribute_map", {})}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known:
        sizes |= MLA
    config = AutoConfig.for_model(kind, **{**sizes, **OWN.get(kind, {}), **changes})
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()
