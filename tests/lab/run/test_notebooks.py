"""Every notebook of the book through papermill, with the protocols that it has."""

import json
import tempfile
import warnings
from pathlib import Path

import pytest

from moebook.lab import records
from moebook.lab.records import store
from moebook.lab.run import parameters, sources
from moebook.lab.run.session import VALUE

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sources.notebooks(ROOT)
RUN = [name for name, notebook in NOTEBOOKS.items() if not notebook.findings]
FINDINGS = [name for name in NOTEBOOKS if name not in RUN]


@pytest.fixture
def run(recipes, forks):
    """Run a notebook as the command does; what its file holds must be what its page shows."""

    def by_command(name, protocol, *options):
        # Its name is short enough for sockets, unlike tmp_path's.
        with tempfile.TemporaryDirectory() as temporary:
            forks.begin(recipes, temporary, "run", name, f"--on={protocol}", *options)
            assert forks.end() == 0, forks.told.read_text()
        (page,) = (recipes / "runs" / "mine" / name).glob("*.ipynb")
        run = records.read_run(page.with_suffix(".parquet"))
        assert run.manifest.get("unreadable") is None
        cells = json.loads(page.read_text())["cells"]
        outputs = []
        for cell in cells:
            outputs += [output.get("data", {}) for output in cell.get("outputs", [])]
        shown = [data[VALUE] for data in outputs if VALUE in data]
        assert [
            json.loads(json.dumps(records.plain(value))) for value in run.values
        ] == shown
        return run

    return by_command


# Parts that a notebook repeats for each arm, target or op: here some of them. All run in
# `make book TIER=smoke`, some arms alone each day in `make soak`, each op in test_bench.py.
FEWER = {
    "pesc": {"arms": "sparse"},
    "router_init": {"arms": "dense,trsu"},
    "rocket": {
        "arms": "mixture,random_lora",
        "targets": "kinship_told",
        "rates": "0.01",
    },
    "esft": {"arms": "fft,gate", "tasks": "isa"},
    "kernels": {"ops": "route,adapters"},
    "rivals": {"arms": "smear,lorahub,rocket", "targets": "kinship_told"},
    "together": {"arms": "pesc,lora"},
    "banks": {"draws": "1"},
}


@pytest.mark.parametrize("name", RUN)
def test_a_notebook_runs_at_smoke_and_its_values_are_in_the_page(name, run):
    """With the arms of its page, or fewer."""
    notebook = NOTEBOOKS[name]
    arms = str(notebook.defaults.get("arms", ""))
    set_here = {"arms": arms} if arms else {}
    set_here |= FEWER.get(name, {})
    options = [word for each in set_here.items() for word in ("-p", "=".join(each))]
    found = run(name, "smoke", *options)
    assert found.values
    assert found.tier == "smoke"
    assert sorted(found.arms) == sorted(
        filter(None, set_here.get("arms", "").split(","))
    )
    if arms:
        assert notebook.settings("smoke")["arms"] == "all", (
            "in the book every cell is run"
        )


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_are_drawn_from_the_pools_that_are_there(name, run, here):
    if name == FINDINGS[0]:
        assert run(name, "cpu").protocol == "cpu"
    else:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            here(name, {"tier": "cpu"})
        assert [
            str(one.message) for one in told if "W-FIGURE" in str(one.message)
        ] == []


@pytest.mark.parametrize(
    "name", [name for name in RUN if "class" in NOTEBOOKS[name].protocols]
)
def test_a_course_has_a_change_to_try_and_runs_of_at_most_90_seconds_that_record_what_to_see(
    name,
):
    notebook = NOTEBOOKS[name]
    pool = store.pool(name, "class", ROOT)
    facts = dict(line.split(": ", 1) for line in notebook.head("class"))
    assert [*facts] == ["Try", "See", "Ask"]
    assert parameters.read_options(notebook.parameters, [facts["Try"]])
    notebook.agrees(pool)
    assert len(pool.values(facts["See"])) == len(pool.runs) >= 3
    assert max(run.manifest["cpu_seconds"] for run in pool.runs) <= 90


@pytest.mark.parametrize("name", RUN)
def test_every_protocol_of_a_notebook_sets_parameters_that_it_has(name):
    notebook = NOTEBOOKS[name]
    tiers = [notebook.settings(protocol)["tier"] for protocol in notebook.protocols]
    assert set(tiers) == set(records.TIERS)
