"""The baselines of ESFT: what trains in full fine-tuning and in LoRA, and that it learns."""

import pytest
import torch
from datasets import Dataset

from moebook.errors import Refusal
from moebook.methods import esft
from moebook.models import anatomy
from moebook.training import fit

FAMILIES = ["Mixtral", "DeepseekV2", "DeepseekV3", "Olmoe", "Qwen2Moe", "Qwen3Moe"]


def tuned(model, lr):
    torch.manual_seed(4)
    ids = [torch.randint(3, 48, (5 + i % 4,)).tolist() for i in range(24)]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids, "length": list(map(len, ids))})
    return fit(model, rows, steps=20, batch=6, lr=lr, pad_id=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_starts_at_the_base_and_has_the_ranks_asked_for(family, mixture, batch):
    base, model = mixture(family), esft.lora(mixture(family), rank=4)
    assert torch.equal(model(**batch).logits, base(**batch).logits)
    experts = len(anatomy(base).layers[1].router.weight)
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name), name
        if ".lora_" in name:
            rank = 4 * experts if ".mlp.experts." in name else 4
            assert rank in parameter.shape, name
            assert parameter.grad is not None


def test_lora_adapts_attention_dense_layers_shared_and_routed_experts(mixture):
    model = esft.lora(mixture("DeepseekV2"))
    free = {name for name, p in model.named_parameters() if p.requires_grad}
    layers = [{n.split(".")[4] for n in free if f"layers.{i}.mlp" in n} for i in (0, 1)]
    assert layers == [{"gate_proj", "up_proj", "down_proj"}, {"experts", "shared_experts"}]
    assert sum(".self_attn." in name for name in free) == 3 * 4 * 2
    assert not any("norm" in name or ".mlp.gate." in name for name in free)


def test_lora_multiplies_its_product_by_the_scale(mixture):
    model = esft.lora(mixture("Mixtral"), rank=2, scale=3.0)
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
    x = torch.randn(5, 32)
    product = x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 3 * product)


@pytest.mark.parametrize("arm", ["full", "lora"])
def test_the_baselines_learn(arm, mixture):
    model = getattr(esft, arm)(mixture("DeepseekV2"))
    history = tuned(model, lr=0.003)
    assert history.loss[-1] < 0.9 * history.loss[0]


def test_full_fine_tuning_frees_every_parameter(mixture):
    model = esft.full(mixture("Olmoe").requires_grad_(False))
    assert all(p.requires_grad for p in model.parameters())


def test_baselines_refuse_what_is_not_a_plain_mixture(mixture, host):
    model = esft.lora(mixture("Mixtral"))
    special = esft.specialise(mixture("Mixtral"), esft.Selection({0: (0,), 1: (0,)}))
    for arm in (esft.full, esft.lora):
        with pytest.raises(Refusal, match="E-MODEL: the model holds LoRA already"):
            arm(model)
        with pytest.raises(Refusal, match="E-MODEL: the model is specialised"):
            arm(special)
        with pytest.raises(Refusal, match="E-MODEL: LlamaForCausalLM is dense"):
            arm(host())
    with pytest.raises(Refusal, match="E-RANGE: rank is 0"):
        esft.lora(mixture("Mixtral"), rank=0)
