"""cublasXt: products of matrices in host memory, which it cuts into tiles and spreads over the GPUs it is given."""

from __future__ import annotations

from ctypes import byref, c_double, c_int32

import numpy as np
import pytest

from cudabind.errors import CublasError
from cudabind.sys import cublasXt as xt

LIBRARIES = ("cublasXt",)
OP = xt.cublasOperation_t
ONE, ZERO = c_double(1), c_double(0)


@pytest.fixture
def handle(gpu):
    """A handle that uses the first GPU, with tiles so small that every matrix here has several."""
    made = gpu.make(xt.cublasXtHandle_t, xt.cublasXtCreate, xt.cublasXtDestroy)
    xt.cublasXtDeviceSelect(made, 1, (c_int32 * 1)(0))
    xt.cublasXtSetBlockDim(made, 64)
    return made


def test_the_size_of_a_tile_is_what_was_set(handle):
    size = c_int32()
    xt.cublasXtGetBlockDim(handle, byref(size))
    assert size.value == 64


def test_gemm_of_host_matrices_larger_than_a_tile(handle, rng, product):
    m, n, k = 150, 201, 97
    a, b = (np.asfortranarray(rng.standard_normal(shape)) for shape in ((m, k), (k, n)))
    c = np.full((m, n), np.nan, order="F")
    xt.cublasXtDgemm(
        *(handle, OP.CUBLAS_OP_N, OP.CUBLAS_OP_N, m, n, k, byref(ONE)),
        *(a.ctypes.data, m, b.ctypes.data, k, byref(ZERO), c.ctypes.data, m),
    )
    product(c, a, b)


def test_syrk_fills_one_triangle(handle, rng, product):
    n, k = 131, 70
    a = np.asfortranarray(rng.standard_normal((n, k)))
    c = np.full((n, n), np.nan, order="F")
    xt.cublasXtDsyrk(
        *(handle, xt.cublasFillMode_t.CUBLAS_FILL_MODE_LOWER, OP.CUBLAS_OP_N, n, k),
        *(byref(ONE), a.ctypes.data, n, byref(ZERO), c.ctypes.data, n),
    )
    product(np.where(np.tri(n, dtype=bool), c, c.T), a, a.T)


def test_tiles_of_no_size_are_refused(handle):
    with pytest.raises(CublasError) as caught:
        xt.cublasXtSetBlockDim(handle, 0)
    assert caught.value.function == "cublasXtSetBlockDim"
    assert caught.value.name == "CUBLAS_STATUS_INVALID_VALUE"
