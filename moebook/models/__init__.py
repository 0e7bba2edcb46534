"""Host models: loading them by name, their anatomy, and the fingerprint of a base."""

from moebook.models.anatomy import Anatomy, anatomy, register_experts
from moebook.models.checkpoint import fingerprint
from moebook.models.load import load, provenance

__all__ = [
    "Anatomy",
    "anatomy",
    "fingerprint",
    "load",
    "provenance",
    "register_experts",
]
