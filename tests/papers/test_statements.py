"""The papers' claims: well-formed, agreeing with the tables, refused with file and line if not."""

import pkgutil
import re

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


def test_each_paper_has_a_dozen_claims_or_more_for_one_notebook_under_ids_of_their_own():
    for paper in papers.PAPERS:
        claims = papers.claims(paper)
        assert len(claims) >= 12
        assert {claim.run for claim in claims} == {claim.paper for claim in claims} == {paper}
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    nowhere = {claim.id for claim in CLAIMS if "paper" not in claim.scales}
    assert nowhere == {"pesc.gain-code"}  # its benchmarks run code that the model wrote
    assert Scale.__args__ == TIERS
    for function in {claim.function for claim in CLAIMS}:
        assert callable(pkgutil.resolve_name(function)), function


def test_a_claimed_number_lies_on_the_claimed_side_and_is_that_of_the_printed_numbers():
    for claim in CLAIMS:
        if claim.claimed is not None and claim.reference is not None:
            wrong = {"greater": claim.claimed <= 0, "less": claim.claimed >= 0}
            assert not wrong.get(claim.direction), claim.id
    compared = 0
    for claim in papers.claims("pesc") + papers.claims("router_init"):
        if pair := re.match(r"([+\d.]+)%? against ([\d.]+)%?", claim.printed):
            first, second = map(float, pair.groups())
            scale = 1 if claim.unit == "percent_points" or first < 1 else 100
            assert claim.claimed == pytest.approx((first - second) / scale, abs=1e-9), claim.id
            compared += 1
    assert compared > 10


def test_the_claimed_lead_over_all_benchmarks_is_that_of_table_2():
    form = papers.wide("pesc", 2)
    rows = [name for name in form.index if not name.startswith("#")]
    lead = (form.loc[rows, "Camelidae-8×7B"] - form.loc[rows, "Camel-7B"]).sum() / len(rows) / 100
    assert papers.claim("pesc.sparse-beats-dense").claimed == pytest.approx(lead, abs=1e-9)
    assert len(rows) == 12
    with pytest.raises(Refusal, match=r"E-NAME.*did you mean 'pesc.sparse-beats-dense'"):
        papers.claim("pesc.sparse-beat-dense")


def second(old, new):
    """A good claim, and another with one line changed."""
    return GOOD + GOOD.replace("pesc.one", "pesc.two").replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (second("  unit: share\n", ""), "17: unit is missing"),
        (second("unit: share", "unit: shares"), "17: unit is 'shares'; did you mean 'share'"),
        (second("why: noise", "why: noise\n  colour: red"), "17: unknown setting 'colour'"),
        (second("direction: greater", "direction: null"), "17: .*needs one: greater, less or eq"),
        (second("kind: direction", "kind: number").replace("0.1\n  unit", "null\n  unit"),
         "17: .*needs a claimed number"),
        (second("tolerance: 0.1", "tolerance: null"), "17: .*needs a tolerance"),
        (second("claimed: 0.1", "claimed: .nan"), "17: claimed"),
        (second("[study, paper]", "[studio]"), "17: scales.0 is 'studio', expected 'smoke'"),
        (second("01_pesc", "pesc"), "17: notebook is 'pesc', "),
        (second("pesc.two", "rocket.two"), "17: .*expected pesc.words"),
        (GOOD + GOOD, "17: claim 'pesc.one': stands twice"),
        (GOOD + "- id: [\n", r"\d+: expected YAML"),
        (GOOD + "- pesc.two\n", "17: expected a claim, found 'pesc.two'"),
        ("", "1: expected a list of claims"),
    ],
)  # fmt: skip
def test_a_malformed_claim_is_refused_with_file_and_line(tmp_path, text, message):
    (tmp_path / "claims.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(Refusal, match=f"E-FORMAT: .*/claims.yaml:{message}"):
        _read(tmp_path / "claims.yaml", "pesc")
