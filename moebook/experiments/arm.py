"""An arm: one way to treat the base, as data, with what it needs of the notebook's parameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas as pd
from torch import Tensor, nn

from moebook import lists
from moebook.errors import Refusal, nearest, refuse

Settings = Mapping[str, Any]  # a notebook's parameters, by name
Kind = TypeVar("Kind")
Complaints = Iterable[str]  # each names a parameter, its value, and what would do


def picked(settings: Settings, names: str) -> dict[str, Any]:
    """Return the parameters of these names, which have spaces between them."""
    return {name: settings[name] for name in names.split()}


def no_needs(settings: Settings) -> Complaints:
    """Complain about nothing."""
    return ()


def no_changes(settings: Settings) -> Mapping[str, Any]:
    """Change nothing in the recipe."""
    return {}


@dataclass(frozen=True)
class Arm:
    """One way to treat the base: what a row of the table compares.

    Equal ``build`` and equal results of ``configure`` make equal models.
    """

    name: str
    # The notebook's parameters -> the settings of a method.
    configure: Callable[[Settings], Hashable]
    # A fresh base and these settings -> a model ready to train. Works on meta, too.
    build: Callable[[nn.Module, Any], nn.Module]
    needs: Callable[[Settings], Complaints] = no_needs
    # What training adds to the loss, from the model after a forward pass.
    penalty: Callable[[Any], Tensor] | None = None
    # The parameter that holds its learning rate where none is tried and none is fixed.
    rate: str = "lr"
    # The notebook's parameters -> what of the recipe is its own: steps of a shorter training.
    recipe: Callable[[Settings], Mapping[str, Any]] = no_changes
    what: str = ""  # it is, in one line, for the table of arms

    def make(self, base: nn.Module, settings: Settings) -> nn.Module:
        """Make a fresh base into this arm's model, ready to train."""
        return self.build(base, self.configure(settings))


def described(what: Mapping[str, str], here: Container[str]) -> pd.DataFrame:
    """Return arms as a table: the name of each, what it is, and whether it is in this run."""
    lines: dict[str, dict[str, str]] = {}
    for name, text in what.items():
        lines[name] = {"what it is": text, "in this run": "yes" if name in here else ""}
    return pd.DataFrame.from_dict(lines, orient="index")


def asked(settings: Settings, known: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return the arms that the parameter ``arms`` names, in the order of the known ones."""
    names = lists.arms(settings["arms"], known)
    if not names:
        refuse("E-RANGE", f"arms is empty; {nearest('', [lists.ALL, *known])}")
    return {name: arm for name, arm in known.items() if name in names}


def needs(arms: Mapping[str, Arm], settings: Settings) -> Complaints:
    """Complain about parameters with which an arm cannot run."""
    by_method: dict[str, list[str]] = {}  # arms by what their methods' settings say
    for arm in arms.values():
        of_arm = [*arm.needs(settings)]
        yield from of_arm
        if not of_arm:
            for text in complaint("", arm.configure, settings):
                by_method.setdefault(text, []).append(arm.name)
    for text, names in by_method.items():
        yield f"arm {', '.join(names)}: {text}"


def refuse_complaints(complaints: Complaints) -> None:
    """Refuse what is complained of, all in one line (E-RANGE)."""
    every = dict.fromkeys(complaints)
    if every:
        refuse("E-RANGE", "; and ".join(every))


def complaint(where: str, call: Callable[..., Any], *given: Any) -> Iterator[str]:
    """Make a complaint of what a call refuses, after ``where`` it comes from, if anywhere."""
    try:
        call(*given)
    except Refusal as refusal:
        yield f"{where}: {refusal.message}" if where else refusal.message
