"""The reference: its pages name what is public; every public name tells shapes and units."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
from itertools import pairwise

import pytest
from sphinx.pycode import ModuleAnalyzer

from moebook.lab.pages import extension
from recipes import codes, reference

ROOT = reference.ROOT
ARRAYS = ("Tensor", "ndarray", "Array")
NUMBERS = ("float", "DataFrame", "Series")
SHAPE = re.compile(
    r"``[^`]*\[[^`\]]+\][^`]*``|``[a-z_]+``-shaped|``\[.*\]``|no shape|scalar"
)
UNIT = re.compile(
    r"\b(nats?|bytes|seconds|shares?|points|tokens|numbers?|count|cosine|norm|loss|chance"
    r"|FLOPs|rows?|line|column|length|weight|graph|table|dollars|gradient|product|probab\w+)\b"
)


def public():
    """Yield every public name: its module, itself, and the object."""
    for package in reference.PACKAGES:
        for module in reference.modules(package):
            loaded = importlib.import_module(module)
            for name in reference.exported(module):
                value = getattr(loaded, name, None)
                if not inspect.ismodule(value) and not _is_module(f"{module}.{name}"):
                    yield module, name, value


def _is_module(name):
    return reference.source(name).exists()


def annotations(function):
    """Return what a function takes and gives, as it is written."""
    signature = inspect.signature(function)
    given = [str(parameter.annotation) for parameter in signature.parameters.values()]
    return given, str(signature.return_annotation)


def has_type(kinds, text):
    return any(re.search(rf"\b{kind}\b", text) for kind in kinds)


def members(value):
    """Yield the public functions and properties of a class of ours, by name."""
    for name, member in vars(value).items():
        if isinstance(member, property):
            member = member.fget
        function = getattr(member, "__func__", getattr(member, "func", member))
        ours = getattr(function, "__module__", "").startswith("moebook")
        shown = not name.startswith("_") and not inspect.isclass(function)
        if ours and shown and callable(function):
            yield name, function


def lacks(value, beside=""):
    """Say what the docstring of a public name does not tell; nothing where it is whole.

    Shapes may also stand ``beside`` it, in the text of its class.
    """
    text = inspect.getdoc(value) or ""
    if not text:
        return "a docstring"
    if inspect.isclass(value):
        return ""
    given, gives = annotations(value)
    told = f"{beside}\n{text}"
    if has_type(ARRAYS, " ".join([*given, gives])) and not SHAPE.search(told):
        return "the shape of a tensor"
    if has_type(NUMBERS, gives) and not UNIT.search(text):
        return "what its numbers count, or their unit"
    return ""


def test_the_pages_are_those_of_all_that_is_public():
    toc = (ROOT / "book" / "_toc.yml").read_text()
    for name, text in reference.pages().items():
        written = (ROOT / "book" / f"{name}.md").read_text(encoding="utf-8")
        assert written == text, "python -m recipes.reference"
        assert f"- file: {name}\n" in toc


def test_a_table_lists_no_module_that_has_no_entry_below_it():
    """Rocket's `case` is a module without ``__all__``; `kernels.route` is a function, too."""
    pages = reference.pages()
    assert ":py:obj:`case`" not in pages["reference_methods_rocket"]
    assert ":py:obj:`route`" in pages["reference_kernels"]


def test_every_table_has_a_head_and_says_of_each_name_one_whole_sentence():
    text = "\n".join(reference.pages().values())
    assert "autosummary::" not in text
    tables = text.count(".. list-table::")
    assert tables == text.count("   :header-rows: 1\n") > 30
    told = re.findall(r"- :py:obj:`\w+`\n     - (.*)", text)
    assert [line for line in told if not re.search(r"[.]$", line)] == []


CODE = re.compile(r"([EW]-[A-Z]+)(?:$|: )")


def test_the_tables_of_codes_hold_every_code_that_the_project_gives():
    given = set()
    for folder in ("moebook", "recipes", "workshop"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "codes.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and (found := CODE.match(text)):
                    given.add(found[1])
    assert {*codes.REFUSALS, *codes.WARNINGS} == given
    page = reference.pages()["reference_errors"]
    assert all(f"\n| `{code}` | " in page for code in given)


def test_a_page_says_once_what_its_package_is_for():
    pages = reference.pages()
    for package, what in reference.PACKAGES.items():
        assert what not in pages[reference.file(package)]


def test_every_public_name_is_there_and_tells_its_shapes_and_units():
    problems = []
    for module, name, value in public():
        if value is None:
            problems.append(f"{module}.{name} is missing")
        elif name.isupper():
            if not _documented(module, name):
                problems.append(f"{module}.{name} has no docstring behind it")
        elif problem := lacks(value):
            problems.append(f"{module}.{name} lacks {problem}")
        elif inspect.isclass(value):
            of_class = inspect.getdoc(value)
            for member, function in members(value):
                if problem := lacks(function, beside=of_class):
                    problems.append(f"{module}.{name}.{member} lacks {problem}")
    assert problems == []


def fields(value):
    """Return the fields of a class of ours, by name; none where it keeps none."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(getattr(value, "_fields", ()))


def test_every_field_of_a_public_class_has_a_text():
    """Below ``Attributes`` of its class, or in a comment that begins with ``#:``."""
    problems = []
    for module, name, value in public():
        if not inspect.isclass(value):
            continue
        told = re.findall(r"(?m)^    ([\w, ]+): ", inspect.getdoc(value))
        known = {field for line in told for field in line.split(", ")}
        for kind in inspect.getmro(value):
            if kind.__module__.startswith("moebook"):
                comments = ModuleAnalyzer.for_module(kind.__module__).find_attr_docs()
                of_class = {
                    field: text
                    for (owner, field), text in comments.items()
                    if owner == kind.__name__
                }
                known |= of_class.keys()
                # Napoleon would take what stands before a colon for a type.
                colons = [
                    field for field, text in of_class.items() if ":" in "".join(text)
                ]
                problems += [f"{module}.{name}.{field} has a colon" for field in colons]
        missing = [field for field in fields(value) if field not in known]
        problems += [f"{module}.{name}.{field}" for field in missing]
    assert problems == []


def _documented(module, name):
    """Whether a constant is followed by a text, where it is made."""
    package = module.split(".")[1]
    for path in sorted((ROOT / "moebook" / package).rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, behind in pairwise(body):
            targets = getattr(
                statement, "targets", [getattr(statement, "target", None)]
            )
            made = any(getattr(target, "id", "") == name for target in targets)
            text = isinstance(behind, ast.Expr) and isinstance(
                behind.value, ast.Constant
            )
            if made and text:
                return True
    return False


def test_every_notebook_and_theory_page_leads_to_its_page():
    ours = set(reference.pages())
    assert {f"reference_{name}" for name in extension.REFERENCE.values()} <= ours
    recipes = {path.stem[3:] for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {name for name in recipes if "findings" not in name} == set(
        extension.REFERENCE
    )
    for path in (ROOT / "book").glob("*_theory.md"):
        assert "](reference_" in path.read_text(encoding="utf-8"), path.name


FIRST = """
moebook.kernels: adapters balance_loss experts route
moebook.models: anatomy load
moebook.data: encode mixture refuse_leak
moebook.data.tasks: Task
moebook.training: fit nats
moebook.evaluation: evaluate
moebook.methods.pesc: prepare
moebook.methods.upcycling: su upcycle
moebook.methods.esft: select specialise
moebook.methods.rocket.choose: select
moebook.lab.planning: plan
"""


def first():
    """Yield the twenty names that users call first, with their objects."""
    for line in FIRST.strip().splitlines():
        module, names = line.split(": ")
        for name in names.split():
            yield f"{module}.{name}", getattr(importlib.import_module(module), name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "value"), [pytest.param(*one, id=one[0]) for one in first()]
)
def test_the_example_of_a_name_that_users_call_first_holds(name, value):
    known = vars(importlib.import_module(inspect.unwrap(value).__module__))
    finder = doctest.DocTestFinder(recurse=inspect.isclass(value))
    whole = inspect.unwrap(value)
    tests = [
        test for test in finder.find(whole, name, globs=dict(known)) if test.examples
    ]
    assert tests, "an example behind >>>"
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        said = []
        runner.run(test, out=said.append)
        assert runner.failures == 0, "".join(said)


def test_there_are_twenty_of_them():
    assert len(list(first())) == 20
