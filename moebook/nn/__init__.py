"""Modules that the methods put into a host model: routers, adapters, full experts."""

from moebook.nn.adapters import AdapterMoE, Adapters
from moebook.nn.experts import ExpertMoE, Experts
from moebook.nn.routing import Decision, Router, Trace, routers

__all__ = [
    "AdapterMoE",
    "Adapters",
    "Decision",
    "ExpertMoE",
    "Experts",
    "Router",
    "Trace",
    "routers",
]
