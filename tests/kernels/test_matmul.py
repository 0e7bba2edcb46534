"""Products by either library, and kept memory: handed out again when nothing shares it any more."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from moebook.kernels import Bank, experts, matmul, route
from moebook.kernels.matmul import LARGE, empty, is_compiled, is_wider, product

CPU = torch.device("cpu")
ONE = torch.zeros(1)
SHAPE = (LARGE // 4, 2)


def factors(rows, inner, columns, kind="plain"):
    """Factors of one size as they come, transposed, strided and with an offset, or expanded."""
    torch.manual_seed(rows + inner)
    match kind:
        case "plain":
            return torch.randn(rows, inner), torch.randn(inner, columns)
        case "transposed":
            return torch.randn(inner, rows).T, torch.randn(columns, inner).T
        case "strided":
            wide = (
                torch.randn(2 * rows, 3 * inner + 1),
                torch.randn(2 * inner, columns + 5),
            )
            return wide[0][::2, 1::3], wide[1][::2, 5:]
    return torch.randn(1, inner).expand(rows, -1), torch.randn(inner, columns)


def products(left, right):
    """The product in new memory, in memory that holds NaN, and in columns of a wider matrix."""
    out = torch.full((len(left), right.shape[1]), torch.nan)
    table = torch.full((len(left), right.shape[1] + 3), torch.nan)
    assert product(left, right, out=out) is out
    product(left, right, out=table[:, 2:-1])
    assert table[:, :2].isnan().all()
    assert table[:, -1].isnan().all()
    torch.testing.assert_close(table[:, 2:-1], out, equal_nan=True)
    return product(left, right), out


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", ["plain", "transposed", "strided", "expanded"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 300, 7), (5, 1, 9), (300, 40, 33), (64, 257, 16)]
)
def test_error_is_at_most_twice_that_of_pytorch(sizes, kind):
    left, right = factors(*sizes, kind)
    truth = left.double() @ right.double()
    limit = 2 * (torch.mm(left, right) - truth).norm() + 1e-7 * truth.norm()
    assert all((got - truth).norm() <= limit for got in products(left, right))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_of_a_large_result_are_the_whole(threads, request, monkeypatch):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    monkeypatch.setattr(matmul, "PIECE", 100)
    left, right = factors(500, 20, 30)
    truth = left.double() @ right.double()
    assert all(
        (got - truth).norm() <= 1e-6 * truth.norm() for got in products(left, right)
    )


@pytest.mark.usefixtures("library")
def test_what_is_empty_or_not_finite_comes_through_where_it_belongs():
    left = torch.ones(40, 20)
    right = torch.ones(20, 30)
    left[3, 4] = torch.nan
    left[5, 6] = torch.inf
    left[7, 0] = -torch.inf
    left[8, :2] = torch.inf
    left[8, 1] = -torch.inf
    right[0, 9] = 0  # times infinity
    empty = (
        (torch.ones(n, k), torch.ones(k, m))
        for n, k, m in ((0, 4, 3), (4, 0, 3), (4, 3, 0))
    )
    for one, other in ((left, right), *empty):
        want = (one.double() @ other.double()).float()
        for got in products(one, other):
            torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.usefixtures("library")
def test_it_computes_in_all_modes_and_leaves_other_dtypes_to_pytorch(request):
    left, right = factors(40, 30, 20)
    want = product(left, right)
    with torch.inference_mode():
        assert all(torch.equal(got, want) for got in products(left, right))
    request.addfinalizer(partial(torch.use_deterministic_algorithms, False))
    torch.use_deterministic_algorithms(True)
    assert torch.equal(products(left, right)[1], want)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        one = left.to(dtype)
        other = right.to(dtype)
        assert torch.equal(product(one, other), torch.mm(one, other))


@pytest.mark.parametrize("wider", [True, False])
def test_only_large_products_are_compiled_in_float32_and_all_in_bfloat16(
    wider, monkeypatch
):
    monkeypatch.setattr(matmul, "is_wider", lambda: wider)
    enough = matmul.ENOUGH
    assert is_compiled(torch.float32, CPU, enough) is wider
    assert is_compiled(torch.bfloat16, CPU, 1)
    for dtype, on, size in (
        (torch.float32, CPU, enough - 1),
        (torch.float64, CPU, enough),
        (torch.bfloat16, torch.device("cuda"), enough),
    ):
        assert not is_compiled(dtype, on, size)


@pytest.mark.parametrize("lacking", ["", "mkl", "avx512", "amd", "file", "op"])
def test_onednn_is_wider_on_amd_with_avx512_where_pytorch_has_mkl(
    lacking, monkeypatch, tmp_path
):
    info = tmp_path / "cpuinfo"
    vendor = "GenuineIntel" if lacking == "amd" else "AuthenticAMD"
    if lacking != "file":
        info.write_text(f"vendor_id\t: {vendor}\n")
    capability = "AVX2" if lacking == "avx512" else "AVX512"
    monkeypatch.setattr(matmul, "INFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: lacking != "mkl")
    if lacking == "op":
        monkeypatch.setattr(torch.ops, "mkldnn", object())
    else:
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None, raising=False)
    assert is_wider.__wrapped__() is not bool(lacking)


@pytest.fixture(autouse=True)
def nothing_free(monkeypatch):
    monkeypatch.setattr(matmul, "_free", {})


def test_memory_comes_back_for_any_shape_when_the_last_tensor_that_shares_it_is_gone():
    first = empty(SHAPE, ONE)
    place = first.data_ptr()
    row = first[3]
    assert place % 64 == 0
    assert empty(SHAPE, ONE).data_ptr() != place
    del first
    assert empty(SHAPE, ONE).data_ptr() != place, "a row of it is still held"
    array = row.numpy()
    del row
    assert empty(SHAPE, ONE).data_ptr() != place, "an array of it is still held"
    matmul._free.clear()  # else another would do
    del array
    for shape, like in ((SHAPE, ONE), ((3, LARGE // 4), ONE.bfloat16())):
        again = empty(shape, like)
        assert (again.data_ptr(), again.shape, again.dtype) == (
            place,
            shape,
            like.dtype,
        )
        del again
    assert empty((SHAPE[0], 1), ONE.bfloat16()).data_ptr() != place, "a quarter of it"
    assert empty((SHAPE[0], 3), ONE).data_ptr() != place, "more than it"


def test_no_more_is_kept_than_is_allowed_and_the_longest_free_goes_first(monkeypatch):
    monkeypatch.setattr(matmul, "FREE", 5 * LARGE)
    held = [empty((LARGE * size // 4,), ONE) for size in (2, 1, 2, 6)]
    places = [tensor.data_ptr() for tensor in held]
    del held[0], held[0], held[0]
    assert [block.ctypes.data for block in matmul._free.values()] == places[:3]
    empty((LARGE * 3 // 4,), ONE)
    assert next(iter(matmul._free.values())).ctypes.data == places[2], (
        "the first two went"
    )
    assert [len(block) // LARGE for block in matmul._free.values()] == [2, 3]
    held.pop()
    assert not matmul._free, "more than is allowed by itself"
    assert empty((2, 3), ONE).shape == (2, 3) and not matmul._free, (
        "small tensors are not kept"
    )


def test_threads_never_share_a_block():
    wrong = []

    def work(number):
        for _ in range(50):
            mine = empty((LARGE // 4,), ONE).fill_(number)
            if not (mine == number).all():
                wrong.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong and len(matmul._free) <= 8, "each held one while it took another"


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_training_is_bitwise_what_it_is_in_new_memory(
    optimizer, set_to_none, monkeypatch
):
    def train(large):
        """Two passes a step; gradients of one step and of one pass are held to the end."""
        monkeypatch.setattr(matmul, "LARGE", large)
        torch.manual_seed(0)
        bank = Bank(
            *(torch.nn.Parameter(torch.randn(4, *s)) for s in ((12, 8), (8, 6)))
        )
        steps = optimizer(bank, lr=0.01)
        held = []
        for step in range(4):
            for _ in range(2):
                x = torch.randn(30, 8, requires_grad=True)
                y = experts(x, route(x[:, :4], 2), bank, F.silu)
                y.square().mean().backward()
                held += [x.grad, y.detach()]
                held += [weight.grad for weight in bank if step == 1 and set_to_none]
            steps.step()
            steps.zero_grad(set_to_none=set_to_none)
        return [*held, *(weight.detach() for weight in bank)]

    assert all(map(torch.equal, train(1), train(2**60)))
    assert matmul._free
