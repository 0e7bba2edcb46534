"""The audit: every derived number of the papers' tables, recomputed from the papers' own rows.

It knows relations (a column named Average, a difference stated in the text, the same quantity in
two tables, rows of rival names with the same numbers) and simple alternatives. It holds no list of
errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from moebook.papers.cells import Paper, load, title
from moebook.papers.coincidences import renamed, repeated
from moebook.papers.explanations import EXACT, alternatives, common
from moebook.papers.printed import PAPERS, folder
from moebook.papers.relations import Check, derived, stated

STATUSES = ("agrees", "rounding", "truncated", "differs")
NAMES = {"same": "same quantity", "mean": "average"}


@dataclass(frozen=True)
class Finding:
    """One recomputed number of one paper.

    Attributes:
        paper: Short name of the paper.
        place: Where the printed number stands.
        kind: What was recomputed: average, sum, difference, same quantity, name, ...
        printed: The number as printed (for `name`, the name).
        recomputed: The number from the paper's own operands, as text.
        status: One of `STATUSES`.
        explanation: The best explanation found, or how the number was recomputed.
        group: Findings of one column or rule share it (the report folds them).
    """

    paper: str
    place: str
    kind: str
    printed: str
    recomputed: str
    status: str
    explanation: str
    group: str


def judge(printed: float, decimals: int, computed: float, slack: float = 0.0) -> str:
    """Compare a printed number with its recomputation.

    Args:
        printed: The printed number.
        decimals: Its printed decimals.
        computed: The recomputed number.
        slack: How far the rounding of the operands can move it.

    Returns:
        ``agrees`` within half a unit of the last printed digit; ``truncated`` if cutting gives the
        printed number; ``rounding`` if the operands' own rounding can explain it; else ``differs``.
    """
    unit = 10.0**-decimals
    gap = abs(printed - computed)
    if gap <= unit / 2 + EXACT:
        return "agrees"
    if 0 <= abs(computed) - abs(printed) < unit - EXACT and printed * computed >= 0:
        return "truncated"
    return "rounding" if gap <= unit / 2 + slack + EXACT else "differs"


def audit(paper: str | None = None) -> list[Finding]:
    """Recompute every derived number of one paper, or of all four.

    Raises:
        Refusal: E-NAME for an unknown paper; E-FORMAT for malformed data.
    """
    names = [folder(paper).name] if paper else PAPERS
    return [finding for name in names for finding in _audit(load(name))]


def _audit(paper: Paper) -> Iterator[Finding]:
    checks = [*derived(paper), *stated(paper), *repeated(paper)]
    shared = common(checks)
    for check in checks:
        status = judge(check.value, check.decimals, check.computed, check.slack)
        alternative = shared.get(check.rule)
        if status != "agrees" and alternative and alternative.gives(check):
            status, text = "differs", f"agrees with {alternative.text}"
        elif status == "differs":
            text = next(
                alternatives(paper, check, checks, shared), "no simple alternative explains it"
            )
        else:
            text = _source(check)
        yield _finding(paper, check, status, text)
    for cell, twin, count in renamed(paper):
        text = f"all {count} shared numbers are those of {twin.row} in {title(twin.table)}"
        yield Finding(
            paper.name, cell.place, "name", cell.row, twin.row, "differs", text, cell.place
        )


def _finding(paper: Paper, check: Check, status: str, text: str) -> Finding:
    recomputed = f"{check.computed:.{max(check.decimals, 0) + 2}f}".rstrip("0").rstrip(".")
    kind = NAMES.get(check.kind, check.kind)
    return Finding(
        paper.name, check.place, kind, check.printed, recomputed, status, text, check.rule
    )


def _source(check: Check) -> str:
    if check.kind == "same":
        return f"as {check.operands[0].place}"
    names = [cell.place if check.target is None else cell.column for cell in check.operands]
    shown = names if len(names) <= 6 else [*names[:3], f"... {len(names)} numbers"]
    return f"{NAMES.get(check.kind, check.kind)} of {', '.join(shown)}"


def report(findings: Sequence[Finding], *, everything: bool = False) -> str:
    """The audit as text: counts for each paper, then what does not agree, equal lines folded.

    Args:
        findings: From `audit`, in its order.
        everything: Show the numbers that agree too.
    """
    lines = []
    for paper, group in groupby(findings, key=lambda finding: finding.paper):
        found = list(group)
        counts = Counter(finding.status for finding in found)
        lines.append(f"{paper}: {len(found)} numbers recomputed: " + _counts(counts))
        shown = [finding for finding in found if everything or finding.status != "agrees"]
        lines.extend(_folded(shown))
    return "\n".join(lines)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES)


def _folded(findings: Sequence[Finding]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.group, finding.status, finding.explanation), []).append(finding)
    for (_, status, explanation), found in groups.items():
        first = found[0]
        more = f" (and {len(found) - 1} more of this column)" if len(found) > 1 else ""
        numbers = f"printed {first.printed}, recomputed {first.recomputed}"
        yield f"  {status:9} {first.place}{more}: {first.kind}: {numbers}; {explanation}"
