"""The papers' tables, settings, claims: complete, as the texts print, else refused.

The second reading: every number of a CSV stands in the paper's own text, in the same
order.
"""

import pkgutil
import re
from itertools import chain, pairwise

import pandas as pd
import pytest
import yaml

from moebook.errors import Refusal
from moebook.lab import papers
from moebook.lab.papers.printed import Scale, _read, folder
from moebook.lab.papers.printed import _read_claims as read_claims
from moebook.lab.records import TIERS
from tests.refusals import refused

TABLES = []
for _paper in papers.PAPERS:
    TABLES += [(_paper, name) for name in papers.tables(_paper)]
NUMERIC = {
    "pesc": "1 2 3 4 5 7 8 9 10 11",
    "router_init": "1 2 3 4 5 6 7 8",
    "rocket": "1 2 3 4 5 6 7 8 9 10 12",
    "esft": "1 2 3",
}
# Rows end in examples of the data, which are full of numbers.
WITH_EXAMPLES = {("rocket", "8")}
STATED = {
    "pesc": {
        "paper": {
            "experts": 8,
            "top_k": 2,
            "adapter_scale": 1,  # Equation 8 has none
            "balance_weight": 1e-2,
            "quantisation_bits": 4,
            "lr": 2e-4,
            "warmup": 0.03,
            "weight_decay": 0,
            "batch": 128,
            "max_length": 2048,
            "epochs": 1,
        }
    },
    "router_init": {
        "paper": {
            "top_k": 1,
            "batch": 128,
            "max_length": 4096,
            "epochs": 1,
            "lr_danube": 1e-5,
            "lr_llama": 2e-5,
        },
        "trsu": {"experts": 2, "sample_share": 0.05},
        "crsu": {"experts": 4, "sample_share": 0.01},
    },
    "rocket": {
        "paper": {
            "bank_size": 38,
            "shots": 50,
            "shot_draws": 3,
            "candidates": 8,
            "experts": 4,
            "experts_per_token": 2,
            "lora_rank": 16,
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "batch": 2,
            "accumulation": 16,
            "lr": 5e-5,
            "max_length": 1024,
            "bank_epochs": 3,
            "mixture_epochs": 5,
            "data_budget": 1000,
            "duplicate_threshold": 0.9,
        }
    },
    "esft": {
        "paper": {
            "sparse_layers": 26,
            "experts": 66,
            "routed_experts": 64,
            "shared_experts": 2,
            "routed_experts_per_token": 6,
            "active_experts": 8,
            "sample_rows": 32,
            "sample_length": 4096,
            "threshold_gate": 0.1,
            "threshold_token": 0.2,
            "batch": 32,
            "max_length": 4096,
            "steps": 500,
            "evaluate_every": 100,
            "lr": 1e-5,
            "alignment_share": 0.5,
        },
        "paper_fft": {"lr": 3e-5},
        "paper_lora": {"lr": 1e-4, "rank": 8, "scale": 2, "largest_rank": 512},
    },
}
"""All numbers of these settings, read in the papers' texts a second time."""
CLAIMS = papers.claims()
CLAIM = """\
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
GOOD = '# table: "1"\n# caption: c\n# unit: percent\n# source: s\nrow,column,printed,unit,mark\n'


@pytest.mark.parametrize(("paper", "name"), TABLES)
def test_every_table_loads_with_typed_numbers_and_its_header(paper, name):
    frame = papers.table(paper, name)
    assert set(NUMERIC[paper].split()) <= set(papers.tables(paper))
    assert (frame["value"].dtype, frame["decimals"].dtype) == (float, int)
    assert set(frame["mark"]) <= {"", "damaged", "restored"}
    assert len(frame)
    assert frame.attrs["caption"]
    assert frame.attrs["source"]
    assert frame.attrs["table"] == name


def test_a_printed_number_keeps_its_value_and_how_fine_it_was_printed():
    for printed, value, decimals in [
        ("75.7%", 75.7, 1),
        ("300K", 300_000, -3),
        ("1.1K", 1_100, -2),
        ("15B", 15e9, -9),
        ("+1.9%", 1.9, 1),
        ("-13.5", -13.5, 1),
        ("−2.6", -2.6, 1),
        ("1,838", 1838, 0),
        ("5e-5", 5e-5, 5),
        ("1×10^{-4}", 1e-4, 4),
        ("0.70", 0.7, 2),
    ]:
        assert papers.printed.number(printed) == (
            pytest.approx(value, rel=1e-12),
            decimals,
        )
    for printed in ("", "-", "×", "12.", "1.2.3", "8×7B", "n/a", "10 %"):
        assert papers.printed.number(printed) is None


def test_the_wide_form_has_the_papers_rows_and_columns_in_order_without_damaged_cells():
    form = papers.wide("pesc", 10)
    assert (*form.columns[:2], form.index[0]) == ("PIQA", "HellaSwag", "LLaMA2-7B")
    assert form.loc["Camelidae-8×34B-pro", "HellaSwag"] == 82.5
    keyed = papers.wide("router_init", 7)
    assert keyed.loc[("Danube 2", "1", "2×1.8B_TRSU"), "Code"] == 59.3
    frame = papers.table("pesc", 8)
    restored = frame[(frame["row"] == "LLaMA2-7B-Chat") & (frame["column"] == "GSM8K")]
    assert set(frame[frame["row"] == "Vicuna-7B"]["mark"]) == {"damaged"}
    assert list(restored["mark"]) == ["restored"]
    assert list(restored["value"]) == [26.3]
    assert pd.isna(papers.wide("pesc", 8).loc["LLaMA2-7B-Chat", "Average"])
    assert "Vicuna-7B" not in papers.wide("pesc", 8).dropna(how="all").index


def test_an_unknown_paper_table_or_group_names_the_nearest():
    refused(
        r"E-NAME: unknown paper 'rockett'; did you mean 'rocket'",
        papers.table,
        "rockett",
        1,
    )
    refused(r"pesc has no table '6'; .*one of: 1, 10, 11, 2", papers.table, "pesc", 6)
    with pytest.raises(
        Refusal, match=r"rocket has no settings 'papers'; did you mean 'paper'"
    ):
        papers.printed.hyperparameters("rocket", "papers")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (GOOD + "a,b,12..3,,\n", 6, "a number such as"),
        (GOOD + "a,b,1,,\na,b,2,,\n", 7, "each cell once"),
        (GOOD + "a,b,1,,broken\n", 6, "a mark among"),
        (GOOD + "a,b,1\n", 6, "5 fields, found 3"),
        (GOOD.replace("printed", "value"), 5, "columns row, column"),
        (GOOD.replace("row,", "row,row,") + "a,c,b,1,,\n", 5, "each column once"),
        (
            "# caption: c\n" + GOOD.replace("# caption: c\n", "# capton: c\n"),
            1,
            "found ['capton']",
        ),
        (GOOD.replace("# unit: percent\n", ""), 1, "caption, unit and source"),
        ('# table: "1\n' + GOOD, 2, "key"),
    ],
)
def test_a_malformed_file_is_refused_with_file_and_line(tmp_path, text, line, message):
    path = tmp_path / "pesc" / "table_1.csv"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    expected = (
        rf"E-(FORMAT|CONFIG): pesc/table_1.csv:{line}:.* expected.*{re.escape(message)}"
    )
    refused(expected, _read, path)


def test_every_setting_has_its_place_and_those_of_the_text_are_there():
    for paper in papers.PAPERS:
        groups = papers.printed.hyperparameters(paper)
        assert "paper" in groups
        for group in groups.values():
            assert all(entry["where"] and "value" in entry for entry in group.values())
        for name, wanted in STATED[paper].items():
            values = {key: entry["value"] for key, entry in groups[name].items()}
            numbers = {
                key: value
                for key, value in values.items()
                if isinstance(value, int | float)
            }
            assert numbers == wanted, (paper, name)


def tokens(text):
    """All numbers of a text in order, without units, typesetting or separators."""
    text = re.sub(r"</?\w[^>\n]*>|[\\$_{}]", " ", text)
    return [
        number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)
    ]


def widest(wanted, text):
    """The largest gap, in other numbers, of the shortest stretch with all in order."""
    stretches = []
    for start in (i for i, token in enumerate(text) if token == wanted[0]):
        places = [start]
        for number in wanted[1:]:
            if number not in text[places[-1] + 1 :]:
                break
            places.append(text.index(number, places[-1] + 1))
        else:
            stretches.append(places)
    shortest = min(stretches, key=lambda places: places[-1] - places[0], default=None)
    return shortest and max((b - a - 1 for a, b in pairwise(shortest)), default=0)


def text_of(shared, name):
    return tokens((shared / "papers" / f"{name}.txt").read_text("utf-8"))


@pytest.mark.parametrize(("paper", "name"), TABLES)
def test_every_number_of_a_table_stands_in_the_papers_text_in_order(
    paper, name, shared
):
    assert widest(["1", "2", "2"], ["1", "9", "8", "1", "5", "2", "2"]) == 1
    assert widest(["2", "1"], ["1", "2"]) is None  # in order
    frame = papers.table(paper, name)
    printed = frame.loc[frame["mark"] != "restored", "printed"]
    wanted = list(chain.from_iterable(map(tokens, printed)))
    gap = widest(wanted, text_of(shared, paper))
    assert gap is not None, (
        "a number of the table is not in the text, or not in this order"
    )
    loose = name.startswith("figure_") or (paper, name) in WITH_EXAMPLES
    assert gap <= (64 if loose else 10), "not in the table's own place"


@pytest.mark.parametrize("name", ["1", "2", "4", "5"])
def test_the_authors_slides_print_the_same_tables_of_pesc(name, shared):
    frame = papers.table("pesc", name)
    for axis in ("column", "row"):
        order = {key: place for place, key in enumerate(frame[axis].unique())}
        places = frame[axis].map(order)
        frame = frame.loc[places.sort_values(kind="stable").index]
    wanted = list(chain.from_iterable(map(tokens, frame["printed"])))
    gap = widest(wanted, text_of(shared, "pesc_slides"))
    assert gap is not None
    assert gap <= 10


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_number_that_the_text_is_said_to_state_stands_in_it(paper, shared):
    entries = yaml.safe_load((folder(paper) / "stated.yaml").read_text("utf-8"))
    known = set(text_of(shared, paper))
    assert [
        one["printed"] for one in entries if tokens(one["printed"])[0] not in known
    ] == []


def test_each_paper_has_a_dozen_claims_or_more_for_its_notebooks_under_ids_of_their_own():
    for paper in papers.PAPERS:
        claims = papers.claims(paper)
        assert len(claims) >= 12
        assert {claim.paper for claim in claims} == {paper}
        others = {"rocket": {"rivals"}, "esft": {"routing"}}
        assert {claim.run for claim in claims} == {paper} | others.get(paper, set())
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert all("paper" in claim.scales for claim in CLAIMS)
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
        pair = re.match(r"([+\d.]+)%? against ([\d.]+)%?", claim.printed)
        if pair:
            first, second = map(float, pair.groups())
            scale = 1 if claim.unit == "percent_points" or first < 1 else 100
            lead = (first - second) / scale
            assert claim.claimed == pytest.approx(lead, abs=1e-9), claim.id
            compared += 1
    assert compared > 10
    # The lead over all benchmarks is that of Table 2.
    form = papers.wide("pesc", 2)
    lines = [name for name in form.index if not name.startswith("#")]
    lead = (form["Camelidae-8×7B"] - form["Camel-7B"])[lines].sum() / len(lines) / 100
    assert papers.claim("pesc.sparse-beats-dense").claimed == pytest.approx(
        lead, abs=1e-9
    )
    assert len(lines) == 12
    with pytest.raises(
        Refusal, match=r"E-NAME.*did you mean 'pesc.sparse-beats-dense'"
    ):
        papers.claim("pesc.sparse-beat-dense")


def second(old, new):  # a good claim, and another with one line changed
    return CLAIM + CLAIM.replace("pesc.one", "pesc.two").replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (second("  unit: share\n", ""), "17:3: unit is missing"),
        (
            second("unit: share", "unit: shares"),
            "17:3: unit is 'shares'; did you mean 'share'",
        ),
        (
            second("why: noise", "why: noise\n  colour: red"),
            "17:3: unknown setting 'colour'",
        ),
        (
            second("direction: greater", "direction: null"),
            "17:3: .*needs one: greater, less or eq",
        ),
        (
            second("kind: direction", "kind: number").replace(
                "0.1\n  unit", "null\n  unit"
            ),
            "17:3: .*needs a claimed number",
        ),
        (second("tolerance: 0.1", "tolerance: null"), "17:3: .*needs a tolerance"),
        (second("claimed: 0.1", "claimed: .nan"), "17:3: claimed"),
        (
            second("why: noise", "why: noise\n  instead: [pesc.one]"),
            "17:3: only a claim that has en",
        ),
        (
            second("why: noise", "why: noise\n  ended: old\n  instead: [pesc.onee]"),
            " pesc.two names 'pesc.onee'; did you mean 'pesc.one'",
        ),
        (second("reference: 0", "reference: 0.5"), "17:3: .*needs a trivial arm"),
        (
            second("direction: greater", "direction: equal"),
            "17:3: .*needs a trivial arm",
        ),
        (
            second("why: noise", "why: noise\n  sizes: [a]\n  times: [1, 2]"),
            "17:3: .*give two sizes",
        ),
        (
            second("[study, paper]", "[studio]"),
            "17:3: scales.0 is 'studio', expected 'smoke'",
        ),
        (second("01_pesc", "pesc"), "17:3: notebook is 'pesc', "),
        (second("pesc.two", "rocket.two"), "17:3: .*expected pesc.words"),
        (CLAIM + CLAIM, "17:3: claim 'pesc.one': stands twice"),
        (CLAIM + "- id: [\n", "18:1: did not find expected node content"),
        (CLAIM + "- pesc.two\n", "17:3: expected a claim, found 'pesc.two'"),
        ("", "1: expected a list of claims"),
    ],
)
def test_a_malformed_claim_is_refused_with_file_and_line(tmp_path, text, message):
    (tmp_path / "claims.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(Refusal, match=f"E-(FORMAT|CONFIG): .*/claims.yaml:{message}"):
        read_claims(tmp_path / "claims.yaml", "pesc")
