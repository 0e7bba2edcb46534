"""Bounds: every claim about one names a trivial arm for which it fails, and for that arm it does.

An arm is trivial if nobody would call it the paper's method: an untuned base, random choices, dense
fine-tuning, a router that uses all experts alike. A bound that it keeps says nothing.
"""

from dataclasses import replace
from math import log

import pytest
import torch

from moebook.lab import papers
from moebook.lab.evidence.verdicts import measure, side
from moebook.methods import esft

STANDING = [claim for claim in papers.claims() if claim.bounded and not claim.ended]
NUMBERS = [claim for claim in STANDING if not isinstance(claim.trivial, str)]
ARMS = [claim for claim in STANDING if isinstance(claim.trivial, str)]


def named(claims):
    return pytest.mark.parametrize("claim", claims, ids=[claim.id for claim in claims])


@named(NUMBERS)
def test_a_bound_does_not_hold_for_the_number_of_its_trivial_arm(claim):
    effect = claim.trivial - claim.reference
    assert side(claim, effect, effect) < 1


@named(ARMS)
def test_a_bound_fails_for_its_trivial_arm_in_the_recorded_pools(claim, pools):
    arm = replace(claim, value=claim.trivial)
    measured = [measure(arm, pool) for pool in pools(claim.run).values()]
    labels = [one.label for one in measured if one]
    assert "direction fails" in labels
    assert not {"direction holds", "reproduced"} & {*labels}


def test_a_bound_that_every_trained_arm_keeps_is_found(pools):
    """Dense fine-tuning recovers nothing of the lead: nine tenths of the gain say otherwise."""
    vacuous = papers.claim("pesc.approximates-full-experts")
    assert vacuous.bounded
    assert vacuous.ended
    pool = pools("pesc")["decay"]
    base, full, dense = (
        7.5,
        *(pool.effects(f"pesc/{arm}/nll").mean() for arm in ("upcycled", "dense")),
    )
    effect = (base - dense) / (base - full) - vacuous.reference
    assert side(vacuous, effect, effect) == 1


@pytest.mark.parametrize("experts", [32, 64, 66])
def test_a_router_that_uses_all_experts_alike_keeps_the_ended_bound_on_their_number_alone(
    experts,
):
    even = torch.full((experts,), 1 / experts, dtype=torch.float64)
    scores = esft.Scores({0: even}, {0: even})
    chosen = esft.select(
        scores, esft.Config.preset("fixed", score="token", threshold=0.2)
    )
    share = chosen.count / experts
    bounds = ("esft.few-experts-are-trained", "esft.fewer-experts-than-an-even-router")
    old, new = map(papers.claim, bounds)
    assert side(old, share - old.reference, share - old.reference) == 1
    assert old.ended
    assert side(new, share - new.reference, share - new.reference) == -1
    assert not new.ended
    if experts == 66:
        assert share == pytest.approx(new.trivial, abs=1e-4)
    assert (
        esft.half_mass(scores)[0]
        == papers.claim("esft.routing-is-concentrated").trivial
    )


def test_one_expert_for_every_token_is_less_even_than_the_bound_on_evenness():
    shares = [
        1 / 2,
        1 / 6,
        1 / 6,
        1 / 6,
    ]  # of the slots: two experts a token, four experts
    evenness = -sum(share * log(share) for share in shares) / log(4)
    assert evenness == pytest.approx(
        papers.claim("rocket.experts-are-used-evenly").trivial, abs=1e-4
    )
