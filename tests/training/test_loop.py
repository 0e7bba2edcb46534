"""Training equals a plain loop, repeats bit for bit, and stops at the first bad number.

Its batches are a function of seed and step, cover every row, and cost little padding.
"""

import importlib
import math
import os
import random
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers.utils import logging

from moebook import training
from moebook.errors import Refusal
from moebook.nn.batch import check_batch
from moebook.training import fit, nats
from moebook.training.batches import Batches
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)


def plain_loop(model, rows, rates, *, clip, decay, penalty=None):
    """AdamW written out, one parameter after another, on the batches of seed 3."""
    batches = Batches(rows, 4, seed=3, pad_id=2)
    moments = {
        p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()
    }
    decayed = {p for p in model.parameters() if p.ndim > 1}
    losses = []
    norms = []
    for step, rate in enumerate(rates):
        batch = batches.collate(batches.rows(step))
        loss = model(**batch).loss
        losses.append(loss.item())
        (loss + penalty(model) if penalty else loss).backward()
        norm = math.sqrt(sum(p.grad.pow(2).sum().item() for p in model.parameters()))
        norms.append(norm)
        with torch.no_grad():
            for p, (first, second) in moments.items():
                gradient = p.grad * min(1.0, clip / norm)
                p *= 1 - rate * (decay if p in decayed else 0.0)
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.95).add_(gradient * gradient, alpha=0.05)
                corrected = (second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
                p -= rate * first / (1 - 0.9 ** (step + 1)) / corrected
        model.zero_grad()
    return losses, norms


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def square(model):
    return 0.05 * sum(p.pow(2).mean() for p in model.parameters())


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [1, 1, 1]),
        ("linear", [3 / 4, 2 / 4, 1 / 4]),
        ("wsd", [1, 1, 1 / 2]),
        ("cosine", [0.5 + 0.5 * math.cos(math.pi * t / 4) for t in (1, 2, 3)]),
    ],
)
def test_training_equals_a_plain_loop(tiny, rows, schedule, shares):
    ours = tiny().double()
    theirs = tiny().double()
    history = fit(
        ours,
        rows(),
        steps=6,
        batch=4,
        lr=1e-2,
        schedule=schedule,
        warmup=0.3,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        clip=0.5,
        seed=3,
        pad_id=2,
        penalty=square,
    )
    rates = [1e-2 * share for share in (0, 1 / 2, 1, *shares)]
    losses, norms = plain_loop(
        theirs, rows(), rates, clip=0.5, decay=0.1, penalty=square
    )
    assert history.loss == pytest.approx(losses, rel=1e-6)
    assert history.norm == pytest.approx(norms, rel=1e-6)
    assert history.penalty[0] == pytest.approx(square(tiny()).item(), rel=1e-6)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-6, atol=1e-7)


def test_accumulated_parts_give_the_history_of_the_whole_batch(tiny, rows):
    def train(parts):
        model = tiny().double()
        settings = {"epochs": 2, "batch": 6, "lr": 1e-2, "pad_id": 2}
        return model, fit(model, rows(), penalty=square, accumulate=parts, **settings)

    whole, once = train(1)
    parts, often = train(3)  # the last batch has fewer rows than parts
    for name in ("loss", "penalty", "norm"):
        assert getattr(often, name) == pytest.approx(getattr(once, name), rel=1e-5)
    assert (often.step, often.tokens) == (once.step, once.tokens)
    torch.testing.assert_close(weights(whole), weights(parts), rtol=1e-4, atol=1e-4)


def test_bf16_computes_in_bfloat16_and_leaves_the_model_as_it_was(tiny, rows):
    model = tiny()
    seen = []
    forward = type(model).forward
    model.model.layers[0].mlp.register_forward_hook(
        lambda *now: seen.append(now[2].dtype)
    )
    low = fit(model, rows(), steps=3, batch=4, lr=1e-2, pad_id=2, bf16=True)
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.forward.__func__ is forward
    full = fit(tiny(), rows(), steps=3, batch=4, lr=1e-2, pad_id=2)
    assert low.loss == pytest.approx(full.loss, rel=2e-2)
    assert low.loss != full.loss
    assert full.penalty == [0.0] * 3


def test_one_seed_gives_the_same_bits_and_only_what_requires_a_gradient_moves(
    lora, rows
):
    model = lora()
    settings = {"epochs": 2, "batch": 8, "lr": 1e-2, "weight_decay": 0.1}

    def train(seed):
        model.load_state_dict(lora().state_dict())
        return fit(model, rows(), **settings, seed=seed, pad_id=2)

    first = train(1)
    ended = {n: p.detach().clone() for n, p in model.named_parameters()}
    again = train(1)
    assert all(torch.equal(p, ended[n]) for n, p in model.named_parameters())
    other = train(2)
    assert first.step == list(range(1, 7))
    assert first.tokens[-1] == 2 * sum(rows()["length"])
    assert [0.0, *first.seconds] == sorted({0.0, *first.seconds})
    assert (first.loss, first.norm) == (again.loss, again.norm)
    assert first.loss != other.loss
    before = dict(lora().named_parameters())
    moved = {
        name for name, p in model.named_parameters() if not torch.equal(p, before[name])
    }
    assert moved == {name for name in before if "lora_" in name}


def test_dropout_draws_anew_at_every_step(lora, rows):
    history = fit(lora(), rows(1), steps=4, batch=1, lr=1e-9, pad_id=2)
    model = lora()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first: make dropout visible
            torch.nn.init.constant_(parameter, 0.3)
    noisy = fit(model, rows(1), steps=4, batch=1, lr=1e-9, pad_id=2)
    assert max(history.loss) - min(history.loss) < 1e-5
    assert len({round(loss, 5) for loss in noisy.loss}) == 4


@pytest.mark.parametrize(
    "bad",
    [
        lambda weight: weight.sum() * math.nan,
        lambda weight: weight.sum() * math.inf,
        lambda weight: (weight - weight.detach()).abs().sum().sqrt(),
    ],  # its gradient is infinite
)
def test_a_bad_loss_stops_at_its_step_before_any_parameter_moves(
    tiny, rows, bad, tmp_path
):
    model = tiny()
    before = []

    def spoil(model):
        before.append(weights(model))
        return bad(model.model.norm.weight) if len(before) == 4 else before[0].sum() * 0

    with pytest.raises(
        Refusal, match=r"E-NONFINITE: step 4: .*last checkpoint: step 2.*: lower lr"
    ):
        fit(
            model,
            rows(),
            steps=9,
            batch=4,
            pad_id=2,
            penalty=spoil,
            output=tmp_path,
            every=2,
        )
    assert torch.equal(weights(model), before[-1])
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-2"]
    assert all(p.grad is None for p in model.parameters())


def test_a_bad_first_loss_is_not_put_down_to_the_rate(tiny, rows):
    model = tiny()
    model.model.norm.weight.data.fill_(math.nan)
    fix = "look at the weights, the rows and the penalty"
    words = f"E-NONFINITE: step 1: loss nan.*: {fix}"
    refused(words, fit, model, rows(), steps=1, warmup=0.0)


def random_states():
    """Of torch's, NumPy's and Python's generators."""
    return torch.get_rng_state().numpy(), np.random.get_state(), random.getstate()


def test_training_leaves_the_surroundings_as_they_were(
    tiny, rows, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    model = tiny()
    verbosity = logging.get_verbosity()
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    before = random_states()
    fit(model, rows(), steps=2, batch=4, pad_id=2)
    np.testing.assert_equal(random_states(), before)
    assert logging.get_verbosity() == verbosity
    assert model.config.use_cache
    assert not model.training
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"steps": 2, "epochs": 1}, "E-USAGE: steps"),
        ({"lr": math.nan}, "E-RANGE: lr"),
        ({"lr": 2**1024 - 1}, "E-RANGE: lr has a number of 1024 bits"),
        ({"betas": (0.9, 1.0)}, "E-RANGE: betas"),
        ({"schedule": "cosin"}, "E-CHOICE: .*'cosine'"),
        ({"optimizer": "paged_32bit", "steps": 2}, "E-DEVICE: optimizer"),
        ({"rates": {"weigh": 0.1}, "steps": 2}, "E-NAME: rates names 'weigh'"),
        ({"steps": 1}, "E-RANGE: steps = 1: the only step is that of the warm-up"),
        ({}, "E-RANGE: steps = 1: the only step is that of the warm-up"),
        ({"rates": {"lora_A": -1.0}}, "E-RANGE: rates.lora_A is -1.0"),
        (
            {"milestones": [((1, 3), id)], "steps": 2},
            "E-RANGE: milestone at step 3: .* step 0",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(lora, rows, given, code):
    model = lora()
    refused(code, fit, model, rows(), **given)
    assert torch.equal(weights(model), weights(lora()))


def test_rows_that_the_model_cannot_take_are_refused_before_the_first_step(tiny):
    for ids, labels, words in (
        (
            [[3, 300]],
            [[3, 4]],
            "E-VOCAB: input_ids: 300 is no token, the model knows 0 to 299",
        ),
        ([[3, -1]], [[3, 4]], "E-VOCAB: input_ids: -1"),
        ([[3, 4]], [[-100, 999]], "E-VOCAB: labels: 999"),
        ([[3, 4, 5]], [[-100, -5, 5]], "E-VOCAB: labels: -5"),
        (
            [[3] * 513],
            [[3] * 513],
            "E-RANGE: row 0 has 513 tokens, the model takes 512",
        ),
        ([["3", "4"]], [[3, 4]], "E-TYPE: row 0: input_ids hold '3', expected whole"),
        ([[3, 4]], [[3.0, 4.5]], "E-TYPE: row 0: labels hold 3.0, expected whole"),
        ([[3, 4], None], [[3, 4]] * 2, "E-TYPE: row 1: input_ids is None, expected"),
        ([[3, 4]], [[3, None]], "E-TYPE: row 0: labels hold None"),
        ([[[3, 4]]], [[3]], "E-TYPE: row 0: input_ids hold .3, 4., expected whole"),
    ):
        train = Dataset.from_dict({"input_ids": ids, "labels": labels})
        refused(words, fit, tiny(), train, steps=1)
    with pytest.raises(Refusal, match="E-VOCAB: pad_id: 300"):
        fit(
            tiny(),
            Dataset.from_dict({"input_ids": [[3, 4]], "labels": [[3, 4]]}),
            pad_id=300,
        )


def test_models_that_cannot_be_trained_or_not_in_parts_are_refused(
    lora, rows, monkeypatch
):
    model = lora()
    model.get_base_model().accepts_loss_kwargs = False
    fit(model, rows(), steps=2)
    refused(
        r"E-MODEL: PeftModel.* averages its loss",
        fit,
        model,
        rows(),
        steps=2,
        accumulate=2,
    )
    with pytest.raises(Refusal, match="E-MODEL: no parameter requires a gradient"):
        fit(model.requires_grad_(False), rows(), steps=2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refused(
        "E-CHOICE: ACCELERATE_USE_FSDP was set too late", fit, lora(), rows(), steps=2
    )


def test_a_model_with_parts_elsewhere_is_refused_in_one_line(tiny, rows):
    model = tiny()
    model.lm_head.to("meta")
    refused("E-DEVICE: parameters of the model are offloaded", fit, model, rows())


class Plain(nn.Embedding):
    def forward(self, input_ids, **_):
        return SimpleNamespace(loss=super().forward(input_ids).square().mean())


def test_a_module_without_configuration_and_vocabulary_trains(rows):
    one, other = fit(Plain(64, 4), rows(), steps=2, warmup=0.0, lr=0.1).loss
    assert other < one


def test_each_module_has_its_own_mode_back_and_each_gpu_its_random_state(
    tiny, rows, monkeypatch
):
    model = tiny()
    model.model.layers[0].mlp.train()
    modes = [module.training for module in model.modules()]
    states = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda gpu: f"of {gpu}")
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda *given: states.append(given))
    fit(model, rows(), steps=2, batch=4, pad_id=2)
    assert [module.training for module in model.modules()] == modes
    assert states == [("of 0", 0), ("of 1", 1)]


def test_what_a_cluster_says_of_its_size_starts_nothing(tiny, rows, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in {"WORLD_SIZE": "2", "PMI_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    history = fit(tiny(), rows(), steps=2, batch=4, pad_id=2)
    assert history.step == [1, 2]
    assert not torch.distributed.is_initialized()
    assert (os.environ["WORLD_SIZE"], os.environ["PMI_SIZE"]) == ("2", "2")
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("USE_DEEPSPEED", "true", "DEEPSPEED is not supported"),
        ("USE_MEGATRON_LM", "true", "MEGATRON_LM is not supported"),
        ("USE_FSDP", "maybe", "ACCELERATE_USE_FSDP: .*invalid truth value maybe"),
        ("GRADIENT_ACCUMULATION_STEPS", "x", "accelerate does not start .*'x'"),
        ("TORCH_DEVICE", "meta", "accelerate is told of device meta, .* is on cpu"),
    ],
)
def test_what_accelerate_cannot_do_is_told_with_what_is_supported(
    name, value, said, tiny, rows, monkeypatch
):
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    words = f"E-CHOICE: {said}.*: (launch with --multi_gpu, or with FSDP2|unset)"
    refused(words, fit, tiny(), rows(), steps=2, batch=4, pad_id=2)
    monkeypatch.delenv(f"ACCELERATE_{name}")
    assert fit(tiny(), rows(), steps=2, batch=4, pad_id=2).step == [1, 2]


def test_a_misspelt_flag_of_accelerate_is_refused_when_training_is_imported(
    monkeypatch,
):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "maybe")
    said = "E-CHOICE: ACCELERATE_USE_FSDP: .*invalid truth value maybe"
    refused(said, importlib.reload, training)


def noisy(model):
    """Measure in a way that runs the model in both modes and draws random numbers."""
    model.train()
    model(input_ids=torch.randint(3, 64, (2, 5)))
    return weights(model)


def at(*steps):
    return [(steps, weights)]


def test_a_milestone_holds_the_weights_after_as_many_steps_and_changes_none(lora, rows):
    settings = {"batch": 4, "lr": 1e-2, "warmup": 0.0, "seed": 3}
    long = lora()
    short = lora()
    milestones = [(range(6), noisy), *at(0, 2, 5)]
    _, measured = fit(
        long, rows(), steps=5, milestones=milestones, **settings
    ).milestones
    fit(short, rows(), steps=2, **settings)
    assert sorted(measured) == [0, 2, 5]
    for step, model in ((0, lora()), (2, short), (5, long)):
        assert torch.equal(measured[step], weights(model))
    plain = lora()
    fit(plain, rows(), steps=5, **settings)
    assert torch.equal(weights(plain), weights(long))


def test_a_resumed_run_is_measured_at_the_steps_of_the_whole_run(
    lora, rows, tmp_path, interrupt
):
    settings = {"steps": 10, "batch": 4, "lr": 1e-2, "seed": 3}
    want = fit(lora(), rows(), **settings, milestones=at(6, 8, 10)).milestones[0]
    folder = {"output": tmp_path / "run", "every": 6}
    with pytest.raises(KeyboardInterrupt):
        fit(lora(), rows(), **settings, **folder, penalty=interrupt(8))
    with pytest.raises(
        Refusal, match="milestone at step 2: the training goes from step 6 to 10"
    ):
        fit(lora(), rows(), **settings, **folder, milestones=at(2, 8))
    # Of another run that is told, and not which steps it has.
    with pytest.raises(Refusal, match=r"E-CONFIGDIFF: .*seed 3 -> 4"):
        other = settings | {"seed": 4}
        fit(lora(), rows(), **other, **folder, milestones=at(2, 8))
    # It goes on from step 6; then the run is finished already.
    for steps in ((6, 8, 10), (10,)):
        history = fit(lora(), rows(), **settings, **folder, milestones=at(*steps))
        got = history.milestones[0]
        assert len(got) == len(steps)
        assert all(torch.equal(got[step], want[step]) for step in steps)


def test_an_epoch_holds_every_row_once_in_an_order_of_seed_and_epoch_alone(rows):
    def drawn(steps, seed=5):
        batches = Batches(rows(23), 4, seed=seed, pad_id=2)
        assert batches.per_epoch == 6
        return {step: batches.rows(step).tolist() for step in steps}

    there = drawn(range(12))
    assert there == drawn(reversed(range(12)))
    first = [*chain.from_iterable(there[step] for step in range(6))]
    second = [*chain.from_iterable(there[step] for step in range(6, 12))]
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second
    assert there != drawn(range(12), seed=6)


@pytest.mark.parametrize("places", [{}, {"logits_to_keep": torch.arange(1, 4)}])
def test_a_label_that_no_token_foretells_is_no_label(places, tiny):
    ids = torch.arange(12).view(3, 4)
    labels = ids[:, -3:] if places else ids
    first = labels.where(torch.arange(labels.shape[1]) == 0, -100)
    batch = {"input_ids": ids, "labels": first, **places}
    told = "who: no token of the batch has a label"
    refused(f"E-DATA: {told}", check_batch, "who", tiny(), batch, needs=["labels"])
    check_batch("who", tiny(), batch | {"labels": labels}, needs=["labels"])


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"attention_mask": torch.tensor([[1, 0.5, 1, 1]])}, "E-RANGE: .*0.5 to 1.0,"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1.9]])}, "E-RANGE: .*1 and 0"),
        ({"labels": torch.tensor([[-1, 4, 5, 6]])}, "E-VOCAB: .*: say -100 for none"),
        ({"labels": torch.tensor([[3, 4, 5, 300]])}, "E-VOCAB: .*its own tokenizer"),
    ],
)
def test_masks_of_shares_and_labels_of_no_token_are_refused(part, words, tiny):
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6]]), **part}
    refused(words, check_batch, "who", tiny(), batch)


def test_a_batch_is_the_one_padded_by_hand_and_leaving_out_logits_changes_no_loss(
    rows, tiny
):
    ids = [[5, 6, 7, 8], [9, 10, 11]]
    labels = [[-100, -100, 7, 8], [-100, -100, 11]]
    table = {"input_ids": ids, "labels": labels}
    batch = Batches(Dataset.from_dict(table), 2, seed=0, pad_id=2).collate(
        np.array([0, 1])
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 11, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 7, 8], [-100, 11, -100]]
    assert batch["logits_to_keep"].tolist() == [1, 2, 3]
    model = tiny()
    batches = Batches(rows(12), 12, seed=0, pad_id=2)
    batch = batches.collate(np.arange(12))
    full = torch.full(batch["input_ids"].shape, -100)
    for line, labels in enumerate(batches.row_labels):
        full[line, : len(labels)] = torch.tensor(labels)
    with torch.no_grad():
        short = model(**batch).loss
        long = model(**{**batch, "labels": full, "logits_to_keep": 0}).loss
    assert batch["labels"].shape[1] < full.shape[1]
    torch.testing.assert_close(short, long)
    # Rows of similar length come together.
    batches = Batches(rows(256), 8, seed=0, pad_id=2)
    padded = sum(batches[step]["input_ids"].numel() for step in range(32))
    random_order = np.random.default_rng(0).permutation(256).reshape(32, 8)
    unsorted = sum(batches.lengths[line].max() * 8 for line in random_order)
    assert padded - batches.lengths.sum() < 0.4 * (unsorted - batches.lengths.sum())
    assert sum(batches.tokens(step) for step in range(32)) == batches.lengths.sum()


@pytest.mark.parametrize(
    ("ids", "labels", "words"),
    [
        ([], [], "no rows"),
        ([[1, 2]], [[-100]], "row 0: 2 input_ids but 1 labels"),
        ([[1, 2], [3, 4]], [[-100, 2], [1, -100]], "row 1: every label is masked"),
    ],
)
def test_rows_that_cannot_be_learnt_are_refused(ids, labels, words):
    with pytest.raises(Refusal, match=f"E-DATA: .*{words}"):
        Batches(
            Dataset.from_dict({"input_ids": ids, "labels": labels}), 2, seed=0, pad_id=2
        )


def test_rows_that_were_not_encoded_are_refused_without_their_content(tiny):
    plain = [{"prompt": "the patient said", "answer": "yes"}]
    model = tiny()
    words = "is list, expected what data.encode returns$"
    refused(f"E-TYPE: train {words}", fit, model, plain, steps=2, batch=2, pad_id=2)
    refused(f"E-TYPE: rows {words}", nats, model, plain, pad_id=2)
    refused(f"E-TYPE: rows {words}", Batches, plain, 2, seed=0, pad_id=2)
