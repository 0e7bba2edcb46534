"""The answers below the figures that a reader moves hold on the data of these figures."""

import json
import re
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from moebook.lab.pages import moving
from moebook.methods import pesc
from tests.toy import trained

ROOT = Path(__file__).parents[3]


def text_of(page):
    """A page's text, its lines joined."""
    text = (ROOT / "book" / f"{page}.md").read_text(encoding="utf-8")
    return " ".join(text.split())


def toy():
    """The logits of the primer's table, tokens by experts."""
    page = (ROOT / "book" / "primer.md").read_text(encoding="utf-8")
    cells = re.findall(r'<td data-label="expert \d">(.*?)</td>', page)
    return np.array(cells, float).reshape(8, 4)


def test_the_toys_first_step_is_worked_out_as_the_primer_writes_it():
    powers = np.exp(toy()[0])
    said = text_of("primer")
    first, *others = (f"{power:.2f}" for power in powers)
    assert (
        f"$e^{{1.1}} = {first}$, and ${others[0]}$, ${others[1]}$ and ${others[2]}$"
        in said
    )
    assert f"in all ${powers.sum():.2f}$" in said
    shares = [f"{share:.2f}" for share in powers / powers.sum()]
    assert f"{', '.join(shares[:3])} and {shares[3]}, and expert 1" in said
    load, mean = trained(toy(), 0.0, steps=0)
    assert f"f = ({', '.join(f'{8 * one:.0f}' for one in load)})/8" in said
    assert f"P = ({', '.join(f'{one:.3f}' for one in mean)})" in said
    slots = zip(8 * load, mean, strict=True)
    terms = [rf"{slot:.0f} \cdot {one:.3f}" for slot, one in slots]
    # The sum stands on two lines, so that it fits a phone.
    assert rf"\tfrac{{4}}{{8}}\, ({terms[0]} + {terms[1]} \\" in said
    assert rf"+ {terms[2]} + {terms[3]}) \\ &= {4 * load @ mean:.2f} ." in said


def test_the_toy_ends_as_the_primers_answers_say():
    start, _ = trained(toy(), 0.0, steps=0)
    assert start[0] == max(start) == 3 / 8
    assert trained(toy(), 0.0)[0][0] == 1  # expert 1 serves all
    for temperature, needed in ((1.0, 0.25), (2.0, 0.45)):
        for strength in np.arange(0, 21) / 20:  # the steps of the figure's handle
            load, _ = trained(toy(), strength, temperature=temperature)
            assert (load.min() > 0) == (strength >= needed), (temperature, strength)
    assert trained(toy(), 0.0, top=2)[0].max() == 1 / 2


def test_the_widths_and_totals_of_pescs_answers_are_those_of_the_figure():
    shown = re.search(r'(?s)application/json">(.*?)</script>', moving.sizes())
    hosts = json.loads(shown[1])["hosts"]
    allowed, at_64, all_six = {}, [], set(range(1, 1025))
    for host in hosts:
        rest = host["dense"] + host["routers"]
        per_width = host["adapters"] / pesc.Config().adapter_width
        totals = {width: rest + per_width * width for width in range(1, 1025)}
        printed = host["printed"]["total"] / 1e9
        fits = [
            width for width, total in totals.items() if round(total / 1e9) == printed
        ]
        allowed[host["name"]] = fits
        used_per_width = per_width * pesc.Config().top_k / pesc.Config().experts
        used = host["printed"]["activated"] / 1e9
        all_six &= {w for w in fits if round((rest + used_per_width * w) / 1e9) == used}
        at_64.append(totals[64] / 1e9)
    every = set.intersection(*map(set, allowed.values()))
    assert (min(every), max(every)) == (453, 596)
    assert (min(all_six), max(all_six)) == (589, 596)
    narrowest = min(allowed, key=lambda name: len(allowed[name]))
    assert narrowest == "yi-34b"
    assert (allowed[narrowest][0], allowed[narrowest][-1]) == (452, 596)
    assert 452 not in allowed["llama-2-13b"]
    one, two, three = (f"{total:.3f}" for total in at_64)
    said = text_of("pesc_theory")
    assert f"totals are {one}, {two} and {three} billion" in said
    assert [round(total) for total in at_64] == [7, 13, 35]


def chosen(rows, p, *, share=False):
    """How many experts of each layer reach p."""
    counts = []
    for row in rows.values():
        goal = p * (sum(row) if share else 1)
        reached = accumulate(sorted(row, reverse=True))
        counts.append(1 + [total >= goal - 1e-9 for total in reached].index(True))
    return counts


def test_esfts_answers_hold_for_the_published_scores():
    shown = re.search(r'(?s)application/json">(.*?)</script>', moving.experts(ROOT))
    tasks = {task["name"]: task["scores"] for task in json.loads(shown[1])["tasks"]}
    published = {name: tasks[name] for name in tasks if "DeepSeek" in name}
    assert len(published) == 2
    for scores in published.values():
        gate, token = scores["gate"], scores["token"]
        assert all(sum(row) < 0.5 for row in gate.values())
        assert all(sum(row) == pytest.approx(1, abs=0.002) for row in token.values())
        by_gate, by_token = sum(chosen(gate, 0.1)), sum(chosen(token, 0.2))
        assert by_gate == pytest.approx(by_token, rel=0.1)
        for p in (0.1, 0.2):
            divided = sum(chosen(gate, p, share=True))
            assert divided < sum(chosen(token, p))
            assert divided < sum(chosen(gate, p))
    law = tasks["law on DeepSeek-V2-Lite"]
    for score, p in (("token", 0.2), ("gate", 0.1)):
        counts = chosen(law[score], p)
        layers = list(law[score])
        most = sorted(range(len(counts)), key=lambda place: -counts[place])[:2]
        assert {layers[place] for place in most} == {"1", "2"}
