"""Evaluation: embedded tasks and the hub's benchmarks, a row an item, and summaries."""

from moebook.evaluation.benchmarks import by_benchmark, evaluate, load, paired, summary

__all__ = [
    "by_benchmark",
    "evaluate",
    "load",
    "paired",
    "summary",
]
