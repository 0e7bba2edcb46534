"""Changed parameters that do nothing are told in one warning; those that do something are not."""

import json
import warnings

import pytest

from moebook import experiments
from moebook.experiments.pesc import HELD_OUT
from tests.experiments import draws

IDLE = [
    ("pesc", {"arms": "dense"}, "lr_full", {"lr_full": 0.1}),
    ("pesc", {"arms": "dense,sparse"}, "lr", {"lr": 0.1}),
    ("pesc", {"arms": "dense", "rates": ""}, "rate_steps", {"rate_steps": 9}),
    ("pesc", {"arms": "dense"}, "chat", {"chat": True}),
    ("pesc", {"arms": "sparse", "host": "frozen"}, "lora_rank", {"lora_rank": 3}),
    ("pesc", {"arms": "adapters,upcycled"}, "host", {"host": "full"}),
    ("pesc", {"arms": "upcycled", "rates": ""}, "lr", {"lr": 0.1}),
    *(
        ("pesc", {"arms": arms}, "balance_weight", {"balance_weight": 0.1})
        for arms in (
            "dense",
            "dense,wide",
            "unbalanced",
            "paper,released",
        )
    ),
    ("router_init", {"arms": "su"}, "second", {"second": "nano"}),
    ("router_init", {"arms": "dense"}, "top_k", {"top_k": 2}),
    ("router_init", {"arms": "su,trsu"}, "quarter_rows", {"quarter_rows": 2}),
    (
        "router_init",
        {"arms": "su_renormalised"},
        "combine",
        {"combine": "renormalised"},
    ),
    ("rocket", {"arms": "shots_only"}, "bank_rows", {"bank_rows": 7}),
    (
        "rocket",
        {"arms": "shots_only", "rates": "0.01"},
        "valid_rows",
        {"valid_rows": 7},
    ),
    ("rocket", {"arms": "mixture"}, "tuned", {"tuned": 3}),
    ("rocket", {"arms": "perplexity"}, "repeats", {"repeats": 3}),
    ("esft", {"arms": "gate", "rates": ""}, "lr_lora", {"lr_lora": 0.1}),
    ("esft", {"arms": "gate", "align_steps": 0}, "align_lr", {"align_lr": 0.1}),
    ("esft", {"arms": "gate"}, "lora_scale", {"lora_scale": 1.0}),
    ("rivals", {"arms": "random"}, "starts", {"starts": "own"}),
    ("rivals", {"arms": "smear"}, "searches", {"searches": 9}),
    ("rivals", {"arms": "smear"}, "gate_steps", {"gate_steps": 9}),
    ("rivals", {"arms": "pems,mixlora"}, "rate", {"rate": 0.5}),
    ("rivals", {"arms": "smear"}, "top_k", {"top_k": 1}),
    *(
        ("rivals", {"arms": "lorahub,source_best,pems_untuned"}, name, {name: value})
        for name, value in {
            "steps": 9,
            "batch": 3,
            "schedule": "linear",
            "accumulate": 2,
            "weight_decay": 0.5,
            "rates": "0.3",
        }.items()
    ),
    ("together", {"arms": "lora", "again": ""}, "copies", {"copies": 6}),
    ("together", {"arms": "lora", "again": ""}, "threshold", {"threshold": 0.1}),
    # What the adapters of PESC are needed for is counted on a dense base, of an arm that runs.
    ("together", {"arms": "lora", "again": "pesc"}, "threshold", {"threshold": 0.1}),
    (
        "together",
        {"arms": "pesc", "again": "", "base": "nano-moe"},
        "threshold",
        {"threshold": 0.1},
    ),
    ("together", {"arms": "full", "again": ""}, "parameters", {"parameters": 9}),
    ("together", {"arms": "lora", "again": ""}, "top_k", {"top_k": 1}),
    *(
        ("together", {"arms": "lora", "again": "", "rates": "0.1"}, name, {name: value})
        for name, value in {
            "rate_share": 0.5,
            "valid_rows": 3,
            "shots": 5,
            "experts": 2,
            "adapters": 6,
        }.items()
    ),
    (
        "pesc",
        {"arms": "dense", "rates": "", "fixed_rates": "dense=0.01"},
        "lr",
        {"lr": 0.1},
    ),
    ("pesc", {"mix": "rows.jsonl"}, "rows_per_task", {"rows_per_task": 9}),
    ("router_init", {"rates": ""}, "rate_steps", {"rate_steps": 9}),
    ("router_init", {}, "chat", {"chat": True}),
    ("rocket", {}, "pool_sets", {"pool_sets": "Dolly"}),
    ("rocket", {"epochs": 2}, "steps", {"steps": 9}),
    ("esft", {"rates": "", "checkpoints": 0}, "watched_rows", {"watched_rows": 9}),
    (
        "esft",
        {"align_steps": 0, "alignment_share": 0.0},
        "alignment",
        {"alignment": "gcd"},
    ),
    ("esft", {}, "revisions", {"revisions": "{}"}),
    ("rivals", {"arms": "smear"}, "bank_epochs", {"bank_epochs": 9}),
    ("rivals", {"arms": "smear"}, "whole_rows", {"whole_rows": 9}),
]
# The same parameters where they do something.
WORKS = [
    ("pesc", {"arms": "upcycled", "rates": ""}, "lr_full", {"lr_full": 0.1}),
    ("pesc", {"arms": "sparse"}, "lora_rank", {"lora_rank": 3}),
    ("pesc", {"arms": "sparse,upcycled", "rates": ""}, "lr (", {"lr": 0.1}),
    *(
        ("pesc", {"arms": arms}, "balance_weight", {"balance_weight": 0.1})
        for arms in ("sparse", "dense,experts4", "adapters", "upcycled,unbalanced")
    ),
    ("router_init", {"arms": "su,crsu"}, "quarter_rows", {"quarter_rows": 2}),
    ("router_init", {"arms": "su", "rates": ""}, "valid_rows", {"valid_rows": 9}),
    ("rocket", {"arms": "perplexity"}, "tuned", {"tuned": 3}),
    ("rocket", {"bank_folder": "none_there"}, "bank_rows", {"bank_rows": 7}),
    ("esft", {"arms": "lora", "rates": ""}, "lr_lora", {"lr_lora": 0.1}),
    ("rivals", {"arms": "smear"}, "rate", {"rate": 0.5}),
    ("rivals", {"arms": "rocket"}, "top_k", {"top_k": 1}),
    ("rivals", {"arms": "lorahub,random"}, "steps", {"steps": 9}),
    ("together", {"arms": "lora", "again": "su"}, "copies", {"copies": 6}),
    *(
        ("together", {"arms": arm, "again": ""}, name, {name: value})
        for arm, name, value in (
            ("pesc_bank", "top_k", 1),
            ("mixlora", "experts", 4),
            ("pesc_esft", "threshold", 0.1),
            ("esft", "threshold", 0.1),
            ("pesc", "threshold", 0.1),
        )
    ),
    ("together", {"arms": "lora", "again": "esft"}, "threshold", {"threshold": 0.1}),
]


@pytest.fixture
def own_rows(tmp_path, monkeypatch):
    """Write the file that a case names as its mixture, into the folder where it is looked for."""
    write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)


def write_rows(folder):
    """Write sums to train on, some more than PESC holds out to measure routing."""
    lines = []
    for number in range(HELD_OUT + 100):
        row = {"prompt": f"{number} + {number} =", "answer": str(2 * number)}
        lines.append(json.dumps(row) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))


def told(name, settings, changed):
    """Return the warning of a notebook's check, or an empty text."""
    check = getattr(experiments, name).check
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(draws.smoke(name) | settings | changed, None, tuple(changed))
    lines = [str(one.message) for one in caught if "W-IDLE" in str(one.message)]
    return lines[0] if lines else ""


@pytest.mark.parametrize(("name", "settings", "parameter", "changed"), IDLE)
def test_a_changed_parameter_that_does_nothing_is_told(
    name, settings, parameter, changed, own_rows
):
    line = told(name, settings, changed)
    assert line.startswith("W-IDLE: changed without effect in this run: ")
    assert f"{parameter} (" in line


@pytest.mark.parametrize(("name", "settings", "parameter", "changed"), WORKS)
def test_where_it_does_something_nothing_is_told(name, settings, parameter, changed):
    assert parameter not in told(name, settings, changed)


@pytest.mark.parametrize(
    ("arms", "host", "hosts"),
    [
        ("adapters", "lora", "frozen"),
        ("sparse", "frozen", "frozen"),
        ("sparse,adapters", "full", "frozen, full"),
    ],
)
def test_a_width_of_lora_without_effect_names_the_hosts_of_the_arms(arms, host, hosts):
    line = told("pesc", {"arms": arms, "host": host}, {"lora_rank": 3})
    assert line.endswith(f": lora_rank (hosts of these arms: {hosts})")


def test_what_nobody_changed_is_not_told_and_all_stands_in_one_warning():
    assert told("pesc", {"arms": "dense"}, {}) == ""
    changed = {"lr_full": 0.1, "lr": 0.1, "chat": True}
    line = told("pesc", {"arms": "dense"}, changed)
    assert all(name in line for name in changed)
