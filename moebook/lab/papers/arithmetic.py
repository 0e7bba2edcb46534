"""The audit: every derived number of the papers' tables, recomputed from their rows.

It knows relations and simple alternatives that explain what differs; it holds no list
of errors.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, product

import numpy as np

from moebook.lab.papers.printed import PAPERS, folder, number
from moebook.lab.papers.relations import Cell, Check, Paper, agree, checks, stem, title
from moebook.storage import formed

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
    """Compare a printed number with its recomputation, which rounding moves by `slack`.

    ``agrees`` within half a unit of the last printed digit; ``truncated`` if cutting
    gives the printed number; ``rounding`` if the operands' own rounding can explain it;
    else ``differs``.
    """
    unit = 10.0**-decimals
    gap = abs(printed - computed)
    if gap <= unit / 2 + EXACT:
        return "agrees"
    same_sign = printed * computed >= 0
    if same_sign and 0 <= abs(computed) - abs(printed) < unit - EXACT:
        return "truncated"
    if gap <= unit / 2 + slack + EXACT:
        return "rounding"
    return "differs"


def audit(paper: str | None = None) -> list[Finding]:
    """Recompute every derived number of one paper, or of all four."""
    findings: list[Finding] = []
    for name in [paper] if paper else PAPERS:
        with formed(folder(name)):
            findings += _audit(Paper(name))
    return findings


def _audit(paper: Paper) -> Iterator[Finding]:
    everything = checks(paper)
    shared = _shared(everything)
    for check in everything:
        status = judge(check.value, check.decimals, check.computed, check.slack)
        weighting = shared.get(check.rule)
        if status != "agrees" and weighting and weighting.gives(check):
            status = "differs"
            text = f"agrees with {weighting.text}"
        elif status == "differs":
            reasons = _explanations(paper, check, everything, shared)
            text = next(reasons, "no simple alternative explains it")
        else:
            text = _source(check)
        digits = f"{check.computed:.{max(check.decimals, 0) + 2}f}"
        yield Finding(
            paper=paper.name,
            place=check.place,
            kind=NAMES.get(check.kind, check.kind),
            printed=check.printed,
            recomputed=digits.rstrip("0").rstrip("."),
            status=status,
            explanation=text,
            group=check.rule,
        )
    yield from _copied(paper)


def _source(check: Check) -> str:
    if check.kind == "same":
        return f"as {check.operands[0].place}"
    names = [cell.column if check.target else cell.place for cell in check.operands]
    shown = names if len(names) <= 6 else [*names[:3], f"... {len(names)} numbers"]
    return f"{NAMES.get(check.kind, check.kind)} of {', '.join(shown)}"


def _fits(check: Check, value: float, slack: float = 0.0) -> bool:
    """Whether a value, rounded or cut to the decimals, is the printed number."""
    return judge(check.value, check.decimals, value, slack) != "differs"


@dataclass(frozen=True)
class Weighting:
    """Another way to a column's numbers: a mean with the same weights in every row."""

    text: str
    weights: np.ndarray
    slack: float = 0.0

    def gives(self, check: Check) -> bool:
        """Whether it gives the number that is printed."""
        return _fits(check, float(self.weights @ check.values), self.slack)


def _shared(everything: Sequence[Check]) -> dict[str, Weighting]:
    """What explains whole columns of means that do not agree, by rule."""
    columns = defaultdict(list)
    for check in everything:
        if check.kind == "mean":
            columns[check.rule].append(check)
    shared = {}
    for rule, column in columns.items():
        odd = sum(not _fits(check, check.computed, check.slack) for check in column)
        if odd >= max(3, len(column) // 2):
            weighting = _subset(column) or _weights(column)
            if weighting:
                shared[rule] = weighting
    return shared


def _subset(column: Sequence[Check]) -> Weighting | None:
    """The mean of some operands that gives four fifths of a column's numbers."""
    names = [cell.column for cell in column[0].operands]
    places = range(len(names))
    most = 0.8 * len(column) - 0.5
    best = None
    for size in places[2:]:
        for chosen in combinations(places, size):
            alone = ", ".join(names[place] for place in chosen)
            weights = np.isin(places, chosen) / size
            weighting = Weighting(f"the mean of {alone} alone", weights)
            count = sum(map(weighting.gives, column))
            if count > most:
                best = weighting
                most = count
    return best


def _weights(column: Sequence[Check]) -> Weighting | None:
    """One set of weights for a whole column, by least squares; they add up to 1."""
    values = np.array([check.values for check in column])  # rows by operands
    printed = np.array([check.value for check in column])
    if len(column) < 2 * values.shape[1]:
        return None
    # The last weight is what the others leave of 1.
    gaps = values[:, :-1] - values[:, -1:]
    rest = np.linalg.lstsq(gaps, printed - values[:, -1], rcond=None)[0]
    weights = np.append(rest, 1 - rest.sum())
    if weights.min() < 0:
        return None
    operands = column[0].operands
    parts = []
    for weight, cell in zip(weights, operands, strict=True):
        parts.append(f"{weight:.2f} {cell.column}")
    same = f"the same weights in every row ({', '.join(parts)})"
    slack = 0.5 * 10.0 ** -operands[0].decimals
    weighting = Weighting(f"a weighted mean with {same}", weights, slack)
    return weighting if all(map(weighting.gives, column)) else None


def _explanations(
    paper: Paper,
    check: Check,
    everything: Sequence[Check],
    shared: dict[str, Weighting],
) -> Iterator[str]:
    """Explanations of one differing number, best first; `shared` is from `_shared`."""
    sides = {side.place for side in (check.target, *check.operands) if side}
    for other in everything:
        weighting = shared.get(other.rule)
        if weighting and other.place in sides and weighting.gives(other):
            yield f"{other.place} agrees with {weighting.text}"
    yield from _other_print(paper, check)
    yield from _misprint(check)
    if check.target is None:  # texts round to fives of the last digit
        step = 5 * 10.0**-check.decimals
        steps = check.value / step
        rounded = abs(steps - round(steps)) < EXACT
        if rounded and abs(check.value - check.computed) <= step / 2:
            yield f"agrees when rounded to {step:g}"


def _other_print(paper: Paper, check: Check) -> Iterator[str]:
    """Another table's print would do, or one table says more of its conditions."""
    if check.kind == "same" and check.target:
        here = check.target
        there = check.operands[0]
        for cell, twin in ((here, there), (there, here)):
            for name in cell.keys.keys() - twin.keys.keys():
                states = f"{title(cell.table)} states {name} = {cell.keys[name]}"
                lacks = f"{title(twin.table)} does not"
                yield f"possibly other conditions: {states}, {lacks}"
        return
    for place, cell in enumerate(check.operands):
        for twin in paper.same((cell.row, cell.column), cell.keys):
            if twin.table == cell.table or twin.value == cell.value:
                continue
            if _fits(check, check.changed(place, twin.value)):
                other = f"{twin.printed} in {title(twin.table)}"
                own = f"{cell.printed} in {title(cell.table)}"
                yield f"agrees with {other} for {cell.column} ({own})"


def _misprint(check: Check) -> Iterator[str]:
    """One operand with another digit would do; more than two such say nothing."""
    if check.kind not in ("mean", "sum", "difference"):
        return
    fitting = []
    for place, cell in enumerate(check.operands):
        for turned in _turned(cell.printed):
            typed = number(turned)
            if typed and _fits(check, check.changed(place, typed.value)):
                fitting.append(f"{cell.column} were {turned} (printed {cell.printed})")
    if 0 < len(fitting) <= 2:
        yield f"would agree if {' or '.join(fitting)}"


def _turned(printed: str) -> Iterator[str]:
    """A printed number with each of its digits but the last turned into each other."""
    places = [place for place, sign in enumerate(printed) if sign.isdigit()]
    for place in places[:-1]:
        for digit in "0123456789".replace(printed[place], ""):
            yield printed[:place] + digit + printed[place + 1 :]


def _copied(paper: Paper) -> Iterator[Finding]:
    """Rows of two names that agree in every number they share: repeated, or misnamed.

    In one table three numbers must agree; between two tables two of `_rivals`.
    """
    tables = {name: _rows(paper, name) for name in paper.headers}
    for rows in tables.values():
        for mine, theirs in combinations(rows, 2):
            if mine[0] != theirs[0]:
                yield from _repeated(paper, rows[mine], rows[theirs], fewest=3)
    for here, there in combinations(tables, 2):
        declared = paper.rules(there, same=True)
        for mine, theirs in product(tables[here], tables[there]):
            if theirs[0] not in declared and _rivals(mine[0], theirs[0]):
                cells = tables[here][mine]
                yield from _repeated(paper, cells, tables[there][theirs], fewest=2)


def _repeated(
    paper: Paper, cells: dict[str, Cell], twins: dict[str, Cell], *, fewest: int
) -> Iterator[Finding]:
    """Report two rows that share so many numbers and agree in all of them."""
    shared = _shared_cells(cells, twins)
    alike = all(cell.value == twin.value for cell, twin in shared)
    if len(shared) < fewest or not alike:
        return
    cell, twin = shared[0]
    numbers = f"all {len(shared)} shared numbers equal those of {twin.row}"
    yield Finding(
        paper=paper.name,
        place=cell.place,
        kind="name",
        printed=cell.row,
        recomputed=twin.row,
        status="differs",
        explanation=f"{numbers} in {title(twin.table)}",
        group=cell.place,
    )


Key = tuple[str, str]  # a row's name, and its keys


def _shared_cells(
    cells: dict[str, Cell], twins: dict[str, Cell]
) -> list[tuple[Cell, Cell]]:
    """The cells of two rows that stand in one column and say nothing else of it."""
    shared = []
    for column, cell in cells.items():
        twin = twins.get(column)
        if twin and agree(cell.keys, twin.keys):
            shared.append((cell, twin))
    return shared


def _rows(paper: Paper, table: str) -> dict[Key, dict[str, Cell]]:
    """Results of a table by row with keys, and by column; no sizes, nothing derived."""
    derived = paper.rules(table, same=False)
    rows: dict[Key, dict[str, Cell]] = defaultdict(dict)
    for cell in paper.inside(table):
        if cell.unit not in COUNTED and stem(cell.column) not in derived:
            rows[stem(cell.row), str(cell.keys)][stem(cell.column)] = cell
    return rows


def _rivals(one: str, other: str) -> bool:
    """Whether both share a part and each has its own: "2×1.8B_TRSU", "4×1.8B_SU"."""
    ours = _parts(one)
    theirs = _parts(other)
    return bool(ours & theirs and ours - theirs and theirs - ours)


def _parts(name: str) -> set[str]:
    """Words and numbers of a name."""
    return set(re.findall(r"[a-z]+|\d+(?:\.\d+)?", name))


def report(findings: Sequence[Finding], *, everything: bool = False) -> str:
    """The audit as text: counts by paper, then what differs (or everything), folded."""
    lines = []
    for paper, group in groupby(findings, key=lambda finding: finding.paper):
        of_paper = list(group)
        recomputed = [finding for finding in of_paper if finding.kind != "name"]
        counts = Counter(finding.status for finding in recomputed)
        counted = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
        names = len(of_paper) - len(recomputed)
        if names:
            counted += f", {names} doubtful name{'s' if names > 1 else ''}"
        lines.append(f"{paper}: {len(recomputed)} numbers recomputed: {counted}")
        folded = defaultdict(list)
        for finding in of_paper:
            if everything or finding.status != "agrees":
                key = (finding.group, finding.status, finding.explanation)
                folded[key].append(finding)
        for (_, status, explanation), (first, *rest) in folded.items():
            more = f" (and {len(rest)} more of this column)" if rest else ""
            numbers = f"printed {first.printed}, recomputed {first.recomputed}"
            place = f"{first.place}{more}: {first.kind}"
            lines.append(f"  {status:9} {place}: {numbers}; {explanation}")
    return "\n".join(lines)
