"""Diversity against the formed B A, Algorithm 1 against literal loops, ties by name."""

import dataclasses
import math
from itertools import combinations, permutations, product

import numpy as np
import pandas as pd
import pytest
import torch

from moebook.errors import Refusal
from moebook.methods.rocket import Config, choose


def tables(seed, size, *, ties=False):
    """Random scores and cosines of a bank, names in no order."""
    rng = np.random.default_rng(seed)
    names = [f"m{n:02d}" for n in rng.permutation(size)]
    perplexity = rng.normal(size=size)
    accuracy = rng.integers(0, 4, size) / 4 if ties else rng.random(size)
    cosines = rng.uniform(-0.2, 1, (size, size))
    cosines = (cosines + cosines.T) / 2
    scores = pd.DataFrame(
        {"log_perplexity": perplexity, "accuracy": accuracy}, index=names
    )
    return scores, pd.DataFrame(cosines, index=names, columns=names)


def algorithm_1(scores, cosines, candidates, experts, *, literal):
    """Alg. 1 as it is printed, line by line; equal values share a rank, equal sums go by name."""

    def rank(worths, name):
        """1 and one more for each that is better (smaller)."""
        return 1 + sum(other < worths[name] for other in worths.values())

    bank = sorted(scores.index)
    nats = scores.log_perplexity.to_dict()
    misses = (-scores.accuracy).to_dict()
    r_pa = {name: rank(nats, name) + rank(misses, name) for name in bank}
    chosen = sorted(bank, key=lambda name: (r_pa[name], name))[:candidates]

    alike = {}  # of each group: the least first
    for group in combinations(sorted(chosen), experts):
        pairs = permutations(group, 2)
        mean = np.mean([cosines.loc[one, other] for one, other in pairs])
        alike[group] = -1 / mean if literal else mean
    total = {}
    for group in alike:
        of_members = sum(r_pa[name] for name in group)
        total[group] = of_members + rank(alike, group)
    best = min(total, key=lambda group: (total[group], group))
    ordered = sorted(best, key=lambda name: (r_pa[name], name))
    return tuple(ordered), chosen, total


@pytest.mark.parametrize("form", ["inverse", "ordered"])
@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_selection_equals_the_literal_algorithm_in_sets_and_order(seed, ties, form):
    scores, cosines = tables(seed, 12, ties=ties)
    found = choose.select(
        scores, cosines, Config(candidates=7, experts=3, diversity=form)
    )
    experts, candidates, total = algorithm_1(
        scores, cosines, 7, 3, literal=form == "inverse"
    )
    assert found.experts == experts
    assert list(found.candidates.index[found.candidates["candidate"]]) == candidates
    assert {row.members: row.total for row in found.groups.itertuples()} == total


def test_a_selection_holds_the_best_groups_and_their_ranks_among_all(monkeypatch):
    scores, cosines = tables(7, 20, ties=True)
    config = Config(candidates=16, experts=6)
    monkeypatch.setattr(choose, "BEST", 9000)
    whole = choose.select(scores, cosines, config)
    monkeypatch.setattr(choose, "BEST", 30)
    few = choose.select(scores, cosines, config)
    assert len(whole.groups) == math.comb(16, 6)
    assert few.experts == whole.experts
    pd.testing.assert_frame_equal(few.groups, whole.groups.head(30))


@pytest.mark.parametrize(
    ("nats", "experts"), [([1.0] * 4, "ab"), ([3.0, 1, 4, 2], "bd")]
)
def test_equal_values_are_settled_by_perplexity_and_then_by_name(nats, experts):
    scores = pd.DataFrame({"log_perplexity": nats, "accuracy": 0.0}, index=[*"cbad"])
    cosines = pd.DataFrame(0.5, index=scores.index, columns=scores.index)
    for table, alike in (
        (scores, cosines),
        (scores.iloc[::-1], cosines.iloc[::-1, ::-1]),
    ):
        choice = choose.select(table, alike, Config(candidates=3, experts=2))
        assert choice.experts == tuple(experts)


def test_a_single_ranking_takes_its_own_best_and_normalised_sums_weigh_all_alike():
    scores, cosines = tables(5, 10)
    config = Config(candidates=6, experts=3)
    for ranking, order in (
        ("perplexity", scores.log_perplexity),
        ("accuracy", -scores.accuracy),
    ):
        choice = choose.select(scores, cosines, config, rankings=[ranking])
        assert choice.experts == tuple(order.sort_values().index[:3])
    scores, cosines = tables(6, 10)
    config = Config(candidates=8, experts=4, ranking="normalised")
    groups = choose.select(scores, cosines, config).groups
    parts = groups[["R_P", "R_A", "R_D"]]
    expected = ((parts - parts.min()) / (parts.max() - parts.min())).sum(axis=1)
    assert np.allclose(groups["total"], expected)
    assert groups["total"].is_monotonic_increasing
    plain = choose.select(scores, cosines, Config(candidates=8, experts=4)).groups
    # It goes to 70, where R_P and R_A span 16 a group.
    assert plain["R_D"].max() == math.comb(8, 4)


def cosine(x, y):
    return float(
        torch.cosine_similarity(x.double().flatten(), y.double().flatten(), dim=0)
    )


@pytest.mark.parametrize("sign", ["signed", "absolute"])
def test_similarity_by_small_products_equals_the_formed_product(sign, bank):
    next(
        iter(bank["a"].up.values())
    ).zero_()  # of a matrix that is zero the cosine is 0
    table = choose.similarity(bank, Config(cosine=sign))
    products = {}
    for name, lora in bank.items():
        pairs = [(lora.up[path], lora.down[path]) for path in lora.down]
        products[name] = [up.double() @ down.double() for up, down in pairs]
    for one, two in product(bank, bank):
        values = list(map(cosine, products[one], products[two]))
        values = np.abs(values) if sign == "absolute" else values
        assert table.loc[one, two] == pytest.approx(np.mean(values), abs=1e-12)


def test_factors_are_compared_apart_and_in_another_basis_only_they_differ(bank):
    one = bank["a"]
    two = bank["b"]
    pairs = (
        (x[path], y[path])
        for x, y in ((one.down, two.down), (one.up, two.up))
        for path in x
    )
    table = choose.similarity(bank, Config.preset("released"))
    expected = np.mean([abs(cosine(x, y)) for x, y in pairs])
    assert table.loc["a", "b"] == pytest.approx(expected, abs=1e-12)
    turn = torch.linalg.qr(
        torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    )[0]
    down = {path: turn.T @ part for path, part in bank["b"].down.items()}
    up = {path: part @ turn for path, part in bank["b"].up.items()}
    turned = bank | {"b": dataclasses.replace(bank["b"], down=down, up=up)}
    for compare, same in (("product", True), ("factors", False)):
        config = Config(compare=compare)
        left, right = (
            choose.similarity(each, config).loc["a", "b"] for each in (bank, turned)
        )
        assert bool(abs(left - right) < 1e-6) is same


@pytest.mark.parametrize(
    ("cosine", "ordered", "inverse"),
    [
        (0.5, 2.0, 2.0),
        (0.0, math.inf, math.inf),
        (-0.25, math.inf, -4.0),
    ],
)
def test_diversity_has_an_answer_where_equation_6_has_none(cosine, ordered, inverse):
    mean = np.array([cosine])
    assert choose.diversity(mean) == ordered
    assert choose.diversity(mean, "inverse") == inverse


def test_what_cannot_be_selected_from_is_refused():
    scores, cosines = tables(0, 6)
    bad = scores.assign(accuracy=np.nan)
    six = Config(candidates=6)
    big = Config(candidates=40, experts=8)
    for table, alike, config, rankings, message in (
        (
            scores,
            cosines,
            Config(),
            None,
            r"E-BANK: .* 6 scored LoRAs, candidates \(M\) is 8",
        ),
        (scores, cosines, six, ["loss"], "E-CHOICE: rankings.0 is 'loss'"),
        (
            scores,
            cosines,
            six,
            ["diversity"],
            r"E-CHOICE: rankings is \['diversity'\].*: add perplexity or accuracy",
        ),
        (scores, cosines.iloc[1:, 1:], six, None, "E-BANK: no similarity is known for"),
        (
            scores,
            cosines.rename(columns={"m01": "x"}),
            six,
            None,
            r"E-BANK: no .*\['m01'\]",
        ),
        (
            scores.rename({"m01": "m02"}),
            cosines,
            six,
            None,
            "E-BANK: 'm02' stands twice",
        ),
        (
            scores,
            cosines.loc[[*cosines.index, "m01"]],
            six,
            None,
            "E-BANK: 'm01' stands twice",
        ),
        (bad, cosines, six, None, "E-DATA: scores is a table with NaN"),
        (
            *tables(0, 40),
            dataclasses.replace(big, experts=20),
            None,
            "137,846,528,820 groups",
        ),
        (
            *tables(0, 40),
            dataclasses.replace(big, ranking="normalised"),
            None,
            "76,904,685 groups",
        ),
        (
            *tables(0, 40),
            big,
            ["accuracy"],
            "E-RANGE: groups: .* are listed: fewer candidates",
        ),
    ):
        with pytest.raises(Refusal, match=message):
            choose.select(
                table, alike, config, rankings=rankings or list(choose.RANKINGS)
            )
