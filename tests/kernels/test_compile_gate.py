"""Every Triton kernel compiles for A100 and H100, in each dtype, and fits: no GPU is needed."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

DTYPES = ("fp32", "fp16", "bf16")
FOLDER = Path(__file__).parents[2] / "moebook" / "kernels" / "_triton"
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes of shared memory that a program can have


@pytest.mark.timeout(900)  # cold, and beside other work
@pytest.mark.parametrize("arch", SHARED)
def test_kernels_compile_and_fit(arch, tmp_path):
    script = Path(__file__).with_name("compile_gate.py")
    environment = {"TRITON_CACHE_DIR": str(tmp_path), **os.environ, "TRITON_INTERPRET": "0",
                   "PYTHONPATH": str(Path(__file__).parents[2])}  # fmt: skip
    done = subprocess.run(
        [sys.executable, script, ",".join(DTYPES), str(arch)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for dtype in DTYPES:
        assert sum(kernel["dtype"] == dtype for kernel in found) > 8
    launches = [re.findall(r"\b(_\w+)\[\(?\w", path.read_text()) for path in FOLDER.glob("*.py")]
    assert {name for own in launches for name in own} == {kernel["kernel"] for kernel in found}
    for kernel in found:
        assert kernel["shared"] <= SHARED[arch], kernel
        assert kernel["stack"] == 0, kernel
        if arch == 90 and kernel["large"] and kernel["dtype"] != "fp32":
            assert kernel["wgmma"], kernel
