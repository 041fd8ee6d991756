"""cuBLASMp: products of matrices in blocks that are dealt out to a grid of ranks; here to a grid of one.

Indices count from one. Each rank has its blocks by columns; the only one of this grid has the whole matrix.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_double, c_int32, c_size_t

import numpy as np
import pytest

from cudabind.errors import CublasMpError
from cudabind.sys import cublasMp as mp
from cudabind.sys import nccl
from cudabind.sys.cublas_types import (
    cublasComputeType_t,
    cublasDiagType_t,
    cublasFillMode_t,
    cublasOperation_t,
    cublasSideMode_t,
)
from cudabind.sys.cuda_types import cudaDataType_t

LIBRARIES = ("nccl", "cublasMp")
F64 = cudaDataType_t.CUDA_R_64F
SUMS = cublasComputeType_t.CUBLAS_COMPUTE_64F
N, T = cublasOperation_t.CUBLAS_OP_N, cublasOperation_t.CUBLAS_OP_T
BLOCK = 32
CHECKS_GRIDS = 800  # the first version that may refuse a grid of too many ranks: 0.7.0 did not


@pytest.fixture
def comm(gpu):
    """NCCL's communicator whose only rank is this process."""
    unique = nccl.ncclUniqueId()
    nccl.ncclGetUniqueId(byref(unique))
    return gpu.make(nccl.ncclComm_t, lambda made: nccl.ncclCommInitRank(made, 1, unique, 0), nccl.ncclCommDestroy)


@pytest.fixture
def handle(gpu):
    return gpu.make(mp.cublasMpHandle_t, lambda made: mp.cublasMpCreate(made, None), mp.cublasMpDestroy)


@pytest.fixture
def grid(gpu, comm):
    by_columns = mp.cublasMpGridLayout_t.CUBLASMP_GRID_LAYOUT_COL_MAJOR
    return gpu.make(
        mp.cublasMpGrid_t,
        lambda made: mp.cublasMpGridCreate(1, 1, by_columns, mp.ncclComm_t(comm.value), made),
        mp.cublasMpGridDestroy,
    )


@pytest.fixture
def describe(gpu, grid):
    def make(rows, cols):
        return gpu.make(
            mp.cublasMpMatrixDescriptor_t,
            lambda made: mp.cublasMpMatrixDescriptorCreate(rows, cols, BLOCK, BLOCK, 0, 0, rows, F64, grid, made),
            mp.cublasMpMatrixDescriptorDestroy,
        )

    return make


@pytest.fixture
def run(gpu, handle):
    """`run(name, …)`: asks for the workspaces of a routine, and calls it with them."""

    def call(name, *arguments):
        on_device, on_host = c_size_t(), c_size_t()
        getattr(mp, f"{name}_bufferSize")(handle, *arguments, byref(on_device), byref(on_host))
        memory = ctypes.create_string_buffer(max(on_host.value, 1))
        work = gpu.workspace(on_device), on_device.value, ctypes.addressof(memory), on_host.value
        getattr(mp, name)(handle, *arguments, *work)

    return call


def factor(number):
    return byref(c_double(number))


def test_it_tells_its_version():
    version = c_int32(-1)
    mp.cublasMpGetVersion(byref(version))
    assert version.value >= 500


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (70, 45, 33), (129, 64, 200)])
@pytest.mark.parametrize("turned", [False, True], ids=["a", "a of columns"])
def test_gemm(gpu, describe, run, rng, product, m, n, k, turned):
    a, b, c = rng.standard_normal((m, k)), rng.standard_normal((k, n)), rng.standard_normal((m, n))
    given = a.T if turned else a
    d_a, d_b, d_c = (gpu.array(each, order="F") for each in (given, b, c))
    operands = d_a.ptr, 1, 1, describe(*given.shape), d_b.ptr, 1, 1, describe(k, n)
    run("cublasMpGemm", T if turned else N, N, m, n, k, factor(1.5), *operands, factor(-0.5),
        d_c.ptr, 1, 1, describe(m, n), SUMS)  # fmt: skip
    product(d_c.numpy(), a, b, alpha=1.5, beta=-0.5, c=c)


def test_gemm_of_a_part_of_its_operands(gpu, describe, run, rng, product):
    """From the 34th row and column of A on, into C from its 33rd, where the second blocks begin: the rest stays."""
    a, b, c = (rng.standard_normal((96, 96)) for _ in range(3))
    d_a, d_b, d_c = (gpu.array(each, order="F") for each in (a, b, c))
    whole = describe(96, 96)
    run("cublasMpGemm", N, N, 64, 32, 64, factor(1), d_a.ptr, 33, 33, whole, d_b.ptr, 33, 1, whole, factor(0),
        d_c.ptr, 33, 65, whole, SUMS)  # fmt: skip
    result = d_c.numpy()
    product(result[32:, 64:], a[32:, 32:], b[32:, :32])
    result[32:, 64:] = c[32:, 64:]
    assert np.array_equal(result, c)


def test_syrk_writes_one_triangle(gpu, describe, run, rng, close):
    n, k = 75, 40
    a, c = rng.standard_normal((n, k)), rng.standard_normal((n, n))
    d_a, d_c = gpu.array(a, order="F"), gpu.array(c, order="F")
    lower = cublasFillMode_t.CUBLAS_FILL_MODE_LOWER
    run("cublasMpSyrk", lower, N, n, k, factor(2), d_a.ptr, 1, 1, describe(n, k), factor(1),
        d_c.ptr, 1, 1, describe(n, n), SUMS)  # fmt: skip
    result, inside = d_c.numpy(), np.tril(np.ones((n, n), bool))
    expected = np.where(inside, 2 * a @ a.T + c, c)
    close(result, expected, 1e-13 * (2 * np.abs(a) @ np.abs(a.T) + np.abs(c)) * inside)


def test_trsm(gpu, describe, run, rng, close):
    n, nrhs = 90, 37
    a = np.tril(rng.standard_normal((n, n))) + n * np.eye(n)
    x = rng.standard_normal((n, nrhs))
    upper = np.triu(np.full((n, n), np.nan), 1)  # is not to be read
    d_a, d_b = gpu.array(a + upper, order="F"), gpu.array(a @ x, order="F")
    run("cublasMpTrsm", cublasSideMode_t.CUBLAS_SIDE_LEFT, cublasFillMode_t.CUBLAS_FILL_MODE_LOWER, N,
        cublasDiagType_t.CUBLAS_DIAG_NON_UNIT, n, nrhs, factor(1), d_a.ptr, 1, 1, describe(n, n),
        d_b.ptr, 1, 1, describe(n, nrhs), SUMS)  # fmt: skip
    close(d_b.numpy(), x, 1e-11)


def test_matmul_by_its_descriptor(gpu, describe, run, rng, product):
    m, n, k = 64, 96, 32
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    matmul = gpu.make(
        mp.cublasMpMatmulDescriptor_t,
        lambda made: mp.cublasMpMatmulDescriptorCreate(made, SUMS),
        mp.cublasMpMatmulDescriptorDestroy,
    )
    d_a, d_b, d_d = gpu.array(a, order="F"), gpu.array(b, order="F"), gpu.poisoned((m, n), np.float64, "F")
    to = d_d.ptr, 1, 1, describe(m, n)
    run("cublasMpMatmul", matmul, m, n, k, factor(1), d_a.ptr, 1, 1, describe(m, k), d_b.ptr, 1, 1, describe(k, n),
        factor(0), *to, *to)  # fmt: skip
    product(d_d.numpy(), a, b)


def test_a_grid_of_more_ranks_than_there_are_is_an_error(comm):
    version, made = c_int32(), mp.cublasMpGrid_t()
    mp.cublasMpGetVersion(byref(version))
    if version.value < CHECKS_GRIDS:
        pytest.skip(f"cuBLASMp {version.value} makes it all the same")
    with pytest.raises(CublasMpError):
        mp.cublasMpGridCreate(
            2, 2, mp.cublasMpGridLayout_t.CUBLASMP_GRID_LAYOUT_COL_MAJOR, mp.ncclComm_t(comm.value), made
        )
