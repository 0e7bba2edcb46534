"""A headless Chromium for the tests of pages."""

import pytest
from chromium import Chromium, installed


@pytest.fixture
def browser(tmp_path):
    """A fresh headless Chromium; the test is skipped where there is none."""
    executable = installed()
    if executable is None:
        pytest.skip("no Chromium on this machine; install the package chromium")
    chromium = Chromium(executable, tmp_path)
    yield chromium
    chromium.close()
