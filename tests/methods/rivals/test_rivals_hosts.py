"""Every rival on four kinds of host: base untouched, same text with a cache, saved and loaded."""

import copy
import json
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from moebook.methods import rocket
from moebook.methods.rivals import (
    arrow,
    lorahub,
    mixlora,
    pems,
    phatgoose,
    pi_tuning,
    poly,
    smear,
)
from moebook.methods.rivals import rocket as mixture
from moebook.methods.rivals.tuning import Data
from moebook.models import checkpoint
from moebook.models.checkpoint import fingerprint
from tests.refusals import refused

RIVALS = {
    "lorahub": (lorahub, {"budget": 6}),
    "pems": (pems, {}),
    "mixlora": (mixlora, {"rate": 0.1}),
    "mixlora in the FFN": (mixlora, {"placement": "ffn", "balance": "pooled"}),
    "poly": (poly, {"rate": 0.1}),
    "pi_tuning": (pi_tuning, {"rate": 0.1}),
    "smear": (smear, {"rate": 0.1}),
    "smear as released": (smear, {"norm": "both", "pool": "all", "start": "random"}),
    "arrow": (arrow, {"top_k": 2}),
    "arrow by outputs": (arrow, {"top_k": 2, "mix": "outputs", "prototypes": "after"}),
    "phatgoose": (phatgoose, {"steps": 2, "batch": 4}),
}


def hosts():
    """Every rival on Llama and on one of the others; `make soak` has the rest of the pairs."""
    others = ("Qwen3", "Gemma2", "Mistral")
    cases = []
    for number, rival in enumerate(RIVALS):
        usual = ("Llama", others[number % len(others)])
        for family in ("Llama", *others):
            marks = [] if family in usual else [pytest.mark.soak]
            cases.append(pytest.param(family, rival, marks=marks))
    return cases


@pytest.mark.parametrize(("family", "rival"), hosts())
def test_it_trains_generates_and_loads_and_leaves_the_base(
    family, rival, host, batch, rows, make_bank, tmp_path
):
    module, changes = RIVALS[rival]
    model = host(family)
    bank = make_bank(model, 3)
    plain = model(**batch).logits
    before = fingerprint(model)
    few = rows.select(range(6))
    data = Data(few, chosen=few, sources=dict.fromkeys(bank, few))
    config = module.Config.preset("bank", **changes)
    done = module.tuned(
        model, bank, data, config, steps=2, batch=4, lr=1e-2, warmup=0.0
    )
    logits = model(**batch).logits
    searched = rival == "lorahub"  # which may find nothing better than the base
    assert searched or not torch.allclose(logits, plain, atol=1e-2)
    prompt = {
        "input_ids": batch["input_ids"][:1],
        "attention_mask": batch["attention_mask"][:1],
    }
    with smear.prompted(done, 9) if module is smear else nullcontext():
        texts = [
            model.generate(**prompt, max_new_tokens=6, do_sample=False, use_cache=cache)
            for cache in (True, False)
        ]
    assert torch.equal(*texts)
    assert texts[0].shape[1] > 9
    folder = done.save(tmp_path / "saved")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert fingerprint(done.detach()) == before
    assert torch.equal(model(**batch).logits, plain)
    if (folder / "adapter_config.json").exists():
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), folder)(**batch).logits
        torch.testing.assert_close(loaded, logits, rtol=1e-4, atol=1e-4)
    else:
        torch.manual_seed(7)
        module.load(model, folder)
        drawn = torch.rand(3)
        assert torch.equal(model(**batch).logits, logits)
        again = {name for name, p in model.named_parameters() if p.requires_grad}
        assert again == trained
        # The random state is the caller's.
        torch.manual_seed(7)
        assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("rival", ["smear", "mixlora in the FFN"])
def test_what_trained_of_the_base_trains_again_when_the_rival_is_off(
    rival, model, bank, tmp_path
):
    module, changes = RIVALS[rival]
    model.model.embed_tokens.requires_grad_(False)
    trains = [part.requires_grad for part in model.parameters()]
    done = module.attach(model, bank, module.Config.preset("bank", **changes))
    folder = done.save(tmp_path / "saved")
    for _ in range(2):
        assert not model.lm_head.weight.requires_grad
        done.detach()
        assert [part.requires_grad for part in model.parameters()] == trains
        done = module.load(model, folder)


def test_what_trained_of_the_base_trains_again_when_rockets_mixture_is_off(model, bank):
    model.model.embed_tokens.requires_grad_(False)
    trains = [part.requires_grad for part in model.parameters()]
    config = rocket.Config.preset("fixed", experts=len(bank), top_k=1)
    mixture.attach(model, bank, config).detach()
    assert [part.requires_grad for part in model.parameters()] == trains


EDITED = [
    ({"rank": -1}, "E-RANGE: .*rank is -1"),
    ({"rank": 2**62}, "E-RANGE: .*rank is 4611686018427387904"),
    ({"paths": ["q_proj", "v_proj"]}, "E-KEYS: .*'q_proj'"),
    ({"paths": ["model.norm"]}, "E-KEYS: .*'model.norm'"),
    ({"paths": ["nowhere"]}, "E-KEYS: .*'nowhere'"),
]


@pytest.mark.parametrize("rival", ["smear", "arrow", "mixlora"])
def test_a_folder_whose_settings_do_not_fit_is_refused_and_the_model_left_bare(
    rival, model, bank, tmp_path
):
    module, changes = RIVALS[rival]
    done = module.attach(model, bank, module.Config.preset("bank", **changes))
    folder = done.save(tmp_path / "saved")
    done.detach()
    facts = json.loads((folder / checkpoint.MANIFEST).read_text())
    for edited, message in EDITED:
        for name in (checkpoint.MANIFEST, checkpoint.DIGEST):
            (folder / name).unlink()
        checkpoint.seal(folder, **{**facts, **edited})
        refused(message, module.load, model, folder)
        assert not any(hasattr(part, "base_layer") for part in model.modules())


def test_a_model_with_pefts_lora_is_refused_for_that_reason(model, bank, tmp_path):
    done = smear.attach(model, bank, smear.Config())
    folder = done.save(tmp_path / "saved")
    done.detach()
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    adapted = get_peft_model(model, lora)
    message = "E-MODEL: the model holds LoRA .*: merge it"
    refused(message, smear.load, adapted, folder)
    refused(message, smear.attach, adapted, bank, smear.Config())
    refused(message, mixlora.attach, adapted, None, mixlora.Config())
