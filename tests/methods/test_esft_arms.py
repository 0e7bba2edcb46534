"""The arms of ESFT: names, arguments, data, costs, baselines; the tables of them and of tasks."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset

from moebook import data
from moebook.data import hub, tasks
from moebook.experiments import esft as arms
from moebook.experiments.esft import Arm
from moebook.experiments.specialists import cost
from moebook.methods import esft
from moebook.models import anatomy, fingerprint
from tests.experiments import notebooks
from tests.refusals import refused

TRIED = {"gate": [0.1, 0.3], "token": [0.2], "lora": [4, 8], "groups": [2]}
USUAL = {"gate": 0.1, "token": 0.2, "lora": 8}


SWEPT = {
    "thresholds_gate": "0.1,0.3",
    "thresholds_token": "0.2",
    "ranks": "4,8",
    "group_sizes": "2",
}


def test_a_sweep_is_read():
    read = arms.sweep(SWEPT)
    assert read == TRIED
    assert all(isinstance(rank, int) for rank in read["lora"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ranks", "4,8,16", "thresholds_gate is .* and ranks '4,8,16'"),
        ("ranks", "4,8.5", "ranks lists 8.5: expected whole numbers"),
        ("ranks", "8,4", "ranks is '8,4', expected rising numbers"),
        ("thresholds_gate", "0.1,nan", "thresholds_gate lists 'nan'"),
        ("thresholds_token", "", "thresholds_token is '', expected"),
        ("thresholds_token", "0.2,0.2", "thresholds_token lists 0.2 twice"),
    ],
)
def test_a_sweep_that_does_not_rise_or_pair_is_refused(name, text, message):
    refused(f"E-RANGE: {message}", arms.sweep, {**SWEPT, name: text})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ranks", "0,8", r"ranks lists 0: expected numbers in \[1, 512]"),
        ("ranks", "8,600", "ranks lists 600: expected"),
        ("thresholds_gate", "0.1,1.5", "thresholds_gate lists 1.5: expected"),
        ("group_sizes", "1,2", "group_sizes lists 1: expected"),
        ("thresholds_token", "0.3,0.30000000001", "thresholds_token lists 0.3 twice"),
    ],
)
def test_a_size_that_no_arm_can_have_is_refused_where_parameters_are_read(
    name, text, message
):
    refused(f"E-RANGE: -p: {message}", notebooks.given, "esft", **{name: text})


def test_every_arm_has_a_name_and_none_is_trained_twice():
    known = arms.arms(TRIED, USUAL)
    main = [
        "fft",
        "lora",
        "lora_attention",
        "token",
        "random_token",
        "gate",
        "random_gate",
    ]
    assert list(known) == [*main, "gate-0.3", "lora-4", "fft-g2", "gate-g2"]
    assert [name for name, arm in known.items() if arm.main] == main
    assert known["gate-0.3"] == Arm("gate", 0.3, main=False)
    assert known["random_gate"] == Arm("gate", 0.1, random=True)
    assert known["gate-g2"] == Arm("gate", 0.1, group=2, main=False)
    assert known["lora-4"].size == 4
    assert known["lora"].size == 8
    by_size = {
        "gate": ["gate", "gate-0.3"],
        "token": ["token"],
        "lora": ["lora-4", "lora"],
    }
    assert arms.budget(TRIED, USUAL) == by_size
    usual = USUAL | {"gate": 0.2}
    both = ["gate-0.1", "gate-0.3"]
    assert arms.budget(TRIED, usual)["gate"] == both
    assert set(both) <= set(arms.arms(TRIED, usual))


def test_main_arms_run_on_every_task_and_get_the_experts_of_their_own_score(
    mixture, batch
):
    def planned(some, seed=0):
        return arms.plan(some, *measured, preset="fixed", scale=3.0, seed=seed)

    model = mixture("DeepseekV2", num_experts_per_tok=4)  # which suits groups of two
    batches = {"one": [batch], "two": [{key: part[:1] for key, part in batch.items()}]}
    scores = {task: esft.measure(model, drawn) for task, drawn in batches.items()}
    measured = model, batches, scores, esft.cooccurrence(model, [batch])
    known = arms.arms(TRIED, USUAL)
    base = fingerprint(model)
    plan = planned(known)
    for name, arm in known.items():
        trained_on = [task for other, task in plan if other == name]
        assert trained_on == (["one", "two"] if arm.main else ["one"])
    assert plan["fft", "two"] == plan["fft-g2", "one"] == {}
    assert plan["lora", "one"] == {"rank": 8, "scale": 3.0, "attention": False}
    assert plan["lora-4", "one"] == {"rank": 4, "scale": 3.0, "attention": False}
    for name, p in {"token": 0.2, "gate": 0.1, "gate-0.3": 0.3}.items():
        config = esft.Config(score=known[name].method, threshold=p)
        assert plan[name, "one"] == {"selection": esft.select(scores["one"], config)}
    drawn = plan["random_gate", "two"]["selection"]
    like = plan["gate", "two"]["selection"]
    assert drawn == esft.random_selection(like, scores["two"].experts, "gate/two/0")
    for name in known:  # asked for alone, an arm gets what it gets among all
        alone = planned({name: known[name]})
        assert alone == {key: given for key, given in plan.items() if key[0] == name}
    other = planned(known, seed=5)
    assert all(key[0].startswith("random") for key in plan if plan[key] != other[key])
    assert fingerprint(model) == base
    groups = esft.group(model, measured[-1], 2)
    config = esft.Config(score="gate", threshold=0.1)
    want = esft.select(esft.measure(model, batches["one"]), config, groups=groups)
    assert plan["gate-g2", "one"] == {"selection": want}


def test_lora_starts_at_the_base_and_has_the_ranks_asked_for(family, mixture, batch):
    base = mixture(family)
    model = esft.lora(mixture(family), rank=4)
    assert torch.equal(model(**batch).logits, base(**batch).logits)
    experts = len(anatomy(base).layers[1].router.weight)
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name), name
        if ".lora_" in name:
            rank = 4 * experts if ".mlp.experts." in name else 4
            assert rank in parameter.shape and parameter.grad is not None, name


def test_lora_on_attention_alone_leaves_every_expert_frozen(mixture):
    model = esft.lora(mixture("DeepseekV2"), rank=2, attention=True)
    free = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(free) == 3 * 4 * 2
    assert all(".self_attn." in name for name in free)


def test_an_arm_starts_on_a_copy_with_what_it_trains(mixture, batch):
    model = mixture("DeepseekV2", num_experts_per_tok=4)
    together = esft.cooccurrence(model, [batch])
    drawn = {"one": [batch]}
    scores = {"one": esft.measure(model, [batch])}
    base = fingerprint(model)
    known = arms.arms(TRIED, USUAL)
    plan = arms.plan(
        known, model, drawn, scores, together, preset="fixed", scale=2.0, seed=0
    )
    sizes = {}
    for (name, _), given in plan.items():
        tuned = arms.start(model, known[name], given, together)
        sizes[name] = sum(p.numel() for p in tuned.parameters() if p.requires_grad)
    assert max(sizes, key=sizes.get).startswith("fft")
    assert sizes["lora_attention"] < sizes["lora"]
    assert sizes["gate"] <= sizes["gate-0.3"]
    assert fingerprint(model) == base
    assert not hasattr(model, "esft")


def test_lora_adapts_all_but_norms_and_routers_and_multiplies_by_the_scale(mixture):
    model = esft.lora(mixture("DeepseekV2"), rank=2, scale=3.0)
    free = {name for name, p in model.named_parameters() if p.requires_grad}
    layers = [{n.split(".")[4] for n in free if f"layers.{i}.mlp" in n} for i in (0, 1)]
    assert layers == [
        {"gate_proj", "up_proj", "down_proj"},
        {"experts", "shared_experts"},
    ]
    assert sum(".self_attn." in name for name in free) == 3 * 4 * 2
    assert not any("norm" in name or ".mlp.gate." in name for name in free)
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
    x = torch.randn(5, 32)
    product = x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 3 * product)


def test_baselines_refuse_what_is_not_a_plain_mixture(mixture, host):
    special = esft.specialise(
        mixture("Mixtral"), esft.Selection(experts={0: (0,), 1: (0,)})
    )
    for message, model in {
        "E-MODEL: the model holds LoRA or": esft.lora(mixture("Mixtral")),
        "E-MODEL: the model is specialised": special,
        "E-MODEL: LlamaForCausalLM is dense": host(),
    }.items():
        for arm in (esft.full, esft.lora):
            refused(message, arm, model)
    for changes, message in (
        ({"rank": 0}, "rank is 0"),
        ({"scale": math.nan}, "scale is nan"),
    ):
        refused(f"E-RANGE: {message}", esft.lora, mixture("Mixtral"), **changes)
    message = "E-RANGE: the rank of LoRA is 33, expected at most 32, the largest rank"
    refused(message, esft.lora, mixture("Mixtral"), rank=33)
    esft.lora(mixture("Mixtral"), rank=32)


def test_training_rows_are_as_many_as_a_task_has_or_as_asked_for(monkeypatch):
    asked = {}
    pin = "a" * 40
    monkeypatch.setattr(
        hub, "load", lambda name, **more: asked.update({name: more}) or [name]
    )
    names = ["licence", "metamathqa"], ["gcd", "slimorca"]
    drawn = esft.rows(*names, 5000, revisions=f"slimorca={pin}", seed=3)
    assert asked == {
        "metamathqa": {"revision": None, "size": 5000, "seed": 3},
        "slimorca": {"revision": pin, "size": 10000, "seed": 3},
    }
    whole = tasks.find("licence").available("train")
    assert drawn["licence"] == tasks.rows("licence", "train", whole, 3)
    assert len(esft.rows(["licence"], ["licence"], 7, seed=0)["licence"]) == 7
    rest = esft.rows(["licence"], [], 5000, split="rest", seed=3)["licence"]
    data.refuse_leak(rest, tasks.rows("licence", "fresh", 400))
    assert len(rest) == tasks.find("licence").available("rest")


def test_two_sources_of_one_name_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "load", lambda name, **_: [name])
    one, other = own_task(tmp_path / "one"), own_task(tmp_path / "other")
    for names in (([one, other], []), (["gcd", one], ["sums", other])):
        words = "E-DATA: two sources are called 'own_teams', expected a name each"
        refused(words, esft.rows, *names, 5, seed=0)
    words = "E-DATA: 'slimorca' is a target and alignment data"
    refused(words, esft.rows, ["slimorca"], ["gcd", "slimorca"], 5, seed=0)
    # The same one is no other.
    drawn = esft.rows([one, "gcd", one], [one, "gcd"], 2, seed=0)
    assert {name: len(rows) for name, rows in drawn.items()} == {
        "own_teams": 2,
        "gcd": 2,
    }


def own_task(folder):
    folder.mkdir()
    rows = [{"prompt": f"{folder.name} {n}", "answer": "a"} for n in range(9)]
    (folder / "teams.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tasks.Task.from_jsonl(folder / "teams.jsonl")


@pytest.mark.parametrize(
    ("share", "count"), [(0.0, 0), (0.5, 10), (0.2, 3), (0.75, 30)]
)
def test_the_mix_has_the_share_of_alignment_data_asked_for(share, count):
    task, alignment = (
        Dataset.from_dict({"id": range(*ends)}) for ends in [(10,), (1000, 1030)]
    )
    texts = Dataset.from_dict({"id": list(map(str, alignment["id"]))})
    words = "E-DATA: the task's rows and the alignment data do not go together"
    if count:
        refused(words, esft.mix, task, texts, share, seed=0)
    mixed = sorted(esft.mix(task, alignment, share, seed=0)["id"])
    assert mixed[:10] == list(range(10))
    assert len(mixed) - 10 == len({*mixed[10:]} & {*range(1000, 1030)}) == count
    refused("E-RANGE: share is 1", esft.mix, task, alignment, 1.0, seed=0)
    refused(
        "E-DATA: 30 alignment rows needed, 10 given", esft.mix, task, task, 0.75, seed=0
    )


def test_costs_are_those_of_the_tensors_that_train(mixture, rows):
    recipe = {"batch": 4, "seed": 0, "pad_id": 2, "steps": 2, "lr": 0.01}
    whole = sum(p.nbytes for p in mixture("DeepseekV2").parameters())
    full = cost(esft.full(mixture("DeepseekV2")), rows, **recipe)
    assert full["storage"] == whole
    assert full["optimizer"] == 2 * whole
    assert full["peak_memory"] > full["resident"] + 3 * whole
    model = esft.specialise(
        mixture("DeepseekV2"), esft.Selection(experts={1: (0, 1), 2: (2,)})
    )
    chosen = sum(p.nbytes for p in esft.trained(model).values())
    small = cost(model, rows, **recipe)
    assert small["storage"] == chosen
    assert small["optimizer"] == 2 * chosen
    assert small["resident"] == pytest.approx(full["resident"] + chosen)
    assert small["peak_memory"] < full["peak_memory"]
    assert small["time"] > 0


def scores(*rows):
    """Gate scores of layers; by tokens the last expert alone is ever chosen."""
    gate = {layer: torch.tensor(row).double() for layer, row in enumerate(rows)}
    token = {layer: torch.eye(len(row)).double()[-1] for layer, row in gate.items()}
    return esft.Scores(token, gate)


def test_half_mass_concentration_overlap_and_switches_of_scores_worked_by_hand():
    given = scores([0.6, 0.2, 0.1, 0.1], [0.25] * 4, [0.1, 0.4, 0.2, 0.3])
    assert esft.half_mass(given) == {0: 0.25, 1: 0.5, 2: 0.5}
    # Half of 0.4 is 0.2: the best has 0.12, the best two have 0.22.
    assert esft.half_mass(scores([0.08, 0.1, 0.1, 0.12])) == {0: 0.5}
    shares = esft.concentration(scores([0.1, 0.2, 0.1, 0.0], [0.0, 0.0, 0.0, 1.0]))
    # Each layer ranks its experts by itself; then the mean.
    assert shares == pytest.approx([0.75, 0.125, 0.125, 0])
    both = {"a": scores([0.4, 0.3, 0.2, 0.1]), "b": scores([0.1, 0.2, 0.3, 0.4])}
    table = esft.overlap(both, both, 2)
    assert table.T.to_dict() == {"a": {"a": 2, "b": 0}, "b": {"a": 0, "b": 2}}
    first = scores([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1])
    second = scores([0.1, 0.4, 0.3, 0.2], [0.3, 0.4, 0.1, 0.2])
    # One expert in the first layer, two in the second: their mean.
    assert esft.overlap({"a": first}, {"b": second}, 2).loc["a", "b"] == 1.5
    # Layers are compared by their numbers, in whatever order they come.
    turned = esft.Scores(
        *[dict(reversed(part.items())) for part in (first.token, first.gate)]
    )
    assert esft.overlap({"a": first}, {"a": turned}, 1).loc["a", "a"] == 1
    fewer = {"b": scores([0.6, 0.4], [0.6, 0.4])}
    refused("E-SHAPE: .*'b' are of 2 experts", esft.overlap, {"a": first}, fewer, 1)
    # Two experts reach 0.6, whichever is the better; of the total of 0.8 that one does alone.
    # In the second layer expert 0 alone reaches 0.6, of whatever total.
    alike = [0.7, 0.1, 0.0]
    pooled = {
        "tokens": scores([0.5, 0.2, 0.1], alike),
        "samples": scores([0.1, 0.5, 0.2], alike),
    }
    table = esft.switches(pooled, {"gate": 0.6})
    # In the first, experts 0 and 1 before; then 1 and 2, 0 alone, 1 alone.
    differ = {"within_samples": 2, "share_of_the_total": 1, "paper": 1}
    assert table["experts that differ"].loc["gate"].to_dict() == differ
    assert (
        table[["layers that differ", "share of layers"]].to_numpy().tolist()
        == [[1, 0.5]] * 3
    )


def test_experts_are_counted_by_layer_and_shares_gathered_by_score_and_place():
    chosen = {"token": {1: (3, 1), 2: (0,)}, "gate": {1: (2,), 2: (5, 4, 1)}}
    table = esft.counts(
        {(s, "a"): esft.Selection(experts=e) for s, e in chosen.items()}
    )
    assert list(table) == [1, 2]
    assert list(table.index) == [
        ("token", "a"),
        ("gate", "a"),
    ]
    assert table.to_numpy().tolist() == [[2, 1], [1, 3]]
    index = pd.MultiIndex.from_product([["token", "gate"], ["a", "b"]])
    shares = pd.DataFrame(np.arange(16.0).reshape(4, 4) / 16, index, [1, 2, 3, 4])
    gathered = {
        name: (16 * part).tolist() for name, part in esft.spread(shares).items()
    }
    assert list(gathered) == ["token", "gate", "layers/middle", "layers/outer"]
    assert gathered["token"] == list(range(8))
    assert gathered["gate"] == list(range(8, 16))
    assert gathered["layers/middle"] == [
        2,
        6,
        10,
        14,
    ]  # of four layers, the first third has two
    assert gathered["layers/outer"] == [4 / 3 + 4 * row for row in range(4)]
    refused("E-RANGE: shares: expected `counts` over E", esft.spread, 16 * shares)
    single = esft.spread(
        pd.DataFrame([[0.5]], pd.MultiIndex.from_tuples([("token", "a")]), [1])
    )
    assert single["layers/middle"].tolist() == [0]
    assert single["layers/outer"].tolist() == [0.5]


@pytest.mark.parametrize("order", [(1, 2, 10, 11), (1, 10, 11, 2), (11, 10, 2, 1)])
def test_layers_are_counted_and_spread_by_number_in_whatever_order_they_come(
    order, tmp_path
):
    """A JSON with sorted keys has layer 10 before layer 2."""
    chosen = {layer: list(range(layer)) for layer in order}
    form = {"shared_experts": False, "non_expert_modules": False}
    path = tmp_path / "experts.json"
    path.write_text(json.dumps({"experts": chosen, **form}))
    table = esft.counts({("token", "a"): esft.Selection.load(path)})
    assert list(table) == [1, 2, 10, 11]
    gathered = esft.spread(table / 16)
    assert (16 * gathered["token"]).tolist() == [1, 2, 10, 11]
    # Of four layers, the first third has two: 1 and 2, 10, 11.
    assert (16 * gathered["layers/middle"]).tolist() == [10]


@pytest.mark.parametrize(
    ("tokens", "samples"), [((0, 1), (0,)), ((0,), (0, 1)), ((0,), (1,))]
)
def test_switches_refuse_scores_of_other_layers(tokens, samples):
    whole = scores([0.5, 0.2, 0.3], [0.1, 0.5, 0.4])
    pooled = {}
    for name, kept in {"tokens": tokens, "samples": samples}.items():
        token = {layer: whole.token[layer] for layer in kept}
        pooled[name] = esft.Scores(token, {layer: whole.gate[layer] for layer in kept})
    words = "E-KEYS: the scores of pooling '.*' are of other layers than those of"
    refused(words, esft.switches, pooled, {"gate": 0.6})


def test_an_arms_average_counts_each_task_once_whatever_its_rows():
    correct = {
        ("fft", "a"): [1, 1, 1, 0.0],
        ("fft", "b"): [0.0, 0],
        ("lora", "a"): [1, 0, 0, 0.0],
    }
    tables = {
        key: pd.DataFrame(
            {"task": key[1], "domain": key[1], "correct": rows, "nll": 1.0}
        )
        for key, rows in correct.items()
    }
    joined = esft.by_arm(tables, ["a", "b"])
    assert joined["fft"].score.mean() == pytest.approx((0.75 + 0.0) / 2)
    assert joined["fft"].tuned.tolist() == ["a"] * 4 + ["b"] * 2
    assert list(joined) == ["fft", "lora"]
    assert joined["lora"].score.mean() == 0.25
    # Its own output, read back.
    back = {("fft", "a"): joined["fft"], ("lora", "a"): tables["lora", "a"]}
    words = r"E-DATA: tables: that of \('fft', 'a'\) has a column 'tuned' already"
    refused(words, esft.by_arm, back, ["a", "b"])
    named = tables["lora", "a"].assign(arm="lora")
    words = "has a column 'arm' already"
    refused(words, esft.by_arm, {("lora", "a"): named}, ["a"])


def test_what_is_left_is_compared_at_equal_target_accuracy():
    # One arm reaches 0.8 and keeps 0, another 0.4 and keeps half: the first had 3/4 left at 0.4.
    solved = np.array([0.0, 0.4, 0.8])
    other = np.array([0.0, 0.2, 0.4])
    one = solved, np.array([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0.0]])
    two = other, np.array([[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0.0]])
    assert esft.at_equal_accuracy(one, two).tolist() == [1, 0, 0, 0]
    assert esft.at_equal_accuracy(two, one).tolist() == [-1, 0, 0, 0]
    assert esft.at_equal_accuracy(one, one).tolist() == [0] * 4
    # Half way between two checkpoints: half of each; one that is beaten in both does not count.
    early = (
        np.array([0.0, 0.1, 0.2]),
        np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1.0]]),
    )
    assert esft.at_equal_accuracy(one, early).tolist() == [0, 0, 0, -0.5]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("solved", "words"),
    [
        (np.array([0.0, 40.0]), "E-RANGE: .*outside \\[0, 1\\], expected shares"),
        (np.array([-0.1, 0.4]), "E-RANGE: .*outside \\[0, 1\\], expected shares"),
        ([0.0, 0.4], "E-TYPE: .* expected an instance of ndarray"),
    ],
)
def test_fronts_of_other_units_or_kinds_are_not_compared(solved, words, place):
    fronts = [(np.array([0.0, 1.0]), np.ones((2, 3)))] * 2
    assert esft.at_equal_accuracy(*fronts).tolist() == [0] * 3
    fronts[place] = (solved, np.ones((2, 3)))
    refused(words, esft.at_equal_accuracy, *fronts)


def test_a_front_is_read_off_evaluations_with_general_tasks_of_equal_weight():
    asked = ["t", "t", "a", "b", "b"]
    correct = ([0, 0, 1, 1, 1], [1, 0, 1, 0, 1])
    tables = [
        pd.DataFrame({"task": asked, "asked": asked, "domain": "d", "correct": hits})
        for hits in correct
    ]
    solved, scores = esft.front(tables, "t")
    assert solved.tolist() == [0, 0.5]
    assert scores.mean(axis=1).tolist() == pytest.approx([1, 0.75])
    assert scores.shape == (2, 3)


def test_layers_are_described_as_they_are(mixture):
    model = mixture("DeepseekV2")
    table = esft.layers(model)
    described = table[["kind", "width", "routed experts"]].to_numpy().tolist()
    assert described == [["dense", 40, 0], ["sparse", 16, 8], ["sparse", 16, 8]]
    blocks = []
    for layer in anatomy(model).layers:
        blocks.append(sum(part.numel() for part in layer.block.parameters()))
    assert table.parameters.tolist() == blocks
