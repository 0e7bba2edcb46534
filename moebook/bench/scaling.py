"""Rows a second chosen by the shard: in this process, and on a Ray cluster as workers are added."""

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
FILES, WIDTH, SHOTS = 64, 384, 50
WORKERS = (1, 2, 4, 8, 16)  # those that the cluster has CPUs for


def throughput(scale: str = "small", rounds: int = 1) -> pd.DataFrame:
    """Let all engines take turns; return medians by engine of wall-clock time, as text.

    ``seconds`` are of the whole job, in which workers start and import; ``rows_a_second`` are those
    of the second half of the files; ``ratio`` is that over this process's in the same round. The
    cluster is the one that RAY_ADDRESS names, else one of this machine alone.
    """
    refuse_unknown(scale, ROWS, "E-CHOICE", f"unknown scale '{scale}';")
    if rounds < 1:
        refuse("E-RANGE", f"rounds is {rounds}, expected at least 1")
    place = "auto" if "RAY_ADDRESS" in os.environ else "local"
    with TemporaryDirectory() as name, cluster.joined(0, place) as ray:
        cpus, folder = ray.cluster_resources()["CPU"], Path(name)
        rng = np.random.default_rng(0)
        for number in range(FILES):
            _write(folder / f"open-{number:02}-of-{FILES}.parquet", ROWS[scale], rng)
        shots = rng.standard_normal((SHOTS, WIDTH), dtype=np.float32)
        engines = {f"ray, {n}": shards.Engine(name="ray", workers=n) for n in WORKERS if n <= cpus}
        lines = []
        for turn in range(rounds):
            for who, engine in {"local": shards.HERE, **engines}.items():
                begun, to = time.perf_counter(), folder / f"{turn} {who}"
                shards.choose(shots, folder, Config(), to, engine=engine)
                seconds = time.perf_counter() - begun
                ends = sorted(path.stat().st_mtime for path in to.iterdir())
                rate = ROWS[scale] * (FILES // 2) / (ends[-1] - ends[FILES // 2 - 1])
                lines.append([turn, who, seconds, rate])
    frame = pd.DataFrame(lines, columns=["turn", "engine", "seconds", "rows_a_second"])
    first = frame.groupby("turn")["rows_a_second"].transform("first")
    frame["ratio"] = frame["rows_a_second"] / first
    return frame.groupby("engine", sort=False).median().drop(columns="turn").map("{:.3f}".format)


def _write(path: Path, rows: int, rng: np.random.Generator) -> None:
    """Write random embeddings as a shard."""
    block = rng.standard_normal((rows, WIDTH), dtype=np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), WIDTH)
    pq.write_table(pa.table({shards.EMBEDDING: lists}), path)
