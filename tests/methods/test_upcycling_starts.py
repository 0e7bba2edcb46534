"""Router starts: centroids known by hand, prompts as mergekit takes them, scales, refusals."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

from moebook.analysis.routers import statistics
from moebook.errors import Refusal
from moebook.methods import upcycling
from moebook.methods.upcycling.representations import Representations
from moebook.methods.upcycling.starts import cheap_embed, hidden
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


def test_hidden_is_the_unit_mean_of_each_task():
    positive = held([[1, 0], [3, 0], [0, 2]], labels=[0, 0, 1], tasks=("a", "b"))
    start = hidden(positive)
    torch.testing.assert_close(start.weights, torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]))


def prompts():
    """Two prompts padded on the left, as mergekit's command tokenizes them."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    torch.manual_seed(6)
    return {"input_ids": torch.randint(3, 48, (2, 5)).where(mask.bool(), 0), "attention_mask": mask}


def test_prompt_starts_equal_mergekits_own_output(host):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        router = pytest.importorskip(
            "mergekit.moe.router", reason="mergekit is not installed", exc_type=ImportError
        )
    from transformers import BatchEncoding

    model, batch = host(), prompts()
    for tokens, average in (("last", False), ("mean", True)):
        theirs = router.get_hidden_states(model, BatchEncoding(batch), average=average)
        theirs = theirs / theirs.norm(dim=-1, keepdim=True)
        reps = upcycling.collect(model, {"a": [batch]}, tensor="block_input", tokens=tokens)
        torch.testing.assert_close(hidden(reps).weights[:, 0], theirs)
    table = model.get_input_embeddings().weight.detach()
    theirs = router.get_cheap_embedding(table, batch, num_layers=2, vocab_size=48)
    torch.testing.assert_close(cheap_embed(model, {"a": [batch]}).weights[:, 0], theirs)


class Letters:
    """Tokenizes letters, padding on the right."""

    def __call__(self, texts, *, max_length, **_):
        ids = [torch.tensor([3 + ord(letter) - ord("a") for letter in text]) for text in texts]
        ids = [row[:max_length] for row in ids]
        mask = [torch.ones_like(row) for row in ids]
        pad = torch.nn.utils.rnn.pad_sequence
        return {"input_ids": pad(ids, True, 2), "attention_mask": pad(mask, True, 0)}


@pytest.mark.parametrize("mode", upcycling.MODES)
def test_prompts_of_the_tasks_are_dealt_to_the_experts_in_the_order_of_their_names(mode, host):
    rows = [
        {"task": task, "prompt": prompt}
        for task, prompt in (("c", "cdcd"), ("a", "ab"), ("b", "xy"), ("a", "bq"), ("b", "zz"))
    ]
    model, read = host(), Letters()
    got = upcycling.prompted(model, read, rows, 2, mode=mode, most=3, max_length=3).weights
    parts = {"a+b": ["ab", "xy", "bq"], "c": ["cdc"]}
    tasks = {name: [read(texts, max_length=9)] for name, texts in parts.items()}
    if mode == "cheap_embed":
        want = cheap_embed(model, tasks)
    else:
        tokens = {"hidden": "last", "hidden_avg": "mean"}[mode]
        reps = upcycling.collect(model, tasks, tensor="block_input", tokens=tokens)
        want = hidden(reps)
    assert torch.equal(got, want.weights)
    with pytest.raises(Refusal, match="E-DATA: 3 tasks cannot be dealt out to 4 experts"):
        upcycling.prompted(model, read, rows, 4, mode=mode)


def test_cheap_embed_sums_the_embeddings_of_real_tokens(host):
    model, batch = host(), prompts()
    start = cheap_embed(model, {"a": [batch], "b": [{"input_ids": torch.tensor([[9]])}]})
    table = model.get_input_embeddings().weight
    total = table[batch["input_ids"][batch["attention_mask"].bool()]].sum(0)
    for layer in start.weights:
        torch.testing.assert_close(layer[0], (total / total.norm()).detach())
        torch.testing.assert_close(layer[1], (table[9] / table[9].norm()).detach())
    assert start.base == fingerprint(model)
    with pytest.raises(Refusal, match="task 'law' has no tokens"):
        cheap_embed(model, {"law": []})


def test_matched_starts_give_logits_of_the_target_deviation(host):
    model = host()
    text = {"a": [{"input_ids": torch.randint(3, 48, (8, 16))}]}
    inputs = upcycling.collect(model, text, tensor="ffn_input")
    start = upcycling.scaled(
        upcycling.crsu(upcycling.collect(model, text), 4), "matched", inputs=inputs, target=0.7
    )
    sparse = upcycling.upcycle(model, upcycling.Config(combine="renormalised"), start)
    found = statistics(sparse, text["a"]).scale
    assert found.tolist() == pytest.approx([0.7, 0.7], rel=1e-4)


def test_unit_starts_have_rows_of_length_1_and_raw_ones_stay():
    start = upcycling.crsu(held(TOY), 2)
    assert upcycling.scaled(start, "raw") is start
    lengths = upcycling.scaled(start, "unit").weights.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(1, 2))


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
    with pytest.raises(Refusal, match="E-RANGE: experts is 3, expected a multiple of the 2 tasks"):
        upcycling.trsu(split, 3)
    with pytest.raises(Refusal, match="E-NONFINITE: layer 0"):
        upcycling.crsu(held([[0, math.nan], [1, 1]]), 2)
    for seed, code in ((-1, "E-RANGE: seed is -1"), (2**32, "E-RANGE"), (0.5, "E-TYPE")):
        with pytest.raises(Refusal, match=code):
            upcycling.crsu(held(TOY), 2, seed=seed)
        with pytest.raises(Refusal, match=code):
            upcycling.trsu(held(TOY), seed=seed)
    with pytest.raises(Refusal, match="E-RANGE"):
        upcycling.crsu(held(TOY), 0)


def test_representations_of_another_model_are_refused_by_upcycle(host):
    text = {"a": [{"input_ids": torch.randint(3, 48, (4, 16))}]}
    start = upcycling.crsu(upcycling.collect(host(rms_norm_eps=1e-5), text), 4)
    other = host()
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    with pytest.raises(Refusal, match="E-BASE: collected from base"):
        upcycling.upcycle(other, upcycling.Config(), start)
