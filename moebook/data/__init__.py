"""Data: target tasks, mixtures, chat formats, encoding, readers of files and of the hub's sets."""

from moebook.data.encoding import IGNORED, encode
from moebook.data.mixtures import hashes, mixture, refuse_leak

__all__ = ["IGNORED", "encode", "hashes", "mixture", "refuse_leak"]
