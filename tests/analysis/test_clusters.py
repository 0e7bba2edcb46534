"""Purity and a step's memory against counts by hand; projections keep apart what is apart."""

import numpy as np
import pytest
import torch
from torch import nn

from moebook.analysis import clusters
from moebook.analysis.clusters import panels, project, purity
from moebook.errors import Refusal
from moebook.training import step_memory


def test_purity_counts_the_most_frequent_domain_of_each_cluster():
    layer = [[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]]
    mixed = [[0.0], [9.0], [0.1], [9.1], [0.2], [9.2]]
    points, labels = torch.tensor([layer, mixed]), torch.tensor([4, 4, 4, 7, 7, 7])
    frame = purity(points, labels)
    assert frame.purity.tolist() == pytest.approx([1.0, (2 + 2) / 6])
    assert frame.largest.tolist() == pytest.approx([0.5, 0.5])


def two_groups():
    """One layer of two distant groups of 20 points in 6 dimensions."""
    points = torch.randn(1, 40, 6, generator=torch.Generator().manual_seed(0))
    points[:, 20:, 3] += 50
    return points


@pytest.mark.parametrize("method", ["umap", "pca"])
def test_distant_groups_stay_apart_and_the_layout_repeats(method, monkeypatch):
    if method == "umap":
        clusters._umap(0)  # which imports it without its warning
        from umap import umap_

        # As plain Python: at 40 points compiling takes 30 s, and running it 20 ms.
        for name in ("fast_knn_indices", "smooth_knn_dist", "compute_membership_strengths"):
            monkeypatch.setattr(umap_, name, getattr(umap_, name).py_func)
    plane = project(two_groups(), method, seed=1)
    assert plane.shape == (1, 40, 2)
    first, second = plane[0, :20], plane[0, 20:]
    gap = np.linalg.norm(first[:, None] - second[None], axis=2).min()
    within = max(np.linalg.norm(g - g.mean(0), axis=1).max() for g in (first, second))
    assert gap > within and np.abs(plane).max() == pytest.approx(1)
    np.testing.assert_array_equal(plane, project(two_groups(), method, seed=1))


def test_torch_keeps_its_number_of_threads_even_when_a_projection_fails(monkeypatch):
    def fit(layer):
        torch.set_num_threads(before + 1)  # as numba does when UMAP starts it, once a process
        return 1 / 0

    before = torch.get_num_threads()
    monkeypatch.setattr(clusters, "_umap", lambda seed: fit)
    with pytest.raises(ZeroDivisionError):
        project(two_groups(), "umap")
    assert torch.get_num_threads() == before


def test_panels_show_first_middle_and_last_layer_by_group():
    torch.manual_seed(0)
    points, labels = torch.randn(6, 9, 4), torch.tensor([0, 1, 1] * 3)
    shown = panels(points, labels, ["code", "law"], "pca")
    assert list(shown) == ["layer 0", "layer 3", "layer 5"]
    plane = project(points, "pca")[3]
    np.testing.assert_array_equal(shown["layer 3"]["code"], plane[[0, 3, 6]])
    assert shown["layer 3"]["law"].shape == (6, 2)
    assert list(panels(points[:1], labels, ["code", "law"], "pca")) == ["layer 0"]


@pytest.mark.parametrize(("measure", "changes", "code"), [
    (purity, {"labels": torch.zeros(2)}, "E-SHAPE"),
    (purity, {"points": two_groups() * torch.nan}, "E-NONFINITE"),
    (project, {"method": "umapp"}, "E-CHOICE: method is 'umapp'"),
    (project, {"points": two_groups()[:, :15]}, "E-SHAPE"),
    (project, {"points": two_groups() * torch.nan}, "E-NONFINITE"),
])  # fmt: skip
def test_what_cannot_be_clustered_or_projected_is_refused(measure, changes, code):
    given = {"points": two_groups()} | ({"labels": torch.zeros(40)} if measure is purity else {})
    with pytest.raises(Refusal, match=code):
        measure(**given | changes)


def test_bytes_of_a_training_step_are_those_counted_by_hand():
    linear = [nn.Linear(*size, bias=False) for size in ((4, 8), (8, 2))]
    model, batch = nn.Sequential(linear[0], nn.Tanh(), linear[1]), {"input": torch.randn(5, 4)}
    linear[0].requires_grad_(False)
    half = step_memory(model, batch)
    assert half.parameters == 4 * (4 * 8 + 8 * 2)
    assert half.trained == 3 * 4 * 8 * 2
    assert half.kept == 4 * 5 * 8  # what the second layer reads; the frozen part keeps nothing
    model.requires_grad_(True)
    more = step_memory(model, batch)
    assert more.kept == 4 * (5 * 4 + 5 * 8)  # and the input; tanh's output is the same tensor
    assert more.trained == 3 * more.parameters
    assert more.total == more.parameters + more.kept + more.trained


def test_counting_changes_neither_gradients_nor_random_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    step_memory(model, {"input": torch.ones(2, 4)})
    assert torch.equal(torch.rand(3), expected)
    assert model[0].weight.grad is None
