"""lm-eval with an index of the benchmarks that the tests ask for."""

from functools import cache
from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from moebook.evaluation import benchmarks

FOLDERS = ("arc", "gsm8k", "hellaswag", "mbpp", "mmlu/default", "openbookqa", "piqa", "siqa",
           "super_glue/boolq", "winogrande")  # fmt: skip


@cache
def small():
    place = Path(lm_eval.tasks.__file__).parent
    folders = [*(place / name for name in FOLDERS), benchmarks.OURS]
    return TaskManager(include_path=folders, include_defaults=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Index these instead of all, which takes half a minute."""
    monkeypatch.setattr(benchmarks, "_index", small)
