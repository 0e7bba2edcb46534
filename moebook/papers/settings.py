"""The papers' hyper-parameters as data, each with the place where it stands."""

from __future__ import annotations

from typing import Any

import yaml

from moebook.errors import nearest, refuse
from moebook.papers.printed import folder

Settings = dict[str, dict[str, Any]]


def hyperparameters(paper: str, settings: str | None = None) -> Settings:
    """Read a paper's settings, such as ``{"paper": {"lr": {"value": 2e-4, "where": ...}}}``.

    Args:
        paper: One of `papers.PAPERS`.
        settings: One group, such as ``paper`` or ``released``; then its parameters alone.

    Returns:
        All groups, or the parameters of one: name to ``value`` and ``where``.

    Raises:
        Refusal: E-NAME for an unknown paper or group; E-FORMAT for a malformed file.
    """
    path = folder(paper) / "hyperparameters.yaml"
    try:
        groups = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        refuse("E-FORMAT", f"{paper}/{path.name}:{line}: not YAML ({error.problem})")
    for group, name in ((g, n) for g, parameters in groups.items() for n in parameters):
        if not {"value", "where"} <= set(groups[group][name]):
            refuse("E-FORMAT", f"{paper}/{path.name}: {group}.{name} needs value and where")
    if settings is None:
        return dict(groups)
    if settings not in groups:
        refuse("E-NAME", f"{paper} has no settings '{settings}'; {nearest(settings, groups)}")
    return dict(groups[settings])
