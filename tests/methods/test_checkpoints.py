"""One checkpoint for all methods: restored bit for bit on its base, refused on anything else."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebook.errors import Refusal
from moebook.methods import esft, pesc, rocket, upcycling
from moebook.methods.rocket import mixture
from moebook.models import checkpoint, fingerprint

OPTIONS = {"shared_experts": True, "non_expert_modules": True, "router": True}
PROJECTIONS = ("q_proj", "v_proj")
FAMILIES = (
    "Beam BitNet Cohere Cohere2 Cwm DiffLlama Doge Ernie4_5 Exaone4 Flint Gemma Gemma2"
    " Gemma3 Gemma4Unified Granite GraniteSWA Helium HunYuanDenseV1 HyperCLOVAX Llama Ministral"
    " Ministral3 Mistral Olmo Olmo2 Olmo3 OlmoHybrid Qwen2 Qwen3 SeedOss SmolLM3 StableLm"
    " VaultGemma"
).split()


def drift(tensors, seed=3):
    """Move what trains away from its start."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor += 0.2 * torch.randn_like(tensor)


def crafted(model, name="lora", sparse=True):
    small = {"experts": 4, "adapter_width": 6, "lora_rank": 4}
    pesc.prepare(model, pesc.Config(**small, host=name), sparse=sparse)
    drift(pesc.trained(model, model.pesc.config))
    return model.eval()


def specialised(model, experts=(5, 2), seed=3, **options):
    esft.specialise(model, esft.Selection(experts={1: experts, 2: experts[:1]}, **options))
    drift(esft.trained(model), seed)
    return model


def mixed(model, **changes):
    layers = rocket.loras.linears(model, PROJECTIONS)
    bank = [
        rocket.loras.Lora(
            name=name,
            rank=3,
            alpha=6.0,
            down={path: torch.randn(3, layer.in_features) for path, layer in layers.items()},
            up={path: torch.randn(layer.out_features, 3) for path, layer in layers.items()},
        )
        for name in "abcd"
    ]
    mixture.build(model, bank, rocket.Config(**changes))
    drift(mixture.trained(model))
    return model.eval()


def upcycled(model, **changes):
    upcycling.upcycle(model, upcycling.Config(**{"experts": 3, "noise": 0.1, **changes}))
    drift(dict(model.named_parameters()))
    return model


@pytest.fixture
def sparse(mixture):
    return lambda: mixture("DeepseekV2", num_hidden_layers=3)


@pytest.fixture(params=["pesc", "esft", "rocket", "upcycling"])
def method(request, host, sparse):
    """A method, a builder of its base, and what makes and moves a model of it."""
    made = {"pesc": crafted, "esft": specialised, "rocket": mixed, "upcycling": upcycled}
    module = {"pesc": pesc, "esft": esft, "rocket": rocket, "upcycling": upcycling}[request.param]
    return module, sparse if module is esft else host, made[request.param]


def assert_same(one, other, batch):
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert torch.equal(one(**batch).logits, other.eval()(**batch).logits)


@pytest.mark.parametrize(
    ("name", "dense"), [("frozen", 0), *((n, d) for n in ("lora", "qlora", "full") for d in (0, 1))]
)
def test_crafted_models_are_restored(name, dense, host, batch, tmp_path):
    model = crafted(host(), name, sparse=not dense)
    again = pesc.load(host(), pesc.save(model, tmp_path / "run"))
    assert again.pesc == model.pesc
    assert pesc.trained(again, again.pesc.config).keys() == {
        name for name, parameter in again.named_parameters() if parameter.requires_grad
    }
    assert_same(model, again, batch)


@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_a_merged_model_is_saved_whole(name, host, batch, tmp_path):
    model = pesc.merge_lora(crafted(host(), name))
    assert_same(model, pesc.load(host(), pesc.save(model, tmp_path / "merged")), batch)


@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_specialised_models_are_restored(options, sparse, batch, tmp_path):
    model = specialised(sparse(), **options)
    again = esft.load(sparse(), esft.save(model, tmp_path / "run"))
    assert again.esft.selection == model.esft.selection
    assert_same(model, again, batch)
    published = json.loads((tmp_path / "run" / "experts.json").read_text())
    assert published["experts"] == {"1": [5, 2], "2": [5]}


def test_tasks_are_swapped_on_one_base(sparse, batch, tmp_path):
    settings = {"a": ((5, 2), {}), "b": ((1, 7, 0), OPTIONS), "c": ((2,), {})}
    want = {}
    for seed, (task, (experts, options)) in enumerate(settings.items()):
        model = specialised(sparse(), experts, seed, **options)
        want[task] = model(**batch).logits
        esft.save(model, tmp_path / task)
    model = sparse()
    before = fingerprint(model)
    for task in "abcba":
        assert torch.equal(esft.load(model, tmp_path / task)(**batch).logits, want[task])
    assert fingerprint(esft.restore(model)) == before


@pytest.mark.parametrize("reads", ["layer", "expert"])
def test_mixtures_of_loras_are_restored(reads, host, batch, tmp_path):
    model = mixed(host(), gate_input=reads)
    again = rocket.load(host(), rocket.save(model, tmp_path / "run"))
    assert again.rocket == model.rocket
    assert_same(model, again, batch)
    with pytest.raises(Refusal, match="E-MODEL: the model holds a mixture already"):
        rocket.load(model, tmp_path / "run")


@pytest.mark.filterwarnings("ignore")  # some families announce what they lack
@pytest.mark.parametrize("family", FAMILIES)
def test_upcycled_models_of_every_dense_family_are_restored(family, host, batch, tmp_path):
    model = upcycled(host(family))
    again = upcycling.load(host(family), upcycling.save(model, tmp_path / "run"))
    assert again.upcycling == model.upcycling
    assert_same(model, again, batch)


@pytest.mark.parametrize(
    "changes",
    [{"layers": (1,)}, {"combine": "renormalised", "top_k": 2}, {"dtype": torch.bfloat16}],
)
def test_upcycled_models_of_every_kind_are_restored_and_train_on(changes, host, batch, tmp_path):
    dtype = changes.pop("dtype", torch.float32)
    model = upcycled(host(dtype=dtype), **changes)
    again = upcycling.load(host(dtype=dtype), upcycling.save(model, tmp_path / "run"))
    assert_same(model, again, batch)
    losses = []
    for each in (model.train(), again.train()):
        loss = each(**batch).loss + upcycling.balance_loss(each)
        loss.backward()
        losses.append((loss, next(p.grad for p in each.parameters() if p.grad is not None)))
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))


def test_experts_specialised_in_an_upcycled_model_are_restored(host, batch, tmp_path):
    def base():
        return upcycling.upcycle(host(), upcycling.Config(experts=3))

    model = esft.specialise(base(), esft.Selection(experts={0: (2,), 1: (0, 1)}))
    drift(esft.trained(model))
    assert_same(model, esft.load(base(), esft.save(model, tmp_path / "run")), batch)


def test_only_what_was_trained_is_stored_and_no_pickle(method, tmp_path):
    module, base, make = method
    model = make(base())
    folder = module.save(model, tmp_path / "run")
    names = {"MANIFEST.json", "MANIFEST.sha256", "trained.safetensors"}
    assert {path.name for path in tmp_path.rglob("*")} - {"run", "experts.json"} == names
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(load_file(folder / "trained.safetensors")) == len(trained)
    content = json.loads((folder / "MANIFEST.json").read_text())
    assert content["base"] == fingerprint(base())


def test_a_failed_save_leaves_nothing_behind(method, tmp_path, monkeypatch):
    module, base, make = method
    model = make(base())
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        module.save(model, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_saving_refuses_an_existing_folder_bad_numbers_and_other_models(method, tmp_path):
    module, base, make = method
    model = make(base())
    module.save(model, tmp_path / "run")
    with pytest.raises(Refusal, match="E-EXISTS"):
        module.save(model, tmp_path / "run")
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).view(-1)[0] = torch.nan
    with pytest.raises(Refusal, match="E-NONFINITE"):
        module.save(model, tmp_path / "other")
    with pytest.raises(Refusal, match="E-MODEL"):
        module.save(base(), tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def reseal(folder, **changes):
    """Seal a changed folder again, so that only its content is wrong."""
    kept = json.loads((folder / checkpoint.MANIFEST).read_text())
    for name in (checkpoint.MANIFEST, checkpoint.DIGEST):
        (folder / name).unlink()
    facts = {key: kept[key] for key in kept.keys() - {"files", "sizes"}}
    checkpoint.seal(folder, **{**facts, **changes})


def other_tensors(change):
    def damage(folder):
        path = folder / "trained.safetensors"
        save_file(change(load_file(path)), path)
        reseal(folder)

    return damage


def other_file(name, content):
    def damage(folder):
        (folder / name).write_bytes(content)
        reseal(folder)

    return damage


def flip(name):
    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        content[-5] ^= 1
        (folder / name).write_bytes(content)

    return damage


def swap_in_manifest(old, new):
    """A manifest that is as good as before, but for one setting."""

    def damage(folder):
        path = folder / checkpoint.MANIFEST
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return damage


def without(name):
    return lambda folder: (folder / name).unlink()


ANY = {
    "missing": (other_tensors(lambda t: dict(list(t.items())[1:])), "E-KEYS: .*1 tensors missing"),
    "surplus": (other_tensors(lambda t: {**t, "x": torch.ones(1)}), "E-KEYS: .*1 surplus"),
    "renamed": (other_tensors(lambda t: {f"base.{k}": v for k, v in t.items()}), "E-KEYS"),
    "shape": (other_tensors(lambda t: {k: v[None].clone() for k, v in t.items()}), "E-SHAPE"),
    "dtype": (other_tensors(lambda t: {k: v.long() for k, v in t.items()}), "E-SHAPE"),
    "NaN": (other_tensors(lambda t: {k: v * torch.nan for k, v in t.items()}), "E-NONFINITE"),
    "not safetensors": (other_file("trained.safetensors", b"no"), "E-FORMAT"),
    "flipped bit": (flip("trained.safetensors"), "E-HASH"),
    "flipped bit of the manifest": (flip("MANIFEST.json"), "E-MANIFEST"),
    "flipped bit of its hash": (flip("MANIFEST.sha256"), "E-MANIFEST"),
    "another base": (swap_in_manifest('"base": "', '"base": "0'), "E-MANIFEST"),
    "no tensors": (without("trained.safetensors"), "E-MANIFEST"),
    "no manifest": (without("MANIFEST.json"), "E-MANIFEST"),
    "broken JSON": (lambda f: (f / "MANIFEST.json").write_text("{"), "E-MANIFEST"),
    "another form": (lambda f: reseal(f, form="pesc/0"), "E-FORMAT"),
}
OWN = {
    "pesc": [
        (swap_in_manifest('"top_k": 2', '"top_k": 1'), "E-MANIFEST"),
        (lambda f: reseal(f, sparse="yes"), "E-TYPE: .*sparse is 'yes'"),
        (lambda f: reseal(f, config={"moe_scaling": 1}), "E-FORMAT: .*setting"),
    ],
    "esft": [
        (flip("experts.json"), r"E-FORMAT|E-HASH"),
        (other_file("experts.json", b'{"experts": {"1": [5, 2, 3], "2": [5]}}'), "E-SHAPE"),
        (other_file("experts.json", b'{"experts": {"1": [5, 8], "2": [5]}}'), "E-RANGE"),
        (other_file("experts.json", b'{"experts": {"1": [5, 2]}}'), "E-KEYS"),
    ],
    "rocket": [
        (lambda f: reseal(f, experts="abcd"), "E-TYPE: .*experts is 'abcd'"),
        (lambda f: reseal(f, scales=[2.0]), "E-RANGE: .*4 experts and 1 scales"),
        (lambda f: reseal(f, config={"gate": "none"}), "E-FORMAT: .*setting"),
    ],
    "upcycling": [
        (swap_in_manifest('"experts": 3', '"experts": 2'), "E-MANIFEST"),
        (lambda f: reseal(f, config={"experts": 3}), "E-FORMAT: .*setting"),
    ],
}


def test_a_damaged_checkpoint_is_refused_and_the_base_untouched(method, batch, tmp_path):
    module, base, make = method
    name = module.__name__.rpartition(".")[2]
    plain = base()
    before = fingerprint(plain), [type(part) for part in plain.modules()]
    good = module.save(make(base()), tmp_path / "run")
    content = {path: path.read_bytes() for path in good.iterdir()}
    for damage, message in [*ANY.values(), *OWN[name]]:
        for path, good_bytes in content.items():
            path.write_bytes(good_bytes)
        damage(good)
        with pytest.raises(Refusal, match=message):
            module.load(plain, good)
        assert (fingerprint(plain), [type(part) for part in plain.modules()]) == before


def test_a_refused_swap_leaves_the_task_that_was_there(sparse, batch, tmp_path):
    folder = esft.save(specialised(sparse()), tmp_path / "run")
    ANY["shape"][0](folder)
    model = specialised(sparse(), (1, 4), seed=9)
    before = model(**batch).logits
    with pytest.raises(Refusal, match="E-SHAPE"):
        esft.load(model, folder)
    assert torch.equal(model(**batch).logits, before)


def test_a_checkpoint_of_another_base_or_method_is_refused_with_both_hashes(method, tmp_path):
    module, base, make = method
    folder = module.save(make(base()), tmp_path / "run")
    other = base()
    with torch.no_grad():
        other.model.embed_tokens.weight[0, 0] += 1
    hashes = f"{fingerprint(base())[:12]}.*{fingerprint(other)[:12]}"
    with pytest.raises(Refusal, match=f"E-BASE: .*{hashes}"):
        module.load(other, folder)
    with pytest.raises(Refusal, match="E-NOFILE"):
        module.load(other, tmp_path / "none")
    with pytest.raises(Refusal, match=r"E-FORMAT|E-NOFILE"):
        (esft if module is pesc else pesc).load(other, folder)


@pytest.mark.parametrize("method", ["pesc", "esft", "rocket"], indirect=True)
def test_a_checkpoint_of_the_first_form_is_read(method, batch, tmp_path):
    module, base, make = method
    model = make(base())
    folder = module.save(model, tmp_path / "run")
    reseal(folder, form=f"{module.__name__.rpartition('.')[2]}/1")
    (folder / checkpoint.DIGEST).unlink()
    assert_same(model, module.load(base(), folder), batch)


def test_a_round_trip_brings_back_the_base_and_the_answers(sparse, batch):
    model = specialised(sparse(), **OPTIONS)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    want = model(**inputs).logits
    found = esft.round_trip(model, inputs)
    assert found["base unchanged"] == 1 and found["loading"] == 0
    assert found["merging"] == pytest.approx(0, abs=1e-5)
    assert found["bytes"] > sum(p.nbytes for p in esft.trained(specialised(sparse())).values())
    torch.testing.assert_close(model(**inputs).logits, want)
    moved = specialised(sparse())
    with torch.no_grad():
        moved.get_input_embeddings().weight[5, 0] += 1
    with pytest.raises(Refusal, match="E-BASE"):
        esft.round_trip(moved, inputs)
