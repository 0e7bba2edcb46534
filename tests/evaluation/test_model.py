"""Batched likelihoods and greedy answers equal the same prompts one by one in transformers."""

import pytest
import torch
from lm_eval.api.instance import Instance

from moebook.errors import Refusal
from moebook.evaluation.model import InMemory

CONTEXTS = ["the sum", "a", "### Human:\nwhat is it?", "the human is the sum of", "zz zz"]


def request(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def nats(model, before, scored):
    """Log-probability of `scored` after `before`, from one unpadded forward pass in float64."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([before + scored])).logits[0, len(before) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(scored)), torch.tensor(scored)].sum().item()


def test_likelihoods_in_a_batch_equal_those_one_by_one(llama, tokenizer):
    continuations = [" is", " four and five", "!", " the", " it"]
    pairs = list(zip(CONTEXTS, continuations, strict=True))
    asked = [request("loglikelihood", *pair) for pair in [*pairs, ("", "the sum")]]
    got = InMemory(llama, tokenizer, 3).loglikelihood(asked, disable_tqdm=True)
    for (value, _), (context, continuation) in zip(got, pairs, strict=False):
        before, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
        assert value == pytest.approx(nats(llama, before, whole[len(before) :]), rel=1e-5)
    assert got[-1][0] == pytest.approx(nats(llama, [0], tokenizer.encode("the sum")), rel=1e-5)


def test_a_greedy_continuation_is_recognised(llama, tokenizer):
    before = tokenizer.encode(CONTEXTS[0])
    with torch.no_grad():
        best = llama(torch.tensor([before])).logits[0, -1].argmax().item()
    got = InMemory(llama, tokenizer, 2).score([(before, [best]), (before, [best - 1])])
    assert [greedy for _, greedy in got] == [True, False]


def test_greedy_answers_equal_those_of_generate_one_by_one(llama, tokenizer):
    wanted = []
    for context in CONTEXTS:
        ids = torch.tensor([tokenizer.encode(context)])
        best = llama.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )[0, ids.shape[1] :]
        wanted.append(tokenizer.decode(best, skip_special_tokens=True))
    asked = [request("generate_until", c, {"until": [], "max_gen_toks": 12}) for c in CONTEXTS]
    assert InMemory(llama, tokenizer, len(CONTEXTS)).generate_until(asked) == wanted
    assert len(set(wanted)) == len(CONTEXTS)


def test_rows_that_end_early_leave_the_others_as_they_are(knower, tokenizer):
    answers = ["4", "twenty-three and more", "", "seven"]
    prompts = [tokenizer.encode(f"question {n}: {'x' * n}") for n in range(4)]
    texts = [[*p, *tokenizer.encode(a), 1] for p, a in zip(prompts, answers, strict=True)]
    assert InMemory(knower(texts, 300), tokenizer, 4).answer(prompts, [(40, ())] * 4) == answers


@pytest.mark.parametrize("until", ["wo", ["wo", "."]])
def test_a_stop_string_ends_and_is_cut_off(until, knower, tokenizer):
    prompt = tokenizer.encode("go")
    lm = InMemory(knower([[*prompt, *tokenizer.encode("one. two. three"), 1]], 300), tokenizer, 1)
    asked = request("generate_until", "go", {"until": until, "max_gen_toks": 40})
    assert lm.generate_until([asked]) == ["one. t" if until == "wo" else "one"]


def test_a_prompt_longer_than_the_model_is_cut_on_the_left_and_told(llama, tokenizer):
    lm = InMemory(llama, tokenizer, 1)
    lm.longest = 8  # six of the prompt, then two of the three that are generated
    ids = tokenizer.encode("a rather long prompt that does not fit")
    with pytest.warns(UserWarning, match="W-LONG: 1 of 1"):
        cut = lm.answer([ids], [(3, ())])
    assert cut == lm.answer([ids[-6:]], [(3, ())])


def test_what_cannot_be_done_is_refused(llama, tokenizer):
    class Endless:
        eos_token_id = None

    with pytest.raises(Refusal, match="E-DATA: the tokenizer has no end-of-sequence token"):
        InMemory(llama, Endless(), 1)
    with pytest.raises(Refusal, match=r"E-DATA: .* scores whole texts"):
        InMemory(llama, tokenizer, 1).loglikelihood_rolling([request("loglikelihood_rolling", "a")])
