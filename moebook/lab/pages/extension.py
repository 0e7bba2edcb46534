"""What the book adds to Sphinx, by ``extra_extensions`` in _config.yml.

While a notebook's page is read, a badge comes under its title, which says what the run cost, and
its set-up into one cell; the executed copy stays as it ran. Nothing here needs torch or verdicts:
so a changed sentence is shown soon.
"""

from __future__ import annotations

import dataclasses
import filecmp
import html
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moebook import storage
from moebook.lab import records
from moebook.lab.pages.filling import page
from moebook.lab.records import Run, store
from moebook.lab.run.sources import commit, duration, size

REFERENCE = {
    "bases": "models",
    "pesc": "methods_pesc",
    "router_init": "methods_upcycling",
    "rocket": "methods_rocket",
    "rivals": "methods_rivals",
    "banks": "methods_rocket",
    "esft": "methods_esft",
    "routing": "analysis",
    "together": "together",
    "kernels": "kernels",
}
"""Notebook to the page of the reference with the functions that it calls."""
BEFORE_UNIT = re.compile(
    r"(?<=\d) (?=(?:B|GB|GiB|KiB|M|MB|MiB|TB|h|k|kB|min|ms|nats|points?|s|seeds|%)(?!\w))"
)
AFTER_MARK = re.compile(r"(?<!\w)(Alg\.|App\.|Eq\.|Fig\.|Sec\.|Table) (?=\d)")
"""Where no line may end: "3 M", "Eq. 6"."""
INSTEAD = {
    ' role="list" class="citation-list"': ' class="citation-list"',
    ' role="doc-biblioentry"': "",
    '<summary aria-label="Toggle hidden content">': "<summary>",
}
"""What a page's HTML has, and what stands there instead (`_mend`)."""
SPACE_IN_LINK = re.compile(r"(Solution to)(<a [^>]*>) ")
"""The link of sphinx_exercise begins with the space before it, which would be underlined."""
NO_BREAK_SPACE = "\u00a0"
STRAIGHT = str.maketrans("‘’“”", "''\"\"")


def setup(app: Any) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.setup_extension("sphinx.ext.autodoc")  # whose event is listened to below
    app.connect("builder-inited", _complete)
    app.connect("env-get-outdated", _with_new_styles)
    app.connect("source-read", _insert)
    app.connect("doctree-read", _bind_numbers)
    app.connect("doctree-read", _straighten_types)
    app.connect("autodoc-process-docstring", _without_aliases)
    app.connect("autodoc-process-signature", _with_first_values)
    app.connect("html-page-context", _mend, priority=900)  # after all who add scripts
    app.connect("html-page-context", _name_sheets)
    return {"parallel_read_safe": True}


def _without_aliases(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Drop what Python itself says of a named tuple's field: "Alias for field number 0"."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def _with_first_values(
    app: Any,
    what: str,
    name: str,
    thing: Any,
    options: Any,
    signature: str,
    result: Any,
) -> tuple[str, Any] | None:
    """Show what a field starts as, such as ``[]``, where Python shows ``<factory>``."""
    if not signature or "<factory>" not in signature:
        return None
    first: dict[str, Any] = {}
    for one in dataclasses.fields(thing):
        if one.default_factory is not dataclasses.MISSING:
            first[one.name] = one.default_factory()

    def shown(match: re.Match[str]) -> str:
        return f"{match[1]}={first[match[1]]!r}"

    return re.sub(r"(\w+)=<factory>", shown, signature), result


def _straighten_types(app: Any, doctree: Any) -> None:
    """Let types keep the quotes of code, which docutils would curl: Literal['mean', 'sum']."""
    for field in doctree.findall(lambda node: node.tagname == "field"):
        if field[0].astext() != "Type":
            continue
        for text in [*field.findall(lambda node: node.tagname == "#text")]:
            text.parent.replace(text, type(text)(str(text).translate(STRAIGHT)))


def _complete(app: Any) -> None:
    """Let the book on one page write what extensions taught the book of many pages to write."""
    known = app.registry.translation_handlers
    known["singlehtml"] = known["html"] | known.get("singlehtml", {})


def _with_new_styles(
    app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Read the front page again where a style or script is new: Sphinx copies them with pages."""
    source = Path(app.srcdir) / "_static"
    for path in source.rglob("*"):
        copy = Path(app.outdir) / "_static" / path.relative_to(source)
        if path.is_file() and not (
            copy.is_file() and filecmp.cmp(path, copy, shallow=False)
        ):
            return [str(app.config.root_doc)]
    return []


def _insert(app: Any, docname: str, source: list[str]) -> None:
    """Fold the set-up of an executed notebook that measures into one cell; put the badge on top.

    Where a cell has drawn nothing, and says so, no caption stands below.
    """
    if not docname.startswith("notebooks/"):
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        shown = [output.get("data", {}) for output in cell.get("outputs", ())]
        if not any("image/png" in data for data in shown):
            cell["metadata"].get("mystnb", {}).pop("figure", None)
    if docname.endswith("_findings"):
        for cell in notebook["cells"]:
            if "injected-parameters" in storage.tags(cell):
                # The page trains nothing: its tier says nothing to a reader.
                storage.tags(cell).append("remove-cell")
        source[0] = json.dumps(notebook)
        return
    notebook["cells"] = [*_with_one_set_up(notebook["cells"])]
    path = Path(app.srcdir) / f"{docname}.parquet"
    app.env.note_dependency(str(path))
    # The badge counts the seeds of the notebook's pools.
    seals = path.parents[2] / "results" / store.SEALS
    if seals.is_file():
        app.env.note_dependency(str(seals))
    text = badge(records.read_run(path), path.parents[2])
    notebook["cells"].insert(
        1, {"cell_type": "markdown", "metadata": {}, "source": text}
    )
    source[0] = json.dumps(notebook)


def _bind_numbers(app: Any, doctree: Any) -> None:
    """Let no line end between a number and its unit, or between "Eq." and its number."""
    to_copy = ("literal", "literal_block", "math", "math_block", "raw")
    for text in [*doctree.findall(lambda node: node.tagname == "#text")]:
        if text.parent.tagname in to_copy:
            continue
        bound = BEFORE_UNIT.sub(NO_BREAK_SPACE, str(text))
        bound = AFTER_MARK.sub(rf"\1{NO_BREAK_SPACE}", bound)
        if bound != text:
            text.parent.replace(text, type(text)(bound))


def _with_one_set_up(cells: Iterable[Any]) -> Iterator[Any]:
    """Yield cells, those that hold parameters as the first lines of the code after them.

    Where text or nothing comes after them, they are a cell of their own.
    """
    parameters: list[Any] = []
    for cell in cells:
        if {"parameters", "injected-parameters"} & {*storage.tags(cell)}:
            parameters.append(cell)
            continue
        if cell["cell_type"] == "code":
            yield _joined([*parameters, cell])
        else:
            if parameters:
                yield _joined(parameters)
            yield cell
        parameters = []
    if parameters:
        yield _joined(parameters)


def _joined(cells: list[Any]) -> Any:
    """Return the last of some cells with the lines of all."""
    sources = ["".join(cell["source"]) for cell in cells]
    return {**cells[-1], "source": "\n\n".join(sources)}


def _mend(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Keep one of the scripts that several extensions add, and no label that is none.

    The front page's entry in the sidebar is short; its title is not. ARIA has given up two roles
    that docutils writes, and a fold is called by what it shows. A link begins behind the space.
    """
    first: dict[Any, Any] = {}
    for script in context["script_files"]:
        body = script.attributes.get("body") or ""
        first.setdefault((script.filename or "", body), script)
    context["script_files"] = list(first.values())
    context["root_title"] = "Start here"
    body = context.get("body", "")
    for written, instead in INSTEAD.items():
        body = body.replace(written, instead)
    context["body"] = SPACE_IN_LINK.sub(r"\1 \2", body)


def _name_sheets(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let each printed sheet of a page say what it is, and where the book is found.

    That is the page's address, if the configuration has the book's (``html_baseurl``); else the
    page's title, the book's, and the address of the repository, if there is one.
    """
    title = html.unescape(re.sub(r"<[^>]+>", "", context.get("title", "")))
    parts = [title, app.config.html_title]
    if app.config.html_baseurl:
        parts.append(context["pageurl"])
    else:
        parts.append(app.config.html_theme_options.get("repository_url", ""))
    named = " · ".join(filter(None, dict.fromkeys(parts)))
    # In a string of CSS: neither its end, nor that of the element.
    quoted = re.sub(r'[\\"<\n]', lambda found: f"\\{ord(found[0]):x} ", named)
    rule = f'@page {{ @bottom-left {{ content: "{quoted}" }} }}'
    context["metatags"] = context.get("metatags", "") + f"<style>{rule}</style>"


def badge(run: Run, folder: Path) -> str:
    """Return what a live page's run cost, and where the pools of its notebook are."""
    manifest = run.manifest
    machine = manifest["environment"]
    peak = manifest["peak_memory"]
    facts = {
        "tier": run.tier,
        "seed": run.seed,
        "ran in": duration(manifest["seconds"]),
        "peak memory": size(peak) if peak else peak,
        "cores": f"{machine['cores']} × {machine['cpu']}",
        "accelerator": machine["accelerator"],
        "date": manifest["date"][:10],
        "commit": commit(manifest.get("commit")),
        "set by the reader": ", ".join(
            f"{k} = {v}" for k, v in manifest["overrides"].items()
        ),
    }
    pages = sorted((folder / "notebooks").glob(f"*_{run.notebook}_findings.ipynb"))
    where = (
        f"[the findings]({pages[0].name})" if pages else "[the ledger](../ledger.md)"
    )
    pools = store.pools(run.notebook, folder, read=records.runs.read_head)
    reference = REFERENCE.get(run.notebook, "")
    parts = {"pools": pools, "where": where, "reference": reference}
    return "\n" + page("badge", run=run, facts=facts, duration=duration, **parts)
