"""Under autocast an op computes in the dtype of its tensors, as it does without."""

import pytest
import torch

from moebook import kernels


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_autocast_changes_nothing_inside_an_op(impl):
    torch.manual_seed(0)
    h, logits = torch.randn(10, 6), torch.randn(10, 4)
    down, up = torch.randn(4, 6, 3, requires_grad=True), torch.randn(4, 3, 6, requires_grad=True)

    def run(low):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = kernels.adapters(h, kernels.route(logits, 2), down, up, impl=impl)
        return [y, *torch.autograd.grad(y.square().sum(), (down, up))]

    pairs = zip(run(False), run(True), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
