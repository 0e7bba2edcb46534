"""Settings, arms, the pipeline on a tiny base, what its results come to; what the notebook sets."""

import math
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from moebook import evaluation, models
from moebook.data import tasks
from moebook.errors import Refusal
from moebook.experiments import pipeline, targets
from moebook.experiments import rocket as compared
from moebook.lab import papers
from moebook.lab.run import listed, sources
from moebook.methods import rocket
from moebook.methods.rocket import Config, augment, measure
from moebook.methods.rocket.case import Case, score_bank
from moebook.models.checkpoint import fingerprint, origin
from tests.refusals import refused


def test_the_presets_are_what_paper_and_code_say_and_a_bad_setting_is_refused_by_name():
    names = {
        "top_k": "experts_per_token",
        "budget": "data_budget",
        "reduction": "perplexity",
        "threshold": "duplicate_threshold",
    }
    printed = papers.printed.hyperparameters("rocket", "paper")
    config = Config.preset("paper")
    for field in ("shots", "candidates", "experts", *names):
        assert getattr(config, field) == printed[names.get(field, field)]["value"]
    assert Config() == Config.preset("fixed")
    released = papers.printed.hyperparameters("rocket", "released")["data_budget"][
        "value"
    ]
    assert Config.preset("released").budget == released
    for message, changes in {
        r"E-RANGE: experts \(N\) is 9, expected 1 to 8 \(candidates, M\)": {
            "experts": 9
        },
        r"E-RANGE: top_k is 5, expected 1 to 4 \(experts, N\)": {"top_k": 5},
        "E-RANGE: lora_dropout is 1": {"lora_dropout": 1.0},
    }.items():
        refused(message, Config.preset, "fixed", **changes)


BRIEF = {"steps": 2, "batch": 2, "lr": 1e-2, "seed": 3}
SMALL = {"candidates": 3, "experts": 2, "top_k": 1, "budget": 3}
ARMS = compared.arms(Config(), strict=0.6)


def changed(arm):
    return dict(asdict(arm.config).items() - asdict(Config()).items())


def test_each_arm_changes_one_step_and_sizes_that_the_settings_do_not_allow_are_no_arms():
    mixture = ARMS["mixture"]
    assert mixture == pipeline.Arm(config=Config())
    for name, arm in ARMS.items():
        if name not in ("mixture", *compared.UNMIXED):
            steps = [arm.by != mixture.by, not arm.open_data, bool(changed(arm))]
            assert sum(steps) == (2 if name == "random_lora" else 1), name
    assert [ARMS[name] for name in compared.UNMIXED] == [None, None]
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
    names = compared.arms(
        Config(**SMALL | {"shots": 8, "top_k": 2, "budget": 4}), strict=0.6
    )
    assert [name for name in names if name[-1].isdigit()] == [
        "budget1",
        "budget16",
        "shots1",
        "shots5",
        "experts2",
        "selected1",
    ]


class Words:
    """An encoder of letters: unit vectors of how often each of four occurs."""

    def encode(self, texts):
        counts = np.array(
            [[1e-3 + text.lower().count(c) for c in "aeio"] for text in texts]
        )
        return (counts / np.linalg.norm(counts, axis=1, keepdims=True)).astype(
            np.float32
        )

    blocks = augment.Encoder.blocks


@pytest.fixture
def world(base, tokenizer, make_bank, shots):
    model = base()
    config = Config(shots=3, **SMALL)
    bank = make_bank(model)
    case = score_bank(
        model, tokenizer, bank, Words(), shots, config, task="own", seed=0
    )
    return model, tokenizer, bank, case, config


def test_a_case_holds_its_shots_scores_and_only_missing_rationales(
    world, shots, monkeypatch
):
    model, tokenizer, bank, case, config = world
    assert len(case.shots) == 3
    sets = case.shots, rocket.score.expand(case.shots)
    nats = [rocket.score.log_perplexity(model, tokenizer, bank, rows) for rows in sets]
    assert np.allclose([case.plain, case.reasoning], nats)
    assert np.allclose(case.scores(1, rationales=False).log_perplexity, nats[0][0])
    texts = [f"{row['prompt']} {row['answer']}" for row in case.shots]
    assert np.allclose(case.vectors, Words().encode(texts))
    mixed = [dict(shots[0], rationale=" "), *shots[1:3]]
    written = lambda rows, *_, order: [{**row, "rationale": "Because."} for row in rows]  # noqa: E731
    monkeypatch.setattr(rocket.score, "write_rationales", written)
    case = score_bank(
        model, tokenizer, bank, Words(), mixed, config, task="own", seed=0
    )
    rationales = {row["prompt"]: row["rationale"] for row in case.shots}
    expected = {row["prompt"]: row["rationale"] for row in shots[1:3]}
    assert rationales == expected | {shots[0]["prompt"]: "Because."}


def test_shots_of_a_users_file_are_judged_by_its_task(
    world, shots, tmp_path, monkeypatch
):
    model, tokenizer, bank, _, config = world
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a", "answer": "x"}\n')
    task = tasks.Task.from_jsonl(file, compare="verb", max_new_tokens=5)
    rows = [{**row, "task": "own_mine", "answer": "Opens it"} for row in shots]
    monkeypatch.setattr(
        rocket.score,
        "generate",
        lambda *_, limit: ["opens" if most == 5 else "" for most in limit],
    )
    call = (model, tokenizer, bank, Words(), rows, config)
    for own, right in (({"own_mine": task}, True), ({}, False)):
        case = score_bank(*call, task="own_mine", seed=0, own=own)
        assert (case.solved == right).all(axis=None)


def test_an_arm_chooses_by_its_rankings_or_takes_the_best_or_some_by_names_and_seed(
    world,
):
    _, _, bank, case, config = world
    alike = rocket.choose.similarity(bank, config)

    def experts(by=pipeline.RANKED, members="abcd", **changes):
        arm = pipeline.Arm(config=config, by=by)
        return pipeline.experts(replace(case, **changes), arm, members, best="d")

    def drawn(members="abcd", **changes):
        return [
            experts(("random",), members, seed=seed, **changes) for seed in range(5)
        ]

    assert experts() == rocket.choose.select(case.scores(3), alike, config).experts
    assert experts(("best",)) == ("d",)
    alone = pipeline.Arm(config=config, by=("perplexity",), identical=True)
    first = case.scores(3).log_perplexity.idxmin()
    assert pipeline.experts(case, alone, "abcd", best="") == (first, first)
    assert set(experts(members="abc")) <= set("abc")
    refused(r"E-CHOICE: by\.0 is 'luck'", experts, ("luck",))
    refused("E-CHOICE: rankings is .* ranks single LoRAs", experts, ("diversity",))
    draws = drawn()
    assert draws == drawn("dcba") != drawn(task="b")
    assert len(set(draws)) > 1
    assert all(len(set(names)) == 2 for names in draws)
    refused(r"E-RANGE: experts \(N\) is 2, expected 1 to 1", drawn, "a")


def test_targets_have_as_many_benchmarks_and_rows_are_the_shots_and_the_nearest_open_ones(
    world,
):
    assert compared.tested(["a", "b"], ["c", "d"]) == {"a": "c", "b": "d"}
    assert compared.tested(["a", "b"], []) == {"a": "a", "b": "b"}
    refused(
        "E-RANGE: benchmarks has 1 names, targets has 2",
        compared.tested,
        ["a", "b"],
        ["c"],
    )
    _, _, _, case, config = world
    pool = [
        {"prompt": text, "answer": "x"}
        for text in ("aaaa", "oooo", "eeee", "iiii", "aeio")
    ]
    vectors = Words().encode([row["prompt"] for row in pool])
    chosen = augment.choose(case.vectors, [vectors], config).index
    for open_data, open_rows in (
        (True, [pool[place] for place in chosen]),
        (False, []),
    ):
        arm = pipeline.Arm(config=config, open_data=open_data)
        assert pipeline.rows(case, arm, pool, vectors) == case.shots + open_rows


@pytest.mark.parametrize("names", ["a", "ab"])
def test_tuning_leaves_base_and_loras_as_they_were_and_later_mixtures_alike(
    world, names
):
    model, tokenizer, bank, case, config = world
    before = fingerprint(model)
    digests = [lora.digest for lora in bank.values()]

    def trained(names):
        loras = [bank[name] for name in names]
        history = pipeline.tune(model, tokenizer, loras, case.shots, config, **BRIEF)
        assert len(history.loss) == 2
        assert origin(model, rocket.apply.Origin).experts == tuple(names)
        assert measure.alone(model, tokenizer, "gcd", limit=2).shape == (len(names), 2)
        parts = rocket.apply.trained(model).values()
        weights = [part.detach().clone() for part in parts]
        rocket.apply.remove(model)
        return weights

    first = trained(names)
    assert first
    trained("c")
    torch.rand(7)
    assert all(map(torch.equal, first, trained(names)))
    assert fingerprint(model) == before
    assert [lora.digest for lora in bank.values()] == digests


def test_perplexities_stand_beside_what_tuning_came_to_and_correlate_within_a_task():
    # Of two LoRAs on two shots.
    nats = pd.DataFrame([[1.0, 1.0], [2.0, 2.0]], ["x", "y"])
    solved = pd.DataFrame([[1, 0], [0, 0]], ["x", "y"])
    none = pd.DataFrame()
    case = Case("a", 0, [{}, {}], nats, nats + 3, solved, np.zeros((2, 1)), none)
    table = measure.foretold({"a": case}, {("a", "y"): [0.25, 0.75]})
    assert table.index.tolist() == [("a", "y")]
    expected = [2 + math.log(2), 5 + math.log(2), 0.25, 0.75, 0.5]
    assert table.iloc[0].tolist() == pytest.approx(expected)
    assert table.columns.tolist() == [*measure.KINDS, "before", "after", "gain"]
    table = measure.foretold({"a": case}, {})
    ranks = measure.correlations(table, list(measure.KINDS), ["after", "gain"])
    assert table.empty
    assert ranks.empty
    pairs = [(task, name) for task in ("a", "b", "c") for name in "xyz"]
    index = pd.MultiIndex.from_tuples(pairs, names=["task", "lora"])
    after = [3.0, 2, 1, 0.5, 0.5, 0.5, 1, 3, 2]
    columns = {"nats": [1.0, 2, 3, 10, 20, 30, 1, 2, 3], "after": after}
    ranks = measure.correlations(pd.DataFrame(columns, index), ["nats"], ["after"])
    assert ranks["nats", "after"].to_dict() == pytest.approx({"a": -1, "c": 0.5})


def table(task, nats):
    return pd.DataFrame({"task": task, "domain": "d", "correct": True, "nll": nats})


@pytest.mark.parametrize(
    ("nats", "mean"),
    [
        ({"a": [1, 2, 3, 4], "b": [6, 8]}, (2.5 + 7) / 2),
        ({"a": [1, np.nan, 3, np.nan], "b": [6, 8]}, (2 + 7) / 2),
        ({"a": [1, np.nan, 3, np.nan], "b": [np.nan, 8]}, (2 + 8) / 2),
        ({"a": [1, np.nan, 3, np.nan], "b": [np.nan, np.nan]}, 2),
    ],
)
def test_targets_of_which_some_items_have_no_nats_count_as_much(nats, mean):
    tables = {name: table(name, values) for name, values in nats.items()}
    joined = measure.over_targets(tables, {"a": "a", "b": "b"})
    assert joined.nll.mean() == pytest.approx(mean)


@pytest.mark.parametrize(
    ("tests", "rows", "message"),
    [
        (("mmlu", "mmlu"), ("mmlu", "mmlu"), "'mmlu' tests targets 'a' and 'b'"),
        (("mmlu", "mmlu_law"), ("mmlu_law", "mmlu_law"), "'mmlu_law' of target 'a'"),
        (("mmlu_law", "mmlu"), ("mmlu_law", "mmlu_law_x"), "'mmlu_law_x' of target"),
        (("mmlu", "mmlu_law"), ("mmlu_art", "mmlu_law"), ""),
        (("mmlu", "mmlus"), ("mmlu", "mmlus"), ""),
    ],
)
def test_targets_that_their_tests_do_not_tell_apart_are_refused(tests, rows, message):
    tested = dict(zip("ab", tests, strict=True)) | {"c": "gcd"}
    tables = {name: table(row, [1.0]) for name, row in zip("ab", rows, strict=True)}
    tables["c"] = table("gcd", [2.0, 3.0])
    if message:
        refused(f"E-KEYS: .*{message}", measure.over_targets, tables, tested)
    else:
        joined = measure.over_targets(tables, tested)
        assert joined.domain.tolist() == ["a", "b", "c", "c"]


def test_an_average_is_over_targets_and_mixed_cases_are_those_that_divide_the_experts():
    right = {"a": [True, False, False, False], "b": [True, True]}
    nats = {"a": [1.0, 2.0, 3.0, 4.0], "b": [6.0, 8.0]}
    tested = {"a": "a_task", "b": "b_task"}
    tables = {
        t: pd.DataFrame(
            {"task": tested[t], "domain": "d", "correct": c, "nll": nats[t]}
        )
        for t, c in right.items()
    }
    joined = measure.over_targets(tables, tested)
    assert joined.score.mean() == pytest.approx(0.625)
    assert joined.nll.mean() == pytest.approx((2.5 + 7) / 2)
    assert joined.groupby("domain").correct.mean().to_dict() == {"a": 0.25, "b": 1}
    again = tables["b"].assign(item=[0, 1])
    mean = measure.repeated(
        {"b": [again, again.assign(correct=False, nll=[8.0, 2.0])]}
    )["b"]
    assert mean.nll.tolist() == [7, 5]
    assert mean.correct.tolist() == [0.5, 0.5]
    tables["a"]["nll"] = np.nan
    assert measure.over_targets(tables, tested).nll.mean() == pytest.approx(7)
    shares = measure.split_cases([[1, 1, 0, 0, 1], [1, 0, 1, 0, 0]], [1, 1, 1, 0, 0])
    assert shares == pytest.approx(
        {
            "all right": 0.2,
            "mixed": 0.6,
            "all wrong": 0.2,
            "best expert": 1 / 3,
            "mean expert": 0.5,
            "worst expert": 2 / 3,
            "mixture": 1 / 3,
        }
    )
    agreed = measure.split_cases(np.ones((3, 4)), np.ones(4))
    assert agreed["all right"] == 1
    assert math.isnan(agreed["mixture"])
    assert math.isnan(agreed["best expert"])
    for odd in (0.5, np.nan):
        words = "E-RANGE: {} holds other values than 0 .wrong. and 1 .right."
        split = measure.split_cases
        refused(words.format("experts"), split, [[1, odd]], [0, 1])
        refused(words.format("mixture"), split, [[1, 0]], [0, odd])


BOOK = sources.find(Path(__file__).parents[3], "rocket")


def values(tier):
    return {name: p.default for name, p in BOOK.parameters.items()} | BOOK.settings(
        tier
    )


def experiment(tier, **parts):
    blank = dict.fromkeys(field.name for field in fields(targets.Targets))
    return targets.Targets(**blank | {"settings": values(tier)} | parts)


def test_the_tier_paper_tunes_as_table_12_says_and_claims_the_average_of_its_tasks():
    used = values("paper")
    stated = papers.printed.hyperparameters("rocket", "paper")
    for name in ("schedule", "weight_decay", "shots", "candidates", "experts"):
        assert used[name] == stated[name]["value"]
    assert float(used["rates"]) == stated["lr"]["value"]
    assert used["batch"] == stated["batch"]["value"] * stated["accumulation"]["value"]
    recipe = experiment("paper").recipe
    assert recipe["weight_decay"] == stated["weight_decay"]["value"]
    printed = papers.table("rocket", 1).query("row == 'Ours' and model == 'Mistral-7B'")
    questions = set(rocket.bank.QUESTIONS)
    mean = printed.value[printed.column.replace("PiQA", "PIQA").isin(questions)].mean()
    assert papers.claim("rocket.average").claimed == pytest.approx(mean / 100)
    for tier in ("gpu", "paper"):
        assert set(values(tier)["targets"].split(",")) == questions


def test_protocols_run_arms_that_there_are():
    for used in map(
        values, ("smoke", "cpu", "nano", "passes", "alone", "real", "gpu", "paper")
    ):
        given = {f.name: used[f.name] for f in fields(rocket.Config) if f.name in used}
        main = rocket.Config.preset(used["preset"], **given)
        known = compared.arms(main, strict=used["strict"])
        assert used["arms"] == "all" or listed("arms", used["arms"], known)


@pytest.mark.parametrize("tier", ["gpu", "paper"])
def test_rows_of_the_hub_are_trained_on_whole_and_tested_on_the_benchmarks_split(
    tier, monkeypatch
):
    settings = values(tier)
    with pytest.raises(Refusal, match="E-PIN: allenai/ai2_arc: revision is None"):
        targets.rows(settings)

    def source_rows(name, revision, split=""):
        prompts = [f"{split or 'train'} {number}" for number in range(3)]
        return [{"task": name, "prompt": text, "answer": "a"} for text in prompts]

    monkeypatch.setattr(rocket.bank, "source_rows", source_rows)
    monkeypatch.setattr(evaluation, "load", lambda *_: None)
    pool = targets.rows(settings)
    assert len(pool.open) == 3 * len(settings["pool_sets"].split(","))
    for name in settings["targets"].split(","):
        prompts = [row["prompt"] for row in pool.annotated[name]]
        assert prompts == ["train 0", "train 1", "train 2"]
        assert pool.held_out[name][0]["prompt"] == f"{rocket.bank.HELD_OUT[name]} 0"


def test_members_of_a_bank_are_those_that_it_has():
    settings = values("nano") | {"members": "gcd,foo"}
    with pytest.raises(Refusal, match=r"E-BANK: .* has no LoRA 'foo'"):
        targets.load_bank(settings, *models.load("nano"))


def test_a_bank_that_is_there_is_taken_whatever_a_new_one_would_be():
    other = {"bank_rows": 3, "bank_rate": 0.5, "bank_rank": 2}
    settings = values("nano") | {"members": "gcd,sums"} | other
    bank = targets.load_bank(settings, *models.load("nano"))
    assert [lora.rank for lora in bank.values()] == [16, 16]


def test_every_arm_chooses_from_the_bank_without_leaks(monkeypatch):
    met = []
    monkeypatch.setattr(
        pipeline, "experts", lambda case, arm, bank, best: met.append(bank)
    )
    guarded = {"gcd": None}
    made = experiment(
        "nano",
        bank={"gcd": None, "leak": None},
        arms={"mixture": object()},
        cases={"isa": None},
        clean={"isa": guarded},
        best={"isa": "leak"},
    )
    made.experts("isa", "mixture")
    assert met == [guarded]
