"""Imports only point down: import-linter's contracts of pyproject.toml, run by plain pytest."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

LINT = "from importlinter.cli import lint_imports; exit(lint_imports(no_cache=True))"

# One import that each contract exists to refuse: file of the package -> its line.
PLANTED = {
    "runtime.py": "import moebook.models",
    "methods/pesc.py": "import moebook.methods.rocket",
    "bench.py": "import papermill",
    "models/plots.py": "import matplotlib.pyplot",
    "training/harness.py": "import lm_eval.tasks",
    "kernels/route.py": "import triton.language",
    "nn/adapter.py": "import transformers.models\nimport peft",
}
PACKAGES = ("methods/rocket", "methods", "models", "training", "kernels", "nn")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package in this folder, away from the package already imported."""
    return subprocess.run(
        [sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_imports_point_down_and_every_contract_refuses_what_it_is_there_for(
    root: Path, tmp_path: Path
) -> None:
    outcome = lint(root)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    configuration = tomllib.loads((root / "pyproject.toml").read_text())
    names = [contract["name"] for contract in configuration["tool"]["importlinter"]["contracts"]]
    package = tmp_path / "moebook"
    shutil.copy(root / "pyproject.toml", tmp_path)
    for name in PACKAGES:
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").touch()
    for name in ("__init__.py", "errors.py", "stray.py"):
        (package / name).touch()
    for name, line in PLANTED.items():
        (package / name).write_text(line + "\n")
    outcome = lint(tmp_path)
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    kept = [name for name in names if f"{name} BROKEN" not in outcome.stdout]
    assert not kept, outcome.stdout
    for told in ("moebook is not allowed to import transformers", "not allowed to import peft",
                 "moebook.stray"):  # fmt: skip
        assert told in outcome.stdout
