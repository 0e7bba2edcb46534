"""Other people's conventions: what a loaded model is, whatever its folder asks for.

Each refusal's neighbours that must pass are transformers' own: its families' default
values, and the public configurations that we ship.
"""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moebook import models, training
from moebook.data import encode
from moebook.evaluation.model import InMemory
from moebook.models import skeleton
from moebook.models.conventions import check, check_values, end_tokens
from moebook.nn import plain
from tests.methods.conftest import MIXTURES, build
from tests.refusals import refused

NAN = float("nan")
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
ROWS = [
    {
        "prompt": f"Add {i} and {i + 1}.",
        "answer": f"The sum is {2 * i + 1}." + " Yes." * (i % 5),
    }
    for i in range(12)
]


def made(kind, **changes):
    """A random model of a family, by the family's name in config.json."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def saved(tmp_path, byte_tokenizer):
    """A folder with a model and a tokenizer, whose config.json changes afterwards."""

    def save(model, **changes):
        model.save_pretrained(tmp_path)
        byte_tokenizer.save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return str(tmp_path)

    return save


VALUES = [
    (
        "mixtral",
        {"num_experts_per_tok": 9},
        "E-RANGE: .*per_tok is 9, expected 1 to 8 .num_local",
    ),
    ("mixtral", {"num_experts_per_tok": 0}, "E-RANGE: .*per_tok is 0, expected 1 to 8"),
    (
        "olmoe",
        {"num_experts": 4},
        "E-RANGE: .*per_tok is 8, expected 1 to 4 .num_experts",
    ),
    ("ernie4_5_moe", {"moe_k": 99}, "E-RANGE: .*moe_k is 99, expected 1 to 64"),
    (
        "deepseek_v3",
        {"n_group": 3},
        "E-RANGE: .*n_group 3 does not divide n_routed_experts 256",
    ),
    (
        "deepseek_v3",
        {"topk_group": 9},
        "E-RANGE: .*topk_group is 9, expected 1 to 8 .n_group",
    ),
    ("llama", {"rms_norm_eps": NAN}, "E-NONFINITE: .*config.json: rms_norm_eps is NaN"),
    (
        "llama",
        {"rms_norm_eps": {"__float__": "NaN"}},
        "E-NONFINITE: .*rms_norm_eps is NaN",
    ),
    (
        "llama",
        {"rms_norm_eps": {"__float__": "Infinity"}},
        "E-RANGE: .*rms_norm_eps is inf, expected 0 to 1",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_theta": {"__float__": "-Infinity"}}},
        "E-RANGE: .*rope_theta is -inf",
    ),
    (
        "llama",
        {"rms_norm_eps": -1e-6},
        "E-RANGE: .*rms_norm_eps is -1e-06, expected 0 to 1",
    ),
    ("gpt2", {"layer_norm_epsilon": math.inf}, "E-RANGE: .*layer_norm_epsilon is inf"),
    (
        "llama",
        {"attention_dropout": 1.5},
        "E-RANGE: .*attention_dropout is 1.5, expected 0 to 1",
    ),
    ("gpt2", {"resid_pdrop": 2}, "E-RANGE: .*resid_pdrop is 2"),
    ("opt", {"layerdrop": -0.1}, "E-RANGE: .*layerdrop is -0.1"),
    (
        "mistral",
        {"sliding_window": 0},
        "E-RANGE: .*sliding_window is 0, expected 1 or more",
    ),
    ("mistral", {"sliding_window": -1}, "E-RANGE: .*sliding_window is -1"),
    (
        "llama",
        {"max_position_embeddings": -1},
        "E-RANGE: .*max_position_embeddings is -1",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}},
        "E-RANGE: .*theta",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": math.inf}},
        "E-RANGE: .*rope_theta is inf, expected a finite number, 1e-09 or more",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0, NAN]}},
        "E-NONFINITE: .*config.json: long_factor is NaN",
    ),
    (
        "llama",
        {"attention_dropout": [0.1, {"__float__": "Infinity"}]},
        "E-RANGE: .*attention_dropout is inf, expected 0 to 1",
    ),
    (
        "gemma3",
        {"text_config": {"attention_dropout": 3}},
        "E-RANGE: .*attention_dropout is 3",
    ),
    (
        "llama4",
        {"text_config": {"num_local_experts": 2, "num_experts_per_tok": 3}},
        "E-RANGE: .*per_tok is 3, expected 1 to 2",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "words"), VALUES)
def test_a_number_with_which_no_model_computes_is_refused_by_name(
    kind, changes, words, tmp_path
):
    values = AutoConfig.for_model(kind).to_dict() | {"model_type": kind} | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    refused(words, models.load, str(tmp_path))
    refused(words, skeleton.configuration, str(tmp_path))


def test_the_numbers_of_all_families_and_public_configurations_pass():
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if kind != "gemma4_assistant":  # whose own defaults transformers refuses
            check_values(AutoConfig.for_model(kind).to_dict(), kind)
    for name, values in skeleton.HOSTS.items():
        check_values(values, name)
    dense = {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    }  # Granite's dense hybrids
    check_values(dense, "dense")
    check_values({"num_experts": None, "top_k_experts": None}, "Gemma 4")
    check_values({"sliding_window": 0, "use_sliding_window": False}, "Qwen 2")
    check_values(
        {"time_step_limit": [0.0, math.inf], "eps": 1e-5, "token_dropout": True},
        "Mamba 2",
    )


PACKED = {"weight": torch.zeros(2, 2, dtype=torch.uint8), "norm": torch.ones(2)}
QUANTISED = [
    (
        {"quant_method": "foo"},
        "quantised by 'foo', which transformers does not know; known: .*awq",
    ),
    ({"quant_method": None}, "quantised by 'None', which transformers does not know"),
    (3, "quantised by '3', which"),
    (
        {"load_in_4bit": True, "quant_method": "bitsandbytes"},
        "quantised by bitsandbytes_4bit, the files hold plain ones .F32.; "
        "remove quantization_config",
    ),
    (
        {"load_in_8bit": True},
        "quantised by bitsandbytes_8bit, the files hold plain ones",
    ),
    (
        {"load_in_8bit": True, "load_in_4bit": True},
        "quantised by bitsandbytes_4bit, the files hold plain ones",
    ),
    (
        {"quant_method": "gptq", "bits": 4},
        "quantised by gptq, the files hold plain ones",
    ),
    ({"quant_method": "fp8"}, "quantised by fp8, the files hold plain ones"),
    ({"quant_method": "mxfp4"}, "quantised by mxfp4, the files hold plain ones"),
]


@pytest.mark.parametrize(("quantisation", "words"), QUANTISED)
def test_a_quantisation_unknown_or_of_plain_weights_is_refused(
    quantisation, words, saved, tiny
):
    folder = saved(tiny(), quantization_config=quantisation)
    refused(f"E-MODEL: .*config.json has weights {words}", models.load, folder)
    refused(
        "E-MODEL",
        models.load,
        saved(tiny(), text_config={"quantization_config": quantisation}),
    )


def test_no_quantisation_and_packed_weights_pass_that_check(saved, tiny, tmp_path):
    models.load(saved(tiny(), quantization_config=None))
    save_file(PACKED, tmp_path / "packed.safetensors")
    method = {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}
    }
    models.conventions.check_quantised(method, tmp_path, {"packed.safetensors"})


@pytest.mark.parametrize("family", [*MIXTURES, "GptOss", "GraniteMoe"])
def test_nats_and_training_are_the_likelihoods_whatever_the_configuration_adds(
    family, byte_tokenizer
):
    sizes = MIXTURES.get(family, {"num_local_experts": 4, "num_experts_per_tok": 2})
    model = build(family, **sizes | {"vocab_size": 300})
    encoded = encode(ROWS, byte_tokenizer, max_length=256)
    total = 0.0
    count = 0
    for ids, labels in zip(encoded["input_ids"], encoded["labels"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        for place, label in enumerate(labels[1:]):
            if label != -100:
                total -= logits[place, label].item()
                count += 1
    for asked in (False, True):
        model.config.output_router_logits = asked
        got = [
            training.nats(model, encoded, pad_id=2, batch=batch) for batch in (12, 5, 1)
        ]
        assert got == pytest.approx([total / count] * 3, rel=1e-5)
        how = {"steps": 1, "batch": 12, "lr": 1e-4, "warmup": 0.0}
        losses = [
            training.fit(
                copy.deepcopy(model), encoded, accumulate=parts, pad_id=2, **how
            ).loss[0]
            for parts in (1, 4)
        ]
        assert losses == pytest.approx([total / count] * 2, rel=1e-5)
        assert model.config.output_router_logits is asked  # left as it was


@pytest.mark.parametrize(
    "asked",
    [
        {"output_router_logits": True},
        {"return_dict": False},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"use_cache": False},
    ],
)
def test_a_loaded_model_gives_what_it_gives_without_such_a_flag(
    asked, saved, byte_tokenizer
):
    host = build("Mixtral", **MIXTURES["Mixtral"], vocab_size=300)
    encoded = encode(ROWS, byte_tokenizer, max_length=256)
    context = byte_tokenizer.encode("the sum")

    def measured(model):
        answer = InMemory(model, byte_tokenizer, 2).answer([context], [(5, ())])
        return training.nats(model, encoded, pad_id=2, batch=4), answer

    wanted = measured(host)
    model, _ = models.load(saved(host, **asked))
    assert measured(model)[1] == wanted[1]
    assert measured(model)[0] == pytest.approx(wanted[0], rel=1e-6)
    usual = {
        "output_router_logits": False,
        "output_attentions": False,
        "output_hidden_states": False,
        "return_dict": True,
    }
    for name in asked.keys() & usual.keys():
        assert getattr(model.config, name) is usual[name]
    batch = {"input_ids": torch.tensor([context]), "labels": torch.tensor([context])}
    torch.testing.assert_close(model(**batch).loss, host(**batch).loss)
    if "output_attentions" in asked:
        host.set_attn_implementation("eager")
    for name, value in asked.items():  # the same for a model out of a user's hands
        setattr(host.config, name, value)
    again = measured(host)
    assert again[1] == wanted[1]
    assert again[0] == pytest.approx(wanted[0], rel=1e-6)
    assert {name: getattr(host.config, name) for name in asked} == asked


def test_flags_come_back_after_an_error(tiny):
    model = tiny()
    model.config.output_hidden_states = True
    with pytest.raises(KeyboardInterrupt), plain(model):
        assert model.config.output_hidden_states is False
        raise KeyboardInterrupt
    assert model.config.output_hidden_states is True


AHEAD = "E-MODEL: .*is no causal language model: what it says of a token depends on those after"
NOT_CAUSAL = {
    "bert": {},
    "roberta": {},
    "electra": {"embedding_size": 32},
    "roformer": {},
    "gemma3_text": {"use_bidirectional_attention": True, "head_dim": 8},
}


@pytest.mark.parametrize("kind", NOT_CAUSAL)
def test_a_model_that_looks_ahead_is_refused(kind, saved, byte_tokenizer):
    model = made(kind, **NOT_CAUSAL[kind])
    encoded = encode(ROWS, byte_tokenizer, max_length=256)
    refused(AHEAD, models.load, saved(model))
    refused(AHEAD, InMemory, model, byte_tokenizer, 2)
    refused(AHEAD, training.nats, model, encoded)
    refused(AHEAD, training.fit, model, encoded, steps=2)
    causal = {"is_decoder": True, "use_bidirectional_attention": False}
    check(made(kind, **NOT_CAUSAL[kind] | causal), loss=True)


def test_a_loss_that_is_not_the_next_tokens_likelihood_is_refused_where_it_is_used(
    saved, byte_tokenizer
):
    layers = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    model = made("bart", **layers, encoder_layers=2, d_model=32)
    models.load(saved(model))  # its logits are those of a causal model
    encoded = encode(ROWS, byte_tokenizer, max_length=256)
    words = (
        "E-MODEL: the loss of BartForCausalLM is not the likelihood of the next token"
    )
    refused(words, training.nats, model, encoded)
    refused(words, training.fit, model, encoded, steps=2)


def test_a_model_that_averages_its_loss_tells_no_nats_of_several_batches(
    tiny, byte_tokenizer
):
    model = tiny()
    model.accepts_loss_kwargs = False
    encoded = encode(ROWS, byte_tokenizer, max_length=256)
    training.nats(model, encoded, batch=12)
    refused(
        "E-MODEL: LlamaForCausalLM averages its loss",
        training.nats,
        model,
        encoded,
        batch=6,
    )


def test_what_computes_no_numbers_or_nothing_is_refused(
    saved, byte_tokenizer, tmp_path, tiny
):
    scaled = made("gemma2", final_logit_softcapping=0.0, head_dim=8)
    refused("E-NONFINITE: .*Gemma2ForCausalLM gives NaN", models.load, saved(scaled))
    refused(
        "E-NONFINITE: .*GraniteForCausalLM gives NaN",
        InMemory,
        made("granite", logits_scaling=0.0),
        byte_tokenizer,
        2,
    )
    folder = saved(tiny())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][3] = NAN
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused("E-NONFINITE: .*LlamaForCausalLM gives NaN", models.load, folder)
    greedy = made(
        "mixtral", num_local_experts=4, num_experts_per_tok=5, num_key_value_heads=2
    )
    encoded = encode(ROWS, byte_tokenizer, max_length=256)
    words = "E-MODEL: MixtralForCausalLM cannot read 8 tokens .RuntimeError"
    refused(words, InMemory, greedy, byte_tokenizer, 2)
    refused(words, training.nats, greedy, encoded)
    refused(words, training.fit, greedy, encoded, steps=2)
    refused(
        "E-MODEL: LlamaModel gives no logits", InMemory, tiny().model, byte_tokenizer, 2
    )


class Odd(torch.nn.Module):
    """A module whose forward pass is a given function."""

    def __init__(self, act):
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 8)
        self.act = act

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, **_):
        return SimpleNamespace(logits=self.act())


def test_memory_that_runs_out_on_a_cpu_is_no_fault_of_the_model():
    with pytest.raises(RuntimeError, match="allocate memory"):
        check(Odd(lambda: torch.empty(2**50)))
    words = r"E-MODEL: Odd gives logits \(\), expected \[N, T, V\]; take a model with"
    refused(words, check, Odd(lambda: torch.zeros(())))


def test_ends_are_those_of_tokenizer_and_generation_config(tiny, byte_tokenizer, saved):
    model = tiny()
    for listed, wanted in (
        (None, {1}),
        (1, {1}),
        (7, {1, 7}),
        ([7, 9], {1, 7, 9}),
        ([], {1}),
    ):
        model.generation_config.eos_token_id = listed
        assert end_tokens(model, byte_tokenizer) == wanted
    model.generation_config.eos_token_id = [1, 9]
    loaded, tokenizer = models.load(saved(model))
    assert end_tokens(loaded, tokenizer) == {1, 9}
    del model.generation_config
    assert end_tokens(model, byte_tokenizer) == {1}


@pytest.mark.parametrize(
    "listed", ["9", 9.5, 9.0, True, [1, "9"], [None, 9.5], [[9]], {}, {"a": 9}]
)
def test_an_end_that_is_no_number_of_a_token_is_refused(
    listed, tiny, byte_tokenizer, saved, tmp_path
):
    model = tiny()
    folder = saved(model)
    content = json.dumps({"eos_token_id": listed})
    (tmp_path / "generation_config.json").write_text(content)
    words = "E-CONFIG: .*generation config's eos_token_id names .*a token's number"
    refused(words, models.load, folder)
    model.generation_config.eos_token_id = listed
    refused(words, InMemory, model, byte_tokenizer, 2)
