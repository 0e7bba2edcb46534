"""YAML is the same whether libyaml reads it or PyYAML alone."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from moebook.errors import Refusal
from moebook.storage import documents
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("moebook", "notebooks", "recipes")
REFUSED = (
    "a: &x 1\nb: *x\n",
    "a: !!str 1\n",
    "a: ! x\n",
    "a: on\n",
    "a: 012\n",
    "- 1\n- x: 1:30\n",
    "a: {b: 1, b: 2}\n",
    "a: 1\n\ttop: 2\n",
    "a: 'open\n",
    "%YAML 2.0\n---\na: 1\n",
    "a: " + "[" * 1999,  # deeper than Python's stack
    "a: 1\n---\nb: 2\n",
    "? [a]\n: 1\n",
    "a: \x01\n",
    "<<: 1\n",
    "=: 1\n",
    "- " * 100_000 + "a",  # deeper than the stack of a program in C
    "? " * 100_000 + "a",
)


@pytest.fixture(scope="module")
def plain():
    """The module as it is where PyYAML was built without libyaml."""
    spec = spec_from_file_location("plain_documents", documents.__file__)
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(yaml, "CSafeLoader")
        spec.loader.exec_module(module)
    return module


def outcome(module, path, text=None):
    """What a module reads, or the code of its refusal."""
    try:
        return module.read_places(path, text)
    except Refusal as refusal:
        return refusal.code


def test_both_loaders_read_every_file_of_the_project_alike(plain):
    assert plain._SAFE is not documents._SAFE
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.yaml")]
    assert len(paths) > 50
    for path in paths:
        assert outcome(plain, path) == outcome(documents, path)


@pytest.mark.parametrize("text", [*REFUSED, "", "a: '012'\n", "a: |\n  012\n"])
def test_both_loaders_take_or_refuse_a_text_alike(plain, text):
    told = outcome(documents, Path("notebooks/x.yaml"), text)
    assert outcome(plain, Path("notebooks/x.yaml"), text) == told
    assert (told == "E-CONFIG") is (text in REFUSED)


@pytest.mark.parametrize("read", [documents.read_json, documents.read_yaml])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(36, "File name too long"), "E-OS: .* cannot be read: OSError"),
        (PermissionError(13, "Permission denied"), "E-PERM: .* cannot be read"),
        (FileNotFoundError(2, "No such file"), "E-NOFILE: .* is missing"),
    ],
    ids=["long", "barred", "missing"],
)
def test_a_path_that_cannot_be_looked_at_is_told_in_one_line(
    read, error, message, tmp_path, monkeypatch
):
    def stat(*_, **__):
        raise error

    monkeypatch.setattr(Path, "stat", stat)
    refused(message, read, tmp_path / "x.yaml")
