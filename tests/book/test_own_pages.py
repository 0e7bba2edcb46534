"""The pages "On your own model": every block runs, in order, in a folder with a stranger's inputs.

MOEBOOK_OWN names a folder with inputs of yours, under the names of book/own.md, in place of ours.
"""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moebook import data, models
from moebook.data import encoding
from moebook.evaluation import harness
from moebook.lab import planning
from moebook.methods import esft, pesc, rocket
from moebook.models.anatomy import sparse_layers
from tests.book import own
from tests.book.own import BOOK, PAGES, blocks, run

LONGEST = 14  # lines of a block
SHORT = 24  # rows of a file
INPUTS = (
    "my-model my-moe my-loras train.jsonl test.jsonl general.jsonl hub-data".split()
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:W-BASE", "ignore::DeprecationWarning", "ignore:W-LONG"
)


@cache
def arc_alone():
    """Index one benchmark instead of all, which takes half a minute."""
    place = Path(harness.evaluator.__file__).parent / "tasks" / "arc"
    return TaskManager(include_path=[place], include_defaults=False)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with what the blocks expect: tiny and ours, or the user's."""
    if os.environ.get("MOEBOOK_OWN"):
        return Path(os.environ["MOEBOOK_OWN"])
    folder = tmp_path_factory.mktemp("own")
    own.make(folder)
    return folder


@pytest.fixture
def short(place):
    """The inputs with fewer of our rows: a page that compares trains twenty times."""
    if not os.environ.get("MOEBOOK_OWN"):
        for name in ("train.jsonl", "general.jsonl"):
            lines = (place / name).read_text().splitlines(keepends=True)
            (place / name).unlink()
            (place / name).write_text("".join(lines[:SHORT]))


@pytest.fixture
def place(inputs, tmp_path, monkeypatch):
    """An empty folder with those inputs in it, where the blocks run and write."""
    for name in INPUTS:
        if (inputs / name).exists():
            (tmp_path / name).symlink_to(inputs / name)
    monkeypatch.chdir(tmp_path)
    # A page adds a format of its own.
    monkeypatch.setattr(encoding, "FORMATS", dict(encoding.FORMATS))
    return tmp_path


def test_there_is_a_page_a_journey_of_short_blocks_that_ends_alike_and_is_in_the_book():
    assert len(PAGES) == 7
    toc = (BOOK / "_toc.yml").read_text()
    first = (BOOK / "own.md").read_text()
    for page in PAGES:
        text = (BOOK / f"{page}.md").read_text()
        headings = re.findall("^## (.*)", text, re.MULTILINE)
        assert headings == ["What to expect", "What goes wrong"], page
        assert f"- file: {page}\n" in toc
        assert f"]({page}.md)" in first
        for _, block in blocks(page):
            assert 1 <= len(block.splitlines()) <= LONGEST, block


def test_every_refusal_that_a_page_names_is_one_of_the_package():
    sources = [path.read_text() for path in (BOOK.parent / "moebook").rglob("*.py")]
    known = set(re.findall(r"\bE-[A-Z]+\b", "".join(sources)))
    for page in PAGES:
        named = set(re.findall(r"\bE-[A-Z]+\b", (BOOK / f"{page}.md").read_text()))
        assert named and named <= known, page


@pytest.mark.soak  # each page, each import and each refusal alone has a test of its own
def test_every_page_runs_with_the_core_alone(tmp_path):
    """In a process where every package that only an extra asks for is absent."""
    own.make(tmp_path)
    program = str(BOOK.parent / "tests" / "alone.py")
    paths = {**os.environ, "PYTHONPATH": str(BOOK.parent)}
    ran = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=paths,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    command = "pip install 'moebook[{}]'"
    for extra, what in (
        ("evaluate", "benchmark 'arc_easy' of lm-eval needs the package lm_eval"),
        ("notebook", "moebook doctor needs the package"),
        ("notebook", "a figure needs the package matplotlib"),
        ("notebook", "the projection 'umap' needs the package umap"),
        ("notebook", "a task of numbers in words needs the package num2words"),
        ("quantised", "host='qlora' needs the package bitsandbytes"),
        ("rivals", "optimiser 'cma' needs the package nevergrad"),
        ("evaluate", "grading by a model needs the package"),
    ):
        (line,) = (line for line in ran.stdout.splitlines() if what in line)
        assert line.startswith("E-DEP: ")
        assert line.endswith(command.format(extra))


@pytest.mark.soak
@pytest.mark.timeout(900)  # its trainings run on the project's bases
def test_every_page_runs_on_models_of_somebodys(tmp_path):
    """Of another vocabulary, shape and training: the project's bases."""
    bases = BOOK.parent / "moebook" / "models"
    own.make(tmp_path, bases / "nano", bases / "nano-moe")
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "not core"]
    paths = {**os.environ, "MOEBOOK_OWN": str(tmp_path)}
    ran = subprocess.run(
        command, cwd=BOOK.parent, env=paths, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-3000:]


def test_a_dense_model_is_crafted_trained_saved_loaded_and_asked(place):
    names = run("own_pesc")
    assert pesc.adapter_norm(names["model"]) > 0
    assert names["answer"].shape[1] > names["ids"].shape[1]
    trained = data.encode([names["row"] | {"answer": "yes"}], names["tokenizer"])[0]
    prompt = trained["input_ids"][: trained["labels"].count(data.IGNORED)]
    assert names["ids"].tolist() == [prompt]


def test_a_dense_model_is_upcycled_and_exported(place):
    names = run("own_upcycling")
    if not os.environ.get("MOEBOOK_OWN"):
        assert names["exported"].config.model_type == "mixtral"
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded, _ = models.load("my-mixtral")
    ours = names["model"].eval()(input_ids=ids).logits
    for theirs in (names["exported"].eval(), loaded):
        torch.testing.assert_close(
            theirs(input_ids=ids).logits, ours, rtol=1e-3, atol=1e-4
        )


@pytest.mark.usefixtures("short")
def test_experts_are_chosen_trained_and_merged_for_everybodys_tools(place):
    names = run("own_esft")
    base = models.load("my-moe")[0].state_dict()
    merged = AutoModelForCausalLM.from_pretrained("my-merged").state_dict()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed
    assert all(".experts." in name for name in changed)
    chosen = names["selection"].experts
    assert {int(re.search(r"layers\.(\d+)", name)[1]) for name in changed} == set(
        chosen
    )
    assert names["moved"].moved.any()
    tuned = esft.load(models.load("my-moe")[0], "my-task")
    restored = esft.restore(tuned).state_dict()
    assert all(torch.equal(base[name], restored[name]) for name in base)
    tested = names["found"].reset_index().groupby("way")
    assert tested.seed.unique().map(set).to_dict() == {
        "base": {0},
        "esft": {2, 3},
        "lora": {2, 3},
    }
    assert (tested.asked.unique().map(set) == {"own_train", "own_general"}).all()
    assert all(names["rates"][way] in grid for way, grid in names["grids"].items())
    compared = {(file, seed) for file, seed, _ in names["compared"]}
    assert compared == {("train.jsonl", 2), ("train.jsonl", 3)}
    again = esft.load(models.load("my-moe")[0], "tasks/own_train")
    assert esft.apply.trained(again)


def test_rows_are_written_by_a_models_own_chat_template(place):
    names = run("own_esft", stop="Score the experts")
    tokenizer = names["tokenizer"]
    written = tokenizer.decode(names["encoded"][0]["input_ids"])
    row = names["rows"][0]
    if not tokenizer.chat_template:
        assert written.startswith(f"User: {row['prompt']}\n\nAssistant:")
        return
    turns = [{"role": "user", "content": row["prompt"]}]
    before = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert written == f"{before}{row['answer']}{tokenizer.eos_token}"
    told = names["own"]("What?", "", "Be brief.")[0]
    assert told.index("Be brief.") < told.index("What?")


@pytest.mark.soak  # `fit` in processes has tests of its own
def test_one_task_is_trained_by_two_processes_as_by_one(place):
    texts = [block for _, block in blocks("own_esft")]
    last = next(number for number, text in enumerate(texts) if "esft.save(" in text)
    (place / "tune.py").write_text("\n".join(texts[: last + 1]))
    trained = []
    for count in ("1", "2"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ran = subprocess.run(
            [*command, "--nproc-per-node", count, "tune.py"],
            env={**os.environ, "PYTHONPATH": str(BOOK.parent)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        trained.append(load_file(place / "my-task" / "trained.safetensors"))
        shutil.rmtree(place / "my-task")
    one, two = trained
    assert one.keys() == two.keys()
    for name, values in one.items():
        torch.testing.assert_close(two[name], values, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("page", ["own_pesc", "own_esft"])
def test_a_page_runs_in_the_type_that_it_names_for_a_gpu(place, page):
    how = {"dtype": torch.bfloat16}
    assert run(page, how)["how"] == how
    if page == "own_esft":
        for folder in ("my-task", "tasks/own_train"):
            kept = load_file(place / folder / "trained.safetensors")
            assert {values.dtype for values in kept.values()} == {torch.float32}


def test_a_strangers_loras_are_chosen_and_mixed(place):
    names = run("own_rocket")
    assert len(names["chosen"].experts) == 2
    again = rocket.load(models.load("my-model")[0], "my-mixture")
    assert len(rocket.apply.trained(again)) > 0
    assert names["tuned"].cost.forward > 0


def test_the_kernels_compute_what_your_mixture_does(place):
    names = run("own_kernels")
    torch.testing.assert_close(names["after"], names["before"], rtol=1e-4, atol=1e-5)
    assert names["x"].grad.isfinite().all()


def test_a_model_is_evaluated_on_your_rows_beside_lm_evals(place, monkeypatch):
    monkeypatch.setattr(harness, "_index", arc_alone)
    table = run("own_evaluation")["table"]
    assert set(table.asked) == {"own_test", "arc_easy"}
    if not os.environ.get("MOEBOOK_OWN"):
        assert table.groupby("asked").size().to_dict() == {
            "own_test": 12,
            "arc_easy": 1,
        }


def test_every_row_of_a_long_file_is_asked_as_the_page_says(place, monkeypatch):
    if not os.environ.get("MOEBOOK_OWN"):
        (place / "test.jsonl").unlink()
        row = {"answer": "A", "choices": ["A", "B"]}
        rows = [row | {"prompt": f"{number}?"} for number in range(201)]
        own.write(place / "test.jsonl", rows)
    monkeypatch.setattr(harness, "_index", arc_alone)
    table = run("own_evaluation")["table"]
    lines = (place / "test.jsonl").read_text().splitlines()
    assert (table.asked == "own_test").sum() == len(lines)


def test_a_run_is_planned_without_a_weight(place, capsys):
    (place / "my-model").unlink()
    shutil.copytree(BOOK.parent / "moebook" / "models" / "nano", place / "my-model")
    for file in (place / "my-model").glob("*.safetensors"):
        file.unlink()
    names = run("own_plan")
    assert names["plan"].fits
    assert names["plan"].dollars > 0
    lines = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    trained = {name: int(line.split()[0]) for name, line in lines.items()}
    assert trained["lora"] < trained["pesc"] < trained["full"]
    size = {name: float(line.split()[1]) for name, line in lines.items()}
    assert trained["alone"] == 0
    assert size["alone"] < min(size["esft"], size["lora-sparse"])
    sparse, _ = models.load("my-moe")
    experts = sparse_layers(sparse)[0].count
    share = max(1, round(0.1 * experts)) / experts  # whole experts, one at least
    assert trained["esft"] == share * planning.methods.routed(sparse)
