"""Data: target tasks, mixtures, chat formats, encoding, readers of files and of the hub's sets."""

from moebook.data.encoding import IGNORED, encode
from moebook.data.mixtures import by_domain, draw, hashes, hold_out, mixture, refuse_leak

__all__ = ["IGNORED", "by_domain", "draw", "encode", "hashes", "hold_out", "mixture", "refuse_leak"]
