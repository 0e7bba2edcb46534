"""Data sets of the hub, pinned to a commit, with the papers' templates.

The catalogue names no commit: whoever runs an experiment pins one for each data set, and the run's
record holds it. Local copies in the hub's own files (parquet, JSONL) can stand in for the hub.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from moebook.data import files, raw
from moebook.data.tasks.task import first_line
from moebook.errors import nearest, refuse

Row = dict[str, str]
Rows = Sequence[tuple[str, Mapping[str, Any]]]  # (where it stands, raw row)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set of the hub and how its raw rows become prompt and answer.

    Args:
        repo: Its id on the hub.
        row: Maps (raw row, where) to prompt, answer and, where there is one, system or rationale.
        domain: mathematics, code, common_sense, language or general.
        licence: As its card says.
        config: Its configuration, when it has several.
        files: Pattern of its files inside the repository, when that holds many sets.
        normalise: Applied to two answers before they are compared, as in `Task`; None where only
            running the answer tells a right one.
        max_new_tokens: Enough for an answer, with a vocabulary of tens of thousands.
    """

    repo: str
    row: Callable[[Mapping[str, Any], str], Row]
    domain: str = ""
    licence: str = ""
    config: str | None = None
    files: str | None = None
    normalise: Callable[[str], str] | None = first_line
    max_new_tokens: int = 64


CATALOGUE: dict[str, Source] = {
    "slimorca": Source(
        repo="Open-Orca/SlimOrca", domain="general", licence="MIT", row=raw.conversation
    ),
    "magicoder_oss": Source(
        repo="ise-uiuc/Magicoder-OSS-Instruct-75K",
        domain="code",
        licence="MIT",
        row=raw.pair("problem", "solution"),
    ),
    "magicoder_evol": Source(
        repo="ise-uiuc/Magicoder-Evol-Instruct-110K",
        domain="code",
        licence="Apache-2.0",
        row=raw.pair("instruction", "response"),
    ),
    "metamathqa": Source(
        repo="meta-math/MetaMathQA",
        domain="mathematics",
        licence="MIT",
        row=raw.pair("query", "response"),
    ),
    "openorca": Source(
        repo="Open-Orca/OpenOrca",
        domain="general",
        licence="MIT",
        row=raw.pair("question", "response", system="system_prompt"),
    ),
    "wizardlm": Source(
        repo="WizardLMTeam/WizardLM_evol_instruct_V2_196k",
        domain="general",
        licence="MIT",
        row=raw.conversation,
    ),
    "commonsense_qa": Source(
        repo="tau/commonsense_qa", domain="common_sense", licence="MIT", row=raw.commonsense_qa
    ),
    "siqa": Source(
        repo="allenai/social_i_qa",
        domain="common_sense",
        licence="CC-BY-4.0",
        row=raw.siqa,
    ),
    "piqa": Source(repo="ybisk/piqa", domain="common_sense", licence="AFL-3.0", row=raw.piqa),
    "arc_easy": Source(
        repo="allenai/ai2_arc",
        config="ARC-Easy",
        domain="common_sense",
        licence="CC-BY-SA-4.0",
        row=raw.arc,
    ),
    "arc_challenge": Source(
        repo="allenai/ai2_arc",
        config="ARC-Challenge",
        domain="common_sense",
        licence="CC-BY-SA-4.0",
        row=raw.arc,
    ),
    "boolq": Source(
        repo="google/boolq", domain="common_sense", licence="CC-BY-SA-3.0", row=raw.boolq
    ),
    "gsm8k": Source(
        repo="openai/gsm8k",
        config="main",
        domain="mathematics",
        licence="MIT",
        row=raw.gsm8k,
        normalise=raw.final_number,
        max_new_tokens=256,
    ),
    "mbpp": Source(
        repo="google-research-datasets/mbpp",
        config="full",
        domain="code",
        licence="CC-BY-4.0",
        row=raw.pair("text", "code"),
        normalise=None,
    ),
}

MAGICODER = "magicoder_oss+magicoder_evol"  # one pool: PESC does not say how it split the two
MIXTURES: dict[str, dict[str, int]] = {
    "idae-500k": {"slimorca": 300_000, MAGICODER: 100_000, "metamathqa": 100_000},  # PESC, Table 5
    "idae-720k": {"slimorca": 360_000, MAGICODER: 180_000, "metamathqa": 180_000},
    "router_init": {  # router initialisation, Table 8
        "openorca": 200_000,
        "magicoder_evol": 100_000,
        "magicoder_oss": 50_000,
        "metamathqa": 200_000,
    },
}


def load(
    name: str,
    *,
    revision: str | None = None,
    path: str | Path | None = None,
    split: str = "train",
    size: int | None = None,
    seed: int = 0,
) -> list[Row]:
    """Load a data set as rows with task, domain, prompt, answer and, where it has them, more.

    Args:
        name: A key of `CATALOGUE`.
        revision: Commit of the hub's repository, 40 hexadecimal digits. Not needed with `path`.
        path: Local JSONL, JSON or parquet file in the hub's own form instead of the hub.
        split: The hub's name of the split.
        size: Rows to draw without replacement; all of them, in order, when None.
        seed: Decides the draw.

    Raises:
        Refusal: E-PIN without a full commit, E-OFFLINE when it is neither cached nor reachable,
            E-REMOTECODE for a script, E-NOFILE for a missing file or repository, E-DATA for an
            unknown name, too few rows, or a row that does not fit (with data set or file, and row).
    """
    source = _source(name)
    rows = local(Path(path)) if path is not None else pinned(source, revision, split)
    return _draw(f"{name}/{split}", [(name, rows)], size, seed)


def pins(text: str) -> dict[str, str]:
    """Read commits by data set from ``name=commit,name=commit``; an empty text names none.

    Raises:
        Refusal: E-PIN for a part of another form, or a name that stands twice.
    """
    pairs = [pair.split("=") for pair in text.split(",") if pair]
    found = {pair[0]: pair[-1] for pair in pairs}
    if any(len(pair) != 2 for pair in pairs) or len(found) < len(pairs):
        refuse("E-PIN", f"revisions is '{text}', expected name=commit,name=commit, each name once")
    return found


def mixture(sizes: Mapping[str, int], revisions: Mapping[str, str], seed: int = 0) -> list[Row]:
    """Draw training rows of several data sets and shuffle them together.

    Args:
        sizes: Rows by name, as in `MIXTURES`; names joined by + are drawn from as one pool.
        revisions: The commit of each data set, as in `load`.
        seed: Decides draws and order.

    Raises:
        Refusal: As `load` does.
    """
    drawn = []
    for names, size in sizes.items():
        pool = [
            (name, pinned(_source(name), revisions.get(name), "train")) for name in names.split("+")
        ]
        drawn += _draw(f"{names}/train", pool, size, seed)
    random.Random(f"hub/{seed}").shuffle(drawn)
    return drawn


def _draw(label: str, pool: list[tuple[str, Rows]], size: int | None, seed: int) -> list[Row]:
    """Map all rows of the pool, or `size` of them at random."""
    have = sum(len(rows) for _, rows in pool)
    picked: Iterable[int] = range(have)
    if size is not None:
        if not 1 <= size <= have:
            refuse("E-DATA", f"{label}: have {have} rows, need {size}; ask for 1 to {have}")
        picked = random.Random(f"{label}/{seed}").sample(range(have), size)
    return [_mapped(pool, index) for index in picked]


def _mapped(pool: list[tuple[str, Rows]], index: int) -> Row:
    """Map the row at a place of the joined pool with its own data set's template."""
    for name, rows in pool:
        if index < len(rows):
            where, row = rows[index]
            source = CATALOGUE[name]
            return {"task": name, "domain": source.domain} | source.row(row, where)
        index -= len(rows)
    raise IndexError(index)


def _source(name: str) -> Source:
    if name not in CATALOGUE:
        refuse("E-DATA", f"unknown data set '{name}': {nearest(name, CATALOGUE)}")
    return CATALOGUE[name]


class _Numbered(Sequence[tuple[str, Mapping[str, Any]]]):
    """A `datasets.Dataset` whose rows come with where they stand; nothing is read ahead."""

    def __init__(self, dataset: datasets.Dataset, origin: str) -> None:
        self.dataset, self.origin = dataset, origin

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return f"{self.origin}:{index + 1}", self.dataset[index]


def pinned(source: Source, revision: str | None, split: str) -> Rows:
    """Open a split of a data set of the hub, or of its cache, at a commit, or refuse as `load`."""
    if not re.fullmatch("(?!0{40})[0-9a-f]{40}", revision or ""):
        refuse(
            "E-PIN",
            f"{source.repo}: revision is {revision!r}, expected a commit of 40 hexadecimal digits "
            "(not a branch, which moves): choose one of its history on the hub (notebooks take it "
            "in `revisions`, as name=commit)",
        )
    origin = f"{source.repo}@{revision}"
    try:
        data = datasets.load_dataset(
            source.repo, source.config, data_files=source.files, split=split, revision=revision
        )
    except ConnectionError:
        refuse(
            "E-OFFLINE",
            f"{origin} is not cached and the hub cannot be reached; "
            "load it once with a connection, or give path=",
        )
    except FileNotFoundError as error:
        refuse("E-NOFILE", f"{origin}: {error}; check id and commit on the hub, or give path=")
    except RuntimeError as error:
        if "script" not in str(error):
            raise
        refuse(
            "E-REMOTECODE",
            f"{origin} is a script, which is never run; "
            "pin a commit of the branch refs/convert/parquet",
        )
    except ValueError as error:
        refuse("E-DATA", f"{origin}: {error}")
    return _Numbered(data, origin)


def local(path: Path) -> Rows:
    """Open a JSONL, JSON or parquet file in the hub's own form; refuse as `load` does."""
    files.refuse_scripts(path)
    kind = path.suffix[1:]
    if kind not in ("parquet", "json"):
        return list(files.objects(path))
    if not path.is_file():
        refuse("E-NOFILE", f"{path}: no such file; expected JSONL, JSON or parquet")
    try:
        rows = list(
            datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        )
    except (ValueError, TypeError, OSError, datasets.exceptions.DatasetsError) as error:
        refuse("E-DATA", f"{path}: not a readable {kind} file ({error})")
    if not rows:
        refuse("E-DATA", f"{path}:1: the file is empty; expected at least one row")
    return [(f"{path}:{number}", row) for number, row in enumerate(rows, 1)]
