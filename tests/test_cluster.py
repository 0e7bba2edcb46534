"""What a cluster lacks, told without one: nodes are a table here, and a task is a call.

`make soak` asks the same of a real cluster that loses its node (tests/lab/run/test_study.py).
"""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from moebook import cluster
from moebook.errors import Refusal
from moebook.lab.run import study


class Nodes:
    """Stands in for the module ``ray``: the task of a job runs when it is waited for."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, *resources, added=None, lost_after=None):
        self.alive = [{"Alive": True, "Resources": each} for each in resources]
        self.lost_after = lost_after  # tasks, after which no node is alive
        self.done = 0
        self.asked = None
        state = SimpleNamespace(get_max_resources_from_cluster_config=lambda: added)
        self._private = SimpleNamespace(state=SimpleNamespace(state=state))

    def nodes(self):
        return self.alive

    def remote(self, **asked):
        self.asked = asked
        return lambda task: SimpleNamespace(remote=lambda job: partial(task, job))

    def wait(self, waiting, timeout):
        if self.done == self.lost_after:
            for node in self.alive:
                node["Alive"] = False
            return [], waiting
        self.done += 1
        return waiting[:1], waiting[1:]

    def get(self, each):
        return each()


NODE = {"CPU": 4.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("nodes", "gpus", "most"),
    [
        ([NODE], 0, None),
        ([NODE], 0.5, None),
        ([{"CPU": 4.0}, NODE], 1, None),
        ([NODE, NODE], 2, 1),  # two GPUs, of two nodes
        ([{"CPU": 4.0}], 1, 0),
        ([{"GPU": 1.0}], 1, 1),  # no CPU beside its GPU
    ],
)
def test_a_run_is_lacking_what_no_single_node_has(nodes, gpus, most):
    told = cluster.lacking(Nodes(*nodes), gpus)
    if most is None:
        assert told == ""
    else:
        assert told == (
            f"a run needs 1 CPU and {gpus} GPU of one node, which none has "
            f"(most GPUs: {most}); add such a node"
        )


def test_a_dead_node_gives_nothing_and_one_that_can_be_added_does():
    gone = Nodes(NODE)
    gone.alive[0]["Alive"] = False
    assert "(most GPUs: 0)" in cluster.lacking(gone, 1)
    assert cluster.lacking(Nodes({"CPU": 1.0}, added=NODE), 1) == ""


def test_runs_that_no_node_can_execute_any_more_fail_at_once(tmp_path, monkeypatch):
    ray = Nodes(NODE, lost_after=1)

    @contextmanager
    def joined(gpus, **environment):
        assert environment == {"working_dir": str(tmp_path), "excludes": ["runs"]}
        yield ray

    monkeypatch.setattr(cluster, "joined", joined)
    monkeypatch.setattr(study, "_task", lambda job: f"run {job}".encode())
    jobs = [study.Job("toy", "nano", {"seed": seed}) for seed in (0, 60, 61)]
    (first, path), *others = study._on_ray(jobs, tmp_path, 0.5)
    assert ray.asked == {"num_cpus": 1, "num_gpus": 0.5, "max_retries": 5}
    assert first is jobs[0] and path.read_bytes() == f"run {jobs[0]}".encode()
    assert [job for job, _ in others] == jobs[1:]
    for _, refusal in others:
        assert isinstance(refusal, Refusal) and refusal.code == "E-CLUSTER"
        assert "needs 1 CPU and 0.5 GPU" in refusal.message
