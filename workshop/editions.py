"""Exercise notebooks from the book's pages: one edition for students, one for instructors.

``python -m workshop.editions FOLDER`` writes ``FOLDER/student/*.ipynb`` and
``FOLDER/instructor/*.ipynb``. A student's notebook has the exercises, hints, stubs to complete and
checks that run in place; an instructor's has the solutions, minutes and questions that are usually
asked. Both come from ``book/*_exercises.md``, whose stubs and solutions the tests run, and from
``notes.yaml`` beside this file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from moebook import errors

BOOK = Path(__file__).parents[1] / "book"
BLOCK = re.compile(r"(?s):::\{(exercise|solution)\} *(.*?)\n(.*?)\n:::(?:\n|$)")
CODE = re.compile(
    r"```\{code-block\} python\n:name: \S+-(stub|check|solution)\n\n(.*?)```", re.DOTALL
)
ROLE = re.compile(r"\{(eq|ref|prf:ref)\}`([^`]+)`")
CITATION = re.compile(r" *\{cite:p\}`[^`]+`")
TITLE = r":::\{{(?:exercise|prf:\w+)\}} *(.+)\n:label: {}\n"
EDITIONS = ("student", "instructor")
HEAD = """# {title}

{lead} Each coding exercise has a cell to complete and a check below it: run both, change the first
until the second says `passed`."""


@dataclass(frozen=True)
class Exercise:
    """An exercise of a page: texts in Markdown, and code where it has any."""

    title: str
    label: str
    text: str
    solution: str
    code: dict[str, str]  # stub, check and solution; empty where it is done on paper


@cache
def pages() -> str:
    """Return all pages of the book as one text, in which labels are looked up."""
    return "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(BOOK.glob("*.md"))
    )


def plain(text: str) -> str:
    """Replace references into the book, which Jupyter shows raw, by the title they lead to.

    Citations in brackets go: the list of works they lead to stays in the book.
    """

    def named(match: re.Match[str]) -> str:
        role, label = match.groups()
        if role == "eq":
            return "the equation on the theory page"
        found = re.search(TITLE.format(re.escape(label)), pages())
        return f"“{found[1] if found else label}”"

    return ROLE.sub(named, CITATION.sub("", text))


def exercises(page: Path) -> tuple[str, list[Exercise]]:
    """Read a page's title and exercises."""
    source = page.read_text(encoding="utf-8")
    blocks = BLOCK.findall(source)
    for kind, title, body in blocks:
        if ":::{" in body:
            why = f"{kind} '{title}' is not closed, or holds a directive"
            _refuse(page, f"{why}, expected text and code alone, then ':::'")
    tasks = [(title, body) for kind, title, body in blocks if kind == "exercise"]
    solutions = {label: body for kind, label, body in blocks if kind == "solution"}
    read = []
    for title, body in tasks:
        labelled = re.search(r":label: (\S+)", body)
        if not labelled:
            _refuse(page, f"exercise '{title}' has no label, expected ':label: name'")
        label = labelled[1]
        if label not in solutions:
            fix = f"expected ':::{{solution}} {label}'"
            _refuse(page, f"exercise '{title}' has no solution, {fix}")
        solved = solutions[label].replace(":class: dropdown", "")
        code = {part: text.strip() for part, text in CODE.findall(body + solved)}
        text = CODE.sub("", body.replace(f":label: {label}", ""))
        text, answer = (plain(part).strip() for part in (text, CODE.sub("", solved)))
        read.append(Exercise(title, label, text, answer, code))
    return source.partition("\n")[0].removeprefix("# "), read


def _refuse(page: Path, fault: str) -> NoReturn:
    errors.refuse("E-BOOK", f"{page}: {fault}")


def cells(exercise: Exercise, edition: str, note: dict[str, Any]) -> Iterator[Any]:
    """Write an exercise as cells of an edition."""
    instructor = edition == "instructor"
    minutes = f" ({note['minutes']} minutes)" if instructor else ""
    hint = f"<details><summary>Hint</summary>\n\n{note['hint']}\n</details>"
    yield new_markdown_cell(
        f"## {exercise.title}{minutes}\n\n{exercise.text}\n\n{hint}"
    )
    if exercise.code:
        yield new_code_cell(exercise.code["solution" if instructor else "stub"])
        yield new_code_cell(exercise.code["check"] + '\n\nprint("passed")')
    elif not instructor:
        yield new_markdown_cell("*Your answer:*")
    if instructor:
        asked = "\n".join(
            f"- *{question}* {answer}" for question, answer in note["asked"].items()
        )
        yield new_markdown_cell(
            f"**Solution.** {exercise.solution}\n\n**Usually asked**\n\n{asked}"
        )


def notebook(page: Path, edition: str) -> Any:
    """Make the notebook of a page in an edition."""
    notes = yaml.safe_load(
        Path(__file__).with_name("notes.yaml").read_text(encoding="utf-8")
    )
    title, tasks = exercises(page)
    minutes = sum(notes[task.label]["minutes"] for task in tasks)
    lead = f"{len(tasks)} exercises, about {minutes} minutes."
    made = [
        new_markdown_cell(HEAD.format(title=f"{title} ({edition} edition)", lead=lead))
    ]
    for task in tasks:
        made += cells(task, edition, notes[task.label])
    for number, cell in enumerate(made):
        cell["id"] = f"{page.stem}-{number}"  # equal at every build
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=made, metadata={"kernelspec": kernel})


def write(folder: Path) -> list[Path]:
    """Write both editions of all pages; return the paths."""
    written = []
    for edition in EDITIONS:
        (folder / edition).mkdir(parents=True, exist_ok=True)
        for page in sorted(BOOK.glob("*_exercises.md")):
            path = folder / edition / f"{page.stem}.ipynb"
            nbformat.write(notebook(page, edition), path)
            written.append(path)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m workshop.editions FOLDER")
    try:
        for path in write(Path(sys.argv[1])):
            print(path)
    except (errors.Refusal, OSError) as error:
        print(errors.told(error), file=sys.stderr)
        sys.exit(2)
