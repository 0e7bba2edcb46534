"""Evaluation: embedded tasks and the hub's benchmarks through lm-eval, one row an item."""

from moebook.evaluation.evaluate import evaluate

__all__ = ["evaluate"]
