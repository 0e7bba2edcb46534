"""Exercise notebooks: students' stubs fail their checks in place, instructors' solutions pass."""

import re
import runpy
import sys
from dataclasses import replace

import nbformat
import pytest
import yaml

from moebook import storage
from moebook.lab.evidence import verdicts
from moebook.lab.pages import generated, pages
from moebook.lab.records import store
from tests.refusals import refused
from workshop import editions, readme, slides

ROOT = editions.BOOK.parent
PAGES = sorted(editions.BOOK.glob("*_exercises.md"))
NOTES = yaml.safe_load(
    (editions.BOOK.parent / "workshop" / "notes.yaml").read_text("utf-8")
)


def _pairs(notebook):
    """Each cell to complete, with the check below it."""
    codes = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return list(zip(codes[::2], codes[1::2], strict=True))


def test_every_exercise_has_minutes_a_hint_and_a_question_and_no_note_is_of_another():
    labels = [task.label for page in PAGES for task in editions.exercises(page)[1]]
    assert sorted(labels) == sorted(NOTES)
    assert len(labels) > 30
    assert all(
        note["minutes"] > 0 and note["hint"] and note["asked"]
        for note in NOTES.values()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_for_teachers_gives_the_minutes_of_each_exercise(page):
    minutes = {
        task.title: NOTES[task.label]["minutes"] for task in editions.exercises(page)[1]
    }
    each = "; ".join(f"{title} {length}" for title, length in minutes.items())
    told = f"]({page.name}) | {each} | {sum(minutes.values())} |"
    assert told in (editions.BOOK / "teaching.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_stub_fails_in_place_and_a_solution_passes(page, tmp_path, capsys):
    student, instructor = (
        editions.notebook(page, edition) for edition in editions.EDITIONS
    )
    tasks = editions.exercises(page)[1]
    coded = [task for task in tasks if task.code]
    assert len(_pairs(student)) == len(_pairs(instructor)) == len(coded) >= 2
    for stub, check in _pairs(student):
        with pytest.raises((AssertionError, RuntimeError)):
            exec(f"{stub}\n{check}", {})
    capsys.readouterr()
    for solution, check in _pairs(instructor):
        exec(f"{solution}\n{check}", {})
    assert capsys.readouterr().out == "passed\n" * len(coded)
    texts = {}
    for kind, notebook in (("student", student), ("instructor", instructor)):
        texts[kind] = "\n".join(cell.source for cell in notebook.cells)
    for task in tasks:
        assert task.solution in texts["instructor"]
        assert task.solution not in texts["student"]
        assert NOTES[task.label]["hint"] in texts["student"]
    assert not re.search(
        r"\{[\w:]+\}`|^:::|^:\w+:", "\n".join(texts.values()), re.MULTILINE
    )


def test_both_editions_are_written_as_valid_notebooks_and_equal_at_every_build(
    tmp_path,
):
    written = editions.write(tmp_path)
    assert len(written) == 2 * len(PAGES)
    first = {path: path.read_bytes() for path in written}
    for path in written:
        nbformat.validate(nbformat.read(path, as_version=4))
    assert {path: path.read_bytes() for path in editions.write(tmp_path)} == first


PAGE = """# A page

:::{exercise} Sums
:label: sums

Add.
:::

:::{solution} sums
Two.
:::
"""


@pytest.mark.parametrize(
    ("line", "other", "words"),
    [
        (":label: sums", "", "exercise 'Sums' has no label, expected ':label: name'"),
        (
            "solution} sums",
            "solution} sum",
            "exercise 'Sums' has no solution, expected",
        ),
        ("Add.", ":::{hint}\nOne.\n:::\nAdd.", "exercise 'Sums' .*holds a directive"),
        ("Add.\n:::", "Add.", "exercise 'Sums' is not closed"),
        ("Two.", ":::{hint}\nOne.\n:::\nTwo.", "solution 'sums' .*holds a directive"),
    ],
)
def test_an_exercise_that_is_not_whole_is_refused_with_its_page(
    line, other, words, tmp_path
):
    page = tmp_path / "sums_exercises.md"
    page.write_text(PAGE)
    assert [task.text for task in editions.exercises(page)[1]] == ["Add."]
    page.write_text(PAGE.replace(line, other))
    refused(f"E-BOOK: .*sums_exercises.md: {words}", editions.exercises, page)


def test_the_readme_says_what_the_committed_runs_found(ledger, monkeypatch):
    monkeypatch.setattr(readme.verdicts, "ledger", lambda *_, **__: ledger)
    text = (editions.BOOK.parent / "README.md").read_text("utf-8")
    assert readme.renewed(text, editions.BOOK.parent) == text
    assert text.count("\n| [") == 4, "a row a paper"


MARKS = [*map(readme.MARK.format, ("found", "times"))]
MARKS += ["<!-- end of found -->\n", "<!-- end of times -->\n"]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("instead", ["<!-- damaged -->\n", "{0}old\n{0}"])
def test_a_readme_in_which_a_mark_is_damaged_or_stands_twice_is_refused(
    mark, instead, monkeypatch
):
    for part in ("found", "times"):
        monkeypatch.setattr(readme, part, lambda folder: "new\n")
    text = (ROOT / "README.md").read_text("utf-8")
    assert readme.renewed(text, ROOT).count("new\n") >= 2
    damaged = text.replace(mark, instead.format(mark))
    refused("E-FORMAT: README.md: expected <!-- ", readme.renewed, damaged, ROOT)


def test_slides_are_refused_where_the_book_is_not_built(tmp_path):
    words = "E-BOOK: no results of pesc in .*; run: make book"
    refused(words, slides.write, tmp_path / "slides", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A project whose book is built, as far as slides need it, beside somebody's own notebook."""
    names = ["notebooks/01_pesc.ipynb", "book/_static/diagrams/pesc.svg"]
    names += ["book/pesc_theory.md", "book/pesc_exercises.md"]
    for name in names:
        storage.write(tmp_path / name, (ROOT / name).read_bytes())
    own = (ROOT / "notebooks" / "03_rocket.ipynb").read_bytes()
    storage.write(tmp_path / "notebooks" / "30_my_pesc.ipynb", own)
    executed = nbformat.writes(nbformat.v4.new_notebook())
    storage.write(tmp_path / "book" / "notebooks" / "01_pesc_findings.ipynb", executed)
    told = {"found_pesc": "**Yes.**\nBy 1 point."}
    monkeypatch.setattr(slides.verdicts, "ledger", lambda *_, **__: [])
    monkeypatch.setattr(slides.prose, "pages", lambda *_: told)
    return tmp_path


def test_slides_are_of_the_papers_own_notebook_and_its_pages(built):
    title, idea, equation, answer, task = slides.slides("pesc", built)
    assert title.text.startswith("**Can a handful of small adapters")
    assert idea.text.startswith("A router sends each token")
    assert idea.alt
    assert "$$" in equation.text
    assert answer.text == "**Yes.**\n\nBy 1 point."
    assert task.title.startswith("Your turn: ")


DRAWN = {"output_type": "display_data", "data": {"image/png": "AAAA"}, "metadata": {}}


@pytest.fixture(scope="module")
def decks(tmp_path_factory, ledger, pools):
    """Each paper's slides from the book's own pages and committed runs, all figures drawn."""
    folder = tmp_path_factory.mktemp("decks")
    executed = folder / "book" / "notebooks"
    executed.mkdir(parents=True)
    (folder / "notebooks").symlink_to(ROOT / "notebooks")
    for path in editions.BOOK.iterdir():
        if path.name not in ("notebooks", "_generated"):
            (folder / "book" / path.name).symlink_to(path)
    for path in (ROOT / "notebooks").glob("*_findings.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if "mystnb" in cell.metadata:
                cell.outputs = [nbformat.from_dict(DRAWN)]
        nbformat.write(notebook, executed / path.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slides.verdicts, "ledger", lambda *_, **__: ledger)
        patch.setattr(slides.prose.store, "pools", lambda name, *_: pools(name))
        told = slides.prose.pages(folder, ledger)  # the same for every paper
        patch.setattr(slides.prose, "pages", lambda *_: told)
        return {
            paper: [*slides.slides(paper, folder)] for paper in slides.papers.PAPERS
        }


def test_a_deck_tells_the_matched_comparison_the_price_and_the_caution_too(decks):
    told = {
        paper: " ".join(slide.text for slide in deck) for paper, deck in decks.items()
    }
    assert "Against a dense model with as many trained weights" in told["pesc"]
    assert "On its four tasks it reaches" in told["esft"], "it learns less"
    for paper, text in told.items():
        assert "The price" in text and "Caution: " in text, paper


def test_no_slide_has_a_raw_role_a_pools_name_or_speaks_of_another_place(decks, pools):
    for paper, deck in decks.items():
        names = "|".join(pools(paper))
        for slide in deck:
            read = f"{slide.text} {slide.caption}"
            assert not re.search(r"\{[\w:]+\}`", read), (paper, slide.title)
            assert not re.search(f"`({names})`", read), (paper, slide.title)
            other = re.search(r"\b(above|below)\b(?! zero)", read)
            assert not other, (paper, slide.title)


@pytest.mark.parametrize(
    ("page", "part", "words"),
    [
        ("theory", r"(?s)\A.*", "paragraph below its title"),
        ("theory", r"```\{figure\}", "figure"),
        ("theory", r"\$\$", "equation below a paragraph"),
        ("exercises", r":::\{exercise\}", "exercise"),
    ],
)
def test_a_page_that_lacks_what_its_slides_show_is_refused(built, page, part, words):
    file = built / "book" / f"pesc_{page}.md"
    file.write_text(re.sub(part, "", file.read_text()))
    lacks = f"E-BOOK: {file} has no {words}, which the slides show; write one"
    refused(lacks, lambda: [*slides.slides("pesc", built)])


def test_a_folder_that_is_a_file_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(sys, "argv", ["editions", str(file)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(editions.__file__, run_name="__main__")
    assert ended.value.code == 2
    assert re.fullmatch("E-OS: NotADirectoryError: .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["readme", "slides"])
def test_outside_a_checkout_a_refusal_is_one_line_and_ends_with_2(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "slides"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "workshop" / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 2
    assert re.fullmatch("E-PATH: .*\n", capsys.readouterr().err)


def test_the_run_on_a_page_moves_nothing_that_is_told(pools, monkeypatch):
    run = pools("router_init")["nano"].last
    single = [value for value in run.values if value.items is None]
    values = tuple(replace(value, value=value.value / 2) for value in single)
    later = run.manifest | {"date": "2999-01-01T00:00:00+00:00"}
    run = replace(run, protocol="cpu", tier="cpu", values=values, manifest=later)
    on_page = {store.LIVE: store.Pool("router_init", store.LIVE, (run,))}

    def with_the_page(name, *_, shown=False):
        return pools(name) | (on_page if shown and name == "router_init" else {})

    monkeypatch.setattr(verdicts.store, "pools", with_the_page)
    front = generated.committed(ROOT, "with a page")["found_front"]
    assert readme.linked(front) in (ROOT / "README.md").read_text("utf-8")


def test_a_course_is_told_changes_and_values_by_its_protocols_and_cost_by_its_runs(
    tmp_path,
):
    page = pages.taught(editions.BOOK.parent)
    assert page.count("<tr><td") == 7
    assert "moebook run esft --on class -p p_gate=0.3" in page
    assert len(re.findall(r">\d\d s on \w", page)) == 7
    assert ">CPU time of one run at class</th>" in page
    assert pages.taught(tmp_path) == "No run of a course is on record.\n"
