"""What a cluster lacks, told without one: nodes are a table here, and a task is a call.

`make soak` asks the same of a real cluster that loses its node (tests/lab/run/test_study.py).
"""

import socket
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from moebook import cluster
from moebook.errors import Refusal
from moebook.lab.run import study
from tests.refusals import refused


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


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("foo", "Invalid address format: foo; expected host:port"),
        ("127.0.0.1:dead", "no Ray cluster answers at .*:dead, expected host:port"),
        ("127.0.0.1:99999", "no Ray cluster answers at .*:99999"),
        ("[::1]:99999", "no Ray cluster answers at .*:99999"),
        ("no.such.invalid:6379", "no Ray cluster answers at no.such.invalid:6379"),
        ("ray://127.0.0.1:9", "Invalid address format: ray://127.0.0.1:9; expected"),
        ("{free}", "no Ray cluster answers at .*mend RAY_ADDRESS, or start one"),
    ],
)
def test_an_address_without_a_cluster_is_refused_before_ray_waits_for_it(
    address, message, monkeypatch
):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", None)  # would fail if it were called
    # Else Ray puts this machine's address on its network for it.
    monkeypatch.setattr(ray._private.services, "resolve_ip_for_localhost", str)
    with socket.socket() as bound:  # which does not listen
        bound.bind(("127.0.0.1", 0))
        free = f"127.0.0.1:{bound.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address.format(free=free))
        refused(f"E-CLUSTER: {message}", cluster.joined(0).__enter__)
