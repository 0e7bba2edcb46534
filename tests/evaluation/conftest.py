"""lm-eval with an index of the benchmarks that the tests ask for."""

import os
from functools import cache
from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager

from moebook.errors import Refusal
from moebook.evaluation import harness, sandbox

FOLDERS = (
    "arc",
    "drop",
    "evalita_llm",
    "gsm8k",
    "hellaswag",
    "mbpp",
    "mgsm/en_cot",
    "mmlu/default",
    "openbookqa",
    "piqa",
    "siqa",
    "squadv2",
    "super_glue/boolq",
    "unitxt",
    "wikitext",
    "winogrande",
)


@cache
def small():
    place = Path(lm_eval.tasks.__file__).parent
    folders = [*(place / name for name in FOLDERS), harness.OURS]
    return TaskManager(include_path=folders, include_defaults=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Index these instead of all, which takes half a minute."""
    monkeypatch.setattr(harness, "_index", small)


def require_sandbox():
    """Skip a test where there is no sandbox, in the refusal's words; fail it in CI."""
    try:
        sandbox.ready()
    except Refusal as refusal:
        end = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        end(str(refusal))


@pytest.fixture
def box():
    require_sandbox()
