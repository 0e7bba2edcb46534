"""Routers against scipy and autograd; shares, indices, purity by hand; projections keep apart."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy
from torch import nn

from moebook.analysis import clusters, routers, routing
from moebook.analysis.clusters import panels, project, purity
from moebook.methods import upcycling
from moebook.models.anatomy import sparse_layers
from moebook.training import step_memory
from tests.families import of_family
from tests.refusals import refused

each_family = pytest.mark.parametrize("family", ["upcycled", "Mixtral", "Olmoe", "Qwen3Moe"])


@pytest.fixture
def model_of(host, mixture):
    """A builder of models with two experts a token, by family."""

    def make(family):
        if family in ("upcycled", "dense"):
            dense, config = host(), upcycling.Config(top_k=2)
            start = upcycling.su(dense, 4, kind="wide")
            return dense if family == "dense" else upcycling.upcycle(dense, config, start)
        return mixture(family)

    return make


def routers_of(model):
    return [getattr(layer.mlp, "router", None) or layer.mlp.gate for layer in model.model.layers]


def by_hand(model, batch):
    """By layer the logits of real tokens, the two experts that each takes, the slots of each."""
    inputs = {}
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda m, args, out, i=i: inputs.update({i: args[0]}))
    model.eval()(**batch)
    for i, router in enumerate(routers_of(model)):
        places = batch["attention_mask"].nonzero().tolist()
        logits = [(router.weight @ inputs[i][row, column]).tolist() for row, column in places]
        pairs = [sorted(range(len(z)), key=lambda e, z=z: -z[e])[:2] for z in logits]
        yield logits, pairs, [sum(e in pair for pair in pairs) for e in range(len(router.weight))]


@each_family
def test_statistics_are_those_of_numpy_and_scipy_over_real_tokens(family, model_of, batch):
    model = model_of(family).train()
    frame = routers.statistics(model, [batch, batch])
    assert model.training
    for i, (logits, _, slots) in enumerate(by_hand(model, batch)):
        limit, nats = math.log(len(slots)), entropy(softmax(logits, axis=1), axis=1)
        assert frame.scale[i] == pytest.approx(math.sqrt(np.var(logits, axis=1).mean()), rel=1e-4)
        assert frame.entropy[i] == pytest.approx(nats.mean() / limit, rel=1e-4)
        assert frame.load_entropy[i] == pytest.approx(entropy(slots) / limit, rel=1e-4)
        assert frame.largest[i] == pytest.approx(max(slots) / (2 * 19))


@each_family
def test_gradients_are_those_of_backward_and_a_summary_takes_means(family, model_of, batch):
    model = model_of(family)
    frame, means = routers.gradients(model, batch), routers.summary(model, [batch], batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(**batch).loss.backward()
    norms = [router.weight.grad.norm().item() for router in routers_of(model)]
    assert min(norms) > 0
    assert frame.gradient.tolist() == pytest.approx(norms, rel=1e-5)
    assert means.pop("gradient") == pytest.approx(math.hypot(*norms), rel=1e-5)
    banks = [p.grad.norm().item() for n, p in model.named_parameters() if ".experts." in n]
    share = math.hypot(*norms) / math.hypot(*banks)
    assert routers.reach(model, batch) == pytest.approx(share, rel=1e-5)
    assert list(means) == ["scale", "entropy", "load_entropy"]
    layers = routers.statistics(model, [batch])
    for name, mean in means.items():
        assert mean == pytest.approx((layers[name][0] + layers[name][1]) / 2)


@pytest.mark.parametrize("kind", ["hunyuan_v1_moe", "afmoe", "gpt_oss", "laguna"])
def test_gradients_take_in_all_that_trains_of_a_router(kind, batch):
    """Of a layer inside it, and of a bias, but not of one that the family keeps from training."""
    model = of_family(kind)
    frame = routers.gradients(model, batch)
    model(**batch).loss.backward()
    layers = sparse_layers(model)
    assert frame.layer.tolist() == [layer.index for layer in layers]
    for norm, layer in zip(frame.gradient, layers, strict=True):
        grads = [p.grad.norm() for p in layer.router.parameters() if p.grad is not None]
        assert norm == pytest.approx(math.hypot(*grads), rel=1e-5) and norm > 0
    assert routers.reach(model, batch) > 0
    for layer in layers:
        layer.router.requires_grad_(False)
    refused("E-MODEL: a router does not require a gradient", routers.gradients, model, batch)


@each_family
def test_decisions_are_the_largest_logits_of_real_tokens(family, model_of, batch):
    model, short = model_of(family), {"input_ids": batch["input_ids"][:1, :5]}
    sets, chosen = routers.activated(model, [batch, short]), routers.real_decisions(model, batch)
    assert sets.shape[:2] == (2, 19 + 5)
    for i, (tokens, pairs, _) in enumerate(by_hand(model, batch)):
        torch.testing.assert_close(chosen[i].logits, torch.tensor(tokens), rtol=1e-4, atol=1e-4)
        assert chosen[i].ids.tolist() == pairs
        for token, pair in zip(sets[i], pairs, strict=False):
            assert token.nonzero().flatten().tolist() == sorted(pair)


def test_shares_count_the_chosen_experts_of_real_tokens(model_of, batch):
    model, short = model_of("upcycled").train(), {"input_ids": batch["input_ids"][:1, :5]}
    shares = routing.shares(model, {"code": [batch, short], "law": [batch]})
    assert model.training
    sums = shares.groupby(["domain", "layer"])[["slots", "share"]].sum()
    assert sums.loc["code", "slots"].tolist() == [(19 + 5) * 2] * 2
    assert sums["share"].tolist() == pytest.approx([1.0] * 4)
    for i, (_, _, slots) in enumerate(by_hand(model, batch)):
        assert shares[(shares.domain == "law") & (shares.layer == i)].slots.tolist() == slots


def frame(shares, router="q", **columns):
    cells = [(domain, *cell) for domain, row in shares.items() for cell in enumerate(row)]
    rows = [(0, router, domain, expert, 100 * share, share) for domain, expert, share in cells]
    names = [*routing.KEYS, "domain", "expert", "slots", "share"]
    return pd.DataFrame(rows, columns=names).assign(**columns)


@pytest.mark.parametrize(("shares", "load_entropy", "largest", "distance"), [
    ({"a": [0.5, 0.5, 0, 0], "b": [0, 0, 0.5, 0.5]}, 1, 1 / 4, 1 / 2),  # uniform together
    ({"a": [1, 0, 0, 0]}, 0, 1, 0),
    ({"a": [0.7, 0.3], "b": [0.7, 0.3]}, 0.8813, 0.7, 0),
    # What a token with two of four experts can show at least: one that serves all tokens has
    # half of the slots, and the entropy is still near 0.9.
    ({"a": [1 / 2, 1 / 2, 0, 0]}, 0.5, 1 / 2, 0),
    ({"a": [1 / 2, 1 / 6, 1 / 6, 1 / 6]}, 0.8962, 1 / 2, 0),
])  # fmt: skip
def test_load_and_specialisation_of_shares_worked_by_hand(shares, load_entropy, largest, distance):
    load = routing.load(frame(shares))
    assert load.entropy.tolist() == pytest.approx([load_entropy], abs=1e-4)
    assert load.largest.tolist() == pytest.approx([largest])
    distances = routing.specialisation(frame(shares)).distance
    assert distances.tolist() == pytest.approx([distance] * len(shares))


def test_routers_of_one_layer_are_summarised_one_by_one_and_then_averaged():
    """One on experts 0 and 1, one on 2 and 3: together they would look even."""
    both = pd.concat([frame({"a": [0.5, 0.5, 0, 0]}), frame({"a": [0, 0, 0.5, 0.5]}, "v")])
    assert routing.load(both).entropy.tolist() == pytest.approx([0.5, 0.5])
    assert routing.specialisation(both).distance.tolist() == pytest.approx([0.0, 0.0])
    even = frame({"a": [0.5, 0.5, 0, 0], "b": [0, 0, 0.5, 0.5]})
    collapsed = frame({"a": [1.0, 0, 0, 0], "b": [1.0, 0, 0, 0]}, "v")
    want = {"load_entropy": 0.5, "largest_share": (0.25 + 1) / 2, "specialisation": 0.25}
    assert routing.summary(pd.concat([even, collapsed])) == pytest.approx(want)
    one = frame({"code": [0.9, 0.1], "law": [0.1, 0.9]})
    other = frame({"code": [0.2, 0.8], "law": [0.8, 0.2]}, "v")
    averaged, by_layer = routing.contrast(pd.concat([one, other]), "code", "law")
    assert (averaged, by_layer) == pytest.approx((0.1, 0.7))  # opposites cancel in the first


def test_stacks_and_panels_show_the_same_layers():
    several = [frame({"a": [0.9, 0.1], "b": [0.3, 0.7]}, layer=layer) for layer in range(9)]
    several[8].loc[several[8].domain == "b", "slots"] = [0, 300]
    shares = pd.concat(several)
    panels, stacks = routing.panels(shares), routing.stacks(shares)
    assert list(panels) == list(stacks) == [f"layer {layer}" for layer in (0, 2, 5, 8)]
    assert panels["layer 0"].loc["b"].tolist() == [0.3, 0.7]
    assert stacks["layer 0"].tolist() == pytest.approx([0.6, 0.4])
    assert stacks["layer 8"].tolist() == pytest.approx([90 / 400, 310 / 400])  # by slots


def sets(*tokens):
    """One layer of activated experts out of 4 for each token."""
    return torch.tensor([[[e in token for e in range(4)] for token in tokens]])


FIRST, SECOND, THIRD = sets({0, 1}, {2, 3}), sets({0, 1}, {1, 2}), sets({2, 3}, {1, 2})
THREE, TOP_1 = [FIRST, SECOND, THIRD], [sets({0}, {1}, {2}, {3}), sets({0}, {1}, {2}, {0})]


def test_consistency_is_the_mean_jaccard_index_of_the_tokens():
    three = routers.consistency(THREE).consistency
    assert three.tolist() == pytest.approx([(1 + 1 / 3 + 0 + 1 / 3 + 0 + 1) / 6])
    kept = routers.consistency(TOP_1).consistency  # with one expert a token: the share
    assert kept.tolist() == pytest.approx([0.75])
    watched = {0: torch.cat([FIRST, FIRST]), 5: THIRD, 9: torch.cat([FIRST, SECOND])}
    # The overall one is the mean over layers at the chosen steps.
    assert routers.overall(watched, (0, 9)) == pytest.approx((1 + (1 + 1 / 3) / 2) / 2)


def test_models_texts_and_checkpoints_that_cannot_be_measured_are_refused(model_of):
    dense, mixtral, frozen = model_of("dense"), model_of("Mixtral"), model_of("Olmoe")
    frozen.requires_grad_(False)
    for measure, given, code in (
        (routers.statistics, (dense, [{}]), "E-MODEL: .* it has no routers"),
        (routers.statistics, (mixtral, []), "E-DATA: no tokens"),
        (routers.activated, (mixtral, []), "E-DATA: no tokens"),
        (routers.gradients, (frozen, {}), "does not require a gradient"),
        (routing.shares, (dense, {"law": []}), "E-MODEL"),
        (routing.shares, (model_of("upcycled"), {}), "E-RANGE: batches"),
        (routing.shares, (model_of("upcycled"), {"law": []}), "E-DATA: domain 'law'"),
        (routers.consistency, ([FIRST],), "E-DATA"),
        (routers.consistency, ([FIRST, FIRST[:, :1]],), "E-SHAPE"),
    ):
        refused(code, measure, *given)


def test_purity_counts_the_most_frequent_domain_of_each_cluster():
    layer = [[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]]
    mixed = [[0.0], [9.0], [0.1], [9.1], [0.2], [9.2]]
    points, labels = torch.tensor([layer, mixed]), torch.tensor([4, 4, 4, 7, 7, 7])
    frame = purity(points, labels)
    assert frame.purity.tolist() == pytest.approx([1.0, (2 + 2) / 6])
    assert frame.largest.tolist() == pytest.approx([0.5, 0.5])


def two_groups():
    """One layer of two distant groups of 20 points in 6 dimensions."""
    points = torch.randn(1, 40, 6, generator=torch.Generator().manual_seed(0))
    points[:, 20:, 3] += 50
    return points


@pytest.mark.parametrize("method", ["umap", "pca"])
def test_distant_groups_stay_apart_and_the_layout_repeats(method, monkeypatch):
    if method == "umap":
        clusters._umap(0)  # which imports it without its warning
        from umap import umap_

        # As plain Python: at 40 points compiling takes 30 s, and running it 20 ms.
        for name in ("fast_knn_indices", "smooth_knn_dist", "compute_membership_strengths"):
            monkeypatch.setattr(umap_, name, getattr(umap_, name).py_func)
    plane = project(two_groups(), method, seed=1)
    assert plane.shape == (1, 40, 2)
    first, second = plane[0, :20], plane[0, 20:]
    gap = np.linalg.norm(first[:, None] - second[None], axis=2).min()
    within = max(np.linalg.norm(g - g.mean(0), axis=1).max() for g in (first, second))
    assert gap > within and np.abs(plane).max() == pytest.approx(1)
    np.testing.assert_array_equal(plane, project(two_groups(), method, seed=1))


def test_torch_keeps_its_number_of_threads_even_when_a_projection_fails(monkeypatch):
    def fit(layer):
        torch.set_num_threads(before + 1)  # as numba does when UMAP starts it, once a process
        return 1 / 0

    before = torch.get_num_threads()
    monkeypatch.setattr(clusters, "_umap", lambda seed: fit)
    with pytest.raises(ZeroDivisionError):
        project(two_groups(), "umap")
    assert torch.get_num_threads() == before


def test_panels_show_first_middle_and_last_layer_by_group():
    torch.manual_seed(0)
    points, labels = torch.randn(6, 9, 4), torch.tensor([0, 1, 1] * 3)
    shown = panels(points, labels, ["code", "law"], "pca")
    assert list(shown) == ["layer 0", "layer 3", "layer 5"]
    plane = project(points, "pca")[3]
    np.testing.assert_array_equal(shown["layer 3"]["code"], plane[[0, 3, 6]])
    assert shown["layer 3"]["law"].shape == (6, 2)
    assert list(panels(points[:1], labels, ["code", "law"], "pca")) == ["layer 0"]


@pytest.mark.parametrize(("measure", "changes", "code"), [
    (purity, {"labels": torch.zeros(2)}, "E-SHAPE"),
    (purity, {"points": two_groups() * torch.nan}, "E-NONFINITE"),
    (project, {"method": "umapp"}, "E-CHOICE: method is 'umapp'"),
    (project, {"points": two_groups()[:, :15]}, "E-SHAPE"),
    (project, {"points": two_groups() * torch.nan}, "E-NONFINITE"),
])  # fmt: skip
def test_what_cannot_be_clustered_or_projected_is_refused(measure, changes, code):
    given = {"points": two_groups()} | ({"labels": torch.zeros(40)} if measure is purity else {})
    refused(code, measure, **given | changes)


def test_bytes_of_a_training_step_are_those_counted_by_hand():
    linear = [nn.Linear(*size, bias=False) for size in ((4, 8), (8, 2))]
    model, batch = nn.Sequential(linear[0], nn.Tanh(), linear[1]), {"input": torch.randn(5, 4)}
    linear[0].requires_grad_(False)
    half = step_memory(model, batch)
    assert half.parameters == 4 * (4 * 8 + 8 * 2)
    assert half.trained == 3 * 4 * 8 * 2
    assert half.kept == 4 * 5 * 8  # what the second layer reads; the frozen part keeps nothing
    model.requires_grad_(True)
    more = step_memory(model, batch)
    assert more.kept == 4 * (5 * 4 + 5 * 8)  # and the input; tanh's output is the same tensor
    assert more.trained == 3 * more.parameters
    assert more.total == more.parameters + more.kept + more.trained


def test_counting_changes_neither_gradients_nor_random_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    step_memory(model, {"input": torch.ones(2, 4)})
    assert torch.equal(torch.rand(3), expected)
    assert model[0].weight.grad is None
