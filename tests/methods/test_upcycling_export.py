"""Export: plain transformers reads it with equal logits; forms that cannot hold it are refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from moebook.errors import Refusal
from moebook.methods import upcycling
from moebook.methods.upcycling import exporting
from moebook.models import checkpoint

MIXED, RAW = {"combine": "renormalised"}, {"combine": "probability"}


@pytest.fixture
def sparse(apart):
    """Makes models of three experts, moved apart so that a wrong choice shows."""

    def make(model, **changes):
        config = upcycling.Config(**{"experts": 3, "top_k": 2, **changes})
        return apart(upcycling.upcycle(model, config))

    return make


@pytest.mark.parametrize(
    ("family", "changes", "shape", "form"),
    [
        ("Llama", MIXED, {}, "mixtral"),
        ("Llama", MIXED, {"tie_word_embeddings": True}, "mixtral"),
        ("Mistral", MIXED, {"sliding_window": 5}, "mixtral"),
        ("Mistral", {**MIXED, "top_k": 1}, {"head_dim": 16}, "mixtral"),
        ("Llama", {**RAW, "top_k": 3}, {}, "mixtral"),
        ("Llama", RAW, {}, "qwen2_moe"),
        ("Llama", {**RAW, "top_k": 1}, {"head_dim": 16}, "qwen2_moe"),
        ("Llama", {**MIXED, "layers": (1,)}, {}, "qwen2_moe"),
        ("Mistral", RAW, {"sliding_window": None}, "qwen2_moe"),
        ("Qwen2", RAW, {}, "qwen2_moe"),
        ("Qwen2", MIXED, {"tie_word_embeddings": True}, "qwen2_moe"),
        ("Qwen3", RAW, {}, "qwen3_moe"),
        ("Qwen3", {**MIXED, "layers": (0,)}, {"head_dim": 16}, "qwen3_moe"),
    ],
)
def test_export_reloads_in_plain_transformers_with_equal_logits(
    family, changes, shape, form, host, batch, sparse, tmp_path
):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    model = sparse(host(family, rope_parameters=rope, **shape), **changes)
    if family == "Qwen2":  # its biases start at zero
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.bias.normal_()
    want = model(**batch).logits
    folder = upcycling.export(model, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["model_type"] == form
    assert checkpoint.verify(folder)["base"] == model.upcycling.base
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert type(plain).__module__.startswith("transformers.")
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(plain(**batch).logits[real], want[real], rtol=1e-4, atol=1e-4)
    assert torch.equal(model(**batch).logits, want)
    prompt = batch["input_ids"][:1]
    texts = [each.generate(prompt, max_new_tokens=8, do_sample=False) for each in (model, plain)]
    assert torch.equal(*texts)


def test_a_half_precision_model_exports_close_to_itself(host, batch, sparse, tmp_path):
    model = sparse(host().bfloat16(), **MIXED)
    plain = AutoModelForCausalLM.from_pretrained(upcycling.export(model, tmp_path / "out"))
    assert plain.dtype == torch.bfloat16
    got, want = plain(**batch).logits.float(), model(**batch).logits.float()
    assert (got - want).norm() / want.norm() < 0.1


@pytest.mark.parametrize(
    ("family", "changes", "shape", "form", "reason"),
    [
        ("Llama", RAW, {}, "mixtral", "always renormalises.*'qwen2_moe'"),
        ("Llama", {**MIXED, "layers": (1,)}, {}, "mixtral", "every layer sparse"),
        ("Llama", {}, {}, "qwen3_moe", "holds hosts of type qwen3, this one is llama"),
        ("Llama", {}, {"attention_bias": True}, None, "no biases in its attention"),
        ("Mistral", {}, {"sliding_window": 5}, None, "sliding window of 5"),
        ("Gemma", {}, {}, None, "this one is gemma"),
    ],
)
def test_a_form_that_cannot_hold_the_model_is_refused_with_the_reason(
    family, changes, shape, form, reason, host, sparse, tmp_path
):
    with pytest.raises(Refusal, match=f"E-FORM.*{reason}"):
        upcycling.export(sparse(host(family, **shape), **changes), tmp_path / "out", form=form)
    assert not list(tmp_path.iterdir())


def test_an_export_whose_logits_differ_or_that_fails_half_way_leaves_nothing(
    host, sparse, tmp_path, monkeypatch
):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    rope = {"rope_type": "default", "rope_theta": 50.0}
    model = sparse(host(rope_parameters=rope), **MIXED)
    with monkeypatch.context() as patch:
        patch.setattr(exporting.checkpoint, "seal", full)
        with pytest.raises(OSError, match="No space"):
            upcycling.export(model, tmp_path / "out")
    carried = [key for key in exporting.CARRIED if key != "rope_parameters"]
    monkeypatch.setattr(exporting, "CARRIED", carried)
    with pytest.raises(Refusal, match="E-FORM: the logits of MixtralForCausalLM differ"):
        upcycling.export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused(host, sparse, tmp_path):
    model = sparse(host())
    with pytest.raises(Refusal, match="E-EXISTS"):
        upcycling.export(model, tmp_path)
    with pytest.raises(Refusal, match="E-CHOICE: form is 'mixtrel'"):
        upcycling.export(model, tmp_path / "out", form="mixtrel")
    with pytest.raises(Refusal, match="E-MODEL"):
        upcycling.export(host(), tmp_path / "out")
    with torch.no_grad():
        model.model.layers[0].mlp.router.weight[0, 0] = torch.nan
    with pytest.raises(Refusal, match="E-NONFINITE"):
        upcycling.export(model, tmp_path / "out")
