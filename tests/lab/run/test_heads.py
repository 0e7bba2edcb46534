"""Heads of protocols: where a pool departs from its design, and by what spread it was planned."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from moebook import lists
from moebook.intervals import sees
from moebook.lab.evidence import heads
from moebook.lab.records import Run, Value, write_run
from moebook.lab.run import sources
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[3]
HEAD = """\
# A study. Run by
#   moebook study pesc --on mine --seeds 0-3
#
# Decided before the first run.
#
# Primary measure: pesc/a/nll less pesc/b/nll
# Smallest effect of interest: 0.5
# Seeds: 0-3
# Spread on record: other
# Decides: pesc.sparse-beats-dense
# Decides: pesc.sparse-beats-matched
# Why: it shows what
# decides: a word at the start of a line of prose is no fact.
tier: study
arms: dense,sparse
steps: 10
"""
PATH = "notebooks/01_pesc.mine.yaml"


def git(folder, *words):
    told = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return told.stdout.strip()


def add_run(folder, seed, commit="", arms=("dense", "sparse"), protocol="mine", a=1.0):
    values = (Value("pesc/a/nll", a, "nats"), Value("pesc/b/nll", 2.0, "nats"))
    manifest = {"date": f"2026-01-0{1 + seed}T00:00:00+00:00", "seconds": 1.0}
    manifest["commit"] = {"id": commit, "dirty": False}
    run = Run("pesc", protocol, "study", seed, values, arms=arms, manifest=manifest)
    name = f"{seed}.{'-'.join(arms)}.parquet" if len(arms) != 2 else f"{seed}.parquet"
    write_run(folder / "results" / "pesc" / protocol / name, run)


@pytest.fixture
def project(tmp_path):
    """A project in git whose one protocol ran at the commit that holds it."""
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / "01_pesc.ipynb", tmp_path / "notebooks")
    (tmp_path / PATH).write_text(HEAD)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "before")
    return tmp_path


def facts(folder):
    (design,) = [one for one in heads.read(folder) if one.protocol == "mine"]
    return design.facts


def test_a_pool_that_follows_its_design_departs_from_nothing(project):
    commit = git(project, "rev-parse", "HEAD")
    for seed in range(4):
        add_run(project, seed, commit)
    said = facts(project)
    departures = ("Stopped early", "Seeds added later", "Changed", "Arms added later")
    assert not [name for name in said if name.startswith(departures)]


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("steps: 10", "steps: 20", "steps"),
        ("# Decides: pesc.sparse-beats-matched\n", "", "Decides"),
        ("Smallest effect of interest: 0.5", "Smallest effect of interest: 0.1", None),
        ("# decides: a word", "# determines: a word", ""),
    ],
)
def test_what_changed_after_the_first_run_is_named(project, old, new, names):
    commit = git(project, "rev-parse", "HEAD")
    add_run(project, 0, commit)
    path = project / PATH
    path.write_text(path.read_text().replace(old, new))
    said = facts(project).get("Changed after its first run", "")
    assert said == ("Smallest effect of interest" if names is None else names)


@pytest.mark.parametrize(
    ("spread", "smallest", "said"),
    [
        ("other", "0.5 nats a token", "100% with 4 seeds"),
        ("other", "small", "E-CONFIG: 'Smallest .*: small': expected a number first"),
        ("other: pesc/a/nll", "0.5", "E-CONFIG: .*expected two seeds .*, has 0"),
        ("other: pesc/a/nll less pesc/c/nll", "0.5", "E-CONFIG: .*, has 0"),
        ("single", "0.5", "E-CONFIG: 'Spread .*: single': expected two .*, has 1"),
    ],
)
def test_the_chance_is_simulated_from_several_seeds_or_refused(
    project, spread, smallest, said
):
    for seed in range(3):
        add_run(project, seed, protocol="other", a=1.0 + seed / 100)
    add_run(project, 0, protocol="single")
    changed = HEAD.replace(": other", f": {spread}").replace(": 0.5", f": {smallest}")
    (project / PATH).write_text(changed)
    if said.startswith("E-"):
        refused(said, facts, project)
    else:
        assert facts(project)["Chance to see it"] == said


@pytest.mark.parametrize(
    ("planned", "told"),
    [
        ("Seeds: 7", "'Seeds: 7': expected two or more"),
        ("Seeds: 0-3\n# Test rows: 200 a task", "'Test rows: 200 a task': expected a"),
        ("Seeds: 0-3\n# Test rows: -5", "'Test rows: -5': expected a whole number"),
        ("Seeds: 0-3\n# Test rows: 0", "'Test rows: 0': expected a whole number"),
    ],
)
def test_a_plan_of_which_no_chance_can_be_simulated_is_refused(project, planned, told):
    for seed in range(3):
        add_run(project, seed, protocol="other", a=1.0 + seed / 100)
    (project / PATH).write_text(HEAD.replace("Seeds: 0-3", planned))
    refused(f"E-CONFIG: {told}", facts, project)


def test_a_pool_says_how_many_seeds_it_lacks_and_what_came_later(project):
    commit = git(project, "rev-parse", "HEAD")
    add_run(project, 0, commit)
    add_run(project, 1, commit)
    add_run(project, 6, commit)
    add_run(project, 1, commit, arms=("upcycled",))
    add_run(project, 1, commit, arms=("random",))
    said = facts(project)
    assert said["Still running"].startswith("2 of 4 seeds ran; ")
    assert "Found" not in said
    assert said["Seeds added later"] == "6"
    assert said["Arms added later"] == "random, upcycled"


def test_a_head_behind_a_byte_order_mark_is_read(project):
    before = facts(project)
    (project / PATH).write_bytes(b"\xef\xbb\xbf" + HEAD.encode())
    assert facts(project) == before
    notebook = sources.find(project, "pesc")
    assert len(notebook.decides("mine")) == 2
    assert sources.running(notebook, project) == {"mine"}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "Decides: pesc.sparse-beats-dense",
            "Decides:pesc.x",
            ":10: expected a space behind 'Decides:'",
        ),
        ("Seeds: 0-3\n", "Seeds:\n", ":8: expected a space behind 'Seeds:'"),
        ("Seeds: 0-3\n", "Seeds:\t0-3\n", ":8: expected a space behind 'Seeds:'"),
        (
            "#\n# Primary",
            "\n# Primary",
            ":6: 'Primary measure:' is not in",
        ),
        ("Seeds: 0-3\n", "Seeds: 0-3\n# Seeds: 4\n", ":9: 'Seeds:' stands there twice"),
        ("# A study", "\n# A study", ":7: 'Primary measure:' is not in"),
        ("tier: study\n", "tier: study\n  # Seeds: 4\n", ":15: 'Seeds:' is not in"),
    ],
)
def test_a_fact_that_would_not_be_read_as_one_is_refused_at_its_line(
    project, old, new, told
):
    assert old in HEAD
    (project / PATH).write_text(HEAD.replace(old, new, 1))
    refused(f"E-CONFIG: {PATH}{told}", heads.read, project)


def test_a_head_that_is_no_text_is_refused(project):
    (project / PATH).write_bytes(HEAD.replace("A study", "\xe9").encode("latin-1"))
    told = f"E-CONFIG: {PATH}: not UTF-8 at byte 2"
    refused(told, sources.find(project, "pesc").decides, "mine")


def test_a_pool_that_stopped_early_says_why(project):
    add_run(project, 0)
    path = project / PATH
    path.write_text(
        path.read_text().replace("# Seeds:", "# Stopped: no disk\n# Seeds:")
    )
    said = facts(project)
    assert said["Stopped early"] == "1 of 4 seeds ran: no disk"
    assert "Still running" not in said
    assert "Found" in said


@pytest.mark.parametrize(
    "spread",
    ["other", "other: pesc/a/nll less pesc/b/nll", "pesc/other"],
)
def test_a_chance_is_simulated_from_the_measure_that_stands_on_record(project, spread):
    path = project / PATH
    path.write_text(path.read_text().replace("record: other", f"record: {spread}"))
    shutil.copy(path, project / "notebooks" / "01_pesc.other.yaml")
    effects = [0.2, 0.5, 0.9]
    for seed, effect in enumerate(effects):
        add_run(project, seed, protocol="other", a=2 + effect)
    chance = sees(np.array(effects)[:, None], 0.5, 4)
    assert facts(project)["Chance to see it"] == f"{chance:.0%} with 4 seeds"


def test_another_measure_stands_in_where_no_pool_has_the_arms(project):
    path = project / PATH
    text = path.read_text().replace("less pesc/b/nll", "less pesc/c/nll")
    path.write_text(text)
    for seed in range(3):
        add_run(project, seed, protocol="other", a=1 + seed / 10)
    stands = "other: pesc/a/nll less pesc/b/nll"
    path.write_text(text.replace("record: other", f"record: {stands}"))
    chance = sees(np.array([-1, -0.9, -0.8])[:, None], 0.5, 4)
    assert facts(project)["Chance to see it"] == f"{chance:.0%} with 4 seeds"


UNDESIGNED = {"02_router_init.nano", "08_routing.nano"}  # their pages say no design


def test_what_decides_a_claim_was_designed_before_with_seeds_and_a_meaning():
    """But for two of the first protocols, whose claims nothing else measures."""
    without = set()
    for path in (ROOT / "notebooks").glob("*.yaml"):
        head = path.read_text().partition("\ntier:")[0]
        if "# Decides: " in head:
            designed = heads.MARK in head and "# Seeds: " in head
            without |= set() if designed else {path.stem}
    assert without == UNDESIGNED


def test_a_pool_at_fixed_rates_has_a_pool_of_other_seeds_that_chose_them():
    """Of one design `x` it is `x_tuning` or `x_rates`; of `fixed` it is `tuning`."""
    fixed = {}
    for path in (ROOT / "notebooks").glob("*.yaml"):
        text = path.read_text()
        if "\nfixed_rates: " in text:
            fixed[path] = text
    assert fixed
    for path, text in fixed.items():
        name, _, protocol = path.stem.partition(".")
        root = protocol.removesuffix("fixed")
        chosen = [f"{name}.{root}tuning", f"{name}.{protocol}_tuning"]
        chosen += [f"{name}.{protocol}_rates"]
        paths = [path.with_name(f"{one}.yaml") for one in chosen]
        others = [other for other in paths if other.is_file()]
        assert others, f"{path.name}: no pool chooses its rates"
        for other in others:
            assert seeds(text).isdisjoint(seeds(other.read_text()))


def test_fixed_rates_are_those_of_the_least_mean_loss_and_none_is_at_an_end(pools):
    """Of every pool on record that chose them, over all of its seeds."""
    checked = 0
    for path in (ROOT / "notebooks").glob("*.fixed.yaml"):
        name = path.stem[3:].partition(".")[0]
        pool = pools(name).get("tuning")
        if pool is None:
            continue
        designed = seeds(
            path.with_name(path.name.replace("fixed", "tuning")).read_text()
        )
        assert set(pool.seeds) == designed
        grid = lists.rates("rates", pool.runs[0].settings["rates"])
        fixed = lists.rates_by_name("fixed_rates", setting(path, "fixed_rates"))
        for arm, rate in fixed.items():
            losses = {}
            for tried in grid:
                losses[tried] = pool.average(f"{name}/rate/{arm}/{tried:g}")
            assert min(losses, key=losses.get) == rate, arm
            assert rate not in (min(grid), max(grid)), arm
            checked += 1
    assert checked


def setting(path, name):
    return yaml.safe_load(path.read_text())[name]


def seeds(text):
    (line,) = [part for part in text.splitlines() if part.startswith("# Seeds: ")]
    return set(lists.seeds("Seeds", line.removeprefix("# Seeds: ")))
