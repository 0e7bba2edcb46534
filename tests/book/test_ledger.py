"""The ledger follows the verdict: a changed value flips the badge, a lost record empties it."""

from __future__ import annotations

import inspect
import json
import pkgutil
from pathlib import Path

import pytest

from moebook import papers
from moebook.notebook import ledger, verdicts
from moebook.results import Record, Value

CLAIM = papers.claim("pesc.sparse-beats-dense")


def _record(sparse: float) -> Record:
    """A study of three seeds in which the dense arm is right half of the time."""
    values = []
    for seed in range(3):
        for arm, share in (("dense", 0.5), ("sparse", sparse)):
            right = round(200 * share) + seed
            items = tuple(float(place < right) for place in range(200))
            values.append(Value(f"pesc/{arm}/accuracy", sum(items) / 200, "share", seed, items))
    return Record("pesc", "study", tuple(values), {"date": "2026-01-02T03:04:05+00:00"})


def _html(records: list[Record], folder: Path) -> str:
    return ledger.ledger([verdicts.row(CLAIM, records)], ledger.Places(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "_config.yml").write_text("repository: {url: 'https://example.org/r', branch: b}")
    pages = tmp_path / "book" / "notebooks"
    pages.mkdir(parents=True)
    value = {"application/vnd.moebook.value+json": {"name": CLAIM.value, "value": 1, "unit": "x"}}
    cells = [
        {"cell_type": "markdown", "source": ["# PESC\n", "\n", "## Dense, against sparse?\n"]},
        {"cell_type": "code", "source": "1", "outputs": [{"data": value}]},
    ]
    (pages / "01_pesc.ipynb").write_text(json.dumps({"cells": cells}))
    return tmp_path


@pytest.mark.parametrize(
    ("sparse", "label", "kind"),
    [
        (0.8, "direction holds", "holds"),
        (0.2, "direction fails", "fails"),
        (0.5, "inconclusive", "inconclusive"),
    ],
)
def test_the_badge_follows_the_recorded_value(
    folder: Path, sparse: float, label: str, kind: str
) -> None:
    page = _html([_record(sparse)], folder)
    assert f'<span class="verdict {kind}">{label}</span>' in page
    assert f'data-verdict="{label}"' in page
    assert "study, 3 seeds" in page


def test_without_a_record_the_badge_says_not_run(folder: Path) -> None:
    page = _html([], folder)
    assert '<span class="verdict notrun">not run</span>' in page
    assert "seeds" not in page


def test_a_row_links_to_the_cell_and_to_the_code(folder: Path) -> None:
    module = folder / "moebook" / "methods" / "pesc"
    module.mkdir(parents=True)
    (module / "crafting.py").write_text("\n\ndef craft(model):\n    pass\n")
    page = _html([], folder)
    assert 'href="notebooks/01_pesc.html#dense-against-sparse"' in page
    assert 'href="https://example.org/r/b/' not in page
    (folder / "book" / "notebooks" / "01_pesc-study.ipynb").write_text('{"cells": []}')
    assert 'href="notebooks/01_pesc-study.html#dense-against-sparse"' in _html(
        [_record(0.8)], folder
    )
    assert 'href="https://example.org/r/blob/b/moebook/methods/pesc/crafting.py#L3"' in page


@pytest.mark.parametrize("name", sorted({claim.function for claim in papers.claims()}))
def test_a_claims_code_link_leads_to_the_function_that_python_finds_there(name: str) -> None:
    root = Path(__file__).parents[2]
    found = inspect.unwrap(pkgutil.resolve_name(name))
    file = Path(inspect.getsourcefile(found) or "").relative_to(root).as_posix()
    claim = next(claim for claim in papers.claims() if claim.function == name)
    assert (ledger.Places(root)._code(claim) or "").partition("#")[0].endswith(f"/{file}")


def test_the_summary_counts_every_claim_once(folder: Path) -> None:
    rows = [verdicts.row(claim, []) for claim in papers.claims()]
    page = ledger.summary(rows)
    for paper in papers.PAPERS:
        count = len(papers.claims(paper))
        assert f'verdict=not+run">{count}</a>' in page


def test_every_label_has_a_badge_of_its_own() -> None:
    assert set(ledger.KINDS) == set(verdicts.LABELS)
    assert len(set(ledger.KINDS.values())) == len(verdicts.LABELS)
