"""ESFT's tables and comparisons of tasks: hand-worked shares, overlaps and averages."""

import numpy as np
import pandas as pd
import pytest
import torch

from moebook.methods import esft
from moebook.models import anatomy


def scores(*rows):
    table = {layer: torch.tensor(row).double() for layer, row in enumerate(rows)}
    return esft.Scores(table, table)


def test_half_mass_counts_the_experts_that_hold_half_of_the_scores():
    given = scores([0.6, 0.2, 0.1, 0.1], [0.25] * 4, [0.1, 0.4, 0.2, 0.3])
    assert esft.half_mass(given) == {0: 0.25, 1: 0.5, 2: 0.5}


def test_overlap_compares_every_task_with_every_task():
    one, two = scores([0.4, 0.3, 0.2, 0.1]), scores([0.1, 0.2, 0.3, 0.4])
    table = esft.overlap({"a": one, "b": two}, {"a": one, "b": two}, 2)
    assert table.loc["a"].to_dict() == {"a": 2, "b": 0}
    assert table.loc["b"].to_dict() == {"a": 0, "b": 2}
    first = scores([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1])
    second = scores([0.1, 0.4, 0.3, 0.2], [0.3, 0.4, 0.1, 0.2])
    assert esft.overlap({"a": first}, {"b": second}, 2).loc["a", "b"] == 1.5  # of two layers


def test_concentration_ranks_the_shares_of_each_layer_by_itself():
    shares = esft.concentration(scores([0.1, 0.2, 0.1, 0.0], [0.0, 0.0, 0.0, 3.0]))
    assert shares == pytest.approx([0.75, 0.125, 0.125, 0])


def test_switches_count_the_experts_that_enter_or_leave():
    """Two experts reach 0.6, whichever is the better; of the total of 0.8 that one does alone."""
    pooled = {"tokens": scores([0.5, 0.2, 0.1]), "samples": scores([0.1, 0.5, 0.2])}
    table = esft.switches(pooled, {"gate": 0.6})
    assert table["experts that differ"].to_dict() == {
        ("gate", "within_samples"): 2,  # 0 and 1 before, 1 and 2 now
        ("gate", "share_of_the_total"): 1,  # 0
        ("gate", "paper"): 1,  # 1
    }
    assert table["layers that differ"].tolist() == [1, 1, 1]
    assert table["share of layers"].tolist() == [1, 1, 1]


def test_selected_experts_are_counted_by_layer():
    table = esft.counts({
        ("token", "a"): esft.Selection(experts={1: (3, 1), 2: (0,)}),
        ("gate", "a"): esft.Selection(experts={1: (2,), 2: (5, 4, 1)}),
    })  # fmt: skip
    assert list(table) == [1, 2]
    assert table.loc[("token", "a")].tolist() == [2, 1]
    assert table.loc[("gate", "a")].tolist() == [1, 3]


def test_shares_are_gathered_by_score_and_by_place_of_the_layer():
    index = pd.MultiIndex.from_product([["token", "gate"], ["a", "b"]])
    shares = pd.DataFrame(np.arange(16.0).reshape(4, 4), index, [1, 2, 3, 4])
    gathered = {name: part.tolist() for name, part in esft.spread(shares).items()}
    assert list(gathered) == ["token", "gate", "layers/middle", "layers/outer"]
    assert gathered["token"] == list(range(8)) and gathered["gate"] == list(range(8, 16))
    assert gathered["layers/middle"] == [2, 6, 10, 14]  # of four layers, the first third has two
    assert gathered["layers/outer"] == [4 / 3 + 4 * row for row in range(4)]
    single = esft.spread(pd.DataFrame([[0.5]], pd.MultiIndex.from_tuples([("token", "a")]), [1]))
    assert single["layers/middle"].tolist() == [0] and single["layers/outer"].tolist() == [0.5]


def test_an_arms_average_counts_each_task_once_whatever_its_rows():
    def table(task, correct):
        return pd.DataFrame({"task": task, "domain": task, "correct": correct, "nll": 1.0})

    tables = {
        ("fft", "a"): table("a", [1.0, 1.0, 1.0, 0.0]),
        ("fft", "b"): table("b", [0.0, 0.0]),
        ("lora", "a"): table("a", [1.0, 0.0, 0.0, 0.0]),
    }
    joined = esft.by_arm(tables, ["a", "b"])
    assert list(joined) == ["fft", "lora"]
    assert joined["fft"].score.mean() == pytest.approx((0.75 + 0.0) / 2)
    assert joined["fft"].tuned.tolist() == ["a"] * 4 + ["b"] * 2
    assert joined["lora"].score.mean() == 0.25


def test_layers_are_described_as_they_are(mixture):
    model = mixture("DeepseekV2")
    table = esft.layers(model)
    assert table.kind.tolist() == ["dense", "sparse", "sparse"]
    assert table.width.tolist() == [40, 16, 16]
    assert table["routed experts"].tolist() == [0, 8, 8]
    blocks = [sum(p.numel() for p in layer.block.parameters()) for layer in anatomy(model).layers]
    assert table.parameters.tolist() == blocks
