"""The data of ESFT: what is measured on, what is trained on, and comparisons of tasks."""

import pytest
import torch
from datasets import Dataset

from moebook.data import tasks
from moebook.errors import Refusal
from moebook.methods import esft


def rows(lengths, start=0):
    ids = [[start + i] * length for i, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "length": lengths})


def test_packed_samples_are_the_rows_one_after_the_other():
    data = rows([3, 5, 4, 6])
    batches = esft.samples(data, count=2, length=6, batch=1, seed=1)
    assert [batch["input_ids"].shape for batch in batches] == [(1, 6), (1, 6)]
    assert all(batch["attention_mask"].all() for batch in batches)
    stream = torch.cat([batch["input_ids"][0] for batch in batches]).tolist()
    order = list(dict.fromkeys(stream))
    assert stream == [i for i in order for _ in range([3, 5, 4, 6][i])][:12]


def test_too_few_rows_make_fewer_samples_and_padding_is_masked():
    (batch,) = esft.samples(rows([3, 5]), count=4, length=6, pad_id=99)
    assert batch["attention_mask"].sum(1).tolist() == [6, 2]
    assert (batch["input_ids"] == 99).sum() == 4
    (one,) = esft.samples(rows([3, 5, 9]), count=4, length=6, packed=False, pad_id=99)
    assert sorted(one["attention_mask"].sum(1).tolist()) == [3, 5]


def test_samples_depend_on_the_seed_alone():
    data = rows(list(range(1, 30)))
    draws = [esft.samples(data, count=3, length=20, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(draws[0][0]["input_ids"], draws[1][0]["input_ids"])
    assert not torch.equal(draws[0][0]["input_ids"], draws[2][0]["input_ids"])


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 10), (0.2, 3), (0.75, 30)])
def test_the_mix_has_the_share_of_alignment_data_asked_for(share, count):
    mixed = esft.mix(rows([4] * 10), rows([4] * 30, start=1000), share, seed=0)
    first = [ids[0] for ids in mixed["input_ids"]]
    assert sorted(i for i in first if i < 1000) == list(range(10))
    drawn = [i for i in first if i >= 1000]
    assert len(drawn) == len(set(drawn)) == count


def test_sizes_and_shares_outside_their_range_are_refused():
    data = rows([4] * 10)
    for size in ("count", "length", "batch"):
        with pytest.raises(Refusal, match=f"E-RANGE: {size} is 0"):
            esft.samples(data, **{size: 0})
    with pytest.raises(Refusal, match="E-DATA: no sample of at most 3 tokens in 10 rows"):
        esft.samples(data, length=3, packed=False)
    with pytest.raises(Refusal, match="E-RANGE: the share of alignment data is 1"):
        esft.mix(data, data, 1.0, seed=0)
    with pytest.raises(Refusal, match="E-DATA: 30 alignment rows needed, 10 given"):
        esft.mix(data, data, 0.75, seed=0)


def test_training_rows_are_as_many_as_a_task_has_or_as_asked_for(monkeypatch):
    asked = {}

    def load(name, *, revision, size, seed):
        asked[name] = (revision, size, seed)
        return [{"task": name}] * size

    monkeypatch.setattr(esft.sampling.hub, "load", load)
    pin = "a" * 40
    found = esft.rows(["licence", "metamathqa"], ["gcd", "slimorca"], 5000,
                      revisions=f"slimorca={pin}", seed=3)  # fmt: skip
    assert asked == {"metamathqa": (None, 5000, 3), "slimorca": (pin, 10000, 3)}
    whole = tasks.find("licence").available("train")
    assert found["licence"] == tasks.rows("licence", "train", whole, 3)
    assert len(esft.rows(["licence"], ["licence"], 7, seed=0)["licence"]) == 7


def scores(*rows):
    table = {layer: torch.tensor(row).double() for layer, row in enumerate(rows)}
    return esft.Scores(table, table)


def test_half_mass_counts_the_experts_that_hold_half_of_the_scores():
    found = scores([0.6, 0.2, 0.1, 0.1], [0.25] * 4, [0.1, 0.4, 0.2, 0.3])
    assert esft.half_mass(found) == {0: 0.25, 1: 0.5, 2: 0.5}


def test_shared_top_experts_are_averaged_over_layers():
    first = scores([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1])
    second = scores([0.1, 0.4, 0.3, 0.2], [0.3, 0.4, 0.1, 0.2])
    assert esft.shared_top(first, second, 2) == 1.5
    assert esft.shared_top(first, first, 3) == 3
    with pytest.raises(Refusal, match="E-RANGE: top is 5"):
        esft.shared_top(first, second, 5)
    with pytest.raises(Refusal, match="E-KEYS"):
        esft.shared_top(first, scores([0.5, 0.5, 0.0, 0.0]), 1)
    with pytest.raises(Refusal, match="E-SHAPE: 4 and 2 experts"):
        esft.shared_top(first, scores([0.5, 0.5], [0.5, 0.5]), 1)


def test_overlap_compares_every_task_with_every_task():
    one, two = scores([0.4, 0.3, 0.2, 0.1]), scores([0.1, 0.2, 0.3, 0.4])
    found = esft.overlap({"a": one, "b": two}, {"a": one, "b": two}, 2)
    assert found.loc["a"].to_dict() == {"a": 2, "b": 0}
    assert found.loc["b"].to_dict() == {"a": 0, "b": 2}


def test_concentration_ranks_the_shares_of_each_layer_by_itself():
    found = esft.concentration(scores([0.1, 0.2, 0.1, 0.0], [0.0, 0.0, 0.0, 3.0]))
    assert found == pytest.approx([0.75, 0.125, 0.125, 0])


def test_switches_count_the_experts_that_enter_or_leave():
    """Two experts reach 0.6, whichever is the better; of the total of 0.8 that one does alone."""
    pooled = {"tokens": scores([0.5, 0.2, 0.1]), "samples": scores([0.1, 0.5, 0.2])}
    found = esft.switches(pooled, {"gate": 0.6})
    assert found["experts that differ"].to_dict() == {
        ("gate", "within_samples"): 2,  # 0 and 1 before, 1 and 2 now
        ("gate", "share_of_the_total"): 1,  # 0
        ("gate", "paper"): 1,  # 1
    }
    assert found["layers that differ"].tolist() == [1, 1, 1]
    assert found["share of layers"].tolist() == [1, 1, 1]
