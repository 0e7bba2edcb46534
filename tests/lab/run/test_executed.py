"""Executed notebooks: what a page may show, and how `moebook compare` reads a reader's own."""

import base64
import json
import re
import shutil
import struct
import zlib
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace

import lxml.html
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter
from nbformat.v4 import (
    new_code_cell,
    new_markdown_cell,
    new_notebook,
    new_output,
    new_raw_cell,
)

from moebook import storage
from moebook.lab import records
from moebook.lab.pages.compare import compare
from moebook.lab.records import Curve, Run, Value
from moebook.lab.run import publish, session
from moebook.lab.run.session import CURVE, GLUE, NOTE, VALUE, table
from moebook.methods import upcycling
from tests.lab.conftest import ran
from tests.refusals import refused

FOLDER = Path("/srv/project/toy")


def _published(*outputs):
    cell = new_code_cell("x", outputs=list(outputs), execution_count=1)
    clean, counts = publish.clean(new_notebook(cells=[cell]), FOLDER)
    return clean["cells"][0]["outputs"], counts


def _shown(mime, content):
    outputs, _ = _published(new_output("display_data", {mime: content}))
    return outputs[0]["data"].get(mime) if outputs else None


def _chunk(name, body):
    return (
        struct.pack(">I", len(body))
        + name
        + body
        + struct.pack(">I", zlib.crc32(name + body))
    )


def _png(*extra):
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    data = _chunk(b"IDAT", zlib.compress(b"\x00\x00"))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + data + _chunk(b"IEND", b"")


def test_our_own_warnings_are_found_each_once_in_their_order():
    of_python = "/x/effects.py:30: UserWarning: {}\n  check()\n"
    idle = "W-IDLE: changed without effect in this run: lr (rates)"
    texts = (idle, "W-BASE: 2 LoRAs", "no warning of ours", idle)
    cells = []
    for text in texts:
        stream = new_output("stream", name="stderr", text=of_python.format(text))
        cells.append(new_code_cell("x", outputs=[stream], execution_count=1))
    shown = new_output("stream", name="stdout", text="Warning: W-SHOWN: x\n")
    cells.append(new_code_cell("x", outputs=[shown], execution_count=1))
    found = publish.warned(new_notebook(cells=cells))
    assert found == [idle, "W-BASE: 2 LoRAs"]


def test_what_cannot_be_read_in_a_figure_is_told_with_its_name():
    of_python = "/x/charts.py:500: UserWarning: {}\n  return finished(figure)\n"
    figure = {"mystnb": {"figure": {"name": "fig-a", "caption": "A."}}}
    cells = []
    for text, metadata in (
        ("W-FIGURE: 'a' lies over 'b'", figure),
        ("W-IDLE: lr", figure),
        ("W-FIGURE: 'nan' says NaN", {}),
    ):
        stream = new_output("stream", name="stderr", text=of_python.format(text))
        cells.append(new_code_cell("x", outputs=[stream], metadata=metadata))
    assert publish.unreadable(new_notebook(cells=cells)) == [
        "figure fig-a: 'a' lies over 'b'",
        "figure of In [3]: 'nan' says NaN",
    ]


def test_text_and_tables_stay_and_colours_stderr_paths_and_other_types_go():
    written = "<script>evil()</script>"
    assert _shown("text/plain", written) == written, (
        "a model may write HTML: it stays text"
    )
    outputs, counts = _published(
        new_output("stream", name="stdout", text="\x1b[31mred\x1b[0m\tx\n"),
        new_output("stream", name="stderr", text="Kernel is running over TCP"),
    )
    assert [output["text"] for output in outputs] == ["red\tx\n"]
    assert counts == {"control": 2, "stderr": 1}
    text = "/srv/project/toy/notebooks/a.py /home/me/x/b.txt 'C:\\Users\\me\\c.txt' 3/4 a/b"
    assert _shown("text/plain", text) == "notebooks/a.py .../b.txt '.../c.txt' 3/4 a/b"
    url = "https://example.org/home/me/data x:/y"
    assert publish.scrub(url, FOLDER) == (url, 0)
    for mime in (
        "application/javascript",
        "application/vnd.jupyter.widget-view+json",
        "text/vnd.mermaid",
        "text/markdown",
        "text/latex",
        "image/jpeg",
        "image/svg+xml",
        "application/pdf",
        "application/papermill.record/text/html",
    ):
        data = {mime: "alert(1)", "text/plain": "plain"}
        outputs, counts = _published(new_output("display_data", data))
        assert (outputs[0]["data"], counts) == ({"text/plain": "plain"}, {mime: 1})
        assert _shown(mime, "alert(1)") is None
    frame = pd.DataFrame({"a < b": [0.5], "text": ["<img src=x onerror=evil()>"]})
    shown = _shown("text/html", frame.assign(c=float("nan"))._repr_html_())
    assert "NaN" not in shown
    assert "<td>–</td>" in shown
    assert "<style" not in shown
    assert "<img" not in shown
    assert 'class="dataframe"' in shown
    assert "a &lt; b" in shown
    assert "&lt;img src=x onerror=evil()&gt;" in shown


@pytest.mark.parametrize(
    ("facts", "cells"),
    [
        (
            {"device": Path("cpu"), "passes": 1 / 3},
            [("device", "cpu"), ("passes", "0.3333")],
        ),
        ({"one": {"rows": 2}, "two": {"rows": 3}}, [("one", "2"), ("two", "3")]),
        (pd.Series({"loss": 1.5, "rows": 4}), [("loss", "1.5"), ("rows", "4")]),
        (
            pd.DataFrame({"tokens": [10309015], "loss": 2.5}, ["code"]),
            [("code", "10,309,015", "2.5")],
        ),
        (upcycling.Config(top_k=1), [("top_k", "1"), ("combine", "probability")]),
    ],
)
def test_facts_series_frames_and_settings_show_as_tables(facts, cells):
    lines = lxml.html.fromstring(_shown("text/html", table(facts))).iter("tr")
    texts = {tuple(cell.text_content().strip() for cell in line) for line in lines}
    assert texts >= set(cells)


@pytest.mark.parametrize("make", [dict, pd.Series, lambda x: pd.DataFrame({"a": x})])
def test_a_table_has_no_more_lines_and_no_longer_texts_than_pandas_shows(make):
    with pd.option_context("display.max_rows", 8, "display.max_colwidth", 20):
        lines = table(make({place: place for place in range(1000)}))
        assert 8 <= lines.count("<tr") <= 10
        html = table(make({"one": "word " * 10, "two": "word"}))
    assert "<td>word word word wo...</td>" in html
    assert "<td>word</td>" in html


def test_a_time_difference_is_no_count():
    spent = pd.to_timedelta([90], unit="s")
    html = table(pd.DataFrame({"spent": spent, "tokens": [10309015]}))
    assert "0 days 00:01:30" in html
    assert "10,309,015" in html


@pytest.mark.parametrize("names", [["a", "a"], [0, 1], [1, 0]])
def test_columns_are_told_apart_by_their_places(names):
    html = table(pd.DataFrame([["word", 10309015]], columns=names))
    assert re.findall("<td>(.*?)</td>", html) == ["word", "10,309,015"]


@pytest.mark.parametrize(
    ("frame", "head"),
    [
        (pd.DataFrame({"loss": [1]}).rename_axis("step"), ["step", "loss"]),
        (
            pd.DataFrame({"a": [1], "b": [2], "loss": [3]}).set_index(["a", "b"]),
            ["a", "b", "loss"],
        ),
        (pd.DataFrame({"loss": [1]}).rename_axis(columns="task"), ["task", "loss"]),
        (pd.DataFrame({"loss": [1]}).rename_axis("<i>"), ["&lt;i&gt;", "loss"]),
        (pd.DataFrame({"loss": [1]}), ["", "loss"]),
    ],
)
def test_a_table_has_one_row_of_heads(frame, head):
    heads = re.findall(r"<thead>(.*?)</thead>", table(frame), re.DOTALL)
    rows = re.findall(r"<tr.*?>(.*?)</tr>", heads[0], re.DOTALL)
    assert [re.findall("<th>(.*?)</th>", row) for row in rows] == [head]


def test_a_frame_without_lines_is_no_table():
    assert table(pd.DataFrame()) is None
    assert table(pd.DataFrame(columns=["loss"])) is None


def test_floats_have_the_same_digits_alone_and_in_tables_and_no_facts_make_no_table(
    monkeypatch,
):
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)

    def shown(facts):
        return shell.display_formatter.format(facts)[0]

    with pd.option_context("display.max_colwidth", 9, "display.float_format", None):
        session._show_tables()
        for number, digits in ((123456.789, "123,457"), (0.123456, "0.1235")):
            assert shown(number) == {"text/plain": digits}
            assert f"<td>{digits}</td>" in shown({"a": number})["text/html"]
        assert shown({}) == {"text/plain": "{}"}
        # A table is read, a number alone may be copied into code.
        assert shown(-0.5)["text/plain"] == "-0.5"
        signed = pd.DataFrame({"change": [-0.5], "rank": [-1]})
        assert re.findall("<td>(.*?)</td>", table(signed)) == ["−0.5", "−1"]


@pytest.mark.parametrize(
    ("given", "reduced"),
    [
        (
            "<table id='x' onclick='evil()' style='x'><tr><td colspan=2>1</td></tr></table>",
            '<table><tr><td colspan="2">1</td></tr></table>',
        ),
        (
            "<table><tr><td><a href='javascript:evil()'>t</a></table>",
            "<table><tr><td>t</td></tr></table>",
        ),
        (
            f"<table><td class='x'>{'two words ' * 4}</td><td>two words</td></table>",
            f'<table><td class="prose">{"two words " * 4}</td><td>two words</td></table>',
        ),
        ("</div></div><table></table>", "<table></table>"),
        ("<div>no table</div>", None),
        ("<table></table><script>evil()</script><!-- c -->", "<table></table>"),
        ("<table></table><script>evil()", "<table></table>"),
        ("<p>&lt;table></p>", None),
        (
            "<svg><script>1</script></svg><table>&lt;script&gt;</table>",
            "<table>&lt;script&gt;</table>",
        ),
        ("<iframe srcdoc='<table>'>x</iframe>", None),
    ],
)
def test_html_is_reduced_to_tables(given, reduced):
    assert publish.reduced_table(given) == reduced


def test_pictures_notebooks_and_cells_lose_their_metadata_and_keep_the_rest():
    private = (b"tEXt", b"eXIf", b"iTXt", b"zTXt", b"tIME")
    given = base64.encodebytes(
        _png(*(_chunk(name, b"Author\x00me") for name in private))
    )
    outputs, counts = _published(
        new_output("display_data", {"image/png": given.decode()})
    )
    assert base64.b64decode(outputs[0]["data"]["image/png"]) == _png()
    assert counts == {"png metadata": 5}
    assert _shown("image/png", "no picture") is None
    shown = {"tags": ["a"], "mystnb": {"figure": {"caption": "c"}}}
    cell = new_code_cell(
        "x", execution_count=1, metadata=shown | {"execution": {"a": "now"}}
    )
    metadata = {"papermill": {"input_path": "/home/me/a"}, "widgets": {"state": {}}}
    notebook = new_notebook(cells=[cell], metadata=metadata)
    clean, counts = publish.clean(notebook, FOLDER)
    assert (clean["metadata"], clean["cells"][0]["metadata"]) == ({}, shown)
    assert counts == {"widgets": 1}
    assert "papermill" in notebook.metadata, "the given notebook stays as it was"


@pytest.mark.parametrize("new_cell", [new_markdown_cell, new_raw_cell])
def test_attachments_of_text_cells_go_and_are_counted(new_cell):
    token = "hf_" + "a1" * 15
    pasted = {"note.txt": {"text/plain": token}}
    cells = [
        new_cell("a", attachments=pasted),
        new_cell("b", attachments={}),
        new_cell("c", attachments=pasted),
    ]
    clean, counts = publish.clean(new_notebook(cells=cells), FOLDER)
    assert token not in json.dumps(clean)
    assert [cell["source"] for cell in clean["cells"]] == ["a", "b", "c"]
    assert counts == {"attachments": 2}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("hf_" + "a1" * 15, "Hugging Face"),
        ("ghp_" + "a1" * 15, "GitHub"),
        ("sk-" + "a1" * 15, "API key"),
        ("AKIA" + "A1" * 8, "AWS"),
        ("https://me:pass@example.org", "password"),
        ("-----BEGIN RSA PRIVATE KEY-----", "private key"),
        ("x canary-1234 y", "environment variable MY_SECRET"),
        ("p&ss<word>-1234 is it", "environment variable MY_ESCAPED_SECRET"),
        ("schlüssel-geheim", "environment variable MY_OTHER_SECRET"),
    ],
)
def test_a_secret_anywhere_in_the_text_is_refused_and_not_repeated(
    text, kind, monkeypatch
):
    monkeypatch.setenv("MY_SECRET", "canary-1234")
    monkeypatch.setenv("MY_ESCAPED_SECRET", "p&ss<word>-1234")
    monkeypatch.setenv("MY_OTHER_SECRET", "schlüssel-geheim")
    table = {"text/html": f"<table><tr><td>{escape(text)}</table>"}
    outputs = (
        new_output("stream", name="stdout", text=text),
        new_output("display_data", table),
        new_output("display_data", {NOTE: {"known": [text]}}),
    )
    cells = [
        new_code_cell("x", outputs=[output], execution_count=1) for output in outputs
    ]
    for cell in (*cells, new_code_cell(f"token = '{text}'"), new_markdown_cell(text)):
        refusal = refused(
            f"E-SECRET.*{kind}", publish.clean, new_notebook(cells=[cell]), FOLDER
        )
        assert text not in str(refusal)


VALUE_OF = {"name": "toy/a", "value": 0.5, "unit": "share", "items": [0, 1]}
CURVE_OF = {"name": "toy/a", "unit": "nats", "x": [1.0, 2.0], "y": [0.5, 0.25]}


def _kept(mime, content):
    """A notebook with one output that no page shows, after the filter."""
    data = {mime: content, f"{GLUE}text/plain": "0.5"}
    tag = {"name": "toy/a", "mime_prefix": GLUE}
    output = new_output("display_data", data, metadata={"scrapbook": tag, "x": 1})
    outputs, counts = _published(output)
    assert json.loads(json.dumps(outputs[0]["data"])) == data
    assert (outputs[0]["metadata"], counts) == ({"scrapbook": tag}, {})
    cell = new_code_cell("x", outputs=outputs, execution_count=1)
    return json.loads(json.dumps(new_notebook(cells=[cell])))


def test_recorded_values_curves_and_notes_pass_whole_and_are_harvested():
    assert publish.values(_kept(VALUE, VALUE_OF)) == (
        Value("toy/a", 0.5, "share", (0, 1)),
    )
    assert publish.values(
        _kept(VALUE, {k: v for k, v in VALUE_OF.items() if k != "items"})
    )
    assert _kept(NOTE, {"parameters": {"base": "/home/me/model"}}), (
        "as papermill's cell shows it"
    )
    curve = Curve("toy/a", "nats", (1, 2), (0.5, 0.25))
    assert publish.values(_kept(CURVE, CURVE_OF), CURVE) == (curve,)
    parts = (
        {"modules": {"a.py": "1"}},
        {"arms": ["x"], "known": ["x", "y"]},
        {"modules": {"b.py": "2"}},
        {"rows": {"train": "3"}},
        {"environment": {}},
    )
    cells = [cell for part in parts for cell in _kept(NOTE, part)["cells"]]
    assert publish.notes(new_notebook(cells=cells)) == {
        "modules": {"a.py": "1", "b.py": "2"},
        "arms": ["x"],
        "known": ["x", "y"],
        "rows": {"train": "3"},
        "environment": {},
        "files": {},
        "parameters": {},
        "cells": {},
        "begun": "",
    }


@pytest.mark.parametrize(
    ("mime", "content", "message"),
    [
        (VALUE, VALUE_OF | {"value": 2}, "E-VALUE"),
        (VALUE, VALUE_OF | {"seed": 0}, "E-VALUE"),
        (VALUE, ["a"], "E-VALUE"),
        (VALUE, {"name": "a", "value": 0.5}, "E-VALUE"),
        (CURVE, CURVE_OF | {"x": [1.0]}, "E-VALUE"),
        (CURVE, "a", "E-VALUE"),
        (NOTE, "a", ""),
        (NOTE, {"modules": ["a"]}, ""),
        (NOTE, {"other": {}}, ""),
        (NOTE, {"arms": "a"}, ""),
    ],
)
def test_an_error_and_a_value_curve_or_note_that_breaks_a_rule_is_refused(
    mime, content, message
):
    malformed = r"E-OUTPUT: In \[1\]: malformed note"  # when the run is made
    refused(message or malformed, lambda: publish.notes(_kept(mime, content)))
    error = new_output("error", ename="ValueError", evalue="bad", traceback=[])
    refused(r"E-OUTPUT: In \[1\] holds an error: ValueError: bad", _published, error)


PARAMETERS = """\
tier: str = "cpu"  # scale {smoke, cpu, study, gpu, paper}
seed: int = 0  # of everything [0, 100]
steps: int = 100  # steps [1, inf)"""
HERE = {"python": "3.11.2", "cpu": "X 9000", "versions": {"torch": "2.13.0"}}


def values(sparse, dense, seed=0):
    scores = {"sparse": sparse, "dense": dense}.items()
    return tuple(
        Value(f"pesc/{a}/accuracy", x + seed / 1000, "share") for a, x in scores
    )


def cell(source, tags=(), bundles=()):
    outputs = [
        {"output_type": "display_data", "data": data, "metadata": {}}
        for data in bundles
    ]
    facts = {
        "cell_type": "code",
        "metadata": {"tags": [*tags]},
        "execution_count": None,
    }
    return {**facts, "source": source, "outputs": outputs}


def reader(folder, shown, note=None, **parameters):
    """A reader's executed notebook, with what papermill set and the kernel noted."""
    injected = "\n".join(
        ["# Parameters", *(f"{k} = {v!r}" for k, v in parameters.items())]
    )
    bundles = [{VALUE: records.plain(value)} for value in shown]
    bundles += [{NOTE: note}] if note is not None else []
    cells = [
        cell(PARAMETERS, ["parameters"]),
        cell(injected, ["injected-parameters"]),
        cell("run = begin(In, globals())"),
        cell("run.record(...)", bundles=bundles),
    ]
    times = {"duration": 12.34, "end_time": "2026-11-27T09:24:01.629695+00:00"}
    metadata = {"papermill": {"version": "2.7.0", **times}}
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": metadata,
        "cells": cells,
    }
    ran(notebook, **{"tier": "cpu", "seed": 0, "steps": 100} | parameters)
    path = folder / "my_run.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


@pytest.fixture
def empty(tmp_path):
    """A project of two notebooks that nothing was run of."""
    for name in ("00_bases", "01_pesc"):
        page = {"nbformat": 4, "cells": [cell(PARAMETERS, ["parameters"])]}
        storage.write(tmp_path / "notebooks" / f"{name}.ipynb", json.dumps(page))
    return tmp_path


@pytest.fixture
def project(empty):
    """The same with three seeds of a protocol."""
    settings = {"tier": "study", "steps": 600, "base": "nano"}
    facts = {"settings": settings, "manifest": {"environment": HERE}}
    for seed in range(3):
        recorded = values(0.45, 0.40, seed)
        run = Run(
            "pesc", "nano", "study", seed, recorded, arms=("sparse", "dense"), **facts
        )
        records.write_run(empty / "results" / "pesc" / "nano" / f"{seed}.parquet", run)
    return empty


def test_the_readers_run_stands_beside_book_and_paper_with_their_differences(project):
    lines = compare(reader(project, values(0.42, 0.44), steps=50), project).splitlines()
    place = next(
        i for i, line in enumerate(lines) if line.startswith("pesc.sparse-beats-dense:")
    )
    assert lines[0] == "my_run.ipynb: notebook pesc, tier cpu, 2 values"
    assert lines[1].startswith(
        "beside the book's runs at nano, seeds 0, 1, 2; differences (yours"
    )
    assert lines[place + 1].startswith("  paper  twelve benchmarks")
    assert lines[place + 2].startswith(
        "  book   exploratory only at 1 M: +5.0 points (95 %"
    )
    assert lines[place + 3].startswith(
        "  yours  −2.0 points, one value; against the claim so far"
    )
    head = "# Decides: pesc.sparse-beats-dense\ntier: study\nsteps: 600\n"
    storage.write(project / "notebooks" / "01_pesc.nano.yaml", head)
    text = compare(reader(project, values(0.42, 0.44), steps=50), project)
    assert "\n  book   holds at 1 M: +5.0 points (95 %" in text
    text = compare(reader(project, values(0.42, 0.44)), project)
    assert {"  cpu: unknown | X 9000", "  parameter steps: 100 | 600"} <= set(
        text.splitlines()
    )
    environment = {
        "python": "\x1b[2J3.12.1",
        "cpu": "X 9000",
        "versions": {"torch": "2.12.0"},
    }
    note = {"environment": environment, "arms": ["dense"]}
    text = compare(reader(project, values(0.42, 0.44), note, steps=50), project)
    lines = [
        line for line in text.splitlines() if line.startswith("  ") and " | " in line
    ]
    assert {line for line in lines if "hash of" not in line} == {
        "  parameter tier: cpu | study",
        "  parameter steps: 50 | 600",
        "  parameter base: unknown | nano",
        "  arms: dense | sparse, dense",
        "  version of torch: 2.12.0 | 2.13.0",
        r"  python: \x1b[2J3.12.1 | 3.11.2",
        "  seconds: 12.3 | unknown",
    }


def test_a_fact_differs_from_a_pool_where_none_of_its_runs_has_it(project):
    settings = {"tier": "study", "steps": 600, "base": "nano"}
    place = project / "results" / "pesc" / "nano"
    for seed, seconds in enumerate((12.3, 40.0, 50.0)):
        own = HERE | {"cpu": f"X {seed // 2}", "cores": 4}
        manifest = {"environment": own, "seconds": seconds}
        facts = {"settings": settings, "manifest": manifest, "arms": ("matched",)}
        run = Run("pesc", "nano", "study", seed, (), **facts)
        records.write_run(place / f"{seed}.matched.parquet", run)

    def differences(arms, cpu):
        note = {"environment": HERE | {"cpu": cpu, "cores": 8}, "arms": [*arms]}
        path = reader(project, values(0.42, 0.44), note, steps=600, tier="study")
        lines = compare(path, project).splitlines()
        told = [line for line in lines if line.startswith("  ") and " | " in line]
        return [line for line in told if not re.match("  (hash|param|sec)", line)]

    cores = "  cores: 8 | 4 or unknown"
    assert differences(["dense", "matched", "sparse"], "X 0") == [cores]
    assert differences(["sparse", "dense"], "Y") == [
        "  cpu: Y | X 0 or X 9000 or X 1",
        cores,
        "  arms: sparse, dense | matched, sparse, dense",
    ]
    shutil.rmtree(place)
    for seed, seconds in enumerate((40.0, 12.5, 50.0)):
        facts = {"settings": settings, "manifest": {"seconds": seconds}}
        run = Run("pesc", "nano", "study", seed, values(0.4, 0.4), **facts)
        records.write_run(place / f"{seed}.parquet", run)
    text = compare(reader(project, values(0.42, 0.44)), project)
    assert "\n  seconds: 12.3 | 12.5 to 50.0\n" in text


def add_course(project, every):
    """Give a project the pool of a course, of a run's values for each seed."""
    storage.write(
        project / "notebooks" / "01_pesc.class.yaml", "tier: cpu\nsteps: 20\n"
    )
    facts = {
        "settings": {"tier": "cpu", "steps": 20},
        "manifest": {"environment": HERE},
    }
    for seed, recorded in enumerate(every):
        path = project / "results" / "pesc" / "class" / f"{seed}.parquet"
        records.write_run(path, Run("pesc", "class", "cpu", seed, recorded, **facts))


def test_a_run_of_a_course_stands_beside_its_pool_by_what_another_seed_would_hardly_give(
    project,
):
    slow = [Value("pesc/slow", 1.0 + seed, "seconds") for seed in range(3)]
    add_course(
        project, [(*values(0.4 + 0.1 * n, 0.40), one) for n, one in enumerate(slow)]
    )
    shown = (*values(0.96, 0.42), Value("pesc/slow", 900.0, "seconds"))
    lines = compare(reader(project, shown, steps=20), project).splitlines()
    assert lines[1].startswith(
        "beside the book's runs at class, seeds 0, 1, 2; differences"
    )
    far = "pesc/dense/accuracy: yours 0.42 | book's 0.4 share, with every seed"
    assert lines[-2:] == [
        "1 of 2 values lie where another seed's would in 5 of 100 cases; about 0 would by chance",
        far,
    ], "0.5 give or take 4.303 sqrt(1.333) 0.1"
    assert "at nano" in compare(reader(project, shown), project)


def test_what_no_seed_changes_is_no_chance_and_ends_and_counts_are_written_as_they_are(
    project,
):
    counts = [Value(f"pesc/fixed/{n}", 423_912.0, "count") for n in range(19)]
    shares = [Value("pesc/dense/accuracy", share, "share") for share in (0, 0.01, 0.05)]
    add_course(project, [(share, *counts) for share in shares])
    mine = (
        replace(shares[0], value=0.5),
        replace(counts[0], value=423_913),
        *counts[1:],
    )
    lines = compare(reader(project, mine, steps=20), project).splitlines()
    # One value of twenty varies: 0.05 of it would lie outside by chance, and not a whole one.
    assert lines[-3].startswith("2 of 20 values lie where")
    assert lines[-3].endswith("about 0 would by chance")
    # 0.02 give or take 4.303 sqrt(1.333) 0.02646, and no share is below 0.
    assert lines[-2].endswith("0.02 share, another seed from 0 to 0.1514")
    pair = "yours 423,913 | book's 423,912 count, with every seed"
    assert lines[-1] == f"pesc/fixed/0: {pair}"


def test_of_several_pools_of_a_tier_that_of_the_nearest_parameters_stands_beside(
    project,
):
    for protocol, steps in (("a_first", 10), ("b_near", 49)):
        facts = {"settings": {"tier": "study", "steps": steps}}
        path = project / "results" / "pesc" / protocol / "0.parquet"
        run = Run("pesc", protocol, "study", 0, values(0.42, 0.41), **facts)
        records.write_run(path, run)
        head = f"tier: study\nsteps: {steps}\n"
        storage.write(project / "notebooks" / f"01_pesc.{protocol}.yaml", head)
    mine = reader(project, values(0.42, 0.44), steps=49)
    assert "at b_near, seeds 0" in compare(mine, project)


def test_the_books_own_run_is_not_compared_with_itself(project):
    path = reader(project, values(0.42, 0.40))
    executed = {"executed": storage.digest(path)}
    shown = Run("pesc", "cpu", "cpu", 0, values(0.42, 0.40), manifest=executed)
    records.write_run(project / "book" / "notebooks" / "01_pesc.parquet", shown)
    refused(r"E-COMPARE: .*my_run\.ipynb is the book's own run", compare, path, project)
    assert "runs at this build" in compare(reader(project, values(0.42, 0.41)), project)


def test_a_notebook_without_claims_or_without_a_run_of_the_book_is_compared_by_what_is_there(
    empty,
):
    text = compare(reader(empty, values(0.42, 0.40)), empty)
    assert "the book has no run of this notebook yet" in text
    assert "  book   not run" in text
    assert "  yours  +2.0 points, one value; as claimed so far" in text.splitlines()
    path = reader(empty, (Value("bases/gcd/accuracy", 0.5, "share"),))
    line = "bases/gcd/accuracy: yours 0.5 | book's {} share"
    assert compare(path, empty).splitlines()[-1] == line.format("unknown")
    for seed, value in enumerate((0.25, 0.5)):
        run = Run(
            "bases",
            "nano",
            "study",
            seed,
            (Value("bases/gcd/accuracy", value, "share"),),
        )
        records.write_run(empty / "results" / "bases" / "nano" / f"{seed}.parquet", run)
    assert compare(path, empty).splitlines()[-1] == line.format("0.375")


@pytest.mark.parametrize(
    ("mine", "theirs", "line"),
    [
        (2.4, (1.5, 1.75), "yours 2.4 | book's 1.625 count"),
        (2.0, (1.5, 1.75), "yours 2 | book's 1.625 count"),
        (1_234_567.5, (1_234_567.0,), "yours 1,234,568 | book's 1,234,567 count"),
    ],
)
def test_a_count_that_is_not_whole_keeps_its_digits(empty, mine, theirs, line):
    name = "bases/experts"
    for seed, number in enumerate(theirs):
        run = Run("bases", "nano", "study", seed, (Value(name, number, "count"),))
        records.write_run(empty / "results" / "bases" / "nano" / f"{seed}.parquet", run)
    path = reader(empty, (Value(name, mine, "count"),))
    assert compare(path, empty).splitlines()[-1] == f"{name}: {line}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "# Parameters",
            "steps = = 5",
            "E-NOTEBOOK: my_run.ipynb, injected cell, line 1: invalid",
        ),
        (
            '"outputs": [{',
            '"outputs": [3, {',
            r"E-NOTEBOOK: my_run.ipynb: cells\.0\.outputs\.0 is 3",
        ),
        ('{"nbformat": 4', '{"nbformat": ', "E-FORMAT: .*no JSON that can be read"),
        (
            "steps = 600",
            "x = " + "-" * 10**5 + "1",
            "E-NOTEBOOK: my_run.ipynb, injected cell: nested too deeply",
        ),
        ("steps = 600", "steps = 0", "E-RANGE: my_run.ipynb: steps = 0"),
        (
            "pesc/",
            "pecs/",
            "E-NOTEBOOK: my_run.ipynb records values of 'pecs'; did you mean",
        ),
        (
            VALUE,
            "text/json",
            "E-RUN: my_run.ipynb holds no recorded values; execute it first",
        ),
        ('{"environment": {}', '{"environment": []', "E-OUTPUT.*malformed note"),
    ],
)
def test_what_is_no_executed_notebook_of_this_book_is_refused(
    project, old, new, message
):
    path = reader(project, values(0.42, 0.40), {"environment": {}}, steps=600)
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, -1 if "/" in old else 1), encoding="utf-8")
    refused(message, compare, path, project)
    refused("E-NOFILE", compare, project / "absent.ipynb", project)
