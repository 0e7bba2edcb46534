"""The planner: parameters exact, bytes by hand, what fits, and what is refused."""

import dataclasses
import json
import math
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moebook import experiments, models, storage
from moebook.lab import planning
from moebook.lab.planning import Training, cost, machine, methods, plan
from moebook.lab.planning.tally import Tally
from moebook.methods import pesc, rocket, upcycling
from moebook.models import anatomy, skeleton
from moebook.models.anatomy import NAME, register_experts
from moebook.training import fit
from tests.families import of_family
from tests.refusals import refused

L7 = "meta-llama/Llama-2-7b-hf"
LORA = partial(pesc.Config, host="lora", experts=4, adapter_width=8, lora_rank=2)


def training(host="nano", method=None, **changes):
    given = {
        "host": host,
        "method": method or methods.full(),
        "length": 32,
        "batch": 8,
        "steps": 3,
    }
    return Training(**given | changes)


def llama(vocabulary, width, inner, layers, heads, groups, tied):
    """Count a Llama by hand: embeddings, attention, gated MLP, two norms a layer and a last one."""
    attention = 2 * width * width + 2 * width * width * groups // heads
    layer = attention + 3 * width * inner + 2 * width
    return (2 - tied) * vocabulary * width + layers * layer + width


@pytest.mark.parametrize(
    ("host", "count"),
    [
        ("nano", llama(2048, 128, 352, 4, 4, 4, True)),
        ("smollm2", llama(49152, 576, 1536, 30, 9, 3, True)),
        (L7, 6_738_415_616),
        ("01-ai/Yi-34B", llama(64000, 7168, 20480, 60, 56, 8, False)),
        ("h2oai/h2o-danube2-1.8b-base", llama(32000, 2560, 6912, 24, 32, 8, False)),
        ("deepseek-ai/DeepSeek-V2-Lite", 15_706_484_224),
    ],
)
def test_parameters_are_exact(host, count):
    config = skeleton.configuration(host)
    assert skeleton.skeleton(config).num_parameters() == count
    small = planning.size(training(host, length=8), 1, False)  # by two depths
    assert small.parameters == small.trained == count
    assert small.weights == small.gradients == 4 * count


@pytest.mark.parametrize(
    "kind",
    [
        "afmoe",
        "hunyuan_v1_moe",
        "hy_v3",
        "laguna",
        "flint",
        "ernie4_5_moe",
        "minimax",
        "jamba",
    ],
)
def test_layers_are_told_apart_by_what_they_hold_whatever_a_family_calls_them(
    kind, tmp_path
):
    """Families differ in how they say which layers are dense, and some mix kinds to the end."""
    model = of_family(kind)
    model.config.save_pretrained(tmp_path)
    one = training(str(tmp_path), length=8)
    assert planning.size(one, 1, False).parameters == model.num_parameters()
    assert planning.size(one, 1, False) == planning.dry_run(one)
    layers = [layer for layer in anatomy(model).layers if layer.kind == "sparse"]
    experts = 2 * sum(3 * 32 * layer.width for layer in layers)  # 2 of 8 in each layer
    assert (
        planning.size(training(str(tmp_path), methods.esft(0.25)), 1, False).trained
        == experts
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "longcat_flash",
            r"its layers cannot run without values \(NotImplementedError: ",
        ),
        ("deepseek_v32", r"its layers cannot run without values \(TypeError: "),
        ("gpt_oss", "GptOssExperts: .* gate and up interleaved"),
        ("doge", "decoder layer 0 .* holds a gated MLP and "),
    ],
)
def test_a_host_that_cannot_be_planned_is_refused(kind, message, tmp_path):
    of_family(kind).config.save_pretrained(tmp_path)
    for method in (methods.full(), methods.esft(0.25)):
        refusal = refused(
            "E-MODEL: ", plan, training(str(tmp_path), method), machine("a100")
        )
        assert method != methods.full() or re.search(message, str(refusal))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("phimoe", "layer 0: the router's weights are neither shares .*: no gates"),
        ("llama4_text", "Llama4Router does not return"),
    ],
)
def test_experts_that_esft_cannot_score_are_refused_in_its_plan_too(
    kind, message, tmp_path
):
    of_family(kind).config.save_pretrained(tmp_path)
    host = str(tmp_path)
    scored = training(host, methods.esft(0.25))
    refused(f"E-MODEL: {message}", plan, scored, machine("a100"))
    assert plan(training(host), machine("a100")).tokens  # whose experts nobody scores


def arm(name, host="lora"):
    """An arm of PESC's notebook, with the settings of LORA."""
    sizes = {"experts": 4, "top_k": 2, "adapter_width": 8, "adapter_scale": 1.0}
    tuned = {"host": host, "lora_rank": 2, "lora_alpha": 16.0, "balance_weight": 0.01}
    return methods.of_arm(
        experiments.pesc.ARMS[name], {"preset": "fixed", **sizes, **tuned}
    )


D = 128
F = 352
L = 4  # of nano
LINEARS = 4 * 2 * D + 3 * (D + F)  # inputs and outputs of a layer's linear layers


@pytest.mark.parametrize(
    ("host", "method", "trained"),
    [
        ("nano", methods.pesc(LORA(), sparse=False), L * 2 * LINEARS),
        ("nano", methods.pesc(LORA()), L * (2 * LINEARS + 4 * 2 * D * 8 + 4 * D)),
        ("nano", arm("upcycled"), L * (4 * 3 * D * F + 4 * D)),
        (
            "nano",
            arm("sparse", host="qlora"),
            L * (2 * LINEARS + 4 * 2 * D * 8 + 4 * D),
        ),
        (
            "nano",
            methods.upcycling(upcycling.Config(experts=3)),
            llama(2048, D, F, L, 4, 4, True) + L * (2 * 3 * D * F + 3 * D),
        ),
        ("nano", methods.mixture(rocket.Config(), 16), L * 2 * 4 * (2 * 16 * D + D)),
        # 3 of 32 experts in 3 sparse layers.
        ("nano-moe", methods.esft(0.1), 3 * 3 * 3 * D * 64),
    ],
)
def test_what_a_method_trains_is_exact(host, method, trained):
    assert planning.size(training(host, method), 1, False).trained == trained


@pytest.mark.parametrize(
    ("host", "method"),
    [
        ("nano", methods.full()),
        ("nano", methods.pesc(LORA())),
        ("nano-moe", methods.lora(2, 1.0)),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_depths_tell_what_all_layers_take(host, method, checkpointing):
    # So that activations, not one weight's gradient, peak.
    one = training(host, method, length=256)
    grown = planning.size(one, 2, checkpointing)
    assert grown == planning.dry_run(one, rows=2, checkpointing=checkpointing)


def test_a_tally_by_hand():
    x = torch.empty(7, 3, device="meta")
    weight = torch.empty(5, 3, device="meta")
    weight.requires_grad_()
    with Tally([x, weight]) as tally:
        (x @ weight.T).sum().backward()
    assert tally.start == 4 * (21 + 15)
    assert tally.peak - tally.start == 4 * (35 + 1)  # the product, then its sum
    assert tally.alive - tally.start == 4 * 15  # the gradient
    products = {op: count for op, count in tally.ops.items() if op[1]}
    # Forward [7, 3] @ [3, 5], backward [5, 7] @ [7, 3]: 2 * 105 FLOPs each, both move 71 numbers.
    assert products == {(torch.float32, 210, 4 * 71): 2}


def test_what_changes_a_tensor_is_counted_at_every_call_and_returns_that_tensor():
    left, right, into = (torch.zeros(4, 4, device="meta") for _ in range(3))
    with Tally([left, right, into]) as tally:
        for _ in range(3):
            assert torch.mm(left, right, out=left) is left
            assert torch.mm(left, right, out=into) is into
            assert right.add_(into) is right
            assert left.add_(left) is left
        turned = torch.zeros(2, 3, device="meta")
        assert turned.t_().shape == (3, 2)
        assert turned.t_().shape == (2, 3)
    counted = Counter(flops for _, flops, _ in tally.ops.elements())
    assert counted[2 * 4**3] == 6
    assert counted[0] >= 6


def test_a_roofline_takes_the_longer_of_products_and_bytes_by_type():
    ops = {
        (torch.float32, 40, 1): 1,
        (torch.bfloat16, 40, 1): 2,
        (torch.float64, 0, 30): 1,
    }
    found = planning.size(training(), 1, False)
    found = dataclasses.replace(found, ops=ops)
    rates = {torch.float32: 10.0, torch.bfloat16: 20.0}
    assert found.seconds(rates, 10.0) == 4 + 2 * 2 + 3
    assert found.flops == 120


def test_a_plan_says_its_length_and_what_the_host_takes_alone():
    whole = plan(training(dtype=torch.bfloat16), machine("a100"))
    assert whole.length == 32
    # What trains is in float32.
    assert 2 * whole.alone == whole.need.weights
    crafted = plan(training(method=methods.pesc(LORA())), machine("a100"))
    assert crafted.alone == 4 * llama(2048, D, F, L, 4, 4, True) < crafted.need.weights


def test_checkpointing_holds_less_and_computes_more():
    plain, kept = (
        planning.size(training(length=128), 4, each) for each in (False, True)
    )
    assert kept.activations < 0.7 * plain.activations
    assert 1.2 * plain.flops < kept.flops < 4 / 3 * plain.flops


def test_bytes_by_layout():
    P = llama(2048, D, F, L, 4, 4, True)
    block = 4 * (4 * D * D + 3 * D * F + 2 * D)
    found = plan(training(), machine("a100x4"))
    plain = found.layouts["DDP"]
    sharded = found.layouts["FSDP2"]
    parts = (plain.weights, plain.gradients, plain.moments, plain.engine)
    assert parts == (4 * P, 4 * P, 8 * P, 4 * P)
    parts = (sharded.weights, sharded.gradients, sharded.moments, sharded.engine)
    assert parts == (P, P, 2 * P, 2 * block)
    assert plain.total == 20 * P + plain.activations
    assert found.need == plain
    paged = plan(training(optimizer="paged_32bit"), machine("a100")).need
    assert paged.total == 8 * P + paged.activations
    assert paged.moments == paged.paged == 8 * P
    packed = plan(training(method=methods.pesc(LORA())), machine("a100")).layouts
    linears = L * (4 * D * D + 3 * D * F)
    saved = packed["DDP"].weights - packed["QLoRA"].weights
    assert saved == pytest.approx(linears * (4 - 0.5159), rel=1e-4)
    assert packed["QLoRA"].activations - packed["DDP"].activations == 4 * D * F


def small(memory):
    """A machine whose one GPU has so much memory."""
    gpu = dataclasses.replace(planning.GPUS["a100"], memory=float(memory))
    return planning.Machine("tiny", gpu, 1)


def test_the_smallest_change_is_tried_in_order_and_makes_it_fit():
    one = training(method=methods.pesc(LORA()), length=256)
    most = plan(one, small(1e12)).need.total
    seen = {}
    for share in range(100, 0, -4):
        found = plan(one, small(most * share / 100))
        seen.setdefault(found.change, share)
        assert found.fits == (found.change == "") == (share == 100)
        assert (
            found.change == "nothing" or found.chosen_need.total <= most * share / 100
        )
    before = [f"gradient checkpointing + micro-batches of {rows}" for rows in (4, 2, 1)]
    sharded = [f"{before[2]} + FSDP2 over {2**power} GPUs" for power in range(1, 11)]
    order = [
        "",
        "gradient checkpointing",
        *before,
        f"{before[2]} + 4 bits (QLoRA)",
        *sharded,
    ]
    assert list(seen) == [change for change in (*order, "nothing") if change in seen]
    assert {*order[:4], "nothing"} <= {*seen}


def test_fsdp2_goes_without_the_4_bits_that_were_asked_for_and_says_so():
    one = training(method=methods.pesc(LORA(host="qlora")), length=64)
    as_asked = plan(one, small(1e12))
    assert as_asked.way.quantised
    packed = dataclasses.replace(as_asked.way, checkpointing=True, rows=1)
    # A byte less than the last way with 4 bits needs.
    found = plan(one, small(cost.needed(one, packed).total - 1))
    assert found.chosen.engine == "FSDP2"
    assert not found.chosen.quantised
    count = found.chosen.count
    assert found.change.endswith(f" + FSDP2 over {count} GPUs + no 4 bits")
    whole = cost.needed(one, dataclasses.replace(packed, quantised=False))
    assert found.chosen_need.weights == pytest.approx(whole.weights / count)
    assert found.chosen_need.activations == whole.activations


def test_a_row_is_no_faster_on_more_gpus_than_there_are_rows():
    def on(count, batch, **assumed):
        return plan(training(batch=batch), machine(f"h200x{count}"), **assumed)

    assert on(1, 1).seconds == on(8, 1).seconds == on(64, 1).seconds == on(8, 8).seconds
    assert on(64, 1).dollars == 64 * on(1, 1).dollars
    assert on(64, 1).flops == on(1, 1).flops
    # One of eight GPUs has two rows of nine: all wait for it.
    assert on(8, 9).seconds == on(8, 16).seconds
    assert on(8, 9, tokens=16).seconds < on(8, 9).seconds


def test_a_shard_of_adamws_state_takes_a_shard_of_the_time():
    one = training(length=64)
    found = plan(one, small(13e6), efficiency=1.0)
    way = found.chosen
    assert (way.engine, way.rows) == ("FSDP2", 1)
    gpu = planning.GPUS["a100"]
    used = planning.size(one, 1, True)
    # AdamW reads gradients, reads and writes weights, and each of its two moments: 3 + 4 times.
    moved = 7 * 4 * used.trained / way.count
    rounds = math.ceil(8 / way.count)
    step = rounds * used.seconds(small(1).rates, gpu.bandwidth) + moved / gpu.bandwidth
    assert found.seconds == pytest.approx(3 * step)


def test_hours_and_dollars_follow_from_what_is_assumed():
    on = machine("h200x2")
    one = training(turns=5)
    usual = plan(one, on)
    fast = plan(one, on, efficiency=1.0, price=7.0, tokens=8)
    assert usual.tokens == 5 * 3 * 8 * 32
    assert fast.tokens == usual.tokens / 4
    assert fast.flops == usual.flops / 4
    # AdamW's part of the time depends on no token.
    assert usual.seconds / 8 < fast.seconds < usual.seconds / 2
    assert fast.dollars == pytest.approx(7.0 * 2 * fast.seconds / 3600)
    assert plan(one, machine("v100")).dollars is None
    json.dumps(dataclasses.asdict(usual))


def test_gpus_are_read_with_their_number():
    assert (
        machine("h200x8").count,
        machine("h200").count,
        machine("rtx4090").count,
    ) == (8, 1, 1)
    assert machine("rtx4090x2").name == "rtx4090"
    refused("E-NAME: --gpu rtx3090: no GPU 'rtx3090'.*'rtx4090'", machine, "rtx3090")
    assert str(machine("a100x16")) == "a100x16"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            partial(machine, "h300x8"),
            r"E-NAME: --gpu h300x8: no GPU 'h300x8' is known; did you mean 'h200'",
        ),
        (partial(machine, "8"), "E-NAME: --gpu 8: no GPU '8' is known"),
        (partial(machine, "h200x0"), "E-RANGE: --gpu h200x0: expected 1 to 10000"),
        (partial(machine, "h200x000001999999"), "E-RANGE: .*expected 1 to 10000"),
        (
            partial(skeleton.configuration, "nanoo"),
            "E-MODEL: no configuration 'nanoo': did you mean",
        ),
        (
            partial(
                plan,
                training(method=methods.pesc(pesc.Config(host="frozen"), sparse=False)),
                machine("h100"),
            ),
            "E-MODEL: nano: no parameter requires a gradient; nothing would be trained",
        ),
        (
            partial(plan, training(), machine("h100"), efficiency=1.5),
            "E-RANGE: efficiency is 1.5",
        ),
        (
            partial(plan, training(), machine("h100"), price=0.0),
            "E-RANGE: price is 0.0",
        ),
        (
            partial(plan, training(), machine("h100"), tokens=33),
            r"E-RANGE: tokens is 33: a row of the training has at most 32 \(length\)$",
        ),
        (
            partial(plan, training(length=513), machine("h100")),
            "E-RANGE: nano: a row has 513 tokens, the model takes 512: lower the length$",
        ),
        (partial(training, length=0), "E-RANGE: length is 0, expected a number"),
        (partial(training, length=True), "E-TYPE: length is True"),
        (partial(training, batch=0), "E-RANGE: batch is 0, expected a number"),
        (partial(training, batch=-1), "E-RANGE: batch is -1, expected a number"),
        (partial(training, batch=2.0), "E-TYPE: batch is 2.0"),
        (partial(training, steps=-3), "E-RANGE: steps is -3, expected a number"),
        (partial(training, accumulate=0), "E-RANGE: accumulate is 0, expected"),
        (partial(training, turns=0), "E-RANGE: turns is 0, expected a number"),
        (partial(training, optimizer="sgd"), "E-CHOICE: optimizer is 'sgd'"),
        (partial(training, beside=-1.0), "E-RANGE: beside is -1.0"),
        (partial(training, method="full"), "E-TYPE: method is 'full'"),
    ],
)
def test_unusable_input_is_refused(call, message):
    refused(message, call)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama9"},
            r"of transformers 99\.0\.0, here is .*'llama9' is unknown; did you",
        ),
        (
            {"num_hidden_layers": 0},
            "no configuration that transformers can read .*num_hidden_layers",
        ),
        ({"hidden_size": 0}, "'model.embed_tokens.weight' would have no elements"),
        ({"hidden_size": "wide"}, "no configuration that transformers can read"),
        (
            {"rope_parameters": {"rope_type": "of tomorrow"}},
            "no model that transformers can read",
        ),
    ],
)
def test_a_configuration_of_another_version_is_refused_with_both(
    tmp_path, changes, message
):
    values = storage.read_json(Path(skeleton.__file__).parent / "nano" / "config.json")
    written = {**values, **changes, "transformers_version": "99.0.0"}
    (tmp_path / "config.json").write_text(json.dumps(written))

    def built():
        return skeleton.skeleton(skeleton.configuration(str(tmp_path)))

    refused(f"E-MODEL: .*{message}", built)


@pytest.mark.parametrize(
    ("host", "method"),
    [
        pytest.param("nano", methods.full(), marks=pytest.mark.soak),
        ("nano", methods.pesc(LORA())),
        ("nano", arm("upcycled")),
        pytest.param("nano-moe", methods.lora(2, 1.0), marks=pytest.mark.soak),
        ("nano-moe", methods.esft(0.1)),
    ],
)
def test_a_host_in_16_bits_is_planned_in_the_dtypes_that_training_makes(host, method):
    """What trains is float32, weights, gradients and both moments; what is frozen has 16 bits."""
    plain = planning.size(training(host, method), 1, False)
    low = planning.size(training(host, method, dtype=torch.bfloat16), 1, False)
    frozen = plain.parameters - plain.trained
    assert (low.parameters, low.trained) == (plain.parameters, plain.trained)
    assert low.weights == 2 * frozen + 4 * low.trained
    assert low.gradients == 4 * low.trained
    need = plan(training(host, method, dtype=torch.bfloat16), machine("a100")).need
    assert need.moments == 8 * low.trained
    model = method.make(models.load(host, dtype=torch.bfloat16)[0])
    ids = [[3, 4, 5, 6]] * 2
    train = Dataset.from_dict({"input_ids": ids, "labels": ids})
    fit(model, train, steps=1, batch=2, warmup=0.0)
    assert sum(part.nbytes for part in model.parameters()) == low.weights


def test_a_host_under_autocast_computes_linear_layers_in_half_precision():
    one = planning.dry_run(training(autocast=True), layers=1)
    kinds = {dtype for (dtype, flops, _), _ in one.ops.items() if flops}
    assert torch.bfloat16 in kinds
    assert one.weights == 4 * one.parameters


ATEN = torch.ops.aten
# A CPU's attention has no formula; it computes as much as that of a GPU.
ATTENTION = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: ATEN._scaled_dot_product_flash_attention,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        ATEN._scaled_dot_product_flash_attention_backward
    ),
}


class Products(TorchDispatchMode):
    """Adds up the FLOPs of what runs, by the dtype of the result."""

    def __init__(self):
        super().__init__()
        self.flops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        result = func(*args, **named)
        op = func._overloadpacket
        count = flop_registry.get(ATTENTION.get(op, op))
        if count:
            first = result[0] if isinstance(result, tuple) else result
            self.flops[first.dtype] += count(*args, **named, out_val=result)
        return result


@pytest.mark.parametrize(
    ("host", "method"),
    [
        ("nano", methods.upcycling(upcycling.Config(experts=4, top_k=2))),
        ("nano", methods.mixture(rocket.Config(experts=4, candidates=4), 4)),
        ("nano-moe", methods.full()),
        ("nano-moe", methods.esft(0.25)),
    ],
)
def test_under_autocast_a_plan_counts_as_many_flops_in_bfloat16_as_a_step_has(
    host, method
):
    one = training(host, method, length=128, autocast=True)
    planned = planning.dry_run(one, rows=2)
    model = method.make(models.load(host)[0]).train()
    register_experts()
    model.set_experts_implementation(NAME)
    ids = torch.randint(3, 100, (2, 128), generator=torch.Generator().manual_seed(0))
    with Products() as products:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    flops_by_dtype = Counter()
    for (dtype, flops, _), number in planned.ops.items():
        flops_by_dtype[dtype] += flops * number
    low = flops_by_dtype[torch.bfloat16]
    # Rows of an expert are padded where a CPU compiles its products, by some per cent.
    assert low == pytest.approx(products.flops[torch.bfloat16], rel=0.05)
    for counted in (products.flops, flops_by_dtype):
        assert counted[torch.float32] < 0.02 * low  # the routers'
