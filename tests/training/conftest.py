"""A model of 2 layers and width 32, and rows of random tokens whose second half is learnt."""

import random
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model


@pytest.fixture(scope="session")
def lora(tiny):
    """The same with LoRA and dropout, so that training draws random numbers at every step."""
    settings = LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj"])
    return lambda seed=0: get_peft_model(tiny(seed), settings)


@pytest.fixture(scope="session")
def rows():
    def build(count=20):
        draw = random.Random(0)
        ids = []
        for _ in range(count):
            length = draw.randint(4, 20)
            ids.append([draw.randrange(3, 64) for _ in range(length)])
        labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in ids]
        columns = {"input_ids": ids, "labels": labels, "length": list(map(len, ids))}
        return Dataset.from_dict(columns)

    return build


@pytest.fixture(scope="session")
def interrupt():
    """Make a penalty of 0 that presses Ctrl-C in the forward pass of one step."""
    return lambda step: Mock(
        side_effect=[torch.zeros(())] * (step - 1) + [KeyboardInterrupt]
    )
