"""Shares of tokens by expert, layer and domain, against counts made by hand."""

import pandas as pd
import pytest
import torch
import transformers as tr

from moebook.analysis import routing
from moebook.errors import Refusal
from moebook.methods import pesc
from moebook.nn import routers


def dense():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return tr.LlamaForCausalLM(tr.LlamaConfig(vocab_size=40, num_hidden_layers=2, **sizes))


def crafted():
    torch.manual_seed(0)
    return pesc.craft(dense(), pesc.Config(experts=4, adapter_width=4))


def batches():
    torch.manual_seed(1)
    mask = (torch.arange(7) < torch.tensor([[7], [3]])).long()
    padded = {"input_ids": torch.randint(40, (2, 7)), "attention_mask": mask}
    plain = {"input_ids": torch.randint(40, (1, 5))}
    return {"code": [padded, plain], "language": [plain]}


def test_shares_count_the_chosen_experts_of_real_tokens():
    model = crafted().train()
    frame = routing.shares(model, batches())
    assert model.training
    assert len(frame) == 2 * 2 * 4
    sums = frame.groupby(["domain", "layer"])[["slots", "share"]].sum()
    assert sums.loc["code", "slots"].tolist() == [(7 + 3 + 5) * 2] * 2
    assert sums["share"].tolist() == pytest.approx([1.0] * 4)
    inputs = {}
    for router in routers(model):
        router.register_forward_hook(lambda m, args, out: inputs.update({m.layer: args[0]}))
    model.eval()(input_ids=batches()["language"][0]["input_ids"])
    for router in routers(model):
        chosen = [
            expert
            for token in inputs[router.layer][0]
            for expert in (router.weight @ token).argsort(descending=True)[:2].tolist()
        ]
        rows = frame[(frame.domain == "language") & (frame.layer == router.layer)]
        assert rows.slots.tolist() == [chosen.count(expert) for expert in range(4)]


def frame(shares, names=("router",)):
    rows = [
        (0, router, domain, expert, 100 * share, share)
        for router in names
        for domain, row in shares.items()
        for expert, share in enumerate(row)
    ]
    return pd.DataFrame(rows, columns=[*routing.KEYS, "domain", "expert", "slots", "share"])


@pytest.mark.parametrize(
    ("shares", "entropy", "largest", "distance"),
    [
        ({"a": [0.5, 0.5, 0, 0], "b": [0, 0, 0.5, 0.5]}, 1, 1 / 4, 1 / 2),  # uniform together
        ({"a": [1, 0, 0, 0]}, 0, 1, 0),
        ({"a": [0.7, 0.3], "b": [0.7, 0.3]}, 0.8813, 0.7, 0),
        ({"a": [1.0, 0.0], "b": [0.0, 1.0]}, 1, 1 / 2, 1 / 2),
        # What a token with two of four experts can show at least: one that serves all tokens has
        # half of the slots, and the entropy is still near 0.9.
        ({"a": [1 / 2, 1 / 2, 0, 0]}, 0.5, 1 / 2, 0),
        ({"a": [1 / 2, 1 / 6, 1 / 6, 1 / 6]}, 0.8962, 1 / 2, 0),
    ],
)
def test_load_and_specialisation_of_shares_worked_by_hand(shares, entropy, largest, distance):
    load = routing.load(frame(shares))
    assert load.entropy.tolist() == pytest.approx([entropy], abs=1e-4)
    assert load.largest.tolist() == pytest.approx([largest])
    distances = routing.specialisation(frame(shares)).distance
    assert distances.tolist() == pytest.approx([distance] * len(shares))


def test_routers_of_one_layer_are_summarised_one_by_one_and_then_averaged():
    """One on experts 0 and 1, one on 2 and 3: together they would look even."""
    low, high = frame({"a": [0.5, 0.5, 0, 0]}, ["q"]), frame({"a": [0, 0, 0.5, 0.5]}, ["v"])
    both = pd.concat([low, high])
    assert routing.load(both).entropy.tolist() == pytest.approx([0.5, 0.5])
    assert routing.specialisation(both).distance.tolist() == pytest.approx([0.0, 0.0])
    even = frame({"a": [0.5, 0.5, 0, 0], "b": [0, 0, 0.5, 0.5]}, ["q"])
    collapsed = frame({"a": [1.0, 0, 0, 0], "b": [1.0, 0, 0, 0]}, ["v"])
    want = {"load_entropy": 0.5, "largest_share": (0.25 + 1) / 2, "specialisation": 0.25}
    assert routing.summary(pd.concat([even, collapsed])) == pytest.approx(want)


def test_stacks_and_panels_show_the_same_layers():
    several = [frame({"a": [0.9, 0.1], "b": [0.3, 0.7]}).assign(layer=layer) for layer in range(9)]
    several[8].loc[several[8].domain == "b", "slots"] = [0, 300]
    shares = pd.concat(several)
    panels, stacks = routing.panels(shares), routing.stacks(shares)
    assert list(panels) == list(stacks) == [f"layer {layer}" for layer in (0, 2, 5, 8)]
    assert panels["layer 0"].loc["b"].tolist() == [0.3, 0.7]
    assert stacks["layer 0"].tolist() == pytest.approx([0.6, 0.4])
    assert stacks["layer 8"].tolist() == pytest.approx([90 / 400, 310 / 400])  # by slots


def test_opposite_preferences_of_two_routers_cancel_in_the_average_alone():
    one = frame({"code": [0.9, 0.1], "law": [0.1, 0.9]}, ["q"])
    other = frame({"code": [0.2, 0.8], "law": [0.8, 0.2]}, ["v"])
    averaged, by_layer = routing.contrast(pd.concat([one, other]), "code", "law")
    assert (averaged, by_layer) == pytest.approx((0.1, 0.7))


def test_models_without_routers_and_domains_without_tokens_are_refused():
    with pytest.raises(Refusal, match="E-MODEL"):
        routing.shares(dense(), batches())
    with pytest.raises(Refusal, match="E-DATA: domain 'law'"):
        routing.shares(crafted(), {"law": []})
