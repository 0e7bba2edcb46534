"""ESFT's scores and choices: naive loops, hand-worked layers, the published scores and experts."""

import gzip
import json
import math

import pytest
import torch
from datasets import Dataset

from moebook import models
from moebook.errors import Refusal
from moebook.methods import esft, upcycling
from moebook.models import anatomy
from tests.families import of_family
from tests.refusals import refused

RENORMALISED = {"Mixtral", "DeepseekV3", "Qwen3Moe"}


@torch.no_grad()
def naive(model, family, batch, pooling):
    """Eq. 6 and 7, one unpadded sample at a time, one token after the other, in float64."""
    top_k = model.config.num_experts_per_tok
    means = {}
    tokens = 0
    seen = {}
    routers = {
        part.index: part.router
        for part in anatomy(model).layers
        if part.kind == "sparse"
    }
    for layer, router in routers.items():
        router.register_forward_pre_hook(
            lambda _, args, layer=layer: seen.update({layer: args[0]})
        )
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        length = int(mask.sum())
        tokens += length
        model(input_ids=ids[None, :length])
        for layer, router in routers.items():
            experts = len(router.weight)
            token, gate = means.setdefault(layer, torch.zeros(2, experts).double())
            share = 1 if pooling == "tokens" else 1 / length
            for row in seen[layer].view(-1, 32):
                logits = router.weight.double() @ row.double()
                scores = (
                    logits.sigmoid() if family == "DeepseekV3" else logits.softmax(0)
                )
                best = sorted(range(experts), key=lambda e: -scores[e])[:top_k]
                total = sum(scores[e] for e in best) if family in RENORMALISED else 1
                for expert in best:
                    token[expert] += share / top_k
                    gate[expert] += share * scores[expert] / total
    count = tokens if pooling == "tokens" else len(batch["input_ids"])
    return {layer: both / count for layer, both in means.items()}


@pytest.mark.parametrize("pooling", ["tokens", "samples"])
def test_measured_scores_equal_a_naive_loop(family, pooling, mixture, batch):
    # No part of the gate.
    scaled = {"routed_scaling_factor": 16.0} if "Deepseek" in family else {}
    model = mixture(family, **scaled).train()
    halves = [
        {key: value[rows] for key, value in batch.items()} for rows in ([0, 1], [2])
    ]
    scores = esft.measure(model, halves, esft.Config(pooling=pooling))
    assert model.training
    want = naive(model.eval(), family, batch, pooling)
    assert scores.token.keys() == want.keys()
    for layer, (token, gate) in want.items():
        torch.testing.assert_close(scores.token[layer], token, rtol=0, atol=1e-12)
        torch.testing.assert_close(scores.gate[layer], gate, rtol=1e-5, atol=1e-6)
        assert scores.token[layer].sum().item() == pytest.approx(1, abs=1e-12)
    padding = {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}
    for batches in ([], [padding]):
        refused("E-DATA: no real token", esft.measure, model, batches)


@pytest.mark.parametrize(
    "kind", ["hy_v3", "afmoe", "glm4_moe", "hunyuan_v1_moe", "beam"]
)
def test_gate_scores_of_a_renormalised_router_sum_to_one_whatever_its_factor_is_called(
    kind, batch
):
    """A wrong factor would choose too few experts, unless p is taken as a share of the total."""
    scores = esft.measure(of_family(kind), [batch])
    assert scores.gate
    for layer, row in scores.gate.items():
        assert row.sum().item() == pytest.approx(1, abs=1e-5)
        assert scores.token[layer].sum().item() == pytest.approx(1, abs=1e-12)
    for p in (0.2, 0.5):
        config = esft.Config(score="gate", threshold=p)
        share = esft.Config(score="gate", threshold=p, normalised=True)
        assert esft.select(scores, config) == esft.select(scores, share)


def test_gates_that_exceed_a_token_are_refused(batch):
    """Sigmoids that nothing normalises sum to more than one token, so p has no meaning."""
    for kind, message in {
        "kolibri1": "E-RANGE: layer 0: gate scores sum to .*, expected at most 1",
        "dots1": "E-RANGE: layer 1: gate scores sum to .*, expected at most 1",
        "phimoe": "E-MODEL: layer 0: the router's weights are neither",
    }.items():
        refused(message, esft.measure, of_family(kind), [batch])
    for kind in ("kolibri1", "dots1"):
        scores = esft.measure(of_family(kind, norm_topk_prob=True), [batch])
        assert all(row.sum().item() == pytest.approx(1) for row in scores.gate.values())


def test_rows_longer_than_the_model_are_refused_in_every_pass_that_reads_them():
    """Past its positions a model chooses other experts, and says nothing."""
    model, _ = models.load("nano-moe")
    row = {"input_ids": torch.full((1, 513), 7)}
    message = "E-RANGE: .*rows of 513 tokens, the model takes 512: lower length"
    for call in (esft.measure, esft.cooccurrence):
        refused(message, call, model, [row])
    refused(message, upcycling.collect, models.load("nano")[0], {"text": [row]})
    fitting = {"input_ids": row["input_ids"][:, :512]}
    assert esft.measure(model, [fitting]).token.keys() == {1, 2, 3}
    model.config.max_position_embeddings = 0  # it says none
    assert esft.measure(model, [row]).token.keys() == {1, 2, 3}


def test_published_scores_and_experts_follow_from_the_published_routing(shared):
    folder = shared / "oracles/esft"
    published = esft.Scores.load(folder / "law.scores.json")
    path = folder / "law.routing.txt.gz"
    counted, by_samples = (
        esft.replay(path, pooling=each) for each in ("tokens", "samples")
    )
    assert counted.token.keys() == published.token.keys() == set(range(1, 27))
    for kind in ("token", "gate"):
        for layer, row in getattr(published, kind).items():
            assert (getattr(counted, kind)[layer] - row).abs().max() <= 5e-5
    selection = esft.select(counted, esft.Config.preset("released"))
    assert selection == esft.Selection.load(folder / "law.experts.json")
    one, other = (
        esft.select(each, esft.Config()).experts for each in (counted, by_samples)
    )
    assert 2 <= sum(set(one[layer]) != set(other[layer]) for layer in one) <= 6


def test_published_routing_is_read_token_by_token(tmp_path):
    path = tmp_path / "toy.routing.txt"
    path.write_text("1\t0\t0\t1\t1\t2\t\t.5\t.25\t.5\t.125\n1\t1\t2\t0\t\t.5\t.5\n")
    by_tokens = esft.replay(path, experts=3, top_k=2, pooling="tokens")
    by_samples = esft.replay(path, experts=3, top_k=2, pooling="samples")
    assert by_tokens.token[1].tolist() == pytest.approx([2 / 6, 2 / 6, 2 / 6])
    assert by_tokens.gate[1].tolist() == pytest.approx([1 / 3, 0.75 / 3, 0.625 / 3])
    assert by_samples.token[1].tolist() == pytest.approx([3 / 8, 2 / 8, 3 / 8])
    assert by_samples.gate[1].tolist() == pytest.approx([3 / 8, 3 / 16, 9 / 32])


def test_a_clones_files_are_found_and_read_like_one_of_all_layers(
    tmp_path, monkeypatch
):
    clone = tmp_path / "results/expert_scores/toy"
    lines = "0\t1\t1\t2\t\t.5\t.25\t.5\t.125\n2\t0\t\t.5\t.5\n"
    clone.mkdir(parents=True)
    kind = {"10": {"0": 1.0}, "9": {"0": 1.0}}
    summary = json.dumps({"token_scores": kind, "gate_scores": kind})
    (clone / "summary.json").write_text(summary)
    for layer in (10, 9):
        (clone / f"expert_weights_{layer}.txt").write_text(lines)
    monkeypatch.setenv("CLONE", str(tmp_path))
    scores, *routing = esft.published("$CLONE", ["toy"])["toy"]
    refused("E-TYPE: folder.* is 3", esft.published, 3, ["toy"])
    refused("E-TYPE: tasks.* is None", esft.published, "$CLONE", [None])
    assert list(esft.Scores.load(scores).gate) == [9, 10], "by number, not as texts"
    form = {"experts": 3, "top_k": 2, "pooling": "tokens"}
    both = esft.replay(*routing, **form)
    assert list(both.token) == [9, 10]
    assert both.token[9].tolist() == pytest.approx([2 / 6, 2 / 6, 2 / 6])
    halves = [
        esft.replay(*routing, half=half, **form).gate[10].tolist() for half in (0, 1)
    ]
    assert halves == [
        pytest.approx([0.25, 0.375, 0.0625]),
        pytest.approx([0.5, 0, 0.5]),
    ]
    with pytest.raises(
        Refusal, match=r"E-NOFILE: no published scores of 'law' in \$NOWHERE; give"
    ):
        esft.published("$NOWHERE", ["law"])


def test_damaged_published_routing_is_refused(tmp_path):
    good = b"1\t0\t0\t1\t\t.5\t.5\n"
    for name, (content, message) in {
        "1.txt": (good + b"1\t0\t0\tx\t\t.5\t.5", ":2: invalid literal"),
        "2.txt": (good + b"1\t0\t0\t3\t\t.5\t.5", ":2: 2 experts and 2 gates"),
        "9.txt": (good + b"1\t0\t0\t1\t\t7\t.5", r":2: .*gate outside \[0, 1\]"),
        "10.txt": (good + b"1\t0\t1\t1\t\t.5\t.5", ":2: an expert twice for a token"),
        "3.txt": (good + b"1\t0\t0\t1\t\t.5", ":2: 2 experts and 1 gates"),
        "5.txt": (good + b"\xff\xfe", ":.*can't decode"),
        "6.txt.gz": (good, ":0: Not a gzipped file"),
        "8.txt.gz": (gzip.compress(good)[:10] + b"\xff" * 40, ":.*decompressing"),
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(Refusal, match=f"E-FORMAT: .*{name}{message}"):
            esft.replay(tmp_path / name, experts=3, top_k=2, pooling="tokens")
    refused("E-NOFILE", esft.replay, tmp_path / "none.txt", pooling="tokens")
    refused(
        "E-CHOICE: pooling is 'tokns'", esft.replay, tmp_path / "1.txt", pooling="tokns"
    )


def of_lengths(lengths):
    return Dataset.from_dict(
        {"input_ids": [[i] * length for i, length in enumerate(lengths)]}
    )


def test_packed_samples_are_the_rows_in_turn_too_few_make_fewer_and_padding_is_masked():
    draws = [
        esft.samples(of_lengths([3, 5, 4, 6]), count=2, length=6, batch=1, seed=seed)
        for seed in (1, 1, 0)
    ]
    first, same, other = (draw[0]["input_ids"] for draw in draws)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    batches = draws[0]
    assert [batch["input_ids"].shape for batch in batches] == [(1, 6), (1, 6)]
    assert all(batch["attention_mask"].all() for batch in batches)
    stream = torch.cat([batch["input_ids"][0] for batch in batches]).tolist()
    order = list(dict.fromkeys(stream))
    assert stream == [i for i in order for _ in range([3, 5, 4, 6][i])][:12]
    (batch,) = esft.samples(of_lengths([3, 5]), count=4, length=6, pad_id=99)
    assert batch["attention_mask"].sum(1).tolist() == [6, 2]
    assert (batch["input_ids"] == 99).sum() == 4
    (one,) = esft.samples(
        of_lengths([3, 5, 9]), count=4, length=6, packed=False, pad_id=99
    )
    assert sorted(one["attention_mask"].sum(1).tolist()) == [3, 5]
    refused("E-RANGE: count is 0", esft.samples, of_lengths([3]), count=0)
    with pytest.raises(
        Refusal, match="E-DATA: no sample of at most 3 tokens in 2 rows"
    ):
        esft.samples(of_lengths([4, 4]), length=3, packed=False)


def scores(*rows, gate=None):
    token = {layer: torch.tensor(row).double() for layer, row in enumerate(rows)}
    return esft.Scores(
        token, token if gate is None else {0: torch.tensor(gate).double()}
    )


def test_the_published_experts_follow_from_the_published_scores(shared):
    folder = shared / "oracles/esft"
    totals = []
    released = esft.Config.preset("released", score="token", threshold=0.2)
    rules = [
        esft.Config(score="gate", threshold=0.1, normalised=each)
        for each in (False, True)
    ]
    for task in ("law", "intent"):
        published = esft.Scores.load(folder / f"{task}.scores.json")
        selection = esft.select(published, released)
        want = json.loads((folder / f"{task}.experts.json").read_text())
        assert selection.published() == want
        assert len(want["experts"]) == 26
        assert esft.Selection.load(folder / f"{task}.experts.json") == selection
        plain, share = (esft.select(published, rule).count for rule in rules)
        assert 0 < share < plain / 2
        totals += [float(row.sum()) for row in published.gate.values()]
    # A gate threshold of 0.1 is 21 to 29 per cent of a layer's total.
    assert (round(min(totals), 2), round(max(totals), 2)) == (0.34, 0.48)
    assert (round(0.1 / max(totals), 2), round(0.1 / min(totals), 2)) == (0.21, 0.29)


@pytest.mark.parametrize(
    ("row", "p", "decimals", "want"),
    [
        *(
            ([0.1, 0.3, 0.2, 0.4], p, None, (3, 1, 2, 0)[:count])
            for p, count in {
                0.05: 1,
                0.4: 1,
                0.41: 2,
                0.7: 2,
                0.71: 3,
                0.9: 3,
                1.0: 4,
            }.items()
        ),
        ([0.25] * 4, 0.5, None, (0, 1)),  # among equals the lower number
        ([0.29996, 0.30004, 0.4], 0.6, None, (2, 1)),
        ([0.29996, 0.30004, 0.4], 0.6, 4, (2, 0)),  # rounding makes them equal
        ([1 / 3] * 3, 1.0, 4, (0, 1, 2)),  # misses p by rounding alone
        ([0.1] * 10, 1.0, None, tuple(range(10))),
        ([0.7, 0.3], 0.7, 4, (0,)),
    ],
)
def test_experts_are_taken_until_their_scores_reach_p(row, p, decimals, want):
    config = esft.Config(threshold=p, decimals=decimals)
    assert esft.select(scores(row), config).experts == {0: want}


def test_whole_groups_are_taken_by_their_sums_and_random_experts_by_the_seed():
    given = scores([0.25, 0.125, 0.375, 0.25], [0.5, 0.25, 0.25, 0.0])
    groups = {0: [(0, 2), (1, 3)], 1: [(0, 3), (1, 2)]}
    selection = esft.select(given, esft.Config(threshold=0.5), groups=groups)
    assert selection.experts == {0: (0, 2), 1: (0, 3)}
    selection = esft.Selection(experts={1: (5, 2, 9), 4: (0,)}, shared_experts=True)
    drawn = [esft.random_selection(selection, 64, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert esft.random_selection(selection, 64, "gate/law/0") not in drawn
    assert [len(ids) for ids in drawn[0].experts.values()] == [3, 1]
    assert drawn[0].shared_experts


def test_presets_differ_where_paper_and_code_do_and_what_cannot_be_chosen_is_refused(
    tmp_path,
):
    paper = esft.Config.preset("paper")
    released = esft.Config.preset("released")
    assert (paper.pooling, paper.normalised, paper.decimals) == ("samples", True, None)
    assert (released.pooling, released.normalised, released.decimals) == (
        "tokens",
        False,
        4,
    )
    assert esft.Config.preset("fixed", threshold=0.5) == esft.Config(threshold=0.5)
    for field, value, code in [
        ("threshold", 0, "E-RANGE"),
        ("score", "tokens", "E-CHOICE"),
    ]:
        refused(f"{code}: {field}", esft.Config, **{field: value})
    with pytest.raises(Refusal, match="E-DATA: layer 1: its experts were never used"):
        esft.select(scores([0.5, 0.5], [0.0, 0.0]), esft.Config())
    rows = {"1": {"0": 0.25, "1": 0.75}, "46": {"0": 0.0, "1": 0.0}}
    path = tmp_path / "scores.json"
    path.write_text(json.dumps({"token_scores": rows, "gate_scores": rows}))
    with pytest.raises(
        Refusal, match=r"E-DATA: layer 46: .*Scores.load\(path, without=\[46\]\)"
    ):
        esft.select(esft.Scores.load(path), esft.Config())
    refused(
        r"E-KEYS: .* has no layer 45 to leave out", esft.Scores.load, path, without=[45]
    )
    chosen = esft.select(esft.Scores.load(path, without=[46]), esft.Config())
    path.write_text(json.dumps(chosen.published()))
    want = esft.Selection(experts={1: (1,)}, left_out=(46,))
    assert esft.Selection.load(path) == chosen == want
    low = scores([0.5, 0.5], gate=[0.1, 0.2])
    with pytest.raises(Refusal, match=r"E-RANGE: layer 0: all gate scores .* 0.3000"):
        esft.select(low, esft.Config(score="gate", threshold=0.4))
    assert esft.select(low, esft.Config(score="gate", threshold=0.3)).experts == {
        0: (1, 0)
    }


def test_bad_files_of_scores_and_of_experts_are_refused(tmp_path):
    for change, message in (
        (lambda both: both["gate_scores"].pop("2"), "E-KEYS: .*token and gate"),
        (lambda both: both["token_scores"]["1"].pop("0"), "E-KEYS: .*layer 1"),
        (
            lambda both: both["token_scores"]["2"].update({"2": 0.0}),
            "E-SHAPE: .*3 experts",
        ),
        (
            lambda both: both["gate_scores"]["2"].update({"1": -0.1}),
            "E-RANGE: .*layer 2 has",
        ),
        (
            lambda both: both["token_scores"]["2"].update({"0": 49.25}),
            "layer 2: .* sum to 50, exp",
        ),
        (
            lambda both: both["gate_scores"]["2"].update({"0": 2.076}),
            "2: gate .* sum to 2.826, exp",
        ),
        (
            lambda both: both["token_scores"]["2"].update({"0": math.nan}),
            "E-RANGE: .*2.0 is nan",
        ),
        (lambda both: both.pop("gate_scores"), "E-TYPE: .*gate_scores is missing"),
        (
            lambda both: both["gate_scores"].update({"01": {"0": 1.0}}),
            "E-FORMAT: .*twice",
        ),
    ):
        rows = '{"1": {"0": 0.5, "1": 0.5}, "2": {"0": 0.25, "1": 0.75}}'
        content = {"token_scores": json.loads(rows), "gate_scores": json.loads(rows)}
        change(content)
        (tmp_path / "scores.json").write_text(json.dumps(content))
        refused(message, esft.Scores.load, tmp_path / "scores.json")
    for text, message in {
        '{"experts": {"1": [3, 3]}}': "E-RANGE: .*layer 1: an expert stands twice",
        '{"experts": {"1": [-1]}}': "E-RANGE: .*experts.1.0 is -1",
        '{"experts": {"1": [3], "1": [2]}}': "E-FORMAT: .*twice",
        '{"experts": {"1": [3]}, "shared": true}': "E-CHOICE: .*did you mean 'shared_experts'",
    }.items():
        (tmp_path / "experts.json").write_text(text)
        refusal = refused(message, esft.Selection.load, tmp_path / "experts.json")
        assert "experts.json" in str(refusal)
        assert len(str(refusal)) < 500
    refused("E-NOFILE", esft.Selection.load, tmp_path / "none.json")


def test_where_nothing_was_selected_the_table_of_counts_is_empty():
    """Full fine-tuning alone selects nothing, and its notebook shows the table all the same."""
    assert esft.counts({}).empty
