"""Runs side by side: one process a run, with one thread, that ends when its parent does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from moebook import runtime
from moebook.errors import Refusal
from moebook.notebook.parameters import Scalar

START = "from moebook.notebook import processes; processes.child()"


@dataclass(frozen=True)
class Job:
    """One run to execute.

    Args:
        notebook: Short name.
        protocol: One of its protocols.
        overrides: Parameters that go before the protocol's.
        force: Run even when an equal run is there.
    """

    notebook: str
    protocol: str
    overrides: Mapping[str, Scalar] = field(default_factory=dict)
    force: bool = False


class Processes:
    """The processes that this one has started and not yet heard the end of.

    Use it as a context: at its end, however it comes, none of them is left.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()  # jobs are executed in threads
        self._ended = False

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            left = list(self._running)
        for process in left:
            process.terminate()
        for process in left:
            process.wait()

    def execute(self, job: Job, folder: Path) -> Path:
        """Execute a job with the code that lies in a project, and return its executed notebook.

        Raises:
            Refusal: What the run was refused or failed with.
        """
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
        with self._lock:
            if self._ended:
                raise Refusal("E-RUN", "was not started: the others were ended")
            process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(vars(job))],
                cwd=folder,
                env={**os.environ, **threads, "PYTHONPATH": path},
                stdin=subprocess.PIPE,  # closed when this process ends, however it does
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the parent, who ends its children
            )
            self._running.add(process)
        out, errors = _outputs(process)
        with self._lock:
            self._running.discard(process)
        if process.returncode:
            lines = errors.strip().splitlines() or [f"ended with status {process.returncode}"]
            code, colon, text = lines[-1].partition(": ")
            known = bool(colon) and code.startswith("E-")
            raise Refusal(code, text) if known else Refusal("E-RUN", lines[-1])
        return Path(out.strip().splitlines()[-1])

    def side_by_side(
        self, jobs: Sequence[Job], folder: Path, workers: int
    ) -> Iterator[tuple[Job, Path | Refusal]]:
        """Execute jobs, as many at a time as there are workers; yield each as it ends."""
        with ThreadPoolExecutor(workers) as threads:
            futures = {threads.submit(self._outcome, job, folder): job for job in jobs}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self.__exit__()
                raise

    def _outcome(self, job: Job, folder: Path) -> Path | Refusal:
        try:
            return self.execute(job, folder)
        except Refusal as refusal:
            return refusal


def _outputs(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Read both outputs to their ends and wait; unlike `communicate`, leave stdin open."""
    assert process.stdout is not None and process.stderr is not None and process.stdin is not None
    told: list[str] = []
    reader = threading.Thread(target=lambda: told.append(process.stderr.read()))  # type: ignore[union-attr]
    reader.start()
    out = process.stdout.read()
    reader.join()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()
    return out, "".join(told)


def child() -> None:
    """Execute the job that the command line holds, and print the path of its notebook."""
    from moebook.notebook.runner import run_notebook

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = Job(**json.loads(sys.argv[-1]))
    try:
        outcome = run_notebook(job.notebook, job.protocol, job.overrides, force=job.force)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(2)
    if outcome:
        print(outcome.notebook)


def _end_with_parent() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def cores() -> int:
    """How many processes may run side by side: as many as this one may use cores."""
    return int(runtime.environment()["cores"])
