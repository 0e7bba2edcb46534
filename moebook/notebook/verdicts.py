"""What recorded values say about the papers' claims: pure functions from records to verdicts.

A verdict is the label that the best record earns. "reproduced" cannot be made without a record of
the paper's own scale (`Label` refuses), and a comparison is decided by three seeds of a study or
better (`Measurement.decides`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from moebook import papers, results
from moebook.errors import nearest, refuse
from moebook.notebook.measurements import Measurement, describe, measure, side
from moebook.papers import Claim
from moebook.results import COMMITTED, TIERS, Record

LABELS = ("reproduced", "direction holds", "direction fails", "inconclusive", "not run")


@dataclass(frozen=True)
class Label:
    """One of `LABELS`, with the record it rests on.

    Args:
        text: The label.
        evidence: The record; None for "not run" and only for it.

    Raises:
        Refusal: E-VERDICT for "reproduced" without a record of scale ``paper``, for a label
            without its evidence, and for an unknown label.
    """

    text: str
    evidence: Record | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.text not in LABELS:
            refuse("E-VERDICT", f"unknown label '{self.text}'; {nearest(self.text, LABELS)}")
        if (self.evidence is None) != (self.text == "not run"):
            refuse("E-VERDICT", f"'{self.text}': every label but 'not run' rests on a record")
        if self.text == "reproduced" and self.evidence and self.evidence.scale != "paper":
            refuse("E-VERDICT", f"a run at scale {self.evidence.scale} cannot reproduce a claim")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Verdict:
    """A claim's label and the measurement that earned it (None for "not run")."""

    claim: Claim
    label: Label
    measurement: Measurement | None = None

    def __post_init__(self) -> None:
        record = self.measurement.record if self.measurement else None
        if self.label.evidence is not record:
            refuse("E-VERDICT", f"{self.claim.id}: label and measurement rest on different records")

    @property
    def badge(self) -> str:
        """The verdict in words, with scale, seeds, effect and interval."""
        if self.measurement is None:
            return str(self.label)
        return f"{self.label} ({describe(self.measurement)})"


@dataclass(frozen=True)
class Row:
    """One line of the ledger: a verdict and all that was measured for it.

    Attributes:
        verdict: From the best record.
        measurements: One for each record that holds the claim's value, in the order of `TIERS`.
    """

    verdict: Verdict
    measurements: tuple[Measurement, ...]

    @property
    def claim(self) -> Claim:
        """The claim."""
        return self.verdict.claim

    @property
    def live(self) -> Measurement | None:
        """This build's own run (smoke or cpu)."""
        return next((m for m in self.measurements if m.scale not in COMMITTED), None)

    @property
    def recorded(self) -> Measurement | None:
        """The best committed run (study, gpu or paper)."""
        return next((m for m in reversed(self.measurements) if m.scale in COMMITTED), None)


def label(measurement: Measurement) -> Label:
    """Judge one measurement.

    "reproduced" asks for all: the paper's scale, the claimed side, and an effect within the
    tolerance of the number that the paper prints.
    """
    claim, record = measurement.claim, measurement.record
    if not measurement.decides:
        return Label("inconclusive", record)
    low, high = measurement.interval or (measurement.effect, measurement.effect)
    where = side(claim, low, high)
    gap = math.inf if claim.claimed is None else abs(measurement.effect - claim.claimed)
    if where > 0 and gap <= (claim.tolerance or 0.0) and record.scale == "paper":
        return Label("reproduced", record)
    return Label({1: "direction holds", 0: "inconclusive", -1: "direction fails"}[where], record)


def verdict(claim: Claim, records: Iterable[Record]) -> Verdict:
    """Give a claim its verdict from records: the highest scale that may decide, else the highest.

    Raises:
        Refusal: E-VERDICT for a value in another unit than the claim's.
    """
    return row(claim, records).verdict


def row(claim: Claim, records: Iterable[Record]) -> Row:
    """Give a claim its verdict together with all measurements behind it."""
    found = [found for record in records if (found := measure(claim, record))]
    found.sort(key=lambda measured: TIERS.index(measured.scale))
    if not found:
        return Row(Verdict(claim, Label("not run")), ())
    best = max(found, key=lambda measured: (measured.decides, TIERS.index(measured.scale)))
    return Row(Verdict(claim, label(best), best), tuple(found))


def ledger(folder: Path | None = None) -> list[Row]:
    """Judge every claim of the four papers from the records in a project.

    Args:
        folder: The project; found from the working directory by default.

    Raises:
        Refusal: E-VERDICT for a recorded value that its claim does not allow.
    """
    claims = papers.claims()
    records = {name: results.records(name, folder) for name in {claim.run for claim in claims}}
    return [row(claim, records[claim.run].values()) for claim in claims]
