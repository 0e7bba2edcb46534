"""Products by either library: float64 is the truth, and PyTorch's own error the measure."""

import pytest
import torch

from moebook.kernels import matmul
from moebook.kernels.matmul import is_compiled, is_wider, product

CPU = torch.device("cpu")


def factors(rows, inner, columns):
    """By name: the same sizes as they come, transposed, strided and with an offset, expanded."""
    torch.manual_seed(rows + inner)
    wide = torch.randn(2 * rows, 3 * inner + 1), torch.randn(2 * inner, columns + 5)
    return {
        "plain": (torch.randn(rows, inner), torch.randn(inner, columns)),
        "transposed": (torch.randn(inner, rows).T, torch.randn(columns, inner).T),
        "strided": (wide[0][::2, 1::3], wide[1][::2, 5:]),
        "expanded": (torch.randn(1, inner).expand(rows, -1), torch.randn(inner, columns)),
    }


def written(left, right):
    """The product in memory that holds NaN, and in columns of a wider matrix."""
    out = torch.full((len(left), right.shape[1]), torch.nan)
    table = torch.full((len(left), right.shape[1] + 3), torch.nan)
    assert product(left, right, out=out) is out
    product(left, right, out=table[:, 2:-1])
    assert table[:, :2].isnan().all()
    assert table[:, -1].isnan().all()
    torch.testing.assert_close(table[:, 2:-1], out, equal_nan=True)
    return out


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", ["plain", "transposed", "strided", "expanded"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 300, 7), (5, 1, 9), (300, 40, 33), (64, 257, 16)])
def test_error_is_at_most_twice_that_of_pytorch(sizes, kind):
    left, right = factors(*sizes)[kind]
    truth = left.double() @ right.double()
    limit = 2 * (torch.mm(left, right) - truth).norm() + 1e-7 * truth.norm()
    for got in (product(left, right), written(left, right)):
        assert (got - truth).norm() <= limit


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_of_a_large_result_are_the_whole(threads, monkeypatch):
    monkeypatch.setattr(matmul, "PIECE", 100)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        left, right = factors(500, 20, 30)["plain"]
        truth = left.double() @ right.double()
        assert (written(left, right) - truth).norm() <= 1e-6 * truth.norm()
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("sizes", [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_nothing_times_nothing_is_zero(sizes):
    rows, inner, columns = sizes
    left, right = torch.ones(rows, inner), torch.ones(inner, columns)
    for got in (product(left, right), written(left, right)):
        assert torch.equal(got, torch.zeros(rows, columns))


@pytest.mark.usefixtures("library")
def test_what_is_not_finite_comes_through_where_it_belongs():
    left, right = torch.ones(40, 20), torch.ones(20, 30)
    left[3, 4], left[5, 6], left[7, 0], left[8, :2] = torch.nan, torch.inf, -torch.inf, torch.inf
    left[8, 1] = -torch.inf
    right[0, 9] = 0  # times infinity
    for got in (product(left, right), written(left, right)):
        want = left.double() @ right.double()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        torch.testing.assert_close(got, want.float(), equal_nan=True)


@pytest.mark.usefixtures("library")
def test_it_computes_in_inference_mode_and_with_deterministic_algorithms():
    left, right = factors(40, 30, 20)["plain"]
    want = product(left, right)
    with torch.inference_mode():
        assert torch.equal(product(left, right), want)
        assert torch.equal(written(left, right), want)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(written(left, right), want)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_left_to_pytorch(dtype):
    left, right = (part.to(dtype) for part in factors(40, 30, 20)["plain"])
    assert torch.equal(product(left, right), torch.mm(left, right))


def test_only_large_products_are_compiled_in_float32_and_all_in_bfloat16(monkeypatch):
    monkeypatch.setattr(matmul, "is_wider", lambda: True)
    enough = matmul.ENOUGH
    assert is_compiled(torch.float32, CPU, enough)
    assert not is_compiled(torch.float32, CPU, enough - 1)
    assert is_compiled(torch.bfloat16, CPU, 1)
    assert not is_compiled(torch.float64, CPU, enough)
    assert not is_compiled(torch.bfloat16, torch.device("cuda"), enough)
    monkeypatch.setattr(matmul, "is_wider", lambda: False)
    assert not is_compiled(torch.float32, CPU, enough)
    assert is_compiled(torch.bfloat16, CPU, 1)


@pytest.fixture
def amd(monkeypatch, tmp_path):
    """A machine where all holds that makes oneDNN the wider one."""
    info = tmp_path / "cpuinfo"
    info.write_text("vendor_id\t: AuthenticAMD\n")
    monkeypatch.setattr(matmul, "INFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None, raising=False)
    return is_wider.__wrapped__


def test_onednn_is_wider_on_amd_with_avx512_where_pytorch_has_mkl(amd, monkeypatch):
    assert amd()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not amd()


def test_onednn_is_not_taken_on_other_processors(amd, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not amd()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    matmul.INFO.write_text("vendor_id\t: GenuineIntel\n")
    assert not amd()


def test_onednn_is_not_taken_where_the_system_does_not_tell_the_processor(amd):
    matmul.INFO.unlink()
    assert not amd()


def test_onednn_is_not_taken_where_pytorch_lacks_the_op(amd, monkeypatch):
    class Ops:
        """A namespace that has none."""

    monkeypatch.setattr(torch.ops, "mkldnn", Ops())
    assert not amd()
