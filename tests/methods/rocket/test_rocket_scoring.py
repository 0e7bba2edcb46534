"""Perplexities against transformers one sample at a time; accuracies; packs; rationales."""

import json
import math
from copy import deepcopy
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel

from moebook.data import IGNORED, encode, tasks, templates
from moebook.errors import Refusal
from moebook.kernels import matmul
from moebook.methods.rocket import loras
from moebook.methods.rocket import score as scoring
from tests.refusals import refused


@pytest.fixture
def score(model, tokenizer, bank, shots):
    """Score shots under the bank."""
    call = partial(scoring.log_perplexity, model, tokenizer)
    return lambda rows=shots, members=bank, **how: call(members, rows, **how)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [1, 300, 8192])
def test_perplexities_equal_transformers_one_sample_at_a_time(
    tokens, reduction, base, make_bank, shots, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(matmul, "ENOUGH", 0)  # as if the model were wide
    model = base(attention_dropout=0.5).train()
    bank = make_bank(model, 3)
    how = {"reduction": reduction, "tokens": tokens}
    shots = [*shots, {**shots[0], "answer": "34"}]  # which goes on where another ends
    nats = scoring.log_perplexity(model, tokenizer, bank, shots, **how)
    assert model.training
    for name, lora in bank.items():
        peft = PeftModel.from_pretrained(
            base(), loras.write(lora, tmp_path / name)
        ).eval()
        for place, row in enumerate(encode(shots, tokenizer, max_length=1000)):
            ids = torch.tensor([row["input_ids"]])
            labels = torch.tensor([row["labels"]])
            with torch.no_grad():
                loss = peft(input_ids=ids, labels=labels).loss.item()
            count = 1
            if reduction == "sum":
                count = sum(label != IGNORED for label in row["labels"])
            assert nats.loc[name, place] == pytest.approx(loss * count, rel=1e-5)


def test_reasoning_perplexity_scores_the_rationale_too(score, shots, model):
    assert np.array_equal(score(), score())
    assert not any(module._forward_hooks for module in model.modules())
    plain, expanded = (
        score(rows, reduction="sum") for rows in (shots, scoring.expand(shots))
    )
    assert (expanded > plain).all(axis=None)


def test_accuracy_counts_greedy_answers_after_post_processing(
    model, base, bank, shots, tokenizer, tmp_path
):
    peft = PeftModel.from_pretrained(
        base(), loras.write(bank["b"], tmp_path / "b")
    ).eval()
    gold = []
    for shot, row in zip(shots, encode(shots, tokenizer, max_length=1000), strict=True):
        ids = torch.tensor([row["input_ids"][: row["labels"].count(IGNORED)]])
        mask = torch.ones_like(ids)
        out = peft.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False
        )
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        gold.append({**shot, "answer": text})
    gold[1]["answer"] += "!"
    for post, right in (
        (str, [True, False, True, True]),
        (lambda text: text.rstrip("!"), True),
    ):
        solved = scoring.accuracy(model, tokenizer, bank, gold, post=post, limit=6)
        assert (solved.loc["b"] == right).all()


def test_a_right_number_is_right_in_other_words(model, bank, tokenizer, monkeypatch):
    raw = {
        "question": "How many?",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24.\n#### 1,024",
    }
    rows = [{"task": "GSM8K"} | templates.gsm8k(raw, "here")] * 3
    texts = ["In all 500 + 524 = 1024 clips.", "1,024", "1024 in May, so 24"]
    limits = set()
    monkeypatch.setattr(
        scoring, "generate", lambda *_, limit: limits.update(limit) or texts
    )
    solved = scoring.accuracy(model, tokenizer, bank, rows)
    assert solved.to_numpy().tolist() == [[True, True, False]] * 4
    assert limits == {256}
    for order in scoring.ORDERS:
        assert scoring.expand(rows, order=order)[0]["answer"].count("<<48/2=24>>") == 1


@pytest.mark.parametrize(
    ("compare", "right"),
    [
        (
            None,
            [True, False, False, True],
        ),  # "exact": an answer of the file has two lines
        ("first_line", [True, False, True, True]),
        ("verb", [True, True, True, True]),
    ],
)
def test_rows_of_a_users_file_are_judged_and_cut_by_its_own_task_each_by_its_limit(
    compare, right, model, bank, tokenizer, tmp_path, monkeypatch
):
    answers = ["Opens a\nfile.", "Opens it", "Opens a"]
    rows = [{"prompt": str(n), "answer": text} for n, text in enumerate(answers)]
    file = tmp_path / "verbs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tasks.Task.from_jsonl(file, compare=compare, max_new_tokens=7)
    own = [{"task": "own_verbs", **row} for row in rows]
    known = {"task": "gcd", "prompt": "4 and 6?", "answer": "2"}
    told = ["Opens a\nfile.", "Opens that", "Opens a\nline", "2"]
    asked = []
    monkeypatch.setattr(
        scoring, "generate", lambda *_, limit: asked.append([*limit]) or told
    )
    shots = [*own, known, {"prompt": "5", "answer": "6"}]
    told.append("7")
    solved = scoring.accuracy(model, tokenizer, bank, shots, own={"own_verbs": task})
    assert solved.loc["a"].tolist() == [*right, False]
    assert asked == [[7, 7, 7, tasks.KNOWN["gcd"].max_new_tokens, 64]] * 4
    scoring.accuracy(model, tokenizer, bank, shots, limit=3)
    assert asked[-1] == [3] * 5


def test_each_context_is_continued_to_its_own_limit(model, tokenizer):
    contexts = [[0, 5, 6], [0, 7], [0, 8, 9, 10]]
    alone = [
        scoring.generate(model, tokenizer, [ids], limit=most)[0]
        for ids, most in zip(contexts, (5, 1, 3), strict=True)
    ]
    assert scoring.generate(model, tokenizer, contexts, limit=[5, 1, 3]) == alone
    arrays = [np.array(ids) for ids in contexts]
    assert scoring.generate(model, tokenizer, arrays, limit=[5, 1, 3]) == alone


def test_a_linear_layer_takes_a_vector_inside_products():
    layer = torch.nn.Linear(4, 3)
    x = torch.randn(4)
    with torch.no_grad(), scoring.Products():
        torch.testing.assert_close(layer(x), layer(x[None])[0])


def test_scores_are_equations_4_and_5():
    nats = pd.DataFrame([[1.0, 2.0], [700.0, 800.0]], index=["a", "b"])
    hits = pd.DataFrame([[True, False], [True, True]], index=["a", "b"])
    table = scoring.scores(nats, hits)
    assert table.loc["a", "log_perplexity"] == pytest.approx(
        math.log(math.e + math.e**2)
    )
    # Though exp(800) overflows a double.
    assert table.loc["b", "log_perplexity"] == pytest.approx(800.0)
    assert table["accuracy"].tolist() == [0.5, 1.0]


def test_a_candidate_without_a_finite_loss_is_left_out_and_named(score, bank):
    next(iter(bank["b"].up.values()))[0, 0] = torch.nan
    nats = score()
    hits = pd.DataFrame(True, index=list(bank), columns=range(4))
    with pytest.warns(
        UserWarning, match="W-NONFINITE: no finite perplexity from b; left out"
    ):
        assert list(scoring.scores(nats, hits).index) == ["a", "c", "d"]
    assert np.isfinite(nats.drop("b")).all(axis=None)
    with (
        pytest.warns(UserWarning),
        pytest.raises(Refusal, match="E-BANK: none of 1 LoRAs"),
    ):
        scoring.scores(nats.loc[["b"]], hits.loc[["b"]])


def test_a_program_is_right_when_it_passes_the_rows_tests(
    model, tokenizer, bank, monkeypatch
):
    def judged(program, *, tests, own):
        return "passed" if program.endswith(tests) else "failed"

    monkeypatch.setattr(scoring.sandbox, "ready", lambda: None)
    monkeypatch.setattr(scoring.sandbox, "judged", judged)
    texts = iter(["def total(a, b): ...", *["x = 1"] * 9])
    monkeypatch.setattr(scoring, "generate", lambda *_, **__: [next(texts)])
    row = {"task": "MBPP", "prompt": "Add.", "answer": "def add(a, b): ..."}
    row["tests"] = (
        "total(a, b): ...\nadd = total\n"  # Table 8's prompt names no function
    )
    assert scoring.accuracy(model, tokenizer, bank, [row])[0].tolist()[:2] == [
        True,
        False,
    ]


@pytest.mark.parametrize("name", ["add", "sum", "pow"])
@pytest.mark.parametrize("written", ["", "total"])
def test_a_function_of_pythons_own_name_is_the_programs(
    name, written, model, tokenizer, bank, monkeypatch
):
    def judged(program, *, tests, own=()):
        # As `inside.judge`: names that Python has are its own, others the program's.
        names = {}
        exec(program, names)
        theirs = {name: names[name] for name in {"add", *own} & names.keys()}
        exec(tests, theirs)
        return "passed" if theirs["right"] else "failed"

    monkeypatch.setattr(scoring.sandbox, "ready", lambda: None)
    monkeypatch.setattr(scoring.sandbox, "judged", judged)
    program = f"def {written or name}(a, b, c):\n    return a + b * c"
    monkeypatch.setattr(scoring, "generate", lambda *_, **__: [program])
    row = {"task": "MBPP", "prompt": "Add.", "tests": f"right = {name}(1, 2, 4) == 9"}
    row["answer"] = f"def {name}(a, b, c): ..."
    if name == "sum":  # Python's takes no three
        row["tests"] = "right = sum(1, c=4, b=2) == 9"
    assert scoring.accuracy(model, tokenizer, bank, [row])[0].all()


def test_what_cannot_be_scored_is_refused(score, shots, model, bank, tokenizer):
    bare = [{"prompt": "x" * 300, "answer": "y"}]
    host = (model, tokenizer)
    code = {
        "task": "MBPP",
        "prompt": "Add.",
        "answer": "def f(a, b):\n    return a + b",
    }
    two = pd.DataFrame(1.0, [*"ab"], [0])
    three = pd.DataFrame(1.0, [*"abc"], [0])
    for message, call in {
        "E-KSHOT: have 0": lambda: score([]),
        "E-BANK: the bank is empty": lambda: score(members={}),
        "E-KSHOT: shot 0 has .* the model takes 256": lambda: score(bare),
        "E-CHOICE: reduction is 'max'": lambda: score(reduction="max"),
        "E-RANGE: tokens is 0": lambda: score(tokens=0),
        "E-RANGE: limit is 0": lambda: scoring.accuracy(*host, bank, shots, limit=0),
        "E-CHOICE: order is 'both'": lambda: scoring.expand(shots, order="both"),
        "E-DATA: row 0 has no rationale": lambda: scoring.expand(bare),
        "E-DATA: row 1: field 'answer' is missing": lambda: scoring.expand(
            [shots[0], {"prompt": "x", "rationale": "y"}]
        ),
        "E-KSHOT: have 4 annotated rows": lambda: scoring.draw(shots, 5, 0),
        "E-KSHOT: have 4 annotated rows, need K = 0": lambda: scoring.draw(shots, 0, 0),
        "E-BANK: .* different LoRAs": lambda: scoring.scores(two, three),
        "E-SANDBOX: task 'MBPP': code is right": lambda: scoring.accuracy(
            *host, bank, [code]
        ),
    }.items():
        with pytest.raises(Refusal, match=message):
            call()
    for message, part, name, value in (
        ("config.logit_scale, expected one", model.config, "logit_scale", 0.5),
        ("config.lm_head_multiplier, exp", model.config, "lm_head_multiplier", 0.5),
        ("a bias, expected one product", model, "lm_head", torch.nn.Linear(32, 300)),
        ("layer 1 has no attention", model.model.layers[1], "self_attn", None),
    ):
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(Refusal, match=message),
        ):
            patch.setattr(part, name, value, raising=False)
            score()


def test_loras_on_the_head_are_refused_since_it_runs_on_the_answers_alone(
    score, model, make_bank
):
    bank = make_bank(model, targets=("q_proj", "lm_head"))
    refused("E-KEYS: 'a' adapts lm_head, outside of the decoder", score, members=bank)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("MiniMax", {"num_local_experts": 2, "num_experts_per_tok": 1}),
        ("FalconH1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8}),
    ],
)
def test_a_model_that_keeps_a_state_for_a_row_reads_no_packs(
    family, more, base, lora, tokenizer, shots
):
    model = base(family=family, **more)
    path = "model.layers.0.self_attn.q_proj"
    one = lora(model, "one", 0, targets=(path,))
    refused(
        "E-MODEL: .* keeps a state for a row.*: packed samples would mix",
        scoring.log_perplexity,
        model,
        tokenizer,
        {"one": one},
        shots,
    )


@pytest.mark.parametrize("order", scoring.ORDERS)
def test_rationales_are_put_into_answers_in_both_orders(order, shots):
    for row, told in zip(shots, scoring.expand(shots, order=order), strict=True):
        text = told["answer"]
        assert row["rationale"] in text
        assert text.startswith(row["answer"]) is (order == "answer_first")
        assert text.endswith(row["answer"]) is (order == "rationale_first")


def test_shots_are_drawn_and_rationales_written_by_figure_3(
    model, tokenizer, shots, monkeypatch
):
    assert scoring.draw(shots, 3, 1) == scoring.draw(shots, 3, 1)
    assert len({row["prompt"] for row in scoring.draw(shots, 4, 2)}) == 4
    assert len(scoring.generate(model.train(), tokenizer, [[0, 5, 6]], limit=3)) == 1
    assert model.training
    seen = []

    def written(model, tok, contexts, *, limit):
        seen.extend(tok.decode(ids) for ids in contexts)
        return [f"Because {n}." for n in range(len(contexts))]

    monkeypatch.setattr(scoring, "generate", written)
    assert (
        scoring.write_rationales(shots, model, tokenizer)[1]["rationale"]
        == "Because 1."
    )
    assert "provide the answer first then with its explanation" in seen[0]
    assert seen[0].index("Question: Add 1 and 2.") < seen[0].index("Answer: 3.")
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    scoring.write_rationales(shots, model, tokenizer, order="rationale_first")
    assert seen[-1].startswith("[Read the question")
    assert "explanation first then with the answer" in seen[-1]
    monkeypatch.setattr(scoring, "generate", lambda m, t, c, limit: [" "] * len(c))
    with pytest.raises(Refusal, match="E-DATA: row 0: the model wrote no rationale"):
        scoring.write_rationales(shots, model, tokenizer)


PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{{ part['text'] }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (PARTS, "leaves out what is asked"),
        ("{% if false %}{% endif %}", "leaves out what is asked"),
        (
            "{{ raise_exception('no\\nuser') }}",
            "fails on a request .TemplateError: no user",
        ),
        ("{% for m in %}", "fails on a request .TemplateSyntaxError: "),
        ("{{ messages[1]['content'] }}", "fails on a request .UndefinedError: "),
        ({"rag": "x", "tool_use": "y"}, "fails on a request .ValueError: "),
    ],
)
def test_a_chat_template_that_does_not_ask_is_refused(
    template, words, model, shots, byte_tokenizer
):
    tokenizer = deepcopy(byte_tokenizer)
    tokenizer.chat_template = template
    refused(
        f"E-MODEL: the tokenizer's chat template {words}.*; take another model, or",
        scoring.write_rationales,
        shots,
        model,
        tokenizer,
    )
    tokenizer.chat_template = "{{ messages[0]['content'] | trim }}"
    asked = scoring._chat_ids(" What? ", tokenizer)
    assert tokenizer.decode(asked) == "What?"
