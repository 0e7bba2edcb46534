"""Rows a second chosen by the shard: in this process, and on Ray workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from moebook import cluster
from moebook.errors import refuse, refuse_unknown
from moebook.methods.rocket import Config, shards

ROWS = {"tiny": 32, "small": 4096, "full": 16_384, "model": 163_840}
"""Rows of one of the files, by scale."""
FILES = 64
WIDTH = 384  # of an embedding
SHOTS = 50
WORKERS = (1, 2, 4, 8, 16)  # those that the cluster has CPUs for


def throughput(scale: str = "small", rounds: int = 1) -> pd.DataFrame:
    """Let all engines take turns; return medians by engine of wall-clock time, as text.

    ``seconds`` are of the whole job, in which workers start and import;
    ``rows_a_second`` are those of the second half of the files; ``ratio`` is that over
    this process's in the same round. The cluster is the one that RAY_ADDRESS names,
    else one of this machine alone.
    """
    refuse_unknown(scale, ROWS, "E-CHOICE", f"unknown scale '{scale}';")
    if rounds < 1:
        refuse("E-RANGE", f"rounds is {rounds}, expected at least 1")
    place = "auto" if "RAY_ADDRESS" in os.environ else "local"
    lines = []
    with TemporaryDirectory() as name, cluster.joined(0, place) as ray:
        folder = Path(name)
        rng = np.random.default_rng(0)
        for number in range(FILES):
            _write(folder / f"open-{number:02}-of-{FILES}.parquet", ROWS[scale], rng)
        shots = rng.standard_normal((SHOTS, WIDTH), dtype=np.float32)

        engines = {"local": shards.HERE}
        for workers in WORKERS:
            if workers <= ray.cluster_resources()["CPU"]:
                engine = shards.Engine(name="ray", workers=workers)
                engines[f"ray, {workers}"] = engine

        for turn in range(rounds):
            for who, engine in engines.items():
                target = folder / f"{turn} {who}"
                start = time.perf_counter()
                shards.choose(shots, folder, Config(), target, engine=engine)
                seconds = time.perf_counter() - start
                lines.append([turn, who, seconds, _rate(target, ROWS[scale])])
    frame = pd.DataFrame(lines, columns=["turn", "engine", "seconds", "rows_a_second"])
    here = frame.groupby("turn")["rows_a_second"].transform("first")
    frame["ratio"] = frame["rows_a_second"] / here
    medians = frame.groupby("engine", sort=False).median().drop(columns="turn")
    return medians.map("{:.3f}".format)


def _rate(folder: Path, rows: int) -> float:
    """Rows a second of the second half of the files: workers have started by then."""
    ends = sorted(path.stat().st_mtime for path in folder.iterdir())
    half = FILES // 2
    return rows * half / (ends[-1] - ends[half - 1])


def _write(path: Path, rows: int, rng: np.random.Generator) -> None:
    """Write random embeddings as a shard."""
    block = rng.standard_normal((rows, WIDTH), dtype=np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), WIDTH)
    pq.write_table(pa.table({shards.EMBEDDING: lists}), path)
