"""Learning rates of arms: every arm over one grid, or fixed beforehand by seeds of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import pandas as pd

from moebook import lists
from moebook.experiments.arm import Arm, Complaints, Settings, complaint
from moebook.experiments.needs import more_than_a_step


@dataclass(frozen=True)
class Rates:
    """The learning rate of every arm, and the losses by which it was chosen, if it was."""

    by_arm: Mapping[str, float]
    # Nats on validation rows by arm and rate tried; empty where no rate was tried.
    losses: Mapping[tuple[str, float], float] = field(default_factory=dict)

    def __getitem__(self, arm: str) -> float:
        return self.by_arm[arm]

    @property
    def ends(self) -> dict[str, str]:
        """Arms whose best rate is the lowest or the highest of several: the grid is too narrow."""
        tried = sorted({rate for _, rate in self.losses})
        if len(tried) < 2:
            return {}
        of_rate = {tried[0]: "lowest", tried[-1]: "highest"}
        return {
            arm: of_rate[rate] for arm, rate in self.by_arm.items() if rate in of_rate
        }

    @property
    def table(self) -> pd.DataFrame:
        """A line an arm: its loss at each rate tried, its rate, and at which end any lies."""
        lines: dict[str, dict[str, object]] = {arm: {} for arm in self.by_arm}
        for (arm, rate), loss in self.losses.items():
            lines[arm][f"{rate:g}"] = loss
        for arm, line in lines.items():
            line["rate"] = self.by_arm[arm]
            if self.ends:
                line["end of the grid"] = self.ends.get(arm, "")
        return pd.DataFrame.from_dict(lines, orient="index").rename_axis("arm")


def grid(settings: Settings) -> list[float]:
    """Return the rates to choose from, as the parameter ``rates`` lists them."""
    return lists.rates("rates", settings["rates"])


def choose(
    arms: Iterable[str], tried: Sequence[float], loss: Callable[[str, float], float]
) -> Rates:
    """Give each arm the one of the ``tried`` rates with the least loss on validation rows.

    ``loss`` trains an arm at a rate and returns its nats; of equal ones the lower rate counts.
    """
    names = list(arms)
    losses = {(arm, rate): loss(arm, rate) for arm, rate in product(names, tried)}
    by_arm: dict[str, float] = {}
    for arm in names:
        of_arm = {rate: losses[arm, rate] for rate in sorted(tried)}
        by_arm[arm] = min(of_arm, key=of_arm.__getitem__)
    return Rates(by_arm, losses)


def given(settings: Settings, arms: Mapping[str, Arm]) -> Rates:
    """Return the rates of arms for which none is tried: fixed ones, else each arm's parameter.

    Rates may be fixed for other arms, too, which are not asked for now.
    """
    fixed = lists.rates_by_name("fixed_rates", settings.get("fixed_rates", ""))
    if fixed:
        return Rates({name: fixed[name] for name in arms})
    return Rates({name: settings[arm.rate] for name, arm in arms.items()})


def needs(
    settings: Settings,
    arms: Iterable[str],
    known: Iterable[str],
    *,
    at_least_one: bool = False,
) -> Complaints:
    """Complain about rates that cannot be read, or from which an arm gets none or no choice."""
    rates = settings["rates"]
    fixed_rates = settings.get("fixed_rates", "")  # which not every notebook has
    unreadable = [*complaint("", lists.rates, "rates", rates)]
    unreadable += complaint("", lists.rates_by_name, "fixed_rates", fixed_rates, known)
    if unreadable:
        yield from unreadable
        return
    tried = grid(settings)
    fixed = lists.rates_by_name("fixed_rates", fixed_rates, known)
    if tried and fixed:
        pair = f"rates = {rates!r} and fixed_rates = {fixed_rates!r}"
        yield f"{pair}: give rates to choose from, or a fixed one for each arm, not both"
    lacking = [name for name in arms if fixed and name not in fixed]
    if lacking:
        more = ", ".join(f"{name}=..." for name in lacking)
        yield f"fixed_rates = {fixed_rates!r} has no rate for {', '.join(lacking)}: add {more}"
    if at_least_one and not tried:
        yield "rates is empty: give one learning rate or more, as in 0.001,0.003"
    if tried and "rate_steps" in settings:
        yield from more_than_a_step(settings, "rate_steps", of=" of a trial")
