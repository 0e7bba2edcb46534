"""Purity of clusters, against counts made by hand."""

import pytest
import torch

from moebook.analysis.clusters import purity
from moebook.errors import Refusal


def test_purity_counts_the_most_frequent_domain_of_each_cluster():
    layer = [[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]]
    mixed = [[0.0], [9.0], [0.1], [9.1], [0.2], [9.2]]
    frame = purity(torch.tensor([layer, mixed]), torch.tensor([4, 4, 4, 7, 7, 7]))
    assert frame.purity.tolist() == pytest.approx([1.0, (2 + 2) / 6])
    assert frame.largest.tolist() == pytest.approx([0.5, 0.5])


def test_one_cluster_scores_the_largest_domain_and_one_a_point_scores_1():
    points, labels = torch.randn(1, 10, 3), torch.tensor([0] * 7 + [1] * 3)
    assert purity(points, labels, clusters=1).purity[0] == pytest.approx(0.7)
    assert purity(points, labels, clusters=10).purity[0] == pytest.approx(1.0)


def test_what_cannot_be_clustered_is_refused():
    points, labels = torch.zeros(1, 3, 2), torch.zeros(3, dtype=torch.long)
    for changes, code in (
        ({"labels": labels[:2]}, "E-SHAPE"),
        ({"points": points[0]}, "E-SHAPE"),
        ({"clusters": 4}, "E-DATA"),
        ({"clusters": 0}, "E-DATA"),
        ({"points": points + torch.nan}, "E-NONFINITE"),
    ):
        with pytest.raises(Refusal, match=code):
            purity(**{"points": points, "labels": labels, **changes})
