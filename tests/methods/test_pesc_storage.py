"""Checkpoints: restored bit for bit on the right base, refused in one line on anything else."""

import json
import os
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebook.errors import Refusal
from moebook.methods import pesc
from moebook.models import manifest

SMALL = {"experts": 4, "adapter_width": 6, "lora_rank": 4}


def trained_model(host, name="lora", sparse=True):
    model = pesc.prepare(host(), pesc.Config(**SMALL, host=name), sparse=sparse)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in pesc.trained(model, model.pesc.config).values():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def rewrite(folder, tensors=None, **changes):
    """Change a checkpoint consistently: tensors with their hash, or single facts."""
    if tensors is not None:
        save_file(tensors, folder / "trained.safetensors")
    path = folder / "MANIFEST.json"
    facts = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("files", "sizes")}
    path.unlink()
    manifest.seal(folder, **{**facts, **changes})


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("name", ["frozen", "lora", "qlora", "full"])
def test_saved_and_restored_bit_for_bit(name, sparse, host, batch, tmp_path):
    if name == "frozen" and not sparse:
        pytest.skip("nothing trains in a frozen dense model")
    model = trained_model(host, name, sparse)
    folder = pesc.save(model, tmp_path / "run")
    again = pesc.load(host(), folder).eval()
    assert again.pesc == model.pesc
    left, right = (pesc.trained(m, m.pesc.config) for m in (model, again))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert torch.equal(model(**batch).logits, again(**batch).logits)


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_a_merged_model_is_saved_whole(name, host, batch, tmp_path):
    model = pesc.merge_lora(trained_model(host, name))
    again = pesc.load(host(), pesc.save(model, tmp_path / "merged")).eval()
    assert torch.equal(model(**batch).logits, again(**batch).logits)


def test_only_what_was_trained_is_stored_and_no_pickle(host, tmp_path):
    model = trained_model(host)
    folder = pesc.save(model, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "MANIFEST.json", "run", "trained.safetensors"]  # fmt: skip
    stored = load_file(folder / "trained.safetensors")
    assert all(".adapters." in k or ".router." in k or ".lora_" in k for k in stored)
    assert json.loads((folder / "MANIFEST.json").read_text())["base"] == model.pesc.base


def test_a_failed_save_leaves_nothing_behind(host, tmp_path, monkeypatch):
    model = trained_model(host)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        pesc.save(model, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_saving_refuses_an_existing_folder_and_bad_numbers(host, tmp_path):
    model = trained_model(host)
    pesc.save(model, tmp_path / "run")
    with pytest.raises(Refusal, match="E-EXISTS"):
        pesc.save(model, tmp_path / "run")
    with torch.no_grad():
        model.model.layers[0].mlp.adapters.up[0, 0, 0] = torch.nan
    with pytest.raises(Refusal, match="E-NONFINITE"):
        pesc.save(model, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(Refusal, match="E-MODEL"):
        pesc.save(host(), tmp_path / "other")


def damaged_tensors(change):
    def damage(folder):
        tensors = load_file(folder / "trained.safetensors")
        rewrite(folder, change(tensors))

    return damage


def drop_one(tensors):
    tensors.pop(next(key for key in tensors if key.endswith("router.weight")))
    return tensors


def flip_a_bit(folder):
    payload = bytearray((folder / "trained.safetensors").read_bytes())
    payload[-5] ^= 1
    (folder / "trained.safetensors").write_bytes(payload)


def unknown_setting(folder):
    config = {**asdict(pesc.Config(**SMALL, host="lora")), "moe_scaling": 1}
    rewrite(folder, config=config)


DAMAGE = {
    "missing key": (damaged_tensors(drop_one), "E-KEYS: .*1 tensors missing"),
    "surplus key": (damaged_tensors(lambda t: {**t, "x": torch.ones(1)}), "E-KEYS: .*1 surplus"),
    "renamed keys": (damaged_tensors(lambda t: {f"base.{k}": v for k, v in t.items()}), "E-KEYS"),
    "shape": (damaged_tensors(lambda t: {k: v[None].clone() for k, v in t.items()}), "E-SHAPE"),
    "dtype": (damaged_tensors(lambda t: {k: v.long() for k, v in t.items()}), "E-SHAPE"),
    "NaN": (damaged_tensors(lambda t: {k: v * torch.nan for k, v in t.items()}), "E-NONFINITE"),
    "flipped bit": (flip_a_bit, "E-HASH"),
    "no tensors": (lambda f: (f / "trained.safetensors").unlink(), "E-MANIFEST"),
    "no settings": (lambda f: (f / "MANIFEST.json").unlink(), "E-MANIFEST"),
    "broken JSON": (lambda f: (f / "MANIFEST.json").write_text("{"), "E-MANIFEST"),
    "other form": (lambda f: rewrite(f, form="pesc/0"), "E-FORMAT"),
    "wrong type": (lambda f: rewrite(f, sparse="yes"), "E-FORMAT"),
    "unknown setting": (unknown_setting, "E-FORMAT: .*moe_scaling"),
    "bad value": (
        lambda f: rewrite(f, config={**asdict(pesc.Config(**SMALL, host="lora")), "top_k": 9}),
        "E-RANGE: top_k is 9",
    ),
    "not safetensors": (
        lambda f: ((f / "trained.safetensors").write_bytes(b"no"),
                   rewrite(f)), "E-FORMAT"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_base_untouched(kind, host, tmp_path):
    folder = pesc.save(trained_model(host), tmp_path / "run")
    damage, message = DAMAGE[kind]
    damage(folder)
    base = host()
    before = [type(module) for module in base.modules()]
    with pytest.raises(Refusal, match=message):
        pesc.load(base, folder)
    assert [type(module) for module in base.modules()] == before


def test_a_checkpoint_of_another_base_is_refused_with_both_hashes(host, tmp_path):
    model = trained_model(host)
    folder = pesc.save(model, tmp_path / "run")
    other = host()
    with torch.no_grad():
        other.model.embed_tokens.weight[0, 0] += 1
    with pytest.raises(Refusal, match=f"E-BASE: .*{model.pesc.base[:12]}"):
        pesc.load(other, folder)
    with pytest.raises(Refusal, match="E-BASE"):
        pesc.load(host("Mistral", num_hidden_layers=1), folder)
    with pytest.raises(Refusal, match="E-NOFILE"):
        pesc.load(other, tmp_path / "none")
