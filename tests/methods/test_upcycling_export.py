"""Export: plain transformers reads it with equal logits; forms that cannot hold it are refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from moebook.errors import Refusal
from moebook.methods import upcycling
from moebook.methods.upcycling import exporting
from moebook.models import anatomy, checkpoint


def made(model, **changes):
    """Upcycled, experts and routers moved apart, so that a wrong choice shows."""
    upcycling.upcycle(model, upcycling.Config(**{"experts": 3, "top_k": 2, **changes}))
    torch.manual_seed(2)
    with torch.no_grad():
        for layer in anatomy(model).layers:
            if layer.kind == "sparse":
                for weight in layer.mlp.parameters():
                    weight += 0.3 * torch.randn_like(weight)
    return model


CASES = [
    ("Llama", {"combine": "renormalised"}, {}, "mixtral"),
    ("Llama", {"combine": "renormalised"}, {"tie_word_embeddings": True}, "mixtral"),
    ("Mistral", {"combine": "renormalised"}, {"sliding_window": 5}, "mixtral"),
    ("Mistral", {"combine": "renormalised", "top_k": 1}, {"head_dim": 16}, "mixtral"),
    ("Llama", {"combine": "probability", "top_k": 3}, {}, "mixtral"),
    ("Llama", {"combine": "probability"}, {}, "qwen2_moe"),
    ("Llama", {"combine": "probability", "top_k": 1}, {"head_dim": 16}, "qwen2_moe"),
    ("Llama", {"combine": "renormalised", "layers": (1,)}, {}, "qwen2_moe"),
    ("Mistral", {"combine": "probability"}, {"sliding_window": None}, "qwen2_moe"),
    ("Qwen2", {"combine": "probability"}, {}, "qwen2_moe"),
    ("Qwen2", {"combine": "renormalised"}, {"tie_word_embeddings": True}, "qwen2_moe"),
    ("Qwen3", {"combine": "probability"}, {}, "qwen3_moe"),
    ("Qwen3", {"combine": "renormalised", "layers": (0,)}, {"head_dim": 16}, "qwen3_moe"),
]


@pytest.mark.parametrize(("family", "changes", "shape", "form"), CASES)
def test_export_reloads_in_plain_transformers_with_equal_logits(
    family, changes, shape, form, host, batch, tmp_path
):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    model = made(host(family, rope_parameters=rope, **shape), **changes)
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


def test_a_half_precision_model_exports_close_to_itself(host, batch, tmp_path):
    model = made(host().bfloat16(), combine="renormalised")
    plain = AutoModelForCausalLM.from_pretrained(upcycling.export(model, tmp_path / "out"))
    assert plain.dtype == torch.bfloat16
    got, want = plain(**batch).logits.float(), model(**batch).logits.float()
    assert (got - want).norm() / want.norm() < 0.1


@pytest.mark.parametrize(
    ("family", "changes", "shape", "form", "reason"),
    [
        ("Llama", {"combine": "probability"}, {}, "mixtral", "always renormalises.*'qwen2_moe'"),
        ("Llama", {"combine": "renormalised", "layers": (1,)}, {}, "mixtral", "every layer sparse"),
        ("Llama", {}, {}, "qwen3_moe", "holds hosts of type qwen3, this one is llama"),
        ("Llama", {}, {"attention_bias": True}, None, "no biases in its attention"),
        ("Mistral", {}, {"sliding_window": 5}, None, "sliding window of 5"),
        ("Gemma", {}, {}, None, "this one is gemma"),
    ],
)
def test_a_form_that_cannot_hold_the_model_is_refused_with_the_reason(
    family, changes, shape, form, reason, host, tmp_path
):
    with pytest.raises(Refusal, match=f"E-FORM.*{reason}"):
        upcycling.export(made(host(family, **shape), **changes), tmp_path / "out", form=form)
    assert not list(tmp_path.iterdir())


def test_an_export_whose_logits_differ_is_refused_and_leaves_nothing(host, tmp_path, monkeypatch):
    rope = {"rope_type": "default", "rope_theta": 50.0}
    model = made(host(rope_parameters=rope), combine="renormalised")
    kept = [key for key in exporting.CARRIED if key != "rope_parameters"]
    monkeypatch.setattr(exporting, "CARRIED", kept)
    with pytest.raises(Refusal, match="E-FORM: the logits of MixtralForCausalLM differ"):
        upcycling.export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_export_that_fails_half_way_leaves_nothing(host, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(exporting.checkpoint, "seal", full)
    with pytest.raises(OSError, match="No space"):
        upcycling.export(made(host(), combine="renormalised"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused(host, tmp_path):
    model = made(host())
    with pytest.raises(Refusal, match="E-EXISTS"):
        upcycling.export(model, tmp_path)
    with pytest.raises(Refusal, match=r"E-CHOICE: form is 'mixtrel'"):
        upcycling.export(model, tmp_path / "out", form="mixtrel")
    with pytest.raises(Refusal, match="E-MODEL"):
        upcycling.export(host(), tmp_path / "out")
    with torch.no_grad():
        model.model.layers[0].mlp.router.weight[0, 0] = torch.nan
    with pytest.raises(Refusal, match="E-NONFINITE"):
        upcycling.export(model, tmp_path / "out")
