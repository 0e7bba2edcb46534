"""LoRA on fused experts in PEFT's form has equal logits there; what moved is told by expert."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from moebook import models
from moebook.methods import esft
from moebook.methods.esft import Selection
from tests.refusals import refused
from tests.sizes import SMALL

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
SHAPE = {**SMALL, "num_experts_per_tok": 2}
HOSTS = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=4),
    # Its first layer is dense, with names that PEFT takes for those of experts.
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        num_experts=4,
        moe_intermediate_size=24,
        head_dim=16,
        mlp_only_layers=[0],
    ),
    "nano-moe": None,  # DeepSeek's, with shared experts
    # Its attention has a gate_proj, as experts had.
    "afmoe": AfmoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=24, head_dim=16),
}


def host(name):
    if HOSTS[name] is None:
        return models.load(name)[0]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(HOSTS[name]).eval()


def with_lora(name):
    model = esft.lora(host(name), rank=2).eval()
    torch.manual_seed(1)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("name", HOSTS)
def test_peft_loads_what_is_exported_with_equal_logits(name, tmp_path):
    model = with_lora(name)
    ours = model(input_ids=IDS).logits
    folder = esft.export(model, tmp_path / "lora")
    theirs = PeftModel.from_pretrained(host(name), folder).eval()
    torch.testing.assert_close(theirs(input_ids=IDS).logits, ours, rtol=1e-4, atol=1e-4)
    assert (host(name)(input_ids=IDS).logits - ours).abs().max() > 0.1
    refused("E-EXISTS", esft.export, model, tmp_path / "lora")
    refused("E-MODEL: the model holds no LoRA", esft.export, host(name), tmp_path / "b")


def test_esfts_checkpoint_moved_the_chosen_experts_by_what_was_added(tmp_path):
    base = host("mixtral")
    model = esft.specialise(host("mixtral"), Selection(experts={0: (1,), 1: (0, 3)}))
    with torch.no_grad():
        for parameter in esft.trained(model).values():
            parameter *= 1.5
    table = esft.moved(base, esft.save(model, tmp_path / "task"))
    moved = table[table.moved]
    assert [*zip(moved.layer, moved.expert, strict=True)] == [(0, 1), (1, 0), (1, 3)]
    assert moved.change.tolist() == pytest.approx([0.5] * 3)
    assert len(table) == 8
    assert (table.change[~table.moved] == 0).all()
    esft.merge(model).save_pretrained(tmp_path / "merged")
    from tests.tokens import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path / "merged")
    again = esft.moved(base, tmp_path / "merged")
    assert again.change.to_numpy() == pytest.approx(table.change.to_numpy())


def test_a_strangers_lora_on_experts_moved_those_whose_product_is_not_zero(tmp_path):
    base = host("mixtral")
    config = LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=[],
        target_parameters=["mlp.experts.down_proj"],
    )
    model = get_peft_model(host("mixtral"), config)
    rank = torch.arange(8)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "layers.1" in key and "lora_B" in key:
                parameter.fill_(0.1)  # [out, R * E]: every expert has its own rows of A
            if "layers.1" in key and "lora_A" in key:
                parameter[rank // 2 != 2] = 0  # [E * R, in]
    model.save_pretrained(tmp_path / "lora")
    table = esft.moved(base, tmp_path / "lora").set_index(["layer", "expert"])
    assert table.index[table.moved].tolist() == [(1, 2)]
    wanted = model.merge_and_unload().state_dict()
    plain = base.state_dict()
    key = "model.layers.1.mlp.experts."
    added = (wanted[f"{key}down_proj"][2] - plain[f"{key}down_proj"][2]).norm()
    whole = sum(plain[key + n][2].norm() ** 2 for n in ("down_proj", "gate_up_proj"))
    assert table.change[1, 2] == pytest.approx(float(added / whole**0.5), rel=1e-4)


def test_a_lora_that_peft_itself_cannot_load_is_refused(tmp_path):
    folder = esft.export(with_lora("afmoe"), tmp_path / "lora")
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["target_modules"].append("model.layers.0.self_attn.gate_proj")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    words = "E-CONFIG: .*lora: PEFT cannot load it: Cannot convert PEFT target"
    refused(words, esft.moved, host("afmoe"), folder)


def test_folders_of_no_checkpoint_are_refused(tmp_path):
    base = host("mixtral")
    refused(
        "E-NOFILE: .* is no checkpoint; expected experts.json",
        esft.moved,
        base,
        tmp_path,
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    refused("E-NOFILE: .*no adapter_model.safetensors", esft.moved, base, tmp_path)
