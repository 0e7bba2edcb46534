"""What every test gets: no network, offline libraries, fixed threads, interpreted Triton."""

import gc
import ipaddress
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests.sizes import SMALL

# Triton reads this when `@triton.jit` decorates, so it stands before any import of the package.
# Where there is a GPU the kernels are compiled instead, and the tests marked `gpu` run as well.
os.environ.setdefault(
    "TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1"
)
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MOEBOOK_QUIET": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # of the copies of the package that tests make
}
# One thread: results repeat bit for bit at a fixed count, and tiny models are faster so.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A worker inherits the line above on bytecode. Pytest may keep the tests that it has compiled all
# the same: to compile them takes a worker a third of the time in which it collects.
sys.dont_write_bytecode = False

# What is imported and collected stays, and looking for garbage among it takes a quarter of that
# time and more: it begins when all is collected, and passes it by.
gc.disable()

settings.register_profile("moebook", deadline=None, derandomize=True)
settings.load_profile("moebook")


# This machine's, by which nodes of a cluster find each other.
ADDRESSES = {each.address for card in psutil.net_if_addrs().values() for each in card}


def cut_the_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: a connection to anything but this machine raises, in whatever code asks."""
    asks = event in ("socket.connect", "socket.sendto")
    # A Unix socket's address is a path, no tuple.
    if not asks or not isinstance(arguments[1], tuple):
        return
    host = str(arguments[1][0]).partition("%")[0]
    try:
        local = host in ADDRESSES or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise RuntimeError(f"a test asked the network for {host}: tests run offline")


sys.addaudithook(cut_the_network)


PLACE = "MOEBOOK_TESTS_WARM"  # for workers: the socket of the process that forks for all of them


def pytest_configure(config: pytest.Config) -> None:
    """Import the libraries once for all workers, while they start."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        return
    block = ExitStack()
    config.add_cleanup(block.close)
    os.environ[PLACE] = block.enter_context(_warm()) or ""


@contextmanager
def _warm() -> Iterator[str | None]:
    """Start a process that forks; yield its socket, None where nothing can be forked."""
    from moebook.lab.pages.generated import RENDERER
    from moebook.lab.run import publish, warm

    # Its name is short enough for sockets, unlike tmp_path's.
    with tempfile.TemporaryDirectory() as folder:
        libraries = [*warm.LIBRARIES, *RENDERER]
        with warm.warm(Path(folder), publish.environment(), libraries) as place:
            yield place


@pytest.fixture(scope="session")
def warmed() -> Iterator[str | None]:
    """Where processes are forks of one that has imported; None where nothing can be forked."""
    if PLACE in os.environ:
        yield os.environ[PLACE] or None
    else:
        with _warm() as place:
            yield place


# What takes longest or waits for processes: each worker begins with a list of its own. Neighbours
# share something: a warm process, a study, the rendered book, committed pools, a run of the toy.
FIRST = (
    "its_values_are_in_the_page there[bases_findings] killed_runs test_sharding test_study.py",
    "test_book.py test_rendering test_own_pages compile_and_fit test_stranger test_editions "
    "findings_are_drawn test_pages test_intervals test_prose test_bounds test_verdicts "
    "test_findings.py test_heads",
    "test_runner.py test_witness test_bench.py",
)


@pytest.hookimpl(trylast=True)  # when those that are not asked for have gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no worker waits for another's last test."""
    chains: list[list[pytest.Item]] = []
    rest = list(items)
    for names in FIRST:
        chains.append([])
        for name in names.split():
            chains[-1] += [item for item in rest if name in item.nodeid]
            rest = [item for item in rest if name not in item.nodeid]
    # xdist deals the tests out in equal parts; who has none left takes them from another's end.
    part = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ordered: list[pytest.Item] = []
    for number, chain in enumerate(chains, start=1):
        ordered += chain
        room = max(0, number * part - len(ordered))
        ordered += rest[:room]
        rest = rest[room:]
    items[:] = ordered + rest


def pytest_collection_finish() -> None:
    """Look for garbage from here on, though not among what was imported and collected."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no NVIDIA GPU")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of published artefacts that some tests compare with, from MOEBOOK_SHARED."""
    folder = os.environ.get("MOEBOOK_SHARED", "")
    if not folder:
        pytest.skip("MOEBOOK_SHARED is not set: no published artefacts to compare with")
    if not Path(folder).is_dir():
        pytest.fail(f"MOEBOOK_SHARED={folder} is not a folder")
    return Path(folder)


@pytest.fixture(scope="session")
def pools() -> Callable[[str], Any]:
    """A notebook's committed pools by its name, each read once in a process."""
    from moebook.lab.records import store

    return cache(partial(store.pools, folder=Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def ledger(pools: Callable[[str], Any]) -> tuple[Any, ...]:
    """Every claim with its verdicts in the committed pools, computed once in a process."""
    from moebook.lab.evidence import verdicts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts.store, "pools", lambda name, *_, **__: pools(name))
        return tuple(verdicts.ledger(Path(__file__).parents[1], live=False))


@pytest.fixture(scope="session")
def forks(
    tmp_path_factory: pytest.TempPathFactory, warmed: str | None
) -> Iterator[Any]:
    """Commands of `moebook` without the time that imports take."""
    from tests.faults.forks import Forks

    made = Forks(tmp_path_factory.mktemp("forks") / "told", warmed)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """A builder of random Llamas of 2 layers, width 32 and 300 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        own = {"max_position_embeddings": 512, "tie_word_embeddings": True}
        config = LlamaConfig(**{**SMALL, **own, **changes})
        return LlamaForCausalLM(config).eval()

    return build


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """Byte-level BPE: three special tokens, 256 bytes and a few merges, at most 300 tokens."""
    from tests import tokens

    return tokens.byte_tokenizer()
