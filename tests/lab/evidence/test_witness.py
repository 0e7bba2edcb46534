"""A run is filed under what its kernel saw, not under what its notebook's text says since."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from moebook import storage
from moebook.lab.pages.compare import compare
from moebook.lab.run import session, study
from moebook.lab.run.publish import read_notebook
from moebook.lab.run.runner import run_notebook
from moebook.lab.run.session import NOTE, VALUE, begin
from tests.lab.conftest import TOY, make_project
from tests.refusals import refused

Notebook = dict[str, Any]


def mill(folder, name, *options):
    """Run plain papermill on the toy, as its command line does; return what it left."""
    code = "from papermill.cli import papermill; papermill()"
    source = folder / "notebooks" / "01_toy.ipynb"
    command = [sys.executable, "-c", code, source, folder / name, "--kernel", "python3"]
    subprocess.run([*command, *options], cwd=folder, check=True, capture_output=True)
    return folder / name


@pytest.fixture(scope="module")
def milled(tmp_path_factory, environment, light):
    """A toy project, and its notebook as papermill left it with seed 5 and the paths it adds."""
    environment.setenv("PYTHONPATH", light)
    folder = make_project(tmp_path_factory.mktemp("milled") / "toy", *TOY)
    options = "-p tier study -p top_k 4 -p seed 5 --inject-paths".split()
    return json.loads(mill(folder, "out.ipynb", *options).read_text())


@pytest.fixture
def taken_in(fresh):
    """Write an executed notebook, and read it as `compare` and `study --add` do."""

    def read(notebook: Notebook, added: bool = True):
        path = fresh / "mine.ipynb"
        path.write_text(json.dumps(notebook))
        assert compare(path, fresh).startswith(
            "mine.ipynb: notebook toy, tier study, 4 values"
        )
        return (
            study.add_notebook(path, fresh)[0] if added else read_notebook(path, fresh)
        )

    return read


def code(notebook: Notebook) -> list[dict[str, Any]]:
    """Its code cells: imports, parameters, papermill's, begin, measure, arms, end."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def swap(cell: dict[str, Any], old: str, new: str) -> None:
    """Replace a text in a cell's source, or in its outputs."""
    text = json.dumps(cell)
    assert old in text
    cell.update(json.loads(text.replace(old, new)))


def begun(notebook: Notebook, **changes: Any) -> None:
    """Change what `begin` noted."""
    for output in code(notebook)[3]["outputs"]:
        note = output["data"][NOTE]
        note.update({name: value for name, value in changes.items() if name in note})


def rerun_upper_cells(notebook: Notebook) -> None:
    """Seed 7 in the cells up to `begin`, which ran again; what is below them is of seed 5."""
    upper = code(notebook)[:4]
    swap(upper[2], "seed = 5", "seed = 7")
    parameters = {"tier": "study", "seed": 7, "arms": "all", "top_k": 4, "fate": "well"}
    begun(notebook, parameters=parameters)
    for number, cell in enumerate(upper, start=8):
        cell["execution_count"] = number


def rerun_one(notebook: Notebook) -> None:
    code(notebook)[5]["execution_count"] = 8


def exchange_two(notebook: Notebook) -> None:
    cells = notebook["cells"]
    cells[-1], cells[-2] = cells[-2], cells[-1]


def delete_one(notebook: Notebook) -> None:
    del notebook["cells"][-3]


def clear_counts(notebook: Notebook) -> None:
    for cell in code(notebook):
        cell["execution_count"] = None


def add_a_cell(notebook: Notebook) -> None:
    notebook["cells"].append(json.loads(json.dumps(new_code_cell("seed = 9"))))


def end_in_an_error(notebook: Notebook) -> None:
    error = {
        "output_type": "error",
        "ename": "NameError",
        "evalue": "x",
        "traceback": [],
    }
    code(notebook)[-1]["outputs"].append(error)


def lose_the_tag(notebook: Notebook) -> None:
    code(notebook)[2]["metadata"]["tags"] = []


def lose_the_note(notebook: Notebook) -> None:
    code(notebook)[3]["outputs"] = []


def lose_an_output(notebook: Notebook) -> None:
    code(notebook)[4]["outputs"] = []


def begin_twice(notebook: Notebook) -> None:
    code(notebook)[4]["outputs"] += copy.deepcopy(code(notebook)[3]["outputs"])


def tamper_with_the_notes(notebook: Notebook) -> None:
    begun(notebook, cells={"one": "x"})


WRONG: dict[str, tuple[Callable[[Notebook], None], str]] = {
    "the upper cells ran again": (
        rerun_upper_cells,
        "E-OUTPUT: .*cell 1 ran as In .8., not as",
    ),
    "one cell ran again": (
        rerun_one,
        r"E-OUTPUT: mine.ipynb: code cell 6 ran as In \[8\], not",
    ),
    "two cells are exchanged": (exchange_two, "E-OUTPUT: .*code cell 6 ran as In .7."),
    "a cell is deleted": (delete_one, "E-OUTPUT: .*code cell 5 ran as In .6."),
    "no cell has a count": (
        clear_counts,
        "E-OUTPUT: .*code cell 1 did not run; restart",
    ),
    "a cell did not run": (add_a_cell, "E-OUTPUT: .*code cell 8 did not run; restart"),
    "an error at the end": (
        end_in_an_error,
        r"E-OUTPUT: .*In \[7\] holds an error: NameError: x",
    ),
    "papermill's cell is edited": (
        lambda notebook: swap(code(notebook)[2], "seed = 5", "seed = 7"),
        "E-PARAMETER: mine.ipynb: seed should be 7, and the kernel had 5",
    ),
    "a default is edited": (
        lambda notebook: swap(code(notebook)[1], '\\"all\\"', '\\"left\\"'),
        "E-PARAMETER: .*arms should be 'left', and the kernel had 'all'",
    ),
    "papermill's cell has no tag": (
        lose_the_tag,
        "E-PARAMETER: .*seed should be 0, and the kernel had 5",
    ),
    "another cell is edited": (
        lambda notebook: swap(code(notebook)[4], "0.125 * top_k", "0.125 * 4"),
        r"E-RUN: mine.ipynb: In \[5\] is not the cell that ran",
    ),
    "the begin is gone": (lose_the_note, "E-RUN: .*no note of `begin`"),
    "an output is gone": (
        lose_an_output,
        r"E-RUN: .*In \[5\] is not the cell that ran, or its",
    ),
    "it begins twice": (begin_twice, r"E-OUTPUT: .*In \[5\] begins a second run"),
    "notes are no notes": (
        tamper_with_the_notes,
        "E-RUN: .*In .one. is not the cell that ran",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_a_kernel_did_not_see_is_refused(milled, fresh, change, message):
    notebook = copy.deepcopy(milled)
    change(notebook)
    path = fresh / "mine.ipynb"
    path.write_text(json.dumps(notebook))
    refused(message, compare, path, fresh)
    refused(message, study.add_notebook, path, fresh)
    assert not (fresh / "results").exists()


def remark(notebook: Notebook) -> None:
    swap(code(notebook)[4], "0.125 * top_k", "(0.125\\n  * top_k)")
    swap(code(notebook)[4], "run.record(", "# what it measures\\nrun.record(")


def add_empty_cells(notebook: Notebook) -> None:
    empty = json.loads(json.dumps(new_code_cell(" \n")))
    text = json.loads(json.dumps(new_markdown_cell("A note of mine")))
    for place in (len(notebook["cells"]), 5, 1):
        notebook["cells"][place:place] = [copy.deepcopy(empty), copy.deepcopy(text)]


def leave_keys_out(notebook: Notebook) -> None:
    """As tools do that write a cell without outputs, or metadata without content."""
    for cell in notebook["cells"]:
        for key in ("outputs", "metadata"):
            if key in cell and not cell[key]:
                del cell[key]
    del notebook["nbformat_minor"]


RIGHT = (lambda notebook: None, remark, add_empty_cells, leave_keys_out)


@pytest.mark.parametrize(
    "change", RIGHT, ids=["as it is", "remark", "empty cells", "keys"]
)
def test_what_a_kernel_saw_is_taken_in_whatever_surrounds_it(
    milled, taken_in, fresh, change
):
    notebook = copy.deepcopy(milled)
    change(notebook)
    run = taken_in(notebook)
    assert (run.seed, run.settings["top_k"], run.arms) == (5, 4, ("left", "right"))
    assert set(run.manifest["parameters"]) == {"tier", "seed", "arms", "top_k", "fate"}
    assert run.code["notebook"] == storage.files.source(
        fresh / "notebooks" / "01_toy.ipynb"
    )


def test_a_byte_order_mark_changes_nothing(milled, fresh):
    path = fresh / "mine.ipynb"
    path.write_text(json.dumps(milled), encoding="utf-8-sig")
    assert study.add_notebook(path, fresh)[0].seed == 5


def test_what_ran_again_after_papermill_has_neither_its_day_nor_its_time(
    milled, taken_in, fresh
):
    notebook = copy.deepcopy(milled)
    assert 0 < taken_in(notebook, added=False).manifest["seconds"] < 60
    assert "begun" in json.dumps(notebook)
    begun(notebook, begun="2999-01-01T00:00:00+00:00")
    manifest = taken_in(notebook, added=False).manifest
    assert manifest["seconds"] is None
    assert "date" not in manifest
    path = fresh / "mine.ipynb"
    refused(
        "E-RUN: mine.ipynb does not say when it was executed",
        study.add_notebook,
        path,
        fresh,
    )


def insert(folder, source, behind):
    """Put a reader's cell behind the cell that holds a text."""
    path = folder / "notebooks" / "01_toy.ipynb"
    notebook = json.loads(path.read_text())
    cells = notebook["cells"]
    place = next(i for i, cell in enumerate(cells) if behind in "".join(cell["source"]))
    cells.insert(place + 1, json.loads(json.dumps(new_code_cell(source))))
    path.write_text(json.dumps(notebook))


SCRATCH = "# try\nseed = 9\ntop_k = 50"
READERS = [
    (
        "tier: str",
        [SCRATCH],
        r"In \[5\] .*: top_k was given as 1, and a cell made it 50",
    ),
    (
        "begin(In",
        [SCRATCH],
        r"In \[6\] .*: seed was 3 for `begin`, and a cell made it 9",
    ),
    (
        "begin(In",
        ["seed = 9", "seed = 3"],
        r"In \[7\] .*: seed was 3 .* made it 9",
    ),
]


@pytest.mark.parametrize(("behind", "sources", "message"), READERS)
def test_a_readers_cell_that_sets_parameters_anew_ends_the_run(
    fresh, light, monkeypatch, behind, sources, message
):
    monkeypatch.setenv("PYTHONPATH", light)
    for source in reversed(sources):
        insert(fresh, source, behind)
    expected = f"E-PARAMETER: cell {message}"
    refused(expected, run_notebook, "toy", "smoke", {"seed": 3}, folder=fresh)
    assert not list(fresh.glob("runs/mine/**/*.parquet"))


def test_a_run_is_refused_whose_kernel_had_other_values_than_were_asked_for(
    fresh, light, monkeypatch
):
    """As where papermill's cell stands behind the reader's: `begin` cannot know what was asked."""
    monkeypatch.setenv("PYTHONPATH", light)
    monkeypatch.setattr(session, "_given", lambda cells: {})
    insert(fresh, "seed = 9", "tier: str")
    code = "import moebook.lab.run.session as s; s._given = lambda cells: {}"
    path = fresh / "notebooks" / "01_toy.ipynb"
    path.write_text(
        path.read_text().replace("import json, os", f"{code}\\nimport json, os")
    )
    message = "E-PARAMETER: seed should be 3, and the kernel had 9"
    refused(message, run_notebook, "toy", "smoke", {"seed": 3}, folder=fresh)


@pytest.mark.parametrize("tag", ["skip-execution", "raises-exception"])
def test_a_cell_that_papermill_would_leave_out_is_refused_before_the_run(
    fresh, monkeypatch, tag
):
    path = fresh / "notebooks" / "01_toy.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][-1]["metadata"]["tags"] = [tag]
    path.write_text(json.dumps(notebook))
    monkeypatch.setattr("papermill.execute_notebook", None)
    refused(
        f"E-NOTEBOOK: .*01_toy.ipynb: .*{tag}",
        run_notebook,
        "toy",
        "smoke",
        folder=fresh,
    )


def without_outputs_and_ids(notebook):
    for cell in code(notebook):
        del cell["outputs"], cell["execution_count"]
    for cell in notebook["cells"]:
        del cell["id"]
    return json.dumps(notebook)


def with_one_id_a_mark_and_empty_cells(notebook):
    add_empty_cells(notebook)
    for cell in notebook["cells"]:
        cell["id"] = "same"
    return "\ufeff" + json.dumps(notebook)


WRITTEN = (without_outputs_and_ids, with_one_id_a_mark_and_empty_cells)


@pytest.mark.parametrize("write", WRITTEN, ids=lambda write: write.__name__)
@pytest.mark.filterwarnings("error")
def test_what_the_list_reads_runs(fresh, light, monkeypatch, write):
    monkeypatch.setenv("PYTHONPATH", light)
    path = fresh / "notebooks" / "01_toy.ipynb"
    path.write_text(write(json.loads(path.read_text())), encoding="utf-8")
    outcome = run_notebook("toy", "smoke", folder=fresh)
    assert len(outcome.run.values) == 4
    assert len(outcome.run.manifest["cell_seconds"]) == 7
    copied = outcome.notebook.rename(fresh / "page.ipynb")  # away from its run
    run = read_notebook(copied, fresh)
    assert (run.values, run.code) == (outcome.run.values, outcome.run.code)


CELL = 'tier: str = "cpu"  # scale\nsteps: int = 3  # steps\nplan: str = "a,b"  # names'


@pytest.fixture
def left(monkeypatch):
    """What a run leaves in its notebook, here in a list."""
    bundles = []
    monkeypatch.setattr(session, "_leave", lambda _, bundle: bundles.append(bundle))
    return bundles


def started(*cells, **names):
    values = {"tier": "cpu", "steps": 3, "plan": "a,b"} | names
    every = ["", CELL, *cells, "run = begin(In, globals())"]
    return begin(every, values), every, values


@pytest.mark.parametrize("now", [4, 3.5, "3", None, [3], True])
def test_a_value_is_not_recorded_once_a_cell_has_set_a_parameter_anew(left, now):
    run, _, values = started()
    values["steps"] = now
    for keep in (run.record, lambda name, value, unit: run.curve(name, [value], unit)):
        refused(
            "E-PARAMETER: steps was 3 for `begin`, and a cell made it",
            keep,
            "a",
            1.0,
            "nats",
        )
    run.witness.look()  # as it does after the cell
    values["steps"] = 3
    refused("E-PARAMETER: steps was 3", run.record, "a", 1.0, "nats")
    assert not any(VALUE in bundle for bundle in left)


def test_a_text_may_go_on_as_what_it_names_and_a_number_as_its_equal(left):
    run, _, values = started()
    values |= {"plan": ["a", "b"], "steps": 3.0}
    run.record("a", 1.0, "nats")
    del values["steps"]
    run.record("b", 1.0, "nats")
    assert sum(VALUE in bundle for bundle in left) == 2
    values["plan"] = "a"
    refused(
        "E-PARAMETER: plan was 'a,b' for `begin`, and a cell made it 'a'",
        run.record,
        "c",
        1.0,
        "nats",
    )


def test_each_cell_is_noted_once_before_the_next_value(left):
    run, cells, _ = started("%time 1")
    noted = lambda: [b[NOTE]["cells"] for b in left if "cells" in b.get(NOTE, {})]  # noqa: E731
    assert [*map(list, noted())] == [["1", "2", "3"]]
    cells += ["x = 1", "run.record('a', 1.0, 'nats')"]
    for name in ("a", "b"):
        run.record(name, 1.0, "nats")
    assert [*map(list, noted())] == [["1", "2", "3"], ["4", "5"]]
    assert noted()[1]["4"] == storage.files.cell_digest("x = 1  # a remark")


@pytest.mark.parametrize(
    "source",
    [
        "# Parameters of the plot\nwidth = max(3, 4)",
        "# Parameters: mine\nimport os",
        "#Parameters\nimport os",
        "width = 3\n# Parameters\nimport os",
    ],
)
def test_a_cell_about_parameters_is_not_papermills(left, source):
    assert started(source)[0].tier == "cpu"


def test_what_papermill_adds_by_itself_is_no_parameter(left):
    paths = 'PAPERMILL_INPUT_PATH = "a.ipynb"\nPAPERMILL_OUTPUT_PATH = "b.ipynb"'
    assert started(f"# Parameters\nsteps = 4\n{paths}", steps=4)[0].tier == "cpu"
    refused(
        "E-PARAMETER: .*unknown parameter 'PAPERMIL'",
        started,
        "# Parameters\nPAPERMIL = 1",
    )


def test_a_cell_before_begin_may_not_set_what_papermill_was_given(left):
    given = "# Parameters\nsteps = 4\n"
    refused(
        "E-PARAMETER: steps was given as 4, and a cell made it 9 before `begin`",
        started,
        given,
        "steps = 9",
        steps=9,
    )
    started("steps = 9", steps=9)
    (note,) = [bundle[NOTE] for bundle in left if "parameters" in bundle.get(NOTE, {})]
    assert note["parameters"]["steps"] == 9, "the value at `begin` is noted"


CASES = {
    "partly_rerun": r"E-OUTPUT: partly_rerun.ipynb: code cell 1 ran as In \[11\]",
    "error_at_end": r"E-OUTPUT: error_at_end.ipynb: In \[7\] holds an error: NameError: x",
    "counts_none": "E-OUTPUT: counts_none.ipynb: code cell 1 did not run",
}


@pytest.mark.parametrize(("name", "message"), CASES.items(), ids=CASES)
def test_the_notebooks_of_the_case_are_refused(shared, tmp_path, name, message):
    case = shared / "cases" / "strangers" / "10_files_of_notebooks"
    subprocess.run([sys.executable, case / "mini.py", tmp_path], check=True)
    for file in ("_config.yml", "requirements.lock"):
        (tmp_path / file).touch()
    refused(message, study.add_notebook, case / f"{name}.ipynb", tmp_path)
    refused(message, compare, case / f"{name}.ipynb", tmp_path)
