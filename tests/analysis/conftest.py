"""The methods' tiny hosts and their batch of 19 real tokens."""

from tests.methods.conftest import batch, host, mixture

__all__ = ["batch", "host", "mixture"]
