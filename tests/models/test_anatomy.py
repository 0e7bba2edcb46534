"""Where transformers keeps its parts, and our experts in their place: same results."""

from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from moebook import kernels, models
from moebook.errors import Refusal
from moebook.kernels import experts
from moebook.methods import pesc
from moebook.models.anatomy import anatomy
from tests.methods.conftest import MIXTURES, build

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SPARSE = ("Mixtral", "Olmoe", "DeepseekV2", "Qwen3Moe")


@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2"]
)
def test_dense_families_show_their_mlps(family):
    model = build(family)
    found = anatomy(model)
    assert (found.hidden, found.decoder) == (32, model.model)
    for index, (layer, block) in enumerate(
        zip(found.layers, model.model.layers, strict=True)
    ):
        assert (layer.index, layer.kind, layer.width, layer.block) == (
            index,
            "dense",
            40,
            block,
        )
        assert (layer.mlp, layer.attention) == (block.mlp, block.self_attn)
        assert layer.router is layer.experts is None
    found.layers[0].replace(nn.Identity())
    assert isinstance(model.model.layers[0].mlp, nn.Identity)


def test_a_model_that_calls_itself_its_decoder_shows_its_layers():
    model = build(
        "Llama4", intermediate_size_mlp=40, num_local_experts=4, moe_layers=[1]
    )
    found = [(layer.kind, layer.width) for layer in anatomy(model).layers]
    assert found == [("dense", 40), ("sparse", 40)]
    assert model.get_decoder() is model
    assert anatomy(model).decoder is model.model


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_families_show_router_and_fused_experts(family):
    first, *_, layer = anatomy(build(family, **MIXTURES[family])).layers
    assert (layer.kind, layer.width) == ("sparse", 16)
    assert layer.router is layer.mlp.gate
    experts = len(layer.router.weight)
    assert layer.experts.gate_up_proj.shape == (experts, 2 * 16, 32)
    assert layer.experts.down_proj.shape == (experts, 32, 16)
    assert (
        (layer.shared is not None)
        == (family == "DeepseekV2")
        == (first.kind == "dense")
    )


def test_a_shared_expert_beside_the_mixture_is_shown():
    more = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = build("GraniteMoeShared", shared_intermediate_size=24, **more)
    for layer in anatomy(model).layers:
        assert layer.shared is layer.block.shared_mlp


def test_transposed_experts_show_their_own_width():
    _, layer = anatomy(build("GptOss", num_local_experts=4)).layers
    assert layer.experts.down_proj.shape == (4, 40, 32)
    assert layer.width == 40


# PEFT 0.21 reads what transformers is giving up.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_peft_wrapper_is_looked_through_and_experts_that_it_adapts_are_shown_as_they_were():
    model = build("Mixtral", **MIXTURES["Mixtral"])
    decoder = model.model
    experts = [layer.experts for layer in anatomy(model).layers]
    adapted = ["experts.gate_up_proj", "experts.down_proj"]
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=adapted)
    found = anatomy(peft.get_peft_model(model, lora))
    assert found.decoder is decoder
    assert [layer.experts for layer in found.layers] == experts
    assert [(layer.kind, layer.width) for layer in found.layers] == [("sparse", 16)] * 2


def test_crafted_layers_are_sparse_with_a_shared_mlp():
    model = build()
    pesc.craft(model, pesc.Config(experts=3, adapter_width=4, layers=(1,)))
    dense, sparse = anatomy(model).layers
    assert (dense.kind, sparse.kind, sparse.width) == ("dense", "sparse", 40)
    assert sparse.router is sparse.mlp.router
    assert sparse.experts.down.shape == (3, 32, 4)
    assert type(sparse.shared).__name__ == "LlamaMLP"


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "no decoder layers.*GPT2MLP"),
        ("phi", "decoder layer 0 .*PhiMLP"),
    ],
)
def test_a_model_without_gated_mlps_is_refused_with_the_classes_seen(family, words):
    with pytest.raises(Refusal, match=f"E-MODEL: {words}"):
        anatomy(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "TransformerEncoder has layers but no config.hidden_size"),
        (SimpleNamespace(), "TransformerEncoder has layers but no config.hidden_size"),
        (SimpleNamespace(hidden_size=8), "decoder layer 0 .*TransformerEncoderLayer"),
    ],
)
def test_layers_of_no_decoder_of_transformers_are_refused(config, words):
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    if config is not None:
        encoder.config = config
    with pytest.raises(Refusal, match=f"E-MODEL: {words}"):
        anatomy(encoder)


@pytest.mark.parametrize("family", SPARSE)
def test_training_and_generation_with_our_experts_equal_those_of_transformers(
    family, monkeypatch
):
    rows = []

    def counted(x, *args):
        rows.append(len(x))
        return experts(x, *args)

    monkeypatch.setattr(kernels, "experts", counted)
    models.register_experts()
    model = build(family, torch.float64, **MIXTURES[family])
    ids = torch.randint(2, 48, (2, 9))
    seen = []
    for (
        parameter
    ) in model.parameters():  # some families start so small that nothing would show
        nn.init.normal_(parameter, std=0.3)
    for implementation in ("eager", "moebook"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        tokens = model.eval().generate(ids[:, :4], max_new_tokens=6, do_sample=False)
        seen.append((loss, grads, tokens))
    (loss, grads, tokens), (our_loss, our_grads, our_tokens) = seen
    torch.testing.assert_close(our_loss, loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(our_grads, grads, rtol=1e-8, atol=1e-10)
    assert any(
        "experts" in name and grad.abs().sum() > 0 for name, grad in grads.items()
    )
    assert torch.equal(our_tokens, tokens)
    # Ours ran: all 18 tokens in training, then two prompts of four, then two tokens at
    # a time.
    assert {18, 8, 2} == set(rows)


def test_experts_of_another_form_are_refused():
    models.register_experts()
    model = build("GptOss", num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation("moebook")
    with pytest.raises(
        Refusal, match="E-MODEL: GptOssExperts: experts implementation 'moebook'"
    ):
        model(input_ids=torch.tensor([[3, 4]]))
