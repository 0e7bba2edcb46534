"""Perplexities against transformers one sample at a time; accuracies; packs; rationales."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from moebook.data import IGNORED, encode, templates
from moebook.errors import Refusal
from moebook.kernels import matmul
from moebook.methods.rocket import loras, scoring


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [1, 300, 8192])
def test_perplexities_equal_transformers_one_sample_at_a_time(
    tokens, reduction, base, make_bank, shots, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(matmul, "ENOUGH", 0)  # as if the model were wide
    model = base(attention_dropout=0.5)
    bank = make_bank(model, 3)
    found = scoring.log_perplexity(
        model.train(), tokenizer, bank, shots, reduction=reduction, tokens=tokens
    )
    assert model.training
    rows = encode(shots, tokenizer, max_length=1000)
    for name, each in bank.items():
        folder = tmp_path / name
        if not folder.exists():
            loras.write(each, folder)
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
    one = scoring.log_perplexity(model, tokenizer, bank, shots)
    two = scoring.log_perplexity(model, tokenizer, bank, shots)
    assert np.array_equal(one, two)
    assert not any(module._forward_hooks for module in model.modules())


def test_reasoning_perplexity_scores_the_rationale_too(base, make_bank, shots, tokenizer):
    model = base()
    bank = make_bank(model, 2)
    plain = scoring.log_perplexity(model, tokenizer, bank, shots, reduction="sum")
    told = scoring.expand(shots)
    reasoned = scoring.log_perplexity(model, tokenizer, bank, told, reduction="sum")
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
    loras.write(bank["b"], tmp_path / "b")
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
    rows = [{"task": "GSM8K"} | templates.gsm8k(told, "here")] * 3
    texts, asked = ["In all 500 + 524 = 1024 clips.", "1,024", "1024 in May, so 24"], []

    def greedy(*_, limit):
        asked.append(limit)
        return texts

    monkeypatch.setattr(scoring, "generate", greedy)
    bank = make_bank(model := base(), 2)
    found = scoring.accuracy(model, tokenizer, bank, rows)
    assert found.to_numpy().tolist() == [[True, True, False]] * 2
    assert asked == [256, 256]
    for order in ("answer_first", "rationale_first"):
        (expanded, *_) = scoring.expand(rows, order=order)
        assert expanded["answer"].count("<<48/2=24>>") == 1
    for name in ("MBPP", "mbpp"):
        code = {"task": name, "prompt": "Add.", "answer": "def f(a, b):\n    return a + b"}
        with pytest.raises(Refusal, match=f"E-SANDBOX: task '{name}': code is right when it runs"):
            scoring.accuracy(model, tokenizer, bank, [code])


def test_scores_are_equations_4_and_5():
    nats = pd.DataFrame([[1.0, 2.0], [700.0, 800.0]], index=["a", "b"])
    hits = pd.DataFrame([[True, False], [True, True]], index=["a", "b"])
    found = scoring.scores(nats, hits)
    assert found.loc["a", "log_perplexity"] == pytest.approx(math.log(math.e + math.e**2))
    assert found.loc["b", "log_perplexity"] == pytest.approx(800.0)  # exp(800) overflows a double
    assert found["accuracy"].tolist() == [0.5, 1.0]


def test_a_candidate_without_a_finite_loss_is_left_out_and_named(base, make_bank, shots, tokenizer):
    model = base()
    bank = make_bank(model, 3)
    next(iter(bank["b"].up.values()))[0, 0] = torch.nan
    nats = scoring.log_perplexity(model, tokenizer, bank, shots)
    hits = pd.DataFrame(True, index=list(bank), columns=range(4))
    with pytest.warns(UserWarning, match="W-NONFINITE: no finite perplexity from b; left out"):
        found = scoring.scores(nats, hits)
    assert list(found.index) == ["a", "c"]
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
        scoring.log_perplexity(model, tokenizer, bank, [])
    with pytest.raises(Refusal, match="E-BANK: the bank is empty"):
        scoring.log_perplexity(model, tokenizer, {}, shots)
    long = [{"prompt": "x" * 300, "answer": "y"}]
    with pytest.raises(Refusal, match=r"E-KSHOT: shot 0 has .* the model takes 256"):
        scoring.log_perplexity(model, tokenizer, bank, long)


def test_generation_gives_the_mode_back(base, tokenizer):
    model = base().train()
    assert len(scoring.generate(model, tokenizer, [[0, 5, 6]], limit=3)) == 1
    assert model.training


SAMPLES = [
    ([5, 6, 7, 8, 1], 3),
    ([5, 6, 9, 1], 2),
    ([4, 4, 4], 2),
    ([5, 6, 7, 2, 2, 1], 3),
    ([5, 6, 7, 8, 1], 4),  # the first one again, with a shorter answer
]


def items():
    return [
        {"input_ids": ids, "labels": [IGNORED] * first + ids[first:], "length": len(ids)}
        for ids, first in SAMPLES
    ]


@pytest.mark.parametrize("limit", [1, 5, 9, 100])
def test_every_sample_can_be_read_back_from_what_its_tokens_see(limit):
    found = {}
    for pack in scoring.packs(items(), limit):
        assert len(pack.tokens) <= limit or len(pack.lines) == 1
        at = 0
        for line, length in zip(pack.lines, pack.answers.lengths.tolist(), strict=True):
            last = int(pack.answers.readers[at + length - 1])
            path = pack.seen[last].nonzero().flatten()
            assert pack.positions[path].tolist() == list(range(len(path)))
            answer = pack.answers.targets[at : at + length].tolist()
            found[line] = (pack.tokens[path].tolist() + answer[-1:], length)
            at += length
    assert found == {n: (ids, len(ids) - first) for n, (ids, first) in enumerate(SAMPLES)}


def test_a_common_beginning_stands_once():
    (pack,) = scoring.packs(items(), 100)
    rows = [tuple(pack.tokens[seen].tolist()) for seen in pack.seen]
    begun = {tuple(ids[: end + 1]) for ids, _ in SAMPLES for end in range(len(ids) - 1)}
    assert sorted(rows) == sorted(begun)


def everywhere(model, seed, rank=3):
    """A LoRA on every linear layer of the decoder."""
    torch.manual_seed(seed)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    layers = loras.linears(model, names)
    down = {path: torch.randn(rank, layer.in_features) / 5 for path, layer in layers.items()}
    up = {path: torch.randn(layer.out_features, rank) / 5 for path, layer in layers.items()}
    return loras.Lora(str(seed), rank, 2.0, down, up)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_what_is_left_out_changes_no_hidden_state_that_is_read(layers, whole, base, make_bank):
    model = base(num_hidden_layers=layers)
    bank = list(make_bank(model, 3).values())
    if whole:
        bank = [everywhere(model, seed) for seed in range(3)]
    ids, places = torch.arange(10, 22).expand(3, -1), torch.tensor([4, 7, 11])
    with loras.attached(model.eval(), bank), torch.no_grad():
        wanted = model.model(input_ids=ids).last_hidden_state[:, places]
        with scoring.trimmed(model, 3, 12, places):
            found = model.model(input_ids=ids).last_hidden_state[:, places]
        again = model.model(input_ids=ids).last_hidden_state[:, places]
    torch.testing.assert_close(found, wanted)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda m: setattr(m.config, "logit_scale", 0.5), "config.logit_scale, expected one"),
        (lambda m: setattr(m, "lm_head", torch.nn.Linear(32, 259)), "a bias, expected one product"),
        (lambda m: delattr(m.model.layers[1], "self_attn"), "layer 1 has no attention"),
    ],
)
def test_a_base_whose_answers_cannot_be_read_off_a_pack_is_refused(
    alter, message, base, make_bank, shots, tokenizer
):
    model: LlamaForCausalLM = base()
    bank = make_bank(model, 2)
    alter(model)
    with pytest.raises(Refusal, match=f"E-MODEL: .*{message}"):
        scoring.log_perplexity(model, tokenizer, bank, shots)


def test_linear_layers_go_through_products_and_give_what_they_gave(monkeypatch):
    seen = []
    product = scoring.product
    monkeypatch.setattr(scoring, "product", lambda *args: seen.append(1) or product(*args))
    torch.manual_seed(0)
    x = torch.randn(2, 200, 96)
    for bias in (True, False):
        layer = torch.nn.Linear(96, 300, bias=bias).requires_grad_(False)
        with scoring.Products():
            found = layer(x)
        wanted = layer.double()(x.double())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert len(seen) == 2
    layer(x.double())
    assert len(seen) == 2


@pytest.mark.parametrize("order", scoring.ORDERS)
def test_rationales_are_put_into_answers_in_both_orders(order, shots):
    for row, told in zip(shots, scoring.expand(shots, order=order), strict=True):
        text = told["answer"]
        assert row["rationale"] in text
        assert text.startswith(row["answer"]) is (order == "answer_first")
        assert text.endswith(row["answer"]) is (order == "rationale_first")


def test_a_model_writes_rationales_from_the_prompt_of_figure_3(base, tokenizer, shots, monkeypatch):
    seen = []

    def written(model, tok, contexts, *, limit):
        seen.extend(tok.decode(ids) for ids in contexts)
        return [f"Because {n}." for n in range(len(contexts))]

    monkeypatch.setattr(scoring, "generate", written)
    found = scoring.write_rationales(shots, base(), tokenizer)
    assert found[1]["rationale"] == "Because 1."
    assert "provide the answer first then with its explanation" in seen[0]
    assert seen[0].index("Question: Add 1 and 2.") < seen[0].index("Answer: 3.")
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    scoring.write_rationales(shots, base(), tokenizer, order="rationale_first")
    assert seen[-1].startswith("[Read the question")
    assert "explanation first then with the answer" in seen[-1]
    monkeypatch.setattr(scoring, "generate", lambda m, t, c, limit: [" "] * len(c))
    with pytest.raises(Refusal, match="E-DATA: row 0: the model wrote no rationale"):
        scoring.write_rationales(shots, base(), tokenizer)


def test_missing_rationales_are_refused():
    with pytest.raises(Refusal, match="E-DATA: row 0 has no rationale"):
        scoring.expand([{"prompt": "a", "answer": "b"}])
