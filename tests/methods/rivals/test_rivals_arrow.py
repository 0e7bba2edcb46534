"""Arrow: prototypes by numpy's SVD, gates by hand, models by PEFT's Arrow; PEFT's faults."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import ArrowConfig, create_arrow_model
from peft.tuners.lora.arrow import ArrowLoraLinearLayer

from moebook.errors import Refusal
from moebook.methods import rocket
from moebook.methods.rivals import arrow, mixing
from moebook.methods.rivals.tuning import Data

PATH = "model.layers.1.self_attn.q_proj"


def direction(down, up):
    """The one prototype of A [R, D] and B [O, R]."""
    return arrow.prototypes({"l": (down[None], up[None])}, ["one"])["l"][0]


def cosine(one, other):
    return abs(float(torch.as_tensor(one).double() @ torch.as_tensor(other).double()))


def gates(x, prototypes, **switches):
    return arrow.Arrow(torch.as_tensor(prototypes), arrow.Config(**switches))(
        torch.as_tensor(x)
    )


@pytest.mark.parametrize(
    ("rank", "width", "out"), [(4, 32, 16), (8, 6, 40), (8, 40, 5), (1, 7, 7)]
)
def test_prototypes_are_those_of_numpys_svd_however_the_lora_is_written(
    rank, width, out
):
    torch.manual_seed(rank)
    down = torch.randn(rank, width)
    up = torch.randn(out, rank)
    turn = torch.linalg.qr(torch.randn(rank, rank)).Q
    truth = np.linalg.svd((up.double() @ down.double()).numpy())[2][0]
    for a, b in ((down, up), (3 * down, -0.1 * up), (turn @ down, up @ turn.T)):
        found = direction(a, b)
        assert cosine(found, truth) == pytest.approx(1, abs=1e-6)
        assert found.norm() == pytest.approx(1)


def test_pefts_power_iteration_and_its_first_drafts_svd_of_a_alone_can_be_wrong():
    down = torch.diag(torch.tensor([2.0, 1.0]))
    up = torch.diag(torch.tensor([1.0, 4.0]))
    assert cosine(direction(down, up), [0.0, 1.0]) == 1  # A alone has (1, 0)
    torch.manual_seed(0)
    config = ArrowConfig(rng_seed=0)
    config.task_adapter_names = []
    peft = ArrowLoraLinearLayer(256, config)
    cosines = []
    for _ in range(40):
        a = torch.randn(16, 256)
        b = torch.randn(256, 16)
        cosines.append(
            cosine(peft.top_right_singular_vec_from_BA(a, b), direction(a, b))
        )
    assert np.mean(cosines) < 0.95
    assert min(cosines) < 0.5


def test_gates_by_hand():
    basis = torch.eye(2)
    expected = torch.tensor([[0.26894, 0.73106]])
    for x in ([[1.0, 2.0]], [[-1.0, -2.0]]):
        torch.testing.assert_close(
            gates(x, basis, top_k=2), expected, rtol=1e-4, atol=1e-5
        )
    assert gates([[1.0, 2.0]], basis, top_k=1).tolist() == [[0, 1]]
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8)
    many = torch.randn(5, 8)
    uniform = gates(x, many, top_k=None, temperature=1e9)
    torch.testing.assert_close(uniform, torch.full((2, 3, 5), 0.2))
    assert (gates(x, many, top_k=3) > 0).sum(-1).eq(3).all()


@pytest.mark.parametrize("top_k", [1, 3])
def test_outputs_equal_pefts_arrow_with_its_prototypes(
    top_k, base, batch, make_bank, tmp_path
):
    model = base()
    bank = make_bank(model, 4)
    folders = [rocket.loras.write(lora, tmp_path / name) for name, lora in bank.items()]
    theirs = create_arrow_model(
        base(), folders, ArrowConfig(top_k=top_k, rng_seed=0)
    ).eval()
    logits = theirs(**batch).logits
    config = arrow.Config.preset("peft", top_k=top_k)
    done = arrow.tuned(model, bank, None, config)
    for path, part in done.parts.items():
        layer = theirs.get_submodule(f"base_model.model.{path}").lora_arrow[
            "arrow_router"
        ]
        part.weigh.prototypes.copy_(layer.prototypes)
    torch.testing.assert_close(model(**batch).logits, logits, rtol=1e-4, atol=1e-4)
    weights = done.weights(batch)[PATH]
    assert (weights > 0).sum(-1).eq(top_k).all()
    assert weights.shape == (3, 9, 4)


def test_tuning_moves_experts_alone_and_prototypes_only_if_taken_again(
    model, rows, bank
):
    for when in ("before", "after"):
        config = arrow.Config(prototypes=when)
        done = arrow.tuned(
            model, bank, Data(rows), config, steps=3, lr=0.05, warmup=0.0
        )
        part = done.parts[PATH]
        start = mixing.stack(bank, "factors")
        old, new = (
            arrow.prototypes({PATH: pair}, list(bank))[PATH].float()
            for pair in ((start.down[PATH], start.up[PATH]), (part.down, part.up))
        )
        assert not torch.allclose(old, new, atol=1e-3)
        torch.testing.assert_close(
            part.weigh.prototypes, old if when == "before" else new
        )
        assert done.cost.trained == part.down.numel() * 4 + (32 + 16) * 4 * 4 * 2
        done.detach()


def test_ranks_may_differ_for_outputs_alone_and_what_has_no_direction_is_refused(
    model, bank, lora
):
    low = bank | {"c": lora(model, "low", 2, rank=2, alpha=3.0)}
    done = arrow.tuned(model, low, None, arrow.Config.preset("peft"))
    truth = np.linalg.svd((low["c"].up[PATH] @ low["c"].down[PATH]).numpy())[2][0]
    assert cosine(done.parts[PATH].weigh.prototypes[2], truth) == pytest.approx(
        1, abs=1e-5
    )
    done.detach()
    still = replace(bank["b"], up=bank["b"].up | {PATH: torch.zeros(32, 4)})
    for loras, changes, message in (
        (low, {}, "E-BANK: 'a' and 'low' differ in rank: 4 and 2"),
        (bank | {"b": still}, {}, f"E-BANK: 'b' has B A = 0 in {PATH}"),
        (bank, {"top_k": 5}, r"E-RANGE: k is 5, expected 1 to 4"),
        ({"a": bank["a"]}, {"top_k": 1}, r"E-BANK: the bank holds 1 LoRAs"),
        (bank | {"e": bank["a"]}, {}, "E-BANK: 'a' and 'e' are the same LoRA"),
    ):
        with pytest.raises(Refusal, match=message):
            arrow.tuned(model, loras, None, arrow.Config.preset("paper", **changes))
        assert not hasattr(model, "arrow")
    with pytest.raises(
        Refusal, match="E-CHOICE: prototypes is 'after', but tune is 'none'"
    ):
        arrow.Config.preset("paper", prototypes="after")


@pytest.mark.parametrize(("rank", "width"), [(4, 16), (64, 2048)])
def test_what_cancels_has_no_direction_however_it_is_rounded(rank, width):
    torch.manual_seed(0)
    a = torch.randn(1, width)
    b = torch.randn(32, 1)
    signs = torch.ones(1, rank)
    signs[:, ::2] = -1
    down = a.expand(rank, -1)
    up = b * signs  # B A = b (sum of the signs) a = 0, term for term
    with pytest.raises(Refusal, match="E-BANK: 'one' has B A = 0 in l, so no"):
        direction(down, up)
    # Where a millionth is left of one term, that is the direction.
    up = up.double()
    up[:, 0] += 1e-6 * b[:, 0]
    assert cosine(direction(down, up), a[0] / a.norm()) == pytest.approx(1, abs=1e-6)
