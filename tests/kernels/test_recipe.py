"""The recipe for every op: what a CPU runs, and its kernel, interpreted where there is no GPU.

Each is held against float64: an error is at most twice that of PyTorch's own computation in the
same dtype, of every output and every gradient, in shapes of each kind. Two runs are bitwise equal.
The interpreter computes bfloat16 wrongly, so kernels run in it on a GPU alone. What ops refuse
stands in `test_all_ops`, that each kernel compiles for GPUs which are not there in
`test_compile_gate`, and that references mean what the papers say in the test of each op.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from moebook import kernels
from moebook.kernels import Bank
from moebook.kernels.bank_scoring import Answers
from moebook.kernels.bank_scoring import bank_scoring as score_bank
from moebook.kernels.clusters import clusters as cluster
from moebook.kernels.groups import groups as group
from moebook.kernels.lora_mixture import lora_mixture as mix
from moebook.kernels.similarity import duplicates as find_duplicates
from moebook.kernels.similarity import nearest_rows as find_nearest

# The first product of autograd's own thread on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
installed = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]


class Op(NamedTuple):
    """One op with its letters filled in: what its builder below returns.

    Attributes:
        shapes: Of its inputs, all floating point.
        function: Called with them and ``impl``; returns all that the op does, as tensors.
        peer: What computes in the same dtype, to hold errors against.
    """

    shapes: list
    function: Callable
    peer: str = "reference"


def drawn(shapes, seed=0):
    """Draw tensors of a size that leaves products near 1, so that float16 holds them."""
    torch.manual_seed(seed)
    tensors = [torch.randn(shape) for shape in shapes]
    return [t / max(t.shape[-1], 1) ** 0.5 if t.dim() == 3 else t for t in tensors]


def of_experts(T, E, D, width):
    """Shapes of tokens, logits and a bank."""
    return [(T, D), (T, E), (E, 2 * width, D), (E, D, width)]


def route(T, E, K):
    def function(logits, impl):
        return kernels.route(logits, K, impl=impl)

    return Op([(T, E)], function)


def experts(T, E, K, D, width, act=F.silu):
    def function(x, logits, gate_up, down, impl):
        by = kernels.route(logits, K)
        return [kernels.experts(x, by, Bank(gate_up, down), act, impl=impl)]

    return Op(of_experts(T, E, D, width), function)


def split_experts(T, E, chosen, D, width, act=F.silu):
    def function(x, logits, gate_up, down, own_gate_up, own_down, impl):
        slots = torch.full((E,), -1)
        slots[torch.tensor(chosen, dtype=torch.long)] = torch.arange(len(chosen))
        banks = Bank(gate_up, down), Bank(own_gate_up, own_down)
        by, slots = kernels.route(logits, 2), slots.to(x.device)
        return [kernels.split_experts(x, by, *banks, slots, act, impl=impl)]

    own = [(len(chosen), 2 * width, D), (len(chosen), D, width)]
    return Op(of_experts(T, E, D, width) + own, function)


def adapters(T, E, K, D, R, apart=False):
    def function(h, other, logits, down, up, impl):
        by, source = kernels.route(logits, K), other if apart else None
        return [kernels.adapters(h, by, down, up, scale=0.7, source=source, impl=impl)]

    return Op([(T, D), (T, D), (T, E), (E, D, R), (E, R, D)], function)


def lora_mixture(T, N, D, R, width, idle=False):
    def function(x, base, gates, down, up, impl):
        live = torch.arange(N, device=x.device) >= idle
        return [mix(x, base, live * gates, down, up, 0.7, impl=impl)]

    return Op([(T, D), (T, width), (T, N), (N, R, D), (N, width, R)], function)


def balance_loss(T, E, K, masked=False):
    def function(logits, impl):
        mask = torch.arange(T, device=logits.device) % 3 > 0 if masked else None
        ids = kernels.route(logits, K).ids
        return [kernels.balance_loss(logits, ids, mask=mask, impl=impl)]

    return Op([(T, E)], function)


def bank_scoring(N, T, D, V, *lengths):
    def function(hidden, head, impl):
        token = torch.arange(sum(lengths), device=head.device)
        long = torch.tensor(lengths, dtype=torch.int64, device=head.device)
        answers = Answers(7 * token % T, 5 * token % V, long)
        return [score_bank(hidden, head, answers, impl=impl)]

    return Op([(N, T, D), (V, D)], function)


def nearest_rows(S, K, D):
    def function(pool, shots, impl):
        pool = pool * (torch.arange(S, device=pool.device) % 3 > 0)[:, None]  # some rows are zero
        found = find_nearest(pool, shots, S + 1, impl=impl)
        return [found.key[found.index.argsort()]]

    return Op([(S, D), (K, D)], function)


def duplicates(S, D, threshold, rule="standing"):
    def function(vectors, impl):
        key = 7 * torch.arange(S, device=vectors.device) % 5
        left = find_duplicates(vectors, key, threshold, rule=rule, impl=impl)
        return [torch.zeros(S, device=vectors.device).index_fill_(0, left, 1)]

    return Op([(S, D)], function)


def groups(M, N, G, diversity="ordered"):
    def function(similarity, impl):
        worth = 7 * torch.arange(M, device=similarity.device) % 5
        return group(similarity, worth, N, best=G, diversity=diversity, impl=impl)

    return Op([(M, M)], function)


def clusters(L, S, E, D):
    def function(points, centres, impl):
        return cluster(points, centres, impl=impl)

    # The reference sums in float64, whatever the points are.
    return Op([(L, S, D), (L, E, D)], function, peer="torch")


KINDS = ("even", "ragged", "idle", "one row", "no row")
"""Blocks that are full, several that are not, something that gets no row, one row, and none."""
OPS = {
    "route": {
        "even": route(64, 8, 2), "ragged": route(70, 5, 2), "idle": route(3, 8, 1),
        "one row": route(1, 4, 4), "no row": route(0, 3, 1), "one expert": route(9, 1, 1),
    },
    "experts": {
        "even": experts(16, 4, 2, 16, 16), "ragged": experts(40, 2, 1, 40, 33),
        "idle": experts(3, 8, 2, 4, 2), "one row": experts(1, 5, 3, 4, 2),
        "no row": experts(0, 3, 2, 4, 2), "odd": experts(7, 3, 1, 20, 5),
        "fetched": experts(12, 2, 1, 16, 24),  # widths that the memory accelerator can fetch
        "gelu": experts(12, 4, 2, 8, 4, F.gelu), "many rows": experts(200, 16, 3, 16, 8),
    },
    "split_experts": {
        "even": split_experts(16, 3, [2, 0], 16, 16), "ragged": split_experts(12, 4, [1], 8, 4),
        "idle": split_experts(2, 6, [], 8, 4), "one row": split_experts(1, 4, [2, 0], 8, 4),
        "no row": split_experts(0, 4, [3], 8, 4), "fetched": split_experts(12, 3, [2, 0], 16, 24),
        "gelu": split_experts(12, 4, [2, 0], 8, 4, F.gelu),
        "many rows": split_experts(600, 4, [3, 1], 16, 8),
    },
    "adapters": {
        "even": adapters(16, 4, 2, 16, 16), "ragged": adapters(45, 2, 2, 40, 5),
        "idle": adapters(2, 6, 2, 4, 2), "one row": adapters(1, 4, 2, 8, 4),
        "no row": adapters(0, 3, 2, 4, 2), "alone": adapters(7, 3, 1, 20, 5),
        "three": adapters(6, 5, 3, 20, 3), "apart": adapters(12, 4, 2, 8, 4, True),
        "apart, ragged": adapters(45, 2, 2, 40, 5, True), "many rows": adapters(1100, 4, 2, 16, 8),
    },
    "lora_mixture": {
        "even": lora_mixture(16, 4, 16, 16, 16), "ragged": lora_mixture(70, 1, 6, 3, 4),
        "idle": lora_mixture(6, 3, 4, 2, 5, idle=True), "one row": lora_mixture(1, 8, 8, 4, 8),
        "no row": lora_mixture(0, 2, 4, 2, 3), "one row, wide": lora_mixture(1, 4, 64, 8, 64),
        "many rows": lora_mixture(600, 4, 16, 4, 16),
    },
    "balance_loss": {
        "even": balance_loss(64, 8, 2), "ragged": balance_loss(70, 5, 2),
        "idle": balance_loss(3, 8, 1), "one row": balance_loss(1, 4, 2),
        "no row": balance_loss(0, 3, 1), "masked": balance_loss(70, 5, 2, True),
        "masked, idle": balance_loss(3, 8, 1, True), "masked, no row": balance_loss(0, 3, 1, True),
        "one expert": balance_loss(7, 1, 1), "many rows": balance_loss(600, 64, 6),
    },
    "bank_scoring": {
        "even": bank_scoring(2, 32, 32, 64, 16, 16), "ragged": bank_scoring(5, 30, 40, 70, 20, 1),
        "idle": bank_scoring(2, 5, 3, 300, 4, 0, 2), "one row": bank_scoring(1, 4, 5, 1, 1),
        "no row": bank_scoring(2, 3, 4, 9),
    },
    "nearest_rows": {
        "even": nearest_rows(64, 64, 32), "ragged": nearest_rows(140, 5, 20),
        "idle": nearest_rows(33, 70, 80), "one row": nearest_rows(1, 1, 1),
        "no row": nearest_rows(0, 2, 3),
    },
    "duplicates": {
        "even": duplicates(64, 32, 0.2), "ragged": duplicates(90, 3, 0.8),
        "idle": duplicates(40, 70, 0.9), "one row": duplicates(1, 1, 0.5),
        "no row": duplicates(0, 2, 0.5), "any": duplicates(90, 3, 0.8, "any"),
    },
    "groups": {
        "even": groups(10, 4, 9), "ragged": groups(16, 5, 30), "idle": groups(6, 6, 3),
        "one row": groups(1, 1, 1), "no row": groups(5, 1, 2),
        "inverse": groups(16, 5, 30, "inverse"),
    },
    "clusters": {
        "even": clusters(1, 64, 16, 32), "ragged": clusters(1, 150, 17, 40),
        "idle": clusters(2, 5, 9, 3), "one row": clusters(1, 1, 2, 5),
        "no row": clusters(1, 0, 2, 3), "layers": clusters(3, 9, 3, 4),
    },
}  # fmt: skip
REAL = {
    "route": route(70_000, 60, 6), "experts": experts(4096, 64, 6, 1024, 704),
    "split_experts": split_experts(4096, 64, [9, 3, 60], 1024, 704),
    "adapters": adapters(8192, 8, 2, 1024, 32),
    "lora_mixture": lora_mixture(4096, 4, 1024, 16, 1024),
    "duplicates": duplicates(20_000, 384, 0.1),
}  # fmt: skip
"""Sizes of use, for a GPU, of each op that has a kernel."""
NEAR = ("experts", "split_experts", "adapters", "lora_mixture")
"""Whose errors are of many numbers, none of which is a choice between near ones."""


KERNELS = [
    (op, kind, dtype)
    for op in REAL
    for kind in OPS[op]
    for dtype in DTYPES
    # Kernels know SiLU and two adapters a token; of many rows Python would take long.
    if kind not in ("gelu", "alone", "three", "many rows" if INTERPRETED else "")
]
PATHS = [
    (op, kind, dtype) for op in OPS for kind in OPS[op] for dtype in (torch.float32, torch.bfloat16)
]


def each(cases):
    """Run a test for each case, and name it after the case."""
    names = ["-".join(map(str, case)).replace("torch.", "") for case in cases]
    return pytest.mark.parametrize(("op", "kind", "dtype"), cases, ids=names)


def repeated(cases):
    return each([case for case in cases if case[1] in ("ragged", "many rows")])


def given(op, dtype, device, seed=0):
    return [t.to(device, dtype).requires_grad_() for t in drawn(op.shapes, seed)]


def outcome(op, inputs, impl):
    """Outputs, then the gradient of every input where something has one, all in float64."""
    ys = list(op.function(*inputs, impl))
    some = [y for y in ys if y.requires_grad]
    waves = [torch.arange(y.numel(), device=y.device).view_as(y).cos().to(y.dtype) for y in some]
    grads = ()
    if some:
        grads = torch.autograd.grad(some, inputs, waves, allow_unused=True, materialize_grads=True)
    return [tensor.detach().double() for tensor in (*ys, *grads)]


def check(op, impl, dtype, device, draws=8):
    """Hold each relative error, summed over draws since one says little, to the peer's."""
    errors = {impl: 0.0, op.peer: 0.0}
    for seed in range(draws):
        made = given(op, dtype, device, seed)
        exact = [t.detach().double().requires_grad_() for t in made]
        truth = outcome(op, exact, "reference")
        for name in errors:
            pairs = zip(outcome(op, made, name), truth, strict=True)
            found = torch.stack([torch.stack([(a - b).norm(), b.norm()]) for a, b in pairs])
            wrong, size = found.T
            errors[name] = errors[name] + wrong / size.where(size > 0, 1)
    assert (errors[impl] <= 2 * errors[op.peer] + 1e-7).all(), errors


def repeat(op, impl, dtype, device):
    inputs = given(op, dtype, device)
    first, second = (outcome(op, inputs, impl) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_op_stands_in_the_table_in_every_kind_of_shape():
    searching = {"bank_scoring", "clusters", "duplicates", "groups", "lora_mixture", "nearest_rows"}
    assert {*OPS} == {*kernels.__all__} - {"Bank", "Routing", "grouped"} | searching
    assert all({*KINDS} <= {*shapes} for shapes in OPS.values())


@pytest.mark.usefixtures("library")
@each(PATHS)
def test_what_a_cpu_runs_is_as_near_to_float64_as_pytorch(op, kind, dtype):
    check(OPS[op][kind], "auto", dtype, "cpu", draws=32 if kind == "one row" else 8)


@installed
@each(KERNELS)
def test_kernels_are_as_near_to_float64_as_pytorch(op, kind, dtype):
    slow = INTERPRETED and op in ("experts", "split_experts", "adapters")
    check(OPS[op][kind], "triton", dtype, DEVICE, draws=2 if slow else 8)


@pytest.mark.usefixtures("library")
@repeated(PATHS)
def test_two_runs_on_a_cpu_are_bitwise_equal(op, kind, dtype):
    repeat(OPS[op][kind], "auto", dtype, "cpu")


@installed
@repeated(KERNELS)
def test_two_runs_of_a_kernel_are_bitwise_equal(op, kind, dtype):
    repeat(OPS[op][kind], "triton", dtype, DEVICE)


@pytest.mark.gpu
@installed
@each([(op, "real", dtype) for op in REAL for dtype in DTYPES])
def test_two_runs_of_real_size_are_bitwise_equal_on_a_gpu(op, kind, dtype):
    repeat(REAL[op], "triton", dtype, "cuda")


@pytest.mark.gpu
@installed
@each([(op, "real", dtype) for op in NEAR for dtype in DTYPES])
def test_kernels_of_real_size_are_as_near_to_float64_on_a_gpu(op, kind, dtype):
    check(REAL[op], "triton", dtype, "cuda", draws=1)
