"""Tables, batches, averages and paired differences equal plain loops and sums."""

import copy
import random
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import lm_eval.api.task
import numpy as np
import pandas as pd
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from tokenizers.normalizers import Prepend
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from moebook import evaluation
from moebook.data import encode, tasks
from moebook.errors import Refusal
from moebook.evaluation.harness import Harness
from moebook.methods.pesc.measure import _row_losses
from moebook.methods.upcycling import representations
from moebook.methods.upcycling.representations import perplexities
from moebook.models.conventions import keeps_cache
from tests.refusals import refused

CONTEXTS = [
    "the sum",
    "a",
    "### Human:\nwhat is it?",
    "the human is the sum of",
    "zz zz",
]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def tokenizer(byte_tokenizer):
    return byte_tokenizer


@pytest.fixture
def llama(tiny):
    """Weights are large, so that greedy answers differ from prompt to prompt."""
    return tiny(initializer_range=0.4, tie_word_embeddings=False)


@dataclass
class Memory:
    """What a `Knower` keeps between the steps of a generation: the ids so far."""

    ids: torch.Tensor

    def batch_select_indices(self, lines):
        self.ids = self.ids[lines]


class Knower(nn.Module):
    """Looks the next token up in the texts it was given; certain of it by 40 nats."""

    def __init__(self, texts: list[list[int]], vocabulary: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.config = LlamaConfig(vocab_size=vocabulary)
        self.next = {}  # token by all that stand before it
        for text in texts:
            for n, token in enumerate(text[1:], start=1):
                self.next[tuple(text[:n])] = token

    def forward(
        self,
        input_ids,
        attention_mask,
        position_ids=None,
        past_key_values=None,
        logits_to_keep=...,
        **_,
    ):
        before = past_key_values.ids if past_key_values else input_ids[:, :0]
        ids = torch.cat([before, input_ids], 1)
        logits = torch.zeros(*ids.shape, self.config.vocab_size)
        for line, (row, mask) in enumerate(
            zip(ids.tolist(), attention_mask.tolist(), strict=True)
        ):
            start = mask.index(1)
            for place in range(start, len(row)):
                known = self.next.get(tuple(row[start : place + 1]))
                if known is not None:
                    logits[line, place, known] = 40.0
        logits = logits[:, before.shape[1] :][:, logits_to_keep]
        return CausalLMOutputWithPast(logits=logits, past_key_values=Memory(ids))


def request(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def nats(model, before, scored):
    """Log-probability of `scored` after `before`, from an unpadded pass in float64."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([before + scored])).logits[
            0, len(before) - 1 : -1
        ]
    return (
        logits.log_softmax(-1)[torch.arange(len(scored)), torch.tensor(scored)]
        .sum()
        .item()
    )


def test_likelihoods_in_a_batch_equal_those_one_by_one_and_tell_greedy_ones(
    llama, tokenizer
):
    continuations = [" is", " four and five", "!", " the", " it"]
    pairs = list(zip(CONTEXTS, continuations, strict=True))
    asked = [request("loglikelihood", *pair) for pair in [*pairs, ("", "the sum")]]
    got = Harness(llama, tokenizer, 3).loglikelihood(asked, disable_tqdm=True)
    for (value, _), (context, continuation) in zip(got, pairs, strict=False):
        before = tokenizer.encode(context)
        whole = tokenizer.encode(context + continuation)
        assert value == pytest.approx(
            nats(llama, before, whole[len(before) :]), rel=1e-5
        )
    assert got[-1][0] == pytest.approx(
        nats(llama, [0], tokenizer.encode("the sum")), rel=1e-5
    )
    before = tokenizer.encode(CONTEXTS[0])
    with torch.no_grad():
        best = llama(torch.tensor([before])).logits[0, -1].argmax().item()
    got = Harness(llama, tokenizer, 2).score([(before, [best]), (before, [best - 1])])
    assert [greedy for _, greedy in got] == [True, False]


MERGED = [
    ("th", "e"),
    ("the su", "m and more"),
    ("### Hum", "an"),
    ("what is th", "e "),
    ("a", "b"),
]


def test_an_answer_that_merges_with_the_end_of_its_context_is_tokenized_apart(
    llama, tokenizer
):
    lm = Harness(llama, tokenizer, 2)
    encode = tokenizer.encode
    assert encode("the") != encode("th") + encode("e")  # one token spans the border
    got = lm.loglikelihood([request("loglikelihood", *pair) for pair in MERGED])
    for (value, _), (context, answer) in zip(got, MERGED, strict=True):
        before = encode(context)
        scored = encode(answer)
        assert lm._encode_pair(context, answer) == (before, scored)
        assert value == pytest.approx(nats(llama, before, scored), rel=1e-5)


def test_where_no_token_spans_the_border_pairs_are_lm_evals_own(llama, tokenizer):
    lm = Harness(llama, tokenizer, 2)
    encode = tokenizer.encode
    theirs = HFLM(pretrained=llama, tokenizer=tokenizer, batch_size=1)
    endings = [" is", "is four", "\n a", "   is", "  is four", "  \n a"]
    pairs = list(product(CONTEXTS, endings))
    whole = []
    for context, ending in pairs:
        ids = encode(context)
        if encode(context + ending)[: len(ids)] == ids:
            whole.append((context, ending))
    assert len(whole) > len(pairs) / 2
    for ending in ("is", " is"):  # the blanks go to what follows
        whole += [(f"{context}  ", ending) for context in CONTEXTS]
    asked = [request("loglikelihood", *pair) for pair in whole]
    wanted = theirs.loglikelihood(asked, disable_tqdm=True)
    for (value, greedy), (their_value, their_greedy) in zip(
        lm.loglikelihood(asked), wanted, strict=True
    ):
        assert (value, greedy) == (pytest.approx(their_value, rel=1e-5), their_greedy)


def test_a_context_of_blanks_begins_as_an_empty_one(llama, tokenizer):
    lm = Harness(llama, tokenizer, 2)
    assert lm._encode_pair("  ", "the") == ([0], tokenizer.encode("  the"))


def closed(tokenizer, template):
    """A copy of a tokenizer that puts special tokens around each text."""
    copied = copy.deepcopy(tokenizer)
    special = [("<|bos|>", 0), ("<|eos|>", 1)]
    around = TemplateProcessing(single=template, special_tokens=special)
    copied.backend_tokenizer.post_processor = around
    return copied


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("$A", []),
        ("<|bos|> $A", [0]),
        ("$A <|eos|>", []),
        ("<|bos|> $A <|eos|> <|eos|>", [0]),
    ],
)
def test_no_context_ends_on_the_token_that_a_tokenizer_puts_behind_texts(
    llama, tokenizer, template, start
):
    plain = tokenizer.encode
    lm = Harness(llama, closed(tokenizer, template), 2)
    assert lm.tok_encode("the sum") == start + plain("the sum")
    assert lm.tok_encode("the sum", add_special_tokens=False) == plain("the sum")
    before, scored = lm._encode_pair("the sum", " is seven")
    assert (before, scored) == (start + plain("the sum"), plain(" is seven"))


def test_an_answer_without_tokens_is_refused_where_it_would_always_win(
    llama, tokenizer
):
    lm = Harness(llama, tokenizer, 2)
    asked = [request("loglikelihood", context, "") for context in ("the sum", "")]
    for each in asked:
        refused(
            "E-DATA: an answer .* is empty; expected text", lm.loglikelihood, [each]
        )
    refused(
        "E-DATA: an answer behind 'a' has no token",
        lm.score,
        [(tokenizer.encode("a"), [])],
    )


def test_a_merged_answer_whose_tokens_alone_are_another_text_is_refused(
    llama, tokenizer
):
    prepended = copy.deepcopy(tokenizer)  # as SentencePiece's dummy prefix
    prepended.backend_tokenizer.normalizer = Prepend(" ")
    lm = Harness(llama, prepended, 2)
    asked = request("loglikelihood", "a th", "e")
    refused(
        "E-DATA: 'e' behind 'a th' shares a token with it", lm.loglikelihood, [asked]
    )


def test_likelihoods_over_a_large_vocabulary_have_no_bias(tiny, tokenizer, monkeypatch):
    llama = tiny(vocab_size=49_152)
    draw = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(2, 41, 49_152, generator=draw)
    ids = torch.randint(0, 49_152, (2, 41), generator=draw)

    def forward(input_ids, logits_to_keep=..., **_):
        kept = logits[:, : input_ids.shape[1]][:, logits_to_keep]
        return CausalLMOutputWithPast(logits=kept)

    lm = Harness(llama, tokenizer, 2)
    monkeypatch.setattr(llama, "forward", forward)
    # What it says is drawn, row by row, whatever it reads.
    monkeypatch.setattr(representations, "check", lambda *_: None)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, :5] = -100  # what is not asked for adds nothing
    flat = logits[:, :-1].double().flatten(0, 1), batch["labels"][:, 1:].flatten()
    rows = datasets.Dataset.from_dict(
        {name: part.tolist() for name, part in batch.items()}
    )
    pairs = [(row[:5], row[5:]) for row in ids.tolist()]
    taken = {
        "evaluation": -np.mean([n for n, _ in lm.score(pairs)]) / 36,
        "upcycling": perplexities(llama, rows).log().mean().item(),
        "pesc": _row_losses(llama, batch).mean().item(),
    }
    exact = nn.functional.cross_entropy(*flat).item()
    assert taken == pytest.approx(dict.fromkeys(taken, exact), rel=0, abs=1e-6)


def test_greedy_answers_equal_those_of_generate_one_by_one(llama, tokenizer):
    wanted = []
    for context in CONTEXTS:
        ids = torch.tensor([tokenizer.encode(context)])
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
        best = llama.generate(ids, do_sample=False, **settings)[0, ids.shape[1] :]
        wanted.append(tokenizer.decode(best, skip_special_tokens=True))
    asked = [
        request("generate_until", c, {"until": [], "max_gen_toks": 12})
        for c in CONTEXTS
    ]
    assert Harness(llama, tokenizer, len(CONTEXTS)).generate_until(asked) == wanted
    assert len(set(wanted)) == len(CONTEXTS)


SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
FAMILIES = {  # what a family needs beside these, and whether it goes on from a cache
    "gpt2": ({}, True),
    # Positions are the mask's sums.
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, True),
    "gemma3_text": ({"head_dim": 8, "sliding_window": 4}, True),
    "mamba": ({"state_size": 4}, False),
    "rwkv": ({"attention_hidden_size": 32}, False),
    "recurrent_gemma": (
        {"num_hidden_layers": 3, "lru_width": 32, "num_key_value_heads": 4},
        False,
    ),
    "olmo_hybrid": ({"num_hidden_layers": 4, "num_key_value_heads": 4}, False),
    # Single layers have a state, though the model does not say so.
    "lfm2": (
        {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 4},
        False,
    ),
    "bloom": ({"n_head": 4}, False),
    "openai-gpt": ({"n_positions": 64}, False),
}


@pytest.fixture(params=FAMILIES)
def of_a_family(request):
    """A random model of a family, and whether it keeps a cache."""
    sizes, keeps = FAMILIES[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(request.param, **SIZES | sizes)
    )
    for parameter in model.parameters():
        # Some start so small that all answers are alike.
        if parameter.ndim > 1 and parameter.std() < 0.1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval(), keeps


def generated(model, tokenizer, context, most, **settings):
    """What transformers writes after one context."""
    ids = torch.tensor([tokenizer.encode(context)])
    settings |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": most}
    with torch.no_grad():
        new = model.generate(ids, do_sample=False, **settings)[0, ids.shape[1] :]
    return new.tolist()


@pytest.mark.filterwarnings("ignore")
def test_models_of_any_family_answer_and_score_as_one_by_one(of_a_family, tokenizer):
    model, keeps = of_a_family
    assert keeps_cache(model) is keeps
    free = [generated(model, tokenizer, context, 8) for context in CONTEXTS]
    # A generation config that lists more ends: rows leave the batch after one to eight
    # tokens.
    ends = [tokenizer.eos_token_id, free[0][0], free[1][3]]
    wanted = [generated(model, tokenizer, c, 8, eos_token_id=ends) for c in CONTEXTS]
    assert len(set(map(len, wanted))) > 1
    model.generation_config.eos_token_id = ends
    lm = Harness(model, tokenizer, len(CONTEXTS))
    encode = tokenizer.encode
    contexts = [encode(context) for context in CONTEXTS]
    limits = [(8, ())] * len(CONTEXTS)
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in wanted]
    assert lm.answer(contexts, limits) == texts
    pairs = [
        (context, encode(" is seven"[: 3 + n])) for n, context in enumerate(contexts)
    ]
    found = lm.examine(pairs, limits)
    assert [text for text, _ in found] == texts
    exact = [nats(copy.deepcopy(model), *pair) for pair in pairs]
    assert [value for _, value in found] == pytest.approx(exact, rel=1e-4)
    assert [value for value, _ in lm.score(pairs)] == pytest.approx(exact, rel=1e-4)
    seeds = range(len(contexts))
    draws = [list(map(random.Random, seeds)), list(map(random.Random, seeds))]
    together = lm.answer(contexts, limits, (0.5, draws[0]))
    alone = [
        lm.answer([context], [limit], (0.5, [draw]))[0]
        for context, limit, draw in zip(contexts, limits, draws[1], strict=True)
    ]
    assert together == alone


def test_a_wrapped_model_ends_where_its_base_does(llama, tokenizer):
    ids = tokenizer.encode(CONTEXTS[0])
    free = generated(llama, tokenizer, CONTEXTS[0], 6)
    wrapped = get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj"]))
    assert keeps_cache(wrapped)
    place = next(n for n in range(1, 6) if free[n] not in free[:n])
    llama.generation_config.eos_token_id = [free[place]]
    wanted = tokenizer.decode(free[: place + 1], skip_special_tokens=True)
    assert Harness(wrapped, tokenizer, 1).answer([ids], [(6, ())]) == [wanted]


def test_a_model_without_cache_stops_at_strings_and_is_evaluated(tokenizer):
    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", **SIZES | {"state_size": 4})
    model = AutoModelForCausalLM.from_config(config).eval()
    lm = Harness(model, tokenizer, 2)
    ids = tokenizer.encode("the sum")
    (whole,) = lm.answer([ids], [(12, ())])
    stop = whole[2:4]
    assert lm.answer([ids], [(12, (stop,))]) == [whole[: whole.index(stop)]]
    table = evaluation.evaluate(model, tokenizer, "gcd", limit=3)
    assert table.nll.notna().all()
    assert len(table) == 3


def test_rows_that_end_early_leave_the_others_as_they_are(tokenizer):
    answers = ["4", "twenty-three and more", "", "seven"]
    prompts = [tokenizer.encode(f"question {n}: {'x' * n}") for n in range(4)]
    texts = [
        [*p, *tokenizer.encode(a), 1] for p, a in zip(prompts, answers, strict=True)
    ]
    assert (
        Harness(Knower(texts, 300), tokenizer, 4).answer(prompts, [(40, ())] * 4)
        == answers
    )


@pytest.mark.parametrize("until", ["wo", ["wo", "."]])
def test_a_stop_string_ends_and_is_cut_off(until, tokenizer):
    prompt = tokenizer.encode("go")
    lm = Harness(
        Knower([[*prompt, *tokenizer.encode("one. two. three"), 1]], 300), tokenizer, 1
    )
    asked = request("generate_until", "go", {"until": until, "max_gen_toks": 40})
    assert lm.generate_until([asked]) == ["one. t" if until == "wo" else "one"]


def test_a_prompt_longer_than_the_model_is_cut_on_the_left_and_told(llama, tokenizer):
    lm = Harness(llama, tokenizer, 1)
    lm.longest = 8  # six of the prompt, then two of the three that are generated
    ids = tokenizer.encode("a rather long prompt that does not fit")
    with pytest.warns(UserWarning, match="W-LONG: 1 of 1"):
        cut = lm.answer([ids], [(3, ())])
    assert cut == lm.answer([ids[-6:]], [(3, ())])


def test_what_cannot_be_done_is_refused(llama, tokenizer):
    with pytest.raises(
        Refusal, match="E-DATA: the tokenizer has no end-of-sequence token"
    ):
        Harness(llama, SimpleNamespace(eos_token_id=None), 1)
    with pytest.raises(Refusal, match=r"E-DATA: .* scores whole texts"):
        Harness(llama, tokenizer, 1).loglikelihood_rolling(
            [request("loglikelihood_rolling", "a")]
        )
    for token in ([3], "3", None, 2.5, True, 10**9):
        refused(
            "E-VOCAB: a context or an answer: .* is no token",
            Harness(llama, tokenizer, 1).answer,
            [[4, token]],
            [(1, ())],
        )


def test_a_context_read_once_gives_what_reading_it_twice_gives(
    llama, tokenizer, monkeypatch
):
    scored = [
        tokenizer.encode(text) for text in (" is", " four and five", "!", " the", "z")
    ]
    pairs = list(zip(map(tokenizer.encode, CONTEXTS), scored, strict=True))
    limits = [(n, ()) for n in (3, 3, 1, 3, 1)]
    lm = Harness(llama, tokenizer, 2)
    texts, values = zip(*lm.examine(pairs, limits), strict=True)
    assert list(texts) == lm.answer([before for before, _ in pairs], limits)
    assert values == pytest.approx([value for value, _ in lm.score(pairs)], rel=1e-5)
    monkeypatch.setattr(llama, "_is_stateful", True)
    scores = [value for value, _ in lm.score(pairs)]
    assert lm.examine(pairs, limits) == list(zip(texts, scores, strict=True))


def test_a_model_that_knows_the_answers_gets_every_one(tokenizer):
    names = ["isa", "gcd"]
    rows = tasks.rows("isa", "test", 7) + tasks.rows("gcd", "test", 7)
    known = encode(rows, tokenizer, max_length=10**6)["input_ids"]
    model = Knower([list(ids) for ids in known], len(tokenizer))
    table = evaluation.evaluate(model, tokenizer, names, limit=7, batch_size=4)
    assert " ".join(table.columns).startswith(
        "task domain item correct nll nll_sum answer output"
    )
    assert table.task.tolist() == ["isa"] * 7 + ["gcd"] * 7
    assert table.domain.tolist() == ["common_sense"] * 7 + ["mathematics"] * 7
    assert table.item.tolist() == [*range(7), *range(7)]
    assert table.correct.tolist() == [1] * 14
    assert table.output.tolist() == [row["answer"] for row in rows]
    assert table.nll_sum.max() < 1e-6
    wrong = evaluation.evaluate(model, tokenizer, "gcd", limit=None, split="validation")
    assert wrong.correct.sum() < len(wrong) == tasks.find("gcd").available("validation")


def test_the_likelihood_is_that_of_the_answer_with_its_end(llama, tokenizer):
    rows = tasks.rows("sums", "test", 5)
    encoded = encode(rows, tokenizer, format="deepseek", max_length=10**6)
    table = evaluation.evaluate(
        llama, tokenizer, "sums", limit=5, format="deepseek", batch_size=2
    )
    for item, (ids, labels) in enumerate(
        zip(encoded["input_ids"], encoded["labels"], strict=True)
    ):
        # Transformers' own loss: the mean over the labels.
        with torch.no_grad():
            mean = llama(torch.tensor([ids]), labels=torch.tensor([labels])).loss.item()
        assert table.nll[item] == pytest.approx(mean, rel=1e-5)
        count = len(ids) - labels.count(-100)
        assert table.nll_sum[item] == pytest.approx(mean * count, rel=1e-5)
    assert table.answer.tolist() == [row["answer"] for row in rows]


def random_states():
    """Of torch's, NumPy's and Python's generators."""
    return torch.get_rng_state().numpy(), np.random.get_state(), random.getstate()


def test_evaluation_leaves_mode_random_states_and_screen_alone(llama, tokenizer, capfd):
    llama.train()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    before = random_states()
    first = evaluation.evaluate(llama, tokenizer, ["gcd"], limit=2)
    np.testing.assert_equal(random_states(), before)
    assert llama.training
    again = evaluation.evaluate(llama, tokenizer, ["gcd"], limit=2)
    assert first.equals(again)
    assert capfd.readouterr() == ("", "")


ARC = {
    "question": ["What barks?", "What is wet?"],
    "choices": [
        {"text": ["a dog", "a cat"], "label": ["A", "B"]},
        {"text": ["sand", "a cake", "the sea"], "label": ["1", "2", "3"]},
    ],
    "answerKey": ["A", "3"],
}


def test_a_benchmark_of_the_hub_goes_the_same_way(llama, tokenizer, monkeypatch):
    split = datasets.Dataset.from_dict(ARC)
    splits = datasets.DatasetDict(train=split, test=split)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: splits)
    table = evaluation.evaluate(llama, tokenizer, ["gcd", "arc_easy"], limit=2)
    assert table.task.tolist() == ["gcd", "gcd", "arc_easy", "arc_easy"]
    found = table[table.task == "arc_easy"]
    for item, question in enumerate(ARC["question"]):
        before = tokenizer.encode(f"Question: {question}\nAnswer:")
        texts, labels = ARC["choices"][item].values()
        gold = labels.index(ARC["answerKey"][item])
        row = found.iloc[item]
        scored = [
            tokenizer.encode(f"Question: {question}\nAnswer: {t}")[len(before) :]
            for t in texts
        ]
        sums = [-nats(llama, before, choice) for choice in scored]
        assert row.nll_sum == pytest.approx(sums[gold], rel=1e-5)
        assert row.nll == pytest.approx(sums[gold] / len(scored[gold]), rel=1e-5)
        assert row.output == str(np.argmin(sums))
        per_byte = [n / len(text) for n, text in zip(sums, texts, strict=True)]
        assert (row.correct, row.answer) == (np.argmin(per_byte) == gold, texts[gold])
    assert set(found.domain) == {"benchmark"}


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        ("gcdd", {}, "did you mean 'gcd'"),
        ([], {}, "E-DATA: no task"),
        ("gcd", {"limit": 0}, "E-RANGE: limit is 0"),
        ("gcd", {"batch_size": 0}, "E-RANGE: batch_size is 0"),
        ("gcd", {"split": "tset"}, "did you mean 'test'"),
        ("gcd", {"format": "camle"}, "did you mean 'camel'"),
        ("hellaswag", {"limit": 2}, "E-OFFLINE: benchmark 'hellaswag'"),
    ],
)
def test_what_is_not_there_is_refused(
    llama, tokenizer, names, given, words, monkeypatch, tmp_path
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    refused(words, evaluation.evaluate, llama, tokenizer, names, **given)


def test_a_lack_of_a_package_a_metric_or_data_is_refused_as_such(
    llama, tokenizer, monkeypatch
):
    script = "Couldn't find a module script at code_eval.py. Module 'code_eval' doesn't exist"
    splits = datasets.Dataset.from_dict(ARC)
    hub = Mock(return_value=datasets.DatasetDict(train=splits, test=splits))
    monkeypatch.setattr(datasets, "load_dataset", hub)
    # As it does offline.
    monkeypatch.setattr(lm_eval.api.task, "get_metric", lambda *_: None)
    for error, words in (
        (None, "E-OFFLINE: .* metric 'acc' is not here"),
        (FileNotFoundError(script), "E-OFFLINE: .* its metric is not here .*code_eval"),
        (FileNotFoundError("no rows"), "E-OFFLINE: .* its data are not here"),
        (
            ModuleNotFoundError("No module named 'langdetect'"),
            "E-DEP: .*a package: .*langdetect",
        ),
    ):
        hub.side_effect = error
        refused(words, evaluation.evaluate, llama, tokenizer, "arc_easy")


DOMAINS = {"gsm8k": "mathematics", "hendrycks_math": "mathematics", "mmlu": "mmlu"}
TASKS = {
    "gsm8k": ("benchmark", [1, 0, 0, 0]),
    "hendrycks_math_algebra": ("benchmark", [1]),
    "hendrycks_math_geometry": ("benchmark", [0]),
    "mmlu_astronomy": ("benchmark", [1, 1, 1, 1, 1]),
    "python_eval": ("code", [0, 1]),
}
ITEMS = []
for _task, (_domain, _items) in TASKS.items():
    ITEMS += [(_task, _domain, correct) for correct in _items]
TABLE = pd.DataFrame(ITEMS, columns=["task", "domain", "correct"])


@pytest.mark.parametrize(
    ("domains", "score", "by_domain"),
    [
        (DOMAINS, [0.25, 0.5, 1, 0.5], {"mathematics": 0.375, "mmlu": 1, "code": 0.5}),
        (None, [0.25, 1, 0, 1, 0.5], {"benchmark": 2.25 / 4, "code": 0.5}),
    ],
)
def test_benchmarks_weigh_equally_whatever_their_number_of_items(
    domains, score, by_domain
):
    items = evaluation.by_benchmark(TABLE, domains)
    assert items.score.mean() == pytest.approx(np.mean(score))
    assert items.groupby("domain").domain_score.mean().to_dict() == pytest.approx(
        by_domain
    )
    assert list(items.correct) == list(TABLE.correct)
    sums = items.groupby("benchmark").weight.sum()
    assert sums.to_numpy() == pytest.approx([13 / len(score)] * len(score))
    assert set(sums.index) == (
        {*DOMAINS, "python_eval"} if domains else set(TABLE.task)
    )
    # Items of equal tasks keep their scores, and no items are refused.
    equal = TABLE[
        TABLE.task.isin(["hendrycks_math_algebra", "hendrycks_math_geometry"])
    ]
    equal = pd.concat([equal, TABLE[TABLE.task == "python_eval"]], ignore_index=True)
    items = evaluation.by_benchmark(equal, DOMAINS)
    assert items.score.equals(equal.correct.astype(float))
    assert items.domain_score.equals(equal.correct.astype(float))
    refused(
        "E-DATA: table is a table without rows",
        evaluation.by_benchmark,
        TABLE[:0],
        DOMAINS,
    )


def test_rows_of_one_task_keep_their_own_domains():
    rows = [("law", 1), ("law", 1), ("law", 0), ("medicine", 0)]
    table = pd.DataFrame(rows, columns=["domain", "correct"]).assign(task="own_mine")
    items = evaluation.by_benchmark(table)
    assert items.domain.equals(table.domain)
    by_domain = items.groupby("domain").domain_score.mean()
    assert by_domain.to_dict() == pytest.approx({"law": 2 / 3, "medicine": 0})


@pytest.mark.parametrize("missing", [None, np.nan])
def test_a_row_without_a_task_is_refused_which_no_group_would_have(missing):
    for name in ("task", "domain"):
        table = TABLE.assign(**{name: [missing, *TABLE[name][1:]]})
        words = f"E-DATA: table is a table with a row that has no '{name}'"
        refused(words, evaluation.by_benchmark, table, DOMAINS)


def arm(scores, nats):
    return pd.DataFrame(
        {"task": "one", "item": range(len(scores)), "score": scores, "nll": nats}
    )


def test_a_difference_is_paired_by_item_with_students_interval():
    tables = {
        "sparse": arm([1, 1, 0, 1], [1.0, 2.0, 3.0, np.nan]),
        "dense": arm([0, 1, 0, 0], [2.0, 2.0, 5.0, np.nan]),
    }
    lines = evaluation.paired(tables, [("sparse", "dense")])
    assert set(lines.index.get_level_values(0)) == {"sparse minus dense"}
    assert list(lines.index.get_level_values(1)) == ["accuracy (points)", "nll (nats)"]
    # Gaps 1, 0, 0, 1: mean 0.5, deviation 1/sqrt 3, error 1/sqrt 12; Student's quantile
    # 3.182.
    half = 100 * 3.182446 / 12**0.5
    # No two shares differ by more than 100 points.
    assert lines.iloc[0].tolist() == pytest.approx([50, 50 - half, 100, half], rel=1e-5)
    # Gaps -1, 0, -2 (the missing one is left out): mean -1, error 1/sqrt 3; quantile
    # 4.303.
    half = 4.302653 / 3**0.5
    assert lines.iloc[1].tolist() == pytest.approx(
        [-1, -1 - half, -1 + half, half], rel=1e-5
    )
    # Absent arms and values leave no line or no interval.
    tables = {
        "one": arm([1], [1.5]),
        "other": arm([0], [1.0]),
        "paper": arm([0], [np.nan]),
    }
    assert evaluation.paired(tables, [("one", "dense")]).empty
    lines = evaluation.paired(tables, [("one", "other"), ("one", "dense")])
    assert lines["difference"].tolist() == [100, 0.5]
    assert lines.drop(columns="difference").isna().all(axis=None)  # a single item
    few = {"one": arm([1], [1.5]), "two": arm([1, 0], [1.5, 2.0])}
    refused(
        "E-DATA: one and two were evaluated on other items",
        evaluation.paired,
        few,
        [("one", "two")],
    )
    lines = evaluation.paired(tables, [("one", "paper")], ["nll"])
    assert list(lines.index) == [("one minus paper", "nll (nats)")]
    assert lines.isna().all(axis=None)  # no item has a likelihood in both


def test_a_misspelt_setting_is_told_and_tasks_are_any_several(llama, tokenizer):
    def evaluate(names, **settings):
        return evaluation.evaluate(llama, tokenizer, names, limit=1, **settings)

    for names in ("gcd", ["gcd", "humaneval"]):
        words = "E-CHOICE: unknown setting 'batchsize'; did you mean 'batch_size'"
        refused(words, evaluate, names, batchsize=4)
    for names in ({"gcd"}, {"gcd": 1}.keys(), (name for name in ["gcd"])):
        assert evaluate(names).task.tolist() == ["gcd"]
