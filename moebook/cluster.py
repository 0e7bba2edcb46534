"""A Ray cluster, joined for the length of a block; what it can never give is refused in one line.

Ray is optional (``pip install 'moebook[cluster]'``) and imported when it is asked for.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from moebook.errors import extra, refuse

PATIENCE = 5.0  # seconds in which the head of a cluster takes a connection


def needs(gpus: float) -> dict[str, float]:
    """Return what one run or actor takes of its node: a CPU, and a part of a GPU or whole ones."""
    if gpus and not (0.0001 <= gpus <= 1 or (gpus > 1 and gpus % 1 == 0)):
        refuse(
            "E-RANGE",
            f"GPUs of a run are {gpus:g}, expected a part of one or a whole number",
        )
    return {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})


@contextmanager
def joined(gpus: float, address: str = "auto", **environment: Any) -> Iterator[Any]:
    """Join the cluster that this machine belongs to; yield the module ``ray``.

    A cluster that is `lacking` what a run `needs` is refused, and an address at which none answers
    (E-CLUSTER). A connection that this process has already is used and left open; a new one gets
    the runtime ``environment``. The address ``local`` starts a cluster of this machine alone.
    """
    needs(gpus)
    with extra("cluster", "--engine ray"):
        import ray
    there = ray.is_initialized()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if not there:
            check_answers(ray, address)
            ray.init(address=address, runtime_env=environment, **quiet)
    except ConnectionError:
        refuse(
            "E-CLUSTER", "no Ray cluster is running here; start one: ray start --head"
        )
    try:
        lack = lacking(ray, gpus)
        if lack:
            refuse("E-CLUSTER", lack)
        yield ray
    finally:
        if not there:
            ray.shutdown()


def check_answers(ray: Any, address: str) -> None:
    """Refuse an address that is none, or where nothing listens: Ray waits there for minutes."""
    expected = "expected host:port of its head, as in 10.0.0.5:6379"
    try:
        place = ray._private.services.canonicalize_bootstrap_address(address)
    except ValueError as error:
        refuse("E-CLUSTER", f"{error}; {expected}: mend RAY_ADDRESS")
    if place is None:  # a cluster is started here
        return
    host, _, port = place.rpartition(":")
    if not _listens(host.strip("[]"), port):
        fix = "mend RAY_ADDRESS, or start one: ray start --head"
        refuse("E-CLUSTER", f"no Ray cluster answers at {place}, {expected}; {fix}")


def _listens(host: str, port: str) -> bool:
    """Whether somebody takes a connection there."""
    if not port.isdecimal() or int(port) >= 2**16:
        return False
    with suppress(OSError, UnicodeError):  # of a name that can be no host's
        socket.create_connection((host, int(port)), PATIENCE).close()
        return True
    return False


def lacking(ray: Any, gpus: float) -> str:
    """Say which resource no node has, nor any that an autoscaler could add; else nothing."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes.append(ray._private.state.state.get_max_resources_from_cluster_config() or {})
    wanted = needs(gpus)
    for node in nodes:
        if all(node.get(kind, 0) >= count for kind, count in wanted.items()):
            return ""
    each = " and ".join(f"{n:g} {kind}" for kind, n in wanted.items())
    most = max(node.get("GPU", 0) for node in nodes)
    return f"a run needs {each} of one node, which none has (most GPUs: {most:g}); add such a node"
