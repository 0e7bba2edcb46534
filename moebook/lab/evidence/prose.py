"""Prose whose numbers, and whose words that depend on numbers, come from pools.

Pages of findings, the front page and the heads of protocols are written by hand. What a run can
change stands between braces and is filled when the book is built:

- ``{effect}``: a number with its interval at 95 %, as in +1.3 points (−0.9 to +3.5);
- ``{size of effect}``: the number without sign and interval; ``{percent of effect}`` as per cent,
  where it is a share, a ratio or a number without a unit;
- ``{value of effect}``, ``{other of effect}``: the two means that are compared;
- ``{interval of effect}``, ``{seeds of effect}``: these alone;
- ``{paper of effect}``: what the paper prints; ``{status of effect}``: whether a study that named
  the claim before it ran decides it ("planned") or not ("exploratory"): no study is needed to
  decide what is computed, and none has planned a claim that was written after it;
- ``{beats | loses to | cannot be told from: effect}``: a word by where the interval lies, above
  zero, below it, or across.

An effect is ``a less b`` (two recorded values; a number or ``b and c``, whose mean is meant, may
stand for b), or ``a`` alone, ``in notebook/protocol`` (or ``in protocol``) ``of 3-5`` (seeds); or
it is a claim at a scale, ``pesc.gain-code at 1 M``, which is read from the pool that the ledger
shows; what is computed is one number there, without an interval. ``over all studies`` takes all
committed pools of the scale together, ``without kinship`` the mean over the other tasks of that one
pool; neither has the two means, nor are both asked. And ``against the paper`` takes what the paper
prints off. A page may give effects names in its first lines, ``name: effect`` between two lines of
three hyphens.

A reading that is not written, because the sentence would then be false, stops the build and names
file and sentence (E-PROSE).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

import numpy as np

from moebook import lists
from moebook.errors import located, nearest, refuse
from moebook.intervals import interval, place
from moebook.lab import records
from moebook.lab.evidence.verdicts import Row, quantity
from moebook.lab.records import store
from moebook.lab.records.store import Pool
from moebook.lab.run import sources

PLACE = "book/found"  # of the pages whose prose is filled
# Braces that no back quote follows or precedes: those are roles and directives of MyST.
_BRACES = re.compile(r"(?<![`:\w\\])\{([^{}]+)\}(?!`)")
_RECORDED = re.compile(
    r"(?P<name>\S+)"
    r"(?: less (?P<other>\S+(?: and \S+)*))?"
    r"(?: in (?P<pool>[\w/]+))?"
    r"(?: of (?P<seeds>[\d,-]+))?"
)
_CLAIMED = re.compile(
    r"(?P<claim>\w+\.[\w-]+) at (?P<scale>.+?)"
    r"(?P<all> over all studies)?( without (?P<task>\w+))?(?P<less> against the paper)?"
)
_ASPECT = re.compile(r"(\w+) of (.+)")


@dataclass(frozen=True)
class Effect:
    """What was measured of a value, or of a value less another, over seeds and test items."""

    text: str  # as the page says it
    effects: np.ndarray = field(repr=False)  # [S, I]
    unit: str
    compared: bool
    # Of the value and of what it is compared with; none of several pools or a part of one.
    means: tuple[float, ...]
    printed: float | None = None  # what the paper prints
    status: str | None = None  # of a claim: planned or exploratory

    @property
    def mean(self) -> float:
        """Mean over seeds and items."""
        return float(self.effects.mean())

    @property
    def ends(self) -> tuple[float, float] | None:
        """Interval at 95 %; None where nothing varies."""
        ends = interval(self.effects)
        return ends if ends and ends[0] < ends[1] else None

    @property
    def place(self) -> int:
        """Where the interval lies: 0 above zero, 1 below, 2 across it."""
        return place(self.effects)

    def number(self, number: float, *, compared: bool | None = None) -> str:
        """Write a number in its unit."""
        if compared is None:
            compared = self.compared
        if self.unit in ("share", "percent_points", "count"):
            return quantity(number, self.unit, compared=compared)
        unit = self.unit
        if unit == "bytes":
            number = number / 1e6
            unit = "MB"
        sign = "+" if compared else ""
        # A whole number, or two digits, the zero of 1.0 too: as a decimal without exponent.
        if abs(number) >= 99.5:
            text = f"{number:{sign},.0f}"
        else:
            text = f"{Decimal(f'{number:.1e}'):{sign}f}"
        if unit not in ("ratio", "number", "correlation"):
            text = f"{text} {unit}"
        return records.minus(text)

    def __str__(self) -> str:
        """Write the number and, in brackets, its interval."""
        return self.number(self.mean) + (f" ({self.span})" if self.ends else "")

    @property
    def span(self) -> str | None:
        """The ends of the interval, cut where its unit ends; None where nothing varies."""
        if not self.ends:
            return None
        ends = records.within(self.unit, self.ends, is_difference=self.compared)
        return " to ".join(self.number(end).partition(" ")[0] for end in ends)

    def said(self, aspect: str) -> str | None:
        """Write one of its aspects; None for a word that is none."""
        if aspect == "size":
            return self.number(abs(self.mean)).lstrip("+")
        if aspect == "percent" and self.unit in ("share", "ratio", "number"):
            return f"{100 * abs(self.mean):.0f} %"
        if aspect == "value" and self.means:
            return self.number(self.means[0], compared=False)
        if aspect == "other" and len(self.means) > 1:
            return self.number(self.means[1], compared=False)
        if aspect == "interval":
            return self.span
        if aspect == "status":
            return self.status
        if aspect == "seeds":
            return str(len(self.effects))
        if aspect == "paper" and self.printed is not None:
            return self.number(self.printed)
        return None


@dataclass(frozen=True)
class Evidence:
    """Where effects are looked up: the pools of notebooks, and the ledger's claims."""

    pools: Mapping[str, Mapping[str, Pool]]  # by notebook and protocol
    rows: Sequence[Row] = ()
    home: str = ""  # notebook/protocol of effects that name no pool
    # Effects that were looked up, by their text.
    _found: dict[str, Effect] = field(default_factory=dict, init=False, repr=False)

    def effect(self, text: str, where: str) -> Effect:
        """Find an effect, once, or refuse with the place that names it (E-PROSE)."""
        if text not in self._found:
            self._found[text] = self._looked_up(text, where)
        return self._found[text]

    def _looked_up(self, text: str, where: str) -> Effect:
        match = _CLAIMED.fullmatch(text)
        if match:
            return self._claimed(text, match, where)
        match = _RECORDED.fullmatch(text)
        if match is None:
            refuse(
                "E-PROSE",
                f"{where}: '{text}' is no effect; see moebook.lab.evidence.prose",
            )
        pool = self._pool(match["pool"] or self.home, where)
        other = match["other"]
        with located(where):
            less = None if other is None else reference(other)
        seeds = match["seeds"]
        asked = lists.seeds(f"{where}: seeds", seeds) if seeds else []
        return _measured(text, pool, match["name"], less, where, asked=asked)

    def _pool(self, name: str, where: str) -> Pool:
        """Return the pool ``notebook/protocol``, or of the home's notebook ``protocol``."""
        if "/" not in name:
            name = f"{self.home.partition('/')[0]}/{name}"
        notebook, _, protocol = name.partition("/")
        pool = self.pools.get(notebook, {}).get(protocol)
        if pool is None:
            refuse("E-POOL", f"{where}: no pool {name} on record")
        return pool

    def _claimed(self, text: str, match: re.Match[str], where: str) -> Effect:
        """Find a claim's effect at a scale, in the pool that the ledger shows for it."""
        rows = {row.claim.id: row for row in self.rows}
        name = match["claim"]
        scale = match["scale"]
        if name not in rows:
            refuse("E-PROSE", f"{where}: no claim '{name}'; {nearest(name, rows)}")
        claim = rows[name].claim
        verdict = rows[name].at(scale)
        if verdict is None:
            refuse("E-PROSE", f"{where}: {name} was not measured at {scale}")
        shown = verdict.shown
        found = _measured(
            text, shown.pool, claim.value, claim.reference, where, exact=shown.exact
        )
        # What is computed is decided without a head that names it.
        planned = verdict.deciding and not verdict.late and not shown.exact
        status = "planned" if planned else "exploratory"
        found = replace(found, printed=claim.claimed, status=status)
        task = match["task"]
        if match["all"] and task:
            refuse(
                "E-PROSE", f"{where}: '{text}' asks for all studies and for a task less"
            )
        # What is put together has other means than the pool.
        if match["all"] and verdict.together:
            every = verdict.together.effects
            found = replace(found, effects=every, means=(), status="exploratory")
        if task:
            effects = _others(shown.parts, task, where)
            if shown.exact:
                effects = _alone(effects)
            found = replace(found, effects=effects, means=())
        if not match["less"]:
            return found
        if claim.claimed is None:
            refuse("E-PROSE", f"{where}: the paper prints no number for {name}")
        return replace(found, effects=found.effects - claim.claimed)


def _measured(
    text: str,
    pool: Pool,
    name: str,
    less: store.Reference,
    where: str,
    *,
    asked: Sequence[int] = (),
    exact: bool = False,
) -> Effect:
    """Measure an effect in a pool, of the seeds ``asked`` for, by default of all.

    What is ``exact``, or of published files, is computed: it is one number, the mean over seeds,
    as in the ledger. What the pool does not have is refused (E-POOL), and so are values of
    two units and a seed that is missing (E-PROSE).
    """
    pooled = f"the pool of {pool.notebook}/{pool.protocol}"
    if asked:
        pool = pool.of_seeds(asked)
    effects = pool.effects(name, less)
    if not len(effects):
        refuse("E-POOL", f"{where}: {pooled} has no {text}")
    others = less if isinstance(less, tuple) else (less,)
    names = [name, *(other for other in others if isinstance(other, str))]
    units = {value.unit for each in names for value in pool.values(each).values()}
    if len(units) > 1:
        both = " and ".join(sorted(units))
        refuse("E-PROSE", f"{where}: '{text}' compares {both}; expected one unit")
    seeds = sorted(pool.having(*names))
    lacking = ", ".join(str(seed) for seed in asked if seed not in seeds)
    if lacking:
        refuse("E-PROSE", f"{where}: {pooled} lacks seeds {lacking} of '{text}'")

    if exact or pool.published:
        effects = _alone(effects)
    means: list[float] = []
    for each in [name, less] if isinstance(less, str) else [name]:
        by_seed = pool.values(each)
        means.append(float(np.mean([by_seed[seed].value for seed in seeds])))
    return Effect(text, effects, units.pop(), less is not None, tuple(means))


def _alone(effects: np.ndarray) -> np.ndarray:
    """Return what is computed as one number, ``[1, 1]``, of which there is no interval."""
    return effects.mean(keepdims=True)


def _others(parts: Mapping[str, np.ndarray], task: str, where: str) -> np.ndarray:
    """Average effects by task over all tasks but one; a task that is none is refused."""
    if task not in parts:
        refuse("E-PROSE", f"{where}: no task '{task}'; {nearest(task, parts)}")
    return store.mean(part for name, part in parts.items() if name != task)


def filled(text: str, evidence: Evidence, where: str) -> str:
    """Fill what stands between braces in a text; ``where`` names it in refusals."""
    names, body = _names(text)

    def effect(said: str, sentence: str) -> Effect:
        return evidence.effect(names.get(said, said), sentence)

    def written(match: re.Match[str]) -> str:
        """Write a reading (``up | down: gain``), an effect (``gain``) or one of its aspects."""
        sentence = f"{where}: '{_sentence(body, match)}'"
        readings, colon, said = match[1].rpartition(": ")
        if colon:
            found = effect(said, sentence)
            return _reading(readings.split("|"), found, sentence)
        aspect = _ASPECT.fullmatch(match[1])
        if aspect is None or match[1] in names:
            return str(effect(match[1], sentence))
        told = effect(aspect[2], sentence).said(aspect[1])
        if told is None:
            refuse("E-PROSE", f"{sentence}: this effect has no '{aspect[1]}'")
        return told

    return _BRACES.sub(written, body)


def _reading(readings: list[str], found: Effect, sentence: str) -> str:
    """Choose the reading for where an effect lies; one that is not written is refused."""
    words = [reading.strip() for reading in readings]
    if len(words) <= found.place or words[found.place] == "-":
        lies = ("above zero", "below zero", "not apart from zero")[found.place]
        fix = "write that reading, or the sentence anew"
        refuse("E-PROSE", f"{sentence}: '{found.text}' is {found}, {lies}; {fix}")
    return words[found.place]


def _names(text: str) -> tuple[dict[str, str], str]:
    """Split a page's head, lines ``name: effect`` between two of dashes, from its text."""
    if not text.startswith("---\n"):
        return {}, text
    head, _, body = text.removeprefix("---\n").partition("\n---\n")
    names = {}
    for line in head.splitlines():
        if line.strip():
            name, _, effect = line.partition(": ")
            names[name] = effect.strip()
    return names, body.lstrip("\n")


def _sentence(body: str, match: re.Match[str]) -> str:
    """Return the sentence around a match, on one line."""
    before = re.split(r"(?<=[.:?!|])\s|\n\n", body[: match.start()])[-1]
    after = re.split(r"(?<=[.?!|])\s|\n\n", body[match.end() :])[0]
    return " ".join(f"{before}{match[0]}{after}".split())


def reference(text: str) -> store.Reference:
    """Read what stands behind "less": a value's name, several whose mean is meant, or a number."""
    if " and " in text:
        return tuple(text.split(" and "))
    if "/" in text:
        return text
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        refuse("E-PROSE", f"'{text}' is neither a value's name nor a number")
    return number


def pages(folder: Path, rows: Sequence[Row]) -> dict[str, str]:
    """Fill the prose of a project's book, by the names of its files, ``found_`` before each."""
    paths = sorted((folder / PLACE).glob("*.md"))
    if not paths:
        return {}
    pools = {name: store.pools(name, folder) for name in sources.notebooks(folder)}
    evidence = Evidence(pools, rows)
    texts = dict[str, str]()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        texts[f"found_{path.stem}"] = filled(text, evidence, f"{PLACE}/{path.name}")
    return texts
