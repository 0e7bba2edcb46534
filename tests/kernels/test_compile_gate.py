"""Every Triton kernel compiles for A100 and H100, in 16 and in 32 bits, and fits: without a GPU.

Each form is compiled once: by pointers in bfloat16 for the A100, which has the least memory for it;
in float32, and by the memory accelerator in bfloat16, for the H100, which an H200 is to the
compiler. `make test` compiles every kernel once, for the A100 at its largest blocks, and `make
soak` every form. What is compiled is kept beside pytest's own cache. This file does it as a process
of its own: in the tests' one Triton interprets.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from moebook.kernels._triton import (  # noqa: E402
    adapters,
    duplicates,
    experts,
    grouped,
    lora_mixture,
    route,
)

FOLDER = Path(__file__).parents[2] / "moebook" / "kernels" / "_triton"
TARGETS = [
    (80, "bf16", "first"),
    pytest.param(80, "bf16", "every", marks=pytest.mark.soak),
    pytest.param(90, "fp32", "every", marks=pytest.mark.soak),
    pytest.param(90, "bf16", "every", marks=pytest.mark.soak),
]
"""Architecture, dtype, and which forms of a kernel: its first, with the largest blocks, or all."""
KILOBYTES = {80: 163, 90: 227}
"""Shared memory that a program can have."""
NAMES = {
    "*i64": "token slots tiles number owner counts ends place ids order",
    "*fp32": "gate weight d_weight d_gate inverse",
    "*i32": "marks within",
    "i32": "T n blocks many size words",
    "fp32": "scale threshold",
}
TYPES = {name: kind for kind, names in NAMES.items() for name in names.split()}
"""Of the kernels' arguments; what is not here is a pointer to the dtype itself."""
OPTIONS = ("num_warps", "num_stages")


def kernels(dtype, tma):
    """Yield (kernel, constants, blocks that are fetched) as the launchers set them."""
    wide = dtype == torch.float32
    for chosen in (
        grouped.blocks(dtype, large) for large in ((False,) if wide else (True, False))
    ):
        deep = chosen["BK"]
        shared = {"TMA": tma, "PROGRAMS": 132, **chosen}
        half = chosen["BN"] // 2
        rows = {"rows": (chosen["BM"], deep)}
        yield (
            experts._gated_up,
            {"D": 2048, "F": 1024, **shared, "BN": half},
            {**rows, "matrices": (2, half, deep)} if tma else {},
        )
        for forward in (False, True):
            side = (chosen["BN"], deep) if forward else (1, deep, chosen["BN"])
            yield (
                grouped._product,
                {"K": 2048, "N": 1024, "FORWARD": forward, **shared},
                {**rows, "matrices": side} if tma else {},
            )
    sizes = grouped.gradient_blocks(dtype, chosen, tma)
    sides = {
        "left_blocks": (sizes["BK"], sizes["BI"]),
        "right_blocks": (sizes["BK"], sizes["BJ"]),
    }
    for by_token in ("",) if tma else ("", "left", "right"):
        constants = {
            "HIGH": 2048,
            "WIDE": 1024,
            "TMA": tma,
            "BY_TOKEN": by_token,
            **sizes,
        }
        yield grouped._weight_gradient, constants, sides if tma else {}
    for rank, back in ((16, False), (32 if wide else 64, True))[tma:]:
        inward, outward = adapters.blocks(dtype, rank)
        sizes = {"E": 8, "D": 2048, "R": rank, "BACK": back}
        yield adapters._inward, {**sizes, **inward}, {}
        yield adapters._outward, {**sizes, "ADD": True, **outward}, {}
    yield (
        lora_mixture._mix,
        {"N": 4, "R": 16, "WIDE": 2048, **lora_mixture.blocks(dtype)},
        {},
    )
    yield duplicates._mark, {"D": 384, **duplicates.blocks(dtype, tma)}, {}
    if tma:
        return
    yield experts._gated_back, {"F": 1024, "BF": 1024}, {}
    yield grouped._combine, {"D": 2048, "K": 4, "BD": 1024}, {}
    yield route._choose, {"E": 60, "BE": 64, "K": 6, "BT": route.ROWS}, {}
    for pairs, bank in ((8, -1),) if wide else ((0, 0), (8, -1)):
        block = {"E": pairs, "BT": route.ITEMS}
        yield route._count, {**block, "num_warps": route.WARPS}, {}
        yield route._place, block, {}
        yield route._cut, {"G": 60, "ROWS": 128, "BANK": bank, "BG": 64}, {}


def compiled(kernel, constants, fetched, dtype, arch):
    """Compile one kernel and describe the result."""
    options = {key: value for key, value in constants.items() if key in OPTIONS}
    constants = {key: value for key, value in constants.items() if key not in OPTIONS}
    signature = {}
    attributes = {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = (
            "constexpr" if name in constants else TYPES.get(name, f"*{dtype}")
        )
        if name in fetched:
            signature[name] = (
                f"tensordesc<{dtype}[{', '.join(map(str, fetched[name]))}]>"
            )
        if signature[name].startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {
        "kernel": kernel.__name__,
        "constants": str(constants),
        "shared": made.metadata.shared,
        "stack": stack(made.asm["cubin"]),
        "wgmma": "wgmma" in made.asm["ptx"],
        "large": max(constants.get("BM", 0), constants.get("BI", 0)) >= 64,
    }


def stack(cubin):
    """Read the bytes of stack, where spilled registers lie, that a thread needs."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    sizes = re.findall(r"STACK:(\d+)", usage)
    assert sizes, f"cuobjdump tells no stack: {usage}"
    return sum(map(int, sizes))


def main():
    """Print what the compiler says of the target that the command line names: a line of JSON."""
    arch = int(sys.argv[1])
    dtype, forms = sys.argv[2:]
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    cases = list(kernels(dtypes[dtype], tma=(arch, dtype) == (90, "bf16")))
    if forms == "first":
        # Later cases of a kernel give way to earlier ones.
        cases = list({case[0].__name__: case for case in reversed(cases)}.values())
    print(json.dumps([compiled(*case, dtype, arch) for case in cases]))


@pytest.mark.parametrize(("arch", "dtype", "forms"), TARGETS)
@pytest.mark.timeout(900)  # cold, and beside other work
def test_kernels_compile_and_fit(cache, arch, dtype, forms):
    environment = {
        "TRITON_CACHE_DIR": str(cache.mkdir("triton")),
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": str(FOLDER.parents[2]),
    }
    command = [sys.executable, __file__, str(arch), dtype, forms]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    fetching = (arch, dtype) == (90, "bf16")  # by the memory accelerator
    compiled_forms = json.loads(done.stdout)
    for form in compiled_forms:
        assert form["shared"] <= KILOBYTES[arch] * 1024, form
        assert form["stack"] == 0, form
        assert form["wgmma"] or not form["large"] or not fetching, form
    names = {form["kernel"] for form in compiled_forms}
    launches = [
        re.findall(r"\b(_\w+)\[\(?\w", path.read_text()) for path in FOLDER.glob("*.py")
    ]
    launched = {name for names in launches for name in names}
    if fetching:
        assert names < launched and len(names) == 7, "each that multiplies"
    else:
        assert names == launched, "each"


if __name__ == "__main__":
    main()
