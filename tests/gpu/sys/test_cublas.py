"""cuBLAS: products of every precision, batches, triangular solves, both pointer modes and the 64-bit interface.

Matrices are column-major, as order="F" stores them; a leading dimension is the number of rows as stored.
"""

from __future__ import annotations

from ctypes import byref, c_double, c_float, c_int32

import ml_dtypes
import numpy as np
import pytest

from cudabind.errors import CublasError
from cudabind.sys import cublas

LIBRARIES = ("cublas",)
OP = cublas.cublasOperation_t
TYPE = cublas.cudaDataType_t
GEMM = {
    "float32": cublas.cublasSgemm,
    "float64": cublas.cublasDgemm,
    "complex64": cublas.cublasCgemm,
    "complex128": cublas.cublasZgemm,
}


@pytest.fixture
def handle(gpu):
    return gpu.make(cublas.cublasHandle_t, cublas.cublasCreate, cublas.cublasDestroy)


def random(rng, shape, dtype):
    values = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", GEMM)
def test_gemm_of_a_part_of_a_matrix_and_one_transposed(gpu, handle, rng, product, dtype):
    m, n, k, ldc = 37, 53, 29, 41
    a, b, c = (random(rng, shape, dtype) for shape in ((k, m), (k, n), (m, n)))
    alpha, beta = random(rng, (2, 1), dtype)
    d_a, d_b = gpu.array(a, order="F"), gpu.array(b, order="F")
    d_c = gpu.poisoned((ldc, n), dtype, order="F")
    whole = d_c.numpy()
    whole[:m] = c
    d_c.fill(whole)
    GEMM[dtype](
        *(handle, OP.CUBLAS_OP_C, OP.CUBLAS_OP_N, m, n, k, alpha.ctypes.data),
        *(d_a.ptr, k, d_b.ptr, k, beta.ctypes.data, d_c.ptr, ldc),
    )
    result = d_c.numpy()
    product(result[:m], a.conj().T, b, alpha=alpha[0], beta=beta[0], c=c)
    assert np.isnan(result[m:]).all(), "rows below the result were written"


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_gemm_ex_of_bfloat16_through_the_64_bit_interface(gpu, handle, rng, product, out):
    m, n, k = 72, 40, 136
    out = np.dtype(getattr(ml_dtypes, out, None) or out)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((m, k), (k, n)))
    d_a, d_b = gpu.array(a, order="F"), gpu.array(b, order="F")
    d_c = gpu.poisoned((m, n), out, order="F")
    one, zero = c_float(1), c_float(0)
    cublas.cublasGemmEx_64(
        *(handle, OP.CUBLAS_OP_N, OP.CUBLAS_OP_N, m, n, k, byref(one)),
        *(d_a.ptr, TYPE.CUDA_R_16BF, m, d_b.ptr, TYPE.CUDA_R_16BF, k, byref(zero)),
        *(d_c.ptr, TYPE.CUDA_R_16BF if out.itemsize == 2 else TYPE.CUDA_R_32F, m),
        *(cublas.cublasComputeType_t.CUBLAS_COMPUTE_32F, cublas.cublasGemmAlgo_t.CUBLAS_GEMM_DEFAULT),
    )
    product(d_c.numpy(), a, b, compute=np.float32)


def test_a_batch_by_pointers_and_the_same_batch_by_strides(gpu, handle, rng, product):
    count, m, n, k = 5, 11, 7, 13
    a, b = rng.standard_normal((count, m, k)), rng.standard_normal((count, k, n))
    # A stack of matrices by rows is, to cuBLAS, a stack of their transposes: it computes cᵀ = bᵀ·aᵀ.
    d_a, d_b = gpu.array(a), gpu.array(b)
    by_pointers, by_strides = gpu.poisoned((count, m, n), np.float64), gpu.poisoned((count, m, n), np.float64)
    pointers = [
        gpu.array([array.ptr + i * array.nbytes // count for i in range(count)], np.uint64).ptr
        for array in (d_a, d_b, by_pointers)
    ]
    one, zero = c_double(1), c_double(0)
    cublas.cublasDgemmBatched_64(
        *(handle, OP.CUBLAS_OP_N, OP.CUBLAS_OP_N, n, m, k, byref(one)),
        *(pointers[1], n, pointers[0], k, byref(zero), pointers[2], n, count),
    )
    cublas.cublasDgemmStridedBatched(
        *(handle, OP.CUBLAS_OP_N, OP.CUBLAS_OP_N, n, m, k, byref(one)),
        *(d_b.ptr, n, k * n, d_a.ptr, k, m * k, byref(zero), by_strides.ptr, n, m * n, count),
    )
    product(by_pointers.numpy(), a, b)
    product(by_strides.numpy(), a, b)


def test_groups_of_products_of_different_sizes(gpu, handle, rng, product):
    sizes, counts = [(5, 9, 3), (17, 2, 8)], [2, 1]  # (m, n, k) of each group, and how many products it has
    jobs = [size for size, count in zip(sizes, counts, strict=True) for _ in range(count)]
    a, b = [rng.standard_normal((m, k)) for m, _, k in jobs], [rng.standard_normal((k, n)) for _, n, k in jobs]
    c = [gpu.poisoned((m, n), np.float64, order="F") for m, n, _ in jobs]
    columns = ([gpu.array(x, order="F") for x in a], [gpu.array(x, order="F") for x in b], c)
    d_a, d_b, d_c = (gpu.array([x.ptr for x in column], np.uint64).ptr for column in columns)
    m, n, k = ((c_int32 * 2)(*extents) for extents in zip(*sizes, strict=True))
    no = (c_int32 * 2)(OP.CUBLAS_OP_N, OP.CUBLAS_OP_N)
    ones, zeros = (c_double * 2)(1, 1), (c_double * 2)()
    cublas.cublasDgemmGroupedBatched(
        *(handle, no, no, m, n, k, ones, d_a, m, d_b, k, zeros, d_c, m),
        *(2, (c_int32 * 2)(*counts)),
    )
    for x, y, z in zip(a, b, c, strict=True):
        product(z.numpy(), x, y)


def test_trsm_solves_with_a_triangle(gpu, handle, rng, solves):
    n, columns = 31, 6
    full = rng.standard_normal((n, n)) + n * np.eye(n)
    b = rng.standard_normal((n, columns))
    d_a, d_b = gpu.array(full, order="F"), gpu.array(b, order="F")
    two = c_double(2)
    cublas.cublasDtrsm(
        *(handle, cublas.cublasSideMode_t.CUBLAS_SIDE_LEFT, cublas.cublasFillMode_t.CUBLAS_FILL_MODE_LOWER),
        *(OP.CUBLAS_OP_N, cublas.cublasDiagType_t.CUBLAS_DIAG_NON_UNIT),
        *(n, columns, byref(two), d_a.ptr, n, d_b.ptr, n),
    )
    solves(d_b.numpy(), np.tril(full), 2 * b)


def test_dot_with_the_result_on_the_device_and_on_the_host(gpu, handle, rng, close):
    n = 1001
    x, y = (random(rng, n, np.complex128) for _ in range(2))
    d_x, d_y = gpu.array(x), gpu.array(y)
    expected = np.vdot(x, y)
    bound = 2 * n * np.finfo(np.float64).eps * (np.abs(x) @ np.abs(y))

    d_result = gpu.poisoned(1, np.complex128)
    cublas.cublasSetPointerMode(handle, cublas.cublasPointerMode_t.CUBLAS_POINTER_MODE_DEVICE)
    cublas.cublasZdotc(handle, n, d_x.ptr, 1, d_y.ptr, 1, d_result.ptr)
    close(d_result.numpy()[0], expected, bound)

    result = cublas.cuDoubleComplex()
    cublas.cublasSetPointerMode(handle, cublas.cublasPointerMode_t.CUBLAS_POINTER_MODE_HOST)
    cublas.cublasZdotc_64(handle, n, d_x.ptr, 1, d_y.ptr, 1, byref(result))
    close(np.complex128(complex(result.x, result.y)), expected, bound)


def test_the_largest_element_is_found_and_counted_from_one(gpu, handle, rng):
    x = rng.standard_normal(777)
    result = c_int32(-1)
    cublas.cublasIdamax(handle, x.size, gpu.array(x).ptr, 1, byref(result))
    assert result.value == np.abs(x).argmax() + 1


def test_a_leading_dimension_that_is_too_small_is_refused_by_name(gpu, handle):
    c = gpu.poisoned((4, 4), np.float64)
    one = c_double(1)
    with pytest.raises(CublasError) as caught:
        cublas.cublasDgemm(
            *(handle, OP.CUBLAS_OP_N, OP.CUBLAS_OP_N, 4, 4, 4, byref(one)),
            *(c.ptr, 3, c.ptr, 4, byref(one), c.ptr, 4),
        )
    assert caught.value.name == "CUBLAS_STATUS_INVALID_VALUE"
    assert caught.value.function == "cublasDgemm_v2"
    assert not caught.value.sticky
    assert np.isnan(c.numpy()).all()
