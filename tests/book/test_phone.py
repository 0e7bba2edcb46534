"""What scripts and styles of ours do on a phone, in Chromium, with no theme around them."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
STATIC = Path(__file__).parents[2] / "book" / "_static"
PROSE = "<td>a cell in which a whole sentence stands</td>"
NAME = "tests/methods/test_pesc.py"
PAGE = f"""<!doctype html><html data-theme=light style="--pst-color-background: white">
<meta charset=utf-8><link rel=stylesheet href={(STATIC / "moebook.css").as_uri()}>
<article class=bd-article>
<table id=prose class=table><thead><tr><th>name<th>value<th>what it is</thead>
<tbody><tr><td>a<td>1{PROSE}</tbody></table>
<table id=numbers class=table><thead><tr><th>a<th>b<th>c</thead>
<tbody><tr><td>1<td>2<td>3</tbody></table>
<table id=pair class=table><thead><tr><th>a<th>b</thead><tbody><tr><td>1{PROSE}</tbody></table>
<details><summary><code><span class=pre>{NAME}</span></code></summary></details>
<dl><dt class=sig><span class=sig-name><span class=pre>log_perplexity</span></span></dt></dl>
<div class=cell_output><div class='output text_html'><div style='height: 2000px'></div></div></div>
<p>It is <span class=math style='display: inline-block; max-width: 100%'>
<span style='display: block; width: 900px'>x</span></span></p>
</article><script src={(STATIC / "tables.js").as_uri()}></script>"""


@pytest.fixture
def page(browser, tmp_path):
    """Return what opens the page in a window of some width and runs a script there."""
    path = tmp_path / "page.html"
    path.write_text(PAGE, encoding="utf-8")

    def ask(width, script):
        browser.resize(width, 800)
        browser.open(path.as_uri())
        return browser.run(script)

    return ask


def test_the_cells_of_a_row_of_prose_stand_below_each_other_on_a_phone_alone(page):
    tops = """[...document.querySelectorAll('table')].map(
      table => new Set([...table.tBodies[0].rows[0].cells].map(
        cell => cell.getBoundingClientRect().top)).size)"""
    assert page(390, tops) == [3, 1, 1]
    said = "document.querySelector('#prose td:last-child').innerText"
    assert page(390, said) == "what it is: a cell in which a whole sentence stands"
    assert page(1200, tops) == [1, 1, 1]
    assert page(1200, said) == "a cell in which a whole sentence stands"


def test_a_long_name_breaks_behind_a_mark_in_a_folds_title_and_in_a_signature(page):
    pieces = """[...document.querySelectorAll('.pre')].map(
      name => name.innerHTML.split('<wbr>'))"""
    title = ["tests/", "methods/", "test_", "pesc.", "py"]
    assert page(390, pieces) == [title, ["log_", "perplexity"]]


def test_an_output_scrolls_within_the_page_on_a_screen_and_not_on_a_phone(page):
    inner = """(box => box.scrollHeight > box.clientHeight)(
      document.querySelector('.output'))"""
    assert page(1200, inner)
    assert not page(390, inner)


def test_a_formula_in_a_line_that_is_wider_than_a_phone_has_a_shadow(page):
    shadow = "getComputedStyle(document.querySelector('.math')).backgroundImage"
    assert "linear-gradient" in page(390, shadow)
