"""cuSOLVER on several GPUs: a matrix in blocks of columns that are dealt out to the GPUs; here to one.

Indices count from one. Each argument that lies on the devices is an array of one address per GPU.
"""

from __future__ import annotations

from ctypes import byref, c_int32, c_int64, c_void_p

import numpy as np
import pytest

from cudabind import driver
from cudabind.errors import CusolverError
from cudabind.sys import cusolverMg as mg

LIBRARIES = ("cusolverMg",)
F64 = mg.cudaDataType_t.CUDA_R_64F
BLOCK = 32  # columns
DEVICES = (c_int32 * 1)(0)


@pytest.fixture
def handle(gpu):
    made = gpu.make(mg.cusolverMgHandle_t, mg.cusolverMgCreate, mg.cusolverMgDestroy)
    mg.cusolverMgDeviceSelect(made, 1, DEVICES)
    return made


@pytest.fixture
def grid(gpu):
    mapping = mg.cusolverMgGridMapping_t.CUDALIBMG_GRID_MAPPING_COL_MAJOR
    return gpu.make(
        mg.cudaLibMgGrid_t,
        lambda made: mg.cusolverMgCreateDeviceGrid(made, 1, 1, DEVICES, mapping),
        mg.cusolverMgDestroyGrid,
    )


@pytest.fixture
def describe(gpu, grid):
    def make(rows, cols):
        return gpu.make(
            mg.cudaLibMgMatrixDesc_t,
            lambda made: mg.cusolverMgCreateMatrixDesc(made, rows, cols, rows, BLOCK, F64, grid),
            mg.cusolverMgDestroyMatrixDesc,
        )

    return make


@pytest.fixture
def blocks(gpu):
    """A matrix in whole blocks of columns: the last one is filled up."""

    def make(a):
        rows, cols = a.shape
        memory = gpu.poisoned((rows, -(-cols // BLOCK) * BLOCK), a.dtype, order="F")
        filled = memory.numpy()
        filled[:, :cols] = a
        memory.fill(filled)
        return memory

    return make


def each(address):
    """One address per GPU."""
    return (c_void_p * 1)(address)


def test_lu_solves(gpu, handle, describe, blocks, rng, solves):
    n, columns = 100, 5
    a, b = rng.standard_normal((n, n)), rng.standard_normal((n, columns))
    d_a, d_b, pivots = blocks(a), blocks(b), blocks(np.full((1, n), -1, np.int32))
    a_desc, b_desc = describe(n, n), describe(n, columns)
    matrix = (each(d_a.ptr), 1, 1, a_desc, each(pivots.ptr))
    system = (mg.cublasOperation_t.CUBLAS_OP_N, n, columns, *matrix, each(d_b.ptr), 1, 1, b_desc, F64)
    sizes = c_int64(), c_int64()
    mg.cusolverMgGetrf_bufferSize(handle, n, n, *matrix, F64, byref(sizes[0]))
    mg.cusolverMgGetrs_bufferSize(handle, *system, byref(sizes[1]))
    size, info = max(size.value for size in sizes), c_int32(-1)  # in elements
    work = each(gpu.workspace(8 * size))
    driver.cuCtxSynchronize()
    mg.cusolverMgGetrf(handle, n, n, *matrix, F64, work, size, byref(info))
    driver.cuCtxSynchronize()
    assert info.value == 0
    mg.cusolverMgGetrs(handle, *system, work, size, byref(info))
    result = d_b.numpy()[:, :columns]
    assert info.value == 0
    solves(result, a, b)


def test_symmetric_eigenvalues_come_to_host_memory(gpu, handle, describe, blocks, rng, close):
    n = 90
    a = rng.standard_normal((n, n))
    a = a + a.T
    d_a, w, size, info = blocks(a), np.full(n, np.nan), c_int64(), c_int32(-1)
    problem = (
        *(mg.cusolverEigMode_t.CUSOLVER_EIG_MODE_VECTOR, mg.cublasFillMode_t.CUBLAS_FILL_MODE_LOWER),
        *(n, each(d_a.ptr), 1, 1, describe(n, n), w.ctypes.data, F64, F64),
    )
    mg.cusolverMgSyevd_bufferSize(handle, *problem, byref(size))
    work = each(gpu.workspace(8 * size.value))
    driver.cuCtxSynchronize()
    mg.cusolverMgSyevd(handle, *problem, work, size.value, byref(info))
    v = d_a.numpy()[:, :n]
    assert info.value == 0
    bound = 10 * n * np.finfo(np.float64).eps * np.linalg.norm(a, 2)
    close(w, np.linalg.eigvalsh(a), bound)
    close(a @ v, v * w, bound)


def test_a_handle_without_a_gpu_is_refused_by_name(gpu):
    made = gpu.make(mg.cusolverMgHandle_t, mg.cusolverMgCreate, mg.cusolverMgDestroy)
    with pytest.raises(CusolverError) as caught:
        mg.cusolverMgDeviceSelect(made, -1, DEVICES)
    assert caught.value.name == "CUSOLVER_STATUS_INVALID_VALUE"
    assert caught.value.function == "cusolverMgDeviceSelect"
