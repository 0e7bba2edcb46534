"""What arms of each notebook need is told before any work, with the parameter and what would do."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moebook import experiments, models
from moebook.lab.pages import plans
from moebook.lab.planning.trainings import TRAINED
from moebook.methods import rocket
from tests.experiments.notebooks import given, notebook
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ("esft", "rocket", "rivals", "together", "banks")


CANNOT = [
    (
        "esft",
        "general lists 'gcd': tasks tests it too",
        {"tasks": "isa,gcd", "general": "gcd"},
    ),
    (
        "esft",
        "general lists 'gcd'",
        {"tasks": "metamathqa:gcd", "general": "gcd,equations"},
    ),
    ("esft", "tasks lists 'isa' twice", {"tasks": "isa,isa"}),
    (
        "esft",
        "alignment = '' holds an empty name",
        {"alignment": "", "alignment_share": 0.0},
    ),
    ("esft", "rates lists 'abc'", {"rates": "abc"}),
    ("rocket", "rates lists 'abc'", {"rates": "abc"}),
    ("rocket", "rates is empty: give one learning rate", {"rates": ""}),
    ("rocket", "rates lists 0.01 twice", {"rates": "0.01,1e-2"}),
    (
        "rocket",
        "candidates = 8: members lists 3; take 3 or less",
        {
            "members": "sums,gcd,licence",
            "candidates": 8,
            "experts": 2,
            "arms": "shots_only",
        },
    ),
    (
        "rocket",
        "candidates = 13: the whole bank holds 12; take 12 or less",
        {"members": "", "candidates": 13},
    ),
    (
        "rocket",
        "members = 'sums': there is nothing to choose",
        {
            "members": "sums",
            "candidates": 1,
            "experts": 1,
            "top_k": 1,
            "arms": "mixture",
        },
    ),
    ("rocket", r"shots = 1000: kinship_told has \d+ annotated rows", {"shots": 1000}),
    (
        "rocket",
        "shots = 2: data_by_hull takes open rows .* which takes 3",
        {"shots": 2, "arms": "data_by_hull"},
    ),
    (
        "rocket",
        "targets lists 'kinship_tld': .* did you mean 'kinship_told'",
        {"targets": "kinship_tld"},
    ),
    ("rocket", "targets lists 'copyleft' twice", {"targets": "copyleft,copyleft"}),
    ("rocket", "benchmarks has 1 names, targets has 2", {"benchmarks": "piqa"}),
    (
        "rocket",
        "encoder = '/nonexistent': there is no such folder",
        {"encoder": "/nonexistent"},
    ),
    (
        "rocket",
        "bank_rank = 4: LoRAs of the shipped bank have rank 16",
        {"bank_rank": 4, "arms": "mixture"},
    ),
    (
        "rocket",
        r"valid_rows = 20000: \w+ has \d+ annotated rows",
        {"valid_rows": 20000, "arms": "expert_lora"},
    ),
    ("rocket", "top_k is 3, expected 1 to 2", {"top_k": 3}),
    (
        "rocket",
        "candidates = 12: the whole bank holds 12, of which gcd's has seen .*; take 11",
        {"members": "", "candidates": 12, "targets": "gcd"},
    ),
    (
        "rocket",
        "members = 'gcd,sums': there is nothing to choose from, of which gcd's has seen",
        {"members": "gcd,sums", "candidates": 2, "targets": "gcd"},
    ),
    (
        "rocket",
        "members lists 'smus': did you mean 'sums'",
        {"members": "smus,gcd", "candidates": 2},
    ),
    (
        "rocket",
        "bank_rows = 32 and bank_epochs = 1: a LoRA of the bank has one step of 32 rows",
        {"bank_folder": "none_there", "bank_rows": 32, "bank_epochs": 1},
    ),
    (
        "rivals",
        "bank_rows = 8 and bank_epochs = 1: a LoRA of the bank has one step",
        {"bank_folder": "none_there", "bank_rows": 8, "bank_epochs": 1},
    ),
    ("rocket", "retrain lists 'smus'", {"retrain": "smus"}),
    ("rocket", "steps = 1: the only step is that of the warm-up", {"steps": 1}),
    (
        "rocket",
        "steps = 3: the only step of perplexity, half of them, is .* take 4 or more",
        {"steps": 3, "arms": "perplexity"},
    ),
    (
        "rocket",
        "epochs = 1 and batch = 16: shots_only has at most 8 rows, so one step",
        {"epochs": 1, "batch": 16, "arms": "shots_only"},
    ),
    (
        "rocket",
        r".*shots_only has at most 1 rows, [^;]*; take 2 epochs or more$",
        {"epochs": 1, "batch": 16, "shots": 1, "arms": "shots_only,mixture"},
    ),
    (
        "rocket",
        r"epochs = 1 and batch = 64: mixture, random_data have [^;]*; take [^;]*$",
        {"epochs": 1, "batch": 64, "arms": "mixture,random_data"},
    ),
    (
        "rocket",
        "shots = 251: copyleft has 251 annotated rows, and one .*; take 1 to 250",
        {"shots": 251},
    ),
    ("esft", "steps = 1: the only step is that of the warm-up", {"steps": 1}),
    ("esft", "sample_length = 513: nano-moe takes 512", {"sample_length": 513}),
    ("esft", "steps = 2: a trial of rates takes half of them", {"steps": 2}),
    (
        "esft",
        "base = 'nano': it is dense, and ESFT chooses .*; take nano-moe",
        {"base": "nano"},
    ),
    (
        "esft",
        "group_sizes = '3': the group size is 3, no divisor of",
        {"group_sizes": "3", "arms": "gate-g3"},
    ),
    (
        "esft",
        "alignment lists 'general_tiem', no data set: did you mean 'general_time'",
        {"alignment": "general_tiem"},
    ),
    ("esft", "tasks lists 'ias', no data set", {"tasks": "ias:isa"}),
    ("esft", "align_steps = 1: the only step", {"align_steps": 1}),
    (
        "esft",
        "checkpoints = 4: a training has steps = 3; take 0 to 3",
        {"checkpoints": 4},
    ),
    (
        "esft",
        "alignment_share = 0.9: 24 rows of isa need 216 alignment rows .* has 48",
        {"alignment_share": 0.9},
    ),
    ("rivals", "steps = 1: the only step", {"steps": 1, "arms": "smear"}),
    (
        "rivals",
        "gate_steps = 1: the only step of a gate",
        {"gate_steps": 1, "arms": "phatgoose"},
    ),
    (
        "rivals",
        r"searches = 5: the search of lorahub over 12 LoRAs \(members = ''\) takes 14",
        {"members": "", "arms": "lorahub"},
    ),
    (
        "rivals",
        "searches = 3: the search of lorahub over 3 LoRAs .* takes 5 at least",
        {"searches": 3, "arms": "lorahub"},
    ),
    (
        "rivals",
        r"searches = 3: the search of lorahub_chosen over 2 LoRAs \(experts = 2\) takes 4",
        {"searches": 3, "arms": "lorahub_chosen"},
    ),
    (
        "rivals",
        "bank_epochs = 1: the only step of copyleft's own LoRA .*; take 2 or more",
        {"bank_epochs": 1, "whole_rows": 32, "arms": "expert_lora"},
    ),
    ("rivals", "rates is empty", {"rates": ""}),
    ("rivals", "members = 'sums'", {"members": "sums"}),
    (
        "together",
        "new names 'kinship_tld': .* did you mean 'kinship_told'",
        {"new": "kinship_tld"},
    ),
    (
        "banks",
        "members = 'gcd,sums': there is nothing to choose from, of which gcd's has seen",
        {"members": "gcd,sums", "candidates": 2, "targets": "gcd"},
    ),
    (
        "banks",
        "candidates = 4: members lists 4, of which gcd's has seen .*; take 3 or less",
        {"candidates": 4, "targets": "gcd"},
    ),
    ("banks", "encoder = '/nonexistent'", {"encoder": "/nonexistent"}),
    ("together", "tasks names 'gdc'", {"tasks": "gdc,isa"}),
    ("together", "new = 'gcd': tasks trains on gcd", {"new": "gcd"}),
    (
        "together",
        "new = 'kinship_told,isa': one task comes afterwards",
        {"new": "kinship_told,isa"},
    ),
    (
        "together",
        "new = 'a.jsonl,b.jsonl': one task comes afterwards",
        {"new": "a.jsonl,b.jsonl"},
    ),
    ("together", "new names '': expected an embedded task", {"new": ""}),
    (
        "together",
        "new_shots = 252: copyleft has 251 training rows",
        {"new": "copyleft", "new_shots": 252},
    ),
    (
        "together",
        "shots = 97: rocket chooses .* rows_per_task = 24 gives the mixture 96 rows",
        {"shots": 97, "arms": "rocket"},
    ),
    (
        "together",
        "tasks = 'gcd': rocket mixes LoRAs of one task each",
        {"tasks": "gcd", "arms": "full,rocket", "again": ""},
    ),
    (
        "together",
        "experts = 8: rocket chooses among the LoRAs of 4 tasks; take 4 or less",
        {"experts": 8, "arms": "rocket"},
    ),
    ("together", "experts = 8: mixlora has 4", {"experts": 8, "arms": "mixlora"}),
    (
        "together",
        "top_k = 1: arrow takes 2",
        {"top_k": 1, "arms": "arrow", "again": ""},
    ),
    (
        "together",
        r"top_k = 5: su has 4 \(copies\); take 1 to 4",
        {"top_k": 5, "arms": "su"},
    ),
    (
        "together",
        r"copies = 4: trsu makes as many of each of 3 domains \(\w+, \w+, \w+\)",
        {"tasks": "gcd,isa,docstring", "arms": "trsu", "again": ""},
    ),
    (
        "together",
        "adapters = 3: pesc_trsu makes as many",
        {"adapters": 3, "arms": "pesc_trsu", "top_k": 2},
    ),
    (
        "together",
        "experts = 8: rocket chooses",
        {"experts": 8, "arms": "full", "again": "rocket"},
    ),
    ("together", "again lists 'lroa': did you mean 'lora'", {"again": "lroa"}),
    ("together", "rates is empty", {"rates": ""}),
]


@pytest.mark.parametrize(
    ("name", "message", "changes"), CANNOT, ids=lambda part: str(part)[:60]
)
def test_parameters_with_which_an_arm_cannot_run_are_refused_before_any_work(
    name, message, changes
):
    settings = given(name, **changes)
    checks = [experiments.check]
    if name in TRAINED:
        checks.append(plans.trainings)
    for refuses in checks:
        refused(f"E-RANGE: (.*; and )?{message}", refuses, name, settings)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("esft", {"tasks": "gcd", "general": "equations"}),
        ("rocket", {"targets": "kinship_told"}),
        ("rocket", {"shots": 1, "arms": "mixture"}),
        ("rocket", {"bank_rank": 4, "bank_folder": "none_there"}),
        ("rivals", {"targets": "kinship_told", "arms": "expert_lora"}),
        ("rivals", {"bank_epochs": 1, "whole_rows": 33, "arms": "expert_lora"}),
        ("rivals", {"bank_epochs": 1, "whole_rows": 32, "arms": "random"}),
        ("rivals", {"searches": 3, "arms": "random"}),
        ("rivals", {"steps": 1, "gate_steps": 1, "arms": "pems_untuned"}),
        ("rocket", {"steps": 1, "arms": "expert_lora"}),
        ("rocket", {"bank_rows": 8, "bank_epochs": 1}),  # of a bank that is there
        ("rocket", {"epochs": 1, "batch": 4, "arms": "shots_only"}),
        ("esft", {"steps": 2, "rates": ""}),
        ("together", {"tasks": "gcd", "arms": "full,lora", "again": "lora"}),
        (
            "together",
            {"tasks": "gcd,isa,docstring", "arms": "trsu", "copies": 3, "again": ""},
        ),
        ("together", {"base": "nano-moe", "arms": "gate", "again": "lora"}),
    ],
)
def test_what_can_run_is_let_through(name, changes):
    experiments.check(name, given(name, **changes))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_protocol_passes_its_own_check(name):
    for protocol in notebook(name).protocols:
        experiments.check(name, given(name, protocol))


@pytest.mark.parametrize("name", ["rocket", "rivals"])
def test_rows_of_one_prompt_count_once_where_shots_are_to_leave_some(name, tmp_path):
    file = tmp_path / "films.jsonl"
    lines = []
    for split, prompts in (("train", "abc" * 9), ("validation", "d"), ("test", "efg")):
        for prompt in prompts:
            row = {"prompt": prompt, "answer": "good", "split": split}
            lines.append(json.dumps(row))
    file.write_text("\n".join(lines))
    films = {"targets": str(file), "shots": 3, "valid_rows": 4}
    words = "shots = 3: .*films.jsonl has 27 annotated rows, of 3 different prompts, .* 1 to 2"
    refused(f"E-RANGE: {words}", experiments.check, name, given(name, **films))


def test_a_filled_bank_folder_says_what_there_is_to_choose_from(tmp_path):
    for name in ("sums", "gcd", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").touch()
    few = {
        "bank_folder": str(tmp_path),
        "members": "",
        "candidates": 4,
        "shots": 4,
    }
    words = "E-RANGE: candidates = 4: the whole bank holds 3; take 3 or less"
    refused(words, experiments.check, "rocket", given("rocket", **few, arms="mixture"))
    twice = {"targets": "gcd,isa", "benchmarks": "piqa,piqa"}
    told = "E-RANGE: .*benchmarks .*piqa.*"
    refused(told, experiments.check, "rocket", given("rocket", **twice, arms="mixture"))
    few |= {"candidates": 3, "searches": 4}
    words = "searches = 4: .* over 3 LoRAs .bank_folder = .* takes 5 at least"
    refused(words, experiments.check, "rivals", given("rivals", **few, arms="lorahub"))
    few["searches"] = 5
    experiments.check("rivals", given("rivals", **few, arms="random,lorahub"))
    words = "bank_folder = .*: .*phatgoose.* take the rows .* of 'mine' none are known"
    for arms in ("phatgoose", "all"):
        refused(words, experiments.check, "rivals", given("rivals", **few, arms=arms))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    few["bank_folder"] = str(tmp_path / "empty")
    words = "E-RANGE: bank_folder = .*: .* holds no LoRA"
    refused(words, experiments.check, "rivals", given("rivals", **few, arms="random"))


def test_a_bank_folder_below_home_is_the_same_as_in_full(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("sums", "gcd", "mine"):
        (tmp_path / "loras" / name).mkdir(parents=True)
        (tmp_path / "loras" / name / "adapter_config.json").touch()
    settings = {"bank_folder": "~/loras", "members": ""}
    assert not experiments.rocket.makes_bank(settings)
    assert experiments.rocket.members(settings) == ["gcd", "mine", "sums"]
    model, tokenizer = models.load("nano")
    # It reads what lies there, and trains no bank elsewhere.
    refused("E-[A-Z]+: .*loras/gcd", rocket.bank.load, model, tokenizer, "~/loras")


def test_an_arm_that_is_trained_again_alone_has_its_rate_chosen_as_the_others_have(
    monkeypatch,
):
    trained = []

    def train(setup, arm, *, lr, **_):
        trained.append((arm, lr))
        return SimpleNamespace(model=lr)

    budgets = experiments.budgets
    monkeypatch.setattr(budgets, "train", train)
    # The lower of two rates is better.
    monkeypatch.setattr(budgets.training, "nats", lambda model, *_, **__: model)
    experiment = SimpleNamespace(
        settings=given(
            "together", arms="full", again="full, lora", rates="0.003,0.001"
        ),
        setup=SimpleNamespace(pad_id=0),
        arms={"full": "full"},
        known={"full": "full", "lora": "lora"},
        amounts={"tokens": 1.0, "flops": 1.0},
        valid=["rows"],
        root="together/dense",
        test=lambda model: None,
    )
    run = SimpleNamespace(record=lambda *_: None)
    best = budgets.Budgets.choose_rates(experiment, run)
    assert best.by_arm == {"full": 0.001, "lora": 0.001}
    experiment.run = partial(budgets.Budgets.run, experiment)
    budgets.Budgets.run_again(experiment, "lora", best)
    assert trained[-1] == ("lora", 0.001)


def test_sets_of_which_no_row_is_short_enough_are_refused_where_rows_are_drawn(
    monkeypatch,
):
    model, tokenizer = models.load("nano")
    settings = given("together", tasks="gcd,isa", new="kinship_told", rows_per_task=24)
    pool = experiments.budgets.rows(settings)

    def setup(length):
        return experiments.budgets.setup(
            settings | {"max_length": length},
            model,
            tokenizer,
            pool,
            sparse=False,
            bf16=False,
        )

    longest = {}
    for name, rows in {
        **pool.train,
        "new": experiments.budgets.new_rows(settings)[0],
    }.items():
        longest[name] = min(setup(160).encode(rows)["length"])
    assert longest["gcd"] < longest["new"]
    refused("E-DATA: training rows of gcd: all 24", setup, longest["gcd"] - 1)
    refused("E-DATA: shots of the new task: all", setup, longest["new"] - 1)

    few, asked = experiments.budgets.new_rows(settings)
    wordy = {"prompt": 200 * "long "}
    monkeypatch.setattr(
        experiments.budgets,
        "new_rows",
        lambda _: (few, [row | wordy for row in asked]),
    )
    refused("E-DATA: test rows of the new task: all", setup, 160)
    pool = replace(pool, valid=[row | wordy for row in pool.valid])
    refused("E-DATA: validation rows of gcd: all", setup, 160)

    settings = given("esft", tasks="isa", rates="0.001", max_length=16)
    pool = experiments.specialists.rows(settings)
    words = "E-DATA: validation rows of isa: all .* max_length 16"
    refused(words, experiments.specialists.encode, settings, tokenizer, pool)


def test_a_threshold_that_the_bases_gates_do_not_reach_is_refused_before_alignment():
    model, tokenizer = models.load("nano-moe")
    before = {name: part.clone() for name, part in model.state_dict().items()}

    def align(**changes):
        settings = given("esft", tasks="isa", align_steps=2, **changes)
        pool = experiments.specialists.rows(settings)
        mixes = experiments.specialists.encode(settings, tokenizer, pool)
        pad = tokenizer.pad_token_id
        return experiments.specialists.align(settings, model, mixes, pad)

    words = r"E-RANGE: p_gate = 0.99: the gates of layer 1 sum to 0.\d+ on isa; take"
    refused(words, align, p_gate=0.99)
    swept = {"thresholds_gate": "0.1,0.98", "arms": "gate,gate-0.98"}
    refused("E-RANGE: thresholds_gate lists 0.98: .* preset=paper", align, **swept)
    for name, part in model.state_dict().items():
        assert torch.equal(part, before[name])
    assert len(align(p_gate=0.99, preset="paper").loss) == 2


@pytest.fixture
def filled(tmp_path):
    """Return the folder of a bank, of which nothing but the names can be read."""
    for name in ("sums", "gcd", "base", "my lora"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").touch()
    return str(tmp_path)


@pytest.mark.parametrize("name", ["rocket", "rivals"])
def test_a_lora_has_a_name_under_which_its_own_scores_can_be_kept(name, filled):
    few = {"candidates": 2, "experts": 2, "top_k": 1, "bank_folder": filled}
    few["arms"] = {"rocket": "mixture", "rivals": "random"}[name]
    words = "E-RANGE: bank_folder = .*: its LoRA 'base' has the name under which"
    refused(words, experiments.check, name, given(name, **few, members=""))
    words = (
        "E-RANGE: bank_folder = .*: its LoRA 'my lora': scores are kept under names of"
    )
    refused(words, experiments.check, name, given(name, **few, members="sums,my lora"))
    experiments.check(name, given(name, **few, members="sums,gcd"))


@pytest.mark.parametrize("name", ["rocket", "rivals"])
def test_a_member_that_a_filled_bank_lacks_is_refused_before_the_base_is_loaded(
    name, filled
):
    few = {"candidates": 2, "experts": 2, "top_k": 1, "bank_folder": filled}
    few["arms"] = {"rocket": "mixture", "rivals": "random"}[name]
    words = "E-RANGE: members lists 'gdc': did you mean 'gcd'"
    refused(words, experiments.check, name, given(name, **few, members="sums,gdc"))
