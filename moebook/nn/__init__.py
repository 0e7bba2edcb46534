"""Modules that the methods put into a host model: routers, adapters, full experts."""

from moebook.nn.dropout import Dropout, dropout
from moebook.nn.experts import (
    AdapterMoE,
    Adapters,
    ChosenRows,
    ExpertMoE,
    Experts,
    SplitExperts,
)
from moebook.nn.passes import PLAIN, evaluating, plain, settle
from moebook.nn.routing import Router, Trace, balance, hooked, observe, routers

__all__ = [
    "AdapterMoE",
    "Adapters",
    "Dropout",
    "ExpertMoE",
    "Experts",
    "Router",
    "SplitExperts",
    "Trace",
    "balance",
    "dropout",
    "evaluating",
    "observe",
    "plain",
    "routers",
]
