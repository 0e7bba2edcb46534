"""Open rows and LoRAs by the shard, here or on a Ray cluster: too many to hold, or to do twice.

What a shard gives is a file in a folder of its own, and a shard whose file is there is not done
again. Memory does not grow with the number of shards: a process holds a block of one shard's rows,
or some LoRAs, and the caller what has been chosen so far. The folders are ones that all see.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.dataset import ParquetFileFormat, dataset

from moebook import cluster, models, storage
from moebook.data.tasks import Task
from moebook.errors import Refusal, refuse, told
from moebook.kernels.dispatch import shapes
from moebook.methods import rocket
from moebook.methods.rocket import bank, loras
from moebook.methods.rocket.augment import REPR_POOL, Augmentation, Encoder, native
from moebook.methods.rocket.config import Config
from moebook.models.checkpoint import fingerprint
from moebook.settings import FINITE, Count, Place, Seed, checked, settings

Array = np.ndarray
Row = Mapping[str, str]
# What is done at once: "name" of the file that it leaves, and what it reads.
Part = dict[str, Any]
Work = Callable[[Part], bytes]
# Columns of a shard: either, or both.
EMBEDDING = "embedding"
TEXTS = ("prompt", "answer")
CHECKED = ParquetFileFormat(page_checksum_verification=True)
BLOCK = 16_384  # rows of a shard that are read at once
TOGETHER = 32  # LoRAs that are scored in one task


@settings
class Engine:
    """Where shards are done: in this process, or by actors of the Ray cluster here."""

    name: Literal["local", "ray"] = "local"
    # Actors; by default as many as the cluster has room for.
    workers: Count | None = None
    gpus: float = 0.0  # of each actor, which has one CPU
    device: str = "cpu"  # of the encoder or the base

    def __post_init__(self) -> None:
        if self.name == "local" and (self.workers or self.gpus):
            refuse(
                "E-CHOICE",
                "workers and gpus are of the engine ray; here set the device alone",
            )


HERE = Engine()


class Scored(NamedTuple):
    """A bank that was scored on K shots, ``[N, K]``, indexed by name, as in `case.Case`."""

    plain: pd.DataFrame
    reasoning: pd.DataFrame
    solved: pd.DataFrame


@checked
def choose(
    shots: Annotated[Array, FINITE],
    folder: Place,
    config: Config,
    to: Place,
    *,
    encoder: str = "",
    prompt: str = "",
    seed: Seed = 0,
    engine: Engine = HERE,
) -> Augmentation:
    """Choose from the open rows of all parquet files of a folder as `augment.choose` does.

    Rows are numbered through the files in the order of their names. They have a column
    ``embedding`` (lists of D floats), or, where an encoder is named, ``prompt`` and ``answer``,
    which it embeds. What was drawn from each file is kept in the folder ``to``. A damaged file is
    found where it cannot be read or its pages have checksums (pyarrow's ``write_page_checksum``).
    """
    shapes("choose", {"shots": (shots, "K D")}, empty="")
    shots = native(shots)
    budget = config.budget * (REPR_POOL if config.duplicates == "repr" else 1)
    files = _listed(Path(folder))
    about = (shots.tobytes(), str(shots.dtype), config, encoder, prompt, seed)
    of_encoder = _files_of(encoder)
    load = partial(rocket.augment.encoder, encoder, prompt=prompt, device=engine.device)
    # A shard's numbers depend on how many rows come before it, and so does its name.
    tasks = [
        {
            "name": _named(path.stem, [path, *of_encoder], start, about),
            "path": str(path),
            "start": start,
        }
        for path, start, end in files
        if start < end
    ]
    make = partial(_drawing, shots, config, budget, seed, load if encoder else None)
    kept = Path(os.path.expanduser(to))
    drawn = _largest(_done(tasks, make, kept, engine), budget)
    if not drawn:
        why = f"with sampler hull lower components ({config.components}) or give more shots"
        refuse(
            "E-DATA", f"{folder}: none of {files[-1][2]} open rows can be drawn; {why}"
        )
    # No more rows than the budget: all are drawn again, and Alg. 2 goes on from line 4.
    chosen = rocket.augment.choose(shots, [_vectors(drawn, shots)], config, seed=seed)
    numbers = drawn["index"].to_numpy()
    return Augmentation(
        numbers[chosen.index], chosen.similarity, numbers[chosen.candidates]
    )


@checked
def read(folder: Place, index: Array) -> list[dict[str, Any]]:
    """Read rows of a folder's files by their numbers, in that order, without the embeddings.

    A file that has fewer rows than it says, or than were there when they were numbered, is refused.
    """
    shapes("read", {"index": (index, "S", "int")}, empty="S")
    files = _listed(Path(folder))
    whole = files[-1][2]
    beyond = [number for number in index.tolist() if not 0 <= number < whole]
    if beyond:
        path, start, end = min(files, key=lambda file: file[2] - file[1])
        have = f"its {len(files)} files have {whole}, the shortest, {path.name}, {end - start}"
        refuse(
            "E-SHARD",
            f"{folder}: there is no row {beyond[0]}, {have}; bring back what is lost",
        )
    rows: dict[int, dict[str, Any]] = {}
    for path, start, end in files:
        hits = index[(index >= start) & (index < end)]
        if not len(hits):
            continue
        with _opened(path) as file:
            names = [name for name in file.schema_arrow.names if name != EMBEDDING]
            scanner = dataset(path, format=CHECKED).scanner(
                columns=names, batch_size=BLOCK
            )
            taken = scanner.take(pa.array(hits - start)).to_pylist()
            if len(taken) < len(hits):
                refuse("E-SHARD", "has fewer rows than it says; bring it back")
        rows |= zip(hits.tolist(), taken, strict=True)
    return [rows[number] for number in index.tolist()]


@checked
def score(
    folder: Place,
    base: str,
    shots: Sequence[Row],
    config: Config,
    to: Place,
    *,
    own: Mapping[str, Task] = rocket.score.NONE,
    engine: Engine = HERE,
) -> Scored:
    """Score all PEFT folders of a folder on the shots, which have rationales (`rocket.score`).

    ``base`` is one that `models.load` knows. Shots of a user's file are judged by its task, among
    ``own`` by name. What each group of LoRAs gave is kept in ``to``.
    """
    judged = [(name, task.compare, task.max_new_tokens) for name, task in own.items()]
    paths = loras.folders(Path(folder))
    of_base = _files_of(base)
    tasks = []
    for at in range(0, len(paths), TOGETHER):
        group = paths[at : at + TOGETHER]
        files = chain.from_iterable(sorted(path.iterdir()) for path in group)
        files = chain(files, of_base)
        name = _named(group[0].name, files, base, config, judged, *map(dict, shots))
        tasks.append({"name": name, "paths": [*map(str, group)]})
    make = partial(_scoring, paths[0], base, list(shots), config, own, engine.device)
    kept = Path(os.path.expanduser(to))
    parts = [pq.read_table(path) for path in _done(tasks, make, kept, engine)]
    whole = pa.concat_tables(parts).to_pandas().set_index("name")
    # Within a group `bank.check` finds them; those of two groups show here.
    twins = list(whole.index[whole["digest"].duplicated(keep=False)])
    if twins:
        refuse(
            "E-BANK",
            f"'{twins[0]}' is the same LoRA as another of {twins[1:4]}: remove one",
        )
    # A line holds a LoRA's K values: [N, K].
    frames = (
        pd.DataFrame(np.stack(whole[kind]), whole.index) for kind in Scored._fields
    )
    return Scored(*(frame.rename_axis(None) for frame in frames))


def select(
    scored: Scored, folder: str | Path, model: Any, config: Config
) -> rocket.choose.Selection:
    """Choose experts of a scored bank (Alg. 1), of which only the M candidates are read."""
    scores = rocket.score.scores(scored.reasoning, scored.solved)
    # Alg. 1 up to line 6, which reads no similarity: zeros will do.
    blank = pd.DataFrame(0.0, scores.index, scores.index)
    ranked = rocket.choose.select(scores, blank, config).candidates
    # All of it, with the M candidates' own cosines.
    base = fingerprint(model)
    names = ranked.index[ranked["candidate"]]
    place = Path(os.path.expanduser(folder))
    members = {name: loras.read(place / name, model, base) for name in names}
    alike = rocket.choose.similarity(members, config)
    blank.loc[names, names] = alike.loc[names, names]
    return rocket.choose.select(scores, blank, config)


def _drawing(
    shots: Array,
    config: Config,
    budget: int,
    seed: int,
    load: Callable[[], Encoder] | None,
) -> Work:
    """Make what draws a shard's rows with the largest keys, as in one stream of all shards."""
    reader = load() if load else None

    def work(task: Part) -> bytes:
        # `augment.draw` takes one number a row: the shard begins where one stream of
        # all shards would be, with the generator that `default_rng` makes.
        random = np.random.PCG64(seed)
        random.advance(start := int(task["start"]))
        with _opened(task["path"]) as file:
            stream = _blocks(file, shots, reader)
            drawn = rocket.augment.draw(
                shots, stream, config, budget, np.random.Generator(random)
            )
        vectors = pa.array(drawn.vectors.numpy().ravel())
        # [C, D] as a column of lists.
        lists = pa.FixedSizeListArray.from_arrays(vectors, shots.shape[1])
        key = drawn.key.double().numpy()
        return _packed(
            {"index": drawn.index.numpy() + start, "key": key, EMBEDDING: lists}
        )

    return work


def _blocks(
    file: pq.ParquetFile, shots: Array, reader: Encoder | None
) -> Iterator[Array]:
    """Yield a shard's embeddings, some rows at a time."""
    wanted = TEXTS if reader else (EMBEDDING,)
    _check_columns(file.schema_arrow, wanted)
    for batch in file.iter_batches(batch_size=BLOCK, columns=list(wanted)):
        if any(column.null_count for column in batch.columns):
            refuse("E-SHARD", f"a row has no {' or no '.join(wanted)}")
        if reader:
            yield from reader.blocks(batch.to_pylist(), size=BLOCK)
            continue
        lengths = pc.unique(pc.list_value_length(batch.column(0))).to_pylist()
        if lengths != [shots.shape[1]]:
            have = f"embeddings of {lengths[:3]} numbers"
            refuse("E-SHARD", f"{have}, expected {shots.shape[1]} as in the shots")
        yield _vectors(batch, shots)


def _check_columns(schema: pa.Schema, wanted: Sequence[str]) -> None:
    """Refuse a shard without one column of each name: of texts, or of lists of numbers."""
    for name in wanted:
        places = schema.get_all_field_indices(name)
        if not places:
            expected = "expected embedding, or, with an encoder, prompt and answer"
            refuse("E-SHARD", f"has no column '{name}'; {expected}")
        if len(places) > 1:
            refuse("E-SHARD", f"has {len(places)} columns '{name}', expected one")
        kind = schema.field(places[0]).type
        if name == EMBEDDING:
            fits = _holds_vectors(kind)
            expected = "lists of numbers"
        else:
            fits = _holds_texts(kind)
            expected = "texts"
        if not fits:
            refuse("E-SHARD", f"column '{name}' is {kind!s:.200}, expected {expected}")


def _holds_vectors(kind: pa.DataType) -> bool:
    lists = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    if not any(is_one(kind) for is_one in lists):
        return False
    numbers = kind.value_type
    return bool(pa.types.is_floating(numbers) or pa.types.is_integer(numbers))


def _holds_texts(kind: pa.DataType) -> bool:
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    bare = kind.value_type if pa.types.is_dictionary(kind) else kind
    return any(is_one(bare) for is_one in texts)


def _vectors(table: pa.Table | pa.RecordBatch, shots: Array) -> Array:
    column = table.column(EMBEDDING)
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    values = np.array(column.flatten(), dtype=shots.dtype)
    return values.reshape(-1, shots.shape[1])


def _largest(paths: Sequence[Path], budget: int) -> pa.Table | None:
    """Join what was drawn from each shard: the rows with the largest keys, in their own order."""
    held = None
    for path in paths:
        part = pq.read_table(path)
        held = pa.concat_tables([held, part]) if held else part
        # Of equal keys the earlier row stays, as in `kernels.similarity.largest`.
        held = held.sort_by([("key", "descending"), ("index", "ascending")])[:budget]
    # As in a stream, whose order settles ties in `augment.choose`.
    return held and held.sort_by("index")


def _scoring(
    first: Path,
    base: str,
    shots: list[Row],
    config: Config,
    own: Mapping[str, Task],
    device: str,
) -> Work:
    """Make what scores some LoRAs, each checked beside the bank's first."""
    model, tokenizer = models.load(base, device=device)
    reference = fingerprint(model)
    expanded = rocket.score.expand(shots, order=config.rationale)

    def work(task: Part) -> bytes:
        group = {path.name: path for path in map(Path, task["paths"])}
        paths = {first.name: first, **group}
        read = {
            name: loras.read(path, model, reference) for name, path in paths.items()
        }
        bank.check(read)
        scored = {name: read[name] for name in group}
        nats = partial(
            rocket.score.log_perplexity,
            model,
            tokenizer,
            scored,
            reduction=config.reduction,
        )
        tables = Scored(
            plain=nats(shots),
            reasoning=nats(expanded),
            solved=rocket.score.accuracy(model, tokenizer, scored, shots, own=own),
        )
        columns = {
            name: [*table.to_numpy()] for name, table in tables._asdict().items()
        }
        digests = [lora.digest for lora in scored.values()]
        return _packed({"name": [*scored], "digest": digests, **columns})

    return work


class _Actor:
    """What a worker is: it makes its work at its first task, and returns what is wrong."""

    def __init__(self, make: Callable[[], Work]) -> None:
        # Made once, since that loads an encoder or a base.
        self.make = cache(make)

    def __call__(self, task: Part) -> dict[str, Any]:
        """Return the content of the task's file, or the problem."""
        outcome = {"name": task["name"], "content": b"", "problem": ""}
        try:
            return outcome | {"content": self.make()(task)}
        except (Refusal, OSError) as error:
            # Returned, not raised: other tasks go on and are kept.
            return outcome | {
                "problem": str(told(error) if isinstance(error, OSError) else error)
            }


def _done(
    tasks: list[Part], make: Callable[[], Work], to: Path, engine: Engine
) -> list[Path]:
    """Do the tasks that have no file yet, all that can be done; return all files, in order."""
    to.mkdir(parents=True, exist_ok=True)
    todo = [task for task in tasks if not (to / task["name"]).is_file()]
    problems = []
    ray = todo and engine.name == "ray"
    for outcome in _on_ray(todo, make, engine) if ray else map(_Actor(make), todo):
        if outcome["problem"]:
            problems.append(outcome["problem"])
        else:
            storage.write(to / outcome["name"], outcome["content"])
    if problems:
        # The least, whatever was done first: the same call tells the same problem.
        code, _, text = min(problems).partition(": ")
        kept = f"{len(tasks) - len(problems)} of {len(tasks)} parts are kept in {to}"
        refuse(code, f"{text}; {kept}: mend it and give the same call again")
    return [to / task["name"] for task in tasks]


def _on_ray(
    todo: list[Part], make: Callable[[], Work], engine: Engine
) -> Iterator[dict[str, Any]]:
    """Stream the tasks through a pool of actors; what a lost node had is done elsewhere.

    Where no node is left that could, Ray Data waits for one.
    """
    with cluster.joined(engine.gpus) as ray:
        import ray.data

        there = ray.cluster_resources()
        needs = cluster.needs(engine.gpus)
        room = int(min(there.get(kind, 0) / each for kind, each in needs.items()))
        pool = ray.data.ActorPoolStrategy(
            size=min(engine.workers or max(1, room), len(todo))
        )
        made = {
            "fn_constructor_args": (make,),
            "num_cpus": 1,
            "num_gpus": engine.gpus or None,
        }
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        try:
            tasks = ray.data.from_items(todo, override_num_blocks=len(todo))
            yield from tasks.map(_Actor, compute=pool, **made).iter_rows()
        except ray.exceptions.RayError as error:
            refuse("E-CLUSTER", str(error).strip().splitlines()[-1])


def _listed(folder: Path) -> list[tuple[Path, int, int]]:
    """List a folder's parquet files by name: its first row's number, and the next file's.

    A series such as ``-00000-of-00010`` must be whole.
    """
    files = list[tuple[Path, int, int]]()
    end = 0
    paths = sorted(folder.glob("[!.]*.parquet"))
    _check_series(folder, paths)
    for path in paths:
        start = end
        with _opened(path) as file:
            end = start + file.metadata.num_rows
        files.append((path, start, end))
    if not files:
        problem = f"{folder} holds no parquet file"
        refuse("E-SHARD", f"{problem}; expected shards of rows")
    return files


def _check_series(folder: Path, paths: Iterable[Path]) -> None:
    """Refuse a series of numbered files that lacks one; it begins at 0, or at 1."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        series = re.fullmatch(r"(.*)-(\d+)-of-(0*[1-9]\d*)", path.stem)
        if series:
            name, number, size = series.groups()
            found.setdefault((name, size), []).append(number)
    for (name, size), written in found.items():
        numbers = {*map(int, written)}
        # The last of a series from 1 has the size for its number.
        start = int(int(size) in numbers)
        whole = range(start, start + int(size))
        lacking = next((number for number in whole if number not in numbers), None)
        if lacking is not None:
            # The shortest number tells whether zeros fill them up.
            digits = min(map(len, written))
            lost = folder / f"{name}-{lacking:0{digits}}-of-{size}.parquet"
            refuse("E-SHARD", f"{lost} is missing; bring it back")


@contextmanager
def _opened(path: str | Path) -> Iterator[pq.ParquetFile]:
    """Open a parquet file; in the block say in one line which file has what is wrong."""
    try:
        yield pq.ParquetFile(path, page_checksum_verification=True)
    except Refusal as problem:
        refuse(problem.code, f"{path}: {problem.message}")
    except FileNotFoundError:
        refuse("E-SHARD", f"{path} is missing; bring it back")
    except (pa.ArrowException, OSError) as error:
        refuse("E-SHARD", f"{path} is damaged ({error!s:.200}); bring it back")


def _packed(columns: dict[str, Any]) -> bytes:
    pq.write_table(pa.table(columns), buffer := io.BytesIO())
    return buffer.getvalue()


def _files_of(name: str) -> list[Path]:
    """List what is read of a base or an encoder that is a folder; others are known by their name.

    An encoder's pooling lies one folder below.
    """
    if not os.path.isdir(name):
        return []
    folder = Path(name)
    paths = (*folder.iterdir(), *folder.glob("*/config.json"))
    return sorted(path for path in paths if path.is_file())


def _named(stem: str, files: Iterable[Path], *about: object) -> str:
    """Name what a task leaves by all that it depends on, the versions of its files among it."""
    states = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files
    ]
    return f"{stem}-{storage.text_digest(repr([states, about]))[:12]}.done"
