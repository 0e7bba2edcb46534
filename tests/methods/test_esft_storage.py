"""Checkpoints of ESFT: swapped bit for bit on one base, refused in one line on anything else."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebook.errors import Refusal
from moebook.methods import esft
from moebook.models import fingerprint, manifest

OPTIONS = {"shared_experts": True, "non_expert_modules": True, "router": True}


def tuned(model, experts, seed=3, **options):
    """Specialise and move what trains."""
    selection = esft.Selection({1: experts, 2: experts[:1]}, **options)
    esft.specialise(model, selection)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in esft.trained(model).values():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture
def base(mixture):
    """A builder of equal bases."""
    return lambda **changes: mixture("DeepseekV2", num_hidden_layers=3, **changes)


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_saved_and_restored_bit_for_bit(options, base, batch, tmp_path):
    model = tuned(base(), (5, 2), **options)
    again = esft.load(base(), esft.save(model, tmp_path / "run"))
    assert again.esft.selection == model.esft.selection
    left, right = esft.trained(model), esft.trained(again)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert torch.equal(model(**batch).logits, again(**batch).logits)


def test_only_the_trained_experts_and_their_configuration_are_stored(base, tmp_path):
    model = tuned(base(), (5, 2))
    folder = esft.save(model, tmp_path / "run")
    names = ["MANIFEST.json", "experts.json", "trained.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    stored = load_file(folder / "trained.safetensors")
    assert {name: len(tensor) for name, tensor in stored.items()} == {
        f"model.layers.{layer}.mlp.experts.{part}": count
        for layer, count in ((1, 2), (2, 1))
        for part in ("gate_up_proj", "down_proj")
    }
    published = json.loads((folder / "experts.json").read_text())
    assert published["experts"] == {"1": [5, 2], "2": [5]}
    assert json.loads((folder / "MANIFEST.json").read_text())["base"] == fingerprint(base())


def test_tasks_are_swapped_on_one_base(base, batch, tmp_path):
    settings = {"a": ((5, 2), {}), "b": ((1, 7, 0), OPTIONS), "c": ((2,), {})}
    want = {}
    for seed, (task, (experts, options)) in enumerate(settings.items()):
        model = tuned(base(), experts, seed, **options)
        want[task] = model(**batch).logits
        esft.save(model, tmp_path / task)
    model = base()
    before = fingerprint(model)
    for task in "abcba":
        assert torch.equal(esft.load(model, tmp_path / task)(**batch).logits, want[task])
    assert fingerprint(esft.restore(model)) == before


def test_saving_refuses_an_existing_folder_and_bad_numbers(base, tmp_path):
    model = tuned(base(), (5, 2))
    esft.save(model, tmp_path / "run")
    with pytest.raises(Refusal, match="E-EXISTS"):
        esft.save(model, tmp_path / "run")
    with torch.no_grad():
        next(iter(esft.trained(model).values())).view(-1)[0] = torch.nan
    with pytest.raises(Refusal, match="E-NONFINITE"):
        esft.save(model, tmp_path / "other")
    with pytest.raises(Refusal, match="E-MODEL"):
        esft.save(base(), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_failed_save_leaves_nothing_behind(base, tmp_path, monkeypatch):
    def fail(*args, **facts):
        raise OSError("disk full")

    monkeypatch.setattr(manifest, "seal", fail)
    with pytest.raises(OSError, match="disk full"):
        esft.save(tuned(base(), (5, 2)), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def reseal(folder, **changes):
    """Seal a changed folder again, so that only the content is wrong."""
    path = folder / "MANIFEST.json"
    sealed = json.loads(path.read_text())
    facts = {key: sealed[key] for key in ("form", "version", "base")}
    path.unlink()
    manifest.seal(folder, **{**facts, **changes})


def damaged_tensors(change):
    def damage(folder):
        tensors = load_file(folder / "trained.safetensors")
        save_file(change(tensors), folder / "trained.safetensors")
        reseal(folder)

    return damage


def other_experts(text):
    def damage(folder):
        (folder / "experts.json").write_text(text)
        reseal(folder)

    return damage


def flip_a_bit(folder):
    payload = bytearray((folder / "trained.safetensors").read_bytes())
    payload[-5] ^= 1
    (folder / "trained.safetensors").write_bytes(payload)


def no_safetensors(folder):
    (folder / "trained.safetensors").write_bytes(b"no")
    reseal(folder)


def no_tensors(folder):
    (folder / "trained.safetensors").unlink()
    reseal(folder)


DAMAGE = {
    "missing": (
        damaged_tensors(lambda t: dict(list(t.items())[1:])),
        "E-KEYS: .*1 tensors missing",
    ),
    "surplus": (damaged_tensors(lambda t: {**t, "x": torch.ones(1)}), "E-KEYS: .*1 surplus"),
    "shape": (damaged_tensors(lambda t: {k: v[:, 1:].clone() for k, v in t.items()}), "E-SHAPE"),
    "dtype": (damaged_tensors(lambda t: {k: v.double() for k, v in t.items()}), "E-SHAPE"),
    "NaN": (damaged_tensors(lambda t: {k: v * torch.nan for k, v in t.items()}), "E-NONFINITE"),
    "more experts": (other_experts('{"experts": {"1": [5, 2, 3], "2": [5]}}'), "E-SHAPE"),
    "an expert too far": (other_experts('{"experts": {"1": [5, 8], "2": [5]}}'), "E-RANGE"),
    "a layer too few": (other_experts('{"experts": {"1": [5, 2]}}'), "E-KEYS"),
    "flipped bit": (flip_a_bit, "E-HASH"),
    "not safetensors": (no_safetensors, "E-FORMAT"),
    "no tensors": (no_tensors, "E-NOFILE"),
    "other form": (lambda folder: reseal(folder, form="esft/0"), "E-FORMAT"),
    "no manifest": (lambda folder: (folder / "MANIFEST.json").unlink(), "E-MANIFEST"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_model_untouched(kind, base, batch, tmp_path):
    folder = esft.save(tuned(base(), (5, 2)), tmp_path / "run")
    damage, message = DAMAGE[kind]
    damage(folder)
    plain, other = base(), tuned(base(), (1, 4), seed=9)
    before = fingerprint(plain), other(**batch).logits
    for model in (plain, other):
        with pytest.raises(Refusal, match=message):
            esft.load(model, folder)
    assert fingerprint(plain) == before[0]
    assert torch.equal(other(**batch).logits, before[1])


def test_a_checkpoint_of_another_base_is_refused_with_both_hashes(base, tmp_path):
    model = tuned(base(), (5, 2))
    folder = esft.save(model, tmp_path / "run")
    other = base()
    with torch.no_grad():
        other.model.embed_tokens.weight[0, 0] += 1
    with pytest.raises(
        Refusal, match=f"E-BASE: .*{model.esft.base[:12]}.*{fingerprint(other)[:12]}"
    ):
        esft.load(other, folder)
    with pytest.raises(Refusal, match="E-NOFILE"):
        esft.load(other, tmp_path / "none")


def test_a_round_trip_brings_back_the_base_and_the_answers(base, batch):
    model = tuned(base(), (5, 2), **OPTIONS)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    want = model(**inputs).logits
    found = esft.round_trip(model, inputs)
    assert found["base unchanged"] == 1 and found["loading"] == 0
    assert found["merging"] == pytest.approx(0, abs=1e-5)
    assert found["bytes"] > sum(p.nbytes for p in esft.trained(tuned(base(), (5, 2))).values())
    torch.testing.assert_close(model(**inputs).logits, want)


def test_a_round_trip_refuses_a_base_that_has_moved(base, batch):
    model = tuned(base(), (5, 2))
    with torch.no_grad():
        model.get_input_embeddings().weight[5, 0] += 1
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with pytest.raises(Refusal, match="E-BASE"):
        esft.round_trip(model, inputs)
