"""The papers' claims: well-formed, agreeing with the tables, refused with file and line if not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moebook import papers
from moebook.errors import Refusal
from moebook.papers import statements as module
from moebook.results import TIERS, UNITS

CLAIMS = papers.claims()
GOOD = """\
- id: pesc.one
  sentence: "A beats B."
  where: Table 1
  quantity: accuracy
  kind: direction
  direction: greater
  reference: 0
  claimed: 0.1
  unit: share
  printed: 1 against 2
  tolerance: 0.1
  why: noise
  scales: [study, paper]
  notebook: 01_pesc
  value: pesc/one
  function: moebook.methods.pesc.craft
"""


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_each_paper_has_a_dozen_claims_or_more_for_one_notebook(paper: str) -> None:
    found = papers.claims(paper)
    assert len(found) >= 12
    assert {claim.run for claim in found} == {paper}
    assert {claim.paper for claim in found} == {paper}


def test_ids_are_unique_and_every_claim_can_be_tested_at_the_papers_scale() -> None:
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    nowhere = {claim.id for claim in CLAIMS if "paper" not in claim.scales}
    assert nowhere == {"pesc.gain-code"}  # its benchmarks run code that the model wrote
    assert all(set(claim.scales) <= set(TIERS) and claim.unit in UNITS for claim in CLAIMS)


def test_a_claimed_number_lies_on_the_claimed_side() -> None:
    wrong = [
        claim.id
        for claim in CLAIMS
        if claim.claimed is not None and claim.reference is not None
        and ((claim.direction == "greater" and claim.claimed <= 0)
             or (claim.direction == "less" and claim.claimed >= 0))
    ]  # fmt: skip
    assert wrong == []


PAIRS = [
    (claim.id, claim.claimed, claim.unit, pair.groups())
    for claim in papers.claims("pesc") + papers.claims("router_init")
    if (pair := re.match(r"([+\d.]+)%? against ([\d.]+)%?", claim.printed))
]


@pytest.mark.parametrize(("name", "claimed", "unit", "pair"), PAIRS)
def test_a_claimed_difference_is_that_of_the_printed_numbers(
    name: str, claimed: float, unit: str, pair: tuple[str, str]
) -> None:
    first, second = map(float, pair)
    scale = 1 if unit == "percent_points" or first < 1 else 100
    assert claimed == pytest.approx((first - second) / scale, abs=1e-9)


def test_the_claimed_lead_over_all_benchmarks_is_that_of_table_2() -> None:
    form = papers.wide("pesc", 2)
    rows = [name for name in form.index if not name.startswith("#")]
    lead = (form.loc[rows, "Camelidae-8×7B"] - form.loc[rows, "Camel-7B"]).sum() / len(rows) / 100
    assert papers.claim("pesc.sparse-beats-dense").claimed == pytest.approx(lead, abs=1e-9)
    assert len(rows) == 12


def test_an_unknown_claim_names_the_nearest() -> None:
    with pytest.raises(Refusal, match=r"E-NAME.*did you mean 'pesc.sparse-beats-dense'"):
        papers.claim("pesc.sparse-beat-dense")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  unit: share\n", "", "needs the field 'unit'"),
        ("unit: share", "unit: shares", "did you mean 'share'"),
        ("  why: noise\n", "  why: noise\n  colour: red\n", "unknown field 'colour'"),
        ("direction: greater", "direction: more", "direction 'more'"),
        ("direction: greater", "direction: null", "needs one: greater, less or equal"),
        ("kind: direction", "kind: numbr", "did you mean 'number'"),
        ("tolerance: 0.1", "tolerance: 1e-5", "tolerance '1e-5': expected a number"),
        ("tolerance: 0.1", "tolerance: null", "a claimed number needs a tolerance"),
        ("[study, paper]", "[studio]", "expected a list out of smoke"),
        ("id: pesc.one", "id: rocket.one", "expected pesc.words"),
        ("01_pesc", "pesc", "expected a name such as 01_pesc"),
        ("reference: 0", "reference: [0]", "expected a value's name"),
    ],
)
def test_a_malformed_claim_is_refused_with_file_and_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "claims.yaml"
    second = GOOD.replace("pesc.one", "pesc.two").replace(old.replace("pesc.one", "pesc.two"), new)
    path.write_text(GOOD + second, encoding="utf-8")
    with pytest.raises(Refusal) as refusal:
        module._read(path, "pesc")
    assert "E-FORMAT: pesc/claims.yaml:17: " in str(refusal.value)
    assert message in str(refusal.value)


def test_a_claim_that_stands_twice_or_yaml_that_is_broken_is_refused(tmp_path: Path) -> None:
    twice = tmp_path / "claims.yaml"
    twice.write_text(GOOD + GOOD, encoding="utf-8")
    with pytest.raises(Refusal, match=r"pesc/claims.yaml:17: claim 'pesc.one' stands twice"):
        module._read(twice, "pesc")
    broken = tmp_path / "pesc" / "claims.yaml"
    broken.parent.mkdir()
    broken.write_text(GOOD + "- id: [\n", encoding="utf-8")
    with pytest.raises(Refusal, match=r"pesc/claims.yaml:\d+: not YAML"):
        module._read(broken, "pesc")
