"""clusters: nearest centres, sums and inertia against plain loops in float64."""

import numpy as np
import pytest
import torch

from moebook.errors import Refusal
from moebook.kernels.clusters import ROWS, clusters

impls = pytest.mark.parametrize("impl", ["torch", "reference"])
FAR = 1, 60, 4, 3  # of points far from the origin
SHAPES = [  # L, S, D, E; of the fifth more centres than points, of the last three several blocks
    (2, 9, 4, 3), (1, 1, 5, 2), (3, 7, 1, 1), (1, 0, 3, 2), (2, 5, 3, 9), FAR,
    (1, 150, 40, 17), (1, ROWS["cpu"] + 3, 2, 3), (2, ROWS["cpu"] + 3, 200, 12),
]  # fmt: skip


def drawn(shape, dtype=torch.float32):
    L, S, D, E = shape
    torch.manual_seed(0)
    return torch.randn(L, S, D).to(dtype), torch.randn(L, E, D).to(dtype)


def looped(points, centres):
    """Ids, sums, counts and inertia by loops over points, in float64."""
    points, centres = points.detach().double(), centres.double()
    (L, S, _), E = points.shape, centres.shape[1]
    ids = torch.zeros(L, S, dtype=torch.int64)
    sums, counts = torch.zeros_like(centres), torch.zeros(L, E, dtype=torch.int64)
    inertia = torch.zeros(L, dtype=torch.float64)
    for layer, place in np.ndindex(L, S):
        far = [float((points[layer, place] - c).square().sum()) for c in centres[layer]]
        ids[layer, place] = near = far.index(min(far))
        sums[layer, near] += points[layer, place]
        counts[layer, near] += 1
        inertia[layer] += far[near]
    return ids, sums, counts, inertia


@impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_points_go_to_their_nearest_centre_and_are_summed_there(shape, dtype, impl):
    points, centres = drawn(shape, dtype)
    if shape == FAR:
        points, centres = points + 300, 5 * centres + 300
    found = clusters(points.requires_grad_(), centres, impl=impl)
    assert not any(part.requires_grad for part in (*found, found.means(centres)))
    ids, sums, counts, inertia = looped(points, centres)
    assert torch.equal(found.ids, ids)
    assert torch.equal(found.counts, counts)
    torch.testing.assert_close(found.sums, sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.inertia, inertia, rtol=1e-5, atol=1e-6)


@impls
def test_of_equally_near_centres_the_first_wins_and_idle_ones_stay(impl):
    points = torch.tensor([[[0.0, 1.0], [0.0, 3.0]]])
    centres = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]])
    found = clusters(points, centres, impl=impl)
    assert found.ids.tolist() == [[1, 1]]
    assert found.inertia.tolist() == [2 + 10]
    assert found.means(centres).tolist() == [[[9, 9], [0, 2], [-1, 0], [1, 0]]]


@pytest.mark.parametrize(
    ("points", "centres", "code"),
    [
        (torch.zeros(1, 2, 3), torch.zeros(1, 2, 4), "E-SHAPE"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 0, 3), "E-SHAPE"),
        (torch.tensor([[[0.0], [torch.nan]]]), torch.zeros(1, 2, 1), "E-NONFINITE"),
        (-torch.ones(1, 2, 1), torch.tensor([[[0.0], [torch.inf]]]), "E-NONFINITE"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(points, centres, code):
    with pytest.raises(Refusal, match=f"{code}: clusters: .*"):
        clusters(points, centres)


@pytest.mark.gpu
def test_two_runs_on_a_gpu_are_equal_and_find_what_the_cpu_finds():
    points, centres = drawn((2, 20_000, 64, 9))
    one, two = (clusters(points.cuda(), centres.cuda()) for _ in range(2))
    assert all(map(torch.equal, one, two))
    for ours, wanted in zip(one, clusters(points, centres), strict=True):
        torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-5, atol=1e-3)
