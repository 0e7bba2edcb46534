"""Grouped experts: the literal enumeration is the oracle; a group is taken whole or not at all."""

from itertools import combinations, permutations

import pytest
import torch

from moebook.errors import Refusal
from moebook.methods import esft
from moebook.methods.esft import grouping
from moebook.models import anatomy


def counts(experts, seed, top=1000):
    torch.manual_seed(seed)
    matrix = torch.randint(0, top, (experts, experts)).double()
    return (matrix + matrix.T).fill_diagonal_(0)


def looked_at_all(matrix, size):
    """The paper's procedure in plain Python: of all groups of those left, the first of the best."""
    alike, left, groups = grouping.similarity(matrix).tolist(), list(range(len(matrix))), []
    while left:
        pairs = {g: sum(alike[i][j] for i, j in combinations(g, 2))
                 for g in combinations(left, size)}  # fmt: skip
        groups.append(max(pairs, key=pairs.get))
        left = [expert for expert in left if expert not in groups[-1]]
    return tuple(groups)


@pytest.mark.parametrize("top", [1000, 2])  # of the counts: 2 makes many ties
@pytest.mark.parametrize(("experts", "size"), [(6, 1), (8, 2), (12, 3), (12, 4), (10, 5), (12, 6)])
def test_groups_are_those_that_looking_at_all_of_them_finds(experts, size, top):
    for seed in range(3):
        matrix = counts(experts, seed, top)
        assert esft.partition(matrix, size) == looked_at_all(matrix, size)


def test_a_hand_worked_case():
    """Rows 0 and 2 point one way, 1 and 3 the other; expert 4 was never used, nor was 5."""
    matrix = torch.zeros(6, 6)
    matrix[:4, 4:] = torch.tensor([[5, 1], [1, 5], [10, 2], [3, 15]])
    assert esft.partition(matrix, 2) == ((0, 2), (1, 3), (4, 5))
    equal = torch.ones(9, 9).double()
    assert esft.partition(equal, 3) == ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    alike = grouping.similarity(matrix) / grouping.UNIT
    assert alike[0, 2] == pytest.approx(1)
    assert alike[0, 1] == pytest.approx((5 + 5) / 26)
    assert alike[4].max() == 0


def test_cooccurrence_equals_a_naive_count(mixture, batch):
    """Pair by pair, token by token, from the ids that the experts are called with at first."""
    model, calls = mixture("DeepseekV2"), {}
    for layer in anatomy(model).layers[1:]:
        layer.experts.register_forward_pre_hook(
            lambda module, args, index=layer.index: calls.update({index: calls.get(index, args[1])})
        )
    model(**batch)
    real, counted = batch["attention_mask"].flatten().tolist(), esft.cooccurrence(model, [batch])
    assert counted.keys() == calls.keys() == {1, 2}
    for layer, ids in calls.items():
        want = torch.zeros(8, 8).double()
        for token, chosen in enumerate(ids.tolist()):
            for i, j in permutations(chosen, 2):
                want[i, j] += real[token]
        assert torch.equal(counted[layer], want)


def grouped(mixture, batch, size=2):
    model = mixture("DeepseekV2", num_experts_per_tok=4)
    return model, esft.group(model, esft.cooccurrence(model, [batch]), size)


def test_each_token_takes_whole_groups_with_equal_gates(mixture, batch):
    model, groups = grouped(mixture, batch)
    before = anatomy(mixture("DeepseekV2", num_experts_per_tok=4)).layers
    after = anatomy(model).layers
    scores = esft.measure(model, [batch])
    for layer, parts in groups.items():
        for members in map(list, parts):
            mean = before[layer].router.weight[members].mean(0)
            weight = after[layer].router.weight[members]
            torch.testing.assert_close(weight, mean.expand(len(members), -1))
            for kind in (scores.token, scores.gate):
                row = kind[layer][members]
                torch.testing.assert_close(row, row[:1].expand(len(row)), rtol=1e-6, atol=1e-9)
        assert scores.token[layer].sum().item() == pytest.approx(1)


def test_whole_groups_are_selected_and_trained(mixture, batch):
    model, groups = grouped(mixture, batch, size=4)
    selection = esft.select(esft.measure(model, [batch]), esft.Config(), groups=groups)
    assert all(set(ids) in map(set, groups[layer]) for layer, ids in selection.experts.items())
    esft.specialise(model, selection)
    model(**batch).loss.backward()
    assert all(p.grad is not None for p in esft.trained(model).values())


def test_a_shared_gate_stays_shared_while_routers_train(mixture, batch):
    model, groups = grouped(mixture, batch)
    esft.full(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = anatomy(model).layers[1].router.weight.detach().clone()
    model.train()(**batch).loss.backward()
    optimizer.step()
    weight = anatomy(model).layers[1].router.weight
    assert not torch.equal(weight, before)
    for members in groups[1]:
        assert torch.equal(weight[list(members)], weight[[members[0]] * len(members)])


def test_groups_that_do_not_fit_are_refused(mixture, batch):
    model, correcting, wide = mixture("DeepseekV2"), mixture("DeepseekV3"), torch.ones(64, 64)
    check, together = esft.grouping.check, esft.cooccurrence(model, [batch])
    special = esft.specialise(mixture("DeepseekV2"), esft.Selection(experts={1: (0,), 2: (0,)}))
    for size in (0, 3, 5):
        with pytest.raises(Refusal, match=f"E-RANGE: the group size is {size}, no divisor of 8"):
            esft.partition(together[1], size)
    cases = {
        "E-RANGE: .* size is 2, no divisor of 8 experts and of 3": lambda: check(model, [1, 2]),
        "E-RANGE: 4,426,165,368 groups of 8, at most": lambda: esft.partition(wide, 8),
        "E-MODEL: layer 1: DeepseekV3TopkRouter chooses by more": lambda: check(correcting, [1]),
        "E-MODEL: the model is specialised": lambda: esft.group(special, together, 1),
        "E-DATA: no real token": lambda: esft.cooccurrence(model, []),
    }
    for message, call in cases.items():
        with pytest.raises(Refusal, match=message):
            call()
    esft.group(model, together, 1)
    with pytest.raises(Refusal, match="E-MODEL: layer 1: its experts are grouped already"):
        esft.group(model, together, 1)
