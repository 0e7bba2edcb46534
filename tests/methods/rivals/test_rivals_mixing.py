"""Section 3: three ways to mix by hand and by PEFT's; weights of a task, an example and a token."""

import copy
from dataclasses import replace

import pytest
import torch
from peft import PeftModel

from moebook import training
from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rivals import mixing, tuning
from moebook.methods.rocket.loras import Lora
from moebook.models.checkpoint import fingerprint
from tests.refusals import refused


def scalar(name, a, b, alpha=1.0):
    return Lora(name, 1, alpha, {"l": torch.tensor([[a]])}, {"l": torch.tensor([[b]])})


def product(lora, path):
    return lora.scale * lora.up[path].double() @ lora.down[path].double()


@pytest.mark.parametrize(
    ("weights", "by_hand"),
    [
        ((0.5, 0.5), {"factors": 6.0, "outputs": 7.0, "root": 12.0}),
        ((0.25, 0.75), {"factors": 8.75, "outputs": 9.5}),
        (
            (0.5, -1.0),
            {"factors": 7.5, "outputs": -11.0, "root": (0.5**0.5 - 3) * (2**0.5 + 4)},
        ),
    ],
)
def test_the_three_ways_by_hand(weights, by_hand):
    bank = {"a": scalar("a", 1.0, 2.0), "b": scalar("b", 3.0, 4.0)}
    for mix, value in by_hand.items():
        merged = mixing.merged(bank, torch.tensor(weights), mix=mix)
        assert product(merged, "l").item() == pytest.approx(value)


@pytest.mark.parametrize(
    ("count", "norm", "cosine"),
    [(2, 0.73, 0.72), (4, 0.52, 0.52), (8, 0.35, 0.33), (38, 0.16, 0.17)],
)
def test_factors_of_independent_loras_nearly_vanish_and_of_one_a_are_the_outputs(
    count, norm, cosine
):
    torch.manual_seed(0)
    down = torch.randn(count, 16, 64).double()
    up = torch.randn(count, 64, 16).double()
    bank = {
        str(n): Lora(str(n), 16, 16.0, {"l": down[n]}, {"l": up[n]})
        for n in range(count)
    }
    shared = {name: replace(lora, down={"l": down[0]}) for name, lora in bank.items()}
    uniform = torch.full((count,), 1 / count, dtype=torch.float64)
    for each, factor, angle in ((bank, norm, cosine), (shared, 1.0, 1.0)):
        factors, outputs = (
            product(mixing.merged(each, uniform, mix=mix), "l")
            for mix in ("factors", "outputs")
        )
        ratio = factors.norm() / outputs.norm()
        assert ratio == pytest.approx(factor, abs=0.04 if each is bank else 1e-9)
        similarity = torch.cosine_similarity(
            factors.flatten(), outputs.flatten(), dim=0
        )
        assert similarity == pytest.approx(angle, abs=0.04 if each is bank else 1e-9)


@pytest.mark.parametrize(
    ("mix", "way", "of_peft", "more"),
    [
        ("outputs", "cat", lambda w: w, {}),
        ("outputs", "svd", lambda w: w, {"svd_rank": 8}),
        ("root", "linear", lambda w: w, {}),
        ("factors", "linear", lambda w: w**2, {}),
    ],
)
def test_pefts_mixtures_are_the_three_ways(
    mix, way, of_peft, more, base, batch, make_bank, peft
):
    bank = make_bank(base(), 2)
    bank["b"] = replace(bank["b"], alpha=3.0)  # its scale is folded in
    weights = torch.tensor([0.8, 0.3])
    theirs = peft(bank, way, of_peft(weights).tolist(), **more)(**batch).logits
    with rocket.loras.attached(
        model := base(), [mixing.merged(bank, weights, mix=mix)]
    ):
        torch.testing.assert_close(model(**batch).logits, theirs, rtol=1e-4, atol=2e-5)


class Drawn(torch.nn.Module):
    """Weights out of a table, of the shape that a way to decide has."""

    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.randn(*shape)

    def forward(self, x):
        return self.table


@pytest.mark.parametrize(
    "shape", [(3,), (2, 1, 3), (2, 5, 3)], ids=["task", "example", "token"]
)
@pytest.mark.parametrize("mix", ["factors", "outputs", "root"])
def test_a_layer_gives_each_token_what_its_own_weights_merge_to(
    mix, shape, model, make_bank
):
    bank = make_bank(model, 3)
    path = "model.layers.1.self_attn.q_proj"
    tuned = tuning.attach(model, bank, lambda *_: Drawn(shape), mix=mix, learnt=False)
    part = model.get_submodule(path)
    x = torch.randn(2, 5, 32)
    y = part(x)
    weights = part.weigh(x).expand(2, 5, 3)
    for place in ((0, 0), (0, 4), (1, 2)):
        one = mixing.merged(bank, weights[place], mix=mix)
        expected = part.base_layer(x[place]) + product(one, path).float() @ x[place]
        torch.testing.assert_close(y[place], expected, rtol=1e-4, atol=1e-4)
    tuned.detach()


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Gemma2"])
def test_a_tasks_mixture_is_one_peft_adapter_and_leaves_the_base(
    family, host, batch, make_bank, tmp_path
):
    model = host(family)
    before = fingerprint(model)
    bank = make_bank(model, 3)
    weights = torch.tensor([0.6, -0.4, 1.1])
    for mix in ("factors", "outputs"):
        tuned = tuning.attach(
            model, bank, lambda *_: mixing.Fixed(weights), mix=mix, learnt=False
        )
        logits = model(**batch).logits
        folder = tuned.save(tmp_path / mix)
        assert torch.equal(tuned.weights()["model.layers.0.self_attn.q_proj"], weights)
        assert fingerprint(tuned.detach()) == before
        theirs = PeftModel.from_pretrained(copy.deepcopy(model), folder)(**batch).logits
        torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-4)
        assert tuned.model is model
        assert not hasattr(model, "rival")


def test_lower_ranks_and_missing_layers_are_exact_for_outputs_and_refused_for_factors(
    base, batch, lora
):
    model = base()
    bank = {
        "a": lora(model, "a", 0, rank=4),
        "b": lora(model, "b", 1, rank=6, alpha=3.0),
        "c": lora(model, "c", 2, targets=("q_proj",)),
    }
    weights = torch.tensor([0.7, 0.2, -0.5])
    merged = mixing.merged(bank, weights, mix="outputs")
    path = "model.layers.0.self_attn.v_proj"
    expected = 0.7 * product(bank["a"], path) + 0.2 * product(bank["b"], path)
    torch.testing.assert_close(product(merged, path), expected, rtol=1e-5, atol=1e-5)
    del bank["c"]
    with pytest.raises(Refusal, match="E-BANK: 'a' and 'b' differ in rank: 4 and 6"):
        mixing.merged(bank, weights[:2], mix="factors")
    with pytest.raises(Refusal, match="E-BANK: the bank is empty"):
        mixing.merged({}, weights, mix="factors")


def test_mixing_weights_learn_at_their_own_rate_and_a_failure_takes_the_rival_off(
    model, rows, make_bank
):
    before = fingerprint(model)
    data = tuning.Data(rows)
    bank = make_bank(model)
    huge = make_bank(model, size=1e30)
    first = {}
    for rate in (0.1, 1e-3):
        fixed = {"weigh": lambda *_: mixing.Fixed(torch.ones(4) / 4).requires_grad_()}
        tuned = tuning.attach(model, bank, **fixed, mix="outputs", learnt=True)
        down = tuned.parts["model.layers.0.self_attn.q_proj"].down.detach().clone()
        tuned = tuning.fit(
            tuned, data, rate=rate, lr=1e-3, steps=1, batch=4, warmup=0.0
        )
        moved = tuned.weights()["model.layers.0.self_attn.q_proj"] - 1 / 4
        first[rate] = moved.abs().max().item()  # Adam's first step is the rate
        step = tuned.parts["model.layers.0.self_attn.q_proj"].down - down
        assert step.abs().max().item() == pytest.approx(1e-3, rel=0.02)
        assert tuned.cost.trained == 2 * (4 * 4 * (32 + 32) + 4 * 4 * (32 + 16) + 2 * 4)
        assert tuned.cost.forward == tuned.cost.backward == tuned.history.tokens[-1] > 0
        assert fingerprint(tuned.detach()) == before
    assert first == pytest.approx({0.1: 0.1, 1e-3: 1e-3}, rel=0.02)
    tuned = tuning.attach(model, huge, **fixed, mix="outputs", learnt=True)
    with pytest.raises(Refusal, match="E-MODEL: the model holds a mixture already"):
        tuning.attach(model, bank, **fixed, mix="outputs", learnt=True)
    with pytest.raises(Refusal, match="E-NONFINITE: step 1"):
        tuning.fit(tuned, data, lr=1e-3, steps=2, batch=4)
    assert fingerprint(model) == before


def test_a_lora_that_does_not_tell_its_base_is_attached_only_where_it_fits(model, lora):
    good = lora(model, "a", 0)
    wide = {
        path: torch.nn.functional.pad(down, (0, 1)) for path, down in good.down.items()
    }
    short = {path.removeprefix("model."): down for path, down in good.down.items()}
    ups = {path.removeprefix("model."): up for path, up in good.up.items()}
    misfits = {
        "E-SHAPE: 'a' turns 33 numbers into 32 at .*, the base 32": {"down": wide},
        "E-KEYS: 'a' adapts layers.0.*, no linear layer": {"down": short, "up": ups},
    }
    before = [type(part) for part in model.modules()]
    trains = [part.requires_grad for part in model.parameters()]
    for message, changes in misfits.items():
        misfit = replace(good, base=None, **changes)
        refused(message, tuning.alone, model, misfit, learnt=True)
        assert [type(part) for part in model.modules()] == before
        assert [part.requires_grad for part in model.parameters()] == trains


def test_mean_nats_are_those_of_the_labels_in_any_batch(model, rows):
    with torch.no_grad():
        logits = [
            model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            for ids in rows["input_ids"]
        ]
    targets = [torch.tensor(ids[1:]) for ids in rows["input_ids"]]
    nats = [-l[range(len(t)), t] for l, t in zip(logits, targets, strict=True)]  # noqa: E741
    assert training.nats(model, rows, batch=5) == pytest.approx(
        torch.cat(nats).mean().item(), rel=1e-5
    )


@pytest.mark.parametrize("mix", ["factors", "outputs", "root"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_merged_lora_has_the_base_that_any_of_them_tells(order, mix):
    made = {"a": scalar("a", 1.0, 2.0), "b": scalar("b", 3.0, 4.0)}
    bank = {name: made[name] for name in order}
    assert mixing.merged(bank, torch.ones(2), mix=mix).base is None
    bank["b"] = replace(bank["b"], base="f" * 64)
    assert mixing.merged(bank, torch.ones(2), mix=mix).base == "f" * 64


def test_a_mix_of_another_name_and_weights_that_are_no_tensor_are_refused():
    bank = {"a": scalar("a", 1.0, 2.0), "b": scalar("b", 3.0, 4.0)}
    call = (mixing.merged, bank)
    refused("E-CHOICE: mix is 'mean', expected", *call, torch.ones(2), mix="mean")
    for weights in ([0.5, 0.5], {"l": [0.5, 0.5]}, 0.5):
        refused("E-TYPE: weights", *call, weights, mix="root")


@pytest.mark.parametrize("mix", ["factors", "outputs", "root"])
@pytest.mark.parametrize("widths", [(2, 1), (1, 2)])
def test_loras_of_layers_of_other_widths_are_not_mixed(widths, mix):
    width, out = widths
    other = Lora("b", 1, 1.0, {"l": torch.ones(1, width)}, {"l": torch.ones(out, 1)})
    bank = {"a": scalar("a", 1.0, 2.0), "b": other}
    words = r"E-SHAPE: 'a' and 'b': l is \[D, O\] = \[1, 1\] and "
    refused(words, mixing.merged, bank, torch.ones(2), mix=mix)
