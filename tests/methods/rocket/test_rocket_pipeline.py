"""Settings, arms and the pipeline arm by arm on a tiny base; what its results come to."""

import math
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
import torch

from moebook import papers
from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rocket import Config, augmentation, findings, pipeline
from moebook.models.checkpoint import fingerprint
from moebook.nn import routers


def test_the_presets_are_what_paper_and_code_say():
    names = {"top_k": "experts_per_token", "budget": "data_budget", "reduction": "perplexity"}
    names |= {"threshold": "duplicate_threshold"}
    printed, config = papers.hyperparameters("rocket", "paper"), Config.preset("paper")
    for field in ("shots", "candidates", "experts", *names):
        assert getattr(config, field) == printed[names.get(field, field)]["value"]
    assert Config() == Config.preset("fixed")
    released = Config.preset("released")
    assert released.budget == papers.hyperparameters("rocket", "released")["data_budget"]["value"]


def test_a_bad_setting_is_refused_by_name():
    for message, changes in {
        r"E-RANGE: experts \(N\) is 9, expected 1 to 8 \(candidates, M\)": {"experts": 9},
        r"E-RANGE: top_k is 5, expected 1 to 4 \(experts, N\)": {"top_k": 5},
        "E-RANGE: lora_dropout is 1": {"lora_dropout": 1.0},
    }.items():
        with pytest.raises(Refusal, match=message):
            Config.preset("fixed", **changes)


BRIEF = {"steps": 2, "batch": 2, "lr": 1e-2, "seed": 3}
SMALL = {"candidates": 3, "experts": 2, "top_k": 1, "budget": 3}
ARMS = pipeline.arms(Config(), strict=0.6)


def changed(arm):
    return dict(asdict(arm.config).items() - asdict(Config()).items())


def test_each_arm_changes_one_step_and_is_what_it_is_called():
    mixture = ARMS["mixture"]
    assert mixture == pipeline.Arm(config=Config())
    for name, arm in ARMS.items():
        if name not in ("mixture", *pipeline.UNMIXED):
            steps = [arm.by != mixture.by, not arm.open_data, bool(changed(arm))]
            assert sum(steps) == (2 if name == "random_lora" else 1), name
    assert [ARMS[name] for name in pipeline.UNMIXED] == [None, None]
    for name, change in {
        "random_lora": {"experts": 1, "top_k": 1},
        "data_by_kde": {"sampler": "kde", "gamma": 10.0},
        "data_strictly_deduplicated": {"threshold": 0.6},
        "budget333": {"budget": 333},
        "budget4000": {"budget": 4000},
        "shots20": {"shots": 20},
        "experts8": {"experts": 8},
        "selected3": {"top_k": 3},
    }.items():
        assert changed(ARMS[name]) == change


def test_sizes_that_the_settings_do_not_allow_are_no_arms():
    names = pipeline.arms(Config(**SMALL | {"shots": 8, "top_k": 2, "budget": 4}), strict=0.6)
    assert [name for name in names if name[-1].isdigit()] == [
        "budget1", "budget16", "shots1", "shots5", "experts2", "selected1"
    ]  # fmt: skip


class Words:
    """An encoder of letters: unit vectors of how often each of four occurs."""

    def encode(self, texts):
        counts = np.array([[1e-3 + text.lower().count(c) for c in "aeio"] for text in texts])
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(np.float32)

    blocks = augmentation.Encoder.blocks


@pytest.fixture
def world(base, tokenizer, make_bank, shots):
    model, config = base(), Config(shots=3, **SMALL)
    bank = make_bank(model)
    case = pipeline.score_bank(model, tokenizer, bank, Words(), shots, config, task="own", seed=0)
    return model, tokenizer, bank, case, config


def test_a_case_holds_what_the_scoring_says_of_its_shots(world):
    model, tokenizer, bank, case, _ = world
    assert len(case.shots) == 3
    nats = [
        rocket.scoring.log_perplexity(model, tokenizer, bank, rows)
        for rows in (case.shots, rocket.scoring.expand(case.shots))
    ]
    assert np.allclose([case.plain, case.reasoning], nats)
    assert np.allclose(case.scores(1, rationales=False).log_perplexity, nats[0][0])
    texts = [f"{row['prompt']} {row['answer']}" for row in case.shots]
    assert np.allclose(case.vectors, Words().encode(texts))


def test_an_arm_chooses_by_its_rankings_or_takes_the_best(world):
    _, _, bank, case, config = world
    alike = rocket.selection.similarity(bank, config)

    def experts(by=pipeline.RANKED, members="abcd"):
        return pipeline.experts(case, pipeline.Arm(config=config, by=by), members, best="d")

    assert experts() == rocket.selection.select(case.scores(3), alike, config).experts
    assert experts(("best",)) == ("d",)
    assert set(experts(members="abc")) <= set("abc")
    with pytest.raises(Refusal, match=r"E-CHOICE: by\.0 is 'luck'"):
        experts(("luck",))


def test_random_experts_are_a_function_of_names_and_seed(world):
    _, _, _, case, config = world
    arm = pipeline.Arm(config=config, by=("random",))

    def drawn(members="abcd", **changes):
        cases = [replace(case, seed=seed, **changes) for seed in range(5)]
        return [pipeline.experts(each, arm, members, best="") for each in cases]

    draws = drawn()
    assert draws == drawn("dcba") != drawn(task="b")
    assert len(set(draws)) > 1 and all(len(set(names)) == 2 for names in draws)
    with pytest.raises(Refusal, match=r"E-RANGE: experts \(N\) is 2, expected 1 to 1"):
        drawn("a")


def test_only_missing_rationales_are_written(world, shots, monkeypatch):
    model, tokenizer, bank, case, config = world
    mixed = [dict(shots[0], rationale=" "), *shots[1:3]]

    def written(rows, *_, order):
        return [{**row, "rationale": "Because."} for row in rows]

    monkeypatch.setattr(rocket.scoring, "write_rationales", written)
    case = pipeline.score_bank(model, tokenizer, bank, Words(), mixed, config, task="own", seed=0)
    rationales = {row["prompt"]: row["rationale"] for row in case.shots}
    expected = {row["prompt"]: row["rationale"] for row in shots[1:3]}
    assert rationales == expected | {shots[0]["prompt"]: "Because."}


def test_targets_are_paired_with_as_many_benchmarks():
    assert pipeline.tested(["a", "b"], ["c", "d"]) == {"a": "c", "b": "d"}
    assert pipeline.tested(["a", "b"], []) == {"a": "a", "b": "b"}
    with pytest.raises(Refusal, match="E-RANGE: benchmarks has 1 names, targets has 2"):
        pipeline.tested(["a", "b"], ["c"])


def test_rows_are_the_shots_and_the_nearest_open_ones(world):
    _, _, _, case, config = world
    pool = [{"prompt": text, "answer": "x"} for text in ("aaaa", "oooo", "eeee", "iiii", "aeio")]
    vectors = Words().encode([row["prompt"] for row in pool])
    chosen = augmentation.choose(case.vectors, [vectors], config).index
    for open_data, open_rows in ((True, [pool[place] for place in chosen]), (False, [])):
        arm = pipeline.Arm(config=config, open_data=open_data)
        assert pipeline.rows(case, arm, pool, vectors) == case.shots + open_rows


@pytest.mark.parametrize("names", ["a", "ab"])
def test_tuning_leaves_base_and_loras_as_they_were_and_later_mixtures_alike(world, names):
    model, tokenizer, bank, case, config = world
    before, digests = fingerprint(model), [lora.digest for lora in bank.values()]

    def gates(names):
        loras = [bank[name] for name in names]
        history = pipeline.tune(model, tokenizer, loras, case.shots, config, **BRIEF)
        assert len(history.loss) == 2
        assert rocket.mixture.origin(model).experts == tuple(names)
        assert findings.alone(model, tokenizer, "gcd", limit=2).shape == (len(names), 2)
        weights = [router.weight.detach().clone() for router in routers(model)]
        rocket.mixture.remove(model)
        return weights

    first = gates(names)
    gates("c")
    torch.rand(7)
    assert all(map(torch.equal, first, gates(names)))
    assert fingerprint(model) == before
    assert [lora.digest for lora in bank.values()] == digests


@pytest.fixture
def two_loras():
    """A case of two LoRAs scored on two shots, as log-perplexities."""
    nats = pd.DataFrame([[1.0, 1.0], [2.0, 2.0]], ["x", "y"])
    solved = pd.DataFrame([[1, 0], [0, 0]], ["x", "y"])
    return pipeline.Case("a", 0, [{}, {}], nats, nats + 3, solved, np.zeros((2, 1)), pd.DataFrame())


def test_perplexities_stand_beside_what_tuning_came_to_if_anything_was_tuned(two_loras):
    table = findings.foretold({"a": two_loras}, {("a", "y"): [0.25, 0.75]})
    assert table.index.tolist() == [("a", "y")]
    expected = [2 + math.log(2), 5 + math.log(2), 0.25, 0.75, 0.5]
    assert table.iloc[0].tolist() == pytest.approx(expected)
    assert table.columns.tolist() == [*findings.KINDS, "before", "after", "gain"]
    table = findings.foretold({"a": two_loras}, {})
    ranks = findings.correlations(table, list(findings.KINDS), ["after", "gain"])
    assert table.empty and ranks.empty and findings.averaged(ranks).empty


def test_correlations_are_taken_within_a_task_and_averaged_over_tasks():
    pairs = [(task, name) for task in ("a", "b", "c") for name in "xyz"]
    index = pd.MultiIndex.from_tuples(pairs, names=["task", "lora"])
    after = [3.0, 2, 1, 0.5, 0.5, 0.5, 1, 3, 2]
    columns = {"nats": [1.0, 2, 3, 10, 20, 30, 1, 2, 3], "after": after}
    ranks = findings.correlations(pd.DataFrame(columns, index), ["nats"], ["after"])
    assert ranks["nats", "after"].to_dict() == pytest.approx({"a": -1, "c": 0.5})
    line = findings.averaged(ranks).loc[("nats", "after")]
    assert line["correlation"] == pytest.approx(-0.25) and line["targets"] == 2
    assert line["95 % from"] < -0.25 < line["to"]
    assert math.isnan(findings.averaged(ranks[:1])["to"].item())


def test_an_average_is_one_over_targets_whatever_their_rows():
    right = {"a": [True, False, False, False], "b": [True, True]}
    nats, tested = {"a": [1.0, 2.0, 3.0, 4.0], "b": [6.0, 8.0]}, {"a": "a_task", "b": "b_task"}
    tables = {
        t: pd.DataFrame({"task": tested[t], "domain": "d", "correct": c, "nll": nats[t]})
        for t, c in right.items()
    }
    joined = findings.over_targets(tables, tested)
    assert joined.score.mean() == pytest.approx(0.625)
    assert joined.nll.mean() == pytest.approx((2.5 + 7) / 2)
    assert joined.groupby("domain").correct.mean().to_dict() == {"a": 0.25, "b": 1}
    tables["a"]["nll"] = np.nan
    assert findings.over_targets(tables, tested).nll.mean() == pytest.approx(7)


def test_mixed_cases_are_those_on_which_the_experts_disagree():
    shares = findings.split_cases([[1, 1, 0, 0, 1], [1, 0, 1, 0, 0]], [1, 1, 1, 0, 0])
    assert shares == pytest.approx({
        "all right": 0.2, "mixed": 0.6, "all wrong": 0.2, "best expert": 1 / 3, "mean expert": 0.5,
        "worst expert": 2 / 3, "mixture": 1 / 3,
    })  # fmt: skip
    agreed = findings.split_cases(np.ones((3, 4)), np.ones(4))
    assert agreed["all right"] == 1
    assert math.isnan(agreed["mixture"]) and math.isnan(agreed["best expert"])
