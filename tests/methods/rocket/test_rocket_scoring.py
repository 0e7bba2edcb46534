"""Perplexities against transformers one sample at a time; accuracies; what is left out."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel

from moebook.data import IGNORED, encode, raw
from moebook.errors import Refusal
from moebook.kernels import matmul
from moebook.methods import rocket
from moebook.methods.rocket import generation, scoring


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [1, 300, 8192])
def test_perplexities_equal_transformers_one_sample_at_a_time(
    tokens, reduction, base, make_bank, shots, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(matmul, "ENOUGH", 0)  # as if the model were wide
    model = base(attention_dropout=0.5)
    bank = make_bank(model, 3)
    found = scoring.perplexity(
        model.train(), tokenizer, bank, shots, reduction=reduction, tokens=tokens
    )
    assert model.training
    rows = encode(shots, tokenizer, max_length=1000)
    for name, each in bank.items():
        folder = tmp_path / name
        if not folder.exists():
            rocket.loras.write(each, folder)
        peft = PeftModel.from_pretrained(base(), folder).eval()
        for place, row in enumerate(rows):
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            with torch.no_grad():
                nats = peft(input_ids=ids, labels=labels).loss.item()
            count = sum(label != IGNORED for label in row["labels"])
            expected = nats if reduction == "mean" else nats * count
            assert found.loc[name, place] == pytest.approx(expected, rel=1e-5)


def test_scoring_leaves_the_base_without_hooks_and_repeats(base, make_bank, shots, tokenizer):
    model = base()
    bank = make_bank(model, 3)
    one = scoring.perplexity(model, tokenizer, bank, shots)
    two = scoring.perplexity(model, tokenizer, bank, shots)
    assert np.array_equal(one, two)
    assert not any(module._forward_hooks for module in model.modules())


def test_reasoning_perplexity_scores_the_rationale_too(base, make_bank, shots, tokenizer):
    model = base()
    bank = make_bank(model, 2)
    plain = scoring.perplexity(model, tokenizer, bank, shots, reduction="sum")
    told = rocket.rationales.expand(shots)
    reasoned = scoring.perplexity(model, tokenizer, bank, told, reduction="sum")
    assert (reasoned > plain).all(axis=None)


def test_accuracy_counts_greedy_answers_after_post_processing(
    base, make_bank, shots, tokenizer, tmp_path
):
    model = base()
    bank = make_bank(model, 2)
    contexts = [
        row["input_ids"][: row["labels"].count(IGNORED)]
        for row in encode(shots, tokenizer, max_length=1000)
    ]
    rocket.loras.write(bank["b"], tmp_path / "b")
    peft = PeftModel.from_pretrained(base(), tmp_path / "b").eval()
    texts = []
    for context in contexts:
        ids = torch.tensor([context])
        out = peft.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    gold = [{**row, "answer": text} for row, text in zip(shots, texts, strict=True)]
    gold[1]["answer"] += "!"
    found = scoring.accuracy(model, tokenizer, bank, gold, post=lambda text: text, limit=6)
    assert found.loc["b"].tolist() == [True, False, True, True]
    lenient = scoring.accuracy(
        model, tokenizer, bank, gold, post=lambda text: text.rstrip("!"), limit=6
    )
    assert lenient.loc["b"].all()


def test_a_right_number_is_right_in_other_words_and_code_is_refused(
    base, make_bank, tokenizer, monkeypatch
):
    told = {"question": "How many?", "answer": "Natalia sold 48/2 = <<48/2=24>>24.\n#### 1,024"}
    rows = [{"task": "GSM8K"} | raw.gsm8k(told, "here")] * 3
    texts, asked = ["In all 500 + 524 = 1024 clips.", "1,024", "1024 in May, so 24"], []

    def greedy(*_, limit):
        asked.append(limit)
        return texts

    monkeypatch.setattr(generation, "greedy", greedy)
    bank = make_bank(model := base(), 2)
    found = scoring.accuracy(model, tokenizer, bank, rows)
    assert found.to_numpy().tolist() == [[True, True, False]] * 2
    assert asked == [256, 256]
    for order in ("answer_first", "rationale_first"):
        (expanded, *_) = rocket.rationales.expand(rows, order=order)
        assert expanded["answer"].count("<<48/2=24>>") == 1
    for name in ("MBPP", "mbpp"):
        code = {"task": name, "prompt": "Add.", "answer": "def f(a, b):\n    return a + b"}
        with pytest.raises(Refusal, match=f"E-SANDBOX: task '{name}': code is right when it runs"):
            scoring.accuracy(model, tokenizer, bank, [code])


def test_scores_are_equations_4_and_5():
    nats = pd.DataFrame([[1.0, 2.0], [700.0, 800.0]], index=["a", "b"])
    hits = pd.DataFrame([[True, False], [True, True]], index=["a", "b"])
    found = scoring.scores(nats, hits)
    assert found.loc["a", "perplexity"] == pytest.approx(math.log(math.e + math.e**2))
    assert found.loc["b", "perplexity"] == pytest.approx(800.0)  # exp(800) overflows a double
    assert found["accuracy"].tolist() == [0.5, 1.0]


def test_a_candidate_without_a_finite_loss_is_left_out_and_named(base, make_bank, shots, tokenizer):
    model = base()
    bank = make_bank(model, 3)
    next(iter(bank["b"].up.values()))[0, 0] = torch.nan
    nats = scoring.perplexity(model, tokenizer, bank, shots)
    hits = pd.DataFrame(True, index=list(bank), columns=range(4))
    with pytest.warns(UserWarning, match="W-NONFINITE: no finite perplexity from b; left out"):
        found = scoring.scores(nats, hits)
    assert list(found.index) == ["a", "c"]
    assert found.attrs["excluded"] == ["b"]
    assert np.isfinite(nats.loc[["a", "c"]]).all(axis=None)
    with (
        pytest.warns(UserWarning, match="W-NONFINITE"),
        pytest.raises(Refusal, match="E-BANK: none of 1 LoRAs"),
    ):
        scoring.scores(nats.loc[["b"]], hits.loc[["b"]])
    with pytest.raises(Refusal, match=r"E-BANK: .* different LoRAs"):
        scoring.scores(nats, hits.iloc[::-1])


def test_shots_are_drawn_without_replacement_and_never_beyond_the_data(shots):
    assert scoring.draw(shots, 3, 1) == scoring.draw(shots, 3, 1)
    assert len({row["prompt"] for row in scoring.draw(shots, 4, 2)}) == 4
    for wanted, rows in ((5, shots), (1, []), (0, shots)):
        with pytest.raises(Refusal, match=f"E-KSHOT: have {len(rows)} annotated rows"):
            scoring.draw(rows, wanted, 0)


def test_what_cannot_be_scored_is_refused(base, make_bank, shots, tokenizer):
    model = base()
    bank = make_bank(model, 2)
    with pytest.raises(Refusal, match="E-KSHOT: have 0"):
        scoring.perplexity(model, tokenizer, bank, [])
    with pytest.raises(Refusal, match="E-BANK: the bank is empty"):
        scoring.perplexity(model, tokenizer, {}, shots)
    with pytest.raises(Refusal, match="E-CHOICE: reduction is 'max'"):
        scoring.perplexity(model, tokenizer, bank, shots, reduction="max")
    long = [{"prompt": "x" * 300, "answer": "y"}]
    with pytest.raises(Refusal, match=r"E-KSHOT: shot 0 has .* the model takes 256"):
        scoring.perplexity(model, tokenizer, bank, long)


def test_generation_gives_the_mode_back(base, tokenizer):
    model = base().train()
    assert len(generation.greedy(model, tokenizer, [[0, 5, 6]], limit=3)) == 1
    assert model.training
