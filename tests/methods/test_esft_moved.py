"""LoRA on fused experts in PEFT's form has equal logits there; what moved is told by expert."""

import json

import pytest
import safetensors.torch
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
from tests.tokens import byte_tokenizer

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


def whole(model, folder):
    """Save a whole model, with a tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def strangers(model, folder):
    """Save LoRA of PEFT's own on a model's experts."""
    targets = ["mlp.experts.down_proj"]
    config = LoraConfig(r=2, target_modules=[], target_parameters=targets)
    get_peft_model(model, config).save_pretrained(folder)
    return folder


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
    again = esft.moved(base, whole(esft.merge(model), tmp_path / "merged"))
    assert again.change.to_numpy() == pytest.approx(table.change.to_numpy())


def test_a_folder_called_like_a_shipped_base_is_read_as_the_folder(
    tmp_path, monkeypatch
):
    base = host("nano-moe")
    changed = host("nano-moe")
    with torch.no_grad():
        changed.model.layers[1].mlp.experts.down_proj[0] *= 2
    whole(changed, tmp_path / "nano-moe")
    monkeypatch.chdir(tmp_path)
    assert esft.moved(base, "nano-moe").moved.sum() == 1
    assert esft.moved(base, "./nano-moe").moved.sum() == 1


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
    words = "E-CONFIG: .*lora: PEFT cannot load it: .*Cannot convert PEFT target"
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


def renamed(tensors):
    return {
        key.replace(".layers.", ".blocks."): tensor for key, tensor in tensors.items()
    }


def with_one(value):
    def change(tensors):
        next(iter(tensors.values()))[0, 0] = value
        return tensors

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed, "E-KEYS: .*lora: 4 tensors missing .*layers.* 4 surplus .*blocks"),
        (
            lambda tensors: dict([*tensors.items()][1:]),
            "E-KEYS: .*: 1 tensors missing .* 0 surplus",
        ),
        (
            lambda tensors: tensors | {"more": torch.ones(2)},
            "E-KEYS: .*: 0 tensors missing .* 1 surplus .*more",
        ),
        (with_one(float("nan")), "E-NONFINITE: .*lora.*holds NaN or infinity"),
        (with_one(float("inf")), "E-NONFINITE: .*lora.*holds NaN or infinity"),
    ],
)
def test_an_adapter_whose_tensors_do_not_fit_the_base_is_refused(
    tmp_path, change, words
):
    folder = strangers(host("mixtral"), tmp_path / "lora")
    file = folder / "adapter_model.safetensors"
    tensors = change(safetensors.torch.load(file.read_bytes()))
    safetensors.torch.save_file(tensors, file)
    refused(words, esft.moved, host("mixtral"), folder)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("adapter_model.safetensors", "no tensors", "SafetensorError"),
        ("adapter_config.json", "[]", "TypeError"),
        ("adapter_config.json", "{", "JSONDecodeError"),
        ("adapter_config.json", '{"peft_type": "FOO"}', "FOO"),
        ("adapter_config.json", '{"peft_type": "PROMPT_TUNING"}', ""),
    ],
)
def test_an_adapter_that_is_broken_is_refused(tmp_path, file, content, words):
    folder = strangers(host("mixtral"), tmp_path / "lora")
    (folder / file).write_text(content)
    match = f"E-CONFIG: .*lora: PEFT cannot load it: .*{words}.*; save it again"
    refused(match, esft.moved, host("mixtral"), folder)


def resized(**sizes):
    config = MixtralConfig(**{**SHAPE, **sizes}, num_local_experts=4)
    return AutoModelForCausalLM.from_config(config).eval()


def test_an_adapter_of_a_wider_base_is_refused(tmp_path):
    folder = strangers(resized(hidden_size=64), tmp_path / "lora")
    words = "E-SHAPE: .*lora: tensors of another base: size mismatch for .*; load the"
    refused(words, esft.moved, host("mixtral"), folder)


def test_a_model_of_fewer_layers_is_refused(tmp_path):
    folder = whole(resized(num_hidden_layers=1), tmp_path / "less")
    words = (
        r"E-SHAPE: .*less: experts in layers \[0\], expected \[0, 1\] as in the base"
    )
    refused(words, esft.moved, host("mixtral"), folder)


def test_experts_of_zeros_did_not_move_and_those_with_nan_are_refused(tmp_path):
    base = host("mixtral")
    experts = base.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[1] = 0
        experts.down_proj[1] = 0
    table = esft.moved(base, whole(base, tmp_path / "same"))
    assert (table.change == 0).all()
    assert not table.moved.any()
    with torch.no_grad():
        experts.down_proj[1, 0, 0] = float("nan")
    words = "E-NONFINITE: the base: layer 0: experts: down_proj holds NaN or infinity"
    refused(words, esft.moved, base, tmp_path / "same")
    folder = whole(base, tmp_path / "broken")
    refused("E-NONFINITE: .*broken", esft.moved, host("mixtral"), folder)


def test_telling_what_moved_leaves_torchs_random_state(tmp_path):
    base = host("mixtral")
    folder = strangers(host("mixtral"), tmp_path / "lora")
    before = torch.get_rng_state()
    esft.moved(base, folder)
    assert torch.equal(torch.get_rng_state(), before)
