"""A PEFT folder is exactly a LoRA of this base, or it is refused in one line."""

import json
import math
import time

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from moebook.methods import rocket
from moebook.methods.rocket import loras
from moebook.models.checkpoint import fingerprint
from tests.refusals import refused

ANY = "f" * 64  # a fingerprint, which a LoRA without our manifest does not ask for


@pytest.fixture
def foreign(base, tmp_path):
    """A LoRA that PEFT itself saved: no manifest of ours."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    model = get_peft_model(base(), LoraConfig(**settings, use_rslora=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "foreign")
    return model.eval(), tmp_path / "foreign"


def settings(**changes):
    """Rewrite fields of a folder's settings; those given as ... go."""

    def damage(folder):
        path = folder / loras.SETTINGS
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: v for key, v in content.items() if v is not ...}))

    return damage


def tensors(change):
    return lambda folder: save_file(
        change(load_file(folder / loras.TENSORS)), folder / loras.TENSORS
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (settings(r=8), r"E-SHAPE: .*is \(4, 32\).*expected \(8, 32\)"),
        (settings(r=0), "E-RANGE: .*adapter_config.json: r is 0"),
        (settings(r=10**7), "E-RANGE: .*equal to 4096"),
        (settings(r=...), "E-TYPE: .*r is missing"),
        (settings(lora_alpha=math.nan), "E-RANGE: .*lora_alpha is nan"),
        (settings(target_modules="(.*)*q_proj"), "E-TYPE: .*target_modules.*list"),
        (settings(target_modules=["(a+)+$"]), "E-TYPE: .*pattern"),
        (settings(target_modules=["query"]), "E-KEYS: .*query"),
        (settings(rank_pattern={"(a+)+$": 4}), "E-CONFIG: .*rank_pattern"),
        (settings(modules_to_save=["lm_head"]), "E-CONFIG: .*modules_to_save"),
        (settings(use_dora=True), "E-CONFIG: .*use_dora"),
        # This one changes the base's own weights.
        (settings(init_lora_weights="pissa"), "E-CHOICE: .*gaussian"),
        (settings(peft_type="IA3"), "E-CHOICE: .*expected 'LORA'"),
        (settings(lora_alpa=3), "E-CONFIG: .*did you mean 'lora_alpha'"),
        (settings(use_lora_fa=True), "E-CONFIG: .*use_lora_fa is True, expected none"),
        (settings(auto_mapping={"parent_library": "os"}), "E-TYPE: .*'os'"),
        (tensors(lambda t: {f"x.{k}": v for k, v in t.items()}), "E-KEYS: .*8 tensors.*8 surplus"),
        (tensors(lambda t: dict(list(t.items())[::2])), "E-KEYS: .*4 tensors missing"),
        (tensors(lambda t: {k: v * math.nan for k, v in t.items()}), "E-NONFINITE"),
        (tensors(lambda t: {k: v.long() for k, v in t.items()}), "E-SHAPE: .*int64"),
        (tensors(lambda t: {"x": torch.zeros(2**20)}), "E-LIMIT"),
        (lambda folder: (folder / loras.SETTINGS).unlink(), "E-NOFILE"),
        (lambda folder: (folder / loras.TENSORS).rename(folder / loras.PICKLE), "E-PICKLE"),
        (lambda folder: (folder / loras.TENSORS).write_bytes(b"no"), "E-FORMAT"),
    ],
)
def test_what_is_not_a_plain_lora_of_this_base_is_refused(damage, message, foreign, model):
    _, folder = foreign
    damage(folder)
    start = time.perf_counter()
    refusal = refused(message, loras.read, folder, model, ANY)
    assert time.perf_counter() - start < 5
    assert "\n" not in str(refusal)


def test_what_peft_saved_computes_the_same_and_a_pickle_is_not_read(foreign, base, batch):
    (peft, folder), model = foreign, base()
    settings(of_a_newer_peft=None, merge_weights=False)(folder)
    lora = loras.read(folder, model, ANY)
    assert lora.scale == 8 / 2  # alpha / sqrt r
    with loras.attached(model, [lora]), torch.no_grad():
        assert torch.allclose(model(**batch).logits, peft(**batch).logits, atol=1e-6)
    refused(r"E-KEYS: .*4 tensors missing", loras.read, folder, base(num_hidden_layers=3), ANY)
    (folder / loras.PICKLE).write_bytes(b"cos\nsystem\n")
    with pytest.warns(UserWarning, match="W-PICKLE"):
        assert loras.read(folder, model, ANY).rank == 4


@pytest.mark.parametrize("hosted", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_loras_of_16_bits_compute_in_float32_as_in_peft(stored, hosted, foreign, base, batch):
    _, folder = foreign
    settings(lora_alpha=7)(folder)  # in 16 bits a factor of 3.5 would round
    tensors(lambda factors: {name: factor.to(stored) for name, factor in factors.items()})(folder)
    model, lora = base(dtype=hosted), loras.read(folder, base(dtype=hosted), ANY)
    peft = PeftModel.from_pretrained(base(dtype=hosted), folder).eval()
    alone = rocket.Config(candidates=1, experts=1, top_k=1)
    mixed = rocket.mixture.build(base(dtype=hosted), [lora], alone)
    with torch.no_grad(), loras.attached(model, [lora]):
        scored, want, served = (each(**batch).logits for each in (model, peft, mixed))
    bound = {torch.bfloat16: 0.0, torch.float32: 1e-5, torch.float64: 1e-13}[hosted]
    assert (scored - want).abs().max() <= bound * want.abs().max()
    assert (served - want).abs().max() <= bound * want.abs().max()


def test_a_written_lora_is_pefts_too_bound_to_base_and_bytes(model, base, batch, lora, tmp_path):
    one = lora(model, "one", 0, provenance={"data": "sums", "prompts": ["ab"], "training": {}})
    folder = loras.write(one, tmp_path / "one")
    again = loras.read(folder, model, fingerprint(model))
    assert (again.digest, again.provenance) == (one.digest, one.provenance)
    peft = PeftModel.from_pretrained(base(), folder).eval()
    with loras.attached(model, [one]), torch.no_grad():
        assert torch.allclose(model(**batch).logits, peft(**batch).logits, atol=1e-6)
    refused("E-EXISTS", loras.write, one, folder)
    refused(r"E-BASE: .* belongs to base", loras.read, folder, model, ANY)
    payload = bytearray((folder / loras.TENSORS).read_bytes())
    payload[-3] ^= 1
    (folder / loras.TENSORS).write_bytes(payload)
    refused("E-HASH", loras.read, folder, model, fingerprint(model))


def test_several_loras_at_once_equal_one_after_another(model, batch, bank):
    together = {key: value.repeat(4, 1) for key, value in batch.items()}
    with loras.attached(model, list(bank.values())), torch.no_grad():
        parts = model(**together).logits.chunk(4)
    for lora, logits in zip(bank.values(), parts, strict=True):
        with loras.attached(model, [lora]), torch.no_grad():
            assert torch.allclose(model(**batch).logits, logits, atol=1e-5)


@pytest.mark.parametrize(("changes", "message"), [
    ({"size": math.nan}, r"E-NONFINITE: down\.model\.layers.*q_proj is .*neither NaN"),
    ({"size": 1e39}, "E-NONFINITE: down"), ({"alpha": math.inf}, "E-RANGE: alpha is inf"),
    ({"rank": 0}, "E-RANGE: rank is 0"),
])  # fmt: skip
def test_a_lora_that_is_not_finite_is_refused_where_it_is_made(changes, message, model, lora):
    refused(message, lora, model, "one", 0, **changes)
