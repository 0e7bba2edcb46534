"""Toy notebooks through papermill: what a run leaves, and what a failed one does not."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from moebook import runtime, storage
from moebook.errors import Refusal
from moebook.lab import records
from moebook.lab.records import Value, store
from moebook.lab.run import runner, sources, study
from moebook.lab.run.publish import code_cells
from moebook.lab.run.runner import run_notebook
from moebook.lab.run.session import GLUE, NOTE
from moebook.lab.run.verifying import verify
from moebook.training import fit
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[3]
OURS = {"top_k": 4, "arms": "left"}


def _files(folder):
    """All files of a project with their bytes, but those that Python keeps."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def _swap(old, new):
    """What replaces some bytes of a file."""

    def swap(path):
        assert old in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(old, new, 1))

    return swap


@pytest.fixture(scope="module")
def ran(project):
    """One run of the toy at smoke, with parameters of the reader's."""
    with (
        tempfile.TemporaryDirectory() as staging,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("tempfile.tempdir", staging)
        outcome = run_notebook("toy", "smoke", OURS, folder=project)
        assert not os.listdir(staging)
    return outcome


def test_a_run_leaves_its_page_and_what_the_notebook_recorded_and_nothing_else(
    ran, project
):
    assert ran.fresh
    assert ran.notebook.parent == project / "runs" / "mine" / "toy"
    assert ran.path.stem == ran.notebook.stem
    assert ran.path.stem.startswith("smoke-")
    assert set(_files(project / "runs")) == {
        f"mine/toy/{p.name}" for p in (ran.notebook, ran.path)
    }
    assert not (project / "book").exists()
    assert not (project / "results").exists()
    told = f"executed in {ran.run.manifest['seconds']:.1f} s; runs/mine/toy/{ran.notebook.name}"
    assert (
        ran.describe(project)
        == f"toy at smoke: {told}, 3 values in {ran.path.name} beside it"
    )
    run = records.read_run(ran.path)
    assert run == ran.run
    assert (run.notebook, run.protocol, run.tier, run.seed) == (
        "toy",
        "smoke",
        "smoke",
        0,
    )
    mean = Value("toy/mean", 0.5, "share", items=(0.0, 1.0))
    here = Value("toy/here", 1.0, "count")
    assert run.values[:2] == (mean, here)
    assert run.arms == ("left",)
    assert run.manifest["known_arms"] == ["left", "right"]
    assert run.curves[0].y == run.values[2].items
    assert run.settings == {"tier": "smoke", "top_k": 4, "fate": "well"}
    assert set(run.rows) == {"train", "test"}
    assert run.code["notebook"] == storage.files.source(
        project / "notebooks" / "01_toy.ipynb"
    )
    assert {"lab/run/session.py", "lab/records/runs.py"} <= set(run.code["modules"])
    assert not {"cli.py", "lab/run/runner.py", "training/fit.py"} & set(
        run.code["modules"]
    )
    assert records.runs.changed(run, project) == ()


def test_the_page_shows_text_and_tables_and_the_manifest_what_ran_where_at_what_cost(
    ran, project
):
    cells = json.loads(ran.notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    text = json.dumps(outputs)
    streams = [out for out in outputs if out["output_type"] == "stream"]
    assert [stream["text"] for stream in streams] == ["4 ipc 1 None\nnotebooks/x.py\n"]
    assert "<table><tr><td>1</td></tr></table>" in text
    for gone in (
        "evil",
        "a warning",
        os.environ["CANARY_TOKEN"],
        str(Path.home()) + "/",
    ):
        assert gone not in text
    assert ran.run.manifest["stripped"] == {"path": 1, "stderr": 1}
    noted = [out for out in outputs if NOTE in out.get("data", {})]
    assert {out["metadata"]["scrapbook"]["mime_prefix"] for out in noted} == {GLUE}, (
        "hides them"
    )
    manifest = ran.run.manifest
    given = {"tier": "smoke", "seed": 0, "arms": "left", "top_k": 4, "fate": "well"}
    assert (manifest["parameters"], manifest["overrides"]) == (given, OURS)
    assert manifest["executed"] == storage.digest(ran.notebook)
    assert manifest["environment"] == runtime.environment()
    assert 0 < sum(manifest["cell_seconds"].values()) < manifest["seconds"] < 60
    assert len(manifest["cell_seconds"]) == 7, "six code cells and the injected one"
    assert 10e6 < manifest["peak_memory"] < 10e9
    assert str(project) not in json.dumps(manifest)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("notebooks/01_toy.ipynb", b"0.125 *", b"0.25 *"),
        ("requirements.lock", b"13", b"14"),
        ("moebook/lab/run/session.py", b"gc.freeze()", b"gc.collect()"),
        ("PAGE.ipynb", b"{", b" {"),
        ("PAGE.parquet", b"PAR1", b""),
        ("parameter", b"", b""),
        ("protocol", b"", b""),
        ("force", b"", b""),
        ("nothing", b"", b""),
    ],
)
def test_a_run_is_repeated_when_what_it_is_made_of_changes(
    book, ran, monkeypatch, file, old, new
):
    executed = []
    monkeypatch.setattr(runner, "_execute", lambda *given: executed.append(given))
    monkeypatch.setattr("moebook.storage.files.PACKAGE", book / "moebook")
    protocol = "cpu" if file == "protocol" else "smoke"
    overrides = OURS | ({"top_k": 3} if file == "parameter" else {})
    if old:
        _swap(old, new)(
            book / file.replace("PAGE", f"runs/mine/toy/{ran.notebook.stem}")
        )
    again = run_notebook("toy", protocol, overrides, folder=book, force=file == "force")
    assert bool(executed) == (file != "nothing")
    assert again is None if executed else again.run == ran.run


def _told(notebook):
    """What a notebook's page shows besides what ran: texts, sources and captions."""
    cells = storage.read_ipynb(notebook)["cells"]
    injected = [
        cell
        for cell in cells
        if "injected-parameters" in cell["metadata"].get("tags", [])
    ]
    return [
        (cell["source"], cell["metadata"]) for cell in cells if cell not in injected
    ]


def test_other_words_remarks_and_captions_are_put_into_the_copy_and_nothing_runs(
    book, ran, monkeypatch
):
    monkeypatch.setattr(runner, "_execute", None)
    monkeypatch.setattr("moebook.storage.files.PACKAGE", book / "moebook")
    path = book / "notebooks" / "01_toy.ipynb"
    written = nbformat.read(path, as_version=4)
    written.cells[0].source = "# Another title"
    written.cells.insert(1, nbformat.v4.new_markdown_cell("One more text."))
    written.cells[-1].source += "  # a remark"
    written.cells[-1].metadata["mystnb"] = {"figure": {"caption": "A figure."}}
    nbformat.write(written, path)
    again = run_notebook("toy", "smoke", OURS, folder=book)
    assert not again.fresh
    assert _told(again.notebook) == _told(path)
    assert again.run == records.read_run(again.path)
    assert again.run.manifest["executed"] == storage.digest(again.notebook)
    manifest = again.run.manifest | {"executed": ran.run.manifest["executed"]}
    assert replace(again.run, manifest=manifest) == ran.run

    def outputs(page):
        cells = code_cells(json.loads(page.read_text()))
        return [cell["outputs"] for _, cell in cells]

    assert outputs(again.notebook) == outputs(ran.notebook)
    assert any(outputs(again.notebook))
    before = again.notebook.stat().st_mtime_ns
    assert run_notebook("toy", "smoke", OURS, folder=book).run == again.run
    assert again.notebook.stat().st_mtime_ns == before
    written.cells.append(written.cells.pop(-2))
    nbformat.write(written, path)
    with pytest.raises(TypeError):  # cells in another order run
        run_notebook("toy", "smoke", OURS, folder=book)


@pytest.mark.parametrize(
    ("fate", "message"),
    [
        (
            "error",
            r"E-CELL: cell In \[7\] of notebooks/01_toy.ipynb: ZeroDivisionError: division",
        ),
        ("refusal", r"E-VALUE: cell In \[7\] of notebooks/01_toy.ipynb: toy/bad = 2"),
        ("killed", r"E-KERNEL: the kernel was killed by signal 9 .* in cell In \[7\]"),
        (
            "dies",
            r"E-KERNEL: the kernel ended with status 7 in .*; its last lines: .*r \| bad_free;",
        ),
        (
            "memory",
            r"E-MEMORY: cell In \[7\] of .*: memory ran out \(MemoryError\); close ",
        ),
        ("slow", r"E-TIMEOUT: cell In \[7\] .* longer than 5 seconds"),
        ("secret", r"E-SECRET: In \[7\] shows a Hugging Face token"),
    ],
)
def test_a_failed_run_leaves_a_copy_aside(
    ran, project, light, monkeypatch, capfd, fate, message
):
    before = _files(project / "runs" / "mine")
    monkeypatch.setenv("HOME", "/nonexistent")  # of which IPython would complain
    monkeypatch.setenv("PYTHONPATH", light)
    monkeypatch.setitem(runner.CELL_SECONDS, "smoke", 5)
    refusal = refused(
        message, run_notebook, "toy", "smoke", {"fate": fate}, folder=project
    )
    copy = str(refusal).rpartition("the failed copy is ")[2]
    assert copy.startswith("runs/failed/toy/smoke-")
    assert json.loads((project / copy).read_text())["cells"]
    assert _files(project / "runs" / "mine") == before
    assert not [name for name in _files(project) if "/." in name]
    assert capfd.readouterr() == ("", "")
    assert "IPython" not in str(refusal)


def test_a_kernel_that_cannot_start_says_why(fresh, light, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", f"{fresh}{os.pathsep}{light}")
    (fresh / "ipykernel_launcher.py").write_text("raise RuntimeError('shadowed')")
    message = "E-KERNEL: the kernel ended .*its last lines: .*RuntimeError: shadowed"
    refused(message, run_notebook, "toy", "smoke", folder=fresh)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("protocol", "overrides", "code"),
    [
        ("smoke", {"topk": 1}, "E-PARAMETER"),
        ("smoke", {"top_k": 0}, "E-RANGE"),
        ("smoke", {"top_k": "1"}, "E-TYPE"),
        ("smoke", {"tier": "cpu"}, "E-USAGE"),
        ("smoke", {"arms": "hf_" + "a" * 30}, "E-SECRET"),
        ("gpu", {}, "E-PROTOCOL"),
        ("deep", {}, "E-PATH"),  # a temporary folder whose name is too long for sockets
    ],
)
def test_a_wrong_call_is_refused_at_once(fresh, monkeypatch, protocol, overrides, code):
    if protocol == "deep":
        deep = fresh.parent / ("deep" * 25)
        deep.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(deep))
        protocol = "smoke"
    before = _files(fresh.parent)
    with pytest.raises(Refusal) as refusal:
        run_notebook("toy", protocol, overrides, folder=fresh)
    assert refusal.value.code == code
    assert _files(fresh.parent) == before


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGHUP, 129),
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
    ],
)
def test_an_interrupted_run_leaves_nothing(fresh, light, number, code):
    # A shell starts background jobs with SIGINT ignored, nohup with SIGHUP; children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    heard += "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    start = heard + "import sys; from moebook.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        start,
        *"run toy --on smoke".split(),
    ]
    options = ("-p", "fate=slow")
    before = _files(fresh)
    with tempfile.TemporaryDirectory() as staging:
        env = {**os.environ, "TMPDIR": staging, "PYTHONPATH": light}
        reading = {"stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([*command, *options], cwd=fresh, env=env, **reading)
        while not (fresh / "started").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(number)
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
        staged = os.listdir(staging)
    (fresh / "started").unlink()
    assert (process.returncode, staged) == (code, [])
    assert told == "interrupted; nothing half-written was left\n"
    assert _files(fresh) == before


@pytest.mark.parametrize("ids", [("cell-1", None, "cell-1"), ("x", "x", "cell-2", "x")])
def test_a_cell_without_an_id_of_its_own_gets_one_that_is_free(tmp_path, ids):
    source = tmp_path / "01_x.ipynb"
    cells = [{"cell_type": "code", "source": "", "id": one} for one in ids]
    for cell in cells:
        if cell["id"] is None:
            del cell["id"]
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    source.write_text(json.dumps(content))
    made = [cell["id"] for cell in runner._executable(source)["cells"]]
    assert made[0] == ids[0]
    assert len({*made}) == len(ids), made


def test_seconds_that_an_earlier_attempt_found_done_are_not_counted_again(fresh):
    request = runner.Request(sources.find(fresh, "toy"), "smoke", fresh)
    training = request.resume / "of-the-rows"
    (training / "step-4").mkdir(parents=True)
    (training / runtime.FOUND).write_text("12.5")
    with runner._place(request):
        assert [path.name for path in training.iterdir()] == ["step-4"]
    with runner._place(request):  # nor is there any need of one
        assert training.is_dir()


TRAIN = """\
import json, random, torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

def square(model):
    return 0.05 * sum(p.pow(2).mean() for p in model.parameters())

def course(**settings):
    draw = random.Random(0)
    ids = [[draw.randrange(3, 64) for _ in range(draw.randint(4, 20))] for _ in range(21)]
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2:] for row in ids]
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, **shape)).double()
    rows = Dataset.from_dict({"input_ids": ids, "labels": labels})
    history = fit(model, rows, steps=8, batch=6, lr=1e-2, penalty=square, **settings)
    return model, history"""
RECORD = """\
model, history = course(accumulate=parts, output="runs/checkpoints", every=4)
again, same = course(accumulate=parts, output="runs/checkpoints", every=4)
print(json.dumps(runtime.processes()))
for name in ("loss", "penalty", "norm", "tokens"):
    print(json.dumps(getattr(history, name)))
print(json.dumps([sum(p.sum().item() for p in each.parameters()) for each in (model, again)]))
run.record("toy/loss", history.loss[-1], "nats")"""


def test_of_several_processes_the_first_alone_keeps_what_was_run(
    ran, project, monkeypatch
):
    monkeypatch.setattr(runner.runtime, "processes", lambda: (1, 2))
    monkeypatch.setattr(
        runner, "_papermill", lambda request, staged: staged.write_text("{}")
    )
    before = _files(project)
    assert run_notebook("toy", "smoke", OURS, folder=project, force=True) is None
    assert run_notebook("toy", "smoke", OURS, folder=project) is None
    assert _files(project) == before


@pytest.mark.soak
def test_two_processes_with_two_parts_each_train_as_one_and_one_publishes(
    tmp_path, make
):
    imports = """\
from moebook import runtime
from moebook.lab.run import begin
from moebook.training import fit"""
    parameters = (
        'tier: str = "cpu"  # scale {smoke, cpu}\nparts: int = 1  # accumulated [1, 4]'
    )
    make(
        tmp_path,
        imports,
        parameters,
        (TRAIN, RECORD),
        {"smoke": "tier: smoke\nparts: 2\n"},
    )
    launch = "accelerate.commands.launch --multi_gpu --num_processes=2 --num_machines=1"
    rest = (
        "--main_process_port=0 --mixed_precision=no --dynamo_backend=no -m moebook.cli"
    )
    command = [sys.executable, "-m", *f"{launch} {rest} run toy --on=smoke".split()]
    env = {**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[3])}
    reading = {"capture_output": True, "text": True, "timeout": 280}
    done = subprocess.run(command, cwd=tmp_path, env=env, **reading)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("toy at smoke: executed") == 1
    (copy,) = (tmp_path / "runs" / "mine" / "toy").glob("smoke-*.ipynb")
    page = nbformat.read(copy, as_version=4)
    printed = "".join(
        out.get("text", "") for cell in page.cells[1:] for out in cell.outputs
    )
    processes, loss, penalty, norm, tokens, sums = map(
        json.loads, printed.split("\n")[:6]
    )
    assert processes == [0, 2]
    here = {"fit": fit}
    exec(TRAIN, here)
    model, history = here["course"]()
    for found, expected in (
        (loss, history.loss),
        (penalty, history.penalty),
        (norm, history.norm),
    ):
        assert found == pytest.approx(expected, rel=1e-5)
    assert tokens == history.tokens
    assert sums == pytest.approx(
        [sum(p.sum().item() for p in model.parameters())] * 2, rel=1e-3
    )
    steps = (tmp_path / "runs" / "checkpoints").glob("step-*")
    assert sorted(path.name for path in steps) == ["step-4", "step-8"]
    assert not list(tmp_path.glob("runs/failed/*"))


@pytest.fixture
def book(ran, project, tmp_path):
    """A copy of the project that shows the run on a page, and has a pool of it."""
    folder = shutil.copytree(
        project, tmp_path / "copy", ignore=shutil.ignore_patterns("failed")
    )
    page = folder / "book" / "notebooks" / "01_toy.ipynb"
    page.parent.mkdir(parents=True)
    shutil.copyfile(ran.notebook, page)
    shutil.copyfile(ran.path, page.with_suffix(".parquet"))
    for seed in (0, 1):
        settings = {**ran.run.settings, "tier": "study", "top_k": 4}
        made = replace(
            ran.run, protocol="nano", tier="study", seed=seed, settings=settings
        )
        study.add(made, folder)
    return folder


def test_banks_of_loras_and_pools_of_the_notebook_on_banks_lie_side_by_side():
    lines = [str(finding) for finding in verify("banks", ROOT)]
    told = [line for line in lines if "book/notebooks" not in line]
    assert [line.partition(": ")[0] for line in told] == [
        "ok    results/banks/nano",
        "ok    results/banks/own_starts",
    ]
    assert "seeds 300" in told[0]
    assert told[1].endswith("the seals of 12 LoRAs agree")


def test_verify_agrees_with_what_was_just_run(book):
    day = f"of {time.strftime('%Y-%m-%d', time.gmtime())}; code unchanged"
    pool, page = map(str, verify(None, book))
    assert pool == f"ok    results/toy/nano: seeds 0, 1 agree; {day}"
    assert page == f"ok    book/notebooks/01_toy.parquet: values and page agree; {day}"
    (book / "requirements.lock").write_text("torch==2.14.0\n")
    for finding in verify("toy", book):
        assert not finding.failures
        assert "changed since: lock" in str(finding)
    refused("E-NOTEBOOK: 'tyo' has no runs; did you mean 'toy'", verify, "tyo", book)


def test_verify_reads_withdrawn_runs_that_no_pool_counts(book):
    place = book / "results"
    before = [*map(str, verify(None, book))]
    apart = place / "withdrawn" / "toy" / "old" / "0.parquet"
    store.keep(records.read_run(place / "toy" / "nano" / "0.parquet"), apart, book)
    told = "ok    results/withdrawn/toy/old: seeds 0, withdrawn, are as they were"
    assert [*map(str, verify(None, book))] == [*before[:1], told, *before[1:]]
    apart.write_bytes(apart.read_bytes() + b" ")
    (failed,) = (str(finding) for finding in verify(None, book) if finding.failures)
    assert "results/withdrawn/toy/old: 0.parquet was altered" in failed


def test_verify_refuses_a_withdrawn_pool_without_any_run(tmp_path):
    (tmp_path / "results" / "withdrawn" / "toy" / "old").mkdir(parents=True)
    told = "FAILS results/withdrawn/toy/old: it holds no run"
    assert [*map(str, verify(None, tmp_path))] == [told]


def test_verify_takes_folders_alone_for_loras(tmp_path):
    bank = ROOT / "results" / "banks" / "own_starts"
    lora = next(path for path in sorted(bank.iterdir()) if path.is_dir())
    shutil.copytree(lora, tmp_path / "results" / "banks" / "own" / lora.name)
    storage.write(tmp_path / "results" / "banks" / "own" / "README.md", "A bank.")
    told = "ok    results/banks/own: the seals of 1 LoRAs agree"
    assert [*map(str, verify("banks", tmp_path))] == [told]


def _dated(path):
    """Change the day of a run by the book's own code, digest and all."""
    run = records.read_run(path)
    records.write_run(
        path, replace(run, manifest={**run.manifest, "date": "2020-01-01"})
    )


GONE = "1.parquet is gone"
ALTERED = "1.parquet was altered"
UNLISTED = "1.parquet is not in SHA256"


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        (_dated, ALTERED),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), ALTERED),
        (Path.unlink, GONE),
        (lambda path: shutil.rmtree(path.parents[1]), f"{GONE}.*holds no run"),
        (lambda path: (path.parents[2] / "SHA256SUMS").unlink(), UNLISTED),
        (lambda path: path.rename(path.parents[2] / path.name), f"results: {UNLISTED}"),
        (
            lambda path: path.parent.rename(path.parent.with_name("nona")),
            f"nona: .*{UNLISTED}",
        ),
        (
            lambda path: (path.parents[3] / "notebooks" / "01_toy.nano.yaml").unlink(),
            "E-PROTOCOL",
        ),
        (
            lambda path: storage.write(
                path.parents[3] / "notebooks" / "01_toy.nano.yaml",
                "tier: study\ntop_k: 5\n",
            ),
            "E-POOL: protocol nano says top_k = 5",
        ),
    ],
)
def test_verify_sees_what_a_runs_own_digest_cannot(book, change, failure):
    change(book / "results" / "toy" / "nano" / "1.parquet")
    failed = "\n".join(
        str(finding) for finding in verify(None, book) if finding.failures
    )
    assert re.search(failure, failed), failed


LEFT = (
    ".DS_Store",
    "toy/.DS_Store",
    "toy/nano/.DS_Store",
    "toy/nano/._0.parquet",
    "toy/nano/0 (1).parquet",
    "toy/nano/0-Copy1.parquet",
    "toy/nano/0.parquet~",
    "toy/.ipynb_checkpoints/0.parquet",
    "toy/nano/.ipynb_checkpoints/0-checkpoint.parquet",
    "toy/a copy/0.parquet",
    ".Trash-1000/toy/0.parquet",
)


def test_what_desktops_and_jupyter_leave_beside_runs_fails_no_check(book):
    before = [*map(str, verify(None, book))]
    for name in LEFT:
        storage.write(book / "results" / name, "left")
    for name in (
        "._01_toy.ipynb",
        "01_toy-Copy1.ipynb",
        ".ipynb_checkpoints/01_toy.ipynb",
    ):
        storage.write(book / "book" / "notebooks" / name, "left")
    assert [*map(str, verify(None, book))] == before
    assert list(store.pools("toy", book)["nano"].seeds) == [0, 1]
    assert store.live("toy", book) is not None


POOL = "results/toy/nano/0.parquet"
PAGE = "book/notebooks/01_toy"


@pytest.mark.parametrize(
    ("file", "change", "failure"),
    [
        (POOL, _swap(b"toy", b"tay"), "E-RUN"),
        (
            POOL,
            lambda path: shutil.copyfile(path, path.with_name("copy.parquet")),
            "E-POOL",
        ),
        ("results/toy/empty", Path.mkdir, "FAILS results/toy/empty: it holds no run"),
        (f"{PAGE}.parquet", _swap(b"toy", b"tay"), "E-RUN"),
        (f"{PAGE}.ipynb", _swap(b"A toy", b"A lie"), "hash of the executed copy"),
        (f"{PAGE}.ipynb", _swap(b'"value": 0.5', b'"value": 0.25'), "E-VALUE"),
        (
            f"{PAGE}.ipynb",
            _swap(b'"value": 1.0', b'"value": 2.0'),
            "is 1.0 in the run and",
        ),
        (f"{PAGE}.ipynb", _swap(b'"toy/here"', b'"toy/h"'), "run and absent in"),
        (f"{PAGE}.ipynb", _swap(b"{", b""), "is no JSON"),
        (f"{PAGE}.ipynb", Path.unlink, "is missing"),
        ("book/notebooks/02_toy.ipynb", Path.touch, "02_toy.parquet: E-NOFILE"),
    ],
)
def test_verify_detects_a_change(book, file, change, failure):
    change(book / file)
    (failed,) = (str(finding) for finding in verify(None, book) if finding.failures)
    assert failed.startswith(f"FAILS {'results/toy' if 'results' in file else 'book'}")
    assert failure in failed
