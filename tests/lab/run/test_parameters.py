"""Parameters and protocols: their grammar; wrong ones are refused wherever they come from."""

import ast
import shutil
from contextlib import suppress

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from papermill.translators import PythonTranslator

from moebook import lists, storage
from moebook.errors import Refusal
from moebook.lab.run import Run, begin, parameters, publish, sources
from tests.refusals import refused

CELL = """\
# What the reader may change.
tier: str = "cpu"  # scale {smoke, cpu, study, gpu, paper}
top_k: int = 2  # experts per token [1, 64]
share: float = 0.5  # of the rows, share (0, 1]
balance: float = 0.01  # weight of the balance loss [0, inf)
width: int = 16  # adapter width {8, 16, 32}
quantise: bool = False  # NF4 on the host's linears
note: str = "#1"  # free text
rates: str = ""  # learning rates (0, 1)"""
DECLARED = parameters.parse(CELL, "toy")


def test_the_cell_is_read_and_values_at_the_ends_of_their_range_are_taken():
    names = "tier top_k share balance width quantise note rates"
    assert list(DECLARED) == names.split()
    share = DECLARED["share"]
    assert (share.type, share.default) == (float, 0.5)
    assert (share.help, share.rule) == ("of the rows, share", "(0, 1]")
    assert DECLARED["width"].choices == (8, 16, 32)
    assert (DECLARED["note"].default, DECLARED["note"].rule) == ("#1", "")
    ends = (("top_k", 1), ("top_k", 64), ("share", 1), ("share", 1e-9), ("width", 32))
    for name, value in (*ends, ("balance", 0)):
        parameters.check(DECLARED, {name: value}, "here")
        assert DECLARED[name].read(str(value), "here") == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "top_k",
            0,
            r"E-RANGE: here: top_k = 0: expected int in \[1, 64\] \(experts per token\)$",
        ),
        ("top_k", 65, "E-RANGE"),
        ("top_k", True, "E-TYPE"),
        ("top_k", 2.0, "E-TYPE"),
        ("top_k", "2", "E-TYPE"),
        ("top_k", None, "E-TYPE"),
        ("top_k", (1, 2), "E-TYPE"),
        ("top_k", b"2", "E-TYPE"),
        ("share", 0.0, "E-RANGE"),
        ("share", float("nan"), "E-RANGE"),
        ("share", "1e-5", r"E-TYPE.*1\.0e-5"),
        ("share", "default", r"E-TYPE.*found str(?! \(YAML)"),
        ("balance", float("inf"), "E-RANGE"),
        ("balance", -1, "E-RANGE"),
        ("width", 9, "E-RANGE"),
        ("quantise", 1, "E-TYPE"),
        ("quantise", "true", "E-TYPE.*-y '{quantise: true}'"),
        ("note", 3, "E-TYPE"),
        ("note", "\udcff", "E-TYPE"),
        *(
            ("note", f"a{mark}b", "E-TYPE.*one line")
            for mark in "\n\r\x1b\x9b\u2028\u202e"
        ),
        ("rates", "abc", "E-RANGE: here: rates lists 'abc': expected numbers with"),
        ("rates", "0.1,nan", "E-RANGE: here: rates lists 'nan'"),
        ("rates", "0.1;0.2", "E-RANGE: here: rates lists '0.1;0.2'"),
        (
            "rates",
            "0.1,5",
            r"E-RANGE: here: rates lists 5: expected numbers in \(0, 1\)",
        ),
        ("rates", 5.0, "E-RANGE: here: rates lists 5: expected"),
        ("rates", "0.001,1e-3", "E-RANGE: here: rates lists 0.001 twice: give each"),
        ("rates", "0.001234567,0.001234568", "E-RANGE.* to the six digits of a"),
        ("rates", True, "E-TYPE: here: rates = True: expected str, found bool"),
        ("tier", "cpus", "E-RANGE.*did you mean 'cpu'"),
        ("topk", 2, "E-PARAMETER.*did you mean 'top_k'"),
        ("top_k=1;import os", 2, "E-PARAMETER"),
    ],
)
def test_a_wrong_parameter_is_refused(name, value, message):
    refusal = refused(message, parameters.check, DECLARED, {name: value}, "here")
    assert name in refusal.message
    assert "here" in refusal.message


def test_texts_of_the_command_line_become_typed_values_or_are_refused():
    texts = ["top_k=1", "share=1e-3", "quantise=TRUE", "note=a=b;c", "width=8"]
    found = parameters.read_options(DECLARED, texts)
    assert found == {
        "top_k": 1,
        "share": 1e-3,
        "quantise": True,
        "note": "a=b;c",
        "width": 8,
    }
    assert type(found["share"]) is float
    assert type(found["quantise"]) is bool
    for text in (
        "top_k",
        "top_k=1 top_k=2",
        "top_k=1.0",
        "quantise=1",
        "share=nan",
        "=1",
    ):
        refused("-p", parameters.read_options, DECLARED, text.split())


@pytest.mark.parametrize(
    ("given", "taken"),
    [(0.001, "0.001"), (1e-05, "1e-05"), ("0.1, 1e-3,", "0.1,1e-3,"), ("", "")],
)
def test_a_list_of_numbers_may_be_given_as_its_only_number(given, taken):
    found = parameters.check(DECLARED, {"rates": given}, "here")
    assert found == {"rates": taken}
    assert type(found["rates"]) is str
    values = {one.name: one.default for one in DECLARED.values()} | {"rates": given}
    injected = f"# Parameters\nrates = {given!r}\n"
    run = begin(["", CELL, injected, "begin(In, globals())"], values)
    assert values["rates"] == run.settings["rates"] == taken


@pytest.mark.parametrize(
    "line",
    [
        "top_k = 2",
        "import os",
        "top_k: int = 1 + 1",
        "top_k: int = int('2')",
        "top_k: int",
        "top_k: list = [1]",
        "top_k: int = None",
        "top_k: int = 2.0",
        "lr: float = float('nan')",
        "top_k: int = 0  # experts [1, 64]",
        "top_k: int = 2  # experts [1; 64]",
        "top_k: int = 2  # experts [64, 1]",
        "top_k: int = 2  # experts {a, b}",
        "flag: bool = True  # switch {0, 1}",
        "flag: bool = True  # switch {True, False}",
        "flag: bool = True  # switch [0, 1]",
        "note: str = 'a'  # numbers [0, 1]",
        "note: str = '2'  # numbers [0, 1]",
        "top_k: int = 2\ntop_k: int = 3",
        "top_k: int = 2 +",
    ],
)
def test_a_cell_that_breaks_the_grammar_is_refused_with_its_line(line):
    refused(r"toy, parameters cell, line \d", parameters.parse, line, "toy")


def _begin(*cells, **names):
    values = {name: parameter.default for name, parameter in DECLARED.items()} | names
    return begin(
        ["", "import moebook", *cells, "run = begin(In, globals())"], values
    ).tier


@pytest.mark.parametrize(
    ("injected", "code"),
    [
        ("topk = 1", "E-PARAMETER"),
        ("top_k = 0", "E-RANGE"),
        ('quantise = "true"', "E-TYPE"),
        ("share = float('nan')", "E-TYPE"),
        ("top_k = [1]", "E-TYPE"),
        ("top_k = __import__('os').getpid()", "E-TYPE"),
        ("top_k = 1; import os", "E-PARAMETER"),
        ("top_k = share = 1", "E-PARAMETER"),
        ("top_k += 1", "E-PARAMETER"),
        ("print(1)", "E-PARAMETER"),
    ],
)
def test_begin_refuses_a_wrong_injected_cell(injected, code):
    refused(code, _begin, CELL, f"# Parameters\n{injected}\n")


def test_begin_knows_the_tier_checks_what_is_there_now_and_seeds_everything():
    assert _begin(CELL) == "cpu"
    given = '# Parameters\ntop_k = 1\ntier = "smoke"\n'
    assert _begin(CELL, given, tier="smoke", top_k=1) == "smoke"
    refused("top_k = 99", _begin, CELL, top_k=99)
    edited = CELL.replace("[1, 64]", "[1, 128]")
    assert _begin(CELL, "%time 1", "answer: int = 42", edited, top_k=99) == "cpu"
    refused("name: type = default", begin, ["", "x = 1"], {})
    _begin(f"{CELL}\nseed: int = 3  # [0, 100]", seed=3)
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.manual_seed(3)))


@given(st.text(), st.text())
def test_no_option_can_smuggle_in_a_name(name, value):
    with suppress(Refusal):
        assert set(parameters.read_options(DECLARED, [f"{name}={value}"])) <= set(
            DECLARED
        )


@given(st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.booleans()))
def test_what_papermill_writes_for_an_accepted_value_is_one_literal(value):
    name = {bool: "quantise", int: "top_k", float: "share", str: "note"}[type(value)]
    try:
        parameters.check(DECLARED, {name: value}, "here")
    except Refusal:
        return
    (statement,) = ast.parse(PythonTranslator.codify({name: value})).body
    assert isinstance(statement, ast.Assign)
    assert parameters.literal(statement.value, "here") == value


def test_the_kernels_environment_has_no_secrets(monkeypatch):
    secrets = {
        "HF_TOKEN": "a-canary",
        "WANDB_API_KEY": "a-canary",
        "INNOCENT": "hf_" + "a" * 30,
    }
    for name, value in (secrets | {"TOKENIZERS_PARALLELISM": "false"}).items():
        monkeypatch.setenv(name, value)
    environment = publish.environment()
    assert not secrets.keys() & environment.keys()
    assert {"TOKENIZERS_PARALLELISM", "PATH"} <= environment.keys()


def test_a_cell_that_breaks_is_named_with_its_line_where_python_tells_one():
    place = "E-NOTEBOOK: toy, parameters cell"
    refused(f"{place}, line 2: invalid syntax", parameters.parse, "\nx = = 1", "toy")
    refused(f"{place}: source code .* null bytes", parameters.parse, "x\0", "toy")


def test_the_arms_of_a_run_are_the_named_ones_in_the_notebooks_order():
    known = {"wide": 1, "dense": 2, "kaiming": 3}
    run = Run("cpu")
    assert run.arms("all", known) == known
    assert list(run.arms("kaiming,wide", known)) == ["wide", "kaiming"]
    assert list(run.arms(" kaiming, wide ", known)) == ["wide", "kaiming"]
    assert lists.listed("laboratory", "", known) == []
    wrong = {
        "wid": "lists 'wid': did you mean 'wide'",
        "wide,wide": "lists 'wide' twice",
        "": "is empty; one of: all, dense, kaiming, wide",
    }
    for text, message in wrong.items():
        refused(f"E-RANGE: arms {message}", run.arms, text, known)


def test_a_notebook_is_found_by_its_short_name_alone_and_shown_in_the_overview(
    fresh, tmp_path
):
    toy = sources.find(fresh, "toy")
    assert (toy.name, toy.title, toy.path.name) == ("toy", "A toy", "01_toy.ipynb")
    assert (toy.findings, toy.protocols) == (False, ["smoke", "cpu", "nano", "study"])
    assert list(sources.notebooks(fresh)) == ["toy"]
    text = sources.overview(fresh)
    assert "toy  A toy (notebooks/01_toy.ipynb)" in text
    assert "-p top_k int   = 2  experts per token [1, 64]" in text
    assert text.count("not measured") == 4
    durations = {4.24: "4.2 s", 59.99: "60.0 s", 200: "3 min 20 s", 3900: "1 h 5 min"}
    assert {seconds: sources.duration(seconds) for seconds in durations} == durations
    for name in ("tyo", "01_toy", "../toy", "https://x.org/toy.ipynb", ""):
        refused(r"E-NOTEBOOK: unknown notebook.*one of: toy", sources.find, fresh, name)
    refused("E-NOFILE", sources.find, tmp_path / "empty", "toy")
    for name in ("02_toy.ipynb", "01_toy_findings.ipynb"):
        shutil.copy(toy.path, toy.path.with_name(name))
    refused(r"01_toy\.ipynb and 02_toy\.ipynb", sources.notebooks, fresh)
    toy.path.unlink()
    findings = sources.find(fresh, "toy_findings")
    assert (findings.findings, findings.protocols) == (True, ["cpu"])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"parameters"', '"other"', "tagged 'parameters'"),
        ("tier: str", "scale: str", "must declare tier"),
        (
            '"nbformat": 4',
            '"nbformat": 3, "worksheets": []',
            "nbformat is 3, expected 4",
        ),
        ('"cells": [', '"cells": ', "E-FORMAT.*no JSON"),
    ],
)
def test_damaged_old_and_untagged_notebooks_are_refused(fresh, old, new, reason):
    path = fresh / "notebooks" / "01_toy.ipynb"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    refused(reason, sources.find, fresh, "toy")


def test_a_protocol_is_its_file_as_papermill_reads_it_and_its_tier(fresh, tmp_path):
    toy = sources.find(fresh, "toy")
    assert toy.settings("smoke") == {"tier": "smoke", "top_k": 1}
    assert toy.settings("cpu") == {"tier": "cpu"}
    assert toy.settings("nano") == {"tier": "study", "top_k": 4}
    assert toy.design("nano") == {"tier": "study", "top_k": 4, "fate": "well"}
    refused(r"E-PROTOCOL: toy has no protocol 'nan'.*mean 'nano'", toy.settings, "nan")
    refused(r"E-PROTOCOL: toy has no protocol 'a/nano'", toy.settings, "a/nano")
    (fresh / "notebooks" / "01_toy.mine.v2.yaml").write_text("tier: study\n")
    assert toy.settings("mine.v2")["tier"] == "study"
    (fresh / "notebooks" / "01_toy.nano.yaml").write_text("tier: smoke\n")
    refused(
        r"E-CONFIG.*tier = 'smoke'; expected study, gpu, paper", toy.settings, "nano"
    )
    (fresh / "notebooks" / "01_toy.class.yaml").write_text("tier: study\n")
    refused(r"E-CONFIG.*tier = 'study'; expected cpu", toy.settings, "class")
    text = "\ufeff# sizes\r\na: 1\r\nb: 1.0e-5\r\nc: true\r\nd: 'x: y'\r\ne: nano\r\n"
    path = tmp_path / "01_toy.cpu.yaml"
    path.write_bytes(text.encode())
    found = {name: value for name, (value, _) in sources.read_flat(path).items()}
    assert (
        found
        == yaml.safe_load(text)
        == {"a": 1, "b": 1e-5, "c": True, "d": "x: y", "e": "nano"}
    )


LEFT = ("smoke-Copy1.yaml", "smoke (1).yaml", "smoke copy.yaml", "smoke.yaml~")


def test_a_copy_of_a_protocol_is_no_protocol(fresh):
    place = fresh / "notebooks"
    before = sources.find(fresh, "toy").protocols
    for name in LEFT:
        shutil.copy(place / "01_toy.smoke.yaml", place / f"01_toy.{name}")
    shutil.copy(place / "01_toy.smoke.yaml", place / ".01_toy.smoke.yaml.swp")
    shutil.copy(place / "01_toy.ipynb", place / "01_toy-Copy1.ipynb")
    toy = sources.find(fresh, "toy")
    assert toy.protocols == before
    assert list(sources.notebooks(fresh)) == ["toy"]
    refused(
        "E-PROTOCOL: 01_toy.smoke-Copy1.yaml looks like a copy",
        toy.settings,
        "smoke-Copy1",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "top_k: 1\ntop_k: 2\n",
            r"E-CONFIG: notebooks/01_toy.smoke.yaml:2:1: top_k is given twice",
        ),
        ("top_k: 1\n", "E-CONFIG: 01_toy.smoke.yaml: tier = 'cpu'; expected smoke"),
        (
            "top_k: !!python/tuple [1]\n",
            r"E-CONFIG: notebooks/01_toy.smoke.yaml:1:8: a YAML tag",
        ),
        ("top_k: &x 1\nfate: *x\n", r"E-CONFIG.*1:8: a YAML anchor"),
        ("top_k: [1, 2]\n", r"E-CONFIG.*1:1: expected one flat mapping"),
        ("- 1\n", r"E-CONFIG.*1:1: expected name: value"),
        ("%YAML 2.0\n---\ntop_k: 1\n", "E-CONFIG"),
        ("a: " + "[" * 9999, "E-CONFIG"),
        ("top_k: 1\n---\ntop_k: 2\n", "E-CONFIG"),
        ("top_k: on\n", r"/01_toy.smoke.yaml:1:8: YAML 1.1"),
        *(
            (f"top_k: {text}\n", "1:8: YAML 1.1 and 1.2 do not read")
            for text in (
                "1:30",
                "012",
                "0o17",
                "1_000",
                "1e-5",
                "1.0e5",
                "2026-01-01",
                "2026-13-45",
            )
        ),
        ("top_k: 'open\n", r"E-CONFIG: notebooks/01_toy.smoke.yaml:2:1"),
        ("top_k: =\n", "E-CONFIG"),
        ("top_k: 1\n\ttop_k", r"E-CONFIG: notebooks/01_toy.smoke.yaml:2:1"),
        ("<<: 1\n", "E-CONFIG"),
        ("top_k:\n", r"E-TYPE.*expected int, found NoneType"),
        (
            "topk: 1\n",
            r"E-PARAMETER: notebooks/01_toy.smoke.yaml:1:1.*did you mean 'top_k'",
        ),
        (
            "fate: well\ntop_k: 0\n",
            r"E-RANGE: notebooks/01_toy.smoke.yaml:2:1: top_k = 0",
        ),
        ("fate: \xff\n", r"E-CONFIG.*not UTF-8 at byte 6"),
    ],
)
def test_a_protocol_file_that_is_no_flat_mapping_is_refused_at_its_place(
    fresh, text, message
):
    (fresh / "notebooks" / "01_toy.smoke.yaml").write_bytes(text.encode("latin-1"))
    refused(message, sources.find(fresh, "toy").settings, "smoke")


def test_blanks_around_the_commas_of_a_list_go_and_names_of_one_thing_keep_theirs():
    cell = (
        CELL
        + """
tasks: str = "gcd"  # test tasks
base: str = "nano"  # base: nano, or a folder
data_folder: str = ""  # folder of data sets"""
    )
    declared = parameters.parse(cell, "toy")
    given = ["tasks=gcd, kinship ,equations", "rates=0.1, 0.2"]
    found = parameters.read_options(declared, given)
    assert found == {"tasks": "gcd,kinship,equations", "rates": "0.1,0.2"}
    names = {"base": "my models, old/base", "data_folder": "sets, old"}
    assert parameters.check(declared, names, "here") == names
    # So do the cells of a notebook find it.
    values = {one.name: one.default for one in declared.values()}
    values["tasks"] = "gcd, kinship"
    run = begin(["", cell, "tasks = 'gcd, kinship'", "begin(In, globals())"], values)
    assert values["tasks"] == run.settings["tasks"] == "gcd,kinship"


def test_each_parameter_that_names_a_folder_or_a_model_keeps_its_commas():
    """Judged by its help, in every notebook."""
    for notebook in sources.notebooks(storage.root()).values():
        for one in notebook.parameters.values():
            names_one = one.help.startswith(("folder", "base", "dense", "sparse"))
            if one.type is str and names_one and not one.rule:
                assert one.taken("a, b") == "a, b", one.name
