"""``moebook plan``: every notebook that trains, at tier paper, on one GPU of 80 GB."""

from pathlib import Path

import pytest

from moebook.notebook import plans, sources

ROOT = Path(__file__).resolve().parents[2]


def values(name, protocol="paper", **changes):
    notebook = sources.find(ROOT, name)
    return notebook.defaults | notebook.settings(protocol) | changes


@pytest.mark.parametrize(("name", "arms", "change"), [
    ("bases", "", ""),
    ("pesc", "sparse", "micro-batches of 16"),
    ("router_init", "crsu", "gradient checkpointing"),
    ("rocket", "mixture", ""),
    ("rivals", "rocket", ""),
    ("esft", "fft", "gradient checkpointing + micro-batches of 1 + FSDP2 over 4 GPUs"),
])  # fmt: skip
def test_plans_say_what_fits_80_gb_and_what_would(name, arms, change):
    (found,) = plans.plans(name, values(name, arms=arms), "h100")
    assert found.change == change and found.fits == (change == "")
    assert found.chosen_need.total <= 80e9 and (found.fits or found.need.total > 80e9)
    assert found.seconds > 0 and found.tokens > 0
