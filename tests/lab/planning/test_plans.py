"""``moebook plan``: every notebook that trains, at tier paper, on one GPU of 80 GB."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from moebook import experiments, models
from moebook.experiments import contest
from moebook.experiments.arm import picked
from moebook.lab import planning
from moebook.lab.pages import plans
from moebook.lab.run import parameters, sources, study
from moebook.methods import rocket
from moebook.methods.rivals import table as rivals
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[3]


def values(name, protocol="paper", **changes):
    notebook = sources.find(ROOT, name)
    return notebook.defaults | notebook.settings(protocol) | changes


@pytest.mark.parametrize(
    ("name", "arms", "change"),
    [
        ("bases", "", ""),
        ("pesc", "sparse", "micro-batches of 16"),
        ("router_init", "crsu", "gradient checkpointing"),
        ("rocket", "mixture", ""),
        ("rivals", "rocket", ""),
        pytest.param(
            "esft",
            "fft",
            "gradient checkpointing + micro-batches of 1 + FSDP2 over 8 GPUs",
            marks=pytest.mark.soak,
        ),
        ("together", "pesc", "gradient checkpointing"),
    ],
)
def test_plans_say_what_fits_80_gb_and_what_would(name, arms, change):
    alone = {"again": arms} if name == "together" else {}
    found, *_ = plans.plans(name, values(name, arms=arms, **alone), "h100")
    assert found.change == change
    assert found.fits == (change == "")
    assert found.chosen_need.total <= 80e9
    assert found.fits or found.need.total > 80e9
    assert found.seconds > 0
    assert found.tokens > 0


@pytest.mark.parametrize(
    "name", ["pesc", "router_init", "rocket", "rivals", "esft", "together"]
)
def test_every_arm_is_planned_with_its_steps_and_turns(name):
    found = plans.trainings(name, values(name, "nano", arms="all"))
    assert len(found) == len({training.name for training in found}) > 10
    assert all(training.steps > 0 and training.turns > 0 for training in found)


def test_an_arm_that_is_trained_on_equal_flops_alone_is_planned_too():
    given = values("together", "nano", arms="lora", again="lora, pesc", rates="0.01")
    first, alone = plans.trainings("together", given)
    assert (first.name, alone.name) == ("lora", "pesc")
    assert (first.steps, alone.steps) == (2 * given["steps"], given["steps"])


def test_each_pass_over_few_rows_is_planned_as_a_step_of_its_own():
    given = values("rocket", "paper", arms="shots_only", shots=5)
    found, own = plans.trainings("rocket", given)
    assert given["batch"] >= 5
    assert found.steps == given["epochs"] > 1
    assert own.name == "expert_lora"


def test_loras_that_a_run_of_rocket_trains_are_planned_with_their_steps(tmp_path):
    given = values(
        "rocket",
        "cpu",
        arms="mixture,perplexity",
        targets="kinship_told,copyleft",
        rates="0.01",
        steps=25,
        tuned=3,
        whole_rows=60,
        members="sums,gcd",
        candidates=2,
        experts=2,
        bank_folder=str(tmp_path / "new"),
        bank_rows=70,
        bank_epochs=2,
    )
    every = {one.name: one for one in plans.trainings("rocket", given)}
    mixture, alone, own, bank = every.values()
    assert list(every) == ["mixture", "perplexity", "expert_lora", "LoRAs of the bank"]
    assert (alone.steps, alone.turns) == (12, 2 * 3)
    # The shipped bank's recipe: 6 passes in batches of 32, over two; the bank's own are 2 over 3.
    assert (own.steps, own.turns, own.batch, own.length) == (6 * 2, 2, 32, 200)
    assert (bank.steps, bank.turns, bank.batch, bank.length) == (2 * 3, 2, 32, 200)
    host = mixture.host
    model, _ = models.load(host)
    a_rank = sum(
        layer.in_features + layer.out_features
        for layer in rocket.loras.linears(model, ["q_proj", "v_proj"]).values()
    )
    assert planning.size(bank, 1, False).trained == 16 * a_rank


def test_rates_of_expert_lora_and_retrained_loras_are_planned():
    given = values("rocket", "cpu", arms="expert_lora", rates="0.01,0.02,0.03")
    (own,) = plans.trainings("rocket", given)
    assert own.turns == 3 * len(given["targets"].split(","))
    own, again = plans.trainings("rocket", given | {"retrain": "licence,names_de"})
    assert (again.name, again.turns) == ("LoRAs retrained", 2)
    assert again.steps == 6 * 63  # 2,000 rows in batches of 32


def test_loras_of_both_kinds_of_banks_are_planned():
    given = values(
        "banks", "cpu", members="sums,gcd,licence", bank_rows=64, candidates=3
    )
    *_, loras = plans.trainings("banks", given)
    assert (loras.name, loras.turns) == ("LoRAs of the banks", 2 * 3)
    assert loras.steps == given["bank_epochs"] * 2


def test_the_alignment_before_esfts_arms_is_planned_with_all_parameters():
    given = values("esft", "nano", arms="gate", align_steps=100)
    gate, alignment = plans.trainings("esft", given)
    assert (alignment.name, alignment.steps) == ("alignment", 100)
    sizes = [planning.size(one, 1, False).trained for one in (gate, alignment)]
    assert sizes[0] < sizes[1] / 2


@pytest.mark.parametrize("name", study.PLANNED)
def test_a_study_refuses_unknown_arms_before_anything_runs(name, monkeypatch):
    monkeypatch.setattr(
        study, "freeze", lambda folder: pytest.fail("a commit was frozen")
    )
    one, other, *_ = (
        t.name for t in plans.trainings(name, values(name, "nano", arms="all"))
    )
    message = f"E-RANGE: arms lists '{one}x': did you mean '{one}'"
    refused(
        message, study.study, name, "nano", [999], arms=f"{other},{one}x", folder=ROOT
    )
    experiments.check(name, values(name, "nano", arms=f"{other},{one}"))


def test_a_study_checks_the_arms_of_every_notebook_that_has_any():
    every = sources.notebooks(ROOT).values()
    assert {*study.PLANNED} == {
        book.name for book in every if "arms" in book.parameters
    }


@pytest.mark.parametrize("protocol", ["nano", "moe"])
def test_arms_on_one_budget_are_planned_at_its_size(protocol):
    given = values("together", protocol, arms="all", max_length=8)
    sized = {
        name
        for name, arm in experiments.together.arms(sparse=protocol == "moe").items()
        if arm.sized
    }
    for training in plans.trainings("together", given):
        off = planning.size(training, 1, False).trained / given["parameters"] - 1
        assert abs(off) < 0.1 if training.name in sized else off > 1


def test_the_settings_of_the_page_are_parameters_of_their_notebooks():
    for asked in plans._settings():
        notebook = sources.find(ROOT, asked["notebook"])
        parameters.check(notebook.parameters, asked["changes"], "plans.yaml")
        given = values(notebook.name, **asked["changes"])
        # Its first training is what the table shows; Rocket trains a LoRA for its leak check, too.
        first, *_ = plans.trainings(notebook.name, given)
        assert first.name == asked["changes"]["arms"]


def test_each_cell_of_the_plans_gives_its_unit_and_large_numbers_their_power():
    text = plans.shown(ROOT)
    for part in ("weights", "gradients", "moments", "beside", "FSDP2"):
        cells = re.findall(rf'data-label="{part}">(.*?)<', text)
        assert cells
        assert all(cell.endswith("&nbsp;GB") for cell in cells)
    sizes = re.findall(r'data-label="FLOPs">(.*?)</td>', text)
    assert sizes
    assert all(re.fullmatch(r"\d\.\d\d · 10<sup>\d+</sup>", size) for size in sizes)
    assert not re.search(r">-\d", text)


def test_no_case_predicts_its_own_time_and_a_page_without_records_says_so(tmp_path):
    text = plans.shown(tmp_path)
    assert "have not been planned yet" in text
    assert "Nothing has been measured yet" in text
    parts = {"weights": 10, "gradients": 10, "moments": 20, "activations": 60}
    one = {
        "base": "nano",
        "rows": 1,
        "length": 2,
        "resident": 90.0,
        "predicted": {**parts, "flops": 1, "seconds": 1.0},
    }
    cases = [
        {**one, "case": "a", "bytes": 80.0, "seconds": 2.0},
        {**one, "case": "b", "bytes": 125.0, "seconds": 4.0},
        {"case": "c", "base": "smollm2", "absent": "pip install it"},
    ]
    path = tmp_path / "results" / "plan" / "cpu.json"
    path.parent.mkdir(parents=True)
    told = {"machine": "X 9000", "torch": "2", "date": "2026-01-02T03", "cases": cases}
    path.write_text(json.dumps(told))
    frame = plans.errors(path)
    assert frame["predicted bytes"].tolist() == [100, 100]
    assert frame["error of bytes"].tolist() == pytest.approx([0.25, -0.2])
    # Each is predicted at the rate that the other was measured at.
    assert frame["predicted seconds"].tolist() == pytest.approx([4.0, 2.0])
    text = plans.shown(tmp_path)
    for fact in (
        "Errors on X 9000: bytes −20 to +25 %",
        "seconds −50 to +100 %",
        "Not run: smollm2, c (pip install it)",
    ):
        assert fact in text
    # Of one case alone no time is predicted.
    path.write_text(json.dumps(told | {"cases": cases[:1]}))
    text = plans.shown(tmp_path)
    assert not re.search(r"\bnan\b", text)
    assert "and this is the only one" in text


def test_rivals_try_rates_once_for_all_variants_of_an_arm(monkeypatch):
    """The plan's turns are the arms that a run puts on its base and tunes, call by call."""
    given = values("rivals", "nano", arms="all", rates="0.001,0.002,0.003")
    known = rivals.arms(
        len(rocket.bank.SOURCES), **picked(given, "experts top_k rate searches")
    )
    calls = []

    def tuned(self, name, target, rate):
        calls.append(name)
        return Mock()

    monkeypatch.setattr(contest.Contest, "_tuned", tuned)
    monkeypatch.setattr(contest.Contest, "_validate", lambda self, target: 1.0)
    targets = given["targets"].split(",")
    names = [field.name for field in dataclasses.fields(contest.Contest)]
    stand_ins = dict.fromkeys(names) | {
        "settings": given,
        "arms": {name: arm for name, arm in known.items() if arm.rated},
        "known": known,
        "pool": Mock(tested=targets),
    }
    experiment = contest.Contest(**stand_ins)
    experiment.choose_rates()
    # The notebook runs each arm on each target.
    for name, target in itertools.product(experiment.arms, targets):
        experiment._tuned(name, target, 0.001)
    planned = plans.trainings("rivals", given)
    turns = {one.name: one.turns for one in planned if one.name in experiment.arms}
    assert list(turns) == list(experiment.arms)
    assert sum(turns.values()) == len(calls)
    # Alone, a variant's rates are tried too.
    (variant, *_) = plans.trainings("rivals", given | {"arms": "random_shots"})
    assert variant.turns == 4 * len(targets)


def test_a_mean_of_tokens_is_capped_for_shorter_trainings_and_refused_above_the_longest():
    given = values("pesc", "nano")
    message = r"--tokens 161: rows have at most 160 tokens \(max_length\)$"
    refused(f"E-RANGE: {message}", plans.plans, "pesc", given, "h100", tokens=161)
    refused("E-RANGE: tokens is 0", plans.plans, "pesc", given, "h100", tokens=0)
    given = values(
        "rocket", "nano", arms="mixture"
    )  # nano takes 512 tokens, a LoRA's rows have 200
    message = "--tokens 513: rows have at most 512 tokens$"
    refused(f"E-RANGE: {message}", plans.plans, "rocket", given, "h100", tokens=513)
    usual, *_, own = plans.trainings("rocket", given)
    assert (usual.length, own.length) == (512, 200)
    mixture, *_, lora = plans.plans("rocket", given, "h100", tokens=256)
    assert mixture.tokens == usual.steps * usual.turns * usual.batch * 256
    assert lora.tokens == own.steps * own.turns * own.batch * 200


def test_lists_are_counted_without_their_empty_parts():
    given = values("rocket", "cpu", arms="mixture", rates="0.001,0.003")
    again = plans.trainings("rocket", given | {"rates": "0.001,0.003, "})
    assert again[0].turns == plans.trainings("rocket", given)[0].turns


def test_the_plans_say_what_the_page_on_methods_says_of_16_billion_weights():
    text = (ROOT / "book" / "which_method.md").read_text(encoding="utf-8")
    assert (
        "With activations recomputed: LoRA, then ESFT. Without: ESFT, then LoRA, on one GPU "
        "or in shards. Full fine-tuning needs most" in text
    )
    assert "Not settled: the plan says ESFT" in text
    record = json.loads((ROOT / plans.RECORD).read_text(encoding="utf-8"))
    known = {asked["setting"]: asked for asked in record["plans"]}
    lora = known["LoRA of DeepSeek-V2-Lite, one task"]
    full = known["FFT of DeepSeek-V2-Lite, one task"]
    for score in ("Token", "Gate"):
        chosen = known[f"ESFT-{score}, one task"]
        for place in ("one", "own"):
            for layout in ("DDP, checkpointing", "FSDP2, checkpointing"):
                least, middle, most = (
                    held(asked[place], layout) for asked in (lora, chosen, full)
                )
                assert least < middle < most
        for place, layout in (("one", "DDP"), ("one", "FSDP2"), ("own", "FSDP2")):
            assert held(chosen[place], layout) < held(lora[place], layout)
        for place in ("one", "own"):
            assert chosen[place]["seconds"] < lora[place]["seconds"]
    assert (lora["one"]["machine"], lora["own"]["machine"]) == ("h100", "a100x16")
    assert "the plan says ESFT, on `a100x16` and on `h100`" in text
    sizes = {
        "LoRA": lora,
        "ESFT-Token": known["ESFT-Token, one task"],
        "ESFT-Gate": known["ESFT-Gate, one task"],
        "full fine-tuning": full,
    }
    (row,) = re.findall(r"^.*Does it fit one GPU of 80 GB.*$", text, re.MULTILINE)
    assert "one row of 4,096 tokens at a time" in row
    for name, asked in sizes.items():
        planned = asked["own"]
        assert (planned["way"]["rows"], planned["length"]) == (1, 4096)
        size = held(planned, "DDP, checkpointing", without=("engine", "beside"))
        assert f"{name} ({size / 1e9:.1f} GB)" in row
        fits, does_not = row.split(" do; ")
        assert f"{name} (" in (fits if size <= 80e9 else does_not)
    assert f"{lora['own']['trained'] / 1e9:.3f} billion weights" in text
    assert f"weights alone are {lora['own']['alone'] / 1e9:.1f} GB in 16 bits" in text


def test_the_page_of_plans_says_what_a_run_without_the_notebook_needs():
    text = plans.shown(ROOT)
    (label,) = set(re.findall(r'data-label="([^"]*nothing beside)"', text))
    cells = re.findall(rf'data-label="{label}">(.*?)&nbsp;GB<', text)
    record = json.loads((ROOT / plans.RECORD).read_text(encoding="utf-8"))
    assert len(cells) == len(record["plans"])
    for cell, asked in zip(cells, record["plans"], strict=True):
        planned = asked["own"]
        kind = "QLoRA" if planned["way"]["quantised"] else "DDP"
        need = planned["layouts"][f"{kind}, checkpointing"]
        size = held(planned, f"{kind}, checkpointing", without=("engine", "beside"))
        assert cell == f"{(size - need['paged']) / 1e9:.1f}"
    assert "on GPUs of 80 GB (h100)" in text
    assert "rows of 4,096 tokens" in text or "row of 4,096 tokens" in text


def held(planned, layout, without=()):
    """Bytes on each GPU in a layout of a plan on record, some parts left out."""
    need = planned["layouts"][layout]
    left = ("paged", *without)
    return sum(size for part, size in need.items() if part not in left)
