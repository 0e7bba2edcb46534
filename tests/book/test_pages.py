"""Generated pages show every changed value; exercises in code have checks that tell right."""

import inspect
import json
import re
import shutil
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
from docutils import nodes
from matplotlib.figure import Figure

from moebook import storage
from moebook.lab import papers, plotting
from moebook.lab.evidence import findings, heads, verdicts
from moebook.lab.pages import extension, generated, pages
from moebook.lab.papers.arithmetic import Finding
from moebook.lab.records import Run, Value, write_run
from moebook.lab.records.store import LIVE, Pool
from moebook.lab.run import freshness, pace
from moebook.storage import write
from tests import abbreviations, sentences
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
CLAIM = papers.claim("pesc.sparse-beats-dense")
SIZE = papers.claim("pesc.costs-more-than-dense")


def _pool(sparse, *, base="nano", tier="study", step=1):
    """Three seeds, the dense arm right half of the time, the sparse one ``step`` items apart."""
    protocol, seeds = (base, 3) if tier == "study" else (tier, 1)
    runs = []
    for seed in range(seeds):
        rights = {
            "dense": 100,
            "sparse": round(200 * sparse) + step * (seed - seeds // 2),
        }
        items = {}
        for arm, right in rights.items():
            items[arm] = tuple(float(item < right) for item in range(200))
        values = (
            Value(f"pesc/{a}/accuracy", sum(x) / 200, "share", x)
            for a, x in items.items()
        )
        runs.append(
            Run("pesc", protocol, tier, seed, tuple(values), settings={"base": base})
        )
    return Pool("pesc", protocol if tier == "study" else LIVE, tuple(runs))


def _row(name, *pools, claim=CLAIM):
    """A claim's row, in which every pool of a study decides at its scale."""
    deciders = {pool.protocol: () for pool in pools if pool.tier == "study"}
    return verdicts.row(replace(claim, id=name), pools, deciders)


@pytest.fixture
def folder(tmp_path):
    """A project whose page of pesc records what the claim is about."""
    (tmp_path / "_config.yml").write_text(
        "repository: {url: 'https://example.org/r', branch: b}"
    )
    content = {"name": CLAIM.value, "value": 1, "unit": "count"}
    data = {"application/vnd.moebook.value+json": content}
    value = {"output_type": "display_data", "data": data}
    text = {
        "cell_type": "markdown",
        "source": ["# PESC\n", "## Set-up\n", "\n", "### Dense, against sparse?\n"],
    }
    code = {"cell_type": "code", "source": "1", "outputs": [value]}
    again = {"cell_type": "markdown", "source": ["## The same again\n"]}
    cells = [text, code, again, code]
    page = tmp_path / "book" / "notebooks" / "01_pesc.ipynb"
    write(page, json.dumps({"nbformat": 4, "cells": cells}))
    return tmp_path


def test_the_badge_follows_the_recorded_value(folder):
    for sparse, label, kind in (
        (0.8, "direction holds", "holds"),
        (None, "not run", "notrun"),
        (0.2, "direction fails", "fails"),
        (0.5, "too small to see here", "inconclusive"),
    ):
        pools = [] if sparse is None else [_pool(sparse)]
        rows = [_row(CLAIM.id, *pools)]
        page = pages.page("ledger", rows=rows, places=pages.Places(folder))
        assert f'<span class="verdict {kind}">{verdicts.LABELS[label]}</span>' in page
        assert f'data-verdict="{verdicts.LABELS[label]}"' in page
        assert ("3\N{NO-BREAK SPACE}seeds" in page) == (sparse is not None)


def test_the_ledger_marks_what_survives_and_says_why_a_design_cannot_decide(folder):
    one = _row(CLAIM.id, _pool(0.8))
    one = replace(one, verdicts=(replace(one.verdicts[0], survives=True),))
    other = _row(
        "pesc.none", _pool(0.8), claim=replace(CLAIM, untestable="One <knows> it all.")
    )
    page = pages.page("ledger", rows=[one, other], places=pages.Places(folder))
    assert page.count("</span>* <b>") == 1
    assert '<span class="verdict notrun">not testable</span>' in page
    assert "One &lt;knows&gt; it all." in page
    assert "a star: five seeds or more, and still significant" in page
    assert verdicts.MARKED == 5


def test_a_row_of_the_ledger_names_its_paper_and_prints_its_cautions(folder):
    open_ = _row(CLAIM.id, _pool(0.5, step=4))
    page = pages.page("ledger", rows=[open_], places=pages.Places(folder))
    assert '<span class="paper">PESC</span>' in page
    (told,) = findings.notes(open_.verdicts[0].shown)
    assert told.startswith("these runs could have seen ")
    assert page.count(f'<p class="moe-paper">{told}</p>') == 1
    assert page.count(told) == 2  # on paper, and in the fold
    sure = _row(CLAIM.id, _pool(0.8))
    assert "moe-paper" not in pages.page(
        "ledger", rows=[sure], places=pages.Places(folder)
    )


def test_the_ledger_calls_a_sparse_base_by_all_of_its_weights(folder):
    dense = _row(CLAIM.id, _pool(0.8))
    sparse = _row("pesc.moe", _pool(0.8, base="nano-moe"))
    assert [one.scale for row in (dense, sparse) for one in row.verdicts] == ["1 M"] * 2
    page = pages.page("ledger", rows=[dense, sparse], places=pages.Places(folder))
    assert page.count('<span class="scale">1 M</span>') == 2
    assert page.count('<span class="scale">3 M</span>') == 2  # verdict and fold


def test_what_python_says_of_a_named_tuples_field_is_left_out():
    for first, kept in (("Alias for field number 0", []), ("Weights.", ["Weights."])):
        lines = [first]
        extension._without_aliases(None, "attribute", "x", None, None, lines)
        assert lines == kept


def test_a_signature_shows_what_a_field_starts_as():
    @dataclass
    class Made:
        tokens: list
        own_tokens: list = field(default_factory=lambda: [0, 0])
        parts: dict = field(default_factory=dict)

    python = str(inspect.signature(Made)).partition(" ->")[0]
    python = re.sub(r": \w+", "", python).replace(" = ", "=")
    assert python == "(tokens, own_tokens=<factory>, parts=<factory>)"
    parts = (None, "class", "x", Made, None)
    shown, _ = extension._with_first_values(*parts, python, None)
    assert shown == "(tokens, own_tokens=[0, 0], parts={})"
    assert extension._with_first_values(*parts, "(tokens=[])", None) is None


def test_a_type_keeps_the_quotes_of_code_and_prose_does_not():
    page = nodes.paragraph()
    for name in ("Type", "Note"):
        body = nodes.field_body("", nodes.paragraph("", "Literal[‘mean’, “x”]"))
        page += nodes.field("", nodes.field_name("", name), body)
    extension._straighten_types(None, page)
    kept, prose = (one[1].astext() for one in page)
    assert kept == "Literal['mean', \"x\"]"
    assert prose == "Literal[‘mean’, “x”]"


def test_no_line_ends_between_a_number_and_its_unit_but_code_stays_as_it_is():
    said = "At 3 M (Eq. 6, Table 12) 2.5 % more, in 10 Minutes of 4 GB."
    bound = "At 3~M (Eq.~6, Table~12) 2.5~% more, in 10 Minutes of 4~GB."
    sentence = nodes.paragraph("", said, nodes.literal(text="3 M"))
    page = nodes.section("", sentence, nodes.literal_block(text="x = 3 M"))
    extension._bind_numbers(None, page)
    left = [str(text).replace("\u00a0", "~") for text in page.findall(nodes.Text)]
    assert left == [bound, "3 M", "x = 3 M"]


def test_the_link_of_a_solution_begins_behind_the_space():
    title = '<p>Solution to<a class="reference" href="#one"> Exercise 10</a></p>'
    context = {"script_files": [], "body": title}
    extension._mend(None, "page", "page.html", context, None)
    mended = '<p>Solution to <a class="reference" href="#one">Exercise 10</a></p>'
    assert context["body"] == mended


@pytest.mark.parametrize(
    ("base", "named"),
    [
        ("https://x.org/", "A \\22 b\\22  & c · moebook · https://x.org/page.html"),
        ("", "A \\22 b\\22  & c · moebook · https://x.org/repository"),
    ],
)
def test_each_sheet_of_a_printed_page_says_what_it_is_and_where_the_book_is(
    base, named
):
    theme = {"repository_url": "https://x.org/repository"}
    config = SimpleNamespace(
        html_title="moebook", html_baseurl=base, html_theme_options=theme
    )
    title = '<em>A</em> "b" &amp; c'
    context = {"title": title, "pageurl": "https://x.org/page.html"}
    extension._name_sheets(
        SimpleNamespace(config=config), "page", "page.html", context, None
    )
    rule = f'<style>@page {{ @bottom-left {{ content: "{named}" }} }}</style>'
    assert context["metatags"] == rule


def test_the_smallest_effect_that_a_pool_sees_stands_beside_the_papers(folder):
    row = _row(CLAIM.id, _pool(0.8, step=4))
    (verdict,) = row.verdicts
    seen = verdicts.amount(CLAIM, verdict.deciding.visible).lstrip("+")
    # The smallest is half an interval: an effect of its size is seen by luck.
    assert verdict.deciding.visible > verdict.deciding.smallest
    page = pages.page(
        "ledger", rows=[row, _row("pesc.none")], places=pages.Places(folder)
    )
    assert (
        f"finds a true effect of {seen} four times in five</li>"
        "<li>the paper&#39;s effect is 0.9 points</li>" in page
    )
    assert page.count("four times in five") == 1
    assert page.count("what it would cost") == 1


def test_a_claim_that_ended_is_shown_as_withdrawn_with_the_verdict_that_it_had(folder):
    over = replace(CLAIM, ended="Its bound <could> not fail.", instead=("pesc.new",))
    row = _row("pesc.old", _pool(0.8), claim=over)
    assert row.labels == ("withdrawn",)
    assert row.decided == ()
    page = pages.page("ledger", rows=[row], places=pages.Places(folder))
    assert 'data-verdict="withdrawn"' in page
    assert "Its bound &lt;could&gt; not fail." in page
    assert '<span class="verdict notrun">had been: holds</span>' in page
    assert 'In its place: <a href="#pesc.new">pesc.new</a>' in page
    # In the fold, and on paper.
    assert page.count("Its bound &lt;could&gt; not fail.") == 2
    assert re.search(
        r'study <a href="records.html#runs-pesc-nano">nano</a>, seeds 0–2', page
    )
    had = "It had been: holds at 1 M. In its place: pesc.new."
    assert findings.said(row).endswith(had)
    assert verdicts.chance([row]).tested == ()
    assert findings.intervals(row) == []


def test_withdrawn_runs_say_what_moved_when_their_seeds_ran_again(tmp_path):
    """By hand: 0.2 and 0.4 were withdrawn, 0.5 and 0.7 ran; a third seed is not compared."""
    name = "pesc/adapters/accuracy"
    places = {"results/withdrawn/pesc": (0.2, 0.4), "results/pesc": (0.5, 0.7, 0.9)}
    for place, numbers in places.items():
        for seed, number in enumerate(numbers):
            values = (Value(name, number, "share"),)
            run = Run("pesc", "nano", "study", seed, values)
            write_run(tmp_path / place / "nano" / f"{seed}.parquet", run)
    entry = {"runs": "pesc/nano", "withdrawn": "a day", "because": "x", "instead": "y"}
    listed = tmp_path / "results" / "withdrawn" / "withdrawn.yaml"
    listed.write_text(json.dumps([entry | {"moved": [name]}]))
    page = pages.withdrawn(tmp_path)
    assert (
        f"What moved, as means over these seeds: `{name}` from 30.0 % to 60.0 %."
        in page
    )
    assert "In its place: `y`." in page
    again = entry | {"instead": "nano, with more rows"}
    listed.write_text(json.dumps([again]))
    assert (
        "In its place: the repeated run of `nano`, with more rows."
        in pages.withdrawn(tmp_path)
    )
    listed.write_text(json.dumps([entry, entry]))
    page = pages.withdrawn(tmp_path)
    assert "What moved" not in page
    assert page.count("\n- **") + page.startswith("- **") == 2  # an item a line
    listed.write_text(json.dumps([entry | {"moved": ["pesc/none"]}]))
    refused("E-NAME: .*no 'pesc/none' in common", pages.withdrawn, tmp_path)


def test_every_scale_has_a_line_smallest_first_and_folds_what_decides_nothing(folder):
    live = _pool(0.3, tier="cpu")
    nano = _pool(0.6)
    rows = [
        _row("pesc.all", _pool(0.7, base="smollm2"), live, nano),
        _row("pesc.one", nano),
    ]
    page = pages.page("ledger", rows=rows, places=pages.Places(folder))
    assert re.findall(r'<th scope="col">(.*?)</th>', page) == ["claim", "verdict"]
    cells = [
        re.findall(rf'data-label="{name}">(.*?)</td>', page, re.S)
        for name in ("claim", "verdict")
    ]
    folded = cells[0]
    shown = cells[1]
    lines = re.findall(
        r'"scale">(.*?)</span> .*?<b>(.*?)</b> \((.*?)\), (.*?)</p>', shown[0]
    )
    assert [(scale, effect, seeds) for scale, effect, _, seeds in lines] == [
        ("1 M", "+10.0 points", "3\N{NO-BREAK SPACE}seeds"),
        ("135 M", "+20.0 points", "3\N{NO-BREAK SPACE}seeds"),
    ]
    (live_line,) = re.findall(r"this build \(exploratory\): (.*?)</p>", folded[0])
    assert "<b>−20.0 points</b>" in live_line
    assert "1\N{NO-BREAK SPACE}seed" in live_line
    assert "this build" not in shown[0]
    assert "exploratory" not in folded[1]
    assert all(cell.count("<details>") == 1 for cell in folded)


def test_seeds_in_a_row_are_written_as_a_span():
    assert pages.spans([]) == ""
    assert pages.spans([7]) == "7"
    assert pages.spans({3, 0}) == "0, 3"
    assert pages.spans([11, 10, *range(100, 175), 180]) == "10, 11, 100–174, 180"


def test_a_row_links_to_the_findings_to_the_cell_and_to_the_code(folder):
    telling = {
        "cell_type": "markdown",
        "source": ["## Above the dense one?\n"],
        "metadata": {"claims": [CLAIM.id]},
    }
    write(
        folder / "book" / "notebooks" / "01_pesc_findings.ipynb",
        json.dumps({"nbformat": 4, "cells": [telling]}),
    )
    section = "notebooks/01_pesc_findings.html#above-the-dense-one"
    for pool, committed in ((_pool(0.8, tier="cpu"), False), (_pool(0.8), True)):
        page = pages.page(
            "ledger", rows=[verdicts.row(CLAIM, [pool])], places=pages.Places(folder)
        )
        assert 'href="notebooks/01_pesc.html#dense-against-sparse"' in page
        assert re.search(
            r'href="https://example.org/r/blob/b/moebook/methods/pesc/\w', page
        )
        assert (f'href="{section}"' in page) == committed
        for text, file in (
            ("code of the comparison", "moebook/lab/evidence/verdicts.py"),
            ("code of the interval", "moebook/intervals.py"),
        ):
            address = f"https://example.org/r/blob/b/{file}"
            assert re.search(rf'<a href="{address}#L\d+">{text}</a>', page)
        values = f"<code>{CLAIM.value}</code> less <code>{CLAIM.reference}</code>"
        assert f"<p>Recorded as {values}.</p>" in page
    built_from = storage.commit(ROOT)
    branch = f"/blob/{built_from['id'] if built_from else 'main'}/"
    for claim in {claim.function: claim for claim in papers.claims()}.values():
        code = pages.Places(ROOT).code(claim.function)
        file, _, line = code.partition(branch)[2].partition("#L")
        lines = (ROOT / file).read_text().splitlines()[int(line) - 1 :]
        first = next(text for text in lines if not text.startswith("@"))
        assert re.match(rf"(def|class) {claim.function.rpartition('.')[2]}\b", first), (
            file
        )


def test_sections_of_findings_name_claims_of_their_notebook_once():
    notebooks = {claim.id: claim.notebook for claim in papers.claims()}
    told = []
    for path in sorted((ROOT / "notebooks").glob("*_findings.ipynb")):
        for cell in storage.read_ipynb(path)["cells"]:
            claims = cell["metadata"].get("claims", [])
            for claim in claims:
                assert f"{notebooks[claim]}_findings" == path.stem, claim
            assert not claims or re.search("^## ", cell["source"], re.MULTILINE)
            told += claims
    assert len(told) == len({*told}) > 0


def test_the_effects_of_a_verdict_are_listed_seed_by_seed(folder):
    row = _row("pesc.x", _pool(0.8))
    (verdict,) = row.verdicts
    assert pages.seed_by_seed(verdict.shown) == "0: +29.5, 1: +30.0, 2: +30.5 points"
    assert sum(verdict.shown.by_seed.values()) / 3 == pytest.approx(
        verdict.shown.effect
    )
    page = pages.page("ledger", rows=[row], places=pages.Places(folder))
    assert "<p>seed by seed: 0: +29.5, 1: +30.0, 2: +30.5 points</p>" in page


def test_what_a_study_compares_is_said_of_rivals_and_of_what_is_no_value():
    said = {
        "pesc/sparse/nll less pesc/dense/nll": "loss, sparse less dense",
        "rivals/rocket/accuracy less each rival's": "rocket accuracy less each rival's",
        "pesc/a/recovered less 0.9": "a recovered, above the bound of 0.9",
        "each arm's nats less those of nano": "each arm's nats less those of nano",
    }
    assert {measure: pages.compared(measure) for measure in said} == said


def test_the_summary_counts_every_claim_once(folder):
    page = pages.page(
        "summary", rows=[verdicts.row(claim, []) for claim in papers.claims()]
    )
    for paper in papers.PAPERS:
        claims = papers.claims(paper)
        ended = sum(claim.ended is not None for claim in claims)
        hopeless = sum(claim.untestable is not None for claim in claims)
        assert f'verdict=not+run">{len(claims) - hopeless - ended}</a>' in page
        assert not ended or f'verdict=withdrawn">{ended}</a>' in page
        assert not hopeless or f'verdict=not+testable">{hopeless}</a>' in page
    assert set(pages.KINDS) < set(verdicts.LABELS)


def test_the_corrections_count_what_chance_gives_and_lead_to_the_rows_that_survive():
    scores = {"pesc.sure": 0.9, "pesc.<": 0.6, "pesc.open": 0.5, "pesc.same": 0.5}
    rows = [_row(name, _pool(score)) for name, score in scores.items()]
    rows += [_row("pesc.live", _pool(0.9, tier="cpu")), _row("pesc.none")]
    text = pages.page("chance", rows=rows)
    assert (
        "The 6 claims have 4 verdicts from several seeds on which of two things is larger, "
        "one per claim" in text
    )
    assert "; 2 of these are *holds* or *fails*" in text
    assert "The table above has 0 more" in text
    equal = replace(CLAIM, direction="equal", tolerance=0.01)
    more = pages.page(
        "chance", rows=[*rows, _row("pesc.equal", _pool(0.9), claim=equal)]
    )
    assert "have 4 verdicts from several seeds" in more
    assert "The table above has 1 more" in more
    assert "\n| 1 M | 4 | 0 | 2 |\n" in text
    assert "chance alone would produce about 0.2." in text
    links = "".join(
        f'- <a href="#{name}">{name}</a> at 1 M\n'
        for name in ("pesc.sure", "pesc.&lt;")
    )
    assert "\n2 survive " in text
    assert ":::{dropdown} Those that survive\n" + links in text
    assert "\nNone.\n" in pages.page("chance", rows=rows[2:3])
    text = pages.page("chance", rows=rows[4:])
    assert text == "No run that can decide a claim has been recorded yet.\n"


def test_a_scale_is_judged_by_what_pools_decide_there_and_can_be_tested():
    open_ = replace(CLAIM, claimed=None)
    hopeless = replace(CLAIM, untestable="Nobody knows.")
    rows = [
        _row("pesc.sure", _pool(0.9)),
        _row("pesc.open", _pool(0.5), claim=open_),
        _row("pesc.hopeless", _pool(0.9), claim=hopeless),
        _row("pesc.larger", _pool(0.9, base="smollm2"), claim=hopeless),
        _row("pesc.live", _pool(0.9, tier="cpu")),
    ]
    assert pages.scales_of(rows) == ["1 M", "135 M"]
    labels = [label for row in rows for label in row.labels]
    none = "not testable here"
    assert labels == ["direction holds", "inconclusive", none, none, "exploratory"]
    decided = {"1 M": ["direction holds", "inconclusive"]}
    assert pages.labels_by_scale(rows) == decided
    text = pages.page("chance", rows=rows)
    assert "\n| 1 M | 2 | 1 | 0 |\n" in text
    assert "\n| 135 M |" not in text


def test_the_audit_shows_every_finding_and_folds_those_of_one_cause():
    rows = [(f"row {number}", "differs", "a <mean>") for number in range(3)]
    found = [
        Finding("pesc", place, "average", "1.0", "1.1", status, why, "Table 1")
        for place, status, why in (*rows, ("row 9", "agrees", "as it should"))
    ]
    page = pages.audit(found)
    assert all(f"row {number}" in page for number in (0, 1, 2, 9))
    assert page.count("and 2 more") == 1
    assert "<p>a &lt;mean&gt;</p>" in page
    assert re.findall("<li>(.*?)</li>", page) == ["row 1 1.0 (1.1)", "row 2 1.0 (1.1)"]
    assert "its cells give 1.1; as it should." in page  # alone it needs no fold
    assert "a &lt;mean&gt;" in page
    assert "<mean>" not in page
    same = replace(found[0], kind="same quantity", group="Table 2")
    page = pages.audit([found[0], same])
    assert "it prints 1.0, its cells give 1.1; a &lt;mean&gt;." in page
    assert "it prints 1.0, elsewhere 1.1; a &lt;mean&gt;." in page
    name = Finding("pesc", "row 0", "name", "A", "B", "differs", "all equal", "row 0")
    counts = re.findall(r"<td[^>]*>(\d+)</td>", pages.audit([*found, name]))
    assert counts == ["4", "1", "0", "0", "3", "1"]


def _ran(seed, tier="study", day=2):
    manifest = {
        "date": f"2026-01-0{day}T23:00:00+00:00",
        "seconds": 3900.0,
        "cpu_seconds": 1800.0,
        "peak_memory": 2 * 10**9,
        "commit": {"id": "abcdef0123", "dirty": True},
        "overrides": {"steps": 10 * day},
        "environment": {"cpu": "A & B", "cores": 2, "accelerator": None},
    }
    protocol = "nano" if tier == "study" else tier
    values = (Value("pesc/x", 1.0, "ratio"),)
    code = {"notebook": "another hash"}
    return Run("pesc", protocol, tier, seed, values, code=code, manifest=manifest)


@pytest.fixture
def project(tmp_path):
    """A project whose pesc ran with two seeds as a study, and on its page."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    for run in (_ran(3, day=5), _ran(0)):
        write_run(tmp_path / "results" / "pesc" / "nano" / f"{run.seed}.parquet", run)
    write_run(tmp_path / "book" / "notebooks" / "01_pesc.parquet", _ran(0, "smoke"))
    return tmp_path


def test_a_pool_is_listed_with_its_seeds_cost_day_and_changes(project):
    _, pooled, live = pages.recorded(project).split("<b>PESC</b><br>")
    for fact in (
        "nano (committed)",
        "2 seeds: 0, 3<",
        "1&nbsp;values&nbsp;each",
        "1 h 5 min (CPU time 30 min 0 s), 2.0 GB on A &amp; B",
        "commit abcdef0 with changes",
        '"code of">2026-01-05<details><summary>1 change since</summary>',
        "<p>notebook</p></details>",
    ):
        assert fact in pooled
    for fact in ("this build (smoke, on its page)", "1 seed: 0<", "2026-01-02<"):
        assert fact in live
    assert pages.recorded(project / "empty") == "No run has been recorded yet.\n"


def test_every_note_of_a_verdict_is_an_item_whatever_it_says(folder, monkeypatch):
    said = ["a & b; 1 < 2", "last"]
    monkeypatch.setitem(pages.ENVIRONMENT.globals, "notes", lambda _: said)
    row = _row(CLAIM.id, _pool(0.5, step=4))
    page = pages.page("ledger", rows=[row], places=pages.Places(folder))
    assert "<li>a &amp; b</li><li>1 &lt; 2</li><li>last</li></ul>" in page
    assert page.count('<p class="moe-paper">') == 3


def test_protocols_without_a_plan_are_listed_with_what_they_are_for(ledger):
    page = pages.designs(ROOT, ledger).partition("% tiers")[2].partition("% plans")[0]
    names = re.findall(r'data-label="protocol"><code>(\w+)<', page)
    for name in ("smoke", "cpu", "gpu", "paper", "class"):
        assert names.count(name) == 1
    row = page.partition("<code>class</code>")[2].partition("</tr>")[0]
    assert "courses: one parameter to change" in row
    assert "esft" in row and "kernels" not in row
    assert "moebook run pesc --on class" in row
    assert "fixed" not in names  # it has a plan


def test_a_study_that_still_runs_decides_nothing_yet(ledger, monkeypatch):
    designs = {f"{one.notebook}/{one.protocol}": one for one in heads.read(ROOT)}
    done = designs["pesc/fixed"]
    running = done._replace(facts={**done.facts, heads.RUNNING: "2 of 75 seeds ran"})
    monkeypatch.setattr(heads, "read", lambda _: [running])
    row = pages.designs(ROOT, ledger).partition("</table>")[0]
    assert f"will decide {len(done.decides)} claims<" in row


def test_each_design_names_values_on_record_and_its_chance_to_see_the_smallest_effect(
    ledger,
):
    page = pages.designs(ROOT, ledger)
    chances = re.findall(
        r"Power: \d+% with \d+ seeds \(variance taken from study `[^`]+`\)", page
    )
    assert len(chances) >= 4
    assert (
        len(re.findall(r"- Found: [+−][\d.]+ points \([^)]+\)\n- At an end of", page))
        >= 3
    )
    decided = page.partition("ESFT: `budgets`")[2].partition(":::\n\n")[0]
    assert (
        decided.count('href="ledger.html#esft.') == 6 and "Exploratory" not in decided
    )
    counted = page.partition("ESFT: aligned</a>")[2].partition("</tr>")[0]
    labels = re.search(r"decides (\d+) claims: ([^<]+)</td>", counted)
    assert labels, counted
    by_label = [int(number) for number in re.findall(r" (\d+)(?:,|$)", labels[2])]
    assert sum(by_label) == int(labels[1])
    tuned = page.partition("PESC: tuned</a>")[2].partition("</tr>")[0]
    assert "decides nothing (exploratory)" in tuned
    assert "5 seeds" in tuned
    titles = re.findall(r":::{dropdown} (.*)\n", page)
    assert "PESC: `decay` · accuracy, sparse less dense" in titles
    assert "PESC: `tuning` · learning rates of `fixed`" in titles
    assert all(" · " in title for title in titles)
    assert len(titles) == len({*titles})
    assert (
        ":::{dropdown} PESC: `decay`" in page
        and "`pesc/sparse/accuracy less pesc/dense/accuracy`" in page
    )
    heads = [path.read_text() for path in (ROOT / "notebooks").glob("*.yaml")]
    remarks = " ".join(head.partition("Found afterwards")[2] for head in heads)
    assert not re.search(
        r"(?<!paper's )(?<![\d.])\d[\d.]*\s(points|nats|%|minutes)", remarks
    )
    assert "accuracy, sparse less dense: −4.3 points (" in page
    for smallest in ("2.0 points", "0.05 nats", "0.015 nats", "0.05 nats a token"):
        assert f"Smallest effect of interest: {smallest}\n" in page
    assert "Run by" not in page
    assert "`rivals/rocket/accuracy less each rival's`" in page
    assert "Command of that day: `moebook study pesc --on fixed" in page
    assert "Seeds: 100-174; runs so far: 100–174\n" in page
    assert "`moebook study pesc --on fixed --seeds 100-174 --repeat`" in page
    # A fifth seed ran that no head planned: it decides nothing.
    (row,) = (one for one in ledger if one.claim.id == "pesc.approximates-full-experts")
    decided = [one for verdict in row.verdicts for one in [verdict.deciding] if one]
    (eq6,) = (one for one in decided if one.pool.protocol == "eq6")
    assert eq6.seeds == 4
    found = page.partition("PESC: eq6</a>")[2].partition("</tr>")[0]
    low, high = eq6.interval
    assert (
        f"above the bound of 0.9: {eq6.effect:+.3f} ({low:+.3f} to {high:+.3f})"
        in found
    )
    assert "on record)" not in page
    assert "Spread on record" not in page  # else one of these heads has no chance
    assert page.count("Primary measure: `") == sum(
        "# Primary measure:" in head for head in heads
    )


def test_the_figures_of_the_fault_tests_come_from_their_record_alone(tmp_path):
    told = {
        "date": "2026-01-02T03",
        "times": 10,
        "seconds": 60,
        "versions": {},
        "commit": {"id": "abcdef0123", "dirty": True},
        "kinds": {"b": {"kills": 3, "lost": 1}, "a": {"kills": 4}},
    }
    write(tmp_path / "results" / "faults.json", json.dumps({"kills": told}))
    page = pages.tested(tmp_path)
    cells = (
        f'>{kind}</td><td data-label="kills">{n}</td><td data-label="lost">{lost}</td>'
        for kind, n, lost in (("all", 7, 1), ("a", 4, 0), ("b", 3, 1))
    )
    run = "(10 × the cases of a push, 1 min 0 s on 2026-01-02, commit abcdef0 with changes)"
    for fact in (run, *cells, "Changed files: these tests run with every push"):
        assert fact in page
    assert "Killed runs and studies: these" not in page
    write(tmp_path / "results" / "faults.json", json.dumps({"kills": {}}))
    refused(r"faults.json does not hold what is read", pages.tested, tmp_path)


def test_the_badge_tells_cost_seed_what_the_reader_set_and_where_the_pools_are(project):
    page = extension.badge(_ran(3), project)
    for fact in (
        "tier <b>study",
        "seed <b>3",
        "took 1 h 5 min (CPU time 30 min 0 s)",
        "ran in <b>1 h 5 min",
        "peak memory <b>2.0 GB",
        "commit <b>abcdef0 with changes",
        "2 × A &amp; B",
        "date <b>2026-01-02",
        "reader <b>steps = 20",
    ):
        assert fact in page
    assert "accelerator" not in page
    accelerated = _ran(3)
    accelerated.manifest["environment"]["accelerator"] = "H200"
    assert "accelerator <b>H200" in extension.badge(accelerated, project)
    assert "numbers mean nothing" not in page
    assert "[reference](../reference_methods_pesc.md)" in page
    live = extension.badge(_ran(3, "smoke"), project)
    assert "numbers mean nothing" in live
    assert "Full-size runs: nano (2 seeds)" in live
    assert "full-size runs show: [the findings](01_pesc_findings.ipynb)" in live
    (project / "notebooks" / "01_pesc_findings.ipynb").unlink()
    live = extension.badge(_ran(3, "smoke"), project)
    assert "full-size runs show: [the ledger](../ledger.md)" in live
    assert "Full-size runs" not in extension.badge(
        replace(_ran(0), notebook="esft"), project
    )


def test_the_set_up_of_a_page_is_one_folded_cell():
    def cell(source, *tags):
        return {"cell_type": "code", "source": source, "metadata": {"tags": tags}}

    cells = [
        cell("import sys", "install", "remove-cell"),
        cell("a: int = 1", "parameters", "hide-input"),
        cell("a = 2", "injected-parameters"),
        cell("run = begin(In, globals())", "hide-input"),
        cell("a"),
    ]
    shown = [*extension._with_one_set_up(cells)]
    assert [one["source"] for one in shown] == [
        "import sys",
        "a: int = 1\n\na = 2\n\nrun = begin(In, globals())",
        "a",
    ]
    assert shown[1]["metadata"]["tags"] == ("hide-input",)


def test_parameters_with_no_code_behind_them_are_a_cell_of_their_own():
    def cell(kind, source, *tags):
        return {"cell_type": kind, "source": source, "metadata": {"tags": tags}}

    declared = cell("code", "a: int = 1", "parameters")
    given = cell("code", "a = 2", "injected-parameters")
    text = cell("markdown", "Text")
    for cells in ([declared, given, text], [text, declared, given]):
        shown = [*extension._with_one_set_up(cells)]
        assert len(shown) == 2
        assert text in shown
        shown.remove(text)
        assert shown[0]["source"] == "a: int = 1\n\na = 2"
        assert shown[0]["cell_type"] == "code"


PAGES = sorted((ROOT / "book").glob("*_exercises.md"))
BLOCK = r"(?s)```\{code-block\} python\n:name: (\S+)-(stub|check|solution)\n\n(.*?)```"
WRITTEN = [
    block for page in PAGES for block in re.findall(BLOCK, page.read_text("utf-8"))
]
BLOCKS = {(name, part): code for name, part, code in WRITTEN}
NAMES = sorted({name for name, _ in BLOCKS})


def _attempt(name, part):
    exec(BLOCKS[name, part] + BLOCKS[name, "check"], {})


def test_every_exercise_in_code_has_a_stub_a_check_and_a_solution():
    parts = {(name, part) for name in NAMES for part in ("stub", "check", "solution")}
    assert NAMES
    assert set(BLOCKS) == parts


@pytest.mark.parametrize("name", NAMES)
def test_the_stub_fails_its_check_and_the_solution_passes_it(name):
    with pytest.raises((AssertionError, RuntimeError)):
        _attempt(name, "stub")
    _attempt(name, "solution")
    assert BLOCKS[name, "solution"] != BLOCKS[name, "stub"]


def test_every_abbreviation_of_a_page_is_in_the_glossary():
    """Generated pages are read where they are rendered, in `test_book.py`."""
    missing = {}
    texts = {
        page.name: page.read_text()
        for folder in ("book", "book/found")
        for page in (ROOT / folder).glob("*.md")
    }
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            figure = cell["metadata"].get("mystnb", {}).get("figure", {})
            text = figure.get("caption", "")
            if cell["cell_type"] == "markdown":
                text = "".join(cell["source"])
            texts[path.name] = texts.get(path.name, "") + f"\n\n{text}"
    for name, told in texts.items():
        for code in (
            r"```[\s\S]*?```",
            r"`[^`]*`",
            r"\$[^$]*\$",
            r"\]\([^)]*\)",
            r"\{[^}]*\}",
        ):
            told = re.sub(code, " ", told)
        for word in abbreviations.missing(told):
            missing.setdefault(word, name)
    assert missing == {}


def test_a_sentence_of_a_page_or_a_notebook_has_at_most_35_words():
    """Those of findings are filled, and measured, in the tests of their prose."""
    texts = {page.name: page.read_text() for page in (ROOT / "book").glob("*.md")}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        told = ["".join(one["source"]) for one in cells if one["cell_type"] != "code"]
        for shown in (one["metadata"].get("mystnb", {}) for one in cells):
            told.append(shown.get("figure", {}).get("caption", ""))
            told.append(shown.get("image", {}).get("alt", ""))
        texts[path.name] = "\n\n".join(told)
    long = {name: [*sentences.long(text)] for name, text in texts.items()}
    assert {name: told for name, told in long.items() if told} == {}


HOW_LONG = {"less than a minute": (0, 45), "about a minute": (30, 120)}
"""What the first cell of a notebook says, and the seconds of CPU that it may stand for."""


def test_how_long_a_notebook_says_that_it_takes_is_what_its_record_says():
    recorded = pace.times(ROOT)["notebooks"]["cpu"]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        told = re.search(
            r"\*\*How long:\*\* ([a-z ]+) of CPU time on one core\.", path.read_text()
        )
        if told:
            shortest, longest = HOW_LONG[told[1]]
            name = path.stem.partition("_")[2]
            assert shortest < recorded[name] < longest, (name, told[1])


def test_a_page_that_would_say_the_same_is_not_written_again(tmp_path, monkeypatch):
    made_of = iter(["first", "second"])
    monkeypatch.setattr(freshness, "digest", lambda *_: next(made_of))
    told = {"alike": "as before\n", "other": "one\n"}
    monkeypatch.setattr(generated, "generated", lambda _: told)
    place = tmp_path / "book" / "_generated"

    def written():
        generated.write(tmp_path)
        return {path.stem: path.stat().st_mtime_ns for path in place.glob("*.md")}

    before = written()
    told["other"] = "two\n"
    after = written()
    assert after["alike"] == before["alike"]
    assert after["other"] != before["other"]
    assert freshness.is_current(place, "second")


def test_a_figure_drawn_twice_is_the_same_file():
    drawn = set()
    with matplotlib.rc_context():
        plotting.style()
        for _ in range(2):
            figure = Figure()
            figure.subplots().plot([0, 1], [0, 1], marker="o")
            file = BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
            drawn.add(file.getvalue())
    assert len(drawn) == 1


def test_the_front_pages_figure_drawn_twice_is_the_same_file(tmp_path, monkeypatch):
    def promises(_):
        figure = Figure()
        figure.subplots().plot([0, 1], [0, 1], marker="o")
        return figure

    monkeypatch.setattr(generated, "_rows", lambda *_: ())
    monkeypatch.setattr(generated.findings, "promises", promises)
    monkeypatch.setattr(plotting, "check", lambda *_: None)
    drawn = set()
    with matplotlib.rc_context():
        for name in "ab":
            assert generated._promises(tmp_path / name, "")
            (file,) = (tmp_path / name).rglob("promises.svg")
            drawn.add(file.read_bytes())
    (picture,) = drawn
    # On a phone of 390 px a point is a pixel or more, and no type is smaller than 8.5 points.
    assert b'width="324pt"' in picture
