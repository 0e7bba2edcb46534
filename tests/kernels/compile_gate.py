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

from moebook.kernels._triton import (
    adapters,
    duplicates,
    experts,
    grouped,
    lora_mixture,
    route,
)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TYPES = {
    **dict.fromkeys("token slots tiles number owner counts ends place ids order".split(), "*i64"),
    **dict.fromkeys(("gate", "weight", "d_weight", "d_gate", "mass", "factor", "load"), "*fp32"),
    **dict.fromkeys(("T", "n", "blocks"), "i32"),
    "inverse": "*fp32",
    **dict.fromkeys(("many", "size", "words"), "i32"),
    "marks": "*i32",
    "threshold": "fp32",
    "within": "*i32",
    "scale": "fp32",
}
OPTIONS = ("num_warps", "num_stages")


def kernels(dtype, arch):
    """Yield (kernel, constants, blocks that are fetched) as the launchers set them."""
    choices = (True, False) if dtype != torch.float32 else (False,)  # float32 has one
    for chosen in (grouped.blocks(dtype, large) for large in choices):
        for tma in {False, arch >= 90 and dtype != torch.float32}:
            deep, shared = chosen["BK"], {"TMA": tma, "PROGRAMS": 132, **chosen}
            half = chosen["BN"] // 2
            fetched = {"rows": (chosen["BM"], deep), "matrices": (2, half, deep)} if tma else {}
            yield experts._gated_up, {"D": 2048, "F": 1024, **shared, "BN": half}, fetched
            for flag in (False, True):
                side = (chosen["BN"], deep) if flag else (deep, chosen["BN"])
                fetched = {"rows": (chosen["BM"], deep), "matrices": side} if tma else {}
                yield grouped._product, {"K": 2048, "N": 1024, "FORWARD": flag, **shared}, fetched
    precision = chosen
    for way in ("", "left", "right", "fetched"):
        tma = way == "fetched"
        if tma and (arch < 90 or dtype == torch.float32):
            continue
        chosen = grouped.gradient_blocks(dtype, precision, tma)
        blocks = {f"{side}_blocks": (chosen["BK"], chosen[size])
                  for side, size in (("left", "BI"), ("right", "BJ")) if tma}  # fmt: skip
        by_token = "" if tma else way
        yield grouped._weight_gradient, {"HIGH": 2048, "WIDE": 1024, "TMA": tma,
                                         "BY_TOKEN": by_token, **chosen}, blocks  # fmt: skip
    yield experts._gated_back, {"F": 1024, "BF": 1024}, {}
    yield grouped._combine, {"D": 2048, "K": 4, "BD": 1024}, {}
    largest = 32 if dtype == torch.float32 else 64
    for rank, flag in ((16, False), (16, True), (largest, True)):
        inward, outward = adapters.blocks(dtype, rank)
        sizes = {"E": 8, "D": 2048, "R": rank, "BACK": flag}
        yield adapters._inward, {**sizes, **inward}, {}
        yield adapters._outward, {**sizes, "ADD": True, **outward}, {}
    for experts_of_pairs in (0, 8):
        yield route._count, {"E": experts_of_pairs, "BT": route.ITEMS,
                              "num_warps": route.WARPS}, {}  # fmt: skip
        yield route._place, {"E": experts_of_pairs, "BT": route.ITEMS}, {}
        bank = -1 if experts_of_pairs else 0
        yield route._cut, {"G": 60, "ROWS": 128, "BANK": bank, "BG": 64}, {}
    yield lora_mixture._mix, {"N": 4, "R": 16, "WIDE": 2048, **lora_mixture.blocks(dtype)}, {}
    block = {"E": 60, "BE": 64}
    yield route._choose, {**block, "K": 6, "BT": route.ROWS}, {}
    for large in {False, arch >= 90 and dtype != torch.float32}:
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
        told = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    found = re.findall(r"STACK:(\d+)", told)
    assert found, f"cuobjdump tells no stack: {told}"
    return sum(map(int, found))


if __name__ == "__main__":
    for dtype, arch in (
        (d, int(a)) for d in sys.argv[1].split(",") for a in sys.argv[2].split(",")
    ):
        for case in kernels(DTYPES[dtype], arch):
            print(json.dumps(compiled(*case, dtype, arch)), flush=True)
