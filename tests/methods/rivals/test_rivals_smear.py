"""SMEAR: p by hand, merges by functional calls, prompts alone decide, caches keep what they did."""

import numpy as np
import pytest
import torch
from torch.func import functional_call
from transformers import DynamicCache

from moebook.data.encoding import IGNORED
from moebook.errors import Refusal
from moebook.evaluation.model import InMemory
from moebook.methods.rivals import smear, tuning
from moebook.models.checkpoint import fingerprint
from tests.refusals import refused

Q = "model.layers.0.self_attn.q_proj"
RECIPE = {"steps": 2, "batch": 4, "lr": 1e-2, "warmup": 0.0}


@pytest.fixture
def merged(model, make_bank, rows):
    """A model with SMEAR on it, whose routers tell prompts apart."""

    def make(count=3, **changes):
        config = smear.Config.preset("bank", rate=0.3, **changes)
        result = smear.tuned(
            model, make_bank(model, count), tuning.Data(rows), config, **RECIPE
        )
        for part in result.parts.values():
            torch.nn.init.normal_(part.weigh.vectors, std=0.3)
        return result

    return make


def prompts(batch):
    """The batch with half of each row as its answer."""
    length = batch["attention_mask"].sum(1, keepdim=True) // 2
    asked = torch.arange(9) < length
    return {**batch, "labels": batch["labels"].masked_fill(asked, IGNORED)}, asked


def seen_by(model, batch):
    """What the first projection reads, of the base itself."""
    inputs = []
    handle = model.get_submodule(Q).register_forward_pre_hook(
        lambda _, args: inputs.append(args[0])
    )
    model(**batch)
    handle.remove()
    return inputs[0].detach().double().numpy()


@pytest.mark.parametrize("norm", ["input", "both"])
@pytest.mark.parametrize("pool", ["prompt", "all"])
def test_p_is_the_softmax_over_the_normed_mean_of_the_prompt(
    pool, norm, base, batch, merged
):
    batch, asked = prompts(batch)
    result = merged(pool=pool, norm=norm, temperature=0.7)
    p = result.weights(batch)[Q].squeeze(1).numpy()
    router = result.parts[Q].weigh
    x = seen_by(base(), batch)

    def normed(v):
        centred = v - v.mean(-1, keepdims=True)
        return centred / np.sqrt(v.var(-1, keepdims=True) + 1e-5)

    numpy = {name: t.detach().double().numpy() for name, t in router.named_parameters()}
    for row in range(3):
        mean = x[row][asked[row]].mean(0) if pool == "prompt" else x[row].mean(0)
        m = normed(mean) * numpy["norm.weight"] + numpy["norm.bias"]
        v = numpy["vectors"]
        v = normed(v) * numpy["norm_vectors.weight"] if norm == "both" else v
        z = np.exp((v @ m + numpy.get("bias", 0)) / 0.7)
        np.testing.assert_allclose(p[row], z / z.sum(), rtol=1e-4)
    assert p.std(0).max() > (1e-4 if norm == "both" else 0.01)


def test_a_row_is_the_base_with_its_own_merged_lora(base, batch, merged):
    batch, _ = prompts(batch)
    result = merged()
    plain = base()
    logits = result.model(**batch).logits
    p = result.weights(batch)
    for row in range(3):
        weights = {}
        for path, part in result.parts.items():
            a = sum(
                w * each for w, each in zip(p[path][row, 0], part.down, strict=True)
            )
            b = sum(w * each for w, each in zip(p[path][row, 0], part.up, strict=True))
            weights[f"{path}.weight"] = (
                plain.get_submodule(path).weight + part.scale * b @ a
            )
        real = int(batch["attention_mask"][row].sum())
        ids = batch["input_ids"][row : row + 1, :real]
        alone = functional_call(plain, weights, kwargs={"input_ids": ids}).logits
        torch.testing.assert_close(logits[row, :real], alone[0], rtol=1e-3, atol=1e-3)


def test_one_hot_routers_are_that_lora_and_zero_ones_pefts_linear_by_squares(
    base, batch, merged, make_bank, peft
):
    result = merged(trains="router")
    theirs = peft(make_bank(base(), 3), "linear", [1 / 9] * 3)
    for name, bias in (("b", [0.0, 99.0, 0.0]), ("mixed", [0.0] * 3)):
        for part in result.parts.values():
            torch.nn.init.zeros_(part.weigh.vectors)
            part.weigh.bias.data = torch.tensor(bias)
        theirs.set_adapter(name)
        expected = theirs(**batch).logits
        torch.testing.assert_close(
            result.model(**batch).logits, expected, rtol=1e-4, atol=1e-4
        )


def test_answers_padding_and_neighbours_leave_p_and_y_as_they_are(batch, merged):
    batch, asked = prompts(batch)
    result = merged()
    p = result.weights(batch)
    logits = result.model(**batch).logits
    answered = {**batch, "input_ids": torch.where(asked, batch["input_ids"], 7)}
    again = result.weights(answered)
    assert again.keys() == p.keys()
    for path, weights in again.items():
        assert torch.equal(weights, p[path])
    wider = {
        name: torch.nn.functional.pad(t, (0, 4), value=0) for name, t in batch.items()
    }
    wider["labels"][:, 9:] = IGNORED
    torch.testing.assert_close(
        result.model(**wider).logits[:, :9], logits, rtol=1e-4, atol=1e-4
    )
    for row in range(3):
        alone = result.model(
            **{name: t[row : row + 1] for name, t in batch.items()}
        ).logits
        torch.testing.assert_close(alone[0], logits[row], rtol=1e-4, atol=1e-4)


def test_answers_do_not_depend_on_who_shares_the_batch_or_how_many_beams(
    merged, tokenizer
):
    result = merged()
    contexts = [list(range(3, 3 + n)) for n in (5, 9, 12, 7)]
    together = InMemory(result.model, tokenizer, 4)
    alone = InMemory(result.model, tokenizer, 1)
    limits = [
        (12, ("a", "e", "t"))
    ] * 4  # rows end at different steps and leave the batch
    assert together.answer(contexts, limits) == alone.answer(contexts, limits)
    pairs = [(ids, [40, 50, 60][: n + 1]) for n, ids in enumerate(contexts[:3])]
    for (nats, _), (other, _) in zip(
        together.score(pairs), alone.score(pairs), strict=True
    ):
        assert nats == pytest.approx(other, rel=1e-4)
    ids = torch.tensor([contexts[0] + [40, 50]])
    answer = pairs[1][1]
    with smear.prompted(result, 5):
        scored = (
            result.model(ids).logits.log_softmax(-1)[0, [4, 5], [40, 50]].sum().item()
        )
    assert together.score([(contexts[0], answer)])[0][0] == pytest.approx(
        scored, rel=1e-4
    )
    beams = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    with smear.prompted(result, 9):
        ids = torch.tensor([contexts[1]])
        texts = [
            result.model.generate(ids, use_cache=cache, **beams)
            for cache in (True, False)
        ]
    assert torch.equal(*texts)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_gradients_are_the_same_when_layers_run_once_more(batch, merged):
    batch, _ = prompts(batch)
    result = merged()
    gradients = []
    for once_more in (False, True):
        if once_more:
            result.model.gradient_checkpointing_enable({"use_reentrant": False})
        result.model.zero_grad()
        result.model.train()(**batch, use_cache=False).loss.backward()
        gradients.append(result.parts[Q].weigh.vectors.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()


def test_dropped_experts_weigh_nothing_and_the_rest_sums_to_one(merged):
    result = merged(expert_dropout=0.2)
    part = result.parts[Q]
    x = torch.randn(500, 4, 32)
    part.weigh.prompt.mask = torch.ones(500, 4)
    p = part.weigh(x)
    left = part.train().weigh(x)
    kept = left > 0
    torch.testing.assert_close(left, (p * kept) / (p * kept).sum(-1, keepdim=True))
    # Four fifths stay, and all three in the rows where all would go.
    assert kept.double().mean() == pytest.approx(0.8 + 0.2**3, abs=0.04)
    assert kept.any(-1).all()


def test_arguments_may_be_given_by_place(merged):
    model = merged().model
    ids = torch.randint(3, 48, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    named = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(model(ids, mask).logits, named)

    def begun():
        inputs = {"input_ids": ids[:, :6], "attention_mask": mask[:, :6]}
        return model(**inputs, use_cache=True).past_key_values

    rest = {"input_ids": ids[:, 6:], "attention_mask": mask}
    named = model(**rest, past_key_values=begun()).logits
    assert torch.equal(model(ids[:, 6:], mask, None, begun()).logits, named)


def test_a_cache_holds_what_its_prompt_decided_whoever_made_it(merged):
    model = merged().model
    ids = torch.randint(3, 48, (2, 8))
    prompt = {"input_ids": ids[:, :6]}
    made = model(**prompt, use_cache=True).past_key_values
    expected = model(ids[:, 6:], past_key_values=made).logits
    for own, how in (
        (True, {"return_dict": False}),
        (True, {"use_cache": False}),
        (False, {"return_dict": False}),
    ):
        given = {"past_key_values": DynamicCache(config=model.config)} if own else {}
        output = model(**prompt, **{"use_cache": True, **given, **how})
        cache = given["past_key_values"] if own else output[1]
        assert torch.equal(model(ids[:, 6:], past_key_values=cache).logits, expected)


def test_fresh_loras_are_drawn_apart_from_the_routers(base, make_bank):
    found = []
    for seed in range(40):
        model = base()
        config = smear.Config.preset("paper")
        part = smear.attach(model, make_bank(model), config, seed=seed).parts[Q]
        pair = [part.down[0].flatten(), part.weigh.vectors.flatten()]  # A, V
        found.append(torch.corrcoef(torch.stack(pair))[0, 1].item())
    # Of 128 independent pairs it is 0 on average, with a spread of 1 / sqrt 128.
    assert abs(np.mean(found)) < 4 / (128 * 40) ** 0.5


def test_bad_input_is_one_line_and_the_base_comes_back(model, batch, merged):
    before = fingerprint(model)
    plain = model(**batch, use_cache=True).past_key_values
    result = merged()
    with pytest.raises(Refusal, match="E-MODEL: the cache was begun without SMEAR"):
        model(batch["input_ids"][:, :1], past_key_values=plain)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    refused("E-MODEL: SMEAR reads input_ids", model, inputs_embeds=embedded)
    prompt = {"inputs_embeds": embedded, "max_new_tokens": 2}
    refused("E-MODEL: SMEAR reads input_ids", model.generate, **prompt)
    with pytest.raises(Refusal, match="E-MODEL: SMEAR reads one example a row"):
        model(batch["input_ids"], attention_mask=torch.zeros(3, 1, 9, 9))
    each = {"full_attention": None}
    refused(
        "E-MODEL: SMEAR reads one example a row",
        model,
        batch["input_ids"],
        attention_mask=each,
    )
    prompt = {"max_new_tokens": 2, "cache_implementation": "static"}
    message = "E-MODEL: the cache is static, .*: leave cache_implementation away"
    refused(message, model.generate, torch.tensor([[3, 4, 5]]), **prompt)
    with pytest.raises(
        Refusal, match="E-MODEL: the weights of smear depend on the input"
    ):
        result.lora()
    assert fingerprint(result.detach()) == before
    assert not model._forward_hooks
