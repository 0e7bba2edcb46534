"""The gate sees what a reader sees on arrival, what boxes hide, and which figures were judged."""

import base64
import hashlib
import json
from pathlib import Path

import gate
import pytest

from moebook import storage
from moebook.lab.records import Run, write_run

STATIC = Path(__file__).parents[2] / "book" / "_static"
PNG = b"\x89PNG\r\n\x1a\n, a figure"


def _table(rows, before=0, style=""):
    """A page of a long table, each of whose rows is 50 px high, ``before`` px down."""
    lines = "<tr style='height: 50px'><td>x</td></tr>" * rows
    return (
        f"<body style='margin: 0'><main><div style='height: {before}px'></div>"
        f"<div class=moe-long style='max-height: 700px; overflow: auto; {style}'>"
        f"<table style='border-spacing: 0'><tbody>{lines}</tbody></table></div></main>"
    )


def _measured(browser, tmp_path, html, script, size=(1400, 900)):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><meta charset=utf-8>" + html)
    browser.resize(*size)
    browser.open(page.as_uri())
    return browser.run(script)


@pytest.mark.browser
def test_rows_below_the_window_are_not_seen_on_arrival(browser, tmp_path):
    for rows, before, seen in ((40, 0, 14), (40, 600, 6), (40, 2000, 0), (3, 0, 10)):
        html = _table(rows, before)
        assert _measured(browser, tmp_path, html, gate.SHOWN) == [seen]


@pytest.mark.browser
def test_what_scrolls_within_a_box_is_part_of_a_pages_height(browser, tmp_path):
    height = gate.SIZE % "scrollHeight"
    folded = f"<details><summary>more</summary>{_table(200)}</details>"
    for html, least, most in (
        (_table(400), 20_000, 20_100),
        (folded, 0, 900),  # nobody has opened it
        (_table(400, style="max-height: none"), 20_000, 20_010),
    ):
        page = _measured(browser, tmp_path, html, height, (420, 800))
        hidden = browser.run(gate.HIDDEN)
        assert least <= page + hidden <= most


def _cell(source):
    png = {"image/png": base64.b64encode(PNG).decode()}
    output = {"output_type": "display_data", "data": png, "metadata": {}}
    return {
        "cell_type": "code",
        "source": source,
        "metadata": {},
        "execution_count": 1,
        "outputs": [output],
    }


def show(site, name, content):
    """Put a picture into a site, on a page; return its path."""
    storage.write(site / "page.html", f'<img src="_images/{name}" />')
    picture = site / "_images" / name
    storage.write(picture, content)
    return picture


@pytest.mark.parametrize(
    ("source", "manifest", "told"),
    [
        ("plotting.curves(losses)", {}, []),
        ("plotting.curves(losses)", {"unreadable": ["x"]}, ["not judged"]),
        ("import matplotlib.pyplot as plt\nplt.plot()", {}, ["not judged"]),
        (None, {}, ["not judged"]),
    ],
)
def test_a_figure_that_the_build_has_not_judged_is_found(
    tmp_path, source, manifest, told
):
    site = tmp_path / "_build" / "html"
    picture = show(site, f"{hashlib.sha256(PNG).hexdigest()}.png", PNG)
    storage.write(site / "_images" / "earlier.png", b"of another build")
    copy = tmp_path / "book" / "notebooks" / "01_pesc.ipynb"
    cells = [_cell(source)] if source else []
    storage.write(copy, json.dumps({"nbformat": 4, "cells": cells}))
    run = Run("pesc", "cpu", "cpu", 0, (), manifest=manifest)
    write_run(copy.with_suffix(".parquet"), run)
    faults = list(gate.figures(site))
    assert [picture.name in fault for fault in faults] == [True] * len(told)
    assert all(words in fault for words, fault in zip(told, faults, strict=True))


def test_a_drawing_that_says_nan_is_found(tmp_path):
    for name, text, found in (("a", "nan %", 1), ("b", "nanoseconds", 0)):
        svg = f'<svg xmlns="http://www.w3.org/2000/svg"><text><tspan>{text}</tspan></text></svg>'
        show(tmp_path / name, "a.svg", svg)
        faults = list(gate.figures(tmp_path / name))
        assert len(faults) == found
        assert all("says NaN" in fault for fault in faults)
    # matplotlib draws letters as shapes, and leaves each text as a remark.
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><!-- nan --><g/></svg>'
    show(tmp_path / "c", "promises.svg", svg)
    assert len(list(gate.figures(tmp_path / "c"))) == 1
