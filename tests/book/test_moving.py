"""What a reader moves shows the right numbers, in Chromium, over a table that is there without."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moebook.lab import papers
from moebook.lab.evidence import verdicts
from moebook.lab.pages import moving, pages
from moebook.lab.records import Run, Value, write_run
from moebook.lab.records.runs import Curve
from moebook.lab.records.store import Pool
from moebook.methods import pesc, rocket
from tests.toy import trained

pytestmark = pytest.mark.browser
BOOK = Path(__file__).parents[2] / "book"
FIND = """name => document.getElementById(
  [...document.querySelectorAll("label")].find(e => e.innerText === name).htmlFor)"""
MOVE = f"""moves => {{
  for (const [name, value] of Object.entries(moves)) {{
    const field = ({FIND})(name)
    field[field.type === "checkbox" ? "checked" : "value"] = value
    field.dispatchEvent(new Event("input", {{ bubbles: true }}))
  }}
  const shown = [...document.querySelectorAll(".moe-move dl > div")]
  return Object.fromEntries(shown.map(e => [...e.children].map(part => part.innerText)))
}}"""


@pytest.fixture
def moved(browser, tmp_path):
    """Open a page's fragment alone; return what moves its fields and reads the numbers shown."""

    def open_(fragment):
        parts = re.findall(r"```\{raw\} html\n(.*?)\n```", fragment, re.DOTALL)
        names = ("tables", "move", "figures")
        parts += [
            f"<script src='{BOOK.as_uri()}/_static/{name}.js'></script>"
            for name in names
        ]
        page = tmp_path / "page.html"
        page.write_text(
            "<!doctype html><meta charset=utf-8>" + "".join(parts), encoding="utf-8"
        )
        browser.open(page.as_uri())
        assert browser.errors == []
        return lambda moves: browser.run(f"({MOVE})({json.dumps(moves)})")

    return open_


def test_pescs_sizes_are_those_of_its_counts(moved, browser):
    shown = moved(moving.sizes())
    last = "used by a token, with the host"
    for host, experts, top, width in (
        ("llama-2-7b", 8, 2, 64),
        ("yi-34b", 4, 3, 100),
        ("llama-2-13b", 8, 2, 589),
    ):
        moves = {
            "experts E": experts,
            "experts per token K": top,
            "adapter width R": width,
        }
        numbers = shown({"host": host} | moves)
        config = pesc.Config(experts=experts, top_k=top, adapter_width=width)
        size = pesc.counts(config, host)
        assert numbers["adapters, 2LEDR"] == f"{size.adapters:,}"
        assert numbers["routers, LED"] == f"{size.routers:,}"
        stored = 2 * (size.adapters + size.routers)
        assert float(numbers["both, stored in 16 bits"][:4]) in (
            pytest.approx(stored / unit, rel=0.01) for unit in (1e6, 1e9)
        )
        assert (
            numbers["used by a token, 2LKDR + LED"]
            == f"{size.activated - size.dense:,}"
        )
        assert numbers["whole model"].startswith(f"{size.total / 1e9:.3f} billion")
        assert numbers[last].startswith(f"{size.activated / 1e9:.3f} billion")
    assert "✔ rounds to the printed 14" in numbers[last]
    browser.run(f"({FIND})('adapter width R').focus()")
    for kind in ("rawKeyDown", "keyUp"):  # without a mouse
        key = {"key": "ArrowLeft", "code": "ArrowLeft", "windowsVirtualKeyCode": 37}
        browser.call("Input.dispatchKeyEvent", type=kind, **key)
    assert "✘ does not round to the printed 14" in shown({})[last]
    caption = browser.run("document.querySelector('.moe-move figcaption').textContent")
    assert "Shown with host: llama-2-13b; layers L: 40;" in caption
    assert caption.endswith("adapter width R: 588.")
    numbers = shown({"layers L": 2, "model width D": 256, "experts E": 5})
    assert numbers["adapters, 2LEDR"] == f"{2 * 2 * 5 * 256 * 588:,}"
    assert last not in numbers


def keep(folder, tables, values, settings):
    """Commit a run with a curve for each row of each table."""
    curves = []
    for name, table in tables.items():
        for row, line in table.items():
            steps = tuple(range(len(line)))
            points = tuple(map(float, line))
            curves.append(Curve(f"{name}/{row}", "number", steps, points))
    notebook = next(iter(tables)).partition("/")[0]
    numbers = (Value(name, value, "share") for name, value in values.items())
    run = Run(
        notebook,
        "nano",
        "study",
        0,
        (*numbers,),
        (*curves,),
        settings={"base": "org/model@0"} | settings,
    )
    write_run(folder / "results" / notebook / "nano" / "0.parquet", run)


def test_the_experts_that_reach_p_train(moved, tmp_path):
    rng = np.random.default_rng(0)
    rows = {}
    for score, total in (("token", 1), ("gate", 0.4)):
        rows[score] = dict(
            enumerate((total * rng.dirichlet([0.5] * 8, size=3)).round(4), start=1)
        )
    keep(
        tmp_path,
        {f"routing/scores/law/{score}": table for score, table in rows.items()},
        {f"routing/{score}/law/experts_trained": 0.25 for score in rows},
        {"p_token": 0.2, "p_gate": 0.1},
    )
    page = moving.experts(tmp_path)
    assert page.count("6 of 24") == 2
    assert "law on model" in page
    shown = moved(page)
    for score, p, share in (
        ("token", 0.55, False),
        ("gate", 0.3, False),
        ("gate", 0.3, True),
        ("gate", 0.9, False),
        ("token", 0.2, True),
    ):
        trained = {}
        short = 0
        for layer, row in rows[score].items():
            goal = p * (sum(row) if share else 1)
            order = sorted(range(8), key=lambda e: -row[e])
            reached = [sum(row[order[: n + 1]]) >= goal - 1e-9 for n in range(8)]
            trained[layer] = order[: reached.index(True) + 1] if any(reached) else order
            short += not any(reached)
        shown({"score": score})
        numbers = shown(
            {
                "threshold p": p,
                "layer to read": 1,
                "p is a share of the layer's total": share,
            }
        )
        count = sum(map(len, trained.values()))
        assert (
            numbers["experts that train"] == f"{count} of 24 ({100 * count / 24:.1f} %)"
        )
        assert (
            numbers["trained and stored"] == f"{count * 3 * 2048 * 1408:,} parameters"
        )
        assert numbers["layer 2 trains"] == ", ".join(map(str, trained[2]))
        assert numbers["layers that do not reach p"].startswith(str(short or "none"))


def test_rockets_experts_are_those_of_algorithm_1(moved, tmp_path):
    rng = np.random.default_rng(1)
    names = list("fbdace")
    nats = rng.random((6, 9)).round(4)
    solved = rng.integers(0, 2, (6, 9))
    cosines = np.corrcoef(rng.random((6, 7))).round(4)
    tables = {"nats": nats, "share": solved, "correlation": np.c_[cosines, cosines[0]]}
    tables = {
        f"rocket/bank/task/{unit}": dict(zip(names, t, strict=True))
        for unit, t in tables.items()
    }
    keep(tmp_path, tables, {}, {"shots": 9, "candidates": 4, "experts": 2, "top_k": 1})
    page = moving.selection(tmp_path)
    assert page.count(">expert<") == page.count(">candidate<") == 2
    shown = moved(page)
    used = dict.fromkeys(("perplexity", "accuracy", "diversity"))
    labels = (
        "rank by perplexity",
        "rank by shots solved",
        "rank groups by diversity",
    )
    for K, M, N, out, ranking in (
        (9, 4, 2, "", "sum"),
        (1, 6, 3, "", "normalised"),
        (3, 5, 2, "accuracy", "sum"),
        (5, 6, 4, "diversity", "sum"),
        (9, 6, 1, "perplexity", "normalised"),
    ):
        scores = rocket.score.scores(
            *(pd.DataFrame(t[:, :K], names) for t in (nats, solved))
        )
        config = rocket.Config(candidates=M, experts=N, top_k=1, ranking=ranking)
        alike = pd.DataFrame(cosines, names, names)
        rankings = [name for name in used if name != out]
        chosen = rocket.choose.select(scores, alike, config, rankings=rankings)
        moves = {"shots K": K, "candidates M": M, "experts N": N}
        moves |= {label: name != out for label, name in zip(labels, used, strict=True)}
        numbers = shown(
            moves | {"bring each ranking to 0 to 1": ranking == "normalised"}
        )
        assert numbers["chosen experts"] == ", ".join(chosen.experts)
        sums = numbers["the group's ranks: perplexity + solved + diversity"]
        total = float(sums.rpartition("= ")[2])
        assert total == pytest.approx(chosen.groups.total[0], abs=0.006)


def test_the_toy_router_collapses_without_a_balance_loss_and_not_with_one(moved):
    page = (BOOK / "primer.md").read_text(encoding="utf-8").partition("```{raw} html")
    cells = re.findall(r'<td data-label="expert \d">(.*?)</td>', page[2])
    shown = moved("".join(page[1:]))
    loads = []
    for top, temperature, strength, steps in (
        (1, 1, 0, 100),
        (1, 1, 0.3, 100),
        (2, 0.5, 0.1, 40),
        (3, 1.5, 0, 7),
        (1, 2, 0, 0),
    ):
        load, mean = trained(
            cells, strength, temperature=temperature, steps=steps, top=top
        )
        moves = {"strength of the balance loss": strength, "steps of training": steps}
        numbers = shown(
            moves | {"experts per token K": top, "temperature": temperature}
        )
        assert numbers["load of experts 1 to 4"] == ", ".join(
            f"{100 * x:.1f} %" for x in load
        )
        loss = float(numbers["balance loss (1 is even)"])
        assert loss == pytest.approx(4 * load @ mean, abs=0.006)
        loads.append(load)
    assert loads[0].max() == 1
    assert loads[1].min() > 0


def test_the_forest_shows_the_intervals_that_the_filters_leave(
    moved, browser, tmp_path
):
    rows = []
    claim = papers.claim("pesc.sparse-beats-dense")
    for name, right in {
        "pesc.good": 70,
        "pesc.bad": 30,
        "esft.good": 60,
        "esft.none": 0,
    }.items():
        runs = []
        for seed in range(3 if right else 0):
            values = {"dense": 0.5, "sparse": (right + seed) / 100}.items()
            values = [
                Value(f"pesc/{arm}/accuracy", value, "share") for arm, value in values
            ]
            base = {"base": "nano"}
            runs.append(Run("pesc", "nano", "study", seed, (*values,), settings=base))
        pool = [Pool("pesc", "nano", (*runs,))] if runs else []
        rows.append(verdicts.row(replace(claim, id=name), pool, {"nano": ()}))
    (tmp_path / "_config.yml").write_text(
        "repository: {url: 'https://example.org/r', branch: b}"
    )
    moved(pages.page("ledger", rows=rows, places=pages.Places(tmp_path)))
    every = [["holds", 21], ["fails", -19], ["holds", 11]]
    cases = (
        (0, "all", every),
        (0, "PESC", every[:2]),
        (1, "fails", every[1:2]),
    )
    for place, choice, left in cases:
        field = f"document.querySelectorAll('.moe-filters select')[{place}]"
        browser.run(
            f"{field}.value = '{choice}'; {field}.dispatchEvent(new Event('change'))"
        )
        circles = "[...document.querySelectorAll('.moe-forest circle')]"
        drawn = browser.run(
            f"{circles}.map(e => [e.className.baseVal, Number(e.dataset.value)])"
        )
        assert drawn == [[kind, pytest.approx(value)] for kind, value in left]
    told = browser.run("document.querySelector('.moe-drawn').previousSibling.innerText")
    assert told.startswith("1 interval: 0 as claimed, 1 against it, 0 undecided")


def test_the_ledgers_rows_are_found_by_words_which_stand_in_the_address(
    moved, browser, tmp_path
):
    claim = papers.claim("pesc.sparse-beats-dense")
    sentences = {
        "pesc.one": "Sparse beats dense.",
        "pesc.two": "Dense is cheaper.",
        "esft.three": "Experts of one task are few.",
    }
    rows = [
        verdicts.row(replace(claim, id=name, sentence=sentence), [])
        for name, sentence in sentences.items()
    ]
    (tmp_path / "_config.yml").write_text(
        "repository: {url: 'https://example.org/r', branch: b}"
    )
    moved(pages.page("ledger", rows=rows, places=pages.Places(tmp_path)))
    field = "document.querySelector('.moe-filters input')"
    shown = "[...document.querySelectorAll('tbody tr')].filter(e => !e.hidden).map(e => e.id)"
    for typed, left in {
        "DENSE": ["pesc.one", "pesc.two"],
        "dense  sparse": ["pesc.one"],
        "esft.three": ["esft.three"],
        "benchmarks": [],  # a word of the fold alone
        "": [*sentences],
    }.items():
        browser.run(
            f"{field}.value = '{typed}'; {field}.dispatchEvent(new Event('input'))"
        )
        assert browser.run(shown) == left, typed
        told = browser.run("document.querySelector('.moe-filters output').textContent")
        assert told.startswith(f"{len(left)} of 3 claims shown")
        asked = browser.run("new URLSearchParams(location.search).get('words')")
        assert asked == (typed or None)
    address = (tmp_path / "page.html").as_uri()
    browser.open(f"{address}?words=cheaper")
    assert browser.run(shown) == ["pesc.two"]
    # A link to a row that the words hide leads there all the same.
    browser.fresh()
    browser.open(f"{address}?words=cheaper#pesc.one")
    assert browser.run(shown) == [*sentences]
    assert browser.run(f"{field}.value") == ""
