"""Every kind of file that the project reads: valid ones, and the project's own way to read them."""

import copy
import gzip
import hashlib
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pprint import pformat
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from nbformat.v4 import new_code_cell, new_notebook, new_output

from moebook import models, storage
from moebook.data import hub
from moebook.errors import Refusal
from moebook.lab import papers, records
from moebook.lab.pages import book, extension, pages
from moebook.lab.pages.compare import compare
from moebook.lab.papers import printed
from moebook.lab.records import Curve, Run, Value, store
from moebook.lab.run import sources
from moebook.lab.run.session import VALUE
from moebook.lab.run.verifying import verify
from moebook.methods import esft, pesc
from moebook.methods.rocket import Config, apply, loras
from moebook.models.checkpoint import fingerprint
from moebook.training.checkpoints import History, Store
from recipes.pretrain import Recipe
from tests.lab.conftest import ran

PACKAGE = storage.files.PACKAGE
Get = Callable[[str], Any]  # of a fixture by its name


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it lies in a folder, how all of the folder is made, how it is read.

    What `read` returns, equal values tell by ``==``. Where a hash ``promises`` the value, a changed
    file may be refused or read as what it was, nothing else.
    """

    file: str
    make: Callable[[Path, Get], None]
    read: Callable[[Path], Any]
    promised: bool = False


def digest(model: torch.nn.Module) -> str:
    """Hash all of a model's tensors and their names."""
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        total.update(
            f"{name} {tensor.shape} {tensor.dtype}".encode() + tensor.numpy().tobytes()
        )
    return total.hexdigest()


def make_model(folder: Path, get: Get, largest: str = "40KB") -> None:
    get("tiny")(num_hidden_layers=1).save_pretrained(folder, max_shard_size=largest)
    get("byte_tokenizer").save_pretrained(folder)


def read_model(folder: Path) -> Any:
    model, tokenizer = models.load(str(folder))
    return digest(model), repr(model.config), tokenizer("the sum is 7")["input_ids"]


SPARSE = transformers.OlmoeConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    pad_token_id=2,
    bos_token_id=0,
    eos_token_id=1,
)
DENSE = transformers.LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    pad_token_id=2,
    bos_token_id=0,
    eos_token_id=1,
)
BASES: dict[type, Any] = {}


def base(config: Any = DENSE) -> Any:
    """A fresh copy of a small model, always the same one."""
    if type(config) not in BASES:
        torch.manual_seed(0)
        BASES[type(config)] = transformers.AutoModelForCausalLM.from_config(
            config
        ).eval()
    return copy.deepcopy(BASES[type(config)])


def make_checkpoints(folder: Path, get: Get) -> None:
    crafted = pesc.prepare(
        base(), pesc.Config(experts=2, top_k=2, adapter_width=4, lora_rank=2)
    )
    pesc.save(crafted, folder / "pesc")
    chosen = esft.Selection(experts={0: (1, 2)})
    esft.save(esft.specialise(base(SPARSE), chosen), folder / "esft")
    bank = [lora(name, seed) for seed, name in enumerate(("one", "two"))]
    for each in bank:
        loras.write(each, folder / each.name)
    apply.save(apply.build(base(), bank, Config(experts=2, top_k=1)), folder / "rocket")
    plain = loras.write(lora("peft", 2), folder / "peft")
    for name in ("MANIFEST.json", "MANIFEST.sha256"):
        (plain / name).unlink()


def lora(name: str, seed: int) -> loras.Lora:
    draw = torch.Generator().manual_seed(seed)
    model = base()
    paths = list(loras.linears(model, ["q_proj"]))
    down = {path: torch.randn(2, 16, generator=draw) for path in paths}
    up = {path: torch.randn(16, 2, generator=draw) for path in paths}
    told = {"data": "sums", "prompts": ["0123456789abcdef"], "losses": [1.5]}
    return loras.Lora(name, 2, 4.0, down, up, fingerprint(model), provenance=told)


def checkpoint(method: Any, name: str, config: Any = DENSE) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        model = method.load(base(config), folder / name)
        return digest(model), repr(vars(model)[name])

    return read


def read_lora(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        model = base()
        it = loras.read(folder / name, model, fingerprint(model))
        return it.digest, it.rank, it.alpha, it.base, it.rank_stabilised, it.provenance

    return read


def training() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return model, optimizer, rates


def make_training(folder: Path, get: Get) -> None:
    model, optimizer, rates = training()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rates.step()
    history = History([1], [0.5], [0.0], [1.0], [0.1], [9])
    Store(folder=folder, run={"seed": 0}, every=1).save(model, optimizer, history)


def read_training(folder: Path) -> Any:
    model, optimizer, rates = training()
    history = Store(folder=folder, run={"seed": 0}, every=1).restore(
        model, optimizer, rates, 1
    )
    return digest(model), pformat(optimizer.state_dict()), rates.get_last_lr(), history


PARAMETERS = (
    'tier: str = "smoke"  # scale {smoke, study}\nseed: int = 0  # of all [0, 9]\n'
    "top_k: int = 2  # experts [1, 8]\nlr: float = 0.1  # rate (0, 1]"
)
VALUES = (
    Value("toy/mean", 0.5, "share", (0.25, 0.75)),
    Value("toy/size", 3.0, "count"),
)


def make_project(folder: Path, get: Get) -> None:
    """A project of one notebook, its page, a pool, a bench run, and a reader's executed copy."""
    for name in (
        "notebooks",
        "book/notebooks",
        "results/toy/nano",
        "results/bench/cpu",
        "moebook",
    ):
        (folder / name).mkdir(parents=True)
    repository = {"url": "https://example.org/x", "branch": "main"}
    (folder / "_config.yml").write_text(
        json.dumps({"title": "toy", "repository": repository})
    )
    (folder / "moebook" / "toy.py").write_text("def mean():\n    pass\n")
    chapters = [{"file": "found"}, {"file": "notebooks/01_toy"}]
    toc = {"root": "intro", "parts": [{"caption": "x", "chapters": chapters}]}
    (folder / "book" / "_toc.yml").write_text(json.dumps(toc))
    (folder / ".commit").write_text("0" * 40)
    (folder / "requirements.lock").write_text("torch==2.13.0\n")
    shown = [
        new_output("display_data", {VALUE: records.plain(value)}) for value in VALUES
    ]
    tagged = new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    title = {
        "cell_type": "markdown",
        "metadata": {},
        "source": "# A toy",
        "id": "title",
    }
    notebook = new_notebook(cells=[title, tagged, new_code_cell("run()")])
    (folder / "notebooks" / "01_toy.ipynb").write_text(json.dumps(notebook))
    (folder / "notebooks" / "01_toy.nano.yaml").write_text(
        "tier: study\ntop_k: 4\nlr: 0.25\n"
    )
    notebook.cells[-1].outputs = shown
    ran(notebook, tier="smoke", seed=0, top_k=2, lr=0.1)
    page = folder / "book" / "notebooks" / "01_toy.ipynb"
    page.write_text(json.dumps(notebook))
    (folder / "mine.ipynb").write_text(json.dumps(notebook, indent=1))
    machine = {
        "cpu": "x",
        "cores": 2,
        "accelerator": None,
        "versions": {"torch": "2.13.0"},
    }
    manifest = {
        "date": "2026-11-01T00:00:00+00:00",
        "seconds": 1.5,
        "peak_memory": 10**9,
        "commit": {"id": "0" * 40, "dirty": False},
        "environment": machine,
        "parameters": {"top_k": 4},
        "overrides": {},
    }
    parts = {
        "values": VALUES,
        "curves": (Curve("toy/loss", "nats", (1.0, 2.0), (0.5, 0.25)),),
    }
    parts |= {
        "code": {"notebook": "0" * 64, "lock": "1" * 64, "modules": {}},
        "seed": 0,
    }
    for name, protocol, tier, place in (
        ("toy", "nano", "study", "results/toy/nano/0.parquet"),
        ("bench", "cpu", "cpu", "results/bench/cpu/0.parquet"),
        ("toy", "smoke", "smoke", "book/notebooks/01_toy.parquet"),
    ):
        executed = {"executed": storage.digest(page)} if "book" in place else {}
        run = Run(name, protocol, tier, manifest=manifest | executed, **parts)
        if "book" in place:
            records.write_run(folder / place, run)
        else:
            store.keep(run, folder / place, folder)


def verified(name: str | None, shown: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Read what is shown, and refuse what `moebook verify` finds wrong."""

    def read(folder: Path) -> Any:
        wrong = [str(one) for one in verify(name, folder) if one.failures]
        if wrong:
            raise Refusal("E-RUN", wrong[0])
        return shown(folder)

    return read


def page(folder: Path) -> Any:
    book._check(folder, "01_toy", "smoke")
    run = records.read_run(folder / "book" / "notebooks" / "01_toy.parquet")
    return repr(run), pages.Places(folder)._anchors, extension.badge(run, folder)


TABLE = """\
# table: "1"
# caption: Toy results
# unit: percent
# source: Sec. 1
# names: {Math.: Math}
# derived:
#   - {column: Average, is: mean, of: [Math, Code]}
row,column,base,printed,unit,mark
Ours,Math,A,50.0,,
Ours,Code,A,"30.0",,
Ours,Average,A,40.0,,
Base,Math,A,1×10^{2},,damaged
Base,Code,A,300K,tokens,
"""
STATED = """\
- where: Sec. 1
  sentence: "ours is better by 20"
  printed: "20.0"
  unit: points
  is: difference
  of:
    - {table: "1", row: Ours, column: Math, base: A}
    - {table: "1", row: Ours, column: Code}
"""


def make_papers(folder: Path, get: Get) -> None:
    """A paper with one table, one stated number, and a few real claims and settings."""
    (folder / "esft").mkdir()
    (folder / "esft" / "table_1.csv").write_text(TABLE)
    (folder / "esft" / "stated.yaml").write_text(STATED)
    setting = "paper:\n  lr: {value: 0.1, where: Sec. 2}\n"
    (folder / "esft" / "hyperparameters.yaml").write_text(setting)
    claims = (
        (PACKAGE / "lab" / "papers" / "esft" / "claims.yaml")
        .read_text()
        .split("\n- id:")
    )
    (folder / "esft" / "claims.yaml").write_text("\n- id:".join(claims[:3]))


def read_papers(folder: Path) -> Any:
    for each in (printed._read, printed._read_claims):
        each.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(printed, "FOLDER", folder)
        return repr(
            (
                papers.claims("esft"),
                papers.audit("esft"),
                printed.hyperparameters("esft"),
            )
        )


ROWS = [
    {"query": f"What is {n} + {n}?", "response": f"It is {2 * n}."} for n in range(4)
]


def make_data(folder: Path, get: Get) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "rows.json").write_text(json.dumps(ROWS))
    pd.DataFrame(ROWS).to_parquet(folder / "rows.parquet")
    row = dict.fromkeys(map(str, range(4)), 0.25)
    scores = {kind: {"1": row, "2": row} for kind in ("token_scores", "gate_scores")}
    (folder / "scores.json").write_text(json.dumps(scores))
    chosen = {"shared_experts": False, "non_expert_modules": True}
    chosen["experts"] = {"1": [0, 3], "2": [2]}
    (folder / "selection.json").write_text(json.dumps(chosen))
    lines = "1\t0\t0\t3\t\t0.5\t0.25\n2\t0\t1\t2\t\t0.75\t0.125\n"
    (folder / "routing.txt").write_text(lines)
    (folder / "routing.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


def rows(name: str) -> Callable[[Path], Any]:
    return lambda folder: hub.load("metamathqa", path=folder / name)


def routing(name: str) -> Callable[[Path], Any]:
    return lambda folder: repr(
        esft.replay(folder / name, experts=4, top_k=2, pooling="tokens")
    )


def make_package(folder: Path, get: Get) -> None:
    """Copies of the modules that read a file beside them."""
    for module, data in PACKAGED.items():
        for name in (module, *data):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PACKAGE / name, folder / name)


PACKAGED = {
    "data/hub.py": ["data/catalogue.yaml"],
    "data/tasks/__init__.py": ["data/tasks/tasks.yaml"],
    "data/tasks/pools.py": ["data/tasks/requests.yaml"],
    "methods/rocket/bank.py": [
        "methods/rocket/catalogue.yaml",
        "methods/rocket/nano/recipe.yaml",
    ],
    "lab/bench/running.py": ["lab/bench/cases.yaml"],
    "lab/bench/report.py": ["lab/bench/goals.yaml"],
}


def imported(module: str) -> Callable[[Path], Any]:
    """Import a module's copy, and show its constants; of requests, what they give."""

    def read(folder: Path) -> Any:
        spec = importlib.util.spec_from_file_location("a_copy", folder / module)
        there = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = there  # where pydantic looks up what annotations name
        try:
            spec.loader.exec_module(there)
        finally:
            del sys.modules[spec.name]
        if module.endswith("pools.py"):
            return repr([*there.POOLS["intent_json"](), *there.POOLS["intent_new"]()])
        shown = repr(
            {name: value for name, value in vars(there).items() if name.isupper()}
        )
        return re.sub(" at 0x[0-9a-f]+", "", shown)

    return read


def make_recipe(folder: Path, get: Get) -> None:
    shutil.copy(PACKAGE / "models" / "nano" / "recipe.yaml", folder)


PESC, ESFT, ROCKET = (
    checkpoint(method, name, config)
    for method, name, config in (
        (pesc, "pesc", DENSE),
        (esft, "esft", SPARSE),
        (apply, "rocket", DENSE),
    )
)
POOL = verified("toy", lambda folder: repr(store.pools("toy", folder)))
BENCH = verified("bench", lambda folder: repr(store.pools("bench", folder)))
PAGE = verified("toy", page)
PROMISED: list[tuple[Any, dict[str, Callable[[Path], Any]]]] = [
    (
        make_checkpoints,
        {
            "pesc/MANIFEST.json": PESC,
            "pesc/MANIFEST.sha256": PESC,
            "pesc/trained.safetensors": PESC,
            "rocket/MANIFEST.json": ROCKET,
            "esft/MANIFEST.json": ESFT,
            "esft/experts.json": ESFT,
            "one/MANIFEST.json": read_lora("one"),
            "one/adapter_config.json": read_lora("one"),
            "one/adapter_model.safetensors": read_lora("one"),
        },
    ),
    (
        make_training,
        dict.fromkeys(
            ("step-1/facts.json", "step-1/tensors.safetensors", "step-1/MANIFEST.json"),
            read_training,
        ),
    ),
    (
        make_project,
        {
            "results/toy/nano/0.parquet": POOL,
            "results/bench/cpu/0.parquet": BENCH,
            "results/SHA256SUMS": POOL,
            "book/notebooks/01_toy.parquet": PAGE,
            "book/notebooks/01_toy.ipynb": PAGE,
        },
    ),
]
"""What is made, and how each of its files is read: those of which a hash promises the value."""
OTHERS: list[tuple[Any, dict[str, Callable[[Path], Any]]]] = [
    (
        partial(make_model, largest="1MB"),
        dict.fromkeys(
            (
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "model.safetensors",
            ),
            read_model,
        ),
    ),
    (make_model, {"model.safetensors.index.json": read_model}),
    (
        make_checkpoints,
        dict.fromkeys(
            ("peft/adapter_config.json", "peft/adapter_model.safetensors"),
            read_lora("peft"),
        ),
    ),
    (
        make_project,
        {
            "at the build: book/notebooks/01_toy.ipynb": page,
            "mine.ipynb": lambda folder: compare(folder / "mine.ipynb", folder),
            "notebooks/01_toy.ipynb": sources.overview,
            "notebooks/01_toy.nano.yaml": lambda folder: sources.find(
                folder, "toy"
            ).design("nano"),
            "book/_toc.yml": book.notebook_pages,
            "_config.yml": lambda folder: pages.Places(folder)._repository,
            ".commit": storage.commit,
        },
    ),
    (
        make_data,
        {name: rows(name) for name in ("rows.jsonl", "rows.json", "rows.parquet")},
    ),
    (make_data, {name: routing(name) for name in ("routing.txt", "routing.gz")}),
    (
        make_data,
        {
            "scores.json": lambda folder: repr(
                esft.Scores.load(folder / "scores.json")
            ),
            "selection.json": lambda folder: esft.Selection.load(
                folder / "selection.json"
            ),
        },
    ),
    (
        make_papers,
        dict.fromkeys(
            (
                "esft/claims.yaml",
                "esft/table_1.csv",
                "esft/stated.yaml",
                "esft/hyperparameters.yaml",
            ),
            read_papers,
        ),
    ),
    (
        make_package,
        {file: imported(name) for name, files in PACKAGED.items() for file in files},
    ),
    (make_recipe, {"recipe.yaml": lambda folder: Recipe.read(folder / "recipe.yaml")}),
]
KINDS = {}
for group in (PROMISED, OTHERS):
    for make, files in group:
        for name, read in files.items():
            form = name.rpartition(": ")[2]
            KINDS[name] = Kind(form, make, read, promised=group is PROMISED)
