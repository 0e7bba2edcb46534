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
def test_the_published_experts_follow_from_the_published_scores(task, shared, tmp_path):
    folder = shared / "oracles/esft"
    found = esft.Scores.load(folder / f"{task}.scores.json")
    selection = esft.select(found, esft.Config.preset("released", score="token", threshold=0.2))
    want = json.loads((folder / f"{task}.experts.json").read_text())
    assert len(want["experts"]) == 26
    assert {str(layer): list(ids) for layer, ids in selection.experts.items()} == want["experts"]
    selection.save(tmp_path / "experts.json")
    assert json.loads((tmp_path / "experts.json").read_text()) == want
    assert esft.Selection.load(folder / f"{task}.experts.json") == selection


def test_normalising_the_gate_score_takes_fewer_experts_of_the_published_ones(shared):
    found = esft.Scores.load(shared / "oracles/esft/law.scores.json")
    plain, share = (
        esft.select(found, esft.Config(score="gate", threshold=0.1, normalised=normalised))
        for normalised in (False, True)
    )
    assert 0 < share.count < plain.count / 2


@pytest.mark.parametrize(
    ("p", "count"), [(0.05, 1), (0.4, 1), (0.41, 2), (0.7, 2), (0.71, 3), (0.9, 3), (1.0, 4)]
)
def test_experts_are_taken_until_their_scores_reach_p(p, count):
    assert chosen([0.1, 0.3, 0.2, 0.4], threshold=p) == (3, 1, 2, 0)[:count]


def test_among_equal_scores_the_lower_number_comes_first():
    assert chosen([0.25, 0.25, 0.25, 0.25], threshold=0.5) == (0, 1)


def test_rounding_makes_near_ties_to_ties():
    row = [0.29996, 0.30004, 0.4]
    assert chosen(row, threshold=0.6) == (2, 1)
    assert chosen(row, threshold=0.6, decimals=4) == (2, 0)


def test_a_total_that_misses_p_by_rounding_alone_counts_as_reached():
    third = [1 / 3] * 3
    assert chosen(third, threshold=1.0, decimals=4) == (0, 1, 2)
    assert chosen([0.1] * 10, threshold=1.0) == tuple(range(10))


def test_whole_groups_are_taken_by_the_sum_of_their_scores():
    found = scores([0.25, 0.125, 0.375, 0.25], [0.5, 0.25, 0.25, 0.0])
    groups = {0: [(0, 2), (1, 3)], 1: [(0, 3), (1, 2)]}
    got = esft.select(found, esft.Config(threshold=0.5), groups=groups)
    assert got.experts == {0: (0, 2), 1: (0, 3)}
    with pytest.raises(Refusal, match="E-KEYS: layer 0: the groups are not a partition"):
        esft.select(found, esft.Config(), groups={0: [(0, 1), (1, 3)]})


def test_random_experts_keep_the_counts_and_depend_on_the_seed():
    selection = esft.Selection({1: (5, 2, 9), 4: (0,)}, shared_experts=True)
    drawn = [esft.random_selection(selection, 64, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert esft.random_selection(selection, 64, "gate/law/0") not in drawn
    assert [len(ids) for ids in drawn[0].experts.values()] == [3, 1]
    assert drawn[0].shared_experts
    with pytest.raises(Refusal, match="E-RANGE: layer 1: 3 experts selected of 2"):
        esft.random_selection(selection, 2, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0}, "E-RANGE: threshold is 0"),
        ({"threshold": 1.01}, "E-RANGE: threshold is 1.01"),
        ({"threshold": math.nan}, "E-RANGE: threshold is nan"),
        ({"threshold": "0.2"}, "E-TYPE: threshold is '0.2'"),
        ({"score": "tokens"}, "E-CHOICE: score is 'tokens'; did you mean 'token'"),
        ({"pooling": "layers"}, "E-CHOICE: pooling"),
        ({"decimals": 0}, "E-RANGE: decimals is 0"),
        ({"decimals": True}, "E-TYPE: decimals is True"),
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
    with pytest.raises(Refusal, match="E-CHOICE: unknown preset 'papers'; did you mean 'paper'"):
        esft.Config.preset("papers")
    with pytest.raises(Refusal, match="E-CHOICE: unknown setting 'top_p'"):
        esft.Config.preset("paper", top_p=0.2)


def test_a_layer_never_used_and_a_p_never_reached_are_refused():
    with pytest.raises(Refusal, match="E-DATA: layer 1: its experts were never used"):
        esft.select(scores([0.5, 0.5], [0.0, 0.0]), esft.Config())
    low = scores([0.5, 0.5], gate=[0.1, 0.2])
    with pytest.raises(Refusal, match=r"E-RANGE: layer 0: all gate scores .* 0.3000"):
        esft.select(low, esft.Config(score="gate", threshold=0.4))
    assert esft.select(low, esft.Config(score="gate", threshold=0.3)).experts == {0: (1, 0)}


def test_scores_survive_the_published_form(tmp_path):
    found = scores([0.25, 0.75], [0.5, 0.5])
    found.save(tmp_path / "scores.json")
    again = esft.Scores.load(tmp_path / "scores.json")
    assert all(torch.equal(again.token[layer], row) for layer, row in found.token.items())
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


def score_file(path, change):
    rows = {"1": {"0": 0.5, "1": 0.5}, "2": {"0": 0.25, "1": 0.75}}
    content = {
        kind: {k: dict(v) for k, v in rows.items()} for kind in ("token_scores", "gate_scores")
    }
    change(content)
    path.write_text(json.dumps(content))
    return path


BAD_SCORES = {
    "layer in one kind alone": (lambda c: c["gate_scores"].pop("2"), "E-KEYS: .*token and gate"),
    "expert missing": (lambda c: c["token_scores"]["1"].pop("0"), "E-KEYS: .*layer 1"),
    "another E": (lambda c: c["token_scores"]["1"].update({"2": 0.0}), "E-SHAPE: .*2, 3"),
    "negative": (lambda c: c["gate_scores"]["2"].update({"1": -0.1}), "E-RANGE: gate .*layer 2"),
    "NaN": (lambda c: c["token_scores"]["2"].update({"0": math.nan}), "E-NONFINITE: token"),
    "a string": (lambda c: c["token_scores"]["2"].update({"0": "high"}), "E-TYPE: .*layer 2"),
    "one kind alone": (lambda c: c.pop("gate_scores"), "E-FORMAT: .*token_scores and gate"),
    "a layer's name": (lambda c: c["token_scores"].update({"x": {}}), "E-FORMAT: .*'x'"),
    "a list": (lambda c: c["token_scores"].update({"3": [1.0]}), "E-FORMAT: .*layer 3"),
    "a number": (lambda c: c["token_scores"].update({"1": 0.5}), "E-FORMAT: .*layer 1 holds no"),
    "no expert": (lambda c: [c[kind].update({"1": {}}) for kind in c], "E-FORMAT: .*layer 1 holds"),
    "400 digits": (lambda c: c["gate_scores"]["1"].update({"0": 10**400}), "E-RANGE: .*too large"),
    "a layer twice": (lambda c: c["gate_scores"].update({"01": {"0": 1.0}}), "E-FORMAT: .*'01'"),
    "a layer of 5,000 digits": (lambda c: c["gate_scores"].update({"9" * 5000: {}}), "not a layer"),
}


@pytest.mark.parametrize("kind", BAD_SCORES)
def test_a_bad_score_file_is_refused(kind, tmp_path):
    change, message = BAD_SCORES[kind]
    with pytest.raises(Refusal, match=message):
        esft.Scores.load(score_file(tmp_path / "scores.json", change))


def test_scores_of_another_model_are_refused(mixture, host, tmp_path):
    path = score_file(tmp_path / "scores.json", lambda content: None)
    with pytest.raises(Refusal, match=r"E-KEYS: .*missing \[0\], surplus \[\]"):
        esft.Scores.load(path, mixture("Olmoe", num_hidden_layers=3))
    with pytest.raises(Refusal, match=r"E-SHAPE: .*2 experts a layer, the model has 8"):
        esft.Scores.load(path, mixture("DeepseekV2", num_hidden_layers=3))
    with pytest.raises(Refusal, match=r"E-MODEL: .*is dense"):
        esft.Scores.load(path, host())


BAD_SELECTIONS = {
    '{"experts": {"1": [3, 3]}}': "E-RANGE: layer 1: expert 3 stands twice",
    '{"experts": {"1": [-1]}}': "E-RANGE: layer 1: expert -1 is negative",
    '{"experts": {"1": [1.5]}}': "E-TYPE: layer 1: expert 1.5",
    '{"experts": {"1": []}}': "E-DATA: layer 1: no expert is selected",
    '{"experts": {}}': "E-DATA: the selection names no layer",
    '{"experts": {"1": 3}}': "E-FORMAT: .*layer 1",
    '{"experts": {"1": [3], "01": [4]}}': "E-FORMAT: .*'01' is not a layer",
    '{"experts": ' + "[" * 100_000: "E-FORMAT: .*nested too deeply",
    '{"experts": {"one": [3]}}': "E-FORMAT: .*'one'",
    '{"experts": {"1": [3], "1": [2]}}': "E-FORMAT: .*twice",
    '{"experts": {"1": [3]}, "shared_experts": "no"}': "E-FORMAT: .*true or false",
    '{"experts": {"1": [3]}, "shared": true}': "E-FORMAT: .*expected experts",
    "{": "E-FORMAT: .*is not JSON",
    "[]": "E-FORMAT: .*expected a JSON object",
}


@pytest.mark.parametrize("text", BAD_SELECTIONS, ids=lambda text: text[:50])
def test_a_bad_expert_file_is_refused(text, tmp_path):
    (tmp_path / "experts.json").write_text(text)
    with pytest.raises(Refusal, match=BAD_SELECTIONS[text]):
        esft.Selection.load(tmp_path / "experts.json")
    with pytest.raises(Refusal, match="E-NOFILE"):
        esft.Selection.load(tmp_path / "none.json")
