"""What of a host trains in PESC, what it is measured by (Eq. 6, sizes, cost), who writes claims."""

import copy
import inspect
import json
import re
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd
import peft
import pytest
import torch
from torch import nn

from moebook import evaluation, experiments
from moebook.analysis import routing
from moebook.data.tasks import KNOWN
from moebook.errors import Refusal
from moebook.lab import papers
from moebook.lab.run import sources
from moebook.methods import pesc
from moebook.models.anatomy import anatomy
from moebook.nn import ExpertMoE, routers
from moebook.training import step_memory
from tests.refusals import refused

NO_DROPOUT = {"adapter_dropout": 0.0, "lora_dropout": 0.0}
SMALL = {"experts": 4, "adapter_width": 6, "lora_rank": 4, **NO_DROPOUT}
HOSTS = ("frozen", "lora", "qlora", "full")
PRINTED = {
    "llama-2-7b": (8, 7),
    "llama-2-13b": (15, 14),
    "yi-34b": (38, 35),
}  # total, activated


def train(model, batch, steps=1, lr=0.05):
    free = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(free, lr=lr, weight_decay=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        (model.train()(**batch).loss + pesc.balance_loss(model)).backward()
        optimiser.step()
    return model.eval()


@pytest.mark.parametrize("name", HOSTS)
def test_exactly_adapters_routers_and_the_asked_part_of_the_host_train(
    name, host, batch
):
    """What is frozen is equal bit for bit after a step of AdamW with weight decay."""
    model = pesc.prepare(host(), pesc.Config(**SMALL, host=name))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    training = {n for n, p in model.named_parameters() if p.requires_grad}
    assert training == set(pesc.trained(model, model.pesc.config))
    ours = {n for n in before if ".adapters." in n or ".router." in n}
    lora = {n for n in before if ".lora_A." in n or ".lora_B." in n}
    assert len(ours) == 2 * 3
    assert len(lora) == (2 * 7 * 2 if "lora" in name else 0)
    assert training == (set(before) if name == "full" else ours | lora)
    train(model, batch)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == training


@pytest.mark.parametrize("name", HOSTS)
def test_the_arms_share_the_host_and_are_equal_at_step_0(name, host, batch):
    sparse = pesc.prepare(host(), pesc.Config(**SMALL, host=name))
    dense = pesc.prepare(host(), pesc.Config(**SMALL, host=name), sparse=False)
    torch.testing.assert_close(
        sparse(**batch).logits, dense(**batch).logits, rtol=1e-6, atol=1e-6
    )
    ours, theirs = (pesc.trained(model, model.pesc.config) for model in (sparse, dense))
    shared = {n for n in ours if ".router." not in n and ".adapters." not in n}
    assert {n.replace(".mlp.shared.", ".mlp.") for n in shared} == set(theirs)
    assert all(layer.kind == "dense" for layer in anatomy(dense).layers)


def test_qlora_holds_the_layers_linears_in_double_quantised_nf4_alone(
    host, monkeypatch
):
    import bitsandbytes as bnb

    model = pesc.prepare(host(), pesc.Config(**SMALL, host="qlora"))
    quantised = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(quantised) == 2 * 7
    assert all(
        m.weight.quant_type == "nf4" and m.weight.quant_state.nested for m in quantised
    )
    assert {m.weight.dtype for m in quantised} == {torch.uint8}
    assert type(model.lm_head) is nn.Linear
    assert all(
        layer.router.weight.dtype == torch.float32 for layer in anatomy(model).layers
    )
    wrapped = [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert {(m.r["default"], m.scaling["default"]) for m in wrapped} == {(4, 16 / 4)}
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = host()
    before = [type(m) for m in model.modules()]
    with pytest.raises(
        Refusal, match=r"E-DEP: .*bitsandbytes: pip install 'moebook.quantised"
    ):
        pesc.prepare(model, pesc.Config(**SMALL, host="qlora"))
    assert [type(m) for m in model.modules()] == before


def test_a_half_precision_host_gets_float32_adapters_and_runs(host, batch):
    model = pesc.prepare(host(dtype=torch.bfloat16), pesc.Config(**SMALL, host="lora"))
    assert {p.dtype for p in pesc.trained(model, model.pesc.config).values()} == {
        torch.float32
    }
    assert train(model, batch)(**batch).logits.isfinite().all()


def test_the_adapters_norm_is_that_of_all_upper_matrices_together(host):
    model = pesc.craft(host(), pesc.Config(**SMALL))
    assert pesc.adapter_norm(model) == 0
    for layer in anatomy(model).layers:
        nn.init.constant_(layer.experts.up, 0.5)
    entries = 2 * 4 * 6 * 32  # layers, experts, adapter width, width
    assert pesc.adapter_norm(model) == pytest.approx(0.5 * entries**0.5)
    refused("E-MODEL: no adapters", pesc.adapter_norm, host())


def test_full_experts_equal_the_dense_model_at_step_0_and_train_alone(
    host, batch, tmp_path
):
    dense = host()
    full = pesc.full_experts(host(), pesc.Config(**SMALL, host="frozen"))
    torch.testing.assert_close(
        full(**batch).logits, dense(**batch).logits, rtol=1e-5, atol=1e-5
    )
    training = {name for name, p in full.named_parameters() if p.requires_grad}
    assert training == {name for name, _ in full.named_parameters() if ".mlp." in name}
    assert sum(isinstance(m, ExpertMoE) for m in full.modules()) == 2
    full.train()(**batch)
    pesc.balance_loss(full).backward()
    assert all(router.weight.grad.norm() > 0 for router in routers(full))
    with pytest.raises(Refusal, match="E-CHOICE: host is 'lora'"):
        pesc.full_experts(host(), pesc.Config(**SMALL, host="lora"))
    with pytest.raises(Refusal, match=r"E-MODEL: pesc.save .* full experts"):
        pesc.save(full, tmp_path / "lost")
    assert not (tmp_path / "lost").exists()


def test_error_is_0_for_equal_models_and_1_for_adapters_that_never_moved(host, batch):
    config = pesc.Config(**SMALL, host="frozen")
    full = train(pesc.full_experts(host(), config), batch, steps=3, lr=0.01)
    itself = pesc.approximation_error(copy.deepcopy(full), full, host(), [batch, batch])
    assert (itself.gaps, itself.output_error) == ([0] * 6, 0)
    assert sum(itself.recovered) / 6 == pytest.approx(1)
    crafted = pesc.craft(host(), config).train()
    dense = host()
    gaps, recovered, error = pesc.approximation_error(crafted, full, dense, [batch])
    assert error == pytest.approx(1, abs=1e-5)
    assert sum(recovered) / 3 == pytest.approx(0, abs=1e-4)
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(3)]
    want = [(dense(**row).loss - full(**row).loss).abs().item() for row in rows]
    assert gaps == pytest.approx(want, rel=1e-3, abs=1e-6)
    assert [model.training for model in (crafted, full, dense)] == [True, False, False]
    refused(
        "E-DATA: no batch to measure",
        pesc.approximation_error,
        crafted,
        full,
        dense,
        [],
    )
    # A row without a label is no row of the lists.
    labels = batch["labels"].clone()
    labels[2] = -100
    less = {**batch, "labels": labels}
    gaps, recovered, _ = pesc.approximation_error(crafted, full, dense, [less])
    assert gaps == pytest.approx(want[:2], rel=1e-3, abs=1e-6)
    assert len(recovered) == 2


def test_error_is_refused_where_it_would_say_nothing(host, batch):
    config = pesc.Config(**SMALL, host="frozen")
    crafted = pesc.craft(host(), config)
    untrained = pesc.full_experts(host(), config)
    full = train(pesc.full_experts(host(), config), batch, steps=3, lr=0.01)
    broken = copy.deepcopy(full)
    broken.model.layers[0].mlp.experts.down_proj.data.fill_(torch.nan)
    other = host()
    other.lm_head.weight.data += 1

    def told(message, *models):
        refused(message, pesc.approximation_error, *models, [batch])

    told("E-DATA: .* full's experts are the dense MLPs", crafted, untrained, host())
    told("E-MODEL: the model has not been through pesc", crafted, host(), host())
    told("E-BASE: approximation_error: pesc belongs to base", crafted, full, other)
    told("E-NONFINITE: .* the loss of full is not finite", crafted, broken, host())


def test_width_512_gives_the_printed_sizes_and_64_does_not():
    table = pesc.printed_sizes()
    for name, (
        dense,
        layers,
        width,
        narrow,
    ) in {  # size, layers, width; size with width 64
        "llama-2-7b": (6_738_415_616, 32, 4096, 6.9),
        "llama-2-13b": (13_015_864_320, 40, 5120, 13.2),
        "yi-34b": (34_388_917_248, 60, 7168, 34.8),
    }.items():
        size = pesc.counts(pesc.Config(), name)
        line = table.loc[name]
        assert (size.dense, size.routers) == (dense, layers * 8 * width)
        assert size.adapters == layers * 8 * 2 * width * 512
        assert size.total == line.total == dense + size.adapters + size.routers
        assert size.activated == size.total - size.adapters * 6 // 8
        released = pesc.counts(pesc.Config.preset("released"), name).total
        assert released == line.total_64
        assert round(released / 1e9, 1) == narrow
        printed = PRINTED[name][0]
        assert round(size.total / 1e9) == printed != round(released / 1e9)
        assert line.implied_width_low < 512 < line.implied_width_high
        for side, end in (
            (-0.5, line.implied_width_low),
            (0.5, line.implied_width_high),
        ):
            total = dense + size.routers + end * layers * 8 * 2 * width
            assert total / 1e9 == pytest.approx(printed + side)


def test_only_widths_from_589_to_596_fit_the_printed_activated_size_of_the_13b_host_too():
    for width in (588, 589, 596, 597):  # counts rise with the width: the edges suffice
        sizes = {
            name: pesc.counts(pesc.Config(adapter_width=width), name)
            for name in PRINTED
        }
        pairs = {
            n: (round(s.total / 1e9), round(s.activated / 1e9))
            for n, s in sizes.items()
        }
        assert (pairs == PRINTED) == (width in (589, 596))


def test_counts_of_a_configuration_equal_those_of_the_crafted_model(host):
    config = pesc.Config(experts=4, adapter_width=6, host="frozen", layers=(1,))
    model = pesc.craft(host(), config)
    assert [layer.kind for layer in anatomy(model).layers] == ["dense", "sparse"]
    size = pesc.counts(config, model.config)
    assert size.total == sum(parameter.numel() for parameter in model.parameters())
    assert size.adapters == 4 * 2 * 32 * 6
    refused("did you mean 'llama-2-7b'", pesc.counts, config, "llama-7b")


@pytest.mark.parametrize("sparse", [False, True])
def test_a_rank_of_lora_above_every_matrix_is_refused_before_anything_changes(
    host, sparse
):
    for name in ("lora", "qlora"):
        dense = host()
        before = {key: value.clone() for key, value in dense.state_dict().items()}
        config = pesc.Config(**SMALL | {"lora_rank": 33}, host=name)
        message = (
            "E-RANGE: the rank of LoRA is 33, expected at most 32, the largest rank"
        )
        refused(message, pesc.prepare, dense, config, sparse=sparse)
        assert before.keys() == dense.state_dict().keys()
    pesc.prepare(host(), replace(config, host="lora", lora_rank=32), sparse=sparse)


def test_the_matched_dense_arm_trains_as_much_as_the_sparse_one_at_the_same_scale(host):
    config = pesc.Config(
        experts=4, adapter_width=6, host="lora", lora_rank=4, lora_alpha=8
    )
    wide = pesc.matched(host(), config)
    models = pesc.prepare(host(), config), pesc.prepare(host(), wide, sparse=False)
    sizes = []
    for model in models:
        trained = pesc.trained(model, model.pesc.config).values()
        sizes.append(sum(part.numel() for part in trained))
    one = pesc.prepare(host(), replace(wide, lora_rank=1), sparse=False)
    per_rank = sum(p.numel() for p in pesc.trained(one, config).values())
    assert abs(sizes[0] - sizes[1]) <= per_rank / 2
    assert wide.lora_alpha / wide.lora_rank == 2


def test_bytes_are_those_of_a_step_and_every_turn_has_a_ratio(host, batch, rows):
    config = pesc.Config(experts=4, adapter_width=6, host="lora", lora_rank=4)
    dense = pesc.prepare(host(), config, sparse=False)
    sparse = pesc.prepare(host(), config)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    labelled = {**inputs, "labels": inputs["input_ids"]}
    want = [step_memory(model.train(), labelled).total for model in (sparse, dense)]
    times, memory = pesc.cost(dense, sparse, rows, inputs, batch=4, lr=0.01, pad_id=2)
    assert memory == want[0] / want[1] > 1
    assert len(times) == 3
    assert min(times) > 0


NOTEBOOK = sources.find(Path(__file__).resolve().parents[2], "pesc")
ALL = json.loads(NOTEBOOK.path.read_text(encoding="utf-8"))["cells"]
CELLS = ["".join(cell["source"]) for cell in ALL if cell["cell_type"] == "code"]
BASES = {"13B": "meta-llama/Llama-2-13b-hf", "34B": "01-ai/Yi-34B"}
ROUTED = {
    "layer": 0,
    "router": "r",
    "domain": "code",
    "expert": [0, 1],
    "slots": 1,
    "share": 0.5,
}
ROUTED = pd.DataFrame(ROUTED)
CASES = [(claim, scale) for claim in papers.claims("pesc") for scale in claim.scales]


def settings(scale, said):
    """A scale's parameters, with those changed that the claim says to set."""
    found = NOTEBOOK.defaults | NOTEBOOK.settings("nano" if scale == "study" else scale)
    named = re.findall(r"`(\w+)`", said)
    assert set(named) <= set(found), f"no such parameter: {named}"
    found |= {"arms": "all"} if "arms" in named else {}
    if "base" in named:
        found["base"] = next(
            base for size, base in BASES.items() if f"{size} base" in said
        )
    return found | ({"mix": "idae-720k"} if "mix" in named else {})


@cache
def written(*parameters):
    """A pattern of all names that the notebook and its experiment record with these parameters."""
    chosen = dict(parameters)
    arms = experiments.pesc.check(chosen)
    kept = inspect.getsource(experiments.pesc.record).replace("{name}", "{root}/{arm}")
    source = "\n".join(CELLS).replace("{root}/{name}/", "{root}/{arm}/") + kept
    names = re.findall(r'run\.record\(f?"([^"]+)"', source)
    assert "run.scores(name, answers)" in kept  # accuracy and likelihood of each arm
    parts = ("accuracy", "nll", "accuracy/{domain}", "nll/{domain}")
    names += ["{root}/{arm}/" + part for part in parts]
    tasks = chosen["tasks"].split(",")
    if "gsm8k" not in tasks:
        names.remove("{root}/{arm}/accuracy/gsm8k")
    kinds = [KNOWN[name].domain if name in KNOWN else "benchmark" for name in tasks]
    table = pd.DataFrame({"task": tasks, "domain": kinds, "correct": 1})
    filled = {
        "root": [pesc.root(chosen["base"], chosen["mix"])],
        "arm": arms,
        "arm}/{what": list(map("/".join, product(arms, routing.summary(ROUTED)))),
        "domain": evaluation.by_benchmark(table, pesc.GROUPS).domain.unique(),
    }

    def choices(place):
        return f"(?:{'|'.join(filled[place[1]])})" if place[1] in filled else r"[\w-]+"

    return "|".join(
        re.sub(r"\{(arm\}/\{what|\w+)[^}]*\}", choices, name) for name in names
    )


@pytest.mark.parametrize(
    ("claim", "scale"), CASES, ids=[f"{c.id}-{s}" for c, s in CASES]
)
def test_a_cell_writes_the_claims_value_at_the_scale(claim, scale):
    chosen = settings(scale, claim.why)
    assert re.fullmatch(written(*chosen.items()), claim.value), "no cell records it"
    for reference in claim.values[1:]:
        smaller = {**chosen, "mix": settings(scale, "")["mix"]}
        # The two sides may stand in two runs, with a ``mix`` each.
        both = (written(*chosen.items()), written(*smaller.items()))
        assert re.fullmatch("|".join(both), reference), "no cell records the other side"


def test_a_larger_base_or_mixture_has_a_name_of_its_own_and_writes_no_value_of_the_7b_claims():
    assert pesc.root("nano", "embedded") == "pesc"
    assert pesc.root("meta-llama/Llama-2-7b-hf@34b13b", "idae-500k") == "pesc"
    assert pesc.root("meta-llama/Llama-2-13b-hf@01", "idae-500k") == "pesc/13b"
    assert pesc.root("01-ai/Yi-34B@01", "idae-500k") == "pesc/34b"
    assert pesc.root("01-ai/Yi-34B@01", "idae-720k") == "pesc/34b/pro"
    other = settings("paper", "The parameter `base` names the 13B base.")
    assert not re.fullmatch(written(*other.items()), "pesc/sparse/accuracy")
    assert re.fullmatch(written(*settings("paper", "").items()), "pesc/sparse/accuracy")


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("/data/13b-experiments/llama-2-7b", "pesc"),
        ("/home/u/34b/nano", "pesc"),
        ("org/model-113b", "pesc"),
        ("/runs@2/13b", "pesc/13b"),
        ("/models/llama_13b_hf/", "pesc/13b"),
    ],
)
def test_the_last_part_of_a_folder_tells_the_size_of_the_base(base, name):
    assert pesc.root(base, "idae-500k") == name
