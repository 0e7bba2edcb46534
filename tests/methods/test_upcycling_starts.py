"""From text to a router start: the hardest instances, representations, centroids, prompts."""

import functools
import math
import weakref

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertLMHeadModel, DynamicCache

from moebook import models
from moebook.analysis.routers import statistics
from moebook.data import padded
from moebook.methods import upcycling
from moebook.methods.upcycling import starts
from moebook.methods.upcycling.representations import (
    Representations,
    perplexities,
    sampled,
)
from moebook.models import fingerprint
from moebook.nn import hooked
from tests.refusals import refused

IDS = [[0, 7, 9, 11], [0, 8], [0, 12, 5, 40, 33, 6]]
LABELS = [[-100, -100, 9, 11], [-100, 8], [-100, 12, 5, -100, -100, 6]]
DATA = Dataset.from_dict({"input_ids": IDS, "labels": LABELS})


def texts(count, length=8, size=4):
    """Batches of random text, the second row of each padded on the right."""
    torch.manual_seed(4)
    mask = torch.ones(size, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    ids = [torch.randint(3, 48, (size, length)) for _ in range(count)]
    return [{"input_ids": rows, "attention_mask": mask} for rows in ids]


def numbers(text):
    """A token a letter; "^" is BOS."""
    return [0 if letter == "^" else 3 + ord(letter) - ord("a") for letter in text]


def letters(text, **_):
    """Tokenize one text."""
    ids, mask = padded([numbers(text)], 2)
    return {"input_ids": ids, "attention_mask": mask}


class Letters:
    """Tokenize a list of texts, and tell the special tokens."""

    bos_token = "^"
    bos_token_id = 0
    eos_token_id = 1

    def __call__(self, texts, **_):
        return {"input_ids": [numbers(text) for text in texts]}


@torch.no_grad()
def naive(model, batches, tensor):
    """Everything at once, by the layer's own arithmetic: a list of [B, T, D] for each layer."""
    layers = model.model.layers
    collected = [[] for _ in layers]
    for batch in batches:
        seen = {}
        attentions = {i: layer.self_attn for i, layer in enumerate(layers)}
        with hooked(
            attentions, lambda i, args, out, seen=seen: seen.update({i: out[0]})
        ):
            states = model(**batch, output_hidden_states=True).hidden_states
        for i, layer in enumerate(layers):
            gemma = hasattr(layer, "pre_feedforward_layernorm")
            # And a norm after the attention.
            after = hasattr(layer, "post_feedforward_layernorm")
            added = layer.post_attention_layernorm(seen[i]) if after else seen[i]
            if gemma:
                norm = layer.pre_feedforward_layernorm
            elif after:  # OLMo 2 has none before the FFN
                norm = torch.nn.Identity()
            else:
                norm = layer.post_attention_layernorm
            value = {"block_input": states[i], "attention_output": seen[i]}
            value |= {
                "residual": states[i] + added,
                "ffn_input": norm(states[i] + added),
            }
            collected[i].append(value[tensor])
    return collected


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Olmo2"])
@pytest.mark.parametrize(
    "tensor", ["attention_output", "residual", "ffn_input", "block_input"]
)
def test_collection_equals_a_naive_full_one(family, tensor, host):
    model = host(family)
    batches = texts(3)
    got = upcycling.collect(model, {"a": batches[:2], "b": batches[2:]}, tensor=tensor)
    for layer, parts in enumerate(naive(model, batches, tensor)):
        rows = [
            p[b["attention_mask"].bool()] for p, b in zip(parts, batches, strict=True)
        ]
        torch.testing.assert_close(got.points[layer], torch.cat(rows))
    assert got.labels.tolist() == [0] * 56 + [1] * 28
    assert (got.tasks, got.tensor, got.base) == (("a", "b"), tensor, fingerprint(model))


@pytest.mark.parametrize("tokens", ["last", "mean"])
def test_last_and_mean_take_one_vector_a_row(tokens, host):
    model = host()
    batches = texts(2)
    got = upcycling.collect(model, {"a": batches}, tensor="residual", tokens=tokens)
    ends = torch.tensor([7, 3, 7, 7])
    for layer, parts in enumerate(naive(model, batches, "residual")):
        rows = [
            part[torch.arange(4), ends] if tokens == "last" else part.mean(1)
            for part in parts
        ]
        torch.testing.assert_close(got.points[layer], torch.cat(rows))
    torch.testing.assert_close(got.means()[:, 0], got.points.mean(1))


def test_some_tasks_of_a_collection_are_what_would_be_collected_from_them_alone(host):
    model = host()
    tasks = {name: texts(2) for name in ("a", "b", "c")}
    every = upcycling.collect(model, tasks)
    for names in (("a", "b"), ("b", "c"), ("c",)):
        part = every.only(*names)
        alone = upcycling.collect(model, {n: tasks[n] for n in names})
        assert torch.equal(part.points, alone.points)
        assert torch.equal(part.labels, alone.labels)
        assert (part.tasks, part.base) == (alone.tasks, alone.base)


def test_clouds_hold_a_mean_a_text_of_the_model_and_of_an_untrained_twin(host):
    model = host(initializer_range=0.02)
    random_numbers = torch.random.get_rng_state()
    clouds = upcycling.clouds(
        model, letters, {"code": ["ab", "q"], "text": ["xyz"]}, seed=3
    )
    assert torch.equal(torch.random.get_rng_state(), random_numbers)
    assert clouds["random"].labels.tolist() == [0, 0, 1]
    half = {"code": ["ab", "\ud83d"]}  # as where a text was cut inside a character
    words = "E-DATA: texts: field 'code' holds a lone surrogate"
    refused(words, upcycling.clouds, model, letters, half)
    torch.manual_seed(3)
    networks = {"pretrained": model, "random": type(model)(model.config).eval()}
    for place, text in enumerate(("ab", "q", "xyz")):
        for name, network in networks.items():
            layers = naive(network, [letters(text)], "attention_output")
            means = torch.stack([parts[0][0].mean(0) for parts in layers])
            torch.testing.assert_close(clouds[name].points[:, place], means)


def test_a_share_is_drawn_token_by_token_however_the_text_is_cut(host):
    model = host()
    whole = texts(1, size=40)
    rows = [{k: v[i : i + 5] for k, v in whole[0].items()} for i in range(0, 40, 5)]
    everything = upcycling.collect(model, {"a": whole}).points
    for seed in (5, 6):
        taken = np.random.default_rng([seed, 0]).random(everything.shape[1]) < 0.2
        assert 35 < taken.sum() < 95  # of 300
        for batches in (whole, rows):
            sample = upcycling.collect(
                model, {"a": batches}, share=0.2, seed=seed
            ).points
            torch.testing.assert_close(sample, everything[:, taken])


def test_a_limit_keeps_the_smallest_keys_of_each_task_in_the_order_of_the_text(host):
    model = host()
    batches = texts(12)
    tasks = {"a": batches[:10], "b": batches[10:11], "c": batches[11:]}
    everything = upcycling.collect(model, tasks)
    part = upcycling.collect(model, tasks, limit=50, seed=3)
    assert part.labels.tolist() == [0] * 50 + [1] * 28 + [2] * 28
    keys = np.random.default_rng([3, 0]).random(280)
    smallest = sorted(keys.argsort()[:50].tolist())
    torch.testing.assert_close(part.points[:, :50], everything.points[:, smallest])
    torch.testing.assert_close(part.points[:, 50:], everything.points[:, 280:])


class Held(TorchDispatchMode):
    """Counts the bytes of all tensors alive that were made while it is open."""

    def __init__(self):
        super().__init__()
        self.tensors = weakref.WeakValueDictionary()
        self.peak = 0

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
    # Tasks * limit * L * D * 4 bytes, as the docstring states it.
    bound = 1 * 60 * 2 * 32 * 4
    chunk = 28 * 2 * 32 * 4  # one batch's
    assert got.points.untyped_storage().nbytes() == bound
    assert peaks[1] <= peaks[0] + 256
    assert peaks[1] <= held.peak + 1.5 * bound + 3 * chunk < 64 * chunk / 3


def test_batches_without_a_hit_are_not_run_and_the_model_comes_back_as_it_was(host):
    model = host().train()
    runs = []
    hook = model.model.register_forward_hook(lambda m, args, out: runs.append(1))
    taken = list(sampled(model, {"a": texts(100)}, share=0.005))
    assert len(runs) == len(taken) < 40
    hook.remove()
    assert model.training
    chunks = sampled(model, {"a": texts(2)})
    next(chunks)
    chunks.close()
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_no_keys_and_values_are_kept_for_tokens_that_never_come(host, monkeypatch):
    kept = []
    update = DynamicCache.update

    def keep(cache, *given, **named):
        kept.append(given)
        return update(cache, *given, **named)

    monkeypatch.setattr(DynamicCache, "update", keep)
    upcycling.collect(host(), {"a": texts(1)})
    perplexities(host(), DATA)
    assert not kept
    host()(torch.tensor([[3, 4]]))  # which keeps them
    assert kept


def test_perplexities_are_those_of_one_row_at_a_time(host):
    model = host(dtype=torch.float64)
    got = perplexities(model, DATA, size=2)
    for row, value in zip(DATA, got.tolist(), strict=True):
        with torch.no_grad():
            logs = (
                model(input_ids=torch.tensor([row["input_ids"]]))
                .logits[0]
                .log_softmax(-1)
            )
        labels = enumerate(row["labels"])
        nats = [-logs[i - 1, t].item() for i, t in labels if i and t != -100]
        assert value == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)


def test_a_perplexity_that_no_number_holds_and_a_model_that_looks_ahead_are_refused(
    host,
):
    model = host()
    model.get_output_embeddings().weight.data *= 1e7
    words = "E-NONFINITE: row .*: its perplexity is not finite"
    refused(words, upcycling.hardest, model, {"a": DATA}, share=0.5)
    settings = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = BertLMHeadModel(BertConfig(**settings))
    words = "E-MODEL: perplexities: BertLMHeadModel is no causal language model"
    refused(words, perplexities, encoder, DATA)


def test_the_hardest_share_of_each_task_is_kept_in_order(host):
    model = host()
    rows = np.random.default_rng(0).integers(3, 48, (60, 6)).tolist()
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    hard = upcycling.hardest(model, {"a": data, "b": data.select(range(20))})
    scores = perplexities(model, data).tolist()
    best = sorted(sorted(range(60), key=lambda i: -scores[i])[:3])
    assert hard["a"]["input_ids"] == [rows[i] for i in best]
    assert len(hard["b"]) == 1
    assert len(upcycling.hardest(model, {"a": data}, share=1)["a"]) == 60


@pytest.mark.parametrize("form", [None, "torch", "numpy", "pandas"])
def test_rows_in_any_format_are_scored_alike_and_keep_it(form, host):
    model = host()
    expected = upcycling.hardest(model, {"a": DATA}, share=0.5)["a"]
    hard = upcycling.hardest(model, {"a": DATA.with_format(form)}, share=0.5)["a"]
    assert hard.format["type"] == form
    assert hard.with_format(None)[:] == expected[:]


@pytest.mark.parametrize(
    ("share", "least"), [(1 / 49, 49), (1 / 50, 50), (0.05, 20), (0.3, 4)]
)
def test_so_many_instances_as_a_refusal_asks_for_do(share, least, host):
    model = host()
    ids = [[0, 7]] * least
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    few = {"a": rows.select(range(least - 1))}
    words = f"has {least - 1} instances, .* needs {least} at least"
    refused(words, upcycling.hardest, model, few, share=share)
    assert len(upcycling.hardest(model, {"a": rows}, share=share)["a"]) == 1


def states(
    *layers, labels=None, tasks=("a",), tensor="attention_output", base="b" * 64
):
    """Representations from lists of points, one list a layer."""
    points = torch.tensor(layers, dtype=torch.float32)
    labels = torch.tensor(labels or [0] * points.shape[1])
    return Representations(points, labels, tasks, tensor, base)


# Two clusters: {(0, 0), (0, 2), (0, 4)} around (0, 2), {(10, 0), (10, 2)} around (10, 1).
TOY = [[0, 0], [10, 0], [0, 2], [10, 2], [0, 4]]


def test_crsu_finds_the_centroids_of_a_hand_worked_toy():
    start = upcycling.crsu(states(TOY, TOY), 2)
    for layer in start.weights:
        torch.testing.assert_close(
            layer[layer[:, 0].argsort()], torch.tensor([[0.0, 2], [10, 1]])
        )
    assert start.base == "b" * 64


def test_trsu_is_the_mean_of_each_task_or_its_clusters_the_largest_first():
    start = upcycling.trsu(
        states(TOY, labels=[0, 1, 0, 1, 0], tasks=("code", "mathematics"))
    )
    torch.testing.assert_close(start.weights, torch.tensor([[[0.0, 2.0], [10.0, 1.0]]]))
    two = [*TOY, [5, 5], [5, 7], [9, 9]]
    start = upcycling.trsu(states(two, labels=[0] * 5 + [1] * 3, tasks=("x", "y")), 4)
    want = [[[0.0, 2.0], [10.0, 1.0], [5.0, 6.0], [9.0, 9.0]]]
    torch.testing.assert_close(start.weights, torch.tensor(want))


def test_random_starts_have_the_spread_they_name(host):
    model = host(hidden_size=64)
    for kind, deviation in (
        ("normal", 0.02),
        ("wide", 1.0),
        ("kaiming", 1 / math.sqrt(3 * 64)),
    ):
        weights = upcycling.su(model, 16, kind=kind, seed=1).weights
        assert weights.shape == (2, 16, 64)
        assert weights.std().item() == pytest.approx(deviation, rel=0.05)
        assert torch.equal(weights, upcycling.su(model, 16, kind=kind, seed=1).weights)
    assert upcycling.su(model, 2).base is None


PAIRS = [("c", "cdcd"), ("a", "ab"), ("b", "xy"), ("a", "bq"), ("b", "zz")]
ROWS = [{"task": task, "prompt": prompt} for task, prompt in PAIRS]


def by_hand(model, texts, mode):
    """Mergekit's vectors of prompts, one forward pass a batch, of length 1: ``[L, D]``."""
    ids, mask = padded([numbers(f"^{text}") for text in texts], 0, left=True)
    if mode == "cheap_embed":
        total = model.get_input_embeddings().weight[ids[mask.bool()]].sum(0)
        states = torch.stack([total, total])
    else:
        batch = {"input_ids": ids, "attention_mask": mask}
        hidden = torch.cat(
            [torch.stack(each) for each in naive(model, [batch], "block_input")]
        )
        states = (hidden[:, :, -1] if mode == "hidden" else hidden.mean(2)).mean(1)
    return (states / states.norm(dim=-1, keepdim=True)).detach()


@pytest.mark.parametrize("mode", upcycling.MODES)
def test_prompts_of_the_tasks_are_dealt_to_the_experts_in_the_order_of_their_names(
    mode, host, monkeypatch
):
    model = host()
    monkeypatch.setattr(starts, "PROMPTS", 3)
    start = upcycling.prompted(model, Letters(), ROWS, 2, mode=mode, max_length=4)
    for expert, texts in enumerate((["ab", "xy", "bq"], ["cdc"])):  # of a and b, of c
        torch.testing.assert_close(
            start.weights[:, expert], by_hand(model, texts, mode)
        )
    assert start.base == fingerprint(model)


# What mergekit 0.1.5 computes of the base nano and these prompts, an expert a task: by its own
# `tokenize_prompts`, `get_hidden_states` and `get_cheap_embedding` in float32, with a tokenizer
# that its command has set to pad with BOS (or EOS) on the left. Numbers 0, 43 and 86 of 128, for
# layers 0 to 3 and both experts; embeddings are the same in all layers.
ASKED = {
    "gcd": ["gcd(35, 55) =", "gcd(8, 12) ="],
    "isa": ["A heron is a bird. Is a heron an animal?", "Why?"],
}
MERGEKITS = {
    ("<|bos|>", "hidden"): [
        [[-0.13457, -0.11094, 0.12667], [-0.07808, -0.00714, -0.03858]],
        [[-0.05901, -0.01099, -0.02768], [0.05109, 0.10237, -0.10055]],
        [[-0.12393, -0.01951, 0.00203], [0.06119, 0.07265, -0.04454]],
        [[-0.01978, -0.01690, -0.03084], [0.03305, 0.09492, -0.00798]],
    ],
    ("<|bos|>", "hidden_avg"): [
        [[0.12761, -0.06173, -0.01862], [0.05536, 0.11923, -0.10834]],
        [[0.04283, 0.02524, -0.00005], [0.11195, 0.03892, 0.04753]],
        [[0.01182, 0.04772, 0.06072], [0.06439, 0.05962, 0.05077]],
        [[0.02998, 0.06815, 0.06426], [0.05339, 0.07902, 0.02986]],
    ],
    ("<|bos|>", "cheap_embed"): [
        [[0.12190, -0.08123, -0.00510], [-0.03465, 0.00781, -0.03232]]
    ],
    (None, "hidden"): [
        [[-0.13457, -0.11094, 0.12667], [-0.07808, -0.00714, -0.03858]],
        [[-0.05248, -0.02026, -0.03884], [0.03788, 0.06898, -0.08125]],
        [[-0.11260, -0.03202, -0.00404], [0.04704, 0.01246, -0.02511]],
        [[-0.01892, -0.01110, -0.04551], [0.02698, 0.06465, -0.01832]],
    ],
    (None, "hidden_avg"): [
        [[0.07887, -0.12733, 0.02711], [-0.20466, -0.08509, 0.02583]],
        [[-0.00210, 0.04788, -0.03888], [0.02327, 0.08189, -0.04711]],
        [[-0.00047, 0.03997, 0.03574], [0.01268, 0.07299, -0.06020]],
        [[0.01810, 0.06671, -0.00185], [-0.00534, 0.08665, -0.05892]],
    ],
    (None, "cheap_embed"): [
        [[0.10477, -0.11975, 0.02410], [-0.06345, -0.03595, 0.00185]]
    ],
}


def _prompted(tokenizer, mode):
    rows = []
    for task, texts in ASKED.items():
        rows += [{"task": task, "prompt": text} for text in texts]
    return upcycling.prompted(
        models.load("nano")[0], tokenizer, rows, 2, mode=mode
    ).weights


@pytest.mark.parametrize(("bos", "mode"), MERGEKITS)
def test_prompt_starts_equal_what_mergekit_computes(bos, mode):
    _, tokenizer = models.load("nano")
    tokenizer.bos_token = bos
    found = _prompted(tokenizer, mode)[..., ::43]
    expected = torch.tensor(MERGEKITS[bos, mode]).expand(4, -1, -1)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_special_tokens_that_a_tokenizer_adds_are_not_in_a_prompts_start():
    _, plain = models.load("nano")
    _, adding = models.load("nano")
    named = [("<|bos|>", adding.bos_token_id), ("<|eos|>", adding.eos_token_id)]
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=named
    )
    ids = adding("gcd")["input_ids"]
    assert (ids[0], ids[-1]) == (adding.bos_token_id, adding.eos_token_id)
    assert torch.equal(
        _prompted(adding, "cheap_embed"), _prompted(plain, "cheap_embed")
    )


def test_a_tokenizer_that_truncates_on_the_left_keeps_bos(monkeypatch):
    _, tokenizer = models.load("nano")
    prompt = "one two three four five six seven"
    by_side = {}
    for side in ("right", "left"):
        tokenizer.truncation_side = side
        by_side[side] = starts._as_mergekit(tokenizer, [prompt], 5, "a")["input_ids"]
    assert by_side["left"][0, 0] == tokenizer.bos_token_id
    assert torch.equal(by_side["left"], by_side["right"])


def test_experts_whose_tasks_have_the_same_joined_name_stay_two(host):
    names = ["+a", "+a!", "+a+", "a!"]
    assert "+".join(sorted(names)[:2]) == "+".join(sorted(names)[2:])
    rows = [{"task": name, "prompt": "ab"} for name in names]
    assert prompts(host(), rows, 2).weights.shape[1] == 2


def test_factors_that_fit_another_length_are_refused(host):
    text = {"a": [{"input_ids": torch.randint(3, 48, (8, 16))}]}
    inputs = upcycling.collect(host(), text, tensor="ffn_input")
    start = upcycling.levelled(upcycling.su(host(), 4, kind="wide"), inputs, 1)
    assert upcycling.scaled(start, "raw") is start
    for scale in ("unit", "matched"):
        words = "E-DATA: scaled: the start has factors, .*; scale first, then levelled"
        refused(words, upcycling.scaled, start, scale, inputs=inputs)


def test_matched_starts_give_logits_of_deviation_1_and_unit_ones_rows_of_length_1(host):
    model = host()
    text = {"a": [{"input_ids": torch.randint(3, 48, (8, 16))}]}
    inputs = upcycling.collect(model, text, tensor="ffn_input")
    raw = upcycling.crsu(upcycling.collect(model, text), 4)
    start = upcycling.scaled(raw, "matched", inputs=inputs)
    sparse = upcycling.upcycle(model, upcycling.Config(combine="renormalised"), start)
    assert statistics(sparse, text["a"]).scale.tolist() == pytest.approx(
        [1.0, 1.0], rel=1e-4
    )
    assert upcycling.scaled(start, "raw") is start
    lengths = upcycling.scaled(start, "unit").weights.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones(2, 4))


def test_factors_need_what_the_ffns_read_and_no_more_experts_than_there_are(host):
    text = {"a": [{"input_ids": torch.randint(3, 48, (8, 16))}]}
    start = upcycling.su(host(), 4)
    inputs = upcycling.collect(host(), text, tensor="ffn_input")
    refused("E-RANGE: levelled: top_k is 5", upcycling.levelled, start, inputs, 5)
    refused(
        "E-DATA: levelled needs inputs: .*ffn_input",
        upcycling.levelled,
        start,
        upcycling.collect(host(), text),
        1,
    )


MUTE = Dataset.from_list([{"input_ids": [0, 7], "labels": [-100, -100]}])
FEW = states([[1, 1], [1, 1], [2, 2]], [[1, 1], [2, 1], [3, 3]])
SPLIT = states(TOY, labels=[0, 0, 0, 0, 1], tasks=("code", "law"))
EMPTY = [*ROWS[:1], {"task": "d", "prompt": ""}]


def prompts(model, rows, experts, mode="cheap_embed"):
    return upcycling.prompted(model, Letters(), rows, experts, mode=mode)


def unpadded(model):
    tokenizer = Letters()
    tokenizer.bos_token = tokenizer.bos_token_id = tokenizer.eos_token_id = None
    return upcycling.prompted(model, tokenizer, ROWS, 2)


def matched(model, inputs, scale="matched"):
    return upcycling.scaled(upcycling.crsu(states(TOY), 2), scale, inputs=inputs)


@pytest.mark.parametrize(
    ("code", "ask", "given"),
    [
        (
            "E-CHOICE: tensor is 'attn'",
            functools.partial(upcycling.collect, tensor="attn"),
            ({},),
        ),
        ("E-DATA: task 'law' has no instances", upcycling.collect, ({"law": []},)),
        ("E-DATA: no tasks", upcycling.collect, ({},)),
        (
            "'law' has 3 instances, .* 0.05 needs 20",
            upcycling.hardest,
            ({"law": DATA},),
        ),
        ("task 'law' has 0 instances", upcycling.hardest, ({"law": DATA.select([])},)),
        ("E-NONFINITE: row 0", perplexities, (MUTE,)),
        ("E-DATA: no task 'law'", FEW.only, ("law",)),
        ("E-CHOICE: mode is 'hiden'", prompts, (ROWS, 2, "hiden")),
        ("E-DATA: 3 tasks cannot be dealt out to 4 experts", prompts, (ROWS, 4)),
        ("E-RANGE: experts is 0, expected a number greater", prompts, (ROWS, 0)),
        ("E-DATA: 0 tasks .* 2 experts: .* or rows of more tasks", prompts, ([], 2)),
        (
            "E-DATA: .* no tokens within max_length 1, BOS included",
            functools.partial(upcycling.prompted, max_length=1),
            (Letters(), ROWS, 2),
        ),
        ("E-DATA: the prompts of task d hold no tokens", prompts, (EMPTY, 2)),
        ("E-MODEL: the tokenizer has neither BOS nor EOS", unpadded, ()),
        ("E-CHOICE: scale is 'matchd'", matched, (None, "matchd")),
        ("E-DATA.*ffn_input", matched, (None,)),
        ("E-DATA.*ffn_input", matched, (states(TOY),)),
        ("E-BASE", matched, (states(TOY, tensor="ffn_input", base="d" * 64),)),
        ("E-DATA.*all equal", matched, (states([[0, 0], [0, 0]], tensor="ffn_input"),)),
        (
            "layer 0: 3 centroids asked for.* 2 distinct points",
            upcycling.crsu,
            (FEW, 3),
        ),
        ("task 'law', layer 0: 2 centroids", upcycling.trsu, (SPLIT, 4)),
        (
            "E-RANGE: experts is 3, expected a multiple of 2 tasks",
            upcycling.trsu,
            (SPLIT, 3),
        ),
        ("E-NONFINITE: layer 0", upcycling.crsu, (states([[0, math.nan], [1, 1]]), 2)),
    ],
)
def test_what_cannot_be_collected_scored_or_made_a_start_is_refused(
    code, ask, given, host
):
    model = () if ask in (upcycling.crsu, upcycling.trsu, FEW.only) else (host(),)
    refused(code, ask, *model, *given)
