"""A study as tasks of a Ray cluster: the same bits, also when a node goes in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moebook import results

PYTHONPATH = str(Path(results.__file__).parents[2])
STUDY = "import sys; from moebook.cli import main; sys.exit(main())"


@pytest.fixture
def committed(fresh: Path) -> Path:
    """The toy project in git: a study runs a commit."""
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*name, "commit", "-qm", "toy"]):
        subprocess.run(["git", *arguments], cwd=fresh, check=True)
    return fresh


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A local cluster of a head without cores to give, and two nodes of one core each."""
    utils = pytest.importorskip("ray.cluster_utils")
    found = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield found
    found.shutdown()


def study(folder: Path, seeds: str, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = ["study", "toy", "--on", "study", "--seeds", seeds, *options]
    return subprocess.Popen(
        [sys.executable, "-c", STUDY, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(240)
def test_a_cluster_gives_the_same_bits_and_survives_the_loss_of_a_node(
    committed: Path, cluster: Any
) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    running = study(committed, "0-3", "--engine", "ray", RAY_ADDRESS=cluster.address)
    assert running.stdout is not None
    while "to run" not in running.stdout.readline():
        pass
    time.sleep(8)  # both nodes are at work
    cluster.remove_node(nodes[1], allow_graceful=False)
    told, errors = running.communicate(timeout=200)
    assert running.returncode == 0, told + errors
    apart = results.pool("toy", "study", committed)
    assert apart is not None
    assert list(apart.seeds) == [0, 1, 2, 3]
    for path in (committed / "results" / "toy" / "study").glob("*.parquet"):
        path.unlink()
    here = study(committed, "0-3", "--jobs", "1")
    told, errors = here.communicate(timeout=120)
    assert here.returncode == 0, told + errors
    alone = results.pool("toy", "study", committed)
    assert alone is not None
    assert [(r.seed, r.values, r.curves) for r in alone.runs] == [
        (r.seed, r.values, r.curves) for r in apart.runs
    ]
