"""Put the notebooks, the recorded runs and the lock into the wheel, for use outside a checkout."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = (
    "notebooks/*.ipynb",
    "notebooks/*.yaml",
    "results/**/*.parquet",
    "results/times.json",
    "requirements.lock",
)


class Build(build_py):
    """The usual build, and `SHIPPED` beside it as moebook/shipped."""

    def run(self):
        """Copy what the checkout has at its top; an editable install reads it there."""
        super().run()
        target = Path(self.build_lib) / "moebook" / "shipped"
        for path in (path for pattern in SHIPPED for path in Path().glob(pattern)):
            if not self.editable_mode:
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target / path)


setup(cmdclass={"build_py": Build})
