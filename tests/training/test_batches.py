"""Batches are a function of seed and step, cover every row, and cost little padding."""

import numpy as np
import pytest
import torch
from datasets import Dataset

from moebook.errors import Refusal
from moebook.training.batches import Batches


def test_an_epoch_holds_every_row_once_in_an_order_of_seed_and_epoch_alone(rows):
    def drawn(steps, seed=5):
        batches = Batches(rows(23), 4, seed=seed, pad_id=2)
        assert batches.per_epoch == 6
        return {step: batches.rows(step).tolist() for step in steps}

    there = drawn(range(12))
    assert there == drawn(reversed(range(12)))
    first, second = ([row for step in part for row in there[step]]
                     for part in (range(6), range(6, 12)))  # fmt: skip
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    assert there != drawn(range(12), seed=6)


def test_parts_of_a_step_share_its_rows_and_one_without_rows_teaches_nothing(rows):
    batches, empty = Batches(rows(10), 4, seed=0, pad_id=2), 0
    for step in range(3):
        dealt = [batches.part(step, part, 3) for part in range(3)]
        taught = [int((inputs["labels"][:, 1:] != -100).sum()) for inputs, _ in dealt]
        whole = int((batches[step]["labels"][:, 1:] != -100).sum())
        assert sum(taught) == whole == batches.labels(step)
        assert sum(share for _, share in dealt) == pytest.approx(1)
        for (inputs, share), count in zip(dealt, taught, strict=True):
            tokens = int(inputs["attention_mask"].sum())
            assert share == (pytest.approx(tokens / batches.tokens(step)) if count else 0)
            empty += not count
    assert empty


def test_a_batch_is_the_one_padded_by_hand():
    table = {
        "input_ids": [[5, 6, 7, 8], [9, 10, 11]],
        "labels": [[-100, -100, 7, 8], [-100, -100, 11]],
    }
    batch = Batches(Dataset.from_dict(table), 2, seed=0, pad_id=2).collate(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 11, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 7, 8], [-100, 11, -100]]
    assert batch["logits_to_keep"] == 3


def test_leaving_out_unneeded_logits_changes_no_loss(rows, llama):
    model = llama()
    batches = Batches(rows(12), 12, seed=0, pad_id=2)
    batch = batches.collate(np.arange(12))
    full = torch.full(batch["input_ids"].shape, -100)
    for line, labels in enumerate(batches.row_labels):
        full[line, : len(labels)] = torch.tensor(labels)
    with torch.no_grad():
        short = model(**batch).loss
        long = model(**{**batch, "labels": full, "logits_to_keep": 0}).loss
    assert batch["labels"].shape[1] < full.shape[1]
    torch.testing.assert_close(short, long)


def test_rows_of_similar_length_come_together(rows):
    batches = Batches(rows(256), 8, seed=0, pad_id=2)
    padded = sum(batches[step]["input_ids"].numel() for step in range(32))
    random_order = np.random.default_rng(0).permutation(256).reshape(32, 8)
    unsorted = sum(batches.lengths[line].max() * 8 for line in random_order)
    assert padded - batches.lengths.sum() < 0.4 * (unsorted - batches.lengths.sum())
    assert sum(batches.tokens(step) for step in range(32)) == batches.lengths.sum()


@pytest.mark.parametrize(
    ("ids", "labels", "words"),
    [
        ([], [], "no rows"),
        ([[1, 2], [3, 4]], [[-100, 2], [1, -100]], "row 1: every label is masked"),
        ([[1, 2]], [[-100]], "row 0: 2 input_ids but 1 labels"),
    ],
)
def test_rows_that_cannot_be_learnt_are_refused(ids, labels, words):
    with pytest.raises(Refusal, match=f"E-DATA: .*{words}"):
        Batches(Dataset.from_dict({"input_ids": ids, "labels": labels}), 2, seed=0, pad_id=2)
