"""cuSOLVERMp: systems of equations and eigenvalues of matrices in blocks that are dealt out to a grid of ranks.

Here to a grid of one, which has the whole matrix by columns. Indices count from one.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_size_t

import numpy as np
import pytest

from cudabind.errors import CusolverError
from cudabind.sys import cusolverMp as mp
from cudabind.sys import nccl
from cudabind.sys.cublas_types import cublasFillMode_t, cublasOperation_t
from cudabind.sys.cuda_types import cudaDataType_t

LIBRARIES = ("nccl", "cusolverMp")
F64 = cudaDataType_t.CUDA_R_64F
N = cublasOperation_t.CUBLAS_OP_N
LOWER = cublasFillMode_t.CUBLAS_FILL_MODE_LOWER
BLOCK = 32
EPS = float(np.finfo(np.float64).eps)
UNTOLD = -1  # poison: 0.8.0 writes no status of a solve
CHECKS_GRIDS = 900  # the first version that may refuse a grid of too many ranks: 0.8.0 did not


@pytest.fixture
def comm(gpu):
    """NCCL's communicator whose only rank is this process."""
    unique = nccl.ncclUniqueId()
    nccl.ncclGetUniqueId(byref(unique))
    return gpu.make(nccl.ncclComm_t, lambda made: nccl.ncclCommInitRank(made, 1, unique, 0), nccl.ncclCommDestroy)


@pytest.fixture
def handle(gpu):
    return gpu.make(mp.cusolverMpHandle_t, lambda made: mp.cusolverMpCreate(made, 0, None), mp.cusolverMpDestroy)


@pytest.fixture
def grid(gpu, comm, handle):
    mapping = mp.cusolverMpGridMapping_t.CUSOLVERMP_GRID_MAPPING_COL_MAJOR
    return gpu.make(
        mp.cusolverMpGrid_t,
        lambda made: mp.cusolverMpCreateDeviceGrid(handle, made, mp.ncclComm_t(comm.value), 1, 1, mapping),
        mp.cusolverMpDestroyGrid,
    )


@pytest.fixture
def describe(gpu, grid):
    def make(rows, cols):
        return gpu.make(
            mp.cusolverMpMatrixDescriptor_t,
            lambda made: mp.cusolverMpCreateMatrixDesc(made, grid, F64, rows, cols, BLOCK, BLOCK, 0, 0, rows),
            mp.cusolverMpDestroyMatrixDesc,
        )

    return make


@pytest.fixture
def run(gpu, handle):
    """`run(name, …)`: asks for the workspaces of a routine, calls it with them, and returns its `info`."""

    def call(name, *arguments):
        on_device, on_host = c_size_t(), c_size_t()
        getattr(mp, f"{name}_bufferSize")(handle, *arguments, byref(on_device), byref(on_host))
        memory, info = ctypes.create_string_buffer(max(on_host.value, 1)), gpu.poisoned(1, np.int32)
        work = gpu.workspace(on_device), on_device.value, ctypes.addressof(memory), on_host.value
        getattr(mp, name)(handle, *arguments, *work, info.ptr)
        return int(info.numpy()[0])

    return call


def residual(a, x, b):
    """Of a system of equations, as LAPACK's testers have it: in units of n · eps; below 30 is good."""
    scale = np.linalg.norm(a, 1) * np.linalg.norm(x, 1) * EPS * len(a)
    return np.linalg.norm(a @ x - b, 1) / scale


def test_it_tells_its_version(handle):
    version = c_int32(-1)
    mp.cusolverMpGetVersion(handle, byref(version))
    assert version.value >= 700


@pytest.mark.parametrize(("count", "of"), [(100, [36, 32, 32]), (5, [5, 0, 0]), (96, [32, 32, 32])])
def test_the_rows_of_each_rank(count, of):
    """Blocks of 32 are dealt out in turn; the last one is what is left."""
    assert [mp.cusolverMpNUMROC(count, BLOCK, rank, 0, 3) for rank in range(3)] == of


@pytest.mark.parametrize("n", [1, 33, 150])
def test_lu_solves(gpu, describe, run, rng, n):
    a, b = rng.standard_normal((n, n)), rng.standard_normal((n, 7))
    d_a, d_b, pivots = gpu.array(a, order="F"), gpu.array(b, order="F"), gpu.poisoned(n + BLOCK, np.int64)
    whole, right = describe(n, n), describe(n, 7)
    assert run("cusolverMpGetrf", n, n, d_a.ptr, 1, 1, whole, pivots.ptr, F64) == 0
    solved = run("cusolverMpGetrs", N, n, 7, d_a.ptr, 1, 1, whole, pivots.ptr, d_b.ptr, 1, 1, right, F64)
    assert solved in (0, UNTOLD)
    assert residual(a, d_b.numpy(), b) < 30


@pytest.mark.parametrize("n", [1, 40, 130])
def test_cholesky_solves(gpu, describe, run, rng, n):
    half = rng.standard_normal((n, n))
    a, b = half @ half.T + n * np.eye(n), rng.standard_normal((n, 3))
    d_a, d_b = gpu.array(a + np.triu(np.full((n, n), np.nan), 1), order="F"), gpu.array(b, order="F")
    whole, right = describe(n, n), describe(n, 3)
    assert run("cusolverMpPotrf", LOWER, n, d_a.ptr, 1, 1, whole, F64) == 0
    assert run("cusolverMpPotrs", LOWER, n, 3, d_a.ptr, 1, 1, whole, d_b.ptr, 1, 1, right, F64) in (0, UNTOLD)
    assert residual(a, d_b.numpy(), b) < 30


def test_a_matrix_that_is_not_positive_definite_is_reported(gpu, describe, run):
    n = 64
    a = np.diag(np.where(np.arange(n) == 40, -1.0, 2.0))
    try:
        info = run("cusolverMpPotrf", LOWER, n, gpu.array(a, order="F").ptr, 1, 1, describe(n, n), F64)
    except CusolverError as error:  # of 0.8.0
        info = {"CUSOLVER_STATUS_INTERNAL_ERROR": 41}.get(error.name)
    assert info == 41


def test_eigenvalues_and_vectors(gpu, describe, run, rng, close):
    n = 96
    half = rng.standard_normal((n, n))
    a = half + half.T
    d_a, values, vectors = gpu.array(a, order="F"), gpu.poisoned(n, np.float64), gpu.poisoned((n, n), np.float64, "F")
    whole, wanted = describe(n, n), ctypes.create_string_buffer(b"V")
    assert (
        run("cusolverMpSyevd", wanted, LOWER, n, d_a.ptr, 1, 1, whole, values.ptr, vectors.ptr, 1, 1, whole, F64) == 0
    )
    found, v = values.numpy(), vectors.numpy()
    size = np.linalg.norm(a, 2)
    close(found, np.linalg.eigvalsh(a), n * EPS * size)
    assert np.linalg.norm(a @ v - v * found, 1) < 30 * n * EPS * size
    assert np.linalg.norm(v.T @ v - np.eye(n), 1) < 30 * n * EPS


def test_a_grid_of_more_ranks_than_there_are_is_an_error(comm, handle):
    version, made = c_int32(), mp.cusolverMpGrid_t()
    mp.cusolverMpGetVersion(handle, byref(version))
    if version.value < CHECKS_GRIDS:
        pytest.skip(f"cuSOLVERMp {version.value} makes it all the same")
    mapping = mp.cusolverMpGridMapping_t.CUSOLVERMP_GRID_MAPPING_COL_MAJOR
    with pytest.raises(CusolverError):
        mp.cusolverMpCreateDeviceGrid(handle, made, mp.ncclComm_t(comm.value), 2, 2, mapping)
