"""Tiny hosts, dense and sparse, and random LoRAs on one of them, for the methods' tests."""

import copy

import pytest
import torch
import transformers as tr
from datasets import Dataset

from moebook.methods import rocket
from moebook.models.anatomy import anatomy
from moebook.models.checkpoint import fingerprint
from tests.sizes import SMALL

TARGETS = ("q_proj", "v_proj")


def build(family="Llama", dtype=torch.float32, **changes):
    """A random host of width 32 and 2 layers, in evaluation mode."""
    torch.manual_seed(0)
    own = {
        "vocab_size": 48,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "head_dim": 8,
        "initializer_range": 0.3,
    }
    kind = getattr(tr, f"{family}TextConfig", None) or getattr(tr, f"{family}Config")
    config = kind(**{**SMALL, **own, **changes})
    return getattr(tr, f"{family}ForCausalLM")(config).to(dtype).eval()


# What a family needs to be a mixture of width 32, beside what `build` gives every host.
_QWEN = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "kv_lora_rank": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_rope_head_dim": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "head_dim": 4,
}
MIXTURES = {
    "Mixtral": {
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Olmoe": {"intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2},
    "Qwen2Moe": {**_QWEN, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**_QWEN, "norm_topk_prob": True},
    "DeepseekV2": {**_DEEPSEEK, "q_lora_rank": None},
    "DeepseekV3": {**_DEEPSEEK, "q_lora_rank": 8, "n_group": 1, "topk_group": 1},
}


@pytest.fixture(params=MIXTURES)
def family(request):
    """Each kind of mixture, unless a test names its own."""
    return request.param


@pytest.fixture
def mixture():
    """A builder of random mixtures with fused experts."""

    def make(family, **changes):
        model = build(family, **MIXTURES[family] | changes)
        if model.dtype == torch.float64:  # which grouped products do not know
            model.set_experts_implementation("eager")
        return model

    return make


@pytest.fixture
def host():
    """The builder, so that a test names family and dtype."""
    return build


@pytest.fixture
def batch():
    """Three rows, two of them padded on the right, with labels on the real tokens."""
    torch.manual_seed(1)
    mask = torch.arange(9) < torch.tensor([[9], [6], [4]])
    ids = torch.randint(3, 48, (3, 9)).where(mask, 2)
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.where(mask, -100),
    }


@pytest.fixture
def rows():
    """Encoded rows of 5 to 8 tokens to train on, all of them labels."""
    torch.manual_seed(4)
    ids = [torch.randint(3, 48, (5 + i % 4,)).tolist() for i in range(24)]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": ids, "length": list(map(len, ids))}
    )


@pytest.fixture
def apart():
    """Moves experts and routers, so that experts differ and choices are clear."""

    @torch.no_grad()
    def move(model):
        torch.manual_seed(2)
        for layer in anatomy(model).layers:
            if layer.kind == "sparse":
                for weight in layer.mlp.parameters():
                    weight += 0.3 * torch.randn_like(weight)
        return model

    return move


@pytest.fixture
def tokenizer(byte_tokenizer):
    return copy.deepcopy(byte_tokenizer)


@pytest.fixture
def base(host):
    """The builder of a base that the tokenizer fits."""
    size = {"vocab_size": 300, "max_position_embeddings": 256}
    return lambda **changes: host(**{**size, **changes})


@pytest.fixture
def model(base):
    return base()


@pytest.fixture
def bank(model, make_bank):
    """Four random LoRAs on the model, a to d."""
    return make_bank(model)


@pytest.fixture
def lora():
    """Make a random LoRA on q and v of a base."""

    def make(
        model, name, seed, *, rank=4, alpha=8.0, size=0.3, targets=TARGETS, **changes
    ):
        generator = torch.Generator().manual_seed(seed)
        layers = rocket.loras.linears(model, targets)
        draw = lambda *shape: size * torch.randn(*shape, generator=generator)  # noqa: E731
        return rocket.loras.Lora(
            down={
                path: draw(rank, layer.in_features) for path, layer in layers.items()
            },
            up={path: draw(layer.out_features, rank) for path, layer in layers.items()},
            **{
                "name": name,
                "rank": rank,
                "alpha": alpha,
                "base": fingerprint(model),
                **changes,
            },
        )

    return make


@pytest.fixture
def make_bank(lora):
    """Make a bank of so many random LoRAs, named a, b, c ..."""
    return lambda model, count=4, **changes: {
        chr(97 + n): lora(model, chr(97 + n), seed=n, **changes) for n in range(count)
    }
