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
EVIL = r"(?:.|\w)*(?<!j)"  # fails on each path's last letter, in more ways than can be tried
NAMED = "TimeoutError: .*name the layers in full"
SHARD = "adapter_model-00001-of-00002.safetensors"  # which PEFT does not read either


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
        path.write_text(
            json.dumps({key: v for key, v in content.items() if v is not ...})
        )

    return damage


def tensors(change):
    return lambda folder: save_file(
        change(load_file(folder / loras.TENSORS)), folder / loras.TENSORS
    )


def renamed(old, new):
    return tensors(
        lambda t: {name.replace(old, new): tensor for name, tensor in t.items()}
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (settings(r=8), r"E-SHAPE: .*is \(4, 32\).*expected \(8, 32\)"),
        (settings(r=0), "E-RANGE: .*adapter_config.json: r is 0"),
        (settings(r=10**7), "E-RANGE: .*equal to 4096"),
        (settings(r=...), "E-TYPE: .*r is missing"),
        (settings(lora_alpha=math.nan), "E-RANGE: .*lora_alpha is nan"),
        # Patterns that Python's own search would not come back from.
        (settings(target_modules=EVIL), f"E-CONFIG: .*{NAMED}"),
        (settings(exclude_modules=EVIL), f"E-CONFIG: .*{NAMED}"),
        (settings(rank_pattern={EVIL: 4}), f"E-CONFIG: .*{NAMED}"),
        (settings(alpha_pattern={EVIL: 4}), f"E-CONFIG: .*{NAMED}"),
        (settings(target_modules="(q_proj"), "E-CONFIG: .*pattern '.q_proj'.*missing"),
        (
            settings(target_modules=".*q_proj"),
            "E-KEYS: .*0 tensors missing .*4 surplus .*v_proj",
        ),
        (
            settings(target_modules=["q_proj"]),
            "E-KEYS: .*0 tensors missing .*4 surplus .*v_proj",
        ),
        (
            settings(target_modules=["q_proj", "v_proj", "o_proj"]),
            "E-KEYS: .*4 tensors missing",
        ),
        (
            settings(target_modules=["(a+)+$"]),
            "E-KEYS: .*fit no linear layer of the base",
        ),
        (settings(target_modules=["query"]), "E-KEYS: .*query"),
        (settings(target_modules="q_proj"), "E-KEYS: .*'q_proj' fit no linear layer"),
        (settings(target_modules=[]), "E-KEYS: .*fit no linear layer"),
        (settings(target_modules=None), "E-TYPE: .*target_modules"),
        (settings(exclude_modules=["q_proj"]), "E-KEYS: .*4 surplus .*q_proj"),
        (settings(layers_to_transform=[0]), "E-KEYS: .*4 surplus .*layers.1"),
        (
            settings(layers_to_transform=[0], target_modules=".*_proj"),
            "E-CONFIG: .*PEFT refuses",
        ),
        (settings(layers_pattern="layers"), "E-CONFIG: .*PEFT refuses"),
        (
            settings(layers_to_transform=[0], layers_pattern="(a+)+"),
            "E-TYPE: .*layers_pattern",
        ),
        (
            settings(rank_pattern={"q_proj": 2}),
            r"E-SHAPE: .*q_proj.*\(4, 32\).*expected \(2, 32",
        ),
        (settings(rank_pattern={"q_proj": 0}), "E-RANGE: .*rank_pattern.q_proj is 0"),
        (
            settings(alpha_pattern={"q_proj": math.inf}),
            "E-RANGE: .*alpha_pattern.q_proj is inf",
        ),
        (settings(modules_to_save=["lm_head"]), "E-CONFIG: .*modules_to_save"),
        (settings(use_dora=True), "E-CONFIG: .*use_dora"),
        # This one changes the base's own weights.
        (settings(init_lora_weights="pissa"), "E-CHOICE: .*gaussian"),
        (settings(peft_type="IA3"), "E-CHOICE: .*expected 'LORA'"),
        (settings(lora_alpa=3), "E-CONFIG: .*did you mean 'lora_alpha'"),
        (settings(use_lora_fa=True), "E-CONFIG: .*use_lora_fa is True, expected none"),
        # Keys of another form: without PEFT's prefix, with the adapter's name, of other tensors.
        (
            tensors(lambda t: {f"x.{k}": v for k, v in t.items()}),
            "E-KEYS: .*8 tensors.*8 surplus",
        ),
        (renamed("base_model.model.", ""), "E-KEYS: .*8 tensors missing.*8 surplus"),
        (
            renamed(".weight", ".default.weight"),
            "E-KEYS: .*8 tensors missing.*8 surplus",
        ),
        (
            tensors(lambda t: t | {"base_model.model.x.lora_B.bias": torch.ones(4)}),
            "E-KEYS: .*1 surplus .*x.lora_B.bias",
        ),
        (tensors(lambda t: {}), "E-KEYS: .*8 tensors missing"),
        # Parts of a sharded training that were not gathered.
        (tensors(lambda t: {k: v[:0] for k, v in t.items()}), r"E-SHAPE: .*\(0, 32\)"),
        (tensors(lambda t: dict(list(t.items())[::2])), "E-KEYS: .*4 tensors missing"),
        (tensors(lambda t: {k: v * math.nan for k, v in t.items()}), "E-NONFINITE"),
        (tensors(lambda t: {k: v.long() for k, v in t.items()}), "E-SHAPE: .*int64"),
        (tensors(lambda t: {"x": torch.zeros(2**20)}), "E-LIMIT"),
        (lambda folder: (folder / loras.SETTINGS).unlink(), "E-NOFILE"),
        (
            lambda folder: (folder / loras.TENSORS).rename(folder / loras.PICKLE),
            "E-PICKLE",
        ),
        (lambda folder: (folder / loras.TENSORS).rename(folder / SHARD), "E-NOFILE"),
        (lambda folder: (folder / loras.TENSORS).write_bytes(b"no"), "E-FORMAT"),
    ],
)
def test_what_is_not_a_plain_lora_of_this_base_is_refused(
    damage, message, foreign, model
):
    _, folder = foreign
    damage(folder)
    start = time.process_time()
    refused(message, loras.read, folder, model, ANY)
    assert time.process_time() - start < 5


def test_what_peft_saved_computes_the_same_and_a_pickle_is_not_read(
    foreign, base, batch
):
    peft, folder = foreign
    model = base()
    settings(of_a_newer_peft=None, merge_weights=False)(folder)
    lora = loras.read(folder, model, ANY)
    assert lora.scale == 8 / 2  # alpha / sqrt r
    with loras.attached(model, [lora]), torch.no_grad():
        assert torch.allclose(model(**batch).logits, peft(**batch).logits, atol=1e-6)
    refused(
        r"E-KEYS: .*4 tensors missing",
        loras.read,
        folder,
        base(num_hidden_layers=3),
        ANY,
    )
    (folder / loras.PICKLE).write_bytes(b"cos\nsystem\n")
    with pytest.warns(UserWarning, match="W-PICKLE"):
        assert loras.read(folder, model, ANY).rank == 4


UNSLOTH = (  # as it writes what it adapts
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|v_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))"
)
LAST = "model.layers.1.self_attn.v_proj"
PLAIN = {
    "names": {},
    "a pattern": {"target_modules": UNSLOTH},
    "all linear layers": {"target_modules": "all-linear"},
    "paths": {"target_modules": [LAST, "model.layers.0.mlp.down_proj"]},
    "a rank by name": {"rank_pattern": {"v_proj": 2}},
    "a rank above": {"rank_pattern": {LAST: 9}},
    "ranks by pattern": {
        "rank_pattern": {r"layers\.1\..*": 3, "q_proj": 2, "no_such": 7}
    },
    "a rank at the start": {"rank_pattern": {r"^model.layers.0.self_attn.q_proj": 6}},
    "one rank for all": {"rank_pattern": {".*": 2}},
    "an alpha by name": {"alpha_pattern": {"q_proj": 3}},
    "alphas by pattern": {"alpha_pattern": {r".*\.0\..*": 5, LAST: 0.5}},
    "both": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers.1.*v_proj": 17}},
    "both, by roots": {
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 5},
        "use_rslora": True,
    },
    "a layer": {"layers_to_transform": 1},
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "all but names": {"exclude_modules": ["q_proj", LAST]},
    "all but a pattern": {"exclude_modules": r".*layers\.0\..*"},
    "a pattern but names": {
        "target_modules": r".*_proj",
        "exclude_modules": ["gate_proj"],
    },
}


@pytest.fixture
def saved(base, tmp_path):
    """Saves a LoRA by PEFT, whose A and B are drawn, and returns its folder."""

    def save(model=None, **changes):
        model = model or base()
        usual = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
        torch.manual_seed(0)
        config = LoraConfig(**{**usual, "init_lora_weights": False, **changes})
        get_peft_model(model, config).save_pretrained(tmp_path / "saved")
        return tmp_path / "saved"

    return save


def compared(folder, base, batch):
    """Logits of a folder by PEFT and by us, from it and from what we write of it."""
    model = base()
    lora = loras.read(folder, model, ANY)
    again = loras.read(loras.write(lora, folder / "again"), model, ANY)
    peft = PeftModel.from_pretrained(base(), folder).eval()
    written = PeftModel.from_pretrained(base(), folder / "again").eval()
    mixed = rocket.apply.build(
        base(), [lora], rocket.Config(candidates=1, experts=1, top_k=1)
    )
    with torch.no_grad():
        logits = [peft(**batch).logits, written(**batch).logits, mixed(**batch).logits]
        for one in (lora, again):
            with loras.attached(model, [one]):
                logits.append(model(**batch).logits)
        assert (logits[0] - model(**batch).logits).abs().max() > 0.1
    return logits


@pytest.mark.filterwarnings(
    "ignore:The following rank_pattern keys did not match:RuntimeWarning"
)
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_loras_compute_what_they_do_in_peft_however_their_layers_are_named(
    kind, saved, base, batch
):
    want, *got = compared(saved(**PLAIN[kind]), base, batch)
    for logits in got:
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True")
@pytest.mark.parametrize(
    "edit",
    [
        {
            "auto_mapping": {
                "base_model_class": "LlamaForCausalLM",
                "unsloth_fixed": True,
                "parent_library": "os",
            }
        },
        {"target_modules": UNSLOTH},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "v_proj", "in_proj_qkv", "linear-fc1", "(a+)+$"]},
        {"fan_in_fan_out": True},
        {"exclude_modules": ["lm_head"]},
        # What PEFT 0.2 wrote, and fields of versions to come that are not in use.
        {
            "bias": "none",
            "enable_lora": None,
            "merge_weights": False,
            "peft_version": ...,
            "rank_pattern": ...,
            "alpha_pattern": ...,
            "use_rslora": ...,
            "init_lora_weights": ...,
            "layers_to_transform": ...,
            "layers_pattern": ...,
            "revision": ...,
            "use_dora": ...,
        },
    ],
)
@pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")
def test_plain_loras_that_other_tools_and_versions_wrote_compute_what_they_do_in_peft(
    edit, saved, base, batch
):
    # Which PEFT spells out where it saves.
    named = edit.get("target_modules") == "all-linear"
    folder = saved(target_modules="all-linear") if named else saved()
    settings(**edit)(folder)
    want, *got = compared(folder, base, batch)
    for logits in got:
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)


def test_layers_of_several_ranks_and_scales_are_filled_up_to_one(saved, model):
    ranks = {"q_proj": 2, LAST: 6}
    alphas = {"q_proj": 3}
    lora = loras.read(saved(rank_pattern=ranks, alpha_pattern=alphas), model, ANY)
    stored = load_file(saved(rank_pattern=ranks, alpha_pattern=alphas) / loras.TENSORS)
    assert (lora.rank, lora.alpha, lora.scale) == (6, 8, 8 / 6)
    for path, down in lora.down.items():
        rank = (
            {"q_proj": 2, "v_proj": 4}[path.rpartition(".")[2]] if path != LAST else 6
        )
        scale = (3 if path.endswith("q_proj") else 8) / rank
        up = lora.up[path]
        own = stored[loras.KEY.format(path, "B")]
        assert torch.equal(down[:rank], stored[loras.KEY.format(path, "A")])
        assert not down[rank:].any()
        assert not up[:, rank:].any()
        torch.testing.assert_close(up[:, :rank] * lora.scale, own * scale)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "E-CONFIG: .*use_dora is True"),
        ({"bias": "all"}, "E-CONFIG: .*bias is 'all'"),
        ({"lora_bias": True}, "E-CONFIG: .*lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "E-CONFIG: .*modules_to_save"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "E-KEYS: .*embed"),
        ({"trainable_token_indices": [3, 4]}, "E-CONFIG: .*trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "E-CONFIG: .*layer_replication"),
        ({"init_lora_weights": "pissa"}, "E-CHOICE: .*init_lora_weights"),
        ({"init_lora_weights": "olora"}, "E-CHOICE: .*init_lora_weights"),
        (
            {"target_modules": [], "target_parameters": ["q_proj.weight"]},
            "E-CONFIG: .*target_param",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")
def test_what_peft_saves_of_other_kinds_is_refused(changes, message, saved, model):
    refused(message, loras.read, saved(**changes), model, ANY)


def test_a_lora_of_a_base_of_other_shapes_is_refused(saved, base):
    folder = saved()
    refused(
        r"E-SHAPE: .*expected \(4, 64\)", loras.read, folder, base(hidden_size=64), ANY
    )
    refused(
        "E-SHAPE: .*v_proj.lora_B", loras.read, folder, base(num_key_value_heads=4), ANY
    )
    every = saved(target_modules=UNSLOTH)
    refused(
        "E-KEYS: .*4 tensors missing", loras.read, every, base(num_hidden_layers=3), ANY
    )
    refused("E-KEYS: .*4 surplus", loras.read, every, base(num_hidden_layers=1), ANY)


@pytest.mark.parametrize("hosted", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_loras_of_16_bits_compute_in_float32_as_in_peft(
    stored, hosted, foreign, base, batch
):
    _, folder = foreign
    settings(lora_alpha=7)(folder)  # in 16 bits a factor of 3.5 would round
    tensors(
        lambda factors: {name: factor.to(stored) for name, factor in factors.items()}
    )(folder)
    model = base(dtype=hosted)
    lora = loras.read(folder, base(dtype=hosted), ANY)
    peft = PeftModel.from_pretrained(base(dtype=hosted), folder).eval()
    alone = rocket.Config(candidates=1, experts=1, top_k=1)
    mixed = rocket.apply.build(base(dtype=hosted), [lora], alone)
    with torch.no_grad(), loras.attached(model, [lora]):
        scored, want, served = (each(**batch).logits for each in (model, peft, mixed))
    bound = {torch.bfloat16: 0.0, torch.float32: 1e-5, torch.float64: 1e-13}[hosted]
    assert (scored - want).abs().max() <= bound * want.abs().max()
    assert (served - want).abs().max() <= bound * want.abs().max()


def test_a_written_lora_is_pefts_too_bound_to_base_and_bytes(
    model, base, batch, lora, tmp_path
):
    one = lora(
        model, "one", 0, provenance={"data": "sums", "prompts": ["ab"], "training": {}}
    )
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


@pytest.mark.parametrize(("rows", "count"), [(3, 2), (3, 4), (9, 4), (2, 3)])
def test_rows_that_have_no_equal_parts_are_refused(rows, count, model, batch, bank):
    ids = batch["input_ids"][:1].repeat(rows, 1)
    with loras.attached(model, list(bank.values())[:count]), torch.no_grad():
        refused(f"E-SHAPE: attached: {rows} rows for {count} LoRAs", model, ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"size": math.nan},
            r"E-NONFINITE: down\.model\.layers.*q_proj is .*neither NaN",
        ),
        ({"size": 1e39}, "E-NONFINITE: down"),
        ({"alpha": math.inf}, "E-RANGE: alpha is inf"),
        ({"rank": 0}, "E-RANGE: rank is 0"),
    ],
)
def test_a_lora_that_is_not_finite_is_refused_where_it_is_made(
    changes, message, model, lora
):
    refused(message, lora, model, "one", 0, **changes)


@pytest.mark.parametrize(
    "kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool]
)
@pytest.mark.parametrize("part", ["down", "up"])
def test_factors_of_8_bits_are_refused_by_their_dtype(part, kind):
    factors = {"down": {"l": torch.ones(1, 3)}, "up": {"l": torch.ones(2, 1)}}
    factors[part]["l"] = factors[part]["l"].to(kind)
    words = f"E-DTYPE: {part}.l is .*expected floating-point numbers of 16 bits"
    refused(words, loras.Lora, "one", 1, 1.0, **factors)


@pytest.mark.parametrize("widths", [(4, 5), (3, 6)])
def test_loras_of_layers_of_other_widths_do_not_stand_in_one_group(widths):
    def made(name, width, out):
        return loras.Lora(
            name, 1, 1.0, {"l": torch.ones(1, width)}, {"l": torch.ones(out, 1)}
        )

    loras.check_alike([made("a", 3, 5), made("b", 3, 5)])
    words = r"E-SHAPE: 'a' and 'b': l is \[D, O\] = \[3, 5\] and "
    refused(words, loras.check_alike, [made("a", 3, 5), made("b", *widths)])


def test_a_base_that_peft_notes_in_several_ways_is_one_where_it_is_one_folder(
    model, lora, tmp_path, monkeypatch
):
    (tmp_path / "bases" / "llama").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("bases/llama")
    monkeypatch.chdir(tmp_path)

    def noted(*bases):
        provenances = [{"base": base} for base in bases]
        return [lora(model, b["base"], 0, provenance=b) for b in provenances]

    one = ["bases/llama", "./bases/llama", f"{tmp_path}/bases/llama/", "link"]
    loras.check_alike(noted(*one))
    fix = "or edit base_model_name_or_path in adapter_config.json if they are one"
    for two in (("link", "other"), ("gone/llama", "./gone/llama"), ("link", "org/a")):
        refused(f"E-BANK: .*PEFT notes it.*, {fix}", loras.check_alike, noted(*two))
