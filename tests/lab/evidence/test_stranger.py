"""A program that shares nothing with the package reaches the ledger's verdicts from the files."""

import ast
import sys
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from moebook.lab import papers
from tests import stranger

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "stranger.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with results, protocols' files and claims, and nothing else."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "results").symlink_to(ROOT / "results")
    (folder / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.yaml"):
        (folder / "notebooks" / path.name).symlink_to(path)
    (folder / "papers").mkdir()
    for path in Path(papers.__file__).parent.glob("*/claims.yaml"):
        (folder / "papers" / path.parent.name).mkdir()
        (folder / "papers" / path.parent.name / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def read():
    """Pools as the program reads them, each of them once."""
    return cache(stranger.Pool)


@pytest.fixture
def told(files, read, monkeypatch):
    """Run the program, which another test finds to import nothing of ours."""
    monkeypatch.setattr(stranger, "Pool", lambda place: read(place.resolve()))
    return lambda: stranger.main(files)


def test_the_program_takes_nothing_from_the_package():
    taken = set()
    for node in ast.walk(ast.parse(PROGRAM.read_text())):
        if isinstance(node, ast.Import):
            taken |= {name.name.partition(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            taken.add(node.module.partition(".")[0])
    known = {*sys.stdlib_module_names, "numpy", "pyarrow", "scipy", "yaml"}
    assert taken <= known


def test_a_stranger_reaches_the_same_verdict_of_every_claim_at_every_scale(
    told, ledger
):
    ours = {}
    for row in ledger:
        if not row.claim.ended:
            ours[row.claim.id] = {one.scale: one.label for one in row.verdicts}
    theirs = told()
    assert theirs.keys() == ours.keys()
    apart = {
        name: (theirs[name], ours[name]) for name in ours if theirs[name] != ours[name]
    }
    assert apart == {}
    decided = [*chain.from_iterable(scales.values() for scales in ours.values())]
    assert len(decided) > 150
    assert len({*decided}) > 5


def test_a_protocol_that_decides_no_more_changes_what_the_stranger_says(files, told):
    path = files / "notebooks" / "01_pesc.real_chat.yaml"
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace("# Decides: ", "# "))
    assert told()["pesc.costs-more-than-dense"]["135 M"] == "exploratory"
