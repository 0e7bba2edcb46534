"""Routing consistency: Jaccard indices made by hand, and sets as a model activates them."""

import pytest
import torch
import transformers as tr

from moebook.analysis.consistency import activated, consistency, overall
from moebook.errors import Refusal


def sets(*tokens):
    """One layer of activated experts out of 4 for each token."""
    return torch.tensor([[[e in token for e in range(4)] for token in tokens]])


FIRST, SECOND, THIRD = sets({0, 1}, {2, 3}), sets({0, 1}, {1, 2}), sets({2, 3}, {1, 2})


@pytest.mark.parametrize(
    ("over", "score"),
    [
        ("pairs", (1 + 1 / 3 + 0 + 1 / 3 + 0 + 1) / 6),
        ("successive", (1 + 1 / 3 + 0 + 1) / 4),
        ("joint", (0 / 4 + 1 / 3) / 2),
    ],
)
def test_consistency_is_the_mean_jaccard_index_of_the_tokens(over, score):
    frame = consistency([FIRST, SECOND, THIRD], over=over)
    assert frame.consistency.tolist() == pytest.approx([score])


def test_top_1_consistency_is_the_share_of_tokens_that_kept_their_expert():
    one, two = sets({0}, {1}, {2}, {3}), sets({0}, {1}, {2}, {0})
    assert consistency([one, two]).consistency[0] == pytest.approx(0.75)


def test_overall_is_the_mean_over_layers_at_the_chosen_steps():
    watched = {0: torch.cat([FIRST, FIRST]), 5: THIRD, 9: torch.cat([FIRST, SECOND])}
    assert overall(watched, (0, 9)) == pytest.approx((1 + (1 + 1 / 3) / 2) / 2)


def test_unrelated_uniform_top_1_routings_agree_by_chance():
    torch.manual_seed(0)
    routings = [
        torch.nn.functional.one_hot(torch.randint(4, (3, 5000)), 4).bool() for _ in range(3)
    ]
    assert consistency(routings).consistency.tolist() == pytest.approx([0.25] * 3, abs=0.02)


def test_activated_marks_the_chosen_experts_of_real_tokens():
    torch.manual_seed(0)
    config = tr.MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = tr.MixtralForCausalLM(config).eval()
    ids = torch.randint(40, (2, 5))
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    chosen = {}
    for i, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda m, a, out, i=i: chosen.update({i: out[2]}))
    got = activated(model, [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:1]}])
    model(input_ids=ids, attention_mask=mask)
    assert got.shape == (2, 8 + 5, 4)
    real = [*range(5), *range(5, 8)]
    for layer in range(2):
        for token, row in enumerate(real):
            assert set(chosen[layer][row].tolist()) == set(
                got[layer, token].nonzero().flatten().tolist()
            )


def test_what_cannot_be_compared_is_refused():
    for checkpoints, changes, code in (
        ([FIRST], {}, "E-DATA"),
        ([FIRST, FIRST[:, :1]], {}, "E-SHAPE"),
        ([FIRST, SECOND], {"over": "pair"}, "E-CHOICE.*did you mean 'pairs'"),
    ):
        with pytest.raises(Refusal, match=code):
            consistency(checkpoints, **changes)
