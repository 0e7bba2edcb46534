"""A run's file comes back to the last bit; pools tell which runs belong together; else refusals."""

import csv
import errno
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moebook import storage
from moebook.lab import records
from moebook.lab.records import Curve, Run, Value, store
from moebook.lab.records.runs import HEAD, packed, rounded
from moebook.lab.records.store import Pool
from tests.refusals import refused

NO_RUN = "no run of moebook"
A = Value("toy/a", 1 / 3, "share", items=(0.0, 0.0, 1.0))
RUN = Run(
    "toy",
    "nano",
    "study",
    seed=3,
    values=(
        A,
        Value("toy/tiny", 5e-324, "nats"),
        Value("toy/big", sys.float_info.max, "number"),
    ),
    curves=(Curve("toy/a", "nats", (1.0, 2.0), (0.1 + 0.2, -1e-300)),),
    arms=("left", "right"),
    settings={"base": "nano", "lr": 1e-3, "steps": 600, "flag": True},
    rows={"train": "ab", "test": "cd"},
    code={"notebook": "ef", "lock": None, "modules": {"nn/routing.py": "01"}},
    manifest={
        "date": "2026-01-02T03:04:05+00:00",
        "seconds": 1.5,
        "commit": None,
        "é": ["x"],
    },
)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Value, {"name": "/pesc"}),
        (Value, {"name": "pesc//x"}),
        (Value, {"name": "a b"}),
        (Value, {"name": 3}),
        (Value, {"unit": "shares"}),
        (Value, {"value": 1.5}),
        (Value, {"value": -0.1}),
        (Value, {"value": math.nan}),
        (Value, {"value": True}),
        (Value, {"value": "0.5"}),
        (Value, {"items": ()}),
        (Value, {"items": (1.0, math.inf)}),
        (Value, {"items": (1.0, 1.0)}),
        (Curve, {"name": "a b"}),
        (Curve, {"unit": "shares"}),
        (Curve, {"x": (1.0,)}),
        (Curve, {"x": (), "y": ()}),
        (Curve, {"y": (1.0, math.nan)}),
        (Curve, {"x": (1.0, math.inf)}),
        (Run, {"values": (A, A)}),
        (Run, {"curves": RUN.curves * 2}),
        (Run, {"tier": "studi"}),
    ],
)
def test_a_value_curve_or_run_that_breaks_a_rule_is_refused(kind, fields):
    good = {
        Value: Value("pesc/dense/accuracy", 0.5, "share"),
        Run: RUN,
        Curve: Curve("pesc/dense/accuracy", "nats", (1.0, 2.0), (3.0, -4.0)),
    }
    twice = "E-VALUE: toy, seed 3: toy/a is recorded twice|E-TIER: .*'studi': did you mean 'study'"
    refused(
        twice if kind is Run else r"E-(VALUE|TYPE|RANGE)", replace, good[kind], **fields
    )


def test_items_are_kept_to_four_digits_and_their_mean_may_be_off_by_no_more():
    exact = (1.00049, -2.34567e-7, 12345.0, 0.0, math.pi)
    assert rounded(exact) == (1.0, -2.346e-7, 12345.0, 0.0, 3.142)
    worst = (1.000499, 1.000499)
    assert Value("a", 1.000499, "nats", items=rounded(worst)).items == (1.0, 1.0)
    refused("is not the mean", Value, "a", 1.00051, "nats", items=(1.0, 1.0))
    refused("unknown unit 'shares'; did you mean 'share'", Value, "a", 0.5, "shares")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a run, which the other tests damage."""
    records.write_run(tmp_path / "0.parquet", RUN)
    return tmp_path / "0.parquet"


def test_writing_and_reading_a_run_keeps_every_bit(path):
    found = records.read_run(path)
    assert found == RUN
    assert [v.value.hex() for v in RUN.values] == [v.value.hex() for v in found.values]
    bare = Run("toy", "cpu", "cpu", 0, ())
    records.write_run(path, bare)
    assert records.read_run(path) == bare


def test_the_digest_is_that_of_plain_json_whatever_numbers_a_run_has(tmp_path):
    items = (0.0, -0.0, 3.0, 1e16, 1e-7, 0.1 + 0.2, 3.0)
    curve = Curve("toy/c", "nats", (1.0, 2.0), (-0.0, 1e300))
    values = (
        Value("toy/b", sum(items) / 7, "number", items),
        Value("toy/a", -0.0, "nats"),
    )
    run = replace(RUN, values=values, curves=(curve,))
    records.write_run(tmp_path / "0.parquet", run)
    head = json.loads(pq.read_schema(tmp_path / "0.parquet").metadata[b"moebook"])
    digest = head.pop("digest")
    del head["format"]
    parts = [
        head,
        {"items": items, "name": "toy/b", "unit": "number", "value": values[0].value},
    ]
    parts += [{"name": "toy/a", "unit": "nats", "value": -0.0}, vars(curve)]
    text = json.dumps(parts, sort_keys=True)
    assert digest == hashlib.sha256(text.encode()).hexdigest()
    assert records.read_run(tmp_path / "0.parquet") == run


def _head(changes: dict[str, object]) -> Callable[[pa.Table], pa.Table]:
    """An edit of the head: None takes a key away."""

    def edit(table: pa.Table) -> pa.Table:
        head = json.loads(table.schema.metadata[HEAD]) | changes
        kept = {
            key: value for key, value in head.items() if changes.get(key, 0) is not None
        }
        return table.replace_schema_metadata({HEAD: json.dumps(kept).encode()})

    return edit


def _value(table: pa.Table) -> pa.Table:
    """Change the last bit of one value, and keep the digest."""
    first, _, *rest = table.column("value").to_pylist()
    place = table.schema.get_field_index("value")
    return table.set_column(place, "value", [[first, 0.0, *rest]])


def test_a_file_is_far_smaller_than_parquet_by_default():
    place = storage.root() / "results" / "rivals" / "own_starts" / "11.parquet"
    written = io.BytesIO()
    pq.write_table(pq.read_table(place), written, compression="zstd")
    assert len(packed(records.read_run(place))) < 0.54 * len(written.getvalue())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_value, "altered"),
        (_head({"seed": 4}), "altered"),
        (_head({"digest": "0" * 64}), "altered"),
        (_head({"settings": {**RUN.settings, "steps": 601}}), "altered"),
        (_head({"format": 2}), "has format 2, this moebook reads 1: update"),
        (
            lambda table: _head({"format": 2})(table.drop_columns(["items"])),
            "has format 2, this moebook reads 1: update",
        ),
        (_head({"digest": None}), NO_RUN),
        (_head({"tier": None}), NO_RUN),
        (_head({"more": 1}), NO_RUN),
        (_head({"arms": 3}), NO_RUN),
        (lambda table: table.drop_columns(["items"]), NO_RUN),
        (
            lambda table: table.append_column("note", [["x"] * len(table)]),
            "other columns",
        ),
        (
            lambda table: table.replace_schema_metadata(
                {**table.schema.metadata, "note": "x"}
            ),
            "other metadata",
        ),
        (
            lambda table: table.replace_schema_metadata(
                {
                    HEAD: table.schema.metadata[HEAD].replace(
                        b"{", b'{"tier": "gpu", ', 1
                    )
                }
            ),
            "twice",
        ),
        (lambda table: table.replace_schema_metadata({}), NO_RUN),
        (lambda table: table.replace_schema_metadata({HEAD: b"[1]"}), NO_RUN),
    ],
)
def test_a_file_that_says_anything_else_is_refused_by_name(path, edit, message):
    pq.write_table(edit(pq.read_table(path)), path)
    refused(f"E-RUN: .*0.parquet .*{message}", records.read_run, path)
    path.unlink()
    refused("E-NOFILE", records.read_run, path)


@pytest.mark.parametrize("read", [records.read_run, records.runs.read_head])
@pytest.mark.parametrize(
    "fault",
    [
        *(OSError(number, os.strerror(number)) for number in (errno.EIO, errno.EMFILE)),
        pa.ArrowMemoryError("malloc of size 4096 failed"),
    ],
)
def test_what_a_disk_or_memory_says_is_not_told_as_damage(
    path, read, fault, monkeypatch
):
    def fails(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(Path, "read_bytes", fails)
    monkeypatch.setattr(records.runs.pq, "read_schema", fails)
    with pytest.raises(type(fault), match=re.escape(str(fault))):
        read(path)


BOTH = {"left": (1.0, 2.0), "right": (0.5, 0.25)}


def made(seed: int, arms: dict[str, tuple[float, ...]] = BOTH, **other: Any) -> Run:
    """A run with a value an arm, by its items, and one that all of its arms share."""
    values = [Value(f"toy/{a}", sum(x) / len(x), "nats", x) for a, x in arms.items()]
    fields: dict[str, Any] = {
        "values": (*values, Value("toy/base", seed / 8, "nats")),
        "arms": tuple(arms),
        "settings": {"base": "nano", "steps": 600},
        "rows": {"train": f"rows of {seed}", "test": "rows"},
    }
    return Run("toy", "nano", "study", seed, **(fields | other))


def pooled(*runs: Run) -> Pool:
    return Pool("toy", "nano", runs)


ONE, LEFT, RIGHT = (
    made(0, arms) for arms in (BOTH, {"left": (1, 2)}, {"right": (0.5, 0.25)})
)


def test_arms_of_a_seed_join_and_other_seeds_may_train_on_other_rows_and_say_more():
    for pool in (pooled(LEFT, RIGHT, made(1)), pooled(ONE, made(1))):
        assert list(pool.seeds) == [0, 1]
        assert pool.arms == {
            "left": (0, 1),
            "right": (0, 1),
        }
        assert np.array_equal(pool.effects("toy/left", "toy/right"), [[0.5, 1.75]] * 2)
    newer = replace(
        RIGHT, values=(Value("toy/base", 9.0, "nats"),), manifest={"date": "2030"}
    )
    assert pooled(newer, LEFT).values("toy/base")[0].value == 9.0, (
        "the newest run's number stands"
    )
    curve = Curve("toy/loss", "nats", (1.0,), (0.5,))
    pool = pooled(ONE, made(1, settings={"base": "nano", "added": 1}, curves=(curve,)))
    assert [run.rows["train"] for run in pool.runs] == ["rows of 0", "rows of 1"]
    assert pool.curves("toy/loss") == {1: curve}


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (ONE, LEFT, "two files hold the arm left"),
        (ONE, ONE, "two files hold the arm left"),
        (replace(ONE, arms=()), LEFT, "two files hold this seed"),
        (
            ONE,
            replace(made(1), protocol="smollm2"),
            r"toy at smollm2 .*runs of toy at nano",
        ),
        (ONE, replace(made(1), notebook="pesc"), r"pesc at nano .*runs of toy at nano"),
        (ONE, replace(made(1), tier="gpu"), r"tier gpu.*tier study"),
        (
            ONE,
            made(1, settings={"base": "nano-moe"}),
            "base = 'nano-moe', seed 0 has 'nano'",
        ),
        (ONE, made(1, settings={"steps": 90}), "steps = 90, seed 0 has 600"),
        (ONE, made(1, rows={"test": "others"}), "tested on other rows than seed 0"),
        (
            ONE,
            made(1, values=(Value("toy/left", 0.5, "share"),)),
            "is in share, seed 0 has it in",
        ),
        (
            LEFT,
            replace(RIGHT, rows={"train": "others", "test": "rows"}),
            "trained on other rows",
        ),
        (
            LEFT,
            replace(RIGHT, values=(Value("toy/base", 9.0, "nats", (9.0,)),)),
            "base differently",
        ),
    ],
)
def test_runs_that_do_not_belong_together_are_refused_in_any_order(one, other, message):
    for runs, told in (
        ((one, other), message),
        ((other, one), ""),
        ((made(7), other, one), ""),
    ):
        refused(f"E-POOL: .*{told}", pooled, *runs)


def test_effects_are_paired_by_seed_and_item_and_else_means_are_compared():
    runs = [made(s, {"left": (s + 1.0, 4.0 * s), "right": (1.0, s)}) for s in (2, 0, 1)]
    pool = pooled(*runs, made(5, {"left": (9.0, 9.0)}), made(6, {"right": (9.0, 9.0)}))
    wanted = [[s + 1.0 - 1.0, 4.0 * s - s] for s in (0, 1, 2)]
    assert np.array_equal(pool.effects("toy/left", "toy/right"), wanted), (
        "seeds 5, 6 lack one"
    )
    assert np.array_equal(pool.effects("toy/right", 0.5)[-1], [8.5, 8.5])
    assert pool.effects("toy/left", "toy/none").shape == (0, 1)
    assert np.array_equal(
        pool.effects("toy/base"), np.array([[0], [1], [2], [5], [6]]) / 8
    )
    # The right arm has fewer items, or other ones.
    for right, mean in (((1.0, 1.0), 2.0), ((0.0, 0.0, 0.0), 3.0)):
        pool = pooled(ONE, made(1, {"left": (1.0, 2.0, 6.0), "right": right}))
        effects = pool.effects("toy/left", "toy/right")
        assert np.allclose(effects, [[1.125], [mean]], atol=1e-15)
    # Rounding alone is no effect.
    for left, differs in ((0.1 + 0.2, False), (0.3 + 1e-9, True)):
        pool = pooled(made(0, {"left": (left,), "right": (0.3,)}))
        assert (pool.effects("toy/left", "toy/right").item() > 0.0) == differs


def test_pools_are_read_smallest_scale_first_and_a_run_must_lie_in_its_folder(tmp_path):
    large = replace(ONE, protocol="big", settings={"base": "smollm2"})
    for run in (large, ONE, replace(ONE, protocol="a100", tier="gpu")):
        records.write_run(
            tmp_path / "results" / "toy" / run.protocol / "0.parquet", run
        )
    (tmp_path / "results" / "toy" / "empty").mkdir()
    assert list(store.pools("toy", tmp_path)) == ["nano", "big", "a100"]
    assert store.pools("other", tmp_path) == {}
    assert store.live("toy", tmp_path) is None
    page = tmp_path / "book" / "notebooks" / "01_toy.parquet"
    records.write_run(page, replace(ONE, protocol="cpu", tier="cpu"))
    shown = store.live("toy", tmp_path)
    assert shown is not None
    assert (shown.tier, list(shown.seeds)) == ("cpu", [0])
    records.write_run(tmp_path / "results" / "toy" / "nano" / "1.parquet", large)
    refused(
        r"E-POOL: .*1\.parquet is a run of toy at big; move it",
        store.pools,
        "toy",
        tmp_path,
    )


def test_of_a_page_the_first_run_in_order_is_shown_which_must_be_its_notebooks(
    tmp_path,
):
    place = tmp_path / "book" / "notebooks"
    for number in (3, 1, 2):
        records.write_run(place / f"0{number}_toy.parquet", replace(ONE, seed=number))
    assert list(store.live("toy", tmp_path).seeds) == [1]
    records.write_run(place / "01_toy.parquet", replace(ONE, notebook="other"))
    words = r"E-POOL: .*01_toy\.parquet is a run of other at nano; run: make book"
    refused(words, store.live, "toy", tmp_path)


ROOT = Path(storage.__file__).parents[2]
TABLE = ROOT / "moebook" / "lab" / "records" / "notebooks.csv"
MOVED = [
    *csv.DictReader(
        TABLE.with_name("moved.csv").read_text(encoding="utf-8").splitlines()
    )
]
AFTER = {line["statements_then"]: line["statements_now"] for line in MOVED}
HASHED_BY_STATEMENTS = {"results/notebooks.csv", "lab/records/notebooks.csv"}
LINES = [*csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines())]


def recorded(path: Path) -> dict[str, Any]:
    """What a run's file says of its code, as it was written."""
    head = json.loads(pq.read_schema(path).metadata[HEAD])
    return dict(head["code"])


def text_digest(notebook: dict[str, Any]) -> str:
    """The hash that runs recorded of a notebook: of the text of its code cells."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    apart = {"injected-parameters", "install"}
    kept = [cell for cell in code if apart.isdisjoint(cell["metadata"].get("tags", []))]
    texts = ["".join(cell["source"]) for cell in kept]
    return hashlib.sha256("\n\n".join(texts).encode()).hexdigest()


def test_every_committed_run_with_a_hash_of_text_has_that_of_its_statements():
    now = {line["text"]: line["statements"] for line in LINES}
    paths = store.files.own(ROOT / "results", "**/*.parquet")
    old = {}
    for path in paths:
        code = recorded(path)
        if not HASHED_BY_STATEMENTS & code["modules"].keys() and "notebook" in code:
            statements = now[code["notebook"]]
            old[path] = AFTER.get(statements, statements)
            assert records.runs.read_head(path).code["notebook"] == old[path], path
    first = next(iter(old))
    assert records.read_run(first).code["notebook"] == old[first]


def test_no_committed_run_is_behind_its_notebook_because_of_the_new_hash():
    paths = (ROOT / "notebooks").glob("*.ipynb")
    today = {text_digest(json.loads(path.read_text())): path for path in paths}
    for path in store.files.own(ROOT / "results", "**/*.parquet"):
        notebook = today.get(recorded(path).get("notebook"))
        if notebook:
            now = storage.files.source(notebook)
            assert records.runs.read_head(path).code["notebook"] == now


@pytest.mark.parametrize(
    "line", LINES, ids=lambda line: f"{line['notebook'][10:-6]}-{line['text'][:4]}"
)
def test_the_statements_of_a_text_are_those_of_the_commit_that_has_it(line, tmp_path):
    place = f"{line['commit']}:{line['notebook']}"
    shown = subprocess.run(["git", "show", place], cwd=ROOT, capture_output=True)
    if shown.returncode:
        pytest.skip("this clone does not reach back to that commit")
    path = tmp_path / "then.ipynb"
    path.write_bytes(shown.stdout)
    assert text_digest(json.loads(shown.stdout)) == line["text"]
    assert storage.files.source(path) == line["statements"]


def test_a_module_that_only_moved_has_not_changed_since():
    moved = [line for line in MOVED if not line["then"].startswith("notebooks/")]
    unchanged = {line["now"]: line["then"] for line in moved}
    now = {
        name: storage.files.code_digest(storage.files.PACKAGE / name)
        for name in unchanged
    }
    same = [line for line in moved if now[line["now"]] == line["statements_now"]]
    run = replace(
        ONE, code={"modules": {line["then"]: line["statements_then"] for line in same}}
    )
    assert records.runs.changed(run, ROOT) == ()
    other = replace(ONE, code={"modules": {same[0]["then"]: "of another time"}})
    name = (
        same[0]["now"].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    )
    assert records.runs.changed(other, ROOT) == (name,)


def test_every_module_that_moved_is_where_the_table_says():
    for line in MOVED:
        root = ROOT if line["now"].startswith("notebooks/") else storage.files.PACKAGE
        assert (root / line["now"]).is_file(), line
