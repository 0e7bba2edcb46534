"""Compiles Triton kernels for GPUs that need not be there, and prints what the compiler says.

Run by `test_compile_gate.py` as a process of its own, since in the tests' process Triton
interprets. One line of JSON a kernel: name, architecture, dtype, bytes of shared memory, bytes of
stack (spilled registers lie there) and whether it multiplies by ``wgmma``.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moebook.kernels._triton import adapters, duplicates, experts, grouped, lora_mixture, route

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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


def kernels(dtype, arch):
    """Yield (kernel, constants, blocks that are fetched) as the launchers set them."""
    wide = dtype == torch.float32
    accelerated = {False, arch >= 90 and not wide}
    for chosen in (grouped.blocks(dtype, large) for large in ((False,) if wide else (True, False))):
        for tma in accelerated:
            deep, shared = chosen["BK"], {"TMA": tma, "PROGRAMS": 132, **chosen}
            half, rows = chosen["BN"] // 2, {"rows": (chosen["BM"], deep)}
            yield (experts._gated_up, {"D": 2048, "F": 1024, **shared, "BN": half},
                   {**rows, "matrices": (2, half, deep)} if tma else {})  # fmt: skip
            for forward in (False, True):
                side = (chosen["BN"], deep) if forward else (deep, chosen["BN"])
                yield (grouped._product, {"K": 2048, "N": 1024, "FORWARD": forward, **shared},
                       {**rows, "matrices": side} if tma else {})  # fmt: skip
    for tma, by_token in ((False, ""), (False, "left"), (False, "right"), (True, "")):
        if tma in accelerated:
            sizes = grouped.gradient_blocks(dtype, chosen, tma)
            sides = {"left_blocks": (sizes["BK"], sizes["BI"]),
                     "right_blocks": (sizes["BK"], sizes["BJ"])}  # fmt: skip
            constants = {"HIGH": 2048, "WIDE": 1024, "TMA": tma, "BY_TOKEN": by_token, **sizes}
            yield grouped._weight_gradient, constants, sides if tma else {}
    yield experts._gated_back, {"F": 1024, "BF": 1024}, {}
    yield grouped._combine, {"D": 2048, "K": 4, "BD": 1024}, {}
    for rank, back in ((16, False), (16, True), (32 if wide else 64, True)):
        inward, outward = adapters.blocks(dtype, rank)
        sizes = {"E": 8, "D": 2048, "R": rank, "BACK": back}
        yield adapters._inward, {**sizes, **inward}, {}
        yield adapters._outward, {**sizes, "ADD": True, **outward}, {}
    for pairs, bank in ((0, 0), (8, -1)):
        block = {"E": pairs, "BT": route.ITEMS}
        yield route._count, {**block, "num_warps": route.WARPS}, {}
        yield route._place, block, {}
        yield route._cut, {"G": 60, "ROWS": 128, "BANK": bank, "BG": 64}, {}
    yield lora_mixture._mix, {"N": 4, "R": 16, "WIDE": 2048, **lora_mixture.blocks(dtype)}, {}
    yield route._choose, {"E": 60, "BE": 64, "K": 6, "BT": route.ROWS}, {}
    for large in accelerated:
        yield duplicates._mark, {"D": 384, **duplicates.blocks(dtype, large)}, {}


def compiled(kernel, constants, fetched, dtype, arch):
    """Compile one kernel and describe the result."""
    options = {key: value for key, value in constants.items() if key in OPTIONS}
    constants = {key: value for key, value in constants.items() if key not in OPTIONS}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else TYPES.get(name, f"*{dtype}")
        if name in fetched:
            signature[name] = f"tensordesc<{dtype}[{', '.join(map(str, fetched[name]))}]>"
        if signature[name].startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"kernel": kernel.__name__, "arch": arch, "dtype": dtype, "constants": str(constants),
            "shared": made.metadata.shared, "stack": stack(made.asm["cubin"]),
            "wgmma": "wgmma" in made.asm["ptx"],
            "large": max(constants.get("BM", 0), constants.get("BI", 0)) >= 64}  # fmt: skip


def stack(cubin):
    """Read the bytes of stack that a thread needs."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    sizes = re.findall(r"STACK:(\d+)", usage)
    assert sizes, f"cuobjdump tells no stack: {usage}"
    return sum(map(int, sizes))


if __name__ == "__main__":
    arch = int(sys.argv[1])
    for dtype in sys.argv[2].split(","):
        for case in kernels(DTYPES[dtype], arch):
            print(json.dumps(compiled(*case, dtype, arch)), flush=True)
