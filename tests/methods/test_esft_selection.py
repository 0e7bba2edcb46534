"""ESFT's choice of experts: hand-worked layers, the published experts, and bad input."""

import json
import math

import pytest
import torch

from moebook.errors import Refusal
from moebook.methods import esft


def scores(*rows, gate=None):
    token = {layer: torch.tensor(row).double() for layer, row in enumerate(rows)}
    return esft.Scores(token, token if gate is None else {0: torch.tensor(gate).double()})


def chosen(row, **settings):
    return esft.select(scores(row), esft.Config(**settings)).experts[0]


@pytest.mark.parametrize("task", ["law", "intent"])
def test_the_published_experts_follow_from_the_published_scores(task, shared):
    folder = shared / "oracles/esft"
    published = esft.Scores.load(folder / f"{task}.scores.json")
    selection = esft.select(published, esft.Config.preset("released", score="token", threshold=0.2))
    want = json.loads((folder / f"{task}.experts.json").read_text())
    assert len(want["experts"]) == 26
    assert {str(layer): list(ids) for layer, ids in selection.experts.items()} == want["experts"]
    assert selection.published() == want
    assert esft.Selection.load(folder / f"{task}.experts.json") == selection
    plain, share = (
        esft.select(published, esft.Config(score="gate", threshold=0.1, normalised=normalised))
        for normalised in (False, True)
    )
    assert 0 < share.count < plain.count / 2


@pytest.mark.parametrize(
    ("p", "count"), [(0.05, 1), (0.4, 1), (0.41, 2), (0.7, 2), (0.71, 3), (0.9, 3), (1.0, 4)]
)
def test_experts_are_taken_until_their_scores_reach_p(p, count):
    assert chosen([0.1, 0.3, 0.2, 0.4], threshold=p) == (3, 1, 2, 0)[:count]


def test_among_equal_scores_the_lower_number_comes_first_and_rounding_makes_them_equal():
    assert chosen([0.25, 0.25, 0.25, 0.25], threshold=0.5) == (0, 1)
    row = [0.29996, 0.30004, 0.4]
    assert chosen(row, threshold=0.6) == (2, 1)
    assert chosen(row, threshold=0.6, decimals=4) == (2, 0)


def test_a_total_that_misses_p_by_rounding_alone_counts_as_reached():
    third = [1 / 3] * 3
    assert chosen(third, threshold=1.0, decimals=4) == (0, 1, 2)
    assert chosen([0.1] * 10, threshold=1.0) == tuple(range(10))
    assert chosen([0.7, 0.3], threshold=0.7, decimals=4) == (0,)


def test_whole_groups_are_taken_by_the_sum_of_their_scores():
    given = scores([0.25, 0.125, 0.375, 0.25], [0.5, 0.25, 0.25, 0.0])
    groups = {0: [(0, 2), (1, 3)], 1: [(0, 3), (1, 2)]}
    selection = esft.select(given, esft.Config(threshold=0.5), groups=groups)
    assert selection.experts == {0: (0, 2), 1: (0, 3)}


def test_random_experts_keep_the_counts_and_depend_on_the_seed():
    selection = esft.Selection(experts={1: (5, 2, 9), 4: (0,)}, shared_experts=True)
    drawn = [esft.random_selection(selection, 64, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert esft.random_selection(selection, 64, "gate/law/0") not in drawn
    assert [len(ids) for ids in drawn[0].experts.values()] == [3, 1]
    assert drawn[0].shared_experts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0}, "E-RANGE: threshold is 0"),
        ({"threshold": 1.01}, "E-RANGE: threshold is 1.01"),
        ({"threshold": math.nan}, "E-RANGE: threshold is nan"),
        ({"threshold": "0.2"}, "E-TYPE: threshold is '0.2'"),
        ({"score": "tokens"}, "E-CHOICE: score is 'tokens', expected 'token' or 'gate'"),
        ({"pooling": "layers"}, "E-CHOICE: pooling"),
        ({"decimals": 0}, "E-RANGE: decimals is 0"),
        ({"router": 1}, "E-TYPE: router is 1"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(Refusal, match=message):
        esft.Config(**settings)


def test_presets_differ_where_paper_and_code_do():
    paper, released = esft.Config.preset("paper"), esft.Config.preset("released")
    assert (paper.pooling, paper.normalised, paper.decimals) == ("samples", True, None)
    assert (released.pooling, released.normalised, released.decimals) == ("tokens", False, 4)
    assert esft.Config.preset("fixed", threshold=0.5) == esft.Config(threshold=0.5)


def test_a_layer_never_used_and_a_p_never_reached_are_refused():
    with pytest.raises(Refusal, match="E-DATA: layer 1: its experts were never used"):
        esft.select(scores([0.5, 0.5], [0.0, 0.0]), esft.Config())
    low = scores([0.5, 0.5], gate=[0.1, 0.2])
    with pytest.raises(Refusal, match=r"E-RANGE: layer 0: all gate scores .* 0.3000"):
        esft.select(low, esft.Config(score="gate", threshold=0.4))
    assert esft.select(low, esft.Config(score="gate", threshold=0.3)).experts == {0: (1, 0)}


BAD_SCORES = {
    "layer in one kind alone": (lambda c: c["gate_scores"].pop("2"), "E-KEYS: .*token and gate"),
    "expert missing": (lambda c: c["token_scores"]["1"].pop("0"), "E-KEYS: .*layer 1"),
    "another E": (lambda c: c["token_scores"]["2"].update({"2": 0.0}), "E-SHAPE: .*3 experts"),
    "negative": (
        lambda c: c["gate_scores"]["2"].update({"1": -0.1}),
        "E-RANGE: .*layer 2 has",
    ),
    "NaN": (lambda c: c["token_scores"]["2"].update({"0": math.nan}), "E-RANGE: .*2.0 is nan"),
    "a string": (lambda c: c["token_scores"]["2"].update({"0": "high"}), "E-TYPE: .*2.0 is 'high'"),
    "one kind alone": (lambda c: c.pop("gate_scores"), "E-TYPE: .*gate_scores is missing"),
    "a layer's name": (lambda c: c["token_scores"].update({"x": {}}), "E-TYPE: .*'x'"),
    "a list": (lambda c: c["token_scores"].update({"3": [1.0]}), "E-TYPE: .*token_scores.3"),
    "no expert": (lambda c: c["token_scores"].update({"1": {}}), "E-RANGE: .*token_scores.1"),
    "400 digits": (lambda c: c["gate_scores"]["1"].update({"0": 10**400}), "E-TYPE: .*1.0"),
    "a layer twice": (lambda c: c["gate_scores"].update({"01": {"0": 1.0}}), "E-FORMAT: .*twice"),
    "5,000 digits": (lambda c: c["gate_scores"].update({"9" * 5000: {}}), "E-FORMAT: .*not JSON"),
}


@pytest.mark.parametrize("kind", BAD_SCORES)
def test_a_bad_score_file_is_refused(kind, tmp_path):
    change, message = BAD_SCORES[kind]
    rows = {"1": {"0": 0.5, "1": 0.5}, "2": {"0": 0.25, "1": 0.75}}
    kinds = ("token_scores", "gate_scores")
    content = {kind: {layer: dict(row) for layer, row in rows.items()} for kind in kinds}
    change(content)
    (tmp_path / "scores.json").write_text(json.dumps(content))
    with pytest.raises(Refusal, match=message):
        esft.Scores.load(tmp_path / "scores.json")


BAD_SELECTIONS = {
    '{"experts": {"1": [3, 3]}}': "E-RANGE: .*layer 1: an expert stands twice",
    '{"experts": {"1": [-1]}}': "E-RANGE: .*experts.1.0 is -1",
    '{"experts": {"1": [1.5]}}': "E-TYPE: .*experts.1.0 is 1.5",
    '{"experts": {"1": []}}': "E-RANGE: .*experts.1",
    '{"experts": {}}': "E-RANGE: .*experts is {}",
    '{"experts": {"1": 3}}': "E-TYPE: .*experts.1 is 3",
    '{"experts": {"1": [3], "01": [4]}}': "E-FORMAT: .*twice",
    '{"experts": ' + "[" * 100_000: "E-FORMAT: .*is not JSON",
    '{"experts": {"one": [3]}}': "E-TYPE: .*'one'",
    '{"experts": {"1": [3], "1": [2]}}': "E-FORMAT: .*twice",
    '{"experts": {"1": [3]}, "shared_experts": "no"}': "E-TYPE: .*shared_experts is 'no'",
    '{"experts": {"1": [3]}, "shared": true}': "E-CHOICE: .*did you mean 'shared_experts'",
    "{": "E-FORMAT: .*is not JSON",
    "[]": "E-FORMAT: .*expected a JSON object",
}


@pytest.mark.parametrize("text", BAD_SELECTIONS, ids=lambda text: text[:50])
def test_a_bad_expert_file_is_refused_by_its_name(text, tmp_path):
    (tmp_path / "experts.json").write_text(text)
    with pytest.raises(Refusal, match=BAD_SELECTIONS[text]) as refusal:
        esft.Selection.load(tmp_path / "experts.json")
    assert "experts.json" in str(refusal.value) and len(str(refusal.value)) < 500
    with pytest.raises(Refusal, match="E-NOFILE"):
        esft.Selection.load(tmp_path / "none.json")
