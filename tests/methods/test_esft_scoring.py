"""ESFT's scores: naive loops on tiny mixtures, and the published scores from the raw routing."""

import gzip
import json

import pytest
import torch
from datasets import Dataset

from moebook.errors import Refusal
from moebook.methods import esft
from moebook.models import anatomy

FAMILIES = ["Mixtral", "DeepseekV2", "DeepseekV3", "Olmoe", "Qwen2Moe", "Qwen3Moe"]
RENORMALISED = {"Mixtral", "DeepseekV3", "Qwen3Moe"}


def inputs_of_routers(model, ids):
    """Layer -> what its router read, ``[T, D]``, and the router's weight, both in float64."""
    seen, hooks = {}, []
    for layer in anatomy(model).layers:
        if layer.kind == "sparse":

            def note(router, args, index=layer.index):
                seen[index] = (args[0].reshape(-1, 32).double(), router.weight.detach().double())

            hooks.append(layer.router.register_forward_pre_hook(note))
    with torch.no_grad():
        model(input_ids=ids[None])
    for hook in hooks:
        hook.remove()
    return seen


def naive(model, family, batch, pooling):
    """Eq. 6 and 7, one unpadded sample at a time, one token after the other."""
    top_k, means, tokens = model.config.num_experts_per_tok, {}, 0
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        tokens += length
        for layer, (x, weight) in inputs_of_routers(model, ids[:length]).items():
            token, gate = means.setdefault(layer, torch.zeros(2, len(weight)).double())
            share = 1 if pooling == "tokens" else 1 / length
            for row in x:
                logits = weight @ row
                scores = logits.sigmoid() if family == "DeepseekV3" else logits.softmax(0)
                best = sorted(range(len(weight)), key=lambda e: -scores[e])[:top_k]
                total = sum(scores[e] for e in best) if family in RENORMALISED else 1
                for expert in best:
                    token[expert] += share / top_k
                    gate[expert] += share * scores[expert] / total
    count = tokens if pooling == "tokens" else len(batch["input_ids"])
    return {layer: both / count for layer, both in means.items()}


@pytest.mark.parametrize("pooling", ["tokens", "samples"])
@pytest.mark.parametrize("family", FAMILIES)
def test_measured_scores_equal_a_naive_loop(family, pooling, mixture, batch):
    model = mixture(family).train()
    halves = [{key: value[rows] for key, value in batch.items()} for rows in ([0, 1], [2])]
    scores = esft.measure(model, halves, esft.Config(pooling=pooling))
    assert model.training
    want = naive(model.eval(), family, batch, pooling)
    assert scores.token.keys() == want.keys()
    for layer, (token, gate) in want.items():
        torch.testing.assert_close(scores.token[layer], token, rtol=0, atol=1e-12)
        torch.testing.assert_close(scores.gate[layer], gate, rtol=1e-5, atol=1e-6)
        assert scores.token[layer].sum().item() == pytest.approx(1, abs=1e-12)


def test_a_constant_scaling_of_the_output_is_no_part_of_the_gate(mixture, batch):
    plain, scaled = mixture("DeepseekV2"), mixture("DeepseekV2", routed_scaling_factor=16.0)
    first = esft.measure(plain, [batch]).gate[1]
    torch.testing.assert_close(esft.measure(scaled, [batch]).gate[1], first)


def test_a_dense_model_and_no_token_are_refused(host, mixture, batch):
    with pytest.raises(Refusal, match="E-MODEL: LlamaForCausalLM is dense"):
        esft.measure(host(), [batch])
    padding = {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}
    for batches in ([], [padding]):
        with pytest.raises(Refusal, match="E-DATA: no real token"):
            esft.measure(mixture("Olmoe"), batches)


@pytest.fixture(scope="module")
def law(shared):
    """The scores of `law` from the raw routing of every token, by pooling."""
    path = shared / "oracles/esft/law.routing.txt.gz"
    return {pooling: esft.replay(path, pooling=pooling) for pooling in ("tokens", "samples")}


def test_published_scores_and_experts_follow_from_the_published_routing(law, shared):
    published = esft.Scores.load(shared / "oracles/esft/law.scores.json")
    counted = law["tokens"]
    assert counted.token.keys() == published.token.keys() == set(range(1, 27))
    for kind in ("token", "gate"):
        for layer, row in getattr(published, kind).items():
            assert (getattr(counted, kind)[layer] - row).abs().max() <= 5e-5
    selection = esft.select(counted, esft.Config.preset("released"))
    want = json.loads((shared / "oracles/esft/law.experts.json").read_text())
    assert {str(layer): list(ids) for layer, ids in selection.experts.items()} == want["experts"]


def test_averaging_by_samples_changes_some_layers_of_law(law):
    by_tokens, by_samples = (esft.select(scores, esft.Config()) for scores in law.values())
    pairs = zip(by_tokens.experts.values(), by_samples.experts.values(), strict=True)
    assert 2 <= sum(set(one) != set(other) for one, other in pairs) <= 6


def test_a_gate_threshold_of_a_tenth_is_21_to_29_per_cent_of_a_layers_published_total(shared):
    totals = [
        float(row.sum())
        for task in ("law", "intent")
        for row in esft.Scores.load(shared / f"oracles/esft/{task}.scores.json").gate.values()
    ]
    assert (round(min(totals), 2), round(max(totals), 2)) == (0.34, 0.48)
    assert (round(0.1 / max(totals), 2), round(0.1 / min(totals), 2)) == (0.21, 0.29)


def test_published_routing_is_read_token_by_token(tmp_path):
    path = tmp_path / "toy.routing.txt"
    path.write_text("1\t0\t0\t1\t1\t2\t\t.5\t.25\t.5\t.125\n1\t1\t2\t0\t\t.5\t.5\n")
    by_tokens = esft.replay(path, experts=3, top_k=2, pooling="tokens")
    by_samples = esft.replay(path, experts=3, top_k=2, pooling="samples")
    assert by_tokens.token[1].tolist() == pytest.approx([2 / 6, 2 / 6, 2 / 6])
    assert by_tokens.gate[1].tolist() == pytest.approx([1 / 3, 0.75 / 3, 0.625 / 3])
    assert by_samples.token[1].tolist() == pytest.approx([3 / 8, 2 / 8, 3 / 8])
    assert by_samples.gate[1].tolist() == pytest.approx([3 / 8, 3 / 16, 9 / 32])


GOOD = b"1\t0\t0\t1\t\t.5\t.5\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("toy.txt", GOOD + b"1\t0\t0\tx\t\t.5\t.5", ":2: invalid literal"),
        ("toy.txt", GOOD + b"1\t0\t0\t3\t\t.5\t.5", ":2: 2 experts and 2 gates"),
        ("toy.txt", GOOD + b"1\t0\t0\t1\t\t.5", ":2: 2 experts and 1 gates"),
        ("toy.txt", GOOD + b"1\t0\t0\t1\t2\t\t.5\t.5\t.5", ":2: 3 experts and 3 gates"),
        ("toy.txt.gz", GOOD, ":0: Not a gzipped file"),
        ("toy.txt.gz", gzip.compress(GOOD * 1000)[:-12], ":.*ended before"),
        ("toy.txt.gz", gzip.compress(GOOD)[:10] + b"\xff" * 40, ":.*decompressing"),
        ("toy.txt", GOOD + b"\xff\xfe", ":.*can't decode"),
    ],
)
def test_damaged_published_routing_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal, match=f"E-FORMAT: .*{name}{message}"):
        esft.replay(tmp_path / name, experts=3, top_k=2, pooling="tokens")
    with pytest.raises(Refusal, match="E-NOFILE"):
        esft.replay(tmp_path / "none.txt", pooling="tokens")
    with pytest.raises(Refusal, match="E-CHOICE: pooling is 'tokns'"):
        esft.replay(tmp_path / name, pooling="tokns")


def rows(lengths):
    return Dataset.from_dict({"input_ids": [[i] * length for i, length in enumerate(lengths)]})


def test_packed_samples_are_the_rows_one_after_the_other():
    batches = esft.samples(rows([3, 5, 4, 6]), count=2, length=6, batch=1, seed=1)
    assert [batch["input_ids"].shape for batch in batches] == [(1, 6), (1, 6)]
    assert all(batch["attention_mask"].all() for batch in batches)
    stream = torch.cat([batch["input_ids"][0] for batch in batches]).tolist()
    order = list(dict.fromkeys(stream))
    assert stream == [i for i in order for _ in range([3, 5, 4, 6][i])][:12]


def test_too_few_rows_make_fewer_samples_and_padding_is_masked():
    (batch,) = esft.samples(rows([3, 5]), count=4, length=6, pad_id=99)
    assert batch["attention_mask"].sum(1).tolist() == [6, 2]
    assert (batch["input_ids"] == 99).sum() == 4
    (one,) = esft.samples(rows([3, 5, 9]), count=4, length=6, packed=False, pad_id=99)
    assert sorted(one["attention_mask"].sum(1).tolist()) == [3, 5]
    for size in ("count", "length", "batch"):
        with pytest.raises(Refusal, match=f"E-RANGE: {size} is 0"):
            esft.samples(rows([3]), **{size: 0})
    with pytest.raises(Refusal, match="E-DATA: no sample of at most 3 tokens in 2 rows"):
        esft.samples(rows([4, 4]), length=3, packed=False)


def test_samples_depend_on_the_seed_alone():
    data = rows(list(range(1, 30)))
    draws = [esft.samples(data, count=3, length=20, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(draws[0][0]["input_ids"], draws[1][0]["input_ids"])
    assert not torch.equal(draws[0][0]["input_ids"], draws[2][0]["input_ids"])
