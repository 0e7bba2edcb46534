"""Training: one function around transformers' Trainer, and how the embedded bases are made."""

from moebook.training.fit import History, fit

__all__ = ["History", "fit"]
