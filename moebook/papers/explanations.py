"""Why a recomputed number may differ from the printed one: simple alternatives, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from statistics import fmean

import numpy as np

from moebook.papers.cells import Paper, stem, title
from moebook.papers.printed import number
from moebook.papers.relations import FUNCTIONS, Check

EXACT = 1e-9


@dataclass(frozen=True)
class Alternative:
    """Another way to get a column's printed numbers, and the test whether it gives one of them."""

    text: str
    gives: Callable[[Check], bool]


Common = dict[str, Alternative]


def fits(check: Check, value: float, slack: float = 0.0) -> bool:
    """Whether a value, rounded or cut to the printed decimals, is the printed number."""
    unit = 10.0**-check.decimals
    cut = 0 <= abs(value) - abs(check.value) < unit - EXACT
    return cut or abs(value - check.value) <= unit / 2 + slack + EXACT


def common(checks: Sequence[Check]) -> Common:
    """Alternatives that explain a whole column: the mean of a subset, or one fixed weighting.

    Args:
        checks: All checks of the paper.

    Returns:
        For each rule that has one: what it is in words, and the test whether it explains a check.
    """
    found = {}
    for rule in dict.fromkeys(check.rule for check in checks if check.kind == "mean"):
        column = [check for check in checks if check.rule == rule]
        odd = sum(not fits(check, check.computed, check.slack) for check in column)
        alternative = _subset(column) or _weights(column)
        if odd >= max(3, len(column) // 2) and alternative:
            found[rule] = alternative
    return found


def _subset(column: Sequence[Check]) -> Alternative | None:
    count = len(column[0].operands)
    places = [places for size in range(2, count) for places in combinations(range(count), size)]
    best = max(places, key=lambda chosen: sum(_of(check, chosen) for check in column), default=())
    if not best or sum(_of(check, best) for check in column) < 0.8 * len(column):
        return None
    names = ", ".join(column[0].operands[i].column for i in best)
    return Alternative(f"the mean of {names} alone", lambda check: _of(check, best))


def _of(check: Check, chosen: Sequence[int]) -> bool:
    return fits(check, fmean(check.operands[i].value for i in chosen))


def _weights(column: Sequence[Check]) -> Alternative | None:
    """One set of weights for the whole column, by least squares with the weights adding up to 1."""
    values = np.array([[cell.value for cell in check.operands] for check in column])
    printed = np.array([check.value for check in column])
    if len(column) < 2 * values.shape[1]:
        return None
    rest = np.linalg.lstsq(values[:, :-1] - values[:, -1:], printed - values[:, -1], rcond=None)[0]
    weights = np.append(rest, 1 - rest.sum())
    slack = 0.5 * 10.0 ** -column[0].operands[0].decimals

    def explains(check: Check) -> bool:
        return fits(check, float(weights @ [cell.value for cell in check.operands]), slack)

    if weights.min() < 0 or not all(map(explains, column)):
        return None
    parts = ", ".join(
        f"{w:.2f} {cell.column}" for w, cell in zip(weights, column[0].operands, strict=True)
    )
    return Alternative(f"a weighted mean, the same for every row ({parts})", explains)


def alternatives(
    paper: Paper, check: Check, checks: Sequence[Check], shared: Common
) -> Iterator[str]:
    """Explanations of one differing number, best first; `shared` is what `common` found."""
    yield from _whole_column(check, checks, shared)
    yield from _other_print(paper, check)
    yield from _neighbour(check, checks)
    yield from _left_out(check)
    yield from _elsewhere(paper, check)
    yield from _swapped(check)
    yield from _misprint(check)
    yield from _coarser(check)
    yield from _conditions(check)


def _whole_column(check: Check, checks: Sequence[Check], shared: Common) -> Iterator[str]:
    sides = {side.place for side in (check.target, *check.operands) if side}
    for other in checks:
        alternative = shared.get(other.rule)
        if alternative and other.place in sides and alternative.gives(other):
            yield f"{other.place} agrees with {alternative.text}"


def _other_print(paper: Paper, check: Check) -> Iterator[str]:
    if check.kind == "same" and check.target:
        return
    values = [cell.value for cell in check.operands]
    for i, cell in enumerate(check.operands):
        for twin in paper.same(cell.row, cell.column, cell.keys):
            changed = float(FUNCTIONS[check.kind]([*values[:i], twin.value, *values[i + 1 :]]))
            if twin.table != cell.table and twin.value != cell.value and fits(check, changed):
                there, here = (f"{it.printed} in {title(it.table)}" for it in (twin, cell))
                yield f"agrees with {there} for {cell.column} ({here})"


def _neighbour(check: Check, checks: Sequence[Check]) -> Iterator[str]:
    for other in checks if check.kind != "same" else ():
        apart = abs(other.computed - check.computed) > EXACT
        if other.rule == check.rule and other.target and apart and fits(check, other.computed):
            yield f"the number of another row, {other.target.row}"


def _left_out(check: Check) -> Iterator[str]:
    if check.kind != "mean" or len(check.operands) < 3:
        return
    for i, cell in enumerate(check.operands):
        if fits(check, fmean(o.value for j, o in enumerate(check.operands) if j != i)):
            yield f"the mean without {cell.column if check.target else cell.place}"


def _elsewhere(paper: Paper, check: Check) -> Iterator[str]:
    if check.kind != "same" or check.target is None:
        return
    for side in (check.target, check.operands[0]):
        for cell in paper.cells:
            twin = cell.sound and cell.value == side.value and cell.decimals == side.decimals
            if twin and stem(cell.column) == stem(side.column) and stem(cell.row) != stem(side.row):
                yield f"{side.printed} also stands at {cell.place}"


def _swapped(check: Check) -> Iterator[str]:
    digits = check.printed
    for i in range(len(digits) - 1):
        turned = digits[:i] + digits[i + 1] + digits[i] + digits[i + 2 :]
        typed = number(turned)
        near = typed and abs(typed.value - check.computed) <= 0.5 * 10.0**-check.decimals + EXACT
        if near and turned != digits:
            yield f"two digits changed places: {turned}"


def _misprint(check: Check) -> Iterator[str]:
    """One operand with another digit, not its last, would do; more than two such say nothing."""
    if check.kind not in ("mean", "sum", "difference"):
        return
    found = []
    for i, cell in enumerate(check.operands):
        for place, digit in product(range(len(cell.printed) - 1), "0123456789"):
            turned = cell.printed[:place] + digit + cell.printed[place + 1 :]
            typed = number(turned) if cell.printed[place].isdigit() else None
            values = [other.value for other in check.operands]
            values[i] = typed.value if typed else cell.value
            if turned != cell.printed and typed and fits(check, FUNCTIONS[check.kind](values)):
                found.append(f"{cell.column} were {turned} (printed {cell.printed})")
    if 0 < len(found) <= 2:
        yield f"would agree if {' or '.join(found)}"


def _coarser(check: Check) -> Iterator[str]:
    """Running text often gives round numbers."""
    for step in (5 * 10.0**-check.decimals, 10 * 10.0**-check.decimals):
        round_number = abs(check.value / step - round(check.value / step)) < EXACT
        if check.target is None and round_number and abs(check.value - check.computed) <= step / 2:
            yield f"agrees when rounded to {step:g}"


def _conditions(check: Check) -> Iterator[str]:
    if check.kind != "same" or check.target is None:
        return
    for one, other in ((check.target, check.operands[0]), (check.operands[0], check.target)):
        for name in one.keys.keys() - other.keys.keys():
            said = f"{title(one.table)} says {name} = {one.keys[name]}"
            yield f"perhaps under other conditions: {said}, {title(other.table)} does not say"
