"""Every Triton kernel compiles for A100 and H100, in each dtype, and fits: no GPU is needed.

An H200 is an H100 to the compiler. Half precision is compiled for the H100 alone: to an A100 it
differs from bfloat16 by the name of a type. What is compiled is kept beside pytest's own cache, by
Triton's hash of sources and options, so that only changed kernels are compiled again.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

FOLDER = Path(__file__).parents[2] / "moebook" / "kernels" / "_triton"


@pytest.mark.timeout(900)  # cold, and beside other work
@pytest.mark.parametrize(
    ("arch", "kilobytes", "dtypes"), [(80, 163, "fp32,bf16"), (90, 227, "fp32,fp16,bf16")]
)
def test_kernels_compile_and_fit(arch, kilobytes, dtypes, cache):
    script = Path(__file__).with_name("compile_gate.py")
    environment = {"TRITON_CACHE_DIR": str(cache.mkdir("triton")), **os.environ,
                   "TRITON_INTERPRET": "0", "PYTHONPATH": str(FOLDER.parents[2])}  # fmt: skip
    done = subprocess.run(
        [sys.executable, script, str(arch), dtypes], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    launches = [re.findall(r"\b(_\w+)\[\(?\w", path.read_text()) for path in FOLDER.glob("*.py")]
    for dtype in dtypes.split(","):
        names = {kernel["kernel"] for kernel in kernels if kernel["dtype"] == dtype}
        assert names == {name for own in launches for name in own}
    for kernel in kernels:
        assert kernel["shared"] <= kilobytes * 1024, kernel  # what a program can have
        assert kernel["stack"] == 0, kernel
        if arch == 90 and kernel["large"] and kernel["dtype"] != "fp32":
            assert kernel["wgmma"], kernel
