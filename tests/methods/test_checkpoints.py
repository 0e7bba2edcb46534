"""One checkpoint for all methods: restored bit for bit on its base, refused on anything else."""

import json
import os
from itertools import count

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebook.errors import Refusal, refuse
from moebook.methods import esft, pesc, rocket, upcycling
from moebook.methods.esft import apply as esft_apply
from moebook.methods.rocket import apply
from moebook.models import checkpoint, fingerprint
from tests.refusals import refused

OPTIONS = {"shared_experts": True, "non_expert_modules": True, "router": True}
PROJECTIONS = ("q_proj", "v_proj")
TENSORS = "trained.safetensors"
FAMILIES = (
    "Beam Cohere Cohere2 Cwm DiffLlama Doge Ernie4_5 Exaone4 Flint Gemma Gemma2"
    " Gemma3 Gemma4Unified Granite GraniteSWA Helium HunYuanDenseV1 HyperCLOVAX Llama Ministral"
    " Ministral3 Mistral Olmo Olmo2 Olmo3 OlmoHybrid Qwen2 Qwen3 SeedOss SmolLM3 StableLm"
    " VaultGemma"
).split()


@torch.no_grad()
def drift(model, seed=3):
    """Move what trains away from its start."""
    torch.manual_seed(seed)
    for tensor in model.parameters():
        if tensor.requires_grad:
            tensor += 0.2 * torch.randn_like(tensor)
    return model.eval()


def crafted(model, name="lora", sparse=True):
    config = pesc.Config(experts=4, adapter_width=6, lora_rank=4, host=name)
    return drift(pesc.prepare(model, config, sparse=sparse))


def specialised(model, experts=(5, 2), seed=3, **options):
    selection = esft.Selection(experts={1: experts, 2: experts[:1]}, **options)
    return drift(esft.specialise(model, selection), seed)


def mixed(model, **changes):
    layers = rocket.loras.linears(model, PROJECTIONS)
    bank = []
    for name in "abcd":
        down = {
            path: torch.randn(3, layer.in_features) for path, layer in layers.items()
        }
        up = {
            path: torch.randn(layer.out_features, 3) for path, layer in layers.items()
        }
        bank.append(rocket.loras.Lora(name=name, rank=3, alpha=6.0, down=down, up=up))
    apply.build(model, bank, rocket.Config(**changes))
    return drift(model)


def upcycled(model, **changes):
    return drift(
        upcycling.upcycle(model, upcycling.Config(experts=3, noise=0.1, **changes))
    )


METHODS = {
    "pesc": (pesc, crafted),
    "esft": (esft, specialised),
    "rocket": (rocket, mixed),
    "upcycling": (upcycling, upcycled),
}


@pytest.fixture
def sparse(mixture):
    return lambda: mixture("DeepseekV2", num_hidden_layers=3)


@pytest.fixture(params=METHODS)
def method(request, host, sparse):
    """A method, a builder of its base, and what makes and moves a model of it."""
    module, make = METHODS[request.param]
    return module, sparse if module is esft else host, make


def assert_same(one, other, batch):
    left = one.state_dict()
    right = other.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert torch.equal(one(**batch).logits, other.eval()(**batch).logits)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(("pesc", {"name": n}) for n in ("frozen", "lora", "qlora", "full")),
        *(("pesc", {"name": n, "sparse": False}) for n in ("lora", "qlora", "full")),
        *(("esft", options) for options in ({}, OPTIONS)),
        *(("rocket", {"gate_input": reads}) for reads in ("layer", "expert")),
        *(
            ("upcycling", c)
            for c in ({"layers": (1,)}, {"combine": "renormalised", "top_k": 2})
        ),
    ],
)
def test_models_of_every_kind_are_restored(
    name, changes, host, sparse, batch, tmp_path
):
    module, make = METHODS[name]
    base = sparse if module is esft else host
    model = make(base(), **changes)
    folder = module.save(model, tmp_path / "run")
    again = module.load(base(), folder)
    assert repr(getattr(again, name)) == repr(getattr(model, name))
    free = []
    for each in (model, again):
        named = each.named_parameters()
        free.append({name for name, part in named if part.requires_grad})
    assert free[0] == free[1]
    assert_same(model, again, batch)


@pytest.mark.filterwarnings("ignore")  # some families announce what they lack
@pytest.mark.parametrize("family", ["Llama in bfloat16", *FAMILIES])
def test_upcycled_models_of_every_family_are_restored_and_train_on(
    family, host, batch, tmp_path
):
    name, *_ = family.split()
    dtype = torch.bfloat16 if "bfloat16" in family else torch.float32
    model = upcycled(host(name, dtype))
    folder = upcycling.save(model, tmp_path / "run")
    again = upcycling.load(host(name, dtype), folder)
    assert again.upcycling == model.upcycling
    assert_same(model, again, batch)
    losses = []
    for each in (model.train(), again.train()):
        torch.manual_seed(5)
        loss = each(**batch).loss + upcycling.balance_loss(each)
        loss.backward()
        gradient = next(p.grad for p in each.parameters() if p.grad is not None)
        losses.append((loss, gradient))
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))


def test_tasks_are_swapped_on_one_base_and_published_as_the_authors_do(
    sparse, batch, tmp_path
):
    settings = {"a": ((5, 2), {}), "b": ((1, 7, 0), OPTIONS), "c": ((2,), {})}
    want = {}
    for seed, (task, (experts, options)) in enumerate(settings.items()):
        model = specialised(sparse(), experts, seed, **options)
        want[task] = model(**batch).logits
        esft.save(model, tmp_path / task)
    published = json.loads((tmp_path / "a" / "experts.json").read_text())
    assert published["experts"] == {"1": [5, 2], "2": [5]}
    model = sparse()
    before = fingerprint(model)
    for task in "abcba":
        assert torch.equal(
            esft.load(model, tmp_path / task)(**batch).logits, want[task]
        )
    each(lambda tensor: tensor[None].clone())(tmp_path / "b")
    refused("E-SHAPE", esft.load, model, tmp_path / "b")
    # A refused swap leaves what was there.
    assert torch.equal(model(**batch).logits, want["a"])
    assert fingerprint(esft.restore(model)) == before
    assert all(p.requires_grad for p in model.parameters())


def test_only_what_was_trained_is_saved_and_refusals_leave_nothing(
    method, tmp_path, monkeypatch
):
    module, base, make = method
    model = make(base())
    folder = module.save(model, tmp_path / "run")
    names = {checkpoint.MANIFEST, checkpoint.DIGEST, TENSORS}
    assert {path.name for path in tmp_path.rglob("*")} - {
        "run",
        "experts.json",
    } == names
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(load_file(folder / TENSORS)) == len(trained)
    content = json.loads((folder / checkpoint.MANIFEST).read_text())
    assert content["base"] == fingerprint(base())
    for given, name, message in [
        (model, "run", "E-EXISTS"),
        (base(), "other", "E-MODEL"),
    ]:
        refused(message, module.save, given, tmp_path / name)
    with (
        monkeypatch.context() as patch,
        pytest.raises(Refusal, match=r"E-OS.*disk full"),
    ):
        patch.setattr(
            os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full"))
        )
        module.save(model, tmp_path / "other")
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).view(-1)[0] = torch.nan
    refused("E-NONFINITE", module.save, model, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    if module is rocket:
        refused(
            "E-MODEL: the model holds a mixture already",
            rocket.load,
            model,
            tmp_path / "run",
        )


def reseal(folder, **changes):
    """Seal a changed folder again, so that only its content is wrong."""
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    for name in (checkpoint.MANIFEST, checkpoint.DIGEST):
        (folder / name).unlink()
    facts = {key: manifest[key] for key in manifest.keys() - {"files", "sizes"}}
    checkpoint.seal(folder, **{**facts, **changes})


def replace_tensors(folder, change):
    save_file(change(load_file(folder / TENSORS)), folder / TENSORS)
    reseal(folder)


def each(change):
    """A folder whose tensors are all changed."""
    return lambda f: replace_tensors(f, lambda t: {name: change(t[name]) for name in t})


def replace_file(folder, name, content):
    (folder / name).write_bytes(content)
    reseal(folder)


def flip(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-5] ^= 1
    (folder / name).write_bytes(content)


ANY = [
    (
        lambda f: replace_tensors(f, lambda t: dict([*t.items()][1:])),
        "E-KEYS: .*1 tensors missing",
    ),
    (
        lambda f: replace_tensors(f, lambda t: {**t, "x": torch.ones(1)}),
        "E-KEYS: .*1 surplus",
    ),
    (each(lambda tensor: tensor[None].clone()), "E-SHAPE"),
    (each(torch.Tensor.long), "E-SHAPE"),
    (each(lambda tensor: tensor * torch.nan), "E-NONFINITE"),
    (lambda f: replace_file(f, TENSORS, b"no"), "E-FORMAT"),
    (lambda f: flip(f, TENSORS), "E-HASH"),
    (lambda f: flip(f, checkpoint.MANIFEST), "E-MANIFEST"),
    (lambda f: (f / checkpoint.MANIFEST).unlink(), "E-MANIFEST"),
    (lambda f: (f / checkpoint.DIGEST).unlink(), "E-MANIFEST"),
    (lambda f: reseal(f, form="pesc/1"), "E-FORMAT"),
]
OWN = {
    pesc: [
        (lambda f: reseal(f, sparse="yes"), "E-TYPE: .*sparse is 'yes'"),
        (lambda f: reseal(f, config={"moe_scaling": 1}), "E-FORMAT: .*setting"),
    ],
    esft: [
        (lambda f: flip(f, "experts.json"), r"E-FORMAT|E-HASH"),
        *(
            (
                lambda f, ids=ids: replace_file(
                    f, "experts.json", b'{"experts": %s}' % ids
                ),
                message,
            )
            for ids, message in {
                b'{"1": [5, 2, 3], "2": [5]}': "E-SHAPE",
                b'{"1": [5, 8], "2": [5]}': "E-RANGE",
                b'{"1": [5, 2]}': "E-KEYS",
            }.items()
        ),
    ],
    rocket: [
        (lambda f: reseal(f, experts="abcd"), "E-TYPE: .*experts is 'abcd'"),
        (lambda f: reseal(f, scales=[2.0]), "E-RANGE: .*4 experts and 1 scales"),
    ],
    upcycling: [],
}


def test_what_is_damaged_or_foreign_is_refused_and_the_base_untouched(method, tmp_path):
    module, base, make = method
    plain = base()
    other = base()
    before = fingerprint(plain), [type(part) for part in plain.modules()]
    good = module.save(make(base()), tmp_path / "run")
    with torch.no_grad():
        other.model.embed_tokens.weight[0, 0] += 1
    foreign = {
        f"E-BASE: .*{before[0][:12]}.*{fingerprint(other)[:12]}": (module, good),
        "E-NOFILE": (module, tmp_path / "none"),
        "E-FORMAT|E-NOFILE": (esft if module is pesc else pesc, good),
    }
    for message, (loader, folder) in foreign.items():
        refused(message, loader.load, other, folder)
    content = {path: path.read_bytes() for path in good.iterdir()}
    for damage, message in [*ANY, *OWN[module]]:
        for path, good_bytes in content.items():
            path.write_bytes(good_bytes)
        damage(good)
        refused(message, module.load, plain, good)
        assert (fingerprint(plain), [type(part) for part in plain.modules()]) == before


def test_a_round_trip_brings_back_the_base_and_the_answers(sparse, batch):
    model = specialised(sparse(), **OPTIONS)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    want = model(**inputs).logits
    found = esft.round_trip(model, inputs)
    assert found["base unchanged"] == 1
    assert found["loading"] == 0
    assert found["merging"] == pytest.approx(0, abs=1e-5)
    assert found["bytes"] > sum(
        p.nbytes for p in esft.trained(specialised(sparse())).values()
    )
    torch.testing.assert_close(model(**inputs).logits, want)


def test_a_round_trip_compares_the_logits_of_real_tokens_alone(sparse, batch):
    model = specialised(sparse())
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for last in (9, 4):
        padding = inputs["attention_mask"][:, -last:] == 0
        passes = count()

        def shift(module, args, output, where=padding, passes=passes):
            output.logits[where] += next(passes)

        handle = model.register_forward_hook(shift)
        kept = torch.arange(9 - last, 9)
        found = esft.round_trip(model, {**inputs, "logits_to_keep": kept})
        handle.remove()
        assert next(passes) == 3
        assert padding.any()
        assert found["loading"] == 0
        assert found["merging"] == pytest.approx(0, abs=1e-5)
        model = specialised(sparse())


@pytest.mark.parametrize("options", [{}, OPTIONS])
@pytest.mark.parametrize(
    ("message", "late"),
    [
        ("E-BASE: round_trip: weights that should be frozen have changed", False),
        ("E-MEMORY: merged", True),
    ],
)
def test_a_refused_round_trip_leaves_what_was_trained(
    message, late, options, sparse, batch, monkeypatch
):
    def fail(model):
        esft.merge(model)
        refuse("E-MEMORY", "merged, and no more")

    model = specialised(sparse(), **options)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    if late:
        monkeypatch.setattr(esft_apply, "merge", fail)
    else:  # the base, beneath a part that no option trains
        with torch.no_grad():
            model.model.layers[1].mlp.experts.frozen.down_proj[3, 0, 0] += 1
    model.train()
    model.lm_head.eval()
    made = model.esft
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told = [(id(p), p.requires_grad) for p in model.parameters()]
    modes = [part.training for part in model.modules()]

    refused(message, esft.round_trip, model, inputs)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert [(id(p), p.requires_grad) for p in model.parameters()] == told
    assert [part.training for part in model.modules()] == modes
    assert model.esft is made
