"""Data: embedded tasks, mixtures, chat formats, encoding, the hub's data sets."""

from moebook.data import hub, tasks
from moebook.data.encoding import IGNORED, encode, padded
from moebook.data.mixtures import (
    draw,
    grouped,
    hashes,
    hold_out,
    mixture,
    passages,
    refuse_leak,
)

__all__ = [
    "draw",
    "encode",
    "grouped",
    "hashes",
    "hold_out",
    "hub",
    "mixture",
    "padded",
    "passages",
    "refuse_leak",
    "tasks",
]
