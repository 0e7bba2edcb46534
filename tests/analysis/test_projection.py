"""Projections keep apart what is apart, whichever method lays it out."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from moebook.analysis import projection
from moebook.analysis.projection import METHODS, panels, project
from moebook.errors import Refusal


def two_groups():
    """One layer of two distant groups of 20 points in 6 dimensions."""
    points = torch.randn(1, 40, 6, generator=torch.Generator().manual_seed(0))
    points[:, 20:, 3] += 50
    return points


@pytest.mark.parametrize("method", METHODS)
def test_distant_groups_stay_apart_and_the_layout_repeats(method):
    plane = project(two_groups(), method, seed=1)
    assert plane.shape == (1, 40, 2)
    first, second = plane[0, :20], plane[0, 20:]
    gap = np.linalg.norm(first[:, None] - second[None], axis=2).min()
    within = max(np.linalg.norm(g - g.mean(0), axis=1).max() for g in (first, second))
    assert gap > within
    assert np.abs(plane).max() == pytest.approx(1)
    np.testing.assert_array_equal(plane, project(two_groups(), method, seed=1))


@pytest.mark.parametrize("fails", [False, True])
def test_torch_keeps_its_number_of_threads(monkeypatch, fails):
    def fit(layer):
        torch.set_num_threads(2)  # as numba does when UMAP starts it, once a process
        return 1 / 0 if fails else layer[:, :2]

    monkeypatch.setattr(projection, "_umap", lambda seed: fit)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            project(two_groups(), "umap")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_pca_keeps_the_distances_of_points_that_lie_in_a_plane():
    flat = torch.tensor([[[3.0, 0, 0], [0, 4.0, 0], [-3.0, 0, 0], [0, -4.0, 0]]])
    plane = project(flat, "pca")[0]
    found = np.linalg.norm(plane[0] - plane[2]) / np.linalg.norm(plane[1] - plane[3])
    assert found == pytest.approx(3 / 4)


def test_panels_show_first_middle_and_last_layer_by_group():
    torch.manual_seed(0)
    points, labels = torch.randn(6, 9, 4), torch.tensor([0, 1, 1] * 3)
    found = panels(points, labels, ["code", "law"], "pca")
    assert list(found) == ["layer 0", "layer 3", "layer 5"]
    plane = project(points, "pca")[3]
    np.testing.assert_array_equal(found["layer 3"]["code"], plane[[0, 3, 6]])
    assert found["layer 3"]["law"].shape == (6, 2)
    assert list(panels(points[:1], labels, ["code", "law"], "pca")) == ["layer 0"]


def test_what_cannot_be_projected_is_refused():
    points = two_groups()
    for changes, code in (
        ({"method": "umapp"}, "E-CHOICE.*did you mean 'umap'"),
        ({"points": points[0]}, "E-SHAPE"),
        ({"points": points[:, :15]}, "E-SHAPE"),
        ({"points": points * torch.nan}, "E-NONFINITE"),
    ):
        with pytest.raises(Refusal, match=code):
            project(**{"points": points, **changes})
