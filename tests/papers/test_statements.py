"""The papers' claims: well-formed, agreeing with the tables, refused with file and line if not."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from moebook import papers
from moebook.errors import Refusal
from moebook.papers.statements import Scale, _read
from moebook.results import TIERS

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


def test_each_paper_has_a_dozen_claims_or_more_for_one_notebook() -> None:
    for paper in papers.PAPERS:
        own = papers.claims(paper)
        assert len(own) >= 12
        assert {claim.run for claim in own} == {claim.paper for claim in own} == {paper}


@pytest.mark.parametrize("name", sorted({claim.function for claim in CLAIMS}))
def test_the_code_that_a_claim_names_exists(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def test_ids_are_unique_and_every_claim_can_be_tested_at_the_papers_scale() -> None:
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    nowhere = {claim.id for claim in CLAIMS if "paper" not in claim.scales}
    assert nowhere == {"pesc.gain-code"}  # its benchmarks run code that the model wrote
    assert Scale.__args__ == TIERS


def test_a_claimed_number_lies_on_the_claimed_side_and_is_that_of_the_printed_numbers() -> None:
    for claim in CLAIMS:
        if claim.claimed is not None and claim.reference is not None:
            wrong = {"greater": claim.claimed <= 0, "less": claim.claimed >= 0}
            assert not wrong.get(str(claim.direction)), claim.id
    compared = 0
    for claim in papers.claims("pesc") + papers.claims("router_init"):
        if pair := re.match(r"([+\d.]+)%? against ([\d.]+)%?", claim.printed):
            first, second = map(float, pair.groups())
            scale = 1 if claim.unit == "percent_points" or first < 1 else 100
            assert claim.claimed == pytest.approx((first - second) / scale, abs=1e-9), claim.id
            compared += 1
    assert compared > 10


def test_the_claimed_lead_over_all_benchmarks_is_that_of_table_2() -> None:
    form = papers.wide("pesc", 2)
    rows = [name for name in form.index if not name.startswith("#")]
    lead = (form.loc[rows, "Camelidae-8×7B"] - form.loc[rows, "Camel-7B"]).sum() / len(rows) / 100
    assert papers.claim("pesc.sparse-beats-dense").claimed == pytest.approx(lead, abs=1e-9)
    assert len(rows) == 12
    with pytest.raises(Refusal, match=r"E-NAME.*did you mean 'pesc.sparse-beats-dense'"):
        papers.claim("pesc.sparse-beat-dense")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  unit: share\n", "", "unit is missing"),
        ("unit: share", "unit: shares", "unit is 'shares'; did you mean 'share'"),
        ("  why: noise\n", "  why: noise\n  colour: red\n", "unknown setting 'colour'"),
        ("direction: greater", "direction: more", "direction is 'more', expected 'greater'"),
        ("direction: greater", "direction: null", "needs one: greater, less or equal"),
        ("kind: direction", "kind: numbr", "kind is 'numbr', expected 'direction' or 'number'"),
        ("tolerance: 0.1", "tolerance: 1e-5", "tolerance.int is '1e-5', expected a valid integer"),
        ("tolerance: 0.1", "tolerance: null", "needs a tolerance"),
        ("claimed: 0.1", "claimed: .nan", "claimed"),
        ("why: noise", "why: ' '", "why is ' ', "),
        ("[study, paper]", "[studio]", "scales.0 is 'studio', expected 'smoke'"),
        ("id: pesc.one", "id: rocket.one", "expected pesc.words"),
        ("01_pesc", "pesc", "notebook is 'pesc', "),
        ("reference: 0", "reference: [0]", "reference.str is [0]"),
    ],
)
def test_a_malformed_claim_is_refused_with_file_and_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "claims.yaml"
    second = GOOD.replace("pesc.one", "pesc.two").replace(old.replace("pesc.one", "pesc.two"), new)
    path.write_text(GOOD + second, encoding="utf-8")
    with pytest.raises(Refusal) as refusal:
        _read(path, "pesc")
    assert "E-FORMAT: pesc/claims.yaml:17: " in str(refusal.value)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + GOOD, "claims.yaml:17: claim 'pesc.one': stands twice"),
        (GOOD + "- id: [\n", r"claims.yaml:\d+: expected YAML"),
        (GOOD + "- pesc.two\n", "claims.yaml:17: expected a claim, found 'pesc.two'"),
        ("id: pesc.one\n", "claims.yaml:1: expected a list of claims"),
        ("", "claims.yaml:1: expected a list of claims"),
    ],
)
def test_files_that_hold_no_list_of_different_claims_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "claims.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(Refusal, match=message):
        _read(tmp_path / "claims.yaml", "pesc")
