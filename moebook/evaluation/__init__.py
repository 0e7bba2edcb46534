"""Evaluation: embedded tasks and the hub's benchmarks, one row an item, and what they come to."""

from moebook.evaluation.benchmarks import by_benchmark, evaluate, load, paired, summary
