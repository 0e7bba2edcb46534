"""PEMs against PEFT's linear mixture and by hand; the vanilla rows against PEFT's own training."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel

from moebook import training
from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rivals import mixing, pems, tuning, vanilla
from moebook.models.checkpoint import fingerprint

PATH = "model.layers.1.self_attn.v_proj"
RECIPE = {"steps": 3, "batch": 4, "lr": 1e-2, "seed": 5}


def test_the_sum_is_pefts_linear_by_squares_and_a_lone_kind_is_itself(
    model, batch, rows, make_bank, peft
):
    bank = make_bank(model, 3)
    data = tuning.Data(rows)
    theirs = peft(bank, "linear", [1 / 9] * 3)
    tuned = pems.tuned(model, bank, data, pems.Config.preset("paper"))
    torch.testing.assert_close(
        model(**batch).logits, theirs(**batch).logits, rtol=1e-4, atol=1e-4
    )
    assert tuned.cost == tuning.Cost()
    assert tuned.detach()
    alike = {name: replace(bank["a"], name=name) for name in bank}
    merged = mixing.merged(alike, torch.ones(3) / 3, mix="factors")
    torch.testing.assert_close(merged.down[PATH], bank["a"].down[PATH])
    torch.testing.assert_close(merged.up[PATH], bank["a"].up[PATH])


def test_validation_takes_the_share_with_the_least_nats(model, rows, make_bank):
    bank = make_bank(model, 2)
    few = rows.select(range(8))
    for mix in ("factors", "outputs"):
        config = pems.Config.preset("released", mix=mix, grid=0.25)
        tuned = pems.tuned(model, bank, tuning.Data(few), config)
        found = training.nats(model, few)
        assert tuned.cost.forward == 5 * sum(map(len, few["input_ids"]))
        assert tuned.detach()
        tried = []
        for share in (0, 0.25, 0.5, 0.75, 1):
            one = mixing.merged(bank, torch.tensor([share, 1.0 - share]), mix=mix)
            with rocket.loras.attached(model, [one]):
                tried.append(training.nats(model, few))
        assert found == pytest.approx(min(tried), rel=1e-5)


ROWS = {
    "random": (vanilla, {}),
    "source_best_sft": (vanilla, {"named": "c"}),
    "expert_lora": (vanilla, {}),
    "best_by_shots_sft": (vanilla, {}),
    "bank": (pems, {"mix": "outputs"}),
}


@pytest.mark.parametrize("row", ROWS)
def test_tuning_one_lora_is_pefts_own_and_the_same_training(
    row, model, base, rows, make_bank, batch, tmp_path
):
    module, changes = ROWS[row]
    before = fingerprint(model)
    bank = make_bank(model, 3)
    data = tuning.Data(rows.select(range(8)), chosen=rows)
    config = module.Config.preset(row, **changes)
    start = module.tuned(model, bank, data, config, **RECIPE | {"lr": 1e-30})
    folder = start.save(tmp_path / "start")  # chosen and hardly moved
    start.detach()
    tuned = module.tuned(model, bank, data, config, **RECIPE)
    theirs = PeftModel.from_pretrained(base(), folder, is_trainable=True)
    history = training.fit(theirs, data.rows, **RECIPE)
    assert tuned.history.loss == pytest.approx(history.loss, rel=1e-5)
    torch.testing.assert_close(
        model(**batch).logits, theirs.eval()(**batch).logits, rtol=1e-3, atol=1e-3
    )
    trained = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert tuned.cost.trained == trained
    assert fingerprint(tuned.detach()) == before


def test_the_chosen_lora_is_the_one_named_drawn_or_best_on_the_shots(
    model, rows, make_bank
):
    bank = make_bank(model)
    few = rows.select(range(6))
    nats = {}
    for name, lora in bank.items():
        with rocket.loras.attached(model, [lora]):
            nats[name] = training.nats(model, few)
    data = tuning.Data(few)
    taken = set()
    for row, seed in (
        ("source_best", 0),
        ("best_by_shots", 0),
        *(("random", n) for n in range(20)),
    ):
        changes = {"source_best": {"named": "b"}, "random": {"tune": False}}.get(
            row, {}
        )
        config = vanilla.Config.preset(row, **changes)
        tuned = vanilla.tuned(model, bank, data, config, seed=seed)
        taken.add((row, *tuned.origin.names))
        tuned.detach()
    best = min(nats, key=nats.get)
    drawn = {("random", name) for name in bank}
    assert taken == {("source_best", "b"), ("best_by_shots", best), *drawn}
    with pytest.raises(Refusal, match="E-NAME: no LoRA 'bb' in the bank; did you mean"):
        vanilla.tuned(model, bank, data, vanilla.Config(choose="named", named="bb"))
    with pytest.raises(Refusal, match="E-USAGE: choose is 'named', named is None"):
        vanilla.Config.preset("source_best")
    with pytest.raises(Refusal, match="leave named out, or choose='named'"):
        vanilla.Config(choose="random", named="b")
    with pytest.raises(
        Refusal, match="E-CHOICE: coefficients by validation are of 2 LoRAs"
    ):
        pems.tuned(model, bank, data, pems.Config.preset("released"))
