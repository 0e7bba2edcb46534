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
    """Tensors of ones by name, from (dimensions, sizes, and perhaps dtype and kind)."""
    tensors = {}
    for name, (dims, sizes, *rest) in named.items():
        tensors[name] = (torch.ones(sizes, dtype=rest[0] if rest else None), dims, *rest[1:])
    return tensors


@pytest.mark.parametrize(
    ("named", "sizes"),
    [
        ({"x": ("T D", (5, 6)), "gate_up": ("E 2F D", (3, 8, 6)),
          "ids": ("T K", (5, 2), torch.int64, "int"), "order": ("TK", (10,), torch.int64, "int64")},
         {"T": 5, "D": 6, "E": 3, "F": 4, "K": 2}),
        ({"x": ("... D", (2, 3, 6)), "base": ("... O", (2, 3, 7))},
         {"...": (2, 3), "D": 6, "O": 7}),
        ({"x": ("T D", (0, 6))}, {"T": 0, "D": 6}),
    ],
)  # fmt: skip
def test_letters_are_bound_to_sizes(named, sizes):
    assert shapes("op", of(**named)) == sizes


@pytest.mark.parametrize(
    ("code", "named", "rest"),
    [
        (r"E-SHAPE: op: expected x \[T, D\], y \[T\] .*; got \(5, 6\), \(4,\)",
         {"x": ("T D", (5, 6)), "y": ("T", (4,))}, {}),
        ("E-SHAPE", {"x": ("T 2F", (5, 3))}, {}),
        ("E-SHAPE", {"x": ("T K", (5, 2)), "y": ("TK", (9,))}, {}),
        ("E-SHAPE", {"x": ("... D", (2, 6)), "y": ("... D", (3, 6))}, {}),
        ("E-SHAPE", {"x": ("... D", ())}, {}),
        (r"E-SHAPE: .*\(only T, S may be 0\)", {"x": ("T D", (5, 0))}, {}),
        ("E-SHAPE", {"x": ("T D", (0, 5))}, {"empty": ""}),
        ("E-DTYPE: op: x is torch.int64, expected floating", {"x": ("T", (5,), torch.int64)}, {}),
        ("E-DTYPE: op: y is torch.float64, x is torch.float32: cast one",
         {"x": ("T", (5,)), "y": ("T", (5,), torch.float64)}, {"alike": ("x", "y")}),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(code, named, rest):
    with pytest.raises(Refusal, match=code):
        shapes("op", of(**named), **rest)


def test_a_name_is_obeyed_and_auto_is_the_first_on_a_cpu():
    assert implementation("known", "reference", TABLE) is sum
    for on in (None, torch.zeros(1), torch.zeros(1, device="meta")):
        assert implementation("known", "auto", TABLE, on) is len


@pytest.mark.parametrize(
    ("capability", "compiler", "why"),
    [
        ((8, 0), "/usr/bin/gcc", None),
        ((7, 5), "/usr/bin/gcc", "cuda:0 has compute capability 7.5, expected at least 8.0"),
        ((9, 0), None, "Triton finds no C compiler: install gcc or clang, or name one in CC"),
    ],
)
def test_auto_is_triton_only_on_a_gpu_that_can_run_it(capability, compiler, why, monkeypatch):
    """The GPU is PyTorch's fake one, with a device and no memory; Triton and a kernel are too."""
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    module = SimpleNamespace(run=max)
    monkeypatch.setitem(sys.modules, "moebook.kernels._triton.known", module)
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


def test_an_unknown_name_and_triton_that_is_not_installed_are_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    for name, table, message in (
        ("tritn", TABLE, "no implementation impl='tritn'; did you mean 'triton'"),
        ("triton", {"torch": len}, r"no implementation .*one of: auto, torch$"),
        ("triton", TABLE, "impl='triton' cannot run here: triton is not installed"),
    ):
        with pytest.raises(Refusal, match=f"E-IMPL: known: {message}"):
            implementation("known", name, table, torch.zeros(1))
