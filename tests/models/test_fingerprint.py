"""The fingerprint changes with any bit of the base and with nothing else."""

import hashlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from moebook.models import fingerprint


def test_the_hash_is_the_one_worked_out_by_hand():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model.bias.copy_(torch.tensor([3.0]))
    expected = hashlib.sha256()
    expected.update(b"bias (1,) torch.float32\n" + bytes.fromhex("00004040"))
    expected.update(b"weight (1, 2) torch.float32\n" + bytes.fromhex("0000803f00000040"))
    assert fingerprint(model) == expected.hexdigest()


def test_one_flipped_bit_a_dtype_or_a_name_changes_it(llama):
    first = fingerprint(llama())
    flipped = llama()
    flipped.model.norm.weight.data.view(torch.int32)[3] ^= 1
    assert len({first, fingerprint(flipped), fingerprint(llama().bfloat16())}) == 3
    assert fingerprint(nn.ModuleDict({"a": nn.Linear(2, 2)})) != fingerprint(
        nn.ModuleDict({"b": nn.Linear(2, 2)})
    )


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_same_base_has_the_same_fingerprint_inside_a_peft_wrapper(llama):
    wrapped = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    assert fingerprint(wrapped) == fingerprint(llama())
    with torch.no_grad():
        wrapped.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight[0, 0] += 1
    assert fingerprint(wrapped) != fingerprint(llama())
