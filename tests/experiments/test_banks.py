"""Banks of two kinds: what is trained, what each arm chooses, and what is kept of it."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from moebook import experiments, models
from moebook.lab.evidence import findings
from moebook.lab.pages import plans
from moebook.lab.records import Curve, Run, Value
from moebook.lab.records.store import Pool
from moebook.methods import rocket
from moebook.methods.rocket.case import Case
from tests.experiments import notebooks
from tests.refusals import refused

NOTEBOOK = notebooks.notebook("banks")
given = partial(notebooks.given, "banks")
BANKS = experiments.banks
NAMES = ["a", "b", "c", "d", "e"]


CANNOT = {
    "arms lists 'own_choise': did you mean 'own_choice'": {"arms": "own_choise"},
    "targets lists 'kinship_tol': did you mean 'kinship_told'": {
        "targets": "kinship_tol"
    },
    "targets lists 'kinship_told' twice": {"targets": "kinship_told,kinship_told"},
    "shots = 1000: copyleft has .* annotated rows": {
        "targets": "copyleft",
        "shots": 1000,
        "test_split": "fresh",
    },
    "candidates = 6: members lists 4; take 4": {"candidates": 6},
    "bank_rows = 32 and bank_epochs = 1: a LoRA of the bank has": {"bank_rows": 32},
    "members lists 'sumz': .* did you mean 'sums'": {"members": "sumz,gcd,kinship"},
    "experts .N. is 4, expected 1 to 3": {"experts": 4},
}


@pytest.mark.parametrize(("message", "changes"), CANNOT.items(), ids=CANNOT)
def test_parameters_with_which_an_arm_cannot_run_are_refused_before_any_work(
    message, changes
):
    for refuses in (experiments.check, plans.trainings):
        refused(f"E-RANGE: .*{message}", refuses, "banks", given(**changes))


@pytest.mark.parametrize("protocol", NOTEBOOK.protocols)
def test_every_protocol_passes_its_own_check(protocol):
    BANKS.check(given(protocol))


def test_the_study_is_planned_with_a_training_for_each_target_draw_and_kind():
    turns = {
        training.name: training.turns
        for training in plans.trainings("banks", given("nano"))
    }
    loras = turns.pop("LoRAs of the banks")  # of two kinds, before the mixtures
    assert loras == 2 * len(BANKS.members(given("nano")))
    assert turns == dict.fromkeys(BANKS.CHOICES, 12) | {"rotated": 6}


def case(nats, plain, solved, seed=0):
    """What three shots said of five LoRAs, all of them equally different."""
    cosines = pd.DataFrame(0.5 + 0.5 * np.eye(5), NAMES, NAMES)
    frames = [
        pd.DataFrame(dict.fromkeys(range(3), values), NAMES) for values in (plain, nats)
    ]
    right = pd.DataFrame({0: solved, 1: solved, 2: False}, NAMES)
    return Case("task", seed, [], *frames, right, np.zeros((3, 2)), cosines)


@pytest.fixture
def cases():
    """By rationales both banks rank their solver last; ``own`` solves by e, ``shared`` by a."""
    e_solves = [False, False, False, False, True]
    a_solves = [True, False, False, False, False]
    return {
        "own": case([1, 2, 3, 4, 9], [5, 4, 3, 2, 1], e_solves),
        "shared": case([1, 2, 3, 4, 9], [1, 2, 3, 4, 9], a_solves),
    }


@pytest.mark.parametrize(
    ("arm", "kind", "chosen"),
    [
        ("own_choice", "own", "ab"),
        ("own_choice", "shared", "ab"),
        ("answers_only", "own", "ed"),
        ("answers_only", "shared", "ab"),
        ("accuracy_alone", "own", "ea"),
        ("forced", "own", "ae"),
        ("forced", "shared", "ab"),
        ("rotated", "shared", "ab"),
    ],
)
def test_an_arm_chooses_as_its_name_says(cases, arm, kind, chosen):
    settings = given(experts=2, candidates=2, top_k=1)
    bank = dict.fromkeys(NAMES)
    taken = BANKS.choose(settings, arm, kind, cases, {"own": bank, "shared": bank})
    assert taken == tuple(chosen)


def test_exchanged_takes_what_the_other_banks_shots_chose(cases):
    settings = given(experts=2, candidates=2, top_k=1)
    other = case([9, 8, 3, 1, 2], [1, 2, 3, 4, 5], [False] * 5)
    both = {"own": cases["own"], "shared": other}
    banks = dict.fromkeys(both, dict.fromkeys(NAMES))
    assert BANKS.choose(settings, "exchanged", "own", both, banks) == ("d", "e")
    assert BANKS.choose(settings, "exchanged", "shared", both, banks) == ("a", "b")


def test_three_rankings_of_every_lora_are_told_and_kept(cases):
    config = rocket.Config(candidates=3, experts=2, top_k=1, shots=3)
    table = BANKS.rankings(cases["own"], dict.fromkeys(NAMES), config)
    assert list(table.index) == NAMES
    assert table["R_P"].tolist() == [1, 2, 3, 4, 5]
    assert table["R_answers"].tolist() == [5, 4, 3, 2, 1]
    assert table["R_A"].tolist() == [2, 2, 2, 2, 1]
    assert table["R_D"].isna().tolist() == [False, False, False, True, True]
    assert BANKS.solver(cases["own"], dict.fromkeys(NAMES)) == "e"
    nobody = case([1, 2, 3, 4, 9], [5, 1, 3, 2, 4], [False] * 5)
    assert BANKS.solver(nobody, dict.fromkeys(NAMES)) == "b"

    curves = {}

    class Run:
        def curve(self, name, y, unit):
            curves[name] = list(y), unit

    BANKS.record_rankings(Run(), "own", "task", 1, table)
    assert curves["banks/own/task/1/R_D"] == ([1, 1, 1, 0, 0], "count")
    assert curves["banks/own/task/1/accuracy"][1] == "share"
    BANKS.record_choice(Run(), "forced", "own", "task", 1, ("e", "a"), NAMES)
    assert curves["banks/own/task/1/chosen/forced"] == ([1, 0, 0, 0, 1], "count")


@pytest.mark.filterwarnings("ignore:W-NONFINITE")
def test_a_lora_without_a_finite_perplexity_has_no_rank_and_keeps_its_line():
    config = rocket.Config(candidates=3, experts=2, top_k=1, shots=3)
    damaged = case([1, np.nan, 3, 4, 9], [5, 4, 3, 2, 1], [False] * 5)
    table = BANKS.rankings(damaged, dict.fromkeys(NAMES), config)
    assert list(table.index) == NAMES
    assert table["R_P"].fillna(0).tolist() == [1, 0, 2, 3, 4]
    assert table["R_answers"].tolist() == [5, 4, 3, 2, 1]
    assert table["R_D"].isna().tolist() == [False, True, False, False, True]


def test_the_two_banks_differ_in_where_each_lora_starts_and_no_pair_shares_a_start():
    model, tokenizer = models.load("nano")
    settings = given(members="sums,gcd", bank_rows=40, candidates=2)
    pairs = {
        seed: BANKS.make(settings | {"seed": seed}, model, tokenizer) for seed in (5, 6)
    }
    starts = set()
    for seed, banks in pairs.items():
        firsts = {}
        for kind, bank in banks.items():
            of_bank = [lora.provenance["training"]["seed"] for lora in bank.values()]
            assert all(lora.provenance["losses"] for lora in bank.values())
            firsts[kind] = of_bank
        assert firsts["shared"] == [1000 * seed] * 2
        assert firsts["own"] == [1000 * seed, 1000 * seed + 1]
        assert not starts & {*firsts["own"]}
        starts |= {*firsts["own"]}
        shared = banks["shared"]
        own = banks["own"]
        assert BANKS.likeness(shared) > 0.9 > 0.5 > BANKS.likeness(own)
        assert shared["sums"].digest == own["sums"].digest
        assert shared["gcd"].digest != own["gcd"].digest
        assert shared["gcd"].provenance["prompts"] == own["gcd"].provenance["prompts"]


def test_rotated_trains_turned_factors_and_all_other_arms_those_of_the_bank():
    model, tokenizer = models.load("nano")
    settings = given(members="sums,gcd", bank_rows=40, candidates=2)
    bank = BANKS.make(settings, model, tokenizer)["shared"]
    same = BANKS.factors(settings, "forced", bank, ("gcd", "sums"))
    assert same == [bank["gcd"], bank["sums"]]
    turned = BANKS.factors(settings, "rotated", bank, ("gcd", "sums"))
    for one, other in zip(turned, same, strict=True):
        for path, down in one.down.items():
            torch.testing.assert_close(
                one.up[path] @ down,
                other.up[path] @ other.down[path],
                atol=1e-5,
                rtol=1e-4,
            )
            assert (down - other.down[path]).norm() > 0.1 * down.norm()
    first, second = (part.down[path] for part in turned)
    before = torch.cosine_similarity(
        same[0].down[path].flatten(), same[1].down[path].flatten(), 0
    )
    after = torch.cosine_similarity(first.flatten(), second.flatten(), 0)
    assert before > 0.9
    assert after.abs() < 0.5
    again = BANKS.factors(settings, "rotated", bank, ("sums",))[0]
    assert again.digest == turned[1].digest


def test_choices_are_shares_over_all_lines_above_the_accuracy_they_came_to():
    taken = {"own_choice": [[1, 0, 1], [1, 0, 0]], "forced": [[0, 1, 1], [0, 1, 1]]}
    table = BANKS.shares(taken, {"own_choice": 0.25, "forced": 0.5}, ["a", "b", "c"])
    assert table["own_choice"].to_dict() == {
        "a": 1,
        "b": 0,
        "c": 0.5,
        BANKS.RIGHT: 0.25,
    }
    assert list(table.columns) == ["own_choice", "forced"]


def test_the_pools_picture_is_made_of_the_choices_that_runs_kept():
    def ran(seed, chosen, accuracy):
        values = (Value("banks/own/forced/accuracy", accuracy, "share"),)
        lines = [("own", chosen), ("shared", [0, 0, 0])]
        curves = tuple(
            Curve(f"banks/{kind}/gcd/0/chosen/forced", "count", (1, 2, 3), tuple(line))
            for kind, line in lines
        )
        how = {"settings": {"members": "a,b,c"}, "curves": curves}
        how["manifest"] = {"date": f"2026-01-0{seed}"}
        return Run("banks", "nano", "study", seed, values, **how)

    pool = Pool("banks", "nano", (ran(1, [1, 1, 0], 0.2), ran(2, [1, 0, 1], 0.4)))
    table = findings.choices(pool, "own")
    assert table["forced"].tolist() == pytest.approx([1, 0.5, 0.5, 0.3])
    assert list(table.index) == ["a", "b", "c", BANKS.RIGHT]
