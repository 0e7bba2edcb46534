"""The paper's groups of benchmarks (Table 3), and the names under which runs are kept."""

from __future__ import annotations

GROUPS = {
    "gsm8k": "mathematics",
    "hendrycks_math": "mathematics",
    "piqa": "common_sense",
    "hellaswag": "common_sense",
    "winogrande": "common_sense",
    "arc_easy": "common_sense",
    "arc_challenge": "common_sense",
    "nq_open": "knowledge",
    "triviaqa": "knowledge",
    "mmlu": "mmlu",
}
"""lm-eval's names of ten of the twelve benchmarks (Tables 7, 8, 10, 11), to the paper's group.

The group of code, HumanEval and MBPP, is missing: they run code that the model wrote. MATH is
lm-eval's `hendrycks_math`; its `minerva_math` has the paper's 4 shots, but needs further packages.
"""


def root(base: str, mix: str) -> str:
    """Name under which a run's values are kept: each base and mixture of Table 2 has its own.

    Args:
        base: Name of the dense base, as `models.load` takes it; its commit does not count.
        mix: Training data.

    Returns:
        ``pesc``, with ``/13b`` or ``/34b`` for a base of that size, and ``/pro`` for the larger
        mixture, IDAE-720K.
    """
    name = base.partition("@")[0].lower()
    size = next((f"/{size}" for size in ("13b", "34b") if size in name), "")
    return "pesc" + size + ("/pro" if mix == "idae-720k" else "")
