"""The hardest instances; collection: equal to a naive full one, sampled, bounded in memory."""

import math
import weakref

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moebook.errors import Refusal
from moebook.methods import upcycling
from moebook.methods.upcycling.representations import perplexities, sampled
from moebook.models import fingerprint
from moebook.nn import hooked

FAMILIES = ["Llama", "Qwen3", "Gemma2", "Olmo2"]
ROWS = [
    {"input_ids": [0, 7, 9, 11], "labels": [-100, -100, 9, 11]},
    {"input_ids": [0, 8], "labels": [-100, 8]},
    {"input_ids": [0, 12, 5, 40, 33, 6], "labels": [-100, 12, 5, -100, -100, 6]},
]


def texts(count, length=8, size=4):
    """Batches of random text, the second row of each padded on the right."""
    torch.manual_seed(4)
    mask = torch.ones(size, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return [
        {"input_ids": torch.randint(3, 48, (size, length)), "attention_mask": mask}
        for _ in range(count)
    ]


@torch.no_grad()
def naive(model, batches, tensor):
    """Everything at once, by the layer's own arithmetic: a list of [B, T, D] for each layer."""
    layers = model.model.layers
    found = [[] for _ in layers]
    for batch in batches:
        seen = {}
        attentions = {i: layer.self_attn for i, layer in enumerate(layers)}
        with hooked(attentions, lambda i, args, out, seen=seen: seen.update({i: out[0]})):
            states = model(**batch, output_hidden_states=True).hidden_states
        for i, layer in enumerate(layers):
            gemma = hasattr(layer, "pre_feedforward_layernorm")
            after = hasattr(layer, "post_feedforward_layernorm")  # and a norm after the attention
            added = layer.post_attention_layernorm(seen[i]) if after else seen[i]
            norm = layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm
            norm = norm if gemma or not after else torch.nn.Identity()  # OLMo 2 has none there
            value = {
                "block_input": states[i],
                "attention_output": seen[i],
                "residual": states[i] + added,
                "ffn_input": norm(states[i] + added),
            }
            found[i].append(value[tensor])
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tensor", ["attention_output", "residual", "ffn_input", "block_input"])
def test_collection_equals_a_naive_full_one(family, tensor, host):
    model, batches = host(family), texts(3)
    got = upcycling.collect(model, {"a": batches[:2], "b": batches[2:]}, tensor=tensor)
    for layer, parts in enumerate(naive(model, batches, tensor)):
        rows = [p[b["attention_mask"].bool()] for p, b in zip(parts, batches, strict=True)]
        torch.testing.assert_close(got.points[layer], torch.cat(rows))
    assert got.labels.tolist() == [0] * 56 + [1] * 28
    assert (got.tasks, got.tensor) == (("a", "b"), tensor)
    assert got.base == fingerprint(model)


def test_last_and_mean_take_one_vector_a_row(host):
    model, batches = host(), texts(2)
    full = naive(model, batches, "residual")
    last = upcycling.collect(model, {"a": batches}, tensor="residual", tokens="last")
    mean = upcycling.collect(model, {"a": batches}, tensor="residual", tokens="mean")
    ends = torch.tensor([7, 3, 7, 7])
    torch.testing.assert_close(mean.means()[:, 0], mean.points.mean(1))
    for layer in range(2):
        want = torch.cat([part[torch.arange(4), ends] for part in full[layer]])
        torch.testing.assert_close(last.points[layer], want)
        want = torch.cat([part.mean(1) for part in full[layer]])
        torch.testing.assert_close(mean.points[layer], want)


def test_some_tasks_of_a_collection_are_what_would_be_collected_from_them_alone(host):
    model, tasks = host(), {name: texts(2) for name in ("a", "b", "c")}
    every = upcycling.collect(model, tasks)
    for names in (("a", "b"), ("b", "c"), ("c",)):
        part = every.only(*names)
        alone = upcycling.collect(model, {name: tasks[name] for name in names})
        assert torch.equal(part.points, alone.points)
        assert torch.equal(part.labels, alone.labels)
        assert (part.tasks, part.base) == (alone.tasks, alone.base)
    with pytest.raises(Refusal, match="E-DATA: no task 'law'"):
        every.only("a", "law")


def test_clouds_hold_a_mean_a_text_of_the_model_and_of_an_untrained_twin(host):
    model, read = host(initializer_range=0.02), {"ab": [3, 4], "q": [9], "xyz": [30, 31, 32]}

    def tokenizer(text, **_):
        ids = torch.tensor([read[text]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def mean(network, text):
        layers = naive(network, [tokenizer(text)], "attention_output")
        return torch.stack([parts[0][0].mean(0) for parts in layers])

    random_numbers = torch.random.get_rng_state()
    found = upcycling.clouds(model, tokenizer, {"code": ["ab", "q"], "text": ["xyz"]}, seed=3)
    assert torch.equal(torch.random.get_rng_state(), random_numbers)
    for text, place in (("ab", 0), ("q", 1), ("xyz", 2)):
        torch.testing.assert_close(found["pretrained"].points[:, place], mean(model, text))
    assert found["random"].labels.tolist() == [0, 0, 1]
    torch.manual_seed(3)
    twin = type(model)(model.config).eval()
    torch.testing.assert_close(found["random"].points[:, 1], mean(twin, "q"))


def test_a_share_is_drawn_token_by_token_however_the_text_is_cut(host):
    model, whole = host(), texts(1, size=40)
    rows = [{k: v[i : i + 5] for k, v in whole[0].items()} for i in range(0, 40, 5)]
    some = upcycling.collect(model, {"a": whole}, share=0.2, seed=5)
    torch.testing.assert_close(
        upcycling.collect(model, {"a": rows}, share=0.2, seed=5).points, some.points
    )
    everything = upcycling.collect(model, {"a": whole}).points
    taken = np.random.default_rng([5, 0]).random(everything.shape[1]) < 0.2
    assert 35 < taken.sum() < 95  # of 300
    torch.testing.assert_close(some.points, everything[:, taken])
    other = upcycling.collect(model, {"a": whole}, share=0.2, seed=6)
    assert other.points.shape != some.points.shape or not torch.equal(other.points, some.points)


def test_a_limit_keeps_the_smallest_keys_of_each_task_in_the_order_of_the_text(host):
    model, batches = host(), texts(12)
    tasks = {"a": batches[:10], "b": batches[10:11], "c": batches[11:]}
    everything = upcycling.collect(model, tasks)
    part = upcycling.collect(model, tasks, limit=50, seed=3)
    assert part.labels.tolist() == [0] * 50 + [1] * 28 + [2] * 28
    keys = np.random.default_rng([3, 0]).random(280)
    kept = sorted(keys.argsort()[:50].tolist())
    torch.testing.assert_close(part.points[:, :50], everything.points[:, kept])
    torch.testing.assert_close(part.points[:, 50:], everything.points[:, 280:])


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors alive that were made while it is open."""

    def __init__(self):
        super().__init__()
        self.tensors, self.peak = weakref.WeakValueDictionary(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [part for part in tree_leaves(out) if isinstance(part, torch.Tensor)]
        self.tensors.update({id(part): part for part in made})
        storages = [part.untyped_storage() for part in list(self.tensors.values())]
        alive = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.peak = max(self.peak, sum(alive.values()))
        return out


def test_what_collection_holds_does_not_grow_with_the_text(host):
    model = host()
    peaks = []
    for count in (4, 64):
        batches = texts(count)
        with Held() as held:
            got = upcycling.collect(model, {"a": batches}, limit=60)
        peaks.append(held.peak)
    with Held() as held, torch.no_grad():
        model.model(**batches[0])
    bound = 1 * 60 * 2 * 32 * 4  # tasks * limit * L * D * 4 bytes, as the docstring states it
    chunk = 28 * 2 * 32 * 4
    full = 64 * 28 * 2 * 32 * 4
    assert got.points.untyped_storage().nbytes() == bound
    assert peaks[1] <= peaks[0] + 256
    assert peaks[1] <= held.peak + 1.5 * bound + 3 * chunk < full / 3


def test_the_model_comes_back_as_it_was_and_hooks_are_gone(host):
    model = host().train()
    upcycling.collect(model, {"a": texts(1)})
    assert model.training
    chunks = sampled(model, {"a": texts(2)})
    next(chunks)
    chunks.close()
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_batch_without_a_hit_is_not_run(host):
    model, runs = host(), []
    model.model.register_forward_hook(lambda m, args, out: runs.append(1))
    taken = list(sampled(model, {"a": texts(100)}, share=0.005))
    assert len(runs) == len(taken) < 40


def test_collections_that_cannot_be_made_are_refused(host):
    for changes, code in (
        ({"tensor": "attention"}, "E-CHOICE: tensor is 'attention'"),
        ({"tokens": "all"}, "E-CHOICE"),
        ({"share": 0}, "E-RANGE: share is 0"),
        ({"share": float("nan")}, "E-RANGE"),
        ({"limit": 0}, "E-RANGE"),
        ({"seed": -1}, "E-RANGE: seed is -1"),
    ):
        with pytest.raises(Refusal, match=code):
            upcycling.collect(host(), {"a": texts(1)}, **changes)
    with pytest.raises(Refusal, match="E-DATA: task 'law' has no instances"):
        upcycling.collect(host(), {"code": texts(1), "law": []})
    with pytest.raises(Refusal, match="E-DATA: no tasks"):
        upcycling.collect(host(), {})


@pytest.mark.parametrize("of", ["answer", "all"])
def test_perplexities_are_those_of_one_row_at_a_time(of, host):
    model = host(dtype=torch.float64)
    got = perplexities(model, Dataset.from_list(ROWS), of=of, size=2)
    for row, value in zip(ROWS, got.tolist(), strict=True):
        with torch.no_grad():
            logs = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        scored = row["input_ids"] if of == "all" else row["labels"]
        nats = [-logs[i - 1, t].item() for i, t in enumerate(scored) if i and t != -100]
        assert value == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)


def test_the_hardest_share_of_each_task_is_kept_in_order(host):
    model = host()
    rng = np.random.default_rng(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in rng.integers(3, 48, (60, 6)).tolist()]
    data = Dataset.from_list(rows)
    hard = upcycling.hardest(model, {"a": data, "b": data.select(range(20))})
    scores = perplexities(model, data).tolist()
    best = sorted(sorted(range(60), key=lambda i: -scores[i])[:3])
    assert hard["a"]["input_ids"] == [rows[i]["input_ids"] for i in best]
    assert len(hard["b"]) == 1
    assert len(upcycling.hardest(model, {"a": data}, share=1)["a"]) == 60


def test_tasks_without_enough_instances_are_named(host):
    data = Dataset.from_list(ROWS)
    with pytest.raises(Refusal, match=r"task 'law' has 3 instances, .* 0.05 needs 20"):
        upcycling.hardest(host(), {"law": data})
    with pytest.raises(Refusal, match="task 'law' has 0 instances"):
        upcycling.hardest(host(), {"law": data.select([])})
    with pytest.raises(Refusal, match="E-RANGE"):
        upcycling.hardest(host(), {"law": data}, share=1.5)
    with pytest.raises(Refusal, match="E-RANGE: size is 0"):
        next(upcycling.batches(data, 0))
    mute = Dataset.from_list([{"input_ids": [0, 7], "labels": [-100, -100]}])
    with pytest.raises(Refusal, match="E-NONFINITE: row 0"):
        perplexities(host(), mute)
