"""Router starts: centroids known by hand, prompts as mergekit takes them, scales, refusals."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

from moebook.analysis.routers import statistics
from moebook.data import padded
from moebook.errors import Refusal
from moebook.methods import upcycling
from moebook.methods.upcycling.representations import Representations
from moebook.models import fingerprint


def held(*layers, labels=None, tasks=("a",), tensor="attention_output", base="b" * 64):
    """Representations from lists of points, one list a layer."""
    points = torch.tensor(layers, dtype=torch.float32)
    labels = torch.tensor(labels or [0] * points.shape[1])
    return Representations(points, labels, tasks, tensor, base)


# Two clusters: {(0, 0), (0, 2), (0, 4)} around (0, 2), {(10, 0), (10, 2)} around (10, 1).
TOY = [[0, 0], [10, 0], [0, 2], [10, 2], [0, 4]]


def test_crsu_finds_the_centroids_of_a_hand_worked_toy():
    start = upcycling.crsu(held(TOY, TOY), 2)
    for layer in start.weights:
        torch.testing.assert_close(layer[layer[:, 0].argsort()], torch.tensor([[0.0, 2], [10, 1]]))
    assert start.base == "b" * 64


def test_trsu_is_the_mean_of_each_task_or_its_clusters_the_largest_first():
    labels = [0, 1, 0, 1, 0]
    start = upcycling.trsu(held(TOY, labels=labels, tasks=("code", "mathematics")))
    torch.testing.assert_close(start.weights, torch.tensor([[[0.0, 2.0], [10.0, 1.0]]]))
    two = [*TOY, [5, 5], [5, 7], [9, 9]]
    start = upcycling.trsu(held(two, labels=[0] * 5 + [1] * 3, tasks=("x", "y")), 4)
    want = [[[0.0, 2.0], [10.0, 1.0], [5.0, 6.0], [9.0, 9.0]]]
    torch.testing.assert_close(start.weights, torch.tensor(want))


def test_centroids_are_the_means_of_the_points_nearest_to_them():
    torch.manual_seed(0)
    centres = 20 * torch.randn(5, 8)
    points = (centres[torch.arange(4000) % 5] + torch.randn(4000, 8)).unsqueeze(0)
    reps = replace(held(TOY), points=points, labels=torch.zeros(4000, dtype=torch.long))
    got = upcycling.crsu(reps, 5).weights[0]
    nearest = torch.cdist(points[0], got).argmin(1)
    for number, row in enumerate(got):
        torch.testing.assert_close(row, points[0, nearest == number].mean(0), rtol=1e-4, atol=1e-4)
    assert torch.cdist(centres, got).min(1).values.max() < 0.3


def test_random_starts_have_the_spread_they_name(host):
    model = host(hidden_size=64)
    for kind, deviation in (("normal", 0.02), ("wide", 1.0), ("kaiming", 1 / math.sqrt(3 * 64))):
        weights = upcycling.su(model, 16, kind=kind, seed=1).weights
        assert weights.shape == (2, 16, 64)
        assert weights.std().item() == pytest.approx(deviation, rel=0.05)
        assert torch.equal(weights, upcycling.su(model, 16, kind=kind, seed=1).weights)
    assert upcycling.su(model, 2).base is None


ROWS = [
    {"task": task, "prompt": prompt}
    for task, prompt in (("c", "cdcd"), ("a", "ab"), ("b", "xy"), ("a", "bq"), ("b", "zz"))
]


class Letters:
    """Tokenizes letters, padding on the right, or on the left as mergekit's command does."""

    def __init__(self, *, left=False):
        self.left = left

    def __call__(self, texts, *, max_length=9, **_):
        rows = [[3 + ord(letter) - ord("a") for letter in text][:max_length] for text in texts]
        ids, mask = padded(rows, 2, left=self.left)
        return {"input_ids": ids, "attention_mask": mask}


def by_hand(model, texts, mode):
    """Mergekit's vectors of prompts, one forward pass a batch, of length 1: ``[L, D]``."""
    batch = Letters()(texts)
    real = batch["attention_mask"].bool()
    if mode == "cheap_embed":
        total = model.get_input_embeddings().weight[batch["input_ids"][real]].sum(0)
        states = torch.stack([total, total])
    else:
        hidden = torch.stack(model(**batch, output_hidden_states=True).hidden_states[:-1])
        last = hidden[:, torch.arange(len(texts)), real.sum(1) - 1]
        states = (last if mode == "hidden" else hidden.mean(2)).mean(1)
    return (states / states.norm(dim=-1, keepdim=True)).detach()


@pytest.mark.parametrize("mode", upcycling.MODES)
def test_prompts_of_the_tasks_are_dealt_to_the_experts_in_the_order_of_their_names(mode, host):
    model = host()
    start = upcycling.prompted(model, Letters(), ROWS, 2, mode=mode, most=3, max_length=3)
    for expert, texts in enumerate((["ab", "xy", "bq"], ["cdc"])):  # of a and b, of c
        torch.testing.assert_close(start.weights[:, expert], by_hand(model, texts, mode))
    assert start.base == fingerprint(model)
    with pytest.raises(Refusal, match="E-DATA: 3 tasks cannot be dealt out to 4 experts"):
        upcycling.prompted(model, Letters(), ROWS, 4, mode=mode)
    with pytest.raises(Refusal, match="E-CHOICE: mode is 'hiden'"):
        upcycling.prompted(model, Letters(), ROWS, 2, mode="hiden")


def test_prompt_starts_equal_mergekits_own_output(host):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        router = pytest.importorskip(
            "mergekit.moe.router", reason="mergekit is not installed", exc_type=ImportError
        )
    from transformers import BatchEncoding

    model, rows = host(), [{"task": "a", "prompt": prompt} for prompt in ("abcde", "xyz")]
    read = Letters(left=True)
    batch = BatchEncoding(read(["abcde", "xyz"]))

    def ours(mode):
        return upcycling.prompted(model, read, rows, 1, mode=mode).weights[:, 0]

    for mode, average in (("hidden", False), ("hidden_avg", True)):
        theirs = router.get_hidden_states(model, batch, average=average)
        torch.testing.assert_close(ours(mode), theirs / theirs.norm(dim=-1, keepdim=True))
    table = model.get_input_embeddings().weight.detach()
    theirs = router.get_cheap_embedding(table, batch, num_layers=2, vocab_size=48)
    torch.testing.assert_close(ours("cheap_embed"), theirs)


def test_matched_starts_give_logits_of_the_target_deviation_and_unit_ones_rows_of_length_1(host):
    model = host()
    text = {"a": [{"input_ids": torch.randint(3, 48, (8, 16))}]}
    inputs = upcycling.collect(model, text, tensor="ffn_input")
    start = upcycling.scaled(
        upcycling.crsu(upcycling.collect(model, text), 4), "matched", inputs=inputs, target=0.7
    )
    sparse = upcycling.upcycle(model, upcycling.Config(combine="renormalised"), start)
    assert statistics(sparse, text["a"]).scale.tolist() == pytest.approx([0.7, 0.7], rel=1e-4)
    assert upcycling.scaled(start, "raw") is start
    lengths = upcycling.scaled(start, "unit").weights.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(2, 4))


def test_scales_that_cannot_be_made_are_refused():
    start, inputs = upcycling.crsu(held(TOY), 2), held(TOY, tensor="ffn_input")
    for scale, changes, code in (
        ("matchd", {}, "E-CHOICE: scale is 'matchd'"),
        ("matched", {}, "E-DATA.*ffn_input"),
        ("matched", {"inputs": held(TOY)}, "E-DATA.*ffn_input"),
        ("matched", {"inputs": inputs, "target": 0.0}, "E-RANGE"),
        ("matched", {"inputs": replace(inputs, base="d" * 64)}, "E-BASE"),
        ("matched", {"inputs": held([[0, 0], [0, 0]], tensor="ffn_input")}, "E-DATA.*all equal"),
    ):
        with pytest.raises(Refusal, match=code):
            upcycling.scaled(start, scale, **changes)


def test_representations_that_cannot_be_clustered_are_refused():
    few = held([[1, 1], [1, 1], [2, 2]], [[1, 1], [2, 1], [3, 3]])
    with pytest.raises(Refusal, match=r"layer 0: 3 centroids asked for.* 2 distinct points"):
        upcycling.crsu(few, 3)
    split = held(TOY, labels=[0, 0, 0, 0, 1], tasks=("code", "law"))
    with pytest.raises(Refusal, match="task 'law', layer 0: 2 centroids"):
        upcycling.trsu(split, 4)
    with pytest.raises(Refusal, match="E-RANGE: experts is 3, expected a multiple of 2 tasks"):
        upcycling.trsu(split, 3)
    with pytest.raises(Refusal, match="E-NONFINITE: layer 0"):
        upcycling.crsu(held([[0, math.nan], [1, 1]]), 2)
    for experts, seed, code in ((2, -1, "E-RANGE: seed is -1"), (2, 2**32, "E-RANGE"),
                                (2, 0.5, "E-TYPE"), (0, 0, "E-RANGE")):  # fmt: skip
        for start in (upcycling.crsu, upcycling.trsu):
            with pytest.raises(Refusal, match=code):
                start(held(TOY), experts, seed=seed)
