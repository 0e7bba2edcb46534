"""The exercises that ask for code: every stub fails its check, every solution passes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGES = sorted((Path(__file__).parents[2] / "book").glob("*_exercises.md"))
BLOCK = re.compile(
    r"```\{code-block\} python\n:name: (\S+)-(stub|check|solution)\n\n(.*?)```", re.S
)


WRITTEN = [block for page in PAGES for block in BLOCK.findall(page.read_text(encoding="utf-8"))]
BLOCKS = {(name, part): code for name, part, code in WRITTEN}
NAMES = sorted({name for name, _ in BLOCKS})


def _run(name: str, part: str) -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[name, part] + BLOCKS[name, "check"], names)


def test_every_exercise_in_code_has_a_stub_a_check_and_a_solution() -> None:
    parts = {(name, part) for name in NAMES for part in ("stub", "check", "solution")}
    assert NAMES and set(BLOCKS) == parts


@pytest.mark.parametrize("name", NAMES)
def test_the_stub_fails_its_check_and_the_solution_passes_it(name: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        _run(name, "stub")
    _run(name, "solution")
    assert BLOCKS[name, "solution"] != BLOCKS[name, "stub"]
