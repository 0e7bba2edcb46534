"""The sets that LoRAs are trained on: the paper's 38 (Table 8) and the bank of embedded tasks.

Sizes and task types come from the paper's table as data; here stands where each set is found and
which template turns its rows into prompt and answer. The hub's commits are given by whoever loads;
the ids were never loaded, and one that the hub does not have is refused by its name (E-NOFILE).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from moebook import papers
from moebook.data import hub, raw, tasks
from moebook.data.tasks import kshot
from moebook.errors import nearest, refuse

Row = dict[str, str]
EMBEDDED = (
    "sums", "equations", "gcd", "products", "python_eval", "docstring", "numbers_fr", "names_de",
    "intent_json", "licence", "kinship", "isa",
)  # fmt: skip
"""The tasks of the embedded bank, one LoRA each."""


QUESTIONS = ("ARC-c", "ARC-e", "BoolQ", "PIQA")
"""Four of the paper's six target tasks: those of multiple choice, which share one pool."""
HELD_OUT = {
    "ARC-c": "test",
    "ARC-e": "test",
    "BoolQ": "validation",
    "PIQA": "validation",
    "GSM8K": "test",
    "MBPP": "test",
}
"""The split that each target task's benchmark in lm-eval asks; test answers may be kept secret."""


def _collected(pattern: str) -> hub.Source:
    """A set of the collection whose templates the paper follows (Sec. 3.1.2)."""
    return hub.Source(repo="QingyiSi/Alpaca-CoT", files=pattern, row=raw.instruction)


SOURCES: dict[str, hub.Source] = {
    "ARC-c": hub.CATALOGUE["arc_challenge"],
    "ARC-e": hub.CATALOGUE["arc_easy"],
    "WinoGrande": hub.Source(repo="allenai/winogrande", config="winogrande_l", row=raw.winogrande),
    "GSM8K": hub.CATALOGUE["gsm8k"],
    "PIQA": hub.CATALOGUE["piqa"],
    "CommonSense QA": hub.CATALOGUE["commonsense_qa"],
    "RACE": hub.Source(repo="ehovy/race", config="all", row=raw.race),
    "MBPP": hub.CATALOGUE["mbpp"],
    "Mathqa": hub.Source(repo="allenai/math_qa", row=raw.mathqa),
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
    "HellaSwag": hub.Source(repo="Rowan/hellaswag", row=raw.hellaswag),
    "SiQA": hub.CATALOGUE["siqa"],
    "BoolQ": hub.CATALOGUE["boolq"],
    "Dolly": _collected("dolly/**"),
    "WizardLM": hub.CATALOGUE["wizardlm"],
    "ShareGPT": _collected("ShareGPT/**"),
    "GPT-Teacher-Code": _collected("GPTeacher/**/*ode*"),
    "GPT-Teacher-Roleplay": _collected("GPTeacher/**/*oleplay*"),
    "GPT-Teacher-Instruct": _collected("GPTeacher/**/*nstruct*"),
    "WebGPT": _collected("webGPT/**"),
    "Lima": hub.Source(repo="GAIR/lima", row=raw.conversation),
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
    repos = {name: source.repo for name, source in SOURCES.items()}
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
    rows = hub.pinned(source, revision, split) if path is None else hub.local(Path(path))
    return [{"task": name} | source.row(row, where) for where, row in rows]


def held_out(
    name: str, *, revision: str | None = None, path: str | Path | None = None
) -> list[Row]:
    """Load the rows that evaluate a target task of the paper; arguments as in `load`.

    Raises:
        Refusal: E-DATA for a set that is none of `HELD_OUT`; those of `load`.
    """
    if name not in HELD_OUT:
        refuse("E-DATA", f"no test rows are known for '{name}'; {nearest(name, HELD_OUT)}")
    return load(name, revision=revision, path=path, split=HELD_OUT[name])


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


def targets(
    names: Iterable[str], source: str, pins: Mapping[str, str]
) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
    """Return what is annotated of each target task, its training rows, and what evaluates it.

    Args:
        names: Of `data.tasks`, or keys of `HELD_OUT`.
        source: ``"embedded"`` or ``"hub"``.
        pins: Commits of the hub's sets, by name.

    Raises:
        Refusal: Those of `data.tasks.rows`, `load` and `held_out`.
    """
    if source == "embedded":
        sizes = {name: tasks.find(name).available("train") for name in names}
        annotated = {name: tasks.rows(name, "train", size) for name, size in sizes.items()}
        return annotated, {name: tasks.rows(name, "test", tasks.TEST) for name in sizes}
    commits = {name: pins.get(name) for name in names}
    annotated = {name: load(name, revision=commit) for name, commit in commits.items()}
    return annotated, {name: held_out(name, revision=commits[name]) for name in commits}


def open_data(sets: str, size: int, source: str, pins: Mapping[str, str]) -> list[Row]:
    """Return the open data: rows of the embedded bank's sets, drawn once for all, or of the hub's.

    Args:
        sets: Names of the hub's sets, with commas between them.
        size: Most rows of each set.
        source: ``"embedded"`` or ``"hub"``.
        pins: Commits of the hub's sets, by name.

    Raises:
        Refusal: Those of `embedded` and `load`.
    """
    if source == "embedded":
        found = embedded(size)
    else:
        found = {name: load(name, revision=pins.get(name))[:size] for name in sets.split(",")}
    return [row for rows in found.values() for row in rows]
