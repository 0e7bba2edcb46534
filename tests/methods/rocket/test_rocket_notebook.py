"""What the notebook sets, against the paper's settings."""

import json
from pathlib import Path

from moebook import papers
from moebook.notebook import sources

ROOT = Path(__file__).parents[3]


def test_the_tier_paper_tunes_as_table_12_says():
    book, stated = sources.find(ROOT, "rocket"), papers.hyperparameters("rocket", "paper")
    used = {name: p.default for name, p in book.parameters.items()} | book.settings("paper")
    for name in ("lr", "schedule", "weight_decay", "shots", "candidates", "experts"):
        assert used[name] == stated[name]["value"]
    assert used["batch"] == stated["batch"]["value"] * stated["accumulation"]["value"]
    cells = json.loads(book.path.read_text(encoding="utf-8"))["cells"]
    (fitting,) = (text for cell in cells if (text := "".join(cell["source"])).startswith("fitting"))
    assert '"weight_decay": weight_decay' in fitting
