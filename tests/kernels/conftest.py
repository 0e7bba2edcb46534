"""Triton's choices, made before any kernel is decorated or compiled; how much a test may hold."""

import os

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# `TRITON_INTERPRET` is set for all tests in the conftest above. Triton warns where this is unset.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


class Sizes(TorchDispatchMode):
    """While it is entered, ``largest`` is the most elements that a result has had."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return made


@pytest.fixture
def sizes():
    """Watch the sizes of tensors: ``with sizes: ...``, then ``sizes.largest``."""
    return Sizes()


@pytest.fixture(params=["PyTorch", "oneDNN"])
def library(request, monkeypatch):
    """Let one library do every product in float32 on a CPU, of whatever size, on any machine."""

    from moebook.kernels import matmul

    if request.param == "oneDNN" and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch cannot multiply by oneDNN")
    monkeypatch.setattr(matmul, "is_wider", lambda: request.param == "oneDNN")
    monkeypatch.setattr(matmul, "ENOUGH", 1)
    return request.param
