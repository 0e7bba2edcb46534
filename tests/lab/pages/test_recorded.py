"""The list of recorded runs: seeds in several files, and somebody's own notebook."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moebook.lab.pages import pages
from moebook.lab.records import Run, Value, write_run
from moebook.lab.run import sources

ROOT = Path(__file__).parents[3]


def ran(seed, arm, *, day, minutes, cpu="X 9", known="abcdef0"):
    """A run of one arm; each of its numbers is its own."""
    manifest = {
        "date": f"2026-01-0{day}T23:00:00+00:00",
        "seconds": 60.0 * minutes,
        "peak_memory": minutes * 10**9,
        "commit": {"id": known, "dirty": False},
        "environment": {"cpu": cpu, "cores": 2, "accelerator": None},
    }
    values = [Value(f"pesc/{arm}/{n}", 1.0, "ratio") for n in range(minutes)]
    return Run(
        "pesc", "nano", "study", seed, tuple(values), arms=(arm,), manifest=manifest
    )


@pytest.fixture
def project(tmp_path):
    """A project whose pesc ran with two seeds, each in two files."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for seed in (0, 3):
        late = {"day": 5 + seed, "minutes": 3, "cpu": "Y 8", "known": "1234567"}
        keep(tmp_path, ran(seed, "dense", day=2, minutes=20))
        keep(tmp_path, ran(seed, "sparse", **late))
    return tmp_path


def keep(project, run):
    place = project / "results" / run.notebook / run.protocol
    write_run(place / f"{run.seed}.{'_'.join(run.arms)}.parquet", run)


def test_of_a_seed_in_several_files_all_of_them_are_told(project):
    page = pages.recorded(project)
    for fact in (
        "2 seeds: 0, 3<br>23&nbsp;values&nbsp;each<",
        "23 min 0 s, 20.0 GB on X 9, 2 cores and Y 8, 2 cores<",
        ">2026-01-02; ",
        "commit abcdef0<",
        ">2026-01-08; ",
        "commit 1234567<",
    ):
        assert fact in page, fact
    told = "seeds 0, 3, each 23 min 0 s, 20.0 GB on X 9"
    assert told in sources.overview(project)


def test_seeds_that_ran_other_arms_do_not_count_as_equal(project):
    keep(project, ran(9, "sparse", day=9, minutes=3))
    page = pages.recorded(project)
    assert "3 seeds: 0, 3, 9<br>3 to 23&nbsp;values&nbsp;each<" in page
    told = "seeds 0, 3, 9, the last 3 min 0 s, 3.0 GB on X 9"
    assert told in sources.overview(project)


def test_a_span_of_seeds_does_not_break_over_lines(project):
    for seed in (1, 2):
        keep(project, ran(seed, "sparse", day=9, minutes=3))
    assert "4 seeds: 0\u2060–\u20603<br>" in pages.recorded(project)


def test_somebodys_own_notebook_is_listed_by_its_name(project):
    toy = project / "notebooks" / "30_mine.ipynb"
    shutil.copy(project / "notebooks" / "01_pesc.ipynb", toy)
    keep(project, replace(ran(0, "dense", day=2, minutes=1), notebook="mine"))
    assert "<b>mine</b><br>nano (committed)" in pages.recorded(project)
