"""The sets that LoRAs are trained on: the paper's 38 (Table 8) and the bank of embedded tasks.

Sizes and task types come from the paper's table as data; here stands where each set is found and
which template turns its rows into prompt and answer. The hub's commits are given by whoever loads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pandas as pd

from moebook import papers
from moebook.data import files, hub, raw, tasks
from moebook.data.tasks import kshot
from moebook.errors import nearest, refuse
from moebook.methods.rocket.templates import hellaswag, instruction, mathqa, race, winogrande

Row = dict[str, str]
ALPACA_COT = "QingyiSi/Alpaca-CoT"
EMBEDDED = (
    "sums", "equations", "gcd", "products", "python_eval", "docstring", "numbers_fr", "names_de",
    "intent_json", "licence", "kinship", "isa",
)  # fmt: skip
"""The tasks of the embedded bank, one LoRA each."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one of the 38 sets is found.

    Attributes:
        hub: Its key in `data.hub.CATALOGUE`, whose template then applies; or empty.
        repo: Its id on the hub, where it is not in that catalogue.
        config: Its configuration, when it has several.
        files: Pattern of its files inside the repository, when that holds many sets.
        row: Maps (raw row, where) to prompt and answer.
    """

    hub: str = ""
    repo: str = ALPACA_COT
    config: str | None = None
    files: str | None = None
    row: Callable[[Mapping[str, Any], str], Row] = instruction


def _collected(pattern: str) -> Source:
    """A set of the collection whose templates the paper follows (Sec. 3.1.2)."""
    return Source(files=pattern)


SOURCES: dict[str, Source] = {
    "ARC-c": Source(hub="arc_challenge"),
    "ARC-e": Source(hub="arc_easy"),
    "WinoGrande": Source(repo="allenai/winogrande", config="winogrande_l", row=winogrande),
    "GSM8K": Source(hub="gsm8k"),
    "PIQA": Source(hub="piqa"),
    "CommonSense QA": Source(hub="commonsense_qa"),
    "RACE": Source(repo="ehovy/race", config="all", row=race),
    "MBPP": Source(hub="mbpp"),
    "Mathqa": Source(repo="allenai/math_qa", row=mathqa),
    "Esnli": _collected("Chain-of-Thought/**/esnli_train.json"),
    "ECQA": _collected("Chain-of-Thought/**/ecqa_train.json"),
    "CREAK": _collected("Chain-of-Thought/**/creak_train.json"),
    "GPT4Tools": _collected("gpt4tools/**"),
    "AQuA": _collected("Chain-of-Thought/**/aqua_train.json"),
    "QASC": _collected("Chain-of-Thought/**/qasc_train.json"),
    "QED": _collected("Chain-of-Thought/**/qed_train.json"),
    "StrategyQA": _collected("Chain-of-Thought/**/strategyqa_train.json"),
    "SensemakingQA": _collected("Chain-of-Thought/**/sensemaking_train.json"),
    "Toolformer (th=0.6)": _collected("GPTeacher/**/*oolformer*"),
    "HellaSwag": Source(repo="Rowan/hellaswag", row=hellaswag),
    "SiQA": Source(hub="siqa"),
    "BoolQ": Source(hub="boolq"),
    "Dolly": _collected("dolly/**"),
    "WizardLM": Source(hub="wizardlm"),
    "ShareGPT": _collected("ShareGPT/**"),
    "GPT-Teacher-Code": _collected("GPTeacher/**/*ode*"),
    "GPT-Teacher-Roleplay": _collected("GPTeacher/**/*oleplay*"),
    "GPT-Teacher-Instruct": _collected("GPTeacher/**/*nstruct*"),
    "WebGPT": _collected("webGPT/**"),
    "Lima": Source(repo="GAIR/lima", row=raw.conversation),
    "Code-Alpaca": _collected("CodeAlpaca/**"),
    "Thought Source": _collected("thoughtsource/**"),
    "CAMEL-AI-Society": _collected("camel/**/*society*"),
    "CAMEL-Code": _collected("camel/**/*code*"),
    "CAMEL-Math": _collected("camel/**/*math*"),
    "CAMEL-Physics": _collected("camel/**/*physics*"),
    "CAMEL-Chemistry": _collected("camel/**/*chemistry*"),
    "CAMEL-Biology": _collected("camel/**/*biology*"),
}


def table() -> pd.DataFrame:
    """Return the 38 sets with the paper's sizes: ``task``, ``Train``, ``Val``, ``Test``, ``repo``.

    Table 8 has a 39th line, ARC-c with rationales: not a set of its own (Tables 9 and 10 list 38
    LoRAs) but ARC-c after `rationales.expand`. Sizes printed in thousands are rounded; a split
    that the paper leaves out is NaN.
    """
    printed = papers.table("rocket", 8)
    wide = printed.pivot_table(index=["row", "task"], columns="column", values="value")
    wide = wide.reset_index("task").loc[list(SOURCES)]
    wide.columns.name = wide.index.name = None
    repos = {
        name: hub.CATALOGUE[source.hub].repo if source.hub else source.repo
        for name, source in SOURCES.items()
    }
    return wide[["task", "Train", "Val", "Test"]].assign(repo=pd.Series(repos))


def load(
    name: str,
    *,
    revision: str | None = None,
    path: str | Path | None = None,
    split: str = "train",
) -> list[Row]:
    """Load one of the 38 sets as rows with task, prompt and answer, in the paper's templates.

    Args:
        name: A key of `SOURCES`.
        revision: Commit of its repository on the hub, 40 hexadecimal digits.
        path: A local copy in the hub's own form (JSON, JSONL or parquet) instead.
        split: The hub's name of the split.

    Raises:
        Refusal: E-DATA for an unknown name or a row that does not fit (with file and row); E-PIN,
            E-OFFLINE, E-NOFILE, E-REMOTECODE as in `data.hub.load`.
    """
    if name not in SOURCES:
        refuse("E-DATA", f"unknown data set '{name}'; {nearest(name, SOURCES)}")
    source = SOURCES[name]
    if source.hub:
        rows = hub.load(source.hub, revision=revision, path=path, split=split)
        return [{**row, "task": name} for row in rows]
    origin = str(path) if path is not None else f"{source.repo}@{revision}"
    opened = _local(Path(path)) if path is not None else _pinned(source, revision, split)
    found = [
        {"task": name} | source.row(each, f"{origin}:{number}")
        for number, each in enumerate(opened, 1)
    ]
    if not found:
        refuse("E-DATA", f"{origin}: no rows; expected at least one")
    return found


def embedded(size: int, *, seed: int = 0, without: Iterable[str] = ()) -> dict[str, list[Row]]:
    """Draw the training rows of the embedded bank, by task.

    Clauses that are kept apart for the K-shot task ``copyleft`` are left out.

    Args:
        size: Most rows a task; a smaller one gives all it has.
        seed: Of draw and wording.
        without: Tasks to leave out: the target's own, for a K-shot comparison worth its name.

    Raises:
        Refusal: E-DATA for a size below 1.
    """
    names = [name for name in EMBEDDED if name not in set(without)]
    kept_apart, found = kshot.reserved(), {}
    for name in names:
        rows = tasks.rows(name, "train", tasks.find(name).available("train"), seed)
        if name == "licence":
            rows = [row for row in rows if not any(c in row["prompt"] for c in kept_apart)]
        found[name] = rows[:size]
    return found


def _local(path: Path) -> Iterable[Mapping[str, Any]]:
    files.refuse_scripts(path)
    if not path.is_file():
        refuse("E-NOFILE", f"{path}: no such file; expected JSON, JSONL or parquet")
    kind = "parquet" if path.suffix == ".parquet" else "json"
    try:
        return list(
            datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        )
    except (ValueError, TypeError, OSError, datasets.exceptions.DatasetsError) as error:
        refuse("E-DATA", f"{path}: not readable as {kind} ({error})")


def _pinned(source: Source, revision: str | None, split: str) -> Iterable[Mapping[str, Any]]:
    if not re.fullmatch("[0-9a-f]{40}", revision or ""):
        refuse(
            "E-PIN",
            f"{source.repo}: revision is {revision!r}, expected a commit of 40 hexadecimal digits",
        )
    try:
        return datasets.load_dataset(
            source.repo, source.config, data_files=source.files, split=split, revision=revision
        )
    except ConnectionError:
        refuse(
            "E-OFFLINE",
            f"{source.repo}@{revision} is not cached and the hub cannot be reached; load it once"
            " with a connection, or give path=",
        )
    except FileNotFoundError as error:
        refuse("E-NOFILE", f"{source.repo}@{revision}: {error}")
    except RuntimeError as error:
        refuse("E-REMOTECODE", f"{source.repo}@{revision}: not loaded ({error})")
    except ValueError as error:
        refuse("E-DATA", f"{source.repo}@{revision}: {error}")
