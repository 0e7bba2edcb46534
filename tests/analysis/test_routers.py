"""Routers against scipy and autograd; shares, indices and purity by hand."""

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

FAMILIES = ["upcycled", "Mixtral", "Olmoe", "Qwen3Moe"]
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def model_of(host, mixture):
    """A builder of models with two experts a token, by family."""

    def make(family):
        if family == "dense":
            return host()
        if family == "upcycled":
            dense = host()
            start = upcycling.su(dense, 4, kind="wide")
            return upcycling.upcycle(dense, upcycling.Config(top_k=2), start)
        return mixture(family)

    return make


def routers_of(model):
    mlps = [layer.mlp for layer in model.model.layers]
    return [mlp.router if hasattr(mlp, "router") else mlp.gate for mlp in mlps]


def by_hand(model, batch):
    """By layer the logits of real tokens, the two experts each takes, slots of each."""
    inputs = {}
    for i, layer in enumerate(model.model.layers):

        def keep(module, args, output, i=i):
            inputs[i] = args[0]

        layer.mlp.register_forward_hook(keep)
    model.eval()(**batch)
    places = batch["attention_mask"].nonzero().tolist()
    for i, router in enumerate(routers_of(model)):
        logits = []
        pairs = []
        slots = [0] * len(router.weight)
        for row, column in places:
            z = (router.weight @ inputs[i][row, column]).tolist()
            first, second, *_ = sorted(range(len(z)), key=lambda e, z=z: -z[e])
            slots[first] += 1
            slots[second] += 1
            logits.append(z)
            pairs.append([first, second])
        yield logits, pairs, slots


@each_family
def test_statistics_are_those_of_numpy_and_scipy_over_real_tokens(
    family, model_of, batch
):
    model = model_of(family).train()
    frame = routers.statistics(model, [batch, batch])
    assert model.training
    for i, (logits, _, slots) in enumerate(by_hand(model, batch)):
        even = math.log(len(slots))
        scale = math.sqrt(np.var(logits, axis=1).mean())
        nats = entropy(softmax(logits, axis=1), axis=1).mean()
        assert frame.scale[i] == pytest.approx(scale, rel=1e-4)
        assert frame.entropy[i] == pytest.approx(nats / even, rel=1e-4)
        assert frame.load_entropy[i] == pytest.approx(entropy(slots) / even, rel=1e-4)
        assert frame.largest[i] == pytest.approx(max(slots) / (2 * 19))


def norms(parameters):
    return [p.grad.norm().item() for p in parameters if p.grad is not None]


@each_family
def test_gradients_are_those_of_backward_and_a_summary_takes_means(
    family, model_of, batch
):
    model = model_of(family)
    frame = routers.gradients(model, batch)
    means = routers.summary(model, [batch], batch)
    reach = routers.reach(model, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(**batch).loss.backward()
    of_routers = norms(router.weight for router in routers_of(model))
    assert min(of_routers) > 0
    assert frame.gradient.tolist() == pytest.approx(of_routers, rel=1e-5)
    assert means.pop("gradient") == pytest.approx(math.hypot(*of_routers), rel=1e-5)
    named = model.named_parameters()
    of_experts = norms(bank for name, bank in named if ".experts." in name)
    ratio = math.hypot(*of_routers) / math.hypot(*of_experts)
    assert reach == pytest.approx(ratio, rel=1e-5)
    assert list(means) == ["scale", "entropy", "load_entropy"]
    layers = routers.statistics(model, [batch])
    for name, mean in means.items():
        assert mean == pytest.approx((layers[name][0] + layers[name][1]) / 2)


@pytest.mark.parametrize("kind", ["hunyuan_v1_moe", "afmoe", "gpt_oss", "laguna"])
def test_gradients_take_in_all_that_trains_of_a_router(kind, batch):
    """Of a layer inside it, and of a bias, but not of one the family never trains."""
    model = of_family(kind)
    frame = routers.gradients(model, batch)
    assert routers.reach(model, batch) > 0
    model(**batch).loss.backward()
    layers = sparse_layers(model)
    assert frame.layer.tolist() == [layer.index for layer in layers]
    for norm, layer in zip(frame.gradient, layers, strict=True):
        assert norm > 0
        expected = math.hypot(*norms(layer.router.parameters()))
        assert norm == pytest.approx(expected, rel=1e-5)
        layer.router.requires_grad_(False)
    message = "E-MODEL: a router does not require a gradient"
    refused(message, routers.gradients, model, batch)


@pytest.fixture
def short(batch):
    """Five more tokens."""
    return {"input_ids": batch["input_ids"][:1, :5]}


@each_family
def test_decisions_are_the_largest_logits_of_real_tokens(
    family, model_of, batch, short
):
    model = model_of(family)
    activated = routers.activated(model, [batch, short])
    assert activated.shape[:2] == (2, 19 + 5)
    decisions = routers.real_decisions(model, batch)
    for i, (logits, pairs, _) in enumerate(by_hand(model, batch)):
        expected = torch.tensor(logits)
        torch.testing.assert_close(decisions[i].logits, expected, rtol=1e-4, atol=1e-4)
        assert decisions[i].ids.tolist() == pairs
        for experts, pair in zip(activated[i, :19], pairs, strict=True):
            assert experts.nonzero().flatten().tolist() == sorted(pair)


def test_shares_count_the_chosen_experts_of_real_tokens(model_of, batch, short):
    model = model_of("upcycled").train()
    shares = routing.shares(model, {"code": [batch, short], "law": [batch]})
    assert model.training
    sums = shares.groupby(["domain", "layer"])[["slots", "share"]].sum()
    assert sums.loc["code", "slots"].tolist() == [(19 + 5) * 2] * 2
    assert sums["share"].tolist() == pytest.approx([1.0] * 4)
    law = shares[shares.domain == "law"]
    for i, (_, _, slots) in enumerate(by_hand(model, batch)):
        assert law[law.layer == i].slots.tolist() == slots


def frame(shares, router="q", **columns):
    """A router's shares by domain as a frame; each domain has 100 slots."""
    rows = []
    for domain, of_experts in shares.items():
        for expert, share in enumerate(of_experts):
            rows.append((0, router, domain, expert, 100 * share, share))
    names = [*routing.KEYS, "domain", "expert", "slots", "share"]
    return pd.DataFrame(rows, columns=names).assign(**columns)


WORKED = [  # shares by domain; entropy of the load, largest share, distance of a domain
    ({"a": [0.5, 0.5, 0, 0], "b": [0, 0, 0.5, 0.5]}, 1, 1 / 4, 1 / 2),  # even together
    ({"a": [1, 0, 0, 0]}, 0, 1, 0),
    ({"a": [0.7, 0.3], "b": [0.7, 0.3]}, 0.8813, 0.7, 0),
    # The least that a token with two of four experts can show: one that serves all
    # tokens has half of the slots, and the entropy is still near 0.9.
    ({"a": [1 / 2, 1 / 2, 0, 0]}, 0.5, 1 / 2, 0),
    ({"a": [1 / 2, 1 / 6, 1 / 6, 1 / 6]}, 0.8962, 1 / 2, 0),
]


@pytest.mark.parametrize(("shares", "load_entropy", "largest", "distance"), WORKED)
def test_load_and_specialisation_of_shares_worked_by_hand(
    shares, load_entropy, largest, distance
):
    load = routing.load(frame(shares))
    assert load.entropy.tolist() == pytest.approx([load_entropy], abs=1e-4)
    assert load.largest.tolist() == pytest.approx([largest])
    distances = routing.specialisation(frame(shares)).distance
    assert distances.tolist() == pytest.approx([distance] * len(shares))


def test_routers_of_one_layer_are_summarised_one_by_one_and_then_averaged():
    """One on experts 0 and 1, one on 2 and 3: together they would look even."""
    left = frame({"a": [0.5, 0.5, 0, 0]})
    right = frame({"a": [0, 0, 0.5, 0.5]}, "v")
    both = pd.concat([left, right])
    assert routing.load(both).entropy.tolist() == pytest.approx([0.5, 0.5])
    assert routing.specialisation(both).distance.tolist() == pytest.approx([0.0, 0.0])

    even = frame({"a": [0.5, 0.5, 0, 0], "b": [0, 0, 0.5, 0.5]})
    collapsed = frame({"a": [1.0, 0, 0, 0], "b": [1.0, 0, 0, 0]}, "v")
    assert routing.summary(pd.concat([even, collapsed])) == pytest.approx(
        {
            "load_entropy": 0.5,
            "largest_share": (0.25 + 1) / 2,
            "specialisation": 0.25,
        }
    )
    # Preferences that are opposite in two routers cancel in the mean over them.
    first = frame({"code": [0.9, 0.1], "law": [0.1, 0.9]})
    second = frame({"code": [0.2, 0.8], "law": [0.8, 0.2]}, "v")
    contrast = routing.contrast(pd.concat([first, second]), "code", "law")
    assert contrast == pytest.approx((0.1, 0.7))


def test_routers_of_different_numbers_of_experts_are_each_measured_by_their_own():
    few = frame({"code": [0.5, 0.5], "law": [0.5, 0.5]})
    more = frame({"code": [0.5, 0.5, 0, 0], "law": [0, 0, 0.5, 0.5]}, "v")
    both = pd.concat([few, more])
    assert routing.load(both).entropy.tolist() == pytest.approx([1.0, 1.0])
    # Averaged over two routers each gap is half of 1/2, of four experts: 1/2 in all.
    assert routing.contrast(both, "code", "law") == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([{"a": [1, 0], "b": [0, 1]}, {"a": [1, 0]}], "E-DATA: .*once for each domain"),
        ([{"a": [0.5, 0.5], "b": [0.9, 0.6]}], "E-RANGE: .* sum to 1.5, expected 1"),
        ([{"a": [0.5, 0.500008]}], "E-RANGE: .*expected 1"),
    ],
)
def test_shares_of_which_some_are_missing_or_no_whole_are_refused(shares, message):
    routers = [frame(one, f"r{number}") for number, one in enumerate(shares)]
    refused(message, routing.load, pd.concat(routers))


def test_stacks_and_panels_show_the_same_layers():
    shares = {"a": [0.9, 0.1], "b": [0.3, 0.7]}
    layers = [frame(shares, layer=layer) for layer in range(9)]
    layers[8].loc[layers[8].domain == "b", "slots"] = [0, 300]
    shares = pd.concat(layers)
    panels = routing.panels(shares)
    stacks = routing.stacks(shares)
    assert list(panels) == [f"layer {layer}" for layer in (0, 2, 5, 8)]
    assert list(stacks) == list(panels)
    assert panels["layer 0"].loc["b"].tolist() == [0.3, 0.7]
    assert stacks["layer 0"].tolist() == pytest.approx([0.6, 0.4])
    assert stacks["layer 8"].tolist() == pytest.approx([90 / 400, 310 / 400])  # slots


@pytest.mark.parametrize(
    ("layers", "most", "shown"),
    [
        (range(1, 4), 1, (1,)),  # the first of four layers is dense
        (range(1, 4), 4, (1, 2, 3)),
        (range(0, 24, 2), 4, (0, 6, 14, 22)),  # every other layer has experts
        (range(3, 61), 4, (3, 22, 41, 60)),
    ],
)
def test_panels_and_stacks_are_spaced_over_the_layers_that_have_routers(
    layers, most, shown
):
    of_layers = [frame({"a": [0.9, 0.1]}, layer=layer) for layer in layers]
    shares = pd.concat(of_layers)
    names = [f"layer {layer}" for layer in shown]
    assert list(routing.panels(shares, most)) == names
    assert list(routing.stacks(shares, most)) == names


def sets(*tokens):
    """One layer of activated experts out of 4 for each token, ``[1, T, 4]``."""
    activated = torch.zeros(1, len(tokens), 4, dtype=torch.bool)
    for row, experts in zip(activated[0], tokens, strict=True):
        row[list(experts)] = True
    return activated


FIRST = sets({0, 1}, {2, 3})
SECOND = sets({0, 1}, {1, 2})
THIRD = sets({2, 3}, {1, 2})
ANY = torch.ones_like(FIRST)


def test_consistency_is_the_mean_jaccard_index_of_the_tokens():
    three = routers.consistency([FIRST, SECOND, THIRD]).consistency
    assert three.tolist() == pytest.approx([(1 + 1 / 3 + 0 + 1 / 3 + 0 + 1) / 6])
    # With one expert a token it is the share of tokens that kept theirs.
    top_1 = [sets({0}, {1}, {2}, {3}), sets({0}, {1}, {2}, {0})]
    assert routers.consistency(top_1).consistency.tolist() == pytest.approx([0.75])
    # The overall one is the mean over layers at the chosen steps.
    watched = {0: torch.cat([FIRST, FIRST]), 5: THIRD, 9: torch.cat([FIRST, SECOND])}
    mean = (1 + (1 + 1 / 3) / 2) / 2
    assert routers.overall(watched, (0, 9)) == pytest.approx(mean)
    refused("E-DATA: .* after step 7; after", routers.overall, watched, (0, 7))


def test_models_texts_and_checkpoints_that_cannot_be_measured_are_refused(model_of):
    dense = model_of("dense")
    mixtral = model_of("Mixtral")
    upcycled = model_of("upcycled")
    still = model_of("Olmoe").requires_grad_(False)
    for message, measure, *given in (
        ("E-MODEL: .* it has no routers", routers.statistics, dense, [{}]),
        ("E-DATA: no tokens", routers.statistics, mixtral, []),
        ("E-DATA: no tokens", routers.activated, mixtral, []),
        ("does not require a gradient", routers.gradients, still, {}),
        ("E-MODEL", routing.shares, dense, {"law": []}),
        ("E-RANGE: batches", routing.shares, upcycled, {}),
        ("E-DATA: domain 'law'", routing.shares, upcycled, {"law": []}),
        ("E-DATA", routers.consistency, [FIRST]),
        ("E-SHAPE", routers.consistency, [FIRST, FIRST[:, :1]]),
        ("E-RANGE: checkpoint 1 .* no expert", routers.consistency, [FIRST, ~ANY]),
    ):
        refused(message, measure, *given)


def test_purity_counts_the_most_frequent_domain_of_each_cluster():
    layer = [[0.0], [0.1], [0.2], [9.0], [9.1], [9.2]]
    mixed = [[0.0], [9.0], [0.1], [9.1], [0.2], [9.2]]
    points = torch.tensor([layer, mixed])
    frame = purity(points, torch.tensor([4, 4, 4, 7, 7, 7]))
    assert frame.purity.tolist() == pytest.approx([1.0, (2 + 2) / 6])
    assert frame.largest.tolist() == pytest.approx([0.5, 0.5])


def two_groups(size=20):
    """One layer of two distant groups of points in 6 dimensions."""
    points = torch.randn(1, 2 * size, 6, generator=torch.Generator().manual_seed(0))
    points[:, size:, 3] += 50
    return points


@pytest.mark.parametrize(
    ("method", "compiled"),
    [
        pytest.param("umap", True, marks=pytest.mark.soak),
        ("umap", False),
        ("pca", False),
    ],
)
def test_distant_groups_stay_apart_and_the_layout_repeats(
    method, compiled, monkeypatch
):
    # Compiling UMAP takes up to 50 s; its plain Python lays out 20 points sooner.
    if not compiled:
        monkeypatch.setattr("numba.config.DISABLE_JIT", True)
    points = two_groups(10)
    layout = project(points, method, seed=1)
    assert layout.shape == (1, 20, 2)
    assert np.abs(layout).max() == pytest.approx(1)
    first = layout[0, :10]
    second = layout[0, 10:]
    gap = np.linalg.norm(first[:, None] - second[None], axis=2).min()
    for group in (first, second):
        radius = np.linalg.norm(group - group.mean(0), axis=1).max()
        assert radius < gap
    np.testing.assert_array_equal(layout, project(points, method, seed=1))


def test_torch_keeps_its_number_of_threads_even_when_a_projection_fails(monkeypatch):
    def fit(layer):
        # As numba does when UMAP starts it, once a process.
        torch.set_num_threads(before + 1)
        return 1 / 0

    before = torch.get_num_threads()
    monkeypatch.setattr(clusters, "_umap", lambda seed: fit)
    with pytest.raises(ZeroDivisionError):
        project(two_groups(), "umap")
    assert torch.get_num_threads() == before


def test_panels_show_first_middle_and_last_layer_by_group():
    torch.manual_seed(0)
    points = torch.randn(6, 9, 4)
    labels = torch.tensor([0, 1, 1] * 3)
    shown = panels(points, labels, ["code", "law"], "pca")
    assert list(shown) == ["layer 0", "layer 3", "layer 5"]
    plane = project(points, "pca")[3]
    np.testing.assert_array_equal(shown["layer 3"]["code"], plane[[0, 3, 6]])
    assert shown["layer 3"]["law"].shape == (6, 2)
    assert list(panels(points[:1], labels, ["code", "law"], "pca")) == ["layer 0"]


REFUSALS = [
    (purity, {"labels": torch.zeros(2)}, "E-SHAPE"),
    (purity, {"points": two_groups() * torch.nan}, "E-NONFINITE"),
    (
        purity,
        {"points": two_groups() * 1e30},
        "E-NONFINITE: purity: points are too far",
    ),
    (project, {"method": "umapp"}, "E-CHOICE: method is 'umapp'"),
    (project, {"points": two_groups()[:, :15]}, "E-SHAPE"),
    (project, {"points": two_groups() * torch.nan}, "E-NONFINITE"),
    (
        project,
        {"points": two_groups() * 1e20, "method": "pca"},
        "E-NONFINITE: pca: points are too far",
    ),
]


@pytest.mark.parametrize(("measure", "changes", "message"), REFUSALS)
def test_what_cannot_be_clustered_or_projected_is_refused(measure, changes, message):
    given = {"points": two_groups()}
    if measure is purity:
        given["labels"] = torch.zeros(40)
    refused(message, measure, **given | changes)


def test_bytes_of_a_training_step_are_those_counted_by_hand():
    first = nn.Linear(4, 8, bias=False).requires_grad_(False)
    second = nn.Linear(8, 2, bias=False)
    model = nn.Sequential(first, nn.Tanh(), second)
    batch = {"input": torch.randn(5, 4)}
    half = step_memory(model, batch)
    assert half.parameters == 4 * (4 * 8 + 8 * 2)
    assert half.trained == 3 * 4 * 8 * 2
    # What the second layer reads; the frozen part keeps nothing.
    assert half.kept == 4 * 5 * 8
    model.requires_grad_(True)
    whole = step_memory(model, batch)
    # The input too; tanh's output is the same tensor.
    assert whole.kept == 4 * (5 * 4 + 5 * 8)
    assert whole.trained == 3 * whole.parameters
    assert whole.total == whole.parameters + whole.kept + whole.trained


def test_counting_changes_neither_gradients_nor_random_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    step_memory(model, {"input": torch.ones(2, 4)})
    assert torch.equal(torch.rand(3), expected)
    assert model[0].weight.grad is None


def test_a_batch_of_lists_is_refused_with_what_to_ask_the_tokenizer(model_of):
    batch = {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]]}
    words = "E-TYPE: observe: input_ids is a list, expected a tensor; ask the tokenizer"
    refused(words, routers.statistics, model_of("upcycled"), [batch])
