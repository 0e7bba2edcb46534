"""The audit: every derived number of the papers' tables, recomputed from the papers' own rows.

It knows relations and simple alternatives that explain what differs; it holds no list of errors.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, product

import numpy as np

from moebook.papers.printed import PAPERS, folder, number
from moebook.papers.relations import Cell, Check, Paper, agree, checks, stem, title
from moebook.results import formed

STATUSES = ("agrees", "rounding", "truncated", "differs")
NAMES = {"same": "same quantity", "mean": "average"}
COUNTED = ("count", "tokens", "parameters")  # units of sizes, which may well be alike
EXACT = 1e-9


@dataclass(frozen=True)
class Finding:
    """One recomputed number (or, of kind `name`, one doubtful name) of one paper."""

    paper: str
    place: str
    kind: str  # what was recomputed: average, sum, same quantity ...
    printed: str
    recomputed: str
    status: str  # one of STATUSES
    explanation: str  # the best one found, or how it was recomputed
    group: str  # its column or rule, by which the report folds


def judge(printed: float, decimals: int, computed: float, slack: float = 0.0) -> str:
    """Compare a printed number with its recomputation, which rounding can move by `slack`.

    ``agrees`` within half a unit of the last printed digit; ``truncated`` if cutting gives the
    printed number; ``rounding`` if the operands' own rounding can explain it; else ``differs``.
    """
    unit, gap = 10.0**-decimals, abs(printed - computed)
    if gap <= unit / 2 + EXACT:
        return "agrees"
    if 0 <= abs(computed) - abs(printed) < unit - EXACT and printed * computed >= 0:
        return "truncated"
    return "rounding" if gap <= unit / 2 + slack + EXACT else "differs"


def audit(paper: str | None = None) -> list[Finding]:
    """Recompute every derived number of one paper, or of all four."""
    every = list[Finding]()
    for name in [paper] if paper else PAPERS:
        with formed(folder(name)):
            every += _audit(Paper(name))
    return every


def _audit(paper: Paper) -> Iterator[Finding]:
    shared = _shared(everything := checks(paper))
    for check in everything:
        status = judge(check.value, check.decimals, check.computed, check.slack)
        weighting = shared.get(check.rule)
        if status != "agrees" and weighting and weighting.gives(check):
            status, text = "differs", f"agrees with {weighting.text}"
        elif status == "differs":
            reasons = _explanations(paper, check, everything, shared)
            text = next(reasons, "no simple alternative explains it")
        else:
            text = _source(check)
        digits = f"{check.computed:.{max(check.decimals, 0) + 2}f}".rstrip("0").rstrip(".")
        printed = (NAMES.get(check.kind, check.kind), check.printed, digits)
        yield Finding(paper.name, check.place, *printed, status, text, check.rule)
    yield from _copied(paper)


def _source(check: Check) -> str:
    if check.kind == "same":
        return f"as {check.operands[0].place}"
    names = [cell.column if check.target else cell.place for cell in check.operands]
    shown = names if len(names) <= 6 else [*names[:3], f"... {len(names)} numbers"]
    return f"{NAMES.get(check.kind, check.kind)} of {', '.join(shown)}"


def _fits(check: Check, value: float, slack: float = 0.0) -> bool:
    """Whether a value, rounded or cut to the printed decimals, is the printed number."""
    return judge(check.value, check.decimals, value, slack) != "differs"


@dataclass(frozen=True)
class Weighting:
    """Another way to a column's numbers: a mean whose weights are the same for every row."""

    text: str
    weights: np.ndarray
    slack: float = 0.0

    def gives(self, check: Check) -> bool:
        """Whether it gives the number that is printed."""
        return _fits(check, float(self.weights @ check.values), self.slack)


def _shared(everything: Sequence[Check]) -> dict[str, Weighting]:
    """What explains whole columns of means that do not agree, by rule."""
    columns, shared = defaultdict(list), {}
    for check in (check for check in everything if check.kind == "mean"):
        columns[check.rule].append(check)
    for rule, column in columns.items():
        odd = sum(not _fits(check, check.computed, check.slack) for check in column)
        if odd >= max(3, len(column) // 2) and (why := _subset(column) or _weights(column)):
            shared[rule] = why
    return shared


def _subset(column: Sequence[Check]) -> Weighting | None:
    """The mean of some operands that gives at least four fifths of a column's printed numbers."""
    names = [cell.column for cell in column[0].operands]
    places, given, best = range(len(names)), 0.8 * len(column) - 0.5, None
    for chosen in (chosen for size in places[2:] for chosen in combinations(places, size)):
        text = f"the mean of {', '.join(names[place] for place in chosen)} alone"
        weighting = Weighting(text, np.isin(places, chosen) / len(chosen))
        if (count := sum(map(weighting.gives, column))) > given:
            best, given = weighting, count
    return best


def _weights(column: Sequence[Check]) -> Weighting | None:
    """One set of weights for the whole column, by least squares with the weights adding up to 1."""
    values = np.array([check.values for check in column])
    printed = np.array([check.value for check in column])
    if len(column) < 2 * values.shape[1]:
        return None
    rest = np.linalg.lstsq(values[:, :-1] - values[:, -1:], printed - values[:, -1], rcond=None)[0]
    weights = np.append(rest, 1 - rest.sum())
    operands = column[0].operands
    parts = [f"{w:.2f} {cell.column}" for w, cell in zip(weights, operands, strict=True)]
    text = f"a weighted mean with the same weights in every row ({', '.join(parts)})"
    weighting = Weighting(text, weights, 0.5 * 10.0 ** -operands[0].decimals)
    return weighting if weights.min() >= 0 and all(map(weighting.gives, column)) else None


def _explanations(
    paper: Paper, check: Check, everything: Sequence[Check], shared: dict[str, Weighting]
) -> Iterator[str]:
    """Explanations of one differing number, best first; `shared` is what `_shared` found."""
    sides = {side.place for side in (check.target, *check.operands) if side}
    for other in everything:
        weighting = shared.get(other.rule)
        if weighting and other.place in sides and weighting.gives(other):
            yield f"{other.place} agrees with {weighting.text}"
    yield from _other_print(paper, check)
    yield from _misprint(check)
    for step in (5 * 10.0**-check.decimals, 10 * 10.0**-check.decimals):  # as texts round
        round_number = abs(check.value / step - round(check.value / step)) < EXACT
        if check.target is None and round_number and abs(check.value - check.computed) <= step / 2:
            yield f"agrees when rounded to {step:g}"


def _other_print(paper: Paper, check: Check) -> Iterator[str]:
    """Another table's print of an operand would do, or one table says more of its conditions."""
    if check.kind == "same" and check.target:
        one, other = check.target, check.operands[0]
        for cell, twin in ((one, other), (other, one)):
            for name in cell.keys.keys() - twin.keys.keys():
                said = f"{title(cell.table)} states {name} = {cell.keys[name]}"
                yield f"possibly other conditions: {said}, {title(twin.table)} does not"
        return
    for place, cell in enumerate(check.operands):
        for twin in paper.same((cell.row, cell.column), cell.keys):
            other_value = twin.table != cell.table and twin.value != cell.value
            if other_value and _fits(check, check.changed(place, twin.value)):
                there, here = (f"{it.printed} in {title(it.table)}" for it in (twin, cell))
                yield f"agrees with {there} for {cell.column} ({here})"


def _misprint(check: Check) -> Iterator[str]:
    """One operand with another digit, not its last, would do; more than two such say nothing."""
    if check.kind not in ("mean", "sum", "difference"):
        return
    fitting = []
    for place, cell in enumerate(check.operands):
        for i, digit in product(range(len(cell.printed) - 1), "0123456789"):
            turned = cell.printed[:i] + digit + cell.printed[i + 1 :]
            typed = number(turned) if cell.printed[i].isdigit() and turned != cell.printed else None
            if typed and _fits(check, check.changed(place, typed.value)):
                fitting.append(f"{cell.column} were {turned} (printed {cell.printed})")
    if 0 < len(fitting) <= 2:
        yield f"would agree if {' or '.join(fitting)}"


def _copied(paper: Paper) -> Iterator[Finding]:
    """Rows of two names that agree in every number they share: a row repeated, or a wrong name.

    In one table three numbers must agree; between two tables two of `_rivals`.
    """
    rows = {name: _rows(paper, name) for name in paper.headers}
    for one, other in [*((name, name) for name in rows), *combinations(rows, 2)]:
        inside, declared = one == other, paper.rules(other, same=True)
        pairs = combinations(rows[one], 2) if inside else product(rows[one], rows[other])
        for mine, theirs in pairs:
            name, rival = mine[0], theirs[0]
            if name == rival or not (inside or (rival not in declared and _rivals(name, rival))):
                continue
            cells, twins = rows[one][mine], rows[other][theirs]
            both = [n for n in cells if n in twins and agree(cells[n].keys, twins[n].keys)]
            if len(both) >= 2 + inside and all(cells[n].value == twins[n].value for n in both):
                cell, twin = cells[both[0]], twins[both[0]]
                text = f"all {len(both)} shared numbers equal those of {twin.row}"
                names = ("name", cell.row, twin.row, "differs", f"{text} in {title(twin.table)}")
                yield Finding(paper.name, cell.place, *names, cell.place)


def _rows(paper: Paper, table: str) -> dict[tuple[str, str], dict[str, Cell]]:
    """Results of a table by row with its keys, and by column; no sizes, nothing derived."""
    derived = paper.rules(table, same=False)
    rows: dict[tuple[str, str], dict[str, Cell]] = defaultdict(dict)
    for cell in paper.inside(table):
        if cell.unit not in COUNTED and stem(cell.column) not in derived:
            rows[stem(cell.row), str(cell.keys)][stem(cell.column)] = cell
    return rows


def _rivals(one: str, other: str) -> bool:
    """Whether both share a part and each has its own, as "2×1.8B_TRSU" and "4×1.8B_CRSU"."""
    ours, theirs = (set(re.findall(r"[a-z]+|\d+(?:\.\d+)?", name)) for name in (one, other))
    return bool(ours & theirs and ours - theirs and theirs - ours)


def report(findings: Sequence[Finding], *, everything: bool = False) -> str:
    """The audit as text: counts for each paper, then what differs (or everything), folded."""
    lines = []
    for paper, group in groupby(findings, key=lambda finding: finding.paper):
        of_paper, folded = list(group), defaultdict(list)
        counts = Counter(finding.status for finding in of_paper)
        counted = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
        lines.append(f"{paper}: {len(of_paper)} numbers recomputed: {counted}")
        for finding in of_paper:
            if everything or finding.status != "agrees":
                folded[finding.group, finding.status, finding.explanation].append(finding)
        for (_, status, explanation), (first, *rest) in folded.items():
            more = f" (and {len(rest)} more of this column)" if rest else ""
            numbers = f"printed {first.printed}, recomputed {first.recomputed}"
            place = f"{first.place}{more}: {first.kind}"
            lines.append(f"  {status:9} {place}: {numbers}; {explanation}")
    return "\n".join(lines)
