"""Checkpoints of a mixture: restored bit for bit on the right base, refused on anything else."""

import json

import pytest
import torch
from safetensors.torch import load_file, save

from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rocket import mixture
from moebook.models import folders


@pytest.fixture
def trained(base, make_bank):
    """A mixture whose parameters all differ from their start."""

    def make(**changes):
        model = base()
        mixture.build(model, list(make_bank(model).values()), rocket.Config(**changes))
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in mixture.trained(model).values():
                parameter += 0.2 * torch.randn_like(parameter)
        return model.eval()

    return make


def again(folder, target, change=lambda tensors: tensors, **facts):
    """Write a consistent copy of a checkpoint with changed tensors or facts."""
    known = json.loads((folder / "MANIFEST.json").read_text())
    kept = {key: value for key, value in known.items() if key not in ("files", "sizes")}
    content = save(change(load_file(folder / "trained.safetensors")))
    return folders.write(target, {"trained.safetensors": content}, **{**kept, **facts})


@pytest.mark.parametrize("reads", ["layer", "expert"])
def test_saved_and_restored_bit_for_bit(reads, trained, base, batch, tmp_path):
    model = trained(gate_input=reads)
    folder = rocket.save(model, tmp_path / "run")
    restored = rocket.load(base(), folder).eval()
    assert restored.rocket == model.rocket
    left, right = mixture.trained(model), mixture.trained(restored)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert torch.equal(model(**batch).logits, restored(**batch).logits)


def test_only_experts_and_gates_are_stored(trained, tmp_path):
    folder = rocket.save(trained(), tmp_path / "run")
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "MANIFEST.json", "run", "trained.safetensors",
    ]  # fmt: skip
    stored = load_file(folder / "trained.safetensors")
    assert {name.rpartition(".")[2] for name in stored} == {"down", "up", "router"}


def flip(folder):
    payload = bytearray((folder / "trained.safetensors").read_bytes())
    payload[-5] ^= 1
    (folder / "trained.safetensors").write_bytes(payload)


TENSORS = {
    "missing": (lambda t: dict(list(t.items())[1:]), "E-KEYS: .*1 tensors missing"),
    "surplus": (lambda t: {**t, "x": torch.ones(1)}, "E-KEYS: .*1 surplus"),
    "renamed": (lambda t: {f"base.{k}": v for k, v in t.items()}, "E-KEYS"),
    "shape": (lambda t: {k: v[None].clone() for k, v in t.items()}, "E-SHAPE"),
    "integers": (lambda t: {k: v.long() for k, v in t.items()}, "E-SHAPE"),
    "NaN": (lambda t: {k: v * torch.nan for k, v in t.items()}, "E-NONFINITE"),
}
FACTS = {
    "form": ({"form": "rocket/0"}, "E-FORMAT"),
    "type": ({"experts": "abcd"}, "E-FORMAT"),
    "number": ({"scales": [2.0]}, "E-FORMAT"),
    "setting": ({"config": {"gate": "none"}}, "E-FORMAT: .*gate"),
    "base": ({"base": "0" * 64}, "E-BASE"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_damaged_tensors_are_refused_and_the_base_untouched(kind, trained, base, tmp_path):
    change, message = TENSORS[kind]
    folder = again(rocket.save(trained(), tmp_path / "run"), tmp_path / "bad", change)
    model = base()
    before = [type(module) for module in model.modules()]
    with pytest.raises(Refusal, match=message):
        rocket.load(model, folder)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("kind", FACTS)
def test_damaged_facts_are_refused(kind, trained, base, tmp_path):
    facts, message = FACTS[kind]
    folder = again(rocket.save(trained(), tmp_path / "run"), tmp_path / "bad", **facts)
    with pytest.raises(Refusal, match=message):
        rocket.load(base(), folder)


def test_changed_bytes_and_missing_folders_are_refused(trained, base, tmp_path):
    model = trained()
    folder = rocket.save(model, tmp_path / "run")
    with pytest.raises(Refusal, match="E-EXISTS"):
        rocket.save(model, folder)
    flip(folder)
    with pytest.raises(Refusal, match="E-HASH"):
        rocket.load(base(), folder)
    with pytest.raises(Refusal, match="E-NOFILE"):
        rocket.load(base(), tmp_path / "none")
    with pytest.raises(Refusal, match="E-MODEL"):
        rocket.load(model, folder)


def test_a_failed_save_leaves_nothing_behind(trained, tmp_path, monkeypatch):
    model = trained()
    monkeypatch.setattr(folders.manifest, "seal", lambda *a, **k: (_ for _ in ()).throw(OSError()))
    with pytest.raises(OSError):
        rocket.save(model, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_bad_numbers_are_not_saved(trained, tmp_path):
    model = trained()
    with torch.no_grad():
        next(iter(mixture.trained(model).values()))[0] = torch.nan
    with pytest.raises(Refusal, match="E-NONFINITE"):
        rocket.save(model, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
