"""What scripts and styles of ours do on a phone, in Chromium, with no theme around them."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
STATIC = Path(__file__).parents[2] / "book" / "_static"
PROSE = "<td>a cell in which a whole sentence stands</td>"
NAME = "tests/methods/test_pesc.py"
SETTINGS = [f"<th>base<td>org/name@commit of the hub{PROSE}", f"<th>rate<td>1{PROSE}"]
FOUND = "<td>20.9 % (20.1 to 21.7)" * 3
LOSSES = "<td>0.512" * 8
LEVELS = f"<tr><th>combine<th>experts per token<th>start{'<th>loss' * 8}</tr><tr>{'<th>' * 11}</tr>"


def printed(name, rows, heads=""):
    """Return what a cell prints as a table of pandas."""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<thead>{heads}</thead><tbody>{body}</tbody>"
    return (
        f"<div class=cell_output><table id={name} class=dataframe>{table}</table></div>"
    )


PRINTED = "".join(
    [
        printed(
            "levels", [f"<th>a<th>1<th>su{LOSSES}", f"<th>b<th>2<th>su{LOSSES}"], LEVELS
        ),
        printed(
            "bare", ["<th>0<td>experts<td>own float32 here<td>at least 15 x as fast"]
        ),
        printed(
            "recorded",
            ["<th>a claim of five words<td>1<td>−0.334 to +0.079 nats<td>5"],
        ),
        printed("found", [f"<th>ESFT by all gates{FOUND}<td>5"]),
        printed("three", ["<th>books<td>10,309,015<td>3.247"]),
        printed("set_up", SETTINGS, "<tr><th><th>value<th>what it does</tr>"),
    ]
)
PAGE = f"""<!doctype html><html data-theme=light style="--pst-color-background: white">
<meta charset=utf-8><link rel=stylesheet href={(STATIC / "moebook.css").as_uri()}>
<style>* {{ box-sizing: border-box; }}
table {{ border-collapse: collapse; }} thead tr {{ border-bottom: 2px solid; }}</style>
<article class=bd-article>
<table id=prose class=table><thead><tr><th>name<th>value<th>what it is</thead>
<tbody><tr><td>a<td>1{PROSE}</tbody></table>
<table id=numbers class=table><thead><tr><th>a<th>b<th>c</thead>
<tbody><tr><td>1<td>2<td>3</tbody></table>
<table id=pair class=table><thead><tr><th>a<th>b</thead><tbody><tr><td>1{PROSE}</tbody></table>
<details><summary><code><span class=pre>{NAME}</span></code></summary></details>
<dl><dt class=sig><span class=sig-name><span class=pre>log_perplexity</span></span></dt></dl>
<div class=cell_output><div class='output text_html'><div style='height: 2000px'></div></div></div>
{PRINTED}
<p>It is <span id=wide class=math style='display: inline-flex; max-width: 100%'>
<span style='flex: none; width: 900px'>x</span></span>.</p>
<p>It is <span id=slim class=math style='display: inline-flex; max-width: 100%'>
<span style='flex: none; position: relative; width: 18.4px'>x
<span style='position: absolute; left: 0; width: 30px'>x</span></span></span> here</p>
<p style='width: 62px'>a <span id=last class=math style='display: inline-flex'>
<span style='flex: none; width: 60px'>x</span></span>, and</p>
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
    tops = """[...document.querySelectorAll('table.table')].map(
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


def test_a_formula_in_a_line_has_a_shadow_where_it_is_wider_than_a_phone(page):
    shadows = """new Promise(seen => setTimeout(seen, 100)).then(() => ['wide', 'slim'].map(
      name => getComputedStyle(document.getElementById(name))).map(
      style => [style.backgroundImage.includes('linear-gradient'), style.overflowX]))"""
    assert page(390, shadows) == [[True, "auto"], [False, "visible"]]


def test_what_closes_a_formula_does_not_begin_a_line(page):
    left = """(formula => {
      const after = document.createRange();
      after.setStart(formula.nextSibling, 0);
      after.setEnd(formula.nextSibling, 1);
      return after.getBoundingClientRect().left >= formula.getBoundingClientRect().right;
    })(document.querySelector('#last'))"""
    assert page(390, left)


WIDTHS = """[...document.querySelector('%s').tBodies[0].rows[0].cells].map(
  cell => cell.getBoundingClientRect().width)"""
LINES = """(cell => {
  const content = document.createRange();
  content.selectNodeContents(cell);
  return content.getClientRects().length;
})(document.querySelector('%s'))"""
HEIGHT = (
    "document.querySelector('%s').tBodies[0].rows[0].getBoundingClientRect().height"
)
LINE = 26  # px, of a row of one line at most


def test_row_names_leave_room_for_numbers_on_a_phone(page):
    levels = page(390, WIDTHS % "#levels")[:3]
    assert max(levels) < 90
    assert page(390, WIDTHS % "#bare")[0] < 40
    assert page(390, WIDTHS % "#recorded")[0] >= 144
    assert page(390, WIDTHS % "#found")[0] < 110


def test_short_cells_of_a_table_that_scrolls_sideways_are_a_line_on_a_phone(page):
    assert page(390, HEIGHT % "#bare") < LINE
    whole = """[...document.querySelectorAll('#found .moe-whole')].map(
      part => [part.textContent, part.getClientRects().length])"""
    assert page(390, whole) == 3 * [["20.9 %", 1], ["(20.1 to 21.7)", 1]]
    assert page(390, HEIGHT % "#found") < 2 * LINE
    assert page(390, LINES % "#recorded td:nth-child(3)") == 1


def test_a_table_of_three_columns_breaks_names_behind_marks_and_no_number(page):
    assert page(180, LINES % "#three td") == 1
    value = "document.querySelector('#set_up td').innerHTML.split('<wbr>')"
    assert page(390, value) == ["org/", "name@", "commit of the hub"]
    assert page(390, WIDTHS % "#set_up")[1] <= 0.3 * 390
    breaks = "getComputedStyle(document.querySelector('#set_up wbr')).display"
    assert page(390, breaks) == "inline"
    assert page(1200, breaks) == "none"


def test_heads_stand_on_the_rule_of_the_last_row_of_heads_on_a_phone(page):
    aligned = "getComputedStyle(document.querySelector('#levels th')).verticalAlign"
    assert page(390, aligned) == "bottom"
    rules = """[...document.querySelector('#levels').tHead.rows].map(
      row => getComputedStyle(row).borderBottomWidth)"""
    assert page(390, rules) == ["0px", "2px"]


def test_a_table_wider_than_a_window_scrolls_and_gives_the_names_of_its_rows_room(
    browser, tmp_path
):
    heads, numbers = "<th>0.123456789" * 12, "<td>1" * 12
    plan = f"<thead><tr>{heads}</thead><tbody><tr>{numbers}</tbody>"
    row = f"<tr><th>upcycled, then ESFT{'<td>0.894 (0.860 to 0.928)' * 5}"
    found = f"<table id=arms class=dataframe><tbody>{row}</tbody></table>"
    output = f"<div class=cell_output><div class='output text_html'>{found}</div></div>"
    before, rest = PAGE.split("<article class=bd-article>")
    article = f"<article class=bd-article><table class=moe>{plan}</table>{output}"
    after = rest[rest.index("</article>") :]
    path = tmp_path / "page.html"
    path.write_text(before + article + after, encoding="utf-8")
    browser.resize(700, 800)
    browser.open(path.as_uri())
    width = "document.querySelector('table.moe').getBoundingClientRect().width"
    assert browser.run(width) > 700
    assert browser.run("document.documentElement.scrollWidth") <= 700
    assert browser.run(LINES % "#arms th") == 1
