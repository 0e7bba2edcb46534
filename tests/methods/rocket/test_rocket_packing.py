"""Packs: every sample is found again in the tree, and nothing stands there twice."""

import pytest
import torch
from transformers import LlamaForCausalLM

from moebook.data import IGNORED
from moebook.errors import Refusal
from moebook.methods.rocket import attachment, loras, packing, scoring

SAMPLES = [
    ([5, 6, 7, 8, 1], 3),
    ([5, 6, 9, 1], 2),
    ([4, 4, 4], 2),
    ([5, 6, 7, 2, 2, 1], 3),
    ([5, 6, 7, 8, 1], 4),  # the first one again, with a shorter answer
]


def items():
    return [
        {"input_ids": ids, "labels": [IGNORED] * first + ids[first:], "length": len(ids)}
        for ids, first in SAMPLES
    ]


@pytest.mark.parametrize("limit", [1, 5, 9, 100])
def test_every_sample_can_be_read_back_from_what_its_tokens_see(limit):
    found = {}
    for pack in packing.packs(items(), limit):
        assert len(pack.tokens) <= limit or len(pack.lines) == 1
        at = 0
        for line, length in zip(pack.lines, pack.answers.lengths.tolist(), strict=True):
            last = int(pack.answers.readers[at + length - 1])
            path = pack.seen[last].nonzero().flatten()
            assert pack.positions[path].tolist() == list(range(len(path)))
            answer = pack.answers.targets[at : at + length].tolist()
            found[line] = (pack.tokens[path].tolist() + answer[-1:], length)
            at += length
    assert found == {n: (ids, len(ids) - first) for n, (ids, first) in enumerate(SAMPLES)}


def test_a_common_beginning_stands_once():
    (pack,) = packing.packs(items(), 100)
    rows = [tuple(pack.tokens[seen].tolist()) for seen in pack.seen]
    begun = {tuple(ids[: end + 1]) for ids, _ in SAMPLES for end in range(len(ids) - 1)}
    assert sorted(rows) == sorted(begun)


def everywhere(model, seed, rank=3):
    """A LoRA on every linear layer of the decoder."""
    torch.manual_seed(seed)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    layers = loras.linears(model, names)
    down = {path: torch.randn(rank, layer.in_features) / 5 for path, layer in layers.items()}
    up = {path: torch.randn(layer.out_features, rank) / 5 for path, layer in layers.items()}
    return loras.Lora(str(seed), rank, 2.0, down, up)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_what_is_left_out_changes_no_hidden_state_that_is_read(layers, whole, base, make_bank):
    model = base(num_hidden_layers=layers)
    bank = list(make_bank(model, 3).values())
    if whole:
        bank = [everywhere(model, seed) for seed in range(3)]
    ids, places = torch.arange(10, 22).expand(3, -1), torch.tensor([4, 7, 11])
    with attachment.attached(model.eval(), bank), torch.no_grad():
        wanted = model.model(input_ids=ids).last_hidden_state[:, places]
        with attachment.trimmed(model, 3, 12, places):
            found = model.model(input_ids=ids).last_hidden_state[:, places]
        again = model.model(input_ids=ids).last_hidden_state[:, places]
    torch.testing.assert_close(found, wanted)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda m: setattr(m.config, "logit_scale", 0.5), "config.logit_scale, expected one"),
        (lambda m: setattr(m, "lm_head", torch.nn.Linear(32, 259)), "a bias, expected one product"),
        (lambda m: delattr(m.model.layers[1], "self_attn"), "layer 1 has no attention"),
    ],
)
def test_a_base_whose_answers_cannot_be_read_off_a_pack_is_refused(
    alter, message, base, make_bank, shots, tokenizer
):
    model: LlamaForCausalLM = base()
    bank = make_bank(model, 2)
    alter(model)
    with pytest.raises(Refusal, match=f"E-MODEL: .*{message}"):
        scoring.perplexity(model, tokenizer, bank, shots)
