"""Batched likelihoods and greedy answers equal the same prompts one by one in transformers."""

import pytest
import torch
from lm_eval.api.instance import Instance

from moebook.errors import Refusal
from moebook.evaluation.model import PAIR, InMemory

CONTEXTS = ["the sum", "a", "### Human:\nwhat is it?", "the human is the sum of", "zz zz"]


def request(kind, *arguments, doc=None):
    return Instance(request_type=kind, doc=doc or {}, arguments=arguments, idx=0)


def nats(model, before, scored):
    """Log-probability of `scored` after `before`, from one unpadded forward pass in float64."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([before + scored])).logits[0, len(before) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(scored)), torch.tensor(scored)].sum().item()


def test_likelihoods_in_a_batch_equal_those_one_by_one(llama, tokenizer):
    continuations = [" is", " four and five", "!", " the", " it"]
    lm = InMemory(llama, tokenizer, 3)
    asked = [request("loglikelihood", *pair) for pair in zip(CONTEXTS, continuations, strict=True)]
    got = lm.loglikelihood(asked)
    for (value, _), context, continuation in zip(got, CONTEXTS, continuations, strict=True):
        before, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
        assert value == pytest.approx(nats(llama, before, whole[len(before) :]), rel=1e-5)


def test_a_greedy_continuation_is_recognised(llama, tokenizer):
    before = tokenizer.encode(CONTEXTS[0])
    with torch.no_grad():
        best = llama(torch.tensor([before])).logits[0, -1].argmax().item()
    lm = InMemory(llama, tokenizer, 2)
    pairs = [{PAIR: (before, [best])}, {PAIR: (before, [best - 1])}]
    got = lm.loglikelihood([request("loglikelihood", "", "", doc=doc) for doc in pairs])
    assert [greedy for _, greedy in got] == [True, False]


def test_greedy_answers_equal_those_of_generate_one_by_one(llama, tokenizer):
    lm = InMemory(llama, tokenizer, len(CONTEXTS))
    wanted, lengths = [], set()
    for context in CONTEXTS:
        ids = torch.tensor([tokenizer.encode(context)])
        best = llama.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )[0, ids.shape[1] :]
        lengths.add(len(best))
        wanted.append(tokenizer.decode(best, skip_special_tokens=True))
    asked = {"until": [], "max_gen_toks": 12}
    assert lm.generate_until([request("generate_until", c, asked) for c in CONTEXTS]) == wanted
    assert len(set(wanted)) == len(CONTEXTS)


def test_rows_that_end_early_leave_the_others_as_they_are(knower, tokenizer):
    answers = ["4", "twenty-three and more", "", "seven"]
    prompts = [tokenizer.encode(f"question {n}: {'x' * n}") for n in range(4)]
    texts = [[*p, *tokenizer.encode(a), 1] for p, a in zip(prompts, answers, strict=True)]
    lm = InMemory(knower(texts, 300), tokenizer, 4)
    docs = [{PAIR: (prompt, [])} for prompt in prompts]
    asked = {"until": [], "max_gen_toks": 40}
    got = lm.generate_until([request("generate_until", "", asked, doc=doc) for doc in docs])
    assert got == answers


def test_a_stop_string_ends_and_is_cut_off(knower, tokenizer):
    prompt = tokenizer.encode("go")
    lm = InMemory(knower([[*prompt, *tokenizer.encode("one. two. three"), 1]], 300), tokenizer, 1)
    asked = {"until": ["wo", "."], "max_gen_toks": 40}
    got = lm.generate_until([request("generate_until", "", asked, doc={PAIR: (prompt, [])})])
    assert got == ["one"]


def test_a_whole_text_is_scored_after_the_first_token_in_windows(llama, tokenizer):
    text = "the human is the sum"
    ids = tokenizer.encode(text)
    lm = InMemory(llama, tokenizer, 4)
    rolling = [request("loglikelihood_rolling", text)]
    assert lm.loglikelihood_rolling(rolling)[0] == pytest.approx(nats(llama, [0], ids), rel=1e-5)
    lm.longest = 5  # five tokens see five: the first window starts at the prefix token
    windows = nats(llama, [0], ids[:5])
    for start in range(5, len(ids), 5):
        end = min(start + 5, len(ids))
        windows += nats(llama, ids[end - 6 : start], ids[start:end])
    assert lm.loglikelihood_rolling(rolling)[0] == pytest.approx(windows, rel=1e-5)


def test_a_prompt_longer_than_the_model_is_cut_on_the_left_and_told(llama, tokenizer):
    lm = InMemory(llama, tokenizer, 1)
    lm.longest = 8  # six of the prompt, then two of the three that are generated
    ids = tokenizer.encode("a rather long prompt that does not fit")
    asked = {"until": [], "max_gen_toks": 3}
    with pytest.warns(UserWarning, match="W-LONG: 1 of 1"):
        cut = lm.generate_until([request("generate_until", "", asked, doc={PAIR: (ids, [])})])
    short = lm.generate_until([request("generate_until", "", asked, doc={PAIR: (ids[-6:], [])})])
    assert cut == short


def test_a_tokenizer_without_an_end_is_refused(llama, tokenizer):
    class Endless:
        eos_token_id = None

    with pytest.raises(Refusal, match="E-DATA"):
        InMemory(llama, Endless(), 1)
