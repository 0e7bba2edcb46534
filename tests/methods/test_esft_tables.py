"""ESFT's tables and costs: hand-worked shares and averages, bytes counted another way."""

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset

from moebook.methods import esft
from moebook.models import anatomy


def test_selected_experts_are_counted_by_layer():
    found = esft.counts({
        ("token", "a"): esft.Selection({1: (3, 1), 2: (0,)}),
        ("gate", "a"): esft.Selection({1: (2,), 2: (5, 4, 1)}),
    })  # fmt: skip
    assert list(found) == [1, 2]
    assert found.loc[("token", "a")].tolist() == [2, 1]
    assert found.loc[("gate", "a")].tolist() == [1, 3]


def test_shares_are_gathered_by_score_and_by_place_of_the_layer():
    index = pd.MultiIndex.from_product([["token", "gate"], ["a", "b"]])
    shares = pd.DataFrame(np.arange(16.0).reshape(4, 4), index, [1, 2, 3, 4])
    found = {name: part.tolist() for name, part in esft.spread(shares).items()}
    assert list(found) == ["token", "gate", "layers/middle", "layers/outer"]
    assert found["token"] == list(range(8)) and found["gate"] == list(range(8, 16))
    assert found["layers/middle"] == [2, 6, 10, 14]  # of four layers, the first third has two
    assert found["layers/outer"] == [4 / 3 + 4 * row for row in range(4)]


def test_a_single_sparse_layer_has_no_middle():
    found = esft.spread(pd.DataFrame([[0.5]], pd.MultiIndex.from_tuples([("token", "a")]), [1]))
    assert found["layers/middle"].tolist() == [0] and found["layers/outer"].tolist() == [0.5]


def test_an_arms_average_counts_each_task_once_whatever_its_rows():
    def table(task, correct):
        frame = pd.DataFrame({"task": task, "domain": "x", "correct": correct, "nll": 1.0})
        return frame.assign(domain=task)

    tables = {
        ("fft", "a"): table("a", [1.0, 1.0, 1.0, 0.0]),
        ("fft", "b"): table("b", [0.0, 0.0]),
        ("lora", "a"): table("a", [1.0, 0.0, 0.0, 0.0]),
    }
    found = esft.by_arm(tables, ["a", "b"])
    assert list(found) == ["fft", "lora"]
    assert found["fft"].score.mean() == pytest.approx((0.75 + 0.0) / 2)
    assert found["fft"].tuned.tolist() == ["a"] * 4 + ["b"] * 2
    assert found["lora"].score.mean() == 0.25


def test_layers_are_described_as_they_are(mixture):
    model = mixture("DeepseekV2")
    found = esft.layers(model)
    assert found.kind.tolist() == ["dense", "sparse", "sparse"]
    assert found.width.tolist() == [40, 16, 16]
    assert found["routed experts"].tolist() == [0, 8, 8]
    blocks = [sum(p.numel() for p in layer.block.parameters()) for layer in anatomy(model).layers]
    assert found.parameters.tolist() == blocks


def test_costs_are_those_of_the_tensors_that_train(mixture):
    torch.manual_seed(4)
    ids = [torch.randint(3, 48, (5 + i % 4,)).tolist() for i in range(24)]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids, "length": list(map(len, ids))})
    recipe = {"batch": 4, "seed": 0, "pad_id": 2, "steps": 2, "lr": 0.01}
    whole = sum(p.nbytes for p in mixture("DeepseekV2").parameters())
    found = esft.cost(esft.full(mixture("DeepseekV2")), rows, **recipe)
    assert found["storage"] == whole and found["optimizer"] == 2 * whole
    assert found["peak_memory"] > found["resident"] + 3 * whole
    model = esft.specialise(mixture("DeepseekV2"), esft.Selection({1: (0, 1), 2: (2,)}))
    chosen = sum(p.nbytes for p in esft.trained(model).values())
    small = esft.cost(model, rows, **recipe)
    assert small["storage"] == chosen and small["optimizer"] == 2 * chosen
    assert small["resident"] == pytest.approx(found["resident"] + chosen)
    assert small["peak_memory"] < found["peak_memory"] and small["time"] > 0
