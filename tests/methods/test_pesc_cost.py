"""What the sparse form costs beside the dense one: bytes counted, time measured in turns."""

import torch
from datasets import Dataset

from moebook.analysis.memory import step_memory
from moebook.methods import pesc

SMALL = pesc.Config(experts=4, adapter_width=6, host="lora", lora_rank=4)


def test_bytes_are_those_of_a_step_and_every_turn_has_a_ratio(host, batch):
    dense = pesc.prepare(host(), SMALL, sparse=False)
    sparse = pesc.prepare(host(), SMALL)
    rows = [torch.randint(3, 48, (7,)).tolist() for _ in range(12)]
    train = Dataset.from_dict({"input_ids": rows, "labels": rows})
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    labelled = {**inputs, "labels": inputs["input_ids"]}
    want = [step_memory(model.train(), labelled).total for model in (sparse, dense)]
    found = pesc.cost(dense, sparse, train, inputs, batch=4, lr=0.01, pad_id=2)
    assert found.memory == want[0] / want[1] > 1
    assert len(found.step_times) == 3
    assert all(ratio > 0 for ratio in found.step_times)
