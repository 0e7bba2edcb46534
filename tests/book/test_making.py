"""What is executed and made anew when a book is built again, and what is not."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from moebook import storage
from moebook.lab import records
from moebook.lab.pages import book, generated
from moebook.lab.records import store
from moebook.lab.run import freshness, warm
from tests.lab.conftest import REPOSITORY, TOY, make_project
from tests.refusals import refused

FINDINGS = """\
from pathlib import Path
print(sorted(path.name for path in Path("results").rglob("*.parquet")))"""


@pytest.fixture
def project(tmp_path, monkeypatch, warmed):
    """A project with a notebook and its findings, whose pages are neither made nor rendered."""
    folder = make_project(tmp_path / "toy", *TOY)
    tier = 'tier: str = "cpu"  # scale {smoke, cpu}'
    declared = new_code_cell(tier, metadata={"tags": ["parameters"]})
    begin = "from moebook.lab.run import begin\nrun = begin(In, globals())"
    findings = new_notebook(
        cells=[declared, new_code_cell(begin), new_code_cell(FINDINGS)]
    )
    storage.write(folder / "notebooks" / "01_toy_findings.ipynb", json.dumps(findings))
    (folder / "results").mkdir()
    monkeypatch.setattr(book, "build", lambda *given: None)
    monkeypatch.setattr(book, "_pages_are_current", lambda folder: True)
    monkeypatch.setattr(book, "PREPARE", "gc:collect")
    monkeypatch.setattr(warm, "warm", lambda *given: nullcontext(warmed))
    return folder


def printed(project):
    """What the page of the findings prints."""
    page = json.loads(
        (project / "book" / "notebooks" / "01_toy_findings.ipynb").read_text()
    )
    return "".join(out.get("text", "") for out in page["cells"][-1]["outputs"])


def test_only_what_has_changed_is_executed_again(project, capsys, monkeypatch):
    book.make("smoke", None, project)
    executed = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(":")[0] for line in executed) == [
        "toy at smoke",
        "toy_findings at cpu",
    ]
    assert all(line.endswith(" s") for line in executed)
    assert printed(project) == "[]\n"
    page = project / "book" / "notebooks" / "01_toy.ipynb"
    assert records.read_run(page.with_suffix(".parquet")).manifest[
        "executed"
    ] == storage.digest(page)

    source = project / "notebooks" / "01_toy.ipynb"
    with monkeypatch.context() as patch:  # nothing is started
        patch.setattr(warm, "warm", None)
        before = page.stat().st_mtime_ns
        book.make("smoke", None, project)
    same = "unchanged, not executed again"
    assert (
        capsys.readouterr().out
        == f"toy at smoke: {same}\ntoy_findings at cpu: {same}\n"
    )
    assert page.stat().st_mtime_ns == before

    with monkeypatch.context() as patch:  # nor for a sentence, which its page gets
        patch.setattr(warm, "warm", None)
        source.write_text(source.read_text().replace("# A toy", "# A toy\\nOne more."))
        book.make("smoke", None, project)
    assert capsys.readouterr().out.count(same) == 2
    assert "One more." in page.read_text()
    before = page.stat().st_mtime_ns

    (project / "results" / "new.parquet").touch()
    page.write_text(page.read_text() + " ")  # altered: it comes back
    book.make("smoke", None, project)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"toy at smoke: {same}"
    assert second.endswith(" s")
    assert printed(project) == "['new.parquet']\n"
    assert page.stat().st_mtime_ns != before
    assert not page.read_text().endswith(" ")
    refused("E-NOTEBOOK: unknown notebook 'tyo'", book.make, "smoke", "tyo", project)


def test_a_book_stops_at_a_figure_that_no_reader_can_read_and_a_run_does_not(project):
    source = project / "notebooks" / "01_toy_findings.ipynb"
    notebook = json.loads(source.read_text())
    fault = "'0.06' lies over '0.07'"
    notebook["cells"][-1]["source"] = (
        f'import warnings\nwarnings.warn("W-FIGURE: {fault}")'
    )
    notebook["cells"][-1]["metadata"] = {"mystnb": {"figure": {"name": "fig-toy"}}}
    source.write_text(json.dumps(notebook))
    book.make("smoke", None, project)  # whose last step, to build, is none here
    book._check(project, "01_toy", "smoke")
    told = f"E-BOOK: book/notebooks/01_toy_findings.ipynb: figure fig-toy: {fault}"
    refused(told, book._check, project, "01_toy_findings", "smoke")


MADE_OF = [  # files, and whether pages are still current when one of them has changed
    ("moebook/a.py", False),
    ("moebook/lab/pages/templates/a.md", False),
    ("moebook/lab/papers/a.csv", False),
    ("notebooks/01_toy.nano.yaml", False),
    ("notebooks/01_toy.ipynb", False),
    ("results/toy/nano/0.parquet", False),
    ("results/faults.json", False),
    ("requirements.lock", False),
    ("book/notebooks/01_toy.parquet", False),
    ("book/found/a.md", False),
    ("recipes/gpu.yaml", False),
    ("_config.yml", False),
    ("book/_generated/a.md", False),
    ("book/_generated/a.svg", False),
    ("README.md", True),
    ("book/intro.md", True),
]


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A project with generated pages that are current."""
    for name, _ in MADE_OF:
        storage.write(tmp_path / name, name)
    monkeypatch.setattr("moebook.storage.files.PACKAGE", tmp_path / "moebook")
    place = tmp_path / "book" / "_generated"
    freshness.seal(place, freshness.digest(tmp_path, freshness.SHOWN))
    return tmp_path


def is_current(folder):
    made_of = freshness.digest(folder, freshness.SHOWN)
    return freshness.is_current(folder / "book" / "_generated", made_of)


@pytest.mark.parametrize(
    ("name", "current"), [*MADE_OF, ("book/_generated/made_of.json", False)]
)
@pytest.mark.parametrize("change", ["altered", "gone"])
def test_generated_pages_are_current_until_what_they_are_made_of_changes(
    pages, name, current, change
):
    assert is_current(pages)
    file = pages / name
    if change == "altered":
        text = file.read_text()
        file.write_text(text[:-1] + "x")
        assert is_current(pages) == current
        file.write_text(text)
        assert is_current(pages)
    else:
        file.unlink()
        assert is_current(pages) == current


def test_what_findings_are_forked_from_reads_past_a_damaged_run_of_which_they_are_told(
    tmp_path, monkeypatch
):
    for name in ("notebooks/01_pesc.ipynb", "results/pesc/nano/0.parquet"):
        storage.write(tmp_path / name, (REPOSITORY / name).read_bytes())
    damaged = tmp_path / "results" / "pesc" / "nano" / "0.parquet"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    (tmp_path / "_config.yml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generated, "RENDERER", ())
    monkeypatch.setattr(generated, "committed", lambda *_: {})
    generated.prepare()
    refused(f"E-RUN: {damaged}", store.pools, "pesc")


RUN = records.Run(
    "toy", "cpu", "cpu", 0, (), manifest={"seconds": 1.0, "executed": "a"}
)


def copy_of_a_run(sentence="One.", heading="# A toy", comment="", mean=1.0, tags=()):
    """An executed notebook: text, and a cell that printed a number."""
    printed = new_output("stream", name="stdout", text=f"{mean}\n")
    code = new_code_cell(
        f"print(mean){comment}",
        id="code",
        outputs=[printed],
        metadata={"tags": [*tags]},
    )
    text = new_markdown_cell(f"{heading}\n\n{sentence}", id="text")
    return json.dumps(new_notebook(cells=[text, code]))


def test_a_sentence_of_a_notebook_concerns_its_own_page_alone(pages):
    copies = [
        pages / "notebooks" / "01_toy.ipynb",
        pages / "book" / "notebooks" / "01_toy.ipynb",
    ]

    def found(run=RUN, **changes):
        for copy in copies:
            storage.write(copy, copy_of_a_run(**changes))
        records.write_run(copies[1].with_suffix(".parquet"), run)
        return [freshness.digest(pages, freshness.SHOWN), freshness.digest(pages)]

    before = found()
    other_copy = replace(RUN, manifest={**RUN.manifest, "executed": "b"})
    assert found(other_copy, sentence="Two.") == before
    slower = replace(RUN, manifest={**RUN.manifest, "seconds": 2.0})
    assert found(slower)[0] != before[0]
    for change in (
        {"heading": "# Toys"},
        {"heading": "# A toy\n\n## Toys"},
        {"comment": "  # of all"},
        {"mean": 2.0},
        {"tags": ["remove-input"]},
    ):
        assert not set(found(**change)) & set(before), change


def test_a_new_file_or_library_counts_too(pages, monkeypatch):
    storage.write(pages / "results" / "toy" / "nano" / "1.parquet", "new")
    assert not is_current(pages)
    (pages / "results" / "toy" / "nano" / "1.parquet").unlink()
    assert is_current(pages)
    monkeypatch.setattr("moebook.runtime.versions", lambda: {"torch": "9"})
    assert not is_current(pages)
    shutil.rmtree(pages / "book" / "_generated")
    assert not is_current(pages)
