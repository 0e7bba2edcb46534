"""Finding notebooks, and reading protocols without ever running what they hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from moebook.errors import Refusal
from moebook.notebook import sources


def test_a_notebook_is_found_by_its_short_name_alone(fresh: Path, tmp_path: Path) -> None:
    toy = sources.find(fresh, "toy")
    assert (toy.name, toy.title, toy.path.name) == ("toy", "A toy", "01_toy.ipynb")
    assert (toy.findings, toy.protocols) == (False, ["smoke", "cpu", "nano", "study"])
    assert list(sources.notebooks(fresh)) == ["toy"]
    for name in ("tyo", "01_toy", "../toy", "https://x.org/toy.ipynb", ""):
        with pytest.raises(Refusal, match=r"E-NOTEBOOK: unknown notebook.*one of: toy"):
            sources.find(fresh, name)
    with pytest.raises(Refusal, match="E-NOFILE"):
        sources.find(tmp_path / "empty", "toy")
    for name in ("02_toy.ipynb", "01_toy_findings.ipynb"):
        shutil.copy(toy.path, toy.path.with_name(name))
    with pytest.raises(Refusal, match=r"01_toy\.ipynb and 02_toy\.ipynb"):
        sources.notebooks(fresh)
    toy.path.unlink()
    findings = sources.find(fresh, "toy_findings")
    assert (findings.findings, findings.protocols) == (True, ["cpu"])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"parameters"', '"other"', "tagged 'parameters'"),
        ("tier: str", "scale: str", "must declare tier"),
        ('"nbformat": 4', '"nbformat": 3, "worksheets": []', "nbformat 4"),
        ('"cells": [', '"cells": ', "cut off"),
    ],
)
def test_damaged_old_and_untagged_notebooks_are_refused(
    fresh: Path, old: str, new: str, reason: str
) -> None:
    path = fresh / "notebooks" / "01_toy.ipynb"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(Refusal, match=f"E-NOTEBOOK.*{reason}"):
        sources.find(fresh, "toy")


def test_a_protocol_is_its_file_and_its_tier(fresh: Path) -> None:
    toy = sources.find(fresh, "toy")
    assert toy.settings("smoke") == {"tier": "smoke", "top_k": 1}
    assert toy.settings("cpu") == {"tier": "cpu"}
    assert toy.settings("nano") == {"tier": "study", "top_k": 4}
    assert toy.design("nano") == {"tier": "study", "top_k": 4, "fate": "well"}
    with pytest.raises(Refusal, match=r"E-PROTOCOL: toy has no protocol 'nan'.*mean 'nano'"):
        toy.settings("nan")
    (fresh / "notebooks" / "01_toy.nano.yaml").write_text("tier: smoke\n")
    with pytest.raises(Refusal, match=r"E-CONFIG.*tier = 'smoke'; expected study, gpu, paper"):
        toy.settings("nano")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top_k: 1\ntop_k: 2\n", r"E-CONFIG: 01_toy.smoke.yaml:2:1: top_k is given twice"),
        ("top_k: 1\n", r"E-CONFIG: 01_toy.smoke.yaml: tier = 'cpu'; expected smoke"),
        ("top_k: !!python/tuple [1]\n", r"E-CONFIG: 01_toy.smoke.yaml:1:8: YAML tag"),
        ("top_k: !!int '1'\n", r"E-CONFIG.*1:8: YAML tag"),
        ("a: !!omap []\n", r"E-CONFIG.*1:4: YAML tag"),
        ("top_k: &x 1\nfate: *x\n", r"E-CONFIG.*1:8: YAML anchor"),
        ("top_k: [1, 2]\n", r"E-CONFIG.*1:8: YAML flowsequencestart"),
        ("top_k: {a: 1}\n", r"E-CONFIG.*1:8: YAML flowmappingstart"),
        ("top_k:\n  a: 1\n", r"E-CONFIG.*one flat mapping"),
        ("- 1\n", r"E-CONFIG.*1:1: YAML blocksequencestart"),
        ("just text\n", r"E-CONFIG.*1:1: expected name: value"),
        ("%YAML 1.1\n---\ntop_k: 1\n", r"E-CONFIG.*1:1: YAML directive"),
        ("top_k: 1\n---\ntop_k: 2\n", "E-CONFIG"), ("top_k: 2026-13-45\n", "E-CONFIG"),
        ("top_k: 'open\n", r"E-CONFIG: 01_toy.smoke.yaml:2:1"), ("top_k: =\n", "E-CONFIG"),
        ("top_k: 1\n\ttop_k", r"E-CONFIG: 01_toy.smoke.yaml:2:1"), ("<<: 1\n", "E-PARAMETER"),
        ("top_k: 2026-01-01\n", r"E-TYPE: 01_toy.smoke.yaml:1:1: top_k"),
        ("top_k:\n", r"E-TYPE.*expected int, found NoneType"),
        ("topk: 1\n", r"E-PARAMETER: 01_toy.smoke.yaml:1:1.*did you mean 'top_k'"),
        ("fate: well\ntop_k: 0\n", r"E-RANGE: 01_toy.smoke.yaml:2:1: top_k = 0"),
        ("fate: \xff\n", r"E-CONFIG.*not UTF-8 at byte 6"),
    ],
)  # fmt: skip
def test_a_protocol_file_that_is_no_flat_mapping_is_refused_at_its_place(
    fresh: Path, text: str, message: str
) -> None:
    (fresh / "notebooks" / "01_toy.smoke.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(Refusal, match=message):
        sources.find(fresh, "toy").settings("smoke")


def test_a_protocol_file_reads_as_papermill_reads_it(tmp_path: Path) -> None:
    text = "\ufeff# sizes\r\na: 1\r\nb: 1.0e-5\r\nc: true\r\nd: 'x: y'\r\ne: nano\r\n"
    path = tmp_path / "01_toy.cpu.yaml"
    path.write_bytes(text.encode())
    found = {name: value for name, (value, _) in sources.read_flat(path).items()}
    assert found == yaml.safe_load(text) == {"a": 1, "b": 1e-5, "c": True, "d": "x: y", "e": "nano"}


def test_the_overview_shows_parameters_and_what_was_never_measured(fresh: Path) -> None:
    text = sources.overview(fresh)
    assert "toy  A toy (notebooks/01_toy.ipynb)" in text
    assert "-p top_k int   = 2  experts per token [1, 64]" in text
    assert text.count("not measured") == 4
    durations = {4.24: "4.2 s", 59.99: "60.0 s", 200: "3 min 20 s", 3900: "1 h 5 min"}
    assert {seconds: sources.duration(seconds) for seconds in durations} == durations
