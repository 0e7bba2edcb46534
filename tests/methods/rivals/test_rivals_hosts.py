"""Every rival on four kinds of host: base untouched, same text with a cache, saved and loaded."""

import copy
from contextlib import nullcontext

import pytest
import torch
from peft import PeftModel

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
from moebook.methods.rivals.tuning import Data
from moebook.models.checkpoint import fingerprint

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
    assert fingerprint(done.detach()) == before
    assert torch.equal(model(**batch).logits, plain)
    if (folder / "adapter_config.json").exists():
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), folder)(**batch).logits
        torch.testing.assert_close(loaded, logits, rtol=1e-4, atol=1e-4)
    else:
        module.load(model, folder)
        assert torch.equal(model(**batch).logits, logits)
