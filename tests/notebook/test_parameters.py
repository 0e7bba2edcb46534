"""The grammar of parameters, and that wrong ones are refused wherever they come from."""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from papermill.translators import PythonTranslator

from moebook.errors import Refusal
from moebook.notebook import Run, begin, parameters, publish

CELL = """\
# What the reader may change.
tier: str = "cpu"  # scale {smoke, cpu, study, gpu, paper}
top_k: int = 2  # experts per token [1, 64]
share: float = 0.5  # of the rows, share (0, 1]
balance: float = 0.01  # weight of the balance loss [0, inf)
width: int = 16  # adapter width {8, 16, 32}
quantise: bool = False  # NF4 on the host's linears
note: str = "#1"  # free text"""
DECLARED = parameters.parse(CELL, "toy")


def test_the_cell_is_read_with_types_defaults_help_and_rules() -> None:
    assert list(DECLARED) == "tier top_k share balance width quantise note".split()
    share = DECLARED["share"]
    assert (share.type, share.default) == (float, 0.5)
    assert (share.help, share.rule) == ("of the rows, share", "(0, 1]")
    assert DECLARED["width"].choices == (8, 16, 32)
    assert (DECLARED["note"].default, DECLARED["note"].rule) == ("#1", "")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_k", 0, r"E-RANGE: here: top_k = 0: expected int in \[1, 64\] \(experts per token\)$"),
        ("top_k", 65, "E-RANGE"), ("top_k", True, "E-TYPE"), ("top_k", 2.0, "E-TYPE"),
        ("top_k", "2", "E-TYPE"), ("top_k", None, "E-TYPE"), ("top_k", (1, 2), "E-TYPE"),
        ("top_k", b"2", "E-TYPE"), ("share", 0.0, "E-RANGE"), ("share", float("nan"), "E-RANGE"),
        ("share", "1e-5", r"E-TYPE.*1\.0e-5"), ("balance", float("inf"), "E-RANGE"),
        ("balance", -1, "E-RANGE"), ("width", 9, "E-RANGE"), ("quantise", 1, "E-TYPE"),
        ("quantise", "true", "E-TYPE.*-y '{quantise: true}'"), ("note", 3, "E-TYPE"),
        ("note", "\udcff", "E-TYPE"), ("tier", "cpus", "E-RANGE.*did you mean 'cpu'"),
        ("topk", 2, "E-PARAMETER.*did you mean 'top_k'"), ("top_k=1;import os", 2, "E-PARAMETER"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(Refusal, match=message) as refusal:
        parameters.check(DECLARED, {name: value}, "here")
    assert name in refusal.value.message and "here" in refusal.value.message


def test_values_at_the_ends_of_their_range_are_taken() -> None:
    ends = (("top_k", 1), ("top_k", 64), ("share", 1), ("share", 1e-9), ("width", 32))
    for name, value in (*ends, ("balance", 0)):
        parameters.check(DECLARED, {name: value}, "here")
        assert DECLARED[name].read(str(value), "here") == value


def test_texts_of_the_command_line_become_typed_values_or_are_refused() -> None:
    texts = ["top_k=1", "share=1e-3", "quantise=TRUE", "note=a=b;c", "width=8"]
    found = parameters.read_options(DECLARED, texts)
    assert found == {"top_k": 1, "share": 1e-3, "quantise": True, "note": "a=b;c", "width": 8}
    assert type(found["share"]) is float and type(found["quantise"]) is bool
    for text in ("top_k", "top_k=1 top_k=2", "top_k=1.0", "quantise=1", "share=nan", "=1"):
        with pytest.raises(Refusal, match="-p"):
            parameters.read_options(DECLARED, text.split())


@pytest.mark.parametrize(
    "line",
    [
        "top_k = 2", "import os", "top_k: int = 1 + 1", "top_k: int = int('2')", "top_k: int",
        "top_k: list = [1]", "top_k: int = None", "top_k: int = 2.0", "lr: float = float('nan')",
        "top_k: int = 0  # experts [1, 64]", "top_k: int = 2  # experts [1; 64]",
        "top_k: int = 2  # experts [64, 1]", "top_k: int = 2  # experts {a, b}",
        "flag: bool = True  # switch [0, 1]", "note: str = 'a'  # text [0, 1]",
        "top_k: int = 2\ntop_k: int = 3", "top_k: int = 2 +",
    ],
)  # fmt: skip
def test_a_cell_that_breaks_the_grammar_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(Refusal, match=r"toy, parameters cell, line \d"):
        parameters.parse(line, "toy")


def _begin(*cells: str, **names: object) -> str:
    values = {name: parameter.default for name, parameter in DECLARED.items()} | names
    return begin(["", "import moebook", *cells, "run = begin(In, globals())"], values).tier


def test_begin_takes_right_parameters_and_knows_the_tier() -> None:
    assert _begin(CELL) == "cpu"
    assert _begin(CELL, '# Parameters\ntop_k = 1\ntier = "smoke"\n', tier="smoke") == "smoke"


@pytest.mark.parametrize(
    ("injected", "code"),
    [
        ("topk = 1", "E-PARAMETER"), ("top_k = 0", "E-RANGE"), ('quantise = "true"', "E-TYPE"),
        ("share = float('nan')", "E-TYPE"), ("top_k = [1]", "E-TYPE"),
        ("top_k = __import__('os').getpid()", "E-TYPE"), ("top_k = 1; import os", "E-PARAMETER"),
        ("top_k = share = 1", "E-PARAMETER"), ("top_k += 1", "E-PARAMETER"),
        ("print(1)", "E-PARAMETER"),
    ],
)  # fmt: skip
def test_begin_refuses_a_wrong_injected_cell(injected: str, code: str) -> None:
    with pytest.raises(Refusal, match=code):
        _begin(CELL, f"# Parameters\n{injected}\n")


def test_begin_checks_the_variables_as_they_are_now_by_the_cell_as_it_is_now() -> None:
    with pytest.raises(Refusal, match="top_k = 99"):
        _begin(CELL, top_k=99)
    edited = CELL.replace("[1, 64]", "[1, 128]")
    assert _begin(CELL, "%time 1", "answer: int = 42", edited, top_k=99) == "cpu"
    with pytest.raises(Refusal, match="name: type = default"):
        begin(["", "x = 1"], {})


def test_begin_seeds_everything() -> None:
    cell = f"{CELL}\nseed: int = 3  # [0, 100]"
    begin([cell], {name: parameter.default for name, parameter in DECLARED.items()} | {"seed": 3})
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.manual_seed(3)))


@given(st.text(), st.text())
def test_no_option_can_smuggle_in_a_name(name: str, value: str) -> None:
    with suppress(Refusal):
        assert set(parameters.read_options(DECLARED, [f"{name}={value}"])) <= set(DECLARED)


@given(st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.booleans()))
def test_what_papermill_writes_for_an_accepted_value_is_one_literal(value: Any) -> None:
    name = {bool: "quantise", int: "top_k", float: "share", str: "note"}[type(value)]
    try:
        parameters.check(DECLARED, {name: value}, "here")
    except Refusal:
        return
    (statement,) = ast.parse(PythonTranslator.codify({name: value})).body
    assert isinstance(statement, ast.Assign)
    assert parameters.literal(statement.value, "here") == value


def test_the_kernels_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"HF_TOKEN": "a-canary", "WANDB_API_KEY": "a-canary", "INNOCENT": "hf_" + "a" * 30}
    for name, value in (secrets | {"TOKENIZERS_PARALLELISM": "false"}).items():
        monkeypatch.setenv(name, value)
    environment = publish.environment()
    assert not secrets.keys() & environment.keys()
    assert {"TOKENIZERS_PARALLELISM", "PATH"} <= environment.keys()


def test_the_arms_of_a_run_are_the_named_ones_in_the_notebooks_order() -> None:
    known, run = {"wide": 1, "dense": 2, "kaiming": 3}, Run("cpu")
    assert run.arms("all", known) == known
    assert list(run.arms("kaiming,wide", known)) == ["wide", "kaiming"]
    assert parameters.listed("laboratory", "", known) == []
    for text, message in (
        ("wid", "arms lists 'wid': did you mean 'wide'"),
        ("wide,wide", "arms lists 'wide' twice"),
        ("", "arms is empty; one of: all, dense, kaiming, wide"),
    ):
        with pytest.raises(Refusal, match=f"E-RANGE: {message}"):
            run.arms(text, known)
