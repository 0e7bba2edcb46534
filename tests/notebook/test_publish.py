"""The filter: what an executed notebook may show in the book."""

import base64
import json
import struct
import zlib
from pathlib import Path

import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from moebook.errors import Refusal
from moebook.notebook import harvest, publish
from moebook.notebook.session import CURVE, GLUE, NOTE, VALUE
from moebook.results import Curve, Value

FOLDER = Path("/srv/project/toy")


def _published(*outputs):
    cell = new_code_cell("x", outputs=list(outputs), execution_count=1)
    clean, counts = publish.clean(new_notebook(cells=[cell]), FOLDER)
    return clean["cells"][0]["outputs"], counts


def _shown(mime, content):
    outputs, _ = _published(new_output("display_data", {mime: content}))
    return outputs[0]["data"].get(mime) if outputs else None


def _chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _png(*extra):
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    data = _chunk(b"IDAT", zlib.compress(b"\x00\x00"))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + data + _chunk(b"IEND", b"")


def test_text_and_stdout_stay_without_colours_and_stderr_and_paths_go():
    written = "<script>evil()</script>"
    assert _shown("text/plain", written) == written, "a model may write HTML: it stays text"
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


def test_other_types_are_left_out_and_counted_and_pandas_tables_keep_their_cells():
    for mime in ("application/javascript", "application/vnd.jupyter.widget-view+json",
                 "text/vnd.mermaid", "text/markdown", "text/latex", "image/jpeg", "image/svg+xml",
                 "application/pdf", "application/papermill.record/text/html"):  # fmt: skip
        data = {mime: "alert(1)", "text/plain": "plain"}
        outputs, counts = _published(new_output("display_data", data))
        assert (outputs[0]["data"], counts) == ({"text/plain": "plain"}, {mime: 1})
        assert _shown(mime, "alert(1)") is None
    frame = pd.DataFrame({"a < b": [0.5], "text": ["<img src=x onerror=evil()>"]})
    table = _shown("text/html", frame._repr_html_())
    assert "<style" not in table and "<img" not in table
    assert 'class="dataframe"' in table
    assert "a &lt; b" in table and "&lt;img src=x onerror=evil()&gt;" in table


@pytest.mark.parametrize(("given", "reduced"), [
    ("<table id='x' onclick='evil()' style='x'><tr><td colspan=2>1</td></tr></table>",
     '<table><tr><td colspan="2">1</td></tr></table>'),
    ("<table><tr><td><a href='javascript:evil()'>t</a></table>",
     "<table><tr><td>t</td></tr></table>"),
    ("</div></div><table></table>", "<table></table>"), ("<div>no table</div>", None),
    ("<table></table><script>evil()</script><!-- c -->", "<table></table>"),
    ("<table></table><script>evil()", "<table></table>"), ("<p>&lt;table></p>", None),
    ("<svg><script>1</script></svg><table>&lt;script&gt;</table>",
     "<table>&lt;script&gt;</table>"), ("<iframe srcdoc='<table>'>x</iframe>", None),
])  # fmt: skip
def test_html_is_reduced_to_tables(given, reduced):
    assert publish.reduced_table(given) == reduced


def test_pictures_lose_their_metadata_and_keep_their_pixels():
    given = base64.encodebytes(_png(_chunk(b"tEXt", b"Author\x00me"), _chunk(b"eXIf", b"place")))
    outputs, counts = _published(new_output("display_data", {"image/png": given.decode()}))
    assert base64.b64decode(outputs[0]["data"]["image/png"]) == _png()
    assert counts == {"png metadata": 2}
    assert _shown("image/png", "no picture") is None


def test_metadata_of_notebook_and_cells_goes():
    shown = {"tags": ["a"], "mystnb": {"figure": {"caption": "c"}}}
    cell = new_code_cell("x", execution_count=1, metadata=shown | {"execution": {"a": "now"}})
    metadata = {"papermill": {"input_path": "/home/me/a"}, "widgets": {"state": {}}}
    notebook = new_notebook(cells=[cell], metadata=metadata)
    clean, counts = publish.clean(notebook, FOLDER)
    assert (clean["metadata"], clean["cells"][0]["metadata"]) == ({}, shown)
    assert counts == {"widgets": 1}
    assert "papermill" in notebook.metadata, "the given notebook stays as it was"


@pytest.mark.parametrize(("text", "kind"), [
    ("hf_" + "a1" * 15, "Hugging Face"), ("ghp_" + "a1" * 15, "GitHub"),
    ("sk-" + "a1" * 15, "API key"), ("AKIA" + "A1" * 8, "AWS"),
    ("https://me:pass@example.org", "password"), ("-----BEGIN RSA PRIVATE KEY-----", "private key"),
    ("x canary-1234 y", "environment variable MY_SECRET"),
])  # fmt: skip
def test_a_secret_anywhere_in_the_text_is_refused_and_not_repeated(text, kind, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "canary-1234")
    table = {"text/html": f"<table><tr><td>{text}</table>"}
    outputs = (new_output("stream", name="stdout", text=text), new_output("display_data", table))
    cells = [new_code_cell("x", outputs=[output], execution_count=1) for output in outputs]
    for cell in (*cells, new_code_cell(f"token = '{text}'"), new_markdown_cell(text)):
        with pytest.raises(Refusal, match=f"E-SECRET.*{kind}") as refusal:
            publish.clean(new_notebook(cells=[cell]), FOLDER)
        assert text not in str(refusal.value)


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
    assert harvest.values(_kept(VALUE, VALUE_OF)) == (Value("toy/a", 0.5, "share", (0, 1)),)
    assert harvest.values(_kept(VALUE, {k: v for k, v in VALUE_OF.items() if k != "items"}))
    assert harvest.curves(_kept(CURVE, CURVE_OF)) == (Curve("toy/a", "nats", (1, 2), (0.5, 0.25)),)
    parts = ({"modules": {"a.py": "1"}}, {"arms": ["x"], "known": ["x", "y"]},
             {"modules": {"b.py": "2"}}, {"rows": {"train": "3"}}, {"environment": {}})  # fmt: skip
    cells = [cell for part in parts for cell in _kept(NOTE, part)["cells"]]
    assert harvest.notes(new_notebook(cells=cells)) == {
        "modules": {"a.py": "1", "b.py": "2"}, "arms": ["x"], "known": ["x", "y"],
        "rows": {"train": "3"}, "environment": {},
    }  # fmt: skip


@pytest.mark.parametrize(("mime", "content", "message"), [
    (VALUE, VALUE_OF | {"value": 2}, "E-VALUE"), (VALUE, VALUE_OF | {"seed": 0}, "E-VALUE"),
    (VALUE, ["a"], "E-VALUE"), (VALUE, {"name": "a", "value": 0.5}, "E-VALUE"),
    (CURVE, CURVE_OF | {"x": [1.0]}, "E-VALUE"), (CURVE, "a", "E-VALUE"), (NOTE, "a", ""),
    (NOTE, {"modules": ["a"]}, ""), (NOTE, {"other": {}}, ""), (NOTE, {"arms": "a"}, ""),
])  # fmt: skip
def test_an_error_and_a_value_curve_or_note_that_breaks_a_rule_is_refused(mime, content, message):
    malformed = r"E-OUTPUT: In \[1\]: malformed note"  # when the run is made
    with pytest.raises(Refusal, match=message or malformed):
        harvest.notes(_kept(mime, content))
    error = new_output("error", ename="ValueError", evalue="bad", traceback=[])
    with pytest.raises(Refusal, match=r"E-OUTPUT: In \[1\] holds an error: ValueError: bad"):
        _published(error)
