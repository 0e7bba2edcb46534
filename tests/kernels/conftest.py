"""Triton's choices, made before any kernel is decorated or compiled."""

import os

# `TRITON_INTERPRET` is set for all tests in the conftest above. Triton warns where this is unset.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
