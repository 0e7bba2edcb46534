"""Choice of an implementation: obeyed, or refused in one line that names argument and value."""

import pytest
import torch

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


def test_triton_is_refused_where_it_is_not_installed(one_kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    with pytest.raises(Refusal, match="triton is not installed"):
        implementation("known", "triton", TABLE, torch.zeros(1))
