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

ANY = "f" * 64  # a fingerprint, which a LoRA without our manifest does not ask for


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, r"E-SHAPE: .*is \(4, 32\).*expected \(8, 32\)"),
        ({"r": 0}, "E-RANGE: .*r is '0'"),
        ({"r": "4"}, "E-RANGE"),
        ({"r": 4.0}, "E-RANGE"),
        ({"r": True}, "E-RANGE"),
        ({"r": 10**7}, "E-RANGE: .*from 1 to 512"),
        ({"r": ...}, "E-CONFIG: .*'r' is missing"),
        ({"lora_alpha": math.nan}, "E-RANGE: .*lora_alpha is 'nan'"),
        ({"lora_alpha": 1e38}, "E-RANGE"),
        ({"lora_dropout": 1.0}, "E-RANGE: .*lora_dropout"),
        ({"target_modules": "(.*)*q_proj"}, "E-CONFIG: .*a list of names"),
        ({"target_modules": ["(a+)+$"]}, "E-CONFIG"),
        ({"target_modules": ["query"]}, "E-KEYS: .*query"),
        ({"rank_pattern": {"(a+)+$": 4}}, "E-CONFIG: .*rank_pattern"),
        ({"layer_replication": [[0, 2]]}, "E-CONFIG: .*layer_replication"),
        ({"modules_to_save": ["lm_head"]}, "E-CONFIG: .*modules_to_save"),
        ({"use_dora": True}, "E-CONFIG: .*use_dora"),
        ({"bias": "all"}, "E-CONFIG: .*bias"),
        ({"init_lora_weights": "pissa"}, "E-CONFIG"),  # changes the base's own weights
        ({"peft_type": "IA3"}, "E-CONFIG: .*expected 'LORA'"),
        ({"lora_alpa": 3}, "E-CONFIG: .*did you mean 'lora_alpha'"),
        ({"auto_mapping": {"parent_library": "os"}}, "E-CONFIG"),
    ],
)
def test_settings_that_are_not_plain_loras_are_refused(changes, message, foreign, model):
    _, folder = foreign()
    path = folder / "adapter_config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: v for key, v in content.items() if v is not ...}))
    start = time.perf_counter()
    with pytest.raises(Refusal, match=message) as refusal:
        loras.read(folder, model, ANY)
    assert time.perf_counter() - start < 5
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {f"x.{k}": v for k, v in t.items()}, "E-KEYS: .*8 tensors miss.*8 surplus"),
        (lambda t: dict(list(t.items())[::2]), "E-KEYS: .*4 tensors missing"),
        (lambda t: {**t, "x": torch.ones(1)}, "E-KEYS: .*1 surplus"),
        (lambda t: {k: v * math.nan for k, v in t.items()}, "E-NONFINITE"),
        (lambda t: {k: v.long() for k, v in t.items()}, "E-SHAPE: .*int64"),
        (lambda t: {"x": torch.zeros(2**20)}, "E-LIMIT"),
    ],
)
def test_tensors_that_are_not_this_loras_are_refused(change, message, foreign, model):
    _, folder = foreign()
    path = folder / loras.TENSORS
    save_file(change(load_file(path)), path)
    with pytest.raises(Refusal, match=message):
        loras.read(folder, model, ANY)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (loras.SETTINGS, lambda path: path.write_text("{"), "E-FORMAT"),
        (loras.SETTINGS, lambda path: path.write_text("[]"), "E-FORMAT"),
        (loras.SETTINGS, lambda path: path.unlink(), "E-NOFILE"),
        (loras.TENSORS, lambda path: path.unlink(), "E-NOFILE"),
        (loras.TENSORS, lambda path: path.rename(path.with_name(loras.PICKLE)), "E-PICKLE"),
        (loras.TENSORS, lambda path: path.write_bytes(b"no"), "E-FORMAT"),
    ],
)
def test_files_that_are_missing_or_damaged_are_refused(file, damage, message, foreign, model):
    _, folder = foreign()
    damage(folder / file)
    with pytest.raises(Refusal, match=message):
        loras.read(folder, model, ANY)


def test_a_pickle_beside_the_tensors_is_not_read_and_another_depth_is_refused(foreign, base):
    _, folder = foreign()
    with pytest.raises(Refusal, match=r"E-KEYS: .*4 tensors missing"):
        loras.read(folder, base(num_hidden_layers=3), ANY)
    (folder / loras.PICKLE).write_bytes(b"cos\nsystem\n")
    with pytest.warns(UserWarning, match="W-PICKLE"):
        assert loras.read(folder, base(), ANY).rank == 4


def test_what_peft_saved_is_read_and_computes_the_same(foreign, model, batch):
    peft, folder = foreign(use_rslora=True)
    lora = loras.read(folder, model, ANY)
    assert lora.scale == 8 / 2  # alpha / sqrt r
    with loras.attached(model, [lora]), torch.no_grad():
        assert torch.allclose(model(**batch).logits, peft(**batch).logits, atol=1e-6)


def test_a_lora_written_and_read_is_the_same_and_peft_reads_it(model, base, batch, lora, tmp_path):
    one = lora(model, "one", 0, provenance={"data": "sums", "prompts": ["ab"], "training": {}})
    folder = loras.write(one, tmp_path / "one")
    again = loras.read(folder, model, fingerprint(model))
    assert (again.digest, again.provenance) == (one.digest, one.provenance)
    peft = PeftModel.from_pretrained(base(), folder).eval()
    with loras.attached(model, [one]), torch.no_grad():
        assert torch.allclose(model(**batch).logits, peft(**batch).logits, atol=1e-6)
    with pytest.raises(Refusal, match="E-EXISTS"):
        loras.write(one, folder)


def test_a_lora_of_ours_is_bound_to_its_base_and_its_bytes(model, bank, tmp_path):
    folder = loras.write(bank["a"], tmp_path / "a")
    with pytest.raises(Refusal, match=r"E-BASE: .* belongs to base"):
        loras.read(folder, model, ANY)
    payload = bytearray((folder / loras.TENSORS).read_bytes())
    payload[-3] ^= 1
    (folder / loras.TENSORS).write_bytes(payload)
    with pytest.raises(Refusal, match="E-HASH"):
        loras.read(folder, model, fingerprint(model))


def test_several_loras_at_once_equal_one_after_another(model, batch, bank):
    together = {key: value.repeat(4, 1) for key, value in batch.items()}
    with loras.attached(model, list(bank.values())), torch.no_grad():
        parts = model(**together).logits.chunk(4)
    for lora, logits in zip(bank.values(), parts, strict=True):
        with loras.attached(model, [lora]), torch.no_grad():
            assert torch.allclose(model(**batch).logits, logits, atol=1e-5)
