"""What trains is float32 or wider: equal to a float32 copy's training, or refused untouched."""

import pytest
import torch
from peft import (
    HRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moebook.methods import pesc, upcycling
from moebook.training import fit, step_memory, widen
from tests.refusals import refused

RECIPE = {"batch": 4, "lr": 3e-5, "warmup": 0.0, "pad_id": 2}


def weights(model):
    return {name: part.detach().clone() for name, part in model.named_parameters()}


def dtypes(model, *, trained):
    return {part.dtype for part in model.parameters() if part.requires_grad == trained}


def lora(model, **changes):
    """Put LoRA on a model as PEFT does it in place: in the model's dtype."""
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **changes)
    inject_adapter_in_model(settings, model)
    for name, part in model.named_parameters():
        part.requires_grad_(".lora_" in name)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_full_training_of_a_16_bit_host_is_that_of_its_float32_copy(dtype, tiny, rows):
    """So nearly every weight moves at a rate of 3e-5; in bfloat16, by torch's AdamW, few do."""
    ours = tiny().to(dtype)
    theirs = tiny().to(dtype).float()
    start = weights(theirs)
    losses = [fit(model, rows(), steps=6, **RECIPE).loss for model in (ours, theirs)]
    assert losses[0] == losses[1]
    assert dtypes(ours, trained=True) == {torch.float32}
    # They were tied before, and still are.
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    after = weights(ours)
    assert all(torch.equal(part, after[name]) for name, part in weights(theirs).items())
    moved = [
        (after[name] != part).float().mean()
        for name, part in start.items()
        if "mlp" in name
    ]
    assert min(moved) > 0.95


def test_torchs_adamw_loses_in_bfloat16_what_the_rule_is_for(tiny, rows):
    model = tiny().bfloat16()
    start = weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE["lr"], weight_decay=0.0)
    ids = torch.tensor(rows(1)["input_ids"][:1])
    for _ in range(6):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [
        (part != start[name]).float().mean() for name, part in weights(model).items()
    ]
    assert max(moved) < 0.5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_on_a_bfloat16_host_trains_in_float32_and_the_host_stays(
    checkpointing, tiny, rows
):
    model = lora(tiny().bfloat16())
    frozen = {
        name: part for name, part in weights(model).items() if ".lora_" not in name
    }
    assert dtypes(model, trained=True) == {torch.bfloat16}  # as PEFT puts it on
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    history = fit(model, rows(1), steps=12, **RECIPE | {"lr": 3e-2})
    assert dtypes(model, trained=True) == {torch.float32}
    now = weights(model)
    assert all(torch.equal(now[name], part) for name, part in frozen.items())
    assert model(torch.tensor([[3, 4, 5]])).logits.dtype == torch.bfloat16
    theirs = lora(tiny().bfloat16().float())
    wanted = fit(theirs, rows(1), steps=12, **RECIPE | {"lr": 3e-2})
    assert wanted.loss[-1] < 0.95 * wanted.loss[0]
    assert history.loss == pytest.approx(wanted.loss, rel=0.01)


def test_an_interrupted_training_of_a_16_bit_host_goes_on_with_the_same_bits(
    tiny, rows, interrupt, tmp_path
):
    def start():
        return lora(tiny().bfloat16(), lora_dropout=0.2)

    whole = start()
    parted = start()
    wanted = fit(whole, rows(), steps=6, **RECIPE)
    folder = {"output": tmp_path / "kept", "every": 2}
    with pytest.raises(KeyboardInterrupt):
        fit(parted, rows(), steps=6, penalty=interrupt(5), **RECIPE, **folder)
    parted = start()
    assert fit(parted, rows(), steps=6, **RECIPE, **folder).loss == wanted.loss
    assert all(
        torch.equal(part, weights(parted)[name])
        for name, part in weights(whole).items()
    )


@pytest.mark.parametrize("path", ["model.norm", "model.layers.1.mlp", "lm_head"])
def test_a_part_of_a_16_bit_host_is_not_trained_beside_the_rest(path, tiny, rows):
    model = tiny(tie_word_embeddings=False).bfloat16().requires_grad_(False)
    model.get_submodule(path).requires_grad_(True)
    before = weights(model)
    line = rf"E-DTYPE: {path}\S* is torch.bfloat16 and is to train, .*load the base in float32"
    refused(line, fit, model, rows(), steps=1, **RECIPE)
    after = weights(model)
    assert all(after[name].dtype == part.dtype for name, part in before.items())
    assert all(torch.equal(after[name], part) for name, part in before.items())
    model = tiny(tie_word_embeddings=False).requires_grad_(False)
    model.get_submodule(path).requires_grad_(True)
    fit(model, rows(), steps=1, **RECIPE)


QUERIES = {"target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "settings",
    [
        LNTuningConfig(target_modules=["input_layernorm"]),
        VeraConfig(r=4, **QUERIES),
    ],
)
# PEFT's, of a norm, which has no two sides.
@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_an_adapter_that_does_not_cast_is_not_trained_on_a_16_bit_host(
    settings, tiny, rows
):
    model = get_peft_model(tiny().bfloat16(), settings, autocast_adapter_dtype=False)
    line = "E-DTYPE: .* is torch.bfloat16 and is to train, .*load the base in float32"
    refused(line, fit, model, rows(), steps=1, **RECIPE)
    fit(get_peft_model(tiny(), settings), rows(), steps=1, **RECIPE)


@pytest.mark.parametrize(
    "settings",
    [
        LoraConfig(r=4, use_dora=True, **QUERIES),
        IA3Config(feedforward_modules=[], **QUERIES),
        LoHaConfig(r=4, **QUERIES),
        LoKrConfig(r=4, **QUERIES),
        OFTConfig(r=0, oft_block_size=4, **QUERIES),
        HRAConfig(r=4, **QUERIES),
        TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"]),
    ],
)
def test_an_adapter_that_casts_trains_in_float32_on_a_16_bit_host(settings, tiny, rows):
    host = tiny(tie_word_embeddings=False).bfloat16()
    model = get_peft_model(host, settings, autocast_adapter_dtype=False)
    fit(model, rows(), steps=1, **RECIPE)
    assert dtypes(model, trained=True) == {torch.float32}
    assert dtypes(model, trained=False) == {torch.bfloat16}


def test_wider_parameters_and_float32_ones_stay_as_they_are():
    model = nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2)])
    places = [part.data_ptr() for part in model.parameters()]
    widen(model)
    assert [part.data_ptr() for part in model.parameters()] == places


def test_bytes_of_a_step_are_those_that_training_holds(tiny, rows):
    ids = torch.tensor(rows(1)["input_ids"][:1])
    batch = {"input_ids": ids, "labels": ids}
    model = lora(tiny().bfloat16())
    numbers = sum(part.numel() for part in model.parameters() if part.requires_grad)
    assert step_memory(model, batch).trained == 3 * 4 * numbers


class Products(TorchDispatchMode):
    """Notes of each product its dtype and the sizes of its factors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket in flop_registry:
            factors = [part for part in args if isinstance(part, torch.Tensor)]
            sizes = {size for part in factors for size in part.shape}
            self.seen += [(part.dtype, sizes) for part in factors]
        return func(*args, **kwargs or {})


def upcycled(host):
    """Four experts in each FFN, all of them trained."""
    config = upcycling.Config(experts=4, top_k=2)
    return upcycling.upcycle(host, config).requires_grad_(True)


def crafted(host):
    config = pesc.Config(experts=4, top_k=2, adapter_width=8, host="full")
    return pesc.prepare(host, config)


@pytest.mark.parametrize("make", [upcycled, crafted])
def test_bf16_computes_experts_in_bfloat16_as_dense_layers(make, tiny, rows):
    model = make(tiny())
    kinds = []
    for part in model.parameters():
        part.register_post_accumulate_grad_hook(
            lambda part: kinds.append(part.grad.dtype)
        )
    with Products() as products:
        fit(model, rows(), steps=1, **RECIPE, bf16=True)
    # Products of routers, of which 4 is the number of experts, stay float32.
    others = {dtype for dtype, sizes in products.seen if 4 not in sizes}
    assert others == {torch.bfloat16}
    assert {dtype for dtype, sizes in products.seen if 4 in sizes} >= {torch.float32}
    assert set(kinds) == {torch.float32}
