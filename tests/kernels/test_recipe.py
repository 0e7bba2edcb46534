"""The recipe for every op: what a CPU runs, and its kernel, interpreted where there is no GPU.

An error is at most twice that of PyTorch's own computation in the same dtype, of every output and
every gradient, in shapes of each kind; two runs are bitwise equal. The interpreter computes
bfloat16 wrongly, so kernels run in it on a GPU alone.
"""

import os
from importlib.util import find_spec
from inspect import isfunction

import pytest
import torch
from calls import call, draw, places
from torch.nn import functional as F

from moebook import kernels

# The first product of autograd's own thread on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
installed = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed"
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
KINDS = ("even", "ragged", "idle", "one row", "no row")
"""Blocks that are full, several that are not, something that gets no row, one row, and none."""
LETTERS = {
    "route": "T E K",
    "experts": "T E K D F act",
    "split_experts": "T E chosen D F act",
    "adapters": "T E K D R apart",
    "lora_mixture": "T N D R O idle",
    "balance_loss": "T E K masked",
    "bank_scoring": "N T D V lengths",
    "nearest_rows": "S K D",
    "duplicates": "S D threshold rule",
}
"""What the numbers of a shape below are; the last may be left out."""
OPS = {
    "route": {
        "even": (64, 8, 2),
        "ragged": (70, 5, 2),
        "idle": (3, 8, 1),
        "one row": (1, 4, 4),
        "no row": (0, 3, 1),
        "one expert": (9, 1, 1),
    },
    "experts": {
        "even": (16, 2, 2, 16, 16),
        "ragged": (40, 2, 1, 40, 33),
        "idle": (3, 5, 2, 4, 2),
        "one row": (1, 5, 3, 4, 2),
        "no row": (0, 3, 2, 4, 2),
        "odd": (7, 3, 1, 20, 5),
        "fetched": (12, 2, 1, 16, 24),  # widths that the memory accelerator can fetch
        "gelu": (12, 4, 2, 8, 4, F.gelu),
        "many rows": (200, 16, 3, 16, 8),
    },
    "split_experts": {
        "even": (16, 3, [2, 0], 16, 16),
        "ragged": (12, 4, [1], 8, 4),
        "idle": (2, 6, [], 8, 4),
        "one row": (1, 4, [2, 0], 8, 4),
        "no row": (0, 4, [3], 8, 4),
        "fetched": (12, 3, [2, 0], 16, 24),
        "gelu": (12, 4, [2, 0], 8, 4, F.gelu),
        "many rows": (300, 4, [3, 1], 16, 8),
    },
    "adapters": {
        "even": (16, 2, 2, 16, 16),
        "ragged": (45, 2, 2, 40, 5),
        "idle": (2, 3, 2, 4, 2),
        "one row": (1, 3, 2, 8, 4),
        "no row": (0, 3, 2, 4, 2),
        "alone": (7, 3, 1, 20, 5),
        "three": (6, 5, 3, 20, 3),
        "apart": (12, 3, 2, 8, 4, True),
        "apart, ragged": (45, 2, 2, 40, 5, True),
        "many rows": (300, 2, 2, 16, 8),
    },
    "lora_mixture": {
        "even": (16, 4, 16, 16, 16),
        "ragged": (70, 1, 6, 3, 4),
        "idle": (6, 3, 4, 2, 5, True),
        "one row": (1, 8, 8, 4, 8),
        "no row": (0, 2, 4, 2, 3),
        "one row, wide": (1, 4, 64, 8, 64),
        "many rows": (300, 4, 16, 4, 16),
    },
    "balance_loss": {
        "even": (64, 8, 2),
        "ragged": (70, 5, 2),
        "idle": (3, 8, 1),
        "one row": (1, 4, 2),
        "no row": (0, 3, 1),
        "masked": (70, 5, 2, True),
        "masked, idle": (3, 8, 1, True),
        "masked, no row": (0, 3, 1, True),
        "one expert": (7, 1, 1),
        "many rows": (600, 64, 6),
    },
    "bank_scoring": {
        "even": (2, 32, 32, 64, [16, 16]),
        "ragged": (5, 30, 40, 70, [20, 1]),
        "idle": (2, 5, 3, 300, [4, 0, 2]),
        "one row": (1, 4, 5, 1, [1]),
        "no row": (2, 3, 4, 9, []),
    },
    "nearest_rows": {
        "even": (64, 64, 32),
        "ragged": (140, 5, 20),
        "idle": (33, 70, 80),
        "one row": (1, 1, 1),
        "no row": (0, 2, 3),
    },
    "duplicates": {
        "even": (64, 32, 0.2),
        "ragged": (50, 3, 0.8),
        "idle": (40, 70, 0.9),
        "one row": (1, 1, 0.5),
        "no row": (0, 2, 0.5),
        "any": (50, 3, 0.8, "any"),
        "below": (40, 2, -1.0),
    },
}
REAL = {
    "route": (70_000, 60, 6),
    "experts": (4096, 64, 6, 1024, 704),
    "split_experts": (4096, 64, [9, 3, 60], 1024, 704),
    "adapters": (8192, 8, 2, 1024, 32),
    "lora_mixture": (4096, 4, 1024, 16, 1024),
    "duplicates": (20_000, 384, 0.1),
}
"""Sizes of use, for a GPU, of each op that has a kernel."""
NEAR = ("experts", "split_experts", "adapters", "lora_mixture")
"""Whose errors are of many numbers, none of which is a choice between near ones."""
MULTIPLYING = (*NEAR, "bank_scoring", "nearest_rows", "duplicates")
"""Whose products in float32 either library does."""

OF_16_BITS = ("even", "fetched", "apart", "many rows")
"""Kinds that `make test` interprets in float16 alone."""
OF_32_BITS = ("idle", "one row", "no row", "one expert", "ragged", "apart, ragged")
"""Kinds that it interprets in float32 alone; the others in both, `make soak` all of them."""
KERNELS = [
    (op, kind, dtype)
    for op in REAL
    for kind in OPS[op]
    for dtype in DTYPES
    # Kernels know SiLU and two adapters a token; of many rows Python would take long.
    if kind not in ("gelu", "alone", "three", "many rows" if INTERPRETED else "")
]
PATHS = [
    (op, kind, dtype, library)
    for op in OPS
    for kind in OPS[op]
    for dtype in (torch.float32, torch.bfloat16)
    for library in ("PyTorch", "oneDNN")
    if library == "PyTorch" or (op in MULTIPLYING and dtype == torch.float32)
]


def each(cases):
    """Run a test for each case, and name it after the case."""
    arguments = ("op", "kind", "dtype", "library")[: len(cases[0])]
    named = []
    for case in cases:
        name = "-".join(map(str, case)).replace("torch.", "")
        marks = [pytest.mark.soak] if repeats(*case) else []
        named.append(pytest.param(*case, id=name, marks=marks))
    return pytest.mark.parametrize(arguments, named, indirect=arguments[3:])


def repeats(op, kind, dtype, library=None):
    """Whether an interpreted kernel's case has a sibling in the other dtype."""
    if not INTERPRETED or library:
        return False
    other = {torch.float32: OF_16_BITS, torch.float16: OF_32_BITS}
    return kind in other.get(dtype, ())


def case(op, shape):
    """Sizes and settings by letter and name."""
    named = dict(zip(LETTERS[op].split(), shape, strict=False))
    return named | ({"N": len(named["chosen"])} if "chosen" in named else {})


def tensors(op, case, of):
    """All that the call takes, from its floating-point tensors."""
    device = next(iter(of.values())).device

    def numbers(end, factor=1):
        return factor * torch.arange(end, device=device)

    match op:
        case "split_experts":
            return {**of, "slots": places(case["E"], case["chosen"], device)}
        case "adapters":
            return of if case.get("apart") else {**of, "source": None}
        case "lora_mixture":
            return {
                **of,
                "gates": (numbers(case["N"]) >= case.get("idle", 0)) * of["gates"],
            }
        case "balance_loss":
            mask = numbers(case["T"]) % 3 > 0 if case.get("masked") else None
            return {
                **of,
                "ids": kernels.route(of["logits"], case["K"]).ids,
                "mask": mask,
            }
        case "bank_scoring":
            lengths = torch.tensor(case["lengths"], dtype=torch.int64, device=device)
            tokens = sum(case["lengths"])
            readers = numbers(tokens, 7) % case["T"]
            targets = numbers(tokens, 5) % case["V"]
            return {**of, "readers": readers, "targets": targets, "lengths": lengths}
        case "nearest_rows":
            some_zero = (numbers(case["S"]) % 3 > 0)[:, None]
            return {**of, "pool": of["pool"] * some_zero}
        case "duplicates":
            return {**of, "key": numbers(case["S"], 7) % 5}
    return of


def outputs(op, case, of, impl):
    """All that the op does, as tensors."""
    names = ("K", "act", "threshold", "rule")
    settings = {name: case[name] for name in names if name in case}
    if op == "nearest_rows":
        settings = {"count": case["S"] + 1}
    result = call(op, tensors(op, case, of), impl, **settings)
    if op == "nearest_rows":
        return [result.key[result.index.argsort()]]
    if op == "duplicates":
        return [torch.zeros(case["S"], device=result.device).index_fill_(0, result, 1)]
    return [result] if isinstance(result, torch.Tensor) else list(result)


def outcome(op, case, of, impl):
    """Outputs, then the gradient of every input where something has one, all in float64."""
    ys = outputs(op, case, of, impl)
    graded = [y for y in ys if y.requires_grad]
    waves = []
    for y in graded:
        numbers = torch.arange(y.numel(), device=y.device).view_as(y)
        waves.append(numbers.cos().to(y.dtype))
    grads = ()
    zero_where_none = {"allow_unused": True, "materialize_grads": True}
    if graded:
        grads = torch.autograd.grad(graded, list(of.values()), waves, **zero_where_none)
    return [tensor.detach().double() for tensor in (*ys, *grads)]


def check(op, shape, impl, dtype, device, draws=8, repeated=True, limit=2):
    """Hold each relative error, summed over draws, to PyTorch's own; the last draw runs twice."""
    sizes = case(op, shape)
    errors = {impl: 0.0, "reference": 0.0}
    for seed in range(draws):
        of = {
            n: t.requires_grad_()
            for n, t in draw(op, sizes, dtype, device, seed).items()
        }
        exact = {name: t.detach().double().requires_grad_() for name, t in of.items()}
        truth = outcome(op, sizes, exact, "reference")
        for name in errors:
            got = outcome(op, sizes, of, name)
            wrong = torch.stack(
                [(a - b).norm() for a, b in zip(got, truth, strict=True)]
            )
            size = torch.stack([right.norm() for right in truth])
            errors[name] = errors[name] + wrong / size.where(size > 0, 1)
            if name == impl and repeated and seed == draws - 1:
                again = outcome(op, sizes, of, impl)
                assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    assert (errors[impl] <= limit * errors["reference"] + 1e-7).all(), errors


def test_every_op_stands_in_the_table_in_every_kind_of_shape():
    searching = {"bank_scoring", "duplicates", "lora_mixture", "nearest_rows"}
    offered = {name for name, thing in vars(kernels).items() if isfunction(thing)}
    assert {*OPS} == offered - {"grouped"} | searching
    assert all({*KINDS} <= {*shapes} for shapes in OPS.values())


@each(PATHS)
def test_what_a_cpu_runs_is_as_near_to_float64_as_pytorch(op, kind, dtype, library):
    many = op in NEAR and kind in ("even", "ragged", "fetched", "gelu", "many rows")
    draws = 2 if many else 8
    if kind == "one row":
        draws = 32
    check(op, OPS[op][kind], "auto", dtype, "cpu", draws)


@installed
@each(KERNELS)
def test_kernels_are_as_near_to_float64_as_pytorch(op, kind, dtype):
    draws = 8
    repeated = kind in ("ragged", "many rows")
    if INTERPRETED and op != "lora_mixture":
        # Interpreting is slow: the more numbers a draw has, the fewer draws.
        many = op in NEAR and kind in ("even", "ragged", "fetched", "apart, ragged")
        draws = 4 if kind in ("idle", "one row") else 2
        if many:
            draws = 1
    check(op, OPS[op][kind], "triton", dtype, DEVICE, draws, repeated)


@pytest.mark.gpu
@installed
@each([(op, "real", dtype) for op in REAL for dtype in DTYPES])
def test_kernels_of_real_size_repeat_and_are_as_near_to_float64_on_a_gpu(
    op, kind, dtype
):
    check(
        op,
        REAL[op],
        "triton",
        dtype,
        "cuda",
        draws=1,
        limit=2 if op in NEAR else torch.inf,
    )
