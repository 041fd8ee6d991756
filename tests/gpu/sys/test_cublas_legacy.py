"""The cuBLAS API of before handles: one context, scalars by value, and an error that is asked for afterwards."""

from __future__ import annotations

from ctypes import byref, c_void_p

import numpy as np
import pytest

from cudabind.errors import CublasError
from cudabind.sys import cublas
from cudabind.sys import cublas_legacy as legacy

LIBRARIES = ("cublas",)


@pytest.fixture
def started(gpu):
    legacy.cublasInit()
    yield gpu
    legacy.cublasShutdown()


def test_gemm_in_memory_that_the_library_allocated(started, rng, product):
    m, n, k = 19, 23, 31
    a, b = (np.asfortranarray(rng.standard_normal(shape), np.float32) for shape in ((m, k), (k, n)))
    d_a = c_void_p()
    legacy.cublasAlloc(m * k, a.itemsize, byref(d_a))
    cublas.cublasSetMatrix(m, k, a.itemsize, a.ctypes.data, m, d_a, m)
    d_c = started.poisoned((m, n), np.float32, order="F")
    legacy.cublasSgemm(b"N", b"N", m, n, k, 0.5, d_a, m, started.array(b, order="F").ptr, k, 0, d_c.ptr, m)
    legacy.cublasGetError()
    legacy.cublasFree(d_a)
    product(d_c.numpy(), a, b, alpha=0.5)


def test_dot_returns_its_result(started, rng, close):
    x, y = rng.standard_normal((2, 501))
    result = legacy.cublasDdot(501, started.array(x).ptr, 1, started.array(y).ptr, 1)
    close(np.float64(result), x @ y, 501 * np.finfo(np.float64).eps * (np.abs(x) @ np.abs(y)))


def test_the_error_of_a_call_that_returns_nothing_is_asked_for(started):
    c = started.poisoned((4, 4), np.float32)
    legacy.cublasSgemm(b"N", b"N", 4, 4, 4, 1, c.ptr, 3, c.ptr, 4, 0, c.ptr, 4)  # 3 is less than the 4 rows
    with pytest.raises(CublasError) as caught:
        legacy.cublasGetError()
    assert caught.value.name == "CUBLAS_STATUS_INVALID_VALUE"
    assert np.isnan(c.numpy()).all()
