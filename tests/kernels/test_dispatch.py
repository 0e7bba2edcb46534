"""Shapes by letters; an implementation that is obeyed, or refused in one line."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moebook.errors import Refusal
from moebook.kernels import dispatch
from moebook.kernels.dispatch import implementation, shapes

TABLE = {"torch": len, "reference": sum, "triton": "known.run"}


def of(**named):
    """Tensors of ones by name, from (shape, dimensions[, dtype, kind])."""
    return {
        name: (torch.ones(shape, dtype=rest[0]), dims, *rest[1:])
        if rest
        else (torch.ones(shape), dims)
        for name, (shape, dims, *rest) in named.items()
    }


def test_letters_are_bound_to_sizes():
    whole = torch.int64
    bank = of(x=((5, 6), "T D"), gate_up=((3, 8, 6), "E 2F D"), ids=((5, 2), "T K", whole, "int"),
              order=((10,), "TK", whole, "int64"))  # fmt: skip
    assert shapes("op", bank) == {"T": 5, "D": 6, "E": 3, "F": 4, "K": 2}
    lead = of(x=((2, 3, 6), "... D"), base=((2, 3, 7), "... O"))
    assert shapes("op", lead) == {"...": (2, 3), "D": 6, "O": 7}
    assert shapes("op", of(x=((0, 6), "T D")))["T"] == 0


@pytest.mark.parametrize(
    ("code", "named", "rest"),
    [
        (r"E-SHAPE: op: expected x \[T, D\], y \[T\] .*; got \(5, 6\), \(4,\)",
         {"x": ((5, 6), "T D"), "y": ((4,), "T")}, {}),
        ("E-SHAPE", {"x": ((5, 3), "T 2F")}, {}),
        ("E-SHAPE", {"x": ((5, 2), "T K"), "y": ((9,), "TK")}, {}),
        ("E-SHAPE", {"x": ((2, 6), "... D"), "y": ((3, 6), "... D")}, {}),
        ("E-SHAPE", {"x": ((), "... D")}, {}),
        (r"E-SHAPE: .*\(only T, S may be 0\)", {"x": ((5, 0), "T D")}, {}),
        ("E-SHAPE", {"x": ((0, 5), "T D")}, {"empty": ""}),
        ("E-DTYPE: op: x is torch.int64, expected floating", {"x": ((5,), "T", torch.int64)}, {}),
        ("E-DTYPE: op: y is torch.float64, x is torch.float32: cast one",
         {"x": ((5,), "T"), "y": ((5,), "T", torch.float64)}, {"alike": ("x", "y")}),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(code, named, rest):
    with pytest.raises(Refusal, match=code):
        shapes("op", of(**named), **rest)


@pytest.fixture
def kernel(monkeypatch):
    """Triton is installed, with a kernel by the name in the table."""
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    module = SimpleNamespace(run=max)
    monkeypatch.setitem(sys.modules, "moebook.kernels._triton.known", module)


def test_a_name_is_obeyed_and_auto_is_the_first_on_a_cpu():
    assert implementation("known", "reference", TABLE) is sum
    assert implementation("known", "auto", TABLE) is len
    for device in ("cpu", "meta"):
        assert implementation("known", "auto", TABLE, torch.zeros(1, device=device)) is len


def test_an_unknown_name_is_refused_with_its_neighbour():
    with pytest.raises(Refusal, match="E-IMPL: known: no implementation impl='tritn'; did you mean"
                       " 'triton'"):  # fmt: skip
        implementation("known", "tritn", TABLE)
    with pytest.raises(Refusal, match=r"other: no implementation .*one of: auto, torch$"):
        implementation("other", "triton", {"torch": len})


@pytest.mark.parametrize(
    ("capability", "compiler", "why"),
    [
        ((8, 0), "/usr/bin/gcc", None),
        ((7, 5), "/usr/bin/gcc", "cuda:0 has compute capability 7.5, expected at least 8.0"),
        ((9, 0), None, "Triton finds no C compiler: install gcc or clang, or name one in CC"),
    ],
)
@pytest.mark.usefixtures("kernel")
def test_auto_is_triton_only_on_a_gpu_that_can_run_it(capability, compiler, why, monkeypatch):
    """The GPU is PyTorch's fake one: it has a device and no memory."""
    for name in ("TRITON_INTERPRET", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch.shutil, "which", lambda name: compiler)
    dispatch._lacking.cache_clear()
    with FakeTensorMode():
        on = torch.zeros(1, device="cuda")
    if why:
        assert implementation("known", "auto", TABLE, on) is len
        with pytest.raises(Refusal, match=f"E-IMPL: known: .*{why}; use impl='auto'"):
            implementation("known", "triton", TABLE, on)
    else:
        for name in ("auto", "triton"):
            assert implementation("known", name, TABLE, on).__wrapped__ is max
    assert implementation("other", "auto", {"torch": len}, on) is len
    dispatch._lacking.cache_clear()


def test_triton_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match="triton is not installed"):
        implementation("known", "triton", TABLE, torch.zeros(1))
