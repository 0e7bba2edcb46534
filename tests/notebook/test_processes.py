"""Runs in processes of their own, and one run in two processes under `accelerate launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from moebook import results
from moebook.notebook import study
from moebook.notebook.study import Job, side_by_side
from moebook.training import fit

PARAMETERS = 'tier: str = "cpu"  # scale {smoke, cpu}\nparts: int = 1  # accumulated [1, 4]'
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a notebook that trains a model of 2 layers."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_config.yml").touch()
    imports = "from moebook import notebook, runtime\nfrom moebook.training import fit"
    sources = (imports, PARAMETERS, "run = notebook.begin(In, globals())", TRAIN, RECORD)
    cells = [new_code_cell(source) for source in sources]
    cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(new_notebook(cells=cells), tmp_path / "notebooks" / "01_toy.ipynb")
    (tmp_path / "notebooks" / "01_toy.smoke.yaml").write_text("tier: smoke\nparts: 2\n")
    return tmp_path


def test_two_processes_with_two_parts_each_train_as_one_and_one_publishes(project: Path) -> None:
    launch = ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1")
    rest = ("--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no")
    done = subprocess.run(
        [sys.executable, "-m", *launch, *rest, "-m", "moebook.cli", "run", "toy", "--on=smoke"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(Path(results.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("toy at smoke: executed") == 1
    (copy,) = (project / "runs" / "mine" / "toy").glob("smoke-*.ipynb")
    page = nbformat.read(copy, as_version=4)
    printed = "".join(out.get("text", "") for cell in page.cells for out in cell.outputs)
    processes, loss, penalty, norm, tokens, sums = map(json.loads, printed.split("\n")[:6])
    assert processes == [0, 2]
    here: dict[str, object] = {"fit": fit}
    exec(TRAIN, here)
    model, history = here["course"]()  # type: ignore[operator]
    assert loss == pytest.approx(history.loss, rel=1e-5)
    assert penalty == pytest.approx(history.penalty, rel=1e-5)
    assert norm == pytest.approx(history.norm, rel=1e-5)
    assert tokens == history.tokens
    assert sums == pytest.approx([sum(p.sum().item() for p in model.parameters())] * 2, rel=1e-3)
    kept = sorted(path.name for path in (project / "runs" / "checkpoints").glob("step-*"))
    assert kept == ["step-4", "step-8"]
    assert not list(project.glob("runs/failed/*"))


def test_an_interrupt_ends_all_processes_and_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = study.START.partition("from moebook")[0]
    waits = "import time; 'long' in sys.argv[-1] and time.sleep(60); print('done')"
    monkeypatch.setattr(study, "START", start + waits)
    jobs = [Job(name, "smoke") for name in ("short", "long", "long", "long", "long")]
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), closing(side_by_side(jobs, tmp_path, 3)) as ended:
        for job, outcome in ended:
            assert (job.notebook, outcome) == ("short", Path("done"))
            raise KeyboardInterrupt
    assert time.monotonic() - begun < 30
