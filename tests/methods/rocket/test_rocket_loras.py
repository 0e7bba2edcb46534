"""A PEFT folder is exactly a LoRA of this base, or it is refused in one line."""

import json
import math
import time

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from moebook.errors import Refusal
from moebook.methods.rocket import loras
from moebook.models.checkpoint import fingerprint


@pytest.fixture
def foreign(base, tmp_path):
    """A LoRA that PEFT itself saved: no manifest of ours."""

    def make(**changes):
        torch.manual_seed(0)
        settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes}
        model = get_peft_model(base(), LoraConfig(**settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
        model.save_pretrained(tmp_path / "foreign")
        return model.eval(), tmp_path / "foreign"

    return make


def settings(without=None, **changes):
    def change(folder):
        path = folder / "adapter_config.json"
        content = {**json.loads(path.read_text()), **changes}
        content.pop(without, None)
        path.write_text(json.dumps(content))

    return change


def tensors(make):
    def change(folder):
        path = folder / "adapter_model.safetensors"
        save_file(make(load_file(path)), path)

    return change


def pickled(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def halved(found):
    return dict(list(found.items())[::2])


def huge(folder):
    save_file({"x": torch.zeros(2**20)}, folder / "adapter_model.safetensors")


DAMAGE = {
    "all keys renamed": (
        tensors(lambda t: {f"x.{k}": v for k, v in t.items()}),
        "E-KEYS: .*8 tensors missing.*8 surplus",
    ),
    "half of the keys": (tensors(halved), "E-KEYS: .*4 tensors missing"),
    "a key too many": (tensors(lambda t: {**t, "x": torch.ones(1)}), "E-KEYS: .*1 surplus"),
    "another rank inside": (settings(r=8), r"E-SHAPE: .*is \(4, 32\).*expected \(8, 32\)"),
    "rank 0": (settings(r=0), "E-RANGE: .*r is '0'"),
    "rank as text": (settings(r="4"), "E-RANGE"),
    "rank as a fraction": (settings(r=4.0), "E-RANGE"),
    "rank true": (settings(r=True), "E-RANGE"),
    "rank 10^7": (settings(r=10**7), "E-RANGE: .*from 1 to 512"),
    "alpha NaN": (settings(lora_alpha=math.nan), "E-RANGE: .*lora_alpha is 'nan'"),
    "alpha 1e38": (settings(lora_alpha=1e38), "E-RANGE"),
    "dropout 1": (settings(lora_dropout=1.0), "E-RANGE: .*lora_dropout"),
    "targets by regular expression": (
        settings(target_modules="(.*)*q_proj"), "E-CONFIG: .*a list of names"),
    "a regular expression among the names": (settings(target_modules=["(a+)+$"]), "E-CONFIG"),
    "rank pattern": (settings(rank_pattern={"(a+)+$": 4}), "E-CONFIG: .*rank_pattern"),
    "layer replication": (settings(layer_replication=[[0, 2]]), "E-CONFIG: .*layer_replication"),
    "modules to save": (settings(modules_to_save=["lm_head"]), "E-CONFIG: .*modules_to_save"),
    "DoRA": (settings(use_dora=True), "E-CONFIG: .*use_dora"),
    "a bias": (settings(bias="all"), "E-CONFIG: .*bias"),
    "a start that changes the base": (settings(init_lora_weights="pissa"), "E-CONFIG"),
    "another kind": (settings(peft_type="IA3"), "E-CONFIG: .*expected 'LORA'"),
    "an unknown field": (settings(lora_alpa=3), "E-CONFIG: .*did you mean 'lora_alpha'"),
    "code from outside": (settings(auto_mapping={"parent_library": "os"}), "E-CONFIG"),
    "a field missing": (settings(without="r"), "E-CONFIG: .*'r' is missing"),
    "targets the base has not": (settings(target_modules=["query"]), "E-KEYS: .*query"),
    "NaN": (tensors(lambda t: {k: v * math.nan for k, v in t.items()}), "E-NONFINITE"),
    "integers": (tensors(lambda t: {k: v.long() for k, v in t.items()}), "E-SHAPE: .*int64"),
    "not JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "E-FORMAT"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "E-FORMAT"),
    "no settings": (lambda f: (f / "adapter_config.json").unlink(), "E-NOFILE"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "E-NOFILE"),
    "only a pickle": (pickled, "E-PICKLE"),
    "not safetensors": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b"no"), "E-FORMAT"),
    "far too large": (huge, "E-LIMIT"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_lora_is_refused(kind, foreign, base):
    _, folder = foreign()
    damage, message = DAMAGE[kind]
    damage(folder)
    start = time.perf_counter()
    with pytest.raises(Refusal, match=message) as refusal:
        loras.read(folder, base(), "f" * 64)
    assert time.perf_counter() - start < 5
    assert "\n" not in str(refusal.value)


def test_what_peft_saved_is_read_and_computes_the_same(foreign, base, batch):
    peft, folder = foreign(use_rslora=True)
    found = loras.read(folder, base(), "f" * 64)
    assert found.scale == 8 / 2  # alpha / sqrt r
    model = base()
    with loras.attached(model, [found]), torch.no_grad():
        assert torch.allclose(model(**batch).logits, peft(**batch).logits, atol=1e-6)


def test_a_lora_written_and_read_is_the_same_and_peft_reads_it(base, batch, lora, tmp_path):
    model = base()
    one = lora(model, "one", 0, provenance={"data": "sums", "prompts": ["ab"], "training": {}})
    folder = loras.write(one, tmp_path / "one")
    again = loras.read(folder, model, fingerprint(model))
    assert again.digest == one.digest
    assert again.provenance == one.provenance
    peft = PeftModel.from_pretrained(base(), folder).eval()
    with loras.attached(model, [one]), torch.no_grad():
        assert torch.allclose(model(**batch).logits, peft(**batch).logits, atol=1e-6)
    with pytest.raises(Refusal, match="E-EXISTS"):
        loras.write(one, folder)


def test_a_lora_of_ours_is_bound_to_its_base_and_its_bytes(base, lora, tmp_path):
    model = base()
    folder = loras.write(lora(model, "one", 0), tmp_path / "one")
    with pytest.raises(Refusal, match=r"E-BASE: .* belongs to base"):
        loras.read(folder, model, "f" * 64)
    payload = bytearray((folder / "adapter_model.safetensors").read_bytes())
    payload[-3] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(payload)
    with pytest.raises(Refusal, match="E-HASH"):
        loras.read(folder, model, fingerprint(model))


def test_a_lora_of_a_deeper_base_is_refused(foreign, base):
    _, folder = foreign()
    with pytest.raises(Refusal, match=r"E-KEYS: .*4 tensors missing"):
        loras.read(folder, base(num_hidden_layers=3), "f" * 64)


def test_a_pickle_beside_the_tensors_is_not_read(foreign, base):
    _, folder = foreign()
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.warns(UserWarning, match="W-PICKLE"):
        assert loras.read(folder, base(), "f" * 64).rank == 4


def test_several_loras_at_once_equal_one_after_another(base, batch, make_bank):
    model = base()
    bank = list(make_bank(model, 3).values())
    together = {key: value.repeat(3, 1) for key, value in batch.items()}
    with loras.attached(model, bank), torch.no_grad():
        found = model(**together).logits.chunk(3)
    for each, logits in zip(bank, found, strict=True):
        with loras.attached(model, [each]), torch.no_grad():
            assert torch.allclose(model(**batch).logits, logits, atol=1e-5)
