"""pi-tuning: Fishers by PEFT's gradients in a loop, similarity by hand, what joins and trains."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel

from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rivals import pi_tuning
from moebook.methods.rivals.tuning import Data

PATH = "model.layers.1.self_attn.q_proj"


def of(*values):
    return {"t": torch.tensor(values)}


def test_similarity_by_hand():
    like = pi_tuning.similarity
    torch.manual_seed(0)
    assert like(of(1.0, 3.0), of(3.0, 1.0)) == pytest.approx(0.6)
    assert like(of(1.0, 0.0), of(0.0, 2.0)) == 0
    assert like(of(1.0, 0.0, 2.0), of(1.0, 0.0, 2.0)) == pytest.approx(1)
    a, b = ({"p": torch.rand(5), "q": torch.rand(3)} for _ in range(2))
    shares = {name: a[name] / (a[name] + b[name]) for name in a}
    both = [
        float(torch.cosine_similarity(share, 1 - share, dim=0))
        for share in shares.values()
    ]
    assert like(a, b) == pytest.approx(like(b, a)) == pytest.approx(sum(both) / 2)
    small = []
    for one in (a, b):
        small.append({name: 1e-9 * tensor for name, tensor in one.items()})
    assert like(*small) == pytest.approx(like(a, b))
    plain = [float(torch.cosine_similarity(a[name], b[name], dim=0)) for name in a]
    released = like(*small, eps=1e-6)
    assert released == pytest.approx(sum(plain) / 2, abs=2e-3)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("form", ["row", "batch"])
def test_fishers_are_the_squares_of_pefts_gradients(
    form, family, host, rows, lora, tmp_path
):
    model = host(family)
    few = rows.select(range(6))
    one = lora(model, "one", 0)
    folder = rocket.loras.write(one, tmp_path / "one")
    peft = PeftModel.from_pretrained(host(family), folder, is_trainable=True)
    size = 1 if form == "row" else 4
    total = {}
    for start in range(0, 6, size):
        batch = [torch.tensor(ids) for ids in few["input_ids"][start : start + size]]
        ids, labels = (
            torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=fill)
            for fill in (0, -100)
        )
        loss = peft(
            input_ids=ids, attention_mask=(labels != -100).long(), labels=labels
        ).loss
        (loss * ((labels[:, 1:] != -100).sum() if form == "row" else 1)).backward()
        for name, p in peft.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad.double() ** 2 / -(-6 // size)
        peft.zero_grad()
    found = pi_tuning.fisher(model, one, few, form=form)
    assert len(found) == len(total) == 8
    for name, expected in total.items():
        path, factor = name.removeprefix("base_model.model.").split(".lora_")
        torch.testing.assert_close(
            found[f"{path}.{factor[0]}"], expected, rtol=1e-3, atol=1e-9
        )


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_a_fisher_is_that_of_its_rows_whatever_their_format(form, model, rows, lora):
    one = lora(model, "one", 0)
    few = rows.select([0, 0, 0, 0, 1, 2])
    wanted = pi_tuning.fisher(model, one, few)
    found = pi_tuning.fisher(model, one, few.with_format(form))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_v_starts_uniform_and_far_apart_it_is_one_lora():
    """That fixed weights are PEFT's `cat` is tested with `mixing`."""
    part = pi_tuning.Interpolation(3)
    assert part(None).tolist() == pytest.approx([1 / 3] * 3)
    part.v.data = torch.tensor([-80.0, 80.0, -80.0])
    assert part(None).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "weights", "loras"),
    [
        ({"trains": "weights"}, 2 * 2, 0),
        ({"trains": "weights", "shared": "layer"}, 4 * 2, 0),
        ({"shared": "all", "rate": 0.1}, 2, 2),
    ],
)
def test_the_most_alike_neighbour_joins_and_switches_say_what_trains(
    changes, weights, loras, model, rows, bank
):
    few = rows.select(range(8))
    recipe = {"steps": 2, "batch": 4, "lr": 1e-3, "warmup": 0.0}
    config = pi_tuning.Config(neighbours=1, **changes)
    shapes = pi_tuning.fisher(model, bank["a"], few)
    known = {}
    for name in bank:
        known[name] = {key: torch.zeros_like(part) for key, part in shapes.items()}
    for each in known["c"].values():
        each += 1.0  # of the others every share is 0
    done = pi_tuning.tuned(model, bank, Data(few), config, embeddings=known, **recipe)
    one = 4 * 2 * (64 + 48)  # numbers of a LoRA
    assert done.origin.names == ("target", "c")
    assert done.lora().rank == 8
    assert done.cost.trained == one + weights + loras * one
    kept = torch.equal(done.parts[PATH].down[1], bank["c"].down[PATH])
    assert kept is (loras == 0)
    learnt = {id(part.weigh) for part in done.parts.values()}
    assert 2 * len(learnt) == weights
    tokens = sum(map(len, few["input_ids"]))
    # Two trainings of an epoch, and the target's Fisher information.
    assert done.cost.forward == 3 * tokens


@pytest.mark.parametrize("form", [None, "torch"])
def test_both_trainings_have_checkpoints_of_their_own(
    form, model, rows, bank, tmp_path
):
    data = Data(rows.select(range(4)).with_format(form))
    shapes = pi_tuning.fisher(model, bank["a"], data.shots)
    recipe = {"embeddings": dict.fromkeys(bank, shapes), "steps": 2, "batch": 4}
    given = (model, bank, data, pi_tuning.Config(neighbours=1))
    kept = pi_tuning.tuned(*given, output=tmp_path / "runs", **recipe)
    learnt = kept.lora().digest
    kept.detach()
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["mixture", "target"]
    alone = pi_tuning.tuned(*given, **recipe)
    assert alone.lora().digest == learnt
    alone.detach()


def test_what_has_no_fisher_is_refused(model, rows, bank, lora):
    still = lora(model, "still", 0, size=0.0)
    for one, message in (
        (still, "E-BANK: 'still' has B = 0, where the gradient of A is 0"),
        (
            lora(model, "huge", 0, size=1e30),
            "E-NONFINITE: the Fisher of 'huge' holds NaN",
        ),
    ):
        with pytest.raises(Refusal, match=message):
            pi_tuning.fisher(model, one, rows)
    factors = {"down": {p: a[:2] for p, a in bank["b"].down.items()}}
    factors["up"] = {p: b[:, :2] for p, b in bank["b"].up.items()}
    low = bank | {"b": replace(bank["b"], name="low", rank=2, **factors)}
    for loras, data, changes, message in (
        (
            bank,
            Data(rows, sources={"a": rows}),
            {},
            "E-DATA: the rows that 'b' was trained",
        ),
        (bank, Data(rows), {"neighbours": 5}, "E-RANGE: k is 5, expected 1 to 4"),
        (low, Data(rows), {}, "E-BANK: 'a' and 'low' differ in rank: 4 and 2"),
    ):
        with pytest.raises(Refusal, match=message):
            pi_tuning.tuned(model, loras, data, pi_tuning.Config(**changes), steps=1)
