"""Choice of an implementation: obeyed, or refused in one line that names argument and value."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moebook.errors import Refusal
from moebook.kernels import dispatch
from moebook.kernels.dispatch import implementation

TABLE = {"torch": len, "reference": sum}


@pytest.fixture
def one_kernel(tmp_path, monkeypatch):
    """A package in which the op ``known`` has a Triton kernel, and no other op has one."""
    path = tmp_path / "known.py"
    path.touch()
    monkeypatch.setattr(dispatch, "_path", lambda op: tmp_path / f"{op}.py")


def test_a_name_is_obeyed_and_auto_is_the_first_on_a_cpu(one_kernel):
    assert implementation("known", "reference", TABLE) is sum
    assert implementation("known", "auto", TABLE) is len
    for device in ("cpu", "meta"):
        assert implementation("known", "auto", TABLE, torch.zeros(1, device=device)) is len


def test_an_unknown_name_is_refused_with_its_neighbour(one_kernel):
    with pytest.raises(Refusal, match="E-IMPL: known: no implementation impl='tritn'; did you mean"
                       " 'triton'"):  # fmt: skip
        implementation("known", "tritn", TABLE)
    with pytest.raises(Refusal, match=r"one of: auto, reference, torch$"):
        implementation("other", "cuda", TABLE)


@pytest.mark.parametrize(
    ("op", "interpret", "dtype", "why"),
    [
        ("other", "1", torch.float32, "the op has no Triton kernel"),
        ("known", "0", torch.float32, "the input is on cpu, expected an NVIDIA GPU"),
        ("known", "1", torch.bfloat16, "interpreter computes bfloat16 wrongly"),
        ("known", "1", torch.float64, "the input is torch.float64"),
    ],
)
def test_triton_is_refused_where_it_cannot_run(op, interpret, dtype, why, one_kernel, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    with pytest.raises(Refusal, match=f"E-IMPL: {op}: impl='triton' cannot run here: .*{why}"):
        implementation(op, "triton", TABLE, torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize(
    ("capability", "compiler", "why"),
    [
        ((8, 0), "/usr/bin/gcc", None),
        ((7, 5), "/usr/bin/gcc", "cuda:0 has compute capability 7.5, expected at least 8.0"),
        ((9, 0), None, "Triton finds no C compiler: install gcc or clang, or name one in CC"),
    ],
)
def test_auto_is_triton_only_on_a_gpu_that_can_run_it(
    capability, compiler, why, one_kernel, monkeypatch
):
    """The GPU is PyTorch's fake one: it has a device and no memory."""
    for name in ("TRITON_INTERPRET", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch.shutil, "which", lambda name: compiler)
    monkeypatch.setitem(sys.modules, "moebook.kernels._triton.known", SimpleNamespace(run=max))
    dispatch._lacking.cache_clear()
    with FakeTensorMode():
        on = torch.zeros(1, device="cuda")
    assert implementation("known", "auto", TABLE, on) is (len if why else max)
    if why:
        with pytest.raises(Refusal, match=f"E-IMPL: known: .*{why}; use impl='auto'"):
            implementation("known", "triton", TABLE, on)
    else:
        assert implementation("known", "triton", TABLE, on) is max
    dispatch._lacking.cache_clear()


def test_triton_is_refused_where_it_is_not_installed(one_kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match="triton is not installed"):
        implementation("known", "triton", TABLE, torch.zeros(1))
