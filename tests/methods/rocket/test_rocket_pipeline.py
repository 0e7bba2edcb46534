"""The pipeline arm by arm, on a tiny base and a random bank."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rocket import arms, pipeline
from moebook.models.checkpoint import fingerprint
from moebook.nn import routers

SMALL = {"candidates": 3, "experts": 2, "top_k": 1, "budget": 3}


class Words:
    """An encoder of letters: unit vectors of how often each of four occurs."""

    def encode(self, texts):
        counts = np.array([[1e-3 + text.lower().count(c) for c in "aeio"] for text in texts])
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def world(base, tokenizer, make_bank, shots):
    model, config = base(), rocket.Config(shots=3, **SMALL)
    bank = make_bank(model)
    case = pipeline.meet(model, tokenizer, bank, Words(), shots, config, task="own", seed=0)
    return model, tokenizer, bank, case, config


def test_a_case_holds_what_the_scoring_says_of_its_shots(world):
    model, tokenizer, bank, case, _ = world
    assert len(case.shots) == 3
    plain = rocket.scoring.perplexity(model, tokenizer, bank, case.shots)
    assert np.allclose(case.plain, plain)
    told = rocket.scoring.perplexity(model, tokenizer, bank, rocket.rationales.expand(case.shots))
    assert np.allclose(case.reasoning, told)
    first = case.scores(1, rationales=False)
    assert np.allclose(first.perplexity, plain[0])
    assert np.allclose(case.vectors, Words().encode(
        [f"{row['prompt']} {row['answer']}" for row in case.shots]
    ))  # fmt: skip


def test_an_arm_chooses_by_its_rankings_at_random_or_takes_the_best(world):
    _, _, bank, case, config = world
    alike = rocket.selection.similarity(bank)

    def experts(by=rocket.selection.RANKINGS, members=bank, best="d"):
        arm = arms.Arm(config=config, by=by)
        return pipeline.experts(case, arm, members, alike, best=best)

    assert experts() == rocket.selection.select(case.scores(3), alike, config).experts
    assert experts(("best",)) == ("d",)
    clean = {name: bank[name] for name in "abc"}
    assert set(experts(members=clean)) <= set(clean)
    with pytest.raises(Refusal, match="E-CHOICE: by is 'luck'"):
        experts(("luck",))


def test_random_experts_are_a_function_of_names_and_seed(world):
    _, _, bank, case, config = world
    arm = arms.Arm(config=config, by=("random",))

    def drawn(members, seed):
        return pipeline.experts(replace(case, seed=seed), arm, members, None, best="")

    draws = [drawn(bank, seed) for seed in range(5)]
    assert draws == [drawn(dict(reversed(bank.items())), seed) for seed in range(5)]
    assert len(set(draws)) > 1
    assert all(len(set(names)) == 2 and set(names) <= set(bank) for names in draws)
    others = [
        pipeline.experts(replace(case, task="b", seed=seed), arm, bank, None, best="")
        for seed in range(5)
    ]
    assert others != draws
    with pytest.raises(Refusal, match=r"E-RANGE: experts \(N\) is 2, expected 1 to 1"):
        drawn({"a": bank["a"]}, 0)


def test_only_missing_rationales_are_written(world, shots, monkeypatch):
    model, tokenizer, bank, _, config = world
    asked = []

    def written(model, tok, contexts, *, limit):
        asked.extend(contexts)
        return ["Because."] * len(contexts)

    mixed = [dict(shots[0], rationale=" "), *shots[1:3]]
    monkeypatch.setattr(rocket.rationales.generation, "greedy", written)
    accuracy = rocket.scoring.accuracy(model, tokenizer, bank, mixed, post=len, limit=1)
    monkeypatch.setattr(rocket.scoring, "accuracy", lambda *args: accuracy)
    asked.clear()
    case = pipeline.meet(model, tokenizer, bank, Words(), mixed, config, task="own", seed=0)
    assert len(asked) == 1
    told = {row["prompt"]: row["rationale"] for row in case.shots}
    assert told == {row["prompt"]: row["rationale"] for row in shots[1:3]} | {
        shots[0]["prompt"]: "Because."
    }


def test_targets_are_paired_with_as_many_benchmarks():
    assert pipeline.tested(["a", "b"], ["c", "d"]) == {"a": "c", "b": "d"}
    assert pipeline.tested(["a", "b"], []) == {"a": "a", "b": "b"}
    with pytest.raises(Refusal, match=r"E-RANGE: benchmarks has 1 names \(c\), targets has 2"):
        pipeline.tested(["a", "b"], ["c"])


def test_rows_are_the_shots_and_the_nearest_open_ones(world, shots):
    _, _, _, case, config = world
    pool = [{"prompt": text, "answer": "x"} for text in ("aaaa", "oooo", "eeee", "iiii", "aeio")]
    vectors = Words().encode([row["prompt"] for row in pool])
    arm = arms.Arm(config=config)
    rows = pipeline.rows(case, arm, pool, vectors)
    assert rows[:3] == case.shots
    chosen = rocket.augmentation.choose(case.vectors, [vectors], config).index
    assert rows[3:] == [pool[place] for place in chosen]
    without = arms.Arm(config=config, open_data=False)
    assert pipeline.rows(case, without, pool, vectors) == case.shots


@pytest.mark.parametrize("count", [1, 2])
def test_tuning_leaves_the_base_as_it_was_once_the_mixture_is_off(world, count):
    model, tokenizer, bank, case, config = world
    before = fingerprint(model)
    loras = [bank[name] for name in "ab"[:count]]
    digests = [lora.digest for lora in loras]
    history = pipeline.tune(
        model, tokenizer, loras, case.shots, config, steps=2, batch=2, lr=1e-2, seed=0
    )
    assert len(history.loss) == 2
    assert model.rocket.experts == tuple("ab"[:count])
    assert model.rocket.config.experts == count
    right = rocket.findings.alone(model, tokenizer, "gcd", limit=2)
    assert right.shape == (count, 2)
    rocket.mixture.remove(model)
    assert fingerprint(model) == before
    assert [lora.digest for lora in loras] == digests


def test_what_was_tuned_before_does_not_change_a_mixture(world):
    model, tokenizer, bank, case, config = world
    chosen, settings = [bank["a"], bank["b"]], {"steps": 2, "batch": 2, "lr": 1e-2, "seed": 3}

    def gates():
        pipeline.tune(model, tokenizer, chosen, case.shots, config, **settings)
        found = [router.weight.detach().clone() for router in routers(model)]
        rocket.mixture.remove(model)
        return found

    first = gates()
    pipeline.tune(model, tokenizer, [bank["c"]], case.shots, config, **settings)
    rocket.mixture.remove(model)
    torch.rand(7)
    assert all(map(torch.equal, first, gates()))
