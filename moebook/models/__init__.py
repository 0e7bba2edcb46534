"""Host models: loading them by name, their anatomy, and the fingerprint of a base."""

from moebook.models.anatomy import Anatomy, anatomy
from moebook.models.checkpoint import fingerprint
from moebook.models.load import load, provenance
from moebook.models.registry import register_experts
