"""Where kernels are launched: on the GPU of their tensors, which need not be the current one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Made = TypeVar("Made")


def placed(run: Callable[Given, Made]) -> Callable[Given, Made]:
    """Let an op run where its first tensor lies: Triton asks PyTorch for its current GPU alone.

    Backward passes need nothing: autograd has a thread for each GPU.
    """

    @wraps(run)
    def launch(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        with torch.cuda.device_of(args[0]):
            return run(*args, **kwargs)

    return launch
