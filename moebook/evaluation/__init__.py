"""Evaluation: embedded tasks and the hub's benchmarks through lm-eval, one row an item."""

from moebook.evaluation.comparison import by_benchmark, paired
from moebook.evaluation.evaluate import evaluate

__all__ = ["by_benchmark", "evaluate", "paired"]
