"""One base, one budget: equal starts, equal budgets, and combinations that are what they say."""

import json
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from moebook import data, models, together, training
from moebook.analysis.routers import logit_scale
from moebook.experiments import crafts
from moebook.experiments.budgets import train
from moebook.experiments.together import arms
from moebook.methods import esft, pesc, rocket, upcycling
from moebook.methods.rocket.loras import Lora, attached, linears
from moebook.models.anatomy import sparse_layers
from moebook.nn import SplitExperts, routers
from moebook.together import budget, combining
from moebook.training.precision import widen
from tests.methods.conftest import build
from tests.refusals import refused

TASKS = ("gcd", "python_eval", "isa", "kinship", "equations", "intent_json")
DENSE, SPARSE = (arms(sparse=sparse) for sparse in (False, True))
EVERY = [*(("nano", name) for name in DENSE), *(("nano-moe", name) for name in SPARSE)]
# Arms made of what other arms are made of as well.
ALIKE = ["trsu", "crsu", "pesc_crsu", "pesc_rocket", "token", "random_gate"]
BUDGETS = {"nano": 158_000, "nano-moe": 397_000}  # the notebook's


def once(cases, alike):
    """Cases as parameters; an arm that is like another one runs in `make soak`."""
    params = []
    for case in cases:
        marks = [pytest.mark.soak] if case[-1] in alike else []
        params.append(pytest.param(*case, marks=marks))
    return params


@pytest.fixture(scope="module")
def setups():
    """The notebook's setup on both bases, with few rows."""

    def make(base):
        model, tokenizer = models.load(base)
        rows = {name: data.tasks.rows(name, "train", 20) for name in TASKS}
        sizes = together.Config(parameters=BUDGETS[base], shots=6)
        recipe = {"batch": 4, "schedule": "constant", "clip": 1.0}
        return together.Setup(model, tokenizer, rows, sizes, recipe=recipe)

    models.register_experts()
    made = {base: make(base) for base in BUDGETS}
    made["nano-moe"].base.set_experts_implementation("moebook")
    return made


@pytest.fixture(scope="module")
def dense(setups):
    return setups["nano"]


def bank(setup, arm, fill=0.02):
    """A bank for an arm, with what a training may have left in it."""
    torch.manual_seed(0)
    layers = linears(setup.base, arm.bank).items()
    rank = crafts.bank_rank(setup, arm.bank, chosen=arm.chosen, gates=arm.gates)
    loras = {}
    for name in setup.rows:
        down = {}
        up = {}
        for path, part in layers:
            down[path] = fill * torch.randn(rank, part.in_features)
            up[path] = fill * torch.randn(part.out_features, rank)
        loras[name] = Lora(name, rank, float(rank), down, up)
    return loras


def built(setup, arm):
    return arm.make(setup, deepcopy(setup.base), bank(setup, arm) if arm.bank else {})


def logits(model, setup):
    ids = setup.batches(setup.encoded)[0]["input_ids"][:, :24]
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize(("base", "name"), once(EVERY, ALIKE))
def test_an_arm_trains_what_the_budget_says_and_starts_as_the_base(setups, base, name):
    setup = setups[base]
    arm = (DENSE if base == "nano" else SPARSE)[name]
    model = built(setup, arm)
    if arm.sized:
        assert abs(combining.trained(model) / BUDGETS[base] - 1) < 0.02
    if not arm.bank:
        wanted = logits(setup.base, setup)
        torch.testing.assert_close(logits(model, setup), wanted, atol=1e-4, rtol=1e-4)


def test_flops_are_those_of_pytorchs_counter(dense):
    model = deepcopy(dense.base)
    # The counter does not know a CPU's attention.
    model.set_attn_implementation("eager")
    batch = dense.batches(dense.encoded)[0]
    ours = budget.measured(model, [batch], None)
    with FlopCounterMode(display=False) as theirs:
        model(**batch).loss.backward()
    assert ours == theirs.get_total_flops() > 0


def test_flops_of_attention_and_of_onednn_are_counted(dense):
    batch = dense.batches(dense.encoded)[0]
    eager = deepcopy(dense.base)
    eager.set_attn_implementation("eager")
    fused, plain = (
        budget.measured(model, [batch], None) for model in (dense.base, eager)
    )
    scores = batch["input_ids"].shape[1] * batch["input_ids"].numel() * 2 * 128
    # The backward pass of the fused one computes the scores of 4 layers again.
    assert fused - plain == 4 * scores
    left = torch.randn(256, 256)
    right = torch.randn(256, 256)
    with budget.Flops() as counted:
        torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    assert counted.total == 2 * 256**3


def test_a_price_holds_for_a_whole_training(dense):
    arm = DENSE["pesc"]
    model = built(dense, arm)
    order = dense.batches(dense.encoded)
    price = budget.price("flops", model, order, arm.penalty)
    with budget.Flops() as counted:
        spent = dense.fit(model, dense.encoded, lr=1e-4, steps=10, penalty=arm.penalty)
    assert counted.total == pytest.approx(sum(map(price, range(10))), rel=0.005)
    price = budget.price("tokens", model, order, None)
    assert sum(map(price, range(10))) == spent.tokens[-1]


def test_a_price_is_measured_where_batches_differ_most(dense):
    """Most batches of one shape would not tell what a token costs from what a row does."""
    model = deepcopy(dense.base)
    lengths = [*(10 * [48]), 3, 90]
    ids = [torch.arange(3, 3 + length).tolist() for length in lengths for _ in range(4)]
    rows = {"input_ids": ids, "labels": ids, "length": list(map(len, ids))}
    # In the order of this seed the first batches do not tell them apart.
    order = replace(dense, seed=2).batches(Dataset.from_dict(rows))
    assert len({order[step]["input_ids"].shape for step in range(6)}) == 1
    price = budget.price("flops", model, order, None)
    for step in range(order.per_epoch):
        spent = budget.measured(model, [order[step]], None)
        assert price(step) == pytest.approx(spent, rel=0.01)


@pytest.mark.parametrize(
    ("amount", "steps"), [(0.1, 1), (14.9, 1), (15.1, 2), (29, 3), (44, 4)]
)
def test_the_nearest_number_of_steps_is_bought(amount, steps):
    assert budget.affordable(lambda step: 10.0, amount) == (steps, 10.0 * steps)


def test_the_limit_of_steps_is_judged_by_more_than_the_first(monkeypatch):
    monkeypatch.setattr(budget, "MOST", 1000)
    rising = budget.affordable(lambda step: 1.0 if step == 0 else 500.0, 2501.0)
    assert rising == (6, 2501.0)
    for cost in (lambda step: 10.0, lambda step: 1e6 if step == 0 else 1e-9):
        words = "E-RANGE: budget is 2000000.0, it buys more than 1,000 steps of"
        refused(words, budget.affordable, cost, 2e6)


def test_what_is_measured_leaves_each_module_its_own_mode(dense):
    model = deepcopy(dense.base).eval()
    model.model.layers[0].mlp.train()
    modes = [module.training for module in model.modules()]
    budget.measured(model, [dense.batches(dense.encoded)[0]], None)
    assert [module.training for module in model.modules()] == modes


def test_what_is_measured_leaves_the_gradients_that_a_model_held(dense):
    model = deepcopy(dense.base).requires_grad_(True)
    first, *others = model.parameters()
    held = first.grad = torch.ones_like(first)
    order = dense.batches(dense.encoded)
    fresh = budget.measured(deepcopy(dense.base), [order[0]], None)
    assert budget.measured(model, [order[0]], None) == fresh
    assert first.grad is held
    assert torch.equal(held, torch.ones_like(first))
    assert all(other.grad is None for other in others)


def test_flops_of_a_model_that_is_frozen_whole_are_refused(dense):
    model = deepcopy(dense.base).requires_grad_(False)
    order = dense.batches(dense.encoded)
    words = "E-MODEL: no parameter requires a gradient, so a step has no backward pass"
    refused(words, budget.price, "flops", model, order, None)
    assert budget.price("tokens", model, order, None)(0) == order.tokens(0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pesc_esft", "flops"),
        ("rocket", "tokens"),
        pytest.param("rocket", "flops", marks=pytest.mark.soak),
    ],
)
def test_stages_share_one_budget(dense, monkeypatch, name, kind):
    arm = DENSE[name]
    picked = TASKS[:4]
    shots = {each: dense.mixed[3 * i : 3 * i + 3] for i, each in enumerate(picked)}
    monkeypatch.setattr(crafts, "chosen_loras", lambda *_: (picked, shots))
    order = dense.batches(dense.encoded)
    price = budget.price(kind, deepcopy(dense.base), order, None)
    costs = [price(step) for step in range(6)]
    done = train(dense, arm, lr=1e-3, amount=sum(costs), kind=kind)
    assert abs(done.spent - sum(costs)) <= max(costs)
    assert len(done.histories) == 1 + bool(arm.later)
    assert set(done.bank) == (set(TASKS) if arm.bank else set())


@pytest.fixture(scope="module")
def states(dense):
    """What TRSU's and CRSU's routers are centroids of: each domain's tokens, and all tokens."""
    names = sorted({row["domain"] for row in dense.mixed})
    groups = {}
    for name in names:
        groups[name] = [row for row in dense.mixed if row["domain"] == name]
    kinds = {"trsu": groups, "crsu": {"all": dense.mixed}}
    return {
        kind: dense.represent("attention_output", each) for kind, each in kinds.items()
    }


@pytest.mark.parametrize(
    "name",
    once(
        [("su",), ("trsu",), ("crsu",), ("esft",), ("pesc_trsu",), ("pesc_crsu",)],
        alike=["crsu", "pesc_trsu"],
    ),
)
def test_an_arms_routers_start_as_its_name_says_but_for_their_length(
    dense, states, name
):
    kind = "su" if name == "esft" else name[-4:]
    count = 8 if "pesc" in name else 4
    source = dense.base if kind == "su" else states[kind]
    wanted = getattr(upcycling, kind)(source, count).weights
    weights = [router.weight.detach() for router in routers(built(dense, DENSE[name]))]
    for weight, start, inputs in zip(weights, wanted, dense.inputs.points, strict=True):
        assert weight.shape == start.shape
        assert directed(weight, start)
        assert logit_scale(inputs @ weight.T) == pytest.approx(1)


def directed(one, other):
    """Whether two tensors differ by a factor alone."""
    return F.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 1 - 1e-5


def test_loras_that_read_what_the_ffn_puts_out_become_adapters_exactly(dense):
    config = pesc.Config.preset(
        "fixed", experts=1, top_k=1, adapter_width=6, host="frozen"
    )
    one = next(iter(bank(dense, DENSE["pesc_bank"]).values()))
    base = dense.base
    rank = 3
    for path, weight in ((p, base.get_submodule(p).weight.detach()) for p in one.down):
        # Rows in W's row space.
        one.down[path] = 0.1 * torch.randn(rank, len(weight)) @ weight
        one.up[path] = 0.1 * torch.randn(len(weight), rank)
    lora = Lora("one", rank, 2.0 * rank, one.down, one.up)
    made = dense.as_adapters([lora])
    torch.testing.assert_close(made.explained, torch.ones_like(made.explained))
    model = combining.start_adapters(pesc.prepare(deepcopy(base), config), made)
    path = next(iter(one.down))
    beside = path.replace("down_proj", "up_proj")
    down = {**one.down, beside: one.down[path]}
    up = {**one.up, beside: one.up[path]}
    wide = Lora("wide", rank, 2.0 * rank, down, up)
    refused(f"E-KEYS: 'wide' adapts {beside} too", dense.as_adapters, [wide])
    with attached(base, [lora]):
        expected = logits(base, dense)
    assert (expected - logits(base, dense)).abs().max() > 0.01
    torch.testing.assert_close(logits(model, dense), expected, atol=2e-4, rtol=1e-3)
    loose = dense.as_adapters([*bank(dense, DENSE["pesc_bank"]).values()]).explained
    assert (loose < 0.99).all()
    assert (loose > 0).all()
    ids = torch.arange(3, 3 + base.config.hidden_size)[None]
    few = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    told = f"E-DATA: .* hold {ids.numel()} real tokens, expected more than"
    refused(told, combining.as_adapters, base, [lora], [few])


@pytest.mark.parametrize("name", ["pesc_bank", "pesc_rocket"])
def test_adapter_i_is_lora_i_and_its_router_reads_its_shots(dense, monkeypatch, name):
    picked = (
        TASKS if name == "pesc_bank" else ("isa", "intent_json", "gcd", "equations")
    )
    shots = {each: dense.mixed[3 * i : 3 * i + 3] for i, each in enumerate(picked)}
    monkeypatch.setattr(crafts, "chosen_loras", lambda *_: (picked, shots))
    layers = sparse_layers(built(dense, DENSE[name]))
    loras = bank(dense, DENSE[name])
    assert [len(layer.router.weight) for layer in layers] == [len(picked)] * 4
    for place, each in enumerate(picked):
        alone = dense.as_adapters([loras[each]])
        for layer in layers:
            made = layer.experts.down[place], layer.experts.up[place]
            wanted = alone.down[layer.index, 0], alone.up[layer.index, 0]
            torch.testing.assert_close(made, wanted)
    if name == "pesc_rocket":
        read = [
            dense.represent("ffn_input", {"all": shots[each]}).points.mean(1)
            for each in picked
        ]
        for layer in layers:
            assert directed(
                layer.router.weight.detach(), torch.stack(read, 1)[layer.index]
            )


def most_used(setup, model):
    """By layer the fewest experts that get half of all gates on the arm's own data."""
    used = {}
    for layer, row in esft.measure(model, setup.samples).gate.items():
        best = row.argsort(descending=True)
        used[layer] = sorted(
            best[: 1 + int((row[best].cumsum(0) < row.sum() / 2).sum())].tolist()
        )
    return used


@pytest.mark.parametrize("name", ["esft", "pesc_esft"])
def test_after_half_of_the_budget_the_experts_train_that_are_used_most(dense, name):
    arm = DENSE[name]
    half = []

    def later(setup, model):
        half.append(deepcopy(model))
        return arm.later(setup, model)

    amount = sum(dense.batches(dense.encoded).tokens(step) for step in range(8))
    done = train(dense, replace(arm, later=later), lr=1e-2, amount=amount)
    first, chosen = (most_used(dense, model) for model in (built(dense, arm), half[0]))
    assert first != chosen
    model = esft.merge(done.model) if name == "esft" else done.model
    after = {
        path.replace(".parametrizations", ""): p for path, p in model.named_parameters()
    }
    for path, before in half[0].named_parameters():
        moved = before != after.get(path, after.get(f"{path}.original"))
        if ".experts." in path or ".adapters." in path:
            experts = moved.flatten(1).any(1).nonzero().flatten().tolist()
            assert experts == chosen[int(path.split(".")[2])]
        else:
            assert not moved.any()


def test_adapters_beside_experts_read_what_the_mixture_puts_out(setups):
    setup = setups["nano-moe"]
    x = torch.randn(1, 9, 128)
    model = built(setup, SPARSE["pesc"]).eval()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (
            ".mlp.router." in name or ".mlp.adapters." in name
        )
    for layer in sparse_layers(setup.base):
        new = model.model.layers[layer.index].mlp
        h = layer.mlp(x)
        gates = (x @ new.router.weight.T).softmax(-1)
        gates = gates * (gates >= gates.topk(2).values[..., 1:])
        read = F.gelu(torch.einsum("btd,edr->bter", h, new.adapters.down))
        up = torch.nn.init.normal_(new.adapters.up)
        added = torch.einsum("bte,bter,erd->btd", gates / gates.sum(-1, True), read, up)
        torch.testing.assert_close(new(x), h + added, atol=1e-4, rtol=1e-4)
    assert [layer.width for layer in sparse_layers(model)] == [
        layer.width for layer in sparse_layers(setup.base)
    ]


@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "Llama4"])
def test_adapters_stand_beside_the_experts_of_every_form_and_start_as_the_host(family):
    more = {
        "Llama4": {"intermediate_size_mlp": 40, "moe_layers": [0, 1]},
        "GptOss": {"layer_types": ["full_attention", "full_attention"]},
    }
    model = build(
        family, num_local_experts=4, num_experts_per_tok=2, **more.get(family, {})
    )
    ids = torch.arange(3, 12)[None]
    before = model(input_ids=ids, use_cache=False).logits
    combining.beside_experts(model, experts=2, top_k=1, width=4).eval()
    after = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(after, before)


def test_weight_decay_on_adapters_of_which_some_are_frozen_is_refused(dense):
    """In a copy too, as `transfer` trains one; without decay the same call trains."""
    model = built(dense, DENSE["pesc"])
    combining.only(model, esft.Selection(experts=dict.fromkeys(range(4), (1,))))
    before = {name: part.detach().clone() for name, part in model.named_parameters()}
    line = (
        r"E-CHOICE: weight_decay is 0.1, .*layers.0.mlp.adapters.* set weight_decay=0"
    )
    for each in (model, deepcopy(model)):
        refused(
            line, dense.fit, each, dense.encoded, lr=1e-2, steps=1, weight_decay=0.1
        )
        now = dict(each.named_parameters())
        assert all(torch.equal(now[name], part) for name, part in before.items())
    dense.fit(model, dense.encoded, lr=1e-2, steps=1, weight_decay=0.0)


def test_only_the_chosen_adapters_train_also_in_a_copy(dense):
    torch.manual_seed(0)  # of routers that send tokens to every chosen adapter
    model = built(dense, DENSE["pesc"])
    chosen = esft.Selection(experts={n: (1, n) if n != 1 else (1,) for n in range(4)})
    whole = combining.trained(model)
    combining.only(model, chosen)
    per_adapter = 2 * 128 * model.model.layers[0].mlp.adapters.down.shape[2]
    assert combining.trained(model) == 7 * per_adapter < whole
    for each in (model, deepcopy(model)):
        before = {n: p.detach().clone() for n, p in each.named_parameters()}
        dense.fit(each, dense.encoded, lr=1e-2, steps=4, penalty=DENSE["pesc"].penalty)
        for name, parameter in each.named_parameters():
            moved = (
                (parameter != before[name]).flatten(1).any(1)
                if parameter.dim() > 2
                else None
            )
            if moved is None:
                assert torch.equal(parameter, before[name])
            elif "up" in name or "down" in name:
                layer = int(name.split(".")[2])
                assert moved.nonzero().flatten().tolist() == sorted(
                    chosen.experts[layer]
                )


def test_shots_go_to_the_lora_that_models_them_best():
    nats = pd.DataFrame(
        {0: [1, 2, 3.0], 1: [2, 1, 1.5], 2: [1, 3, 2.0]}, index=["a", "b", "c"]
    )
    assert combining.by_expert(nats, ["a", "b", "c"]) == {
        "a": [0, 2],
        "b": [1],
        "c": [1],
    }
    assert combining.by_expert(nats, ["c", "a"]) == {"c": [1], "a": [0, 2]}


def test_rocket_chooses_as_many_as_asked_and_deals_all_shots_out(dense):
    picked, shots = crafts.chosen_loras(dense, bank(dense, DENSE["rocket"]))
    assert len(set(picked)) == 4
    assert list(shots) == list(picked)
    dealt = {row["prompt"] for row in chain(*shots.values())}
    assert dealt == {row["prompt"] for row in dense.mixed[:6]}


def test_rocket_judges_shots_of_a_users_file_by_its_rule(dense, tmp_path, monkeypatch):
    file = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n} + 1 =", "answer": f"{n + 1}"} for n in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = {str(file): data.tasks.rows(str(file), "train", 20)}
    judged = Mock(wraps=rocket.score.accuracy)
    monkeypatch.setattr(rocket.score, "accuracy", judged)
    crafts.chosen_loras(
        replace(dense, rows=drawn | dense.rows), bank(dense, DENSE["rocket"])
    )
    assert list(judged.call_args.kwargs["own"]) == ["own_sums"]


@pytest.mark.parametrize("name", ["lora", "pesc", "su", "esft", "gate"])
def test_what_is_stored_is_what_the_base_has_not(setups, name):
    setup = setups["nano-moe" if name == "gate" else "nano"]
    arm = (SPARSE if name == "gate" else DENSE)[name]
    model = built(setup, arm)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Else PEFT's zeros are one tensor.
            parameter.data += torch.randn_like(parameter)
    expected = 4 * combining.trained(model)
    model = arm.later(setup, model) if arm.later else model
    if name == "esft":  # as if the chosen experts had trained on
        model.model.layers[0].mlp.experts.gate_up_proj.data += 1
    assert together.stored(model, setup.base) == pytest.approx(expected, rel=1e-3)


def test_of_a_host_in_16_bits_as_many_frozen_experts_are_left_out_as_train(setups):
    """What trains is float32, so an expert's copy has twice the bytes of the frozen one."""
    base = deepcopy(setups["nano-moe"].base).bfloat16()
    chosen = {layer.index: (0, 1, 2) for layer in sparse_layers(base)}
    model = esft.specialise(deepcopy(base), esft.Selection(experts=chosen))
    widen(model)
    trained = [part for part in model.parameters() if part.requires_grad]
    for parameter in trained:
        parameter.data += torch.randn_like(parameter)
    # As if the base itself had trained before the experts were chosen.
    frozen = next(part for part in model.modules() if isinstance(part, SplitExperts))
    frozen.frozen.gate_up_proj.data += 1
    others = frozen.frozen.gate_up_proj[3:]
    expected = 4 * combining.trained(model) + 2 * others.numel()
    assert together.stored(model, base) == expected


def test_what_is_forgotten_is_the_rise_on_plain_texts(dense):
    # Of a single token nothing is foretold.
    refused("E-RANGE: length is 1", together.texts, dense.tokenizer, 2, length=1)
    plain = together.texts(dense.tokenizer, 2, length=40)
    assert together.forgotten(dense.base, dense.base, plain, pad_id=dense.pad_id) == 0
    worse = deepcopy(dense.base)
    worse.model.layers[0].mlp.down_proj.weight.data *= 3
    nats = [
        training.nats(each, plain, pad_id=dense.pad_id) for each in (worse, dense.base)
    ]
    lost = together.forgotten(worse, dense.base, plain, pad_id=dense.pad_id)
    assert lost == nats[0] - nats[1] > 0


def test_a_new_task_is_learnt_by_a_copy(dense):
    model = built(dense, DENSE["lora"])
    rows = data.tasks.rows("kinship_told", "train", 8)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    few = dense.encode(rows)
    first, last = together.transfer(
        dense, model, few, few, lr=3e-3, steps=6, penalty=None
    )
    assert last < first
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_training_of_one_step_moves_what_trains(dense):
    lora = built(dense, DENSE["lora"])
    before = {name: part.clone() for name, part in lora.named_parameters()}
    dense.fit(lora, dense.encoded, lr=1e-2, steps=1)
    moved = {
        name for name, part in lora.named_parameters() if not part.equal(before[name])
    }
    # A factor that starts at zero leaves the other one without a gradient for a step.
    ups = {name for name in before if "lora_B" in name}
    assert moved == ups


def test_costs_are_measured_for_every_arm(dense, monkeypatch):
    monkeypatch.setattr(together.measure, "TURNS", 1)
    monkeypatch.setattr(together.measure, "STEPS", 2)
    models = {name: built(dense, DENSE[name]) for name in ("full", "pesc")}
    penalties = {name: DENSE[name].penalty for name in models}
    costs = together.costs(dense, models, penalties)
    assert list(costs.index) == ["full", "pesc"]
    assert (costs > 0).drop(columns="stored").all(axis=None)
    assert costs.trained["full"] == 1_066_112
    assert costs.peak["pesc"] < costs.peak["full"]


def test_a_token_is_timed_alike_whatever_a_host_generates_by(dense):
    model = deepcopy(dense.base)
    asked = {"num_beams": 3, "max_time": 1e-9, "stop_strings": ["a"]}
    model.generation_config.update(**asked)
    rows = []
    model.register_forward_pre_hook(
        lambda model, args, inputs: rows.append(len(inputs["input_ids"])),
        with_kwargs=True,
    )
    ids = torch.arange(3, 11).view(2, 4)
    together.measure._write(
        model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    )
    assert rows == [2] * (1 + together.measure.WRITTEN)


def test_what_does_not_compose_is_refused(dense, setups):
    other = bank(dense, DENSE["rocket"])
    told = "E-KEYS: 'gcd' adapts no .*train the bank on down_proj"
    refused(told, dense.as_adapters, [*other.values()])
    upcycled = built(dense, DENSE["su"])
    chosen = esft.Selection(experts=dict.fromkeys(range(4), (0,)))
    refused("E-MODEL: layer 0 holds no adapters", combining.only, upcycled, chosen)
    made = dense.as_adapters([*bank(dense, DENSE["pesc_bank"]).values()])
    refused(
        "E-SHAPE: layer 0 holds no adapters of",
        combining.start_adapters,
        upcycled,
        made,
    )
    refused("E-SHAPE: the start is", combining.route, upcycled, dense.start("su", 8))
    told = "E-MODEL: .* is sparse already: PESC needs a dense host"
    moe = setups["nano-moe"].base
    refused(told, combining.as_adapters, moe, [], [])
    refused(
        "E-MODEL: .* is dense",
        combining.beside_experts,
        dense.base,
        experts=2,
        top_k=1,
        width=2,
    )


def test_committed_pools_kept_their_budgets(pools):
    spent = {}
    for name, pool in pools("together").items():
        if name in ("smollm2", "smollm2_costs"):
            continue
        for seed, values in pool.seeds.items():
            for path, value in values.items():
                if "/budget/" in path and not path.endswith("esft/budget/parameters"):
                    spent[name, seed, path] = value.value
    assert {path.rpartition("/")[2] for _, _, path in spent} == {
        "tokens",
        "flops",
        "parameters",
    }
    assert not {key: off for key, off in spent.items() if abs(off) >= 0.02}
