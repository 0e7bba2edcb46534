"""ESFT's scores: naive loops on tiny mixtures, and the published scores from the raw routing."""

import gzip
import json

import pytest
import torch

from moebook.errors import Refusal
from moebook.methods import esft, pesc
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
    model = mixture(family)
    halves = [{key: value[rows] for key, value in batch.items()} for rows in ([0, 1], [2])]
    scores = esft.measure(model, halves, esft.Config(pooling=pooling))
    want = naive(model, family, batch, pooling)
    assert scores.token.keys() == want.keys()
    for layer, (token, gate) in want.items():
        torch.testing.assert_close(scores.token[layer], token, rtol=0, atol=1e-12)
        torch.testing.assert_close(scores.gate[layer], gate, rtol=1e-5, atol=1e-6)


def test_the_two_poolings_differ_and_token_scores_sum_to_1(mixture, batch):
    model = mixture("DeepseekV2")
    by_tokens, by_samples = (
        esft.measure(model, [batch], esft.Config(pooling=p)) for p in ("tokens", "samples")
    )
    for layer, row in by_tokens.token.items():
        assert (row - by_samples.token[layer]).abs().max() > 1e-3
        assert row.sum().item() == pytest.approx(1, abs=1e-12)


def test_a_constant_scaling_of_the_output_is_no_part_of_the_gate(mixture, batch):
    plain, scaled = mixture("DeepseekV2"), mixture("DeepseekV2", routed_scaling_factor=16.0)
    first = esft.measure(plain, [batch]).gate[1]
    torch.testing.assert_close(esft.measure(scaled, [batch]).gate[1], first)


def test_an_upcycled_model_is_measured_too(host, batch):
    model = pesc.full_experts(host(), pesc.Config(experts=4, adapter_width=4, host="frozen"))
    scores = esft.measure(model, [batch])
    assert list(scores.gate) == [0, 1]
    assert all(row.sum().item() == pytest.approx(1, abs=1e-6) for row in scores.gate.values())


def test_measuring_leaves_mode_and_hooks_as_they_were(mixture, batch):
    model = mixture("Olmoe").train()
    esft.measure(model, [batch])
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_a_dense_model_no_token_and_a_misfitting_mask_are_refused(host, mixture, batch):
    with pytest.raises(Refusal, match="E-MODEL: LlamaForCausalLM is dense"):
        esft.measure(host(), [batch])
    with pytest.raises(Refusal, match="E-DATA: no real token"):
        esft.measure(mixture("Olmoe"), [])
    with pytest.raises(Refusal, match="E-SHAPE: attention_mask"):
        short = {**batch, "attention_mask": batch["attention_mask"][:, 1:]}
        esft.measure(mixture("Olmoe"), [short])


def test_a_router_of_unknown_output_is_refused_and_no_hook_stays(mixture, batch):
    model = mixture("Olmoe")
    router = anatomy(model).layers[1].router
    handle = router.register_forward_hook(lambda module, args, output: output[:2])
    with pytest.raises(Refusal, match="E-MODEL: layer 1: OlmoeTopKRouter does not return"):
        esft.measure(model, [batch])
    handle.remove()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.fixture(scope="module")
def law(shared):
    """The scores of `law` from the raw routing of every token, by pooling."""
    path = shared / "oracles/esft/law.routing.txt.gz"
    return {pooling: esft.replay(path, pooling=pooling) for pooling in ("tokens", "samples")}


def test_the_published_scores_follow_from_the_published_routing(law, shared):
    published = esft.Scores.load(shared / "oracles/esft/law.scores.json")
    counted = law["tokens"]
    assert counted.token.keys() == published.token.keys() == set(range(1, 27))
    for kind in ("token", "gate"):
        for layer, row in getattr(published, kind).items():
            assert (getattr(counted, kind)[layer] - row).abs().max() <= 5e-5


def test_a_gate_threshold_of_a_tenth_is_21_to_29_per_cent_of_a_layers_published_total(shared):
    totals = [
        float(row.sum())
        for task in ("law", "intent")
        for row in esft.Scores.load(shared / f"oracles/esft/{task}.scores.json").gate.values()
    ]
    assert (round(min(totals), 2), round(max(totals), 2)) == (0.34, 0.48)
    assert (round(0.1 / max(totals), 2), round(0.1 / min(totals), 2)) == (0.21, 0.29)


def test_the_published_experts_follow_from_the_published_routing(law, shared):
    released = esft.Config.preset("released")
    got = esft.select(law["tokens"], released)
    published = json.loads((shared / "oracles/esft/law.experts.json").read_text())
    assert {str(layer): list(ids) for layer, ids in got.experts.items()} == published["experts"]


def test_averaging_by_samples_changes_some_layers_of_law(law):
    by_tokens, by_samples = (esft.select(scores, esft.Config()) for scores in law.values())
    changed = [
        layer
        for layer, ids in by_tokens.experts.items()
        if set(ids) != set(by_samples.experts[layer])
    ]
    assert 2 <= len(changed) <= 6


def test_published_routing_is_read_token_by_token(tmp_path):
    path = tmp_path / "toy.routing.txt"
    path.write_text("1\t0\t0\t1\t1\t2\t\t.5\t.25\t.5\t.125\n1\t1\t2\t0\t\t.5\t.5\n")
    by_tokens = esft.replay(path, experts=3, top_k=2)
    by_samples = esft.replay(path, experts=3, top_k=2, pooling="samples")
    assert by_tokens.token[1].tolist() == pytest.approx([2 / 6, 2 / 6, 2 / 6])
    assert by_tokens.gate[1].tolist() == pytest.approx([1 / 3, 0.75 / 3, 0.625 / 3])
    assert by_samples.token[1].tolist() == pytest.approx([3 / 8, 2 / 8, 3 / 8])
    assert by_samples.gate[1].tolist() == pytest.approx([3 / 8, 3 / 16, 9 / 32])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t0\t0\tx\t\t.5\t.5", "invalid literal"),
        ("1\t0\t0\t3\t\t.5\t.5", "2 experts and 2 gates"),
        ("1\t0\t0\t1\t\t.5", "2 experts and 1 gates"),
        ("1\t0\t0\t1\t2\t\t.5\t.5\t.5", "3 experts and 3 gates"),
    ],
)
def test_damaged_published_routing_is_refused_with_its_line(tmp_path, line, message):
    path = tmp_path / "toy.routing.txt"
    path.write_text("1\t0\t0\t1\t\t.5\t.5\n" + line + "\n")
    with pytest.raises(Refusal, match=f"E-FORMAT: .*toy.routing.txt:2: .*{message}"):
        esft.replay(path, experts=3, top_k=2)
    with pytest.raises(Refusal, match="E-NOFILE"):
        esft.replay(tmp_path / "none.txt")


GOOD_LINE = b"1\t0\t0\t1\t\t.5\t.5\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("toy.txt.gz", GOOD_LINE),
        ("toy.txt.gz", gzip.compress(GOOD_LINE * 1000)[:-12]),
        ("toy.txt.gz", gzip.compress(GOOD_LINE)[:10] + b"\xff" * 40),
        ("toy.txt", GOOD_LINE + b"\xff\xfe"),
    ],
    ids=["not gzip", "cut", "damaged", "not UTF-8"],
)
def test_published_routing_that_cannot_be_read_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refusal, match=f"E-FORMAT: .*{name} cannot be read to its end"):
        esft.replay(tmp_path / name, experts=3, top_k=2)


def test_replaying_with_unknown_settings_is_refused(tmp_path):
    path = tmp_path / "toy.txt"
    path.write_bytes(GOOD_LINE)
    with pytest.raises(Refusal, match="E-CHOICE: pooling is 'tokns'; did you mean 'tokens'"):
        esft.replay(path, experts=3, top_k=2, pooling="tokns")
    with pytest.raises(Refusal, match="E-RANGE: top_k is 0, expected 1 to 3"):
        esft.replay(path, experts=3, top_k=0)
