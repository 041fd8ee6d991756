"""cuSPARSE: products of sparse matrices with vectors, matrices and each other, triangular solves, and conversions.

Most functions take descriptors of their operands, ask for a buffer first, and run in it then.
"""

from __future__ import annotations

from ctypes import byref, c_double, c_int32, c_int64, c_size_t

import numpy as np
import pytest

from cudabind.errors import CusparseError
from cudabind.sys import cusparse as cs

LIBRARIES = ("cusparse",)
I32 = cs.cusparseIndexType_t.CUSPARSE_INDEX_32I
BASE = cs.cusparseIndexBase_t.CUSPARSE_INDEX_BASE_ZERO
ROW, COL = cs.cusparseOrder_t.CUSPARSE_ORDER_ROW, cs.cusparseOrder_t.CUSPARSE_ORDER_COL
TYPE = {
    "float32": cs.cudaDataType_t.CUDA_R_32F,
    "float64": cs.cudaDataType_t.CUDA_R_64F,
    "complex128": cs.cudaDataType_t.CUDA_C_64F,
}
F64 = TYPE["float64"]
OPERATION = {
    "N": cs.cusparseOperation_t.CUSPARSE_OPERATION_NON_TRANSPOSE,
    "T": cs.cusparseOperation_t.CUSPARSE_OPERATION_TRANSPOSE,
    "C": cs.cusparseOperation_t.CUSPARSE_OPERATION_CONJUGATE_TRANSPOSE,
}
NO = OPERATION["N"]
ONE, ZERO = c_double(1), c_double(0)


@pytest.fixture
def handle(gpu):
    return gpu.make(cs.cusparseHandle_t, cs.cusparseCreate, cs.cusparseDestroy)


@pytest.fixture
def sparse(gpu, csr):
    """`sparse(a, form)`: a descriptor of the nonzeros of a matrix in device memory."""

    def compressed(make, a, *shape):
        offsets, indices, values = csr(a)
        memory = [gpu.array(part).ptr for part in (offsets, indices, values)]
        return lambda made: make(made, *shape, len(values), *memory, I32, I32, BASE, TYPE[a.dtype.name])

    def coordinates(a):
        rows, columns = np.nonzero(a)
        memory = [gpu.array(part).ptr for part in (rows.astype(np.int32), columns.astype(np.int32), a[rows, columns])]
        return lambda made: cs.cusparseCreateCoo(made, *a.shape, len(rows), *memory, I32, BASE, TYPE[a.dtype.name])

    def make(a, form="CSR"):
        create = {
            "CSR": lambda: compressed(cs.cusparseCreateCsr, a, *a.shape),
            "CSC": lambda: compressed(cs.cusparseCreateCsc, a.T, *a.shape),
            "COO": lambda: coordinates(a),
        }[form]()
        return gpu.make(cs.cusparseSpMatDescr_t, create, cs.cusparseDestroySpMat)

    return make


@pytest.fixture
def empty(gpu):
    """`descr, offsets = empty(rows, cols)`: a CSR matrix whose rows' offsets are to be computed."""

    def make(rows, cols):
        offsets = gpu.poisoned(rows + 1, np.int32)
        descr = gpu.make(
            cs.cusparseSpMatDescr_t,
            lambda made: cs.cusparseCreateCsr(made, rows, cols, 0, offsets.ptr, None, None, I32, I32, BASE, F64),
            cs.cusparseDestroySpMat,
        )
        return descr, offsets

    return make


@pytest.fixture
def complete(gpu):
    """Memory for the nonzeros of a matrix, now that it is known how many they are."""

    def make(descr, offsets):
        rows, cols, count = c_int64(), c_int64(), c_int64()
        cs.cusparseSpMatGetSize(descr, byref(rows), byref(cols), byref(count))
        columns, values = gpu.poisoned(count.value, np.int32), gpu.poisoned(count.value, np.float64)
        cs.cusparseCsrSetPointers(descr, offsets.ptr, columns.ptr, values.ptr)
        return columns, values

    return make


@pytest.fixture
def vector(gpu):
    def make(memory):
        return gpu.make(
            cs.cusparseDnVecDescr_t,
            lambda made: cs.cusparseCreateDnVec(made, *memory.shape, memory.ptr, TYPE[memory.dtype.name]),
            cs.cusparseDestroyDnVec,
        )

    return make


@pytest.fixture
def dense(gpu):
    def make(memory):
        (rows, cols), order = memory.shape, {"C": ROW, "F": COL}[memory.order]
        return gpu.make(
            cs.cusparseDnMatDescr_t,
            lambda made: cs.cusparseCreateDnMat(
                made, rows, cols, cols if order == ROW else rows, memory.ptr, TYPE[memory.dtype.name], order
            ),
            cs.cusparseDestroyDnMat,
        )

    return make


def complex_or_real(rng, values, dtype):
    """The same pattern of zeros, and an imaginary part for complex types."""
    if np.issubdtype(dtype, np.complexfloating):
        values = values * (1 + 1j * rng.standard_normal(values.shape))
    return values.astype(dtype)


@pytest.mark.parametrize("form", ["CSR", "CSC", "COO"])
@pytest.mark.parametrize(("dtype", "operation"), [("float32", "N"), ("float64", "T"), ("complex128", "C")])
def test_matrix_times_vector(gpu, handle, sparse, vector, sparse_matrix, rng, product, form, dtype, operation):
    a = complex_or_real(rng, sparse_matrix(61, 87), dtype)
    applied = {"N": a, "T": a.T, "C": a.conj().T}[operation]
    x, y = (complex_or_real(rng, rng.standard_normal(length), dtype) for length in applied.shape[::-1])
    alpha, beta = (complex_or_real(rng, rng.standard_normal(1), dtype) for _ in range(2))
    d_y, size, kind = gpu.array(y), c_size_t(), TYPE[dtype]
    problem = (
        *(handle, OPERATION[operation], alpha.ctypes.data, sparse(a, form), vector(gpu.array(x))),
        *(beta.ctypes.data, vector(d_y), kind, cs.cusparseSpMVAlg_t.CUSPARSE_SPMV_ALG_DEFAULT),
    )
    cs.cusparseSpMV_bufferSize(*problem, byref(size))
    cs.cusparseSpMV(*problem, gpu.workspace(size))
    product(d_y.numpy(), applied, x, alpha=alpha[0], beta=beta[0], c=y)


@pytest.mark.parametrize("order", ["C", "F"])
def test_sparse_times_dense(gpu, handle, sparse, dense, sparse_matrix, rng, product, order):
    a, b = sparse_matrix(53, 70), rng.standard_normal((70, 19))
    d_c, size = gpu.poisoned((53, 19), np.float64, order), c_size_t()
    problem = (
        *(handle, NO, NO, byref(ONE), sparse(a), dense(gpu.array(b, order=order)), byref(ZERO), dense(d_c)),
        *(F64, cs.cusparseSpMMAlg_t.CUSPARSE_SPMM_ALG_DEFAULT),
    )
    cs.cusparseSpMM_bufferSize(*problem, byref(size))
    cs.cusparseSpMM(*problem, gpu.workspace(size))
    product(d_c.numpy(), a, b)


def test_sparse_times_sparse(gpu, handle, sparse, empty, complete, sparse_matrix, product):
    a, b = sparse_matrix(64, 81), sparse_matrix(81, 45)
    c, offsets = empty(64, 45)
    product_desc = gpu.make(cs.cusparseSpGEMMDescr_t, cs.cusparseSpGEMM_createDescr, cs.cusparseSpGEMM_destroyDescr)
    problem = (
        *(handle, NO, NO, byref(ONE), sparse(a), sparse(b), byref(ZERO), c, F64),
        *(cs.cusparseSpGEMMAlg_t.CUSPARSE_SPGEMM_DEFAULT, product_desc),
    )
    # Each step is called twice: without a buffer it says how large that must be.
    for step in (cs.cusparseSpGEMM_workEstimation, cs.cusparseSpGEMM_compute):
        size = c_size_t()
        step(*problem, byref(size), None)
        step(*problem, byref(size), gpu.workspace(size))
    columns, values = complete(c, offsets)
    cs.cusparseSpGEMM_copy(*problem)

    counts, result = np.diff(offsets.numpy()), np.zeros((64, 45))
    rows = np.repeat(np.arange(64), counts)
    result[rows, columns.numpy()] = values.numpy()
    product(result, a, b)
    assert np.array_equal(counts, ((a != 0).astype(int) @ (b != 0) > 0).sum(axis=1))


def test_a_product_is_taken_where_a_pattern_says(gpu, handle, dense, sparse_matrix, csr, rng, close):
    pattern = sparse_matrix(37, 52)
    a, b = rng.standard_normal((37, 24)), rng.standard_normal((24, 52))
    offsets, columns, values = csr(pattern)
    d_values, size, minus = gpu.array(values), c_size_t(), c_double(-1)
    descr = gpu.make(
        cs.cusparseSpMatDescr_t,
        lambda made: cs.cusparseCreateCsr(
            *(made, *pattern.shape, len(values), gpu.array(offsets).ptr, gpu.array(columns).ptr, d_values.ptr),
            *(I32, I32, BASE, F64),
        ),
        cs.cusparseDestroySpMat,
    )
    problem = (
        *(handle, NO, NO, byref(ONE), dense(gpu.array(a)), dense(gpu.array(b)), byref(minus), descr),
        *(F64, cs.cusparseSDDMMAlg_t.CUSPARSE_SDDMM_ALG_DEFAULT),
    )
    cs.cusparseSDDMM_bufferSize(*problem, byref(size))
    cs.cusparseSDDMM(*problem, gpu.workspace(size))
    at = pattern != 0
    bound = 2 * (24 + 2) * np.finfo(np.float64).eps * (np.abs(a) @ np.abs(b) + np.abs(pattern))[at]
    close(d_values.numpy(), (a @ b - pattern)[at], bound)


def test_a_triangle_is_solved(gpu, handle, sparse, vector, sparse_matrix, rng, solves):
    n = 73
    a = sparse_matrix(n, n)
    a[np.diag_indices(n)] = 1 + np.abs(a).sum(axis=1)
    b = rng.standard_normal(n)
    d_x, size, descr = gpu.poisoned(n, np.float64), c_size_t(), sparse(a)  # of the whole matrix it reads the triangle
    for attribute, value in (
        (cs.cusparseSpMatAttribute_t.CUSPARSE_SPMAT_FILL_MODE, cs.cusparseFillMode_t.CUSPARSE_FILL_MODE_LOWER),
        (cs.cusparseSpMatAttribute_t.CUSPARSE_SPMAT_DIAG_TYPE, cs.cusparseDiagType_t.CUSPARSE_DIAG_TYPE_NON_UNIT),
    ):
        cs.cusparseSpMatSetAttribute(descr, attribute, byref(c_int32(value)), 4)
    solve = gpu.make(cs.cusparseSpSVDescr_t, cs.cusparseSpSV_createDescr, cs.cusparseSpSV_destroyDescr)
    problem = (
        *(handle, NO, byref(ONE), descr, vector(gpu.array(b)), vector(d_x)),
        *(F64, cs.cusparseSpSVAlg_t.CUSPARSE_SPSV_ALG_DEFAULT, solve),
    )
    cs.cusparseSpSV_bufferSize(*problem, byref(size))
    cs.cusparseSpSV_analysis(*problem, gpu.workspace(size))
    cs.cusparseSpSV_solve(*problem)
    solves(d_x.numpy(), np.tril(a), b)


def test_dense_to_sparse_and_back(gpu, handle, dense, empty, complete, sparse_matrix, csr):
    a = sparse_matrix(58, 39)
    descr, offsets = empty(*a.shape)
    size, forth = c_size_t(), cs.cusparseDenseToSparseAlg_t.CUSPARSE_DENSETOSPARSE_ALG_DEFAULT
    problem = (handle, dense(gpu.array(a)), descr, forth)
    cs.cusparseDenseToSparse_bufferSize(*problem, byref(size))
    work = gpu.workspace(size)
    cs.cusparseDenseToSparse_analysis(*problem, work)
    columns, values = complete(descr, offsets)
    cs.cusparseDenseToSparse_convert(*problem, work)
    for result, expected in zip((offsets, columns, values), csr(a), strict=True):
        assert np.array_equal(result.numpy(), expected)

    d_back, back = (
        gpu.poisoned(a.shape, np.float64, "F"),
        cs.cusparseSparseToDenseAlg_t.CUSPARSE_SPARSETODENSE_ALG_DEFAULT,
    )
    problem = (handle, descr, dense(d_back), back)
    cs.cusparseSparseToDense_bufferSize(*problem, byref(size))
    cs.cusparseSparseToDense(*problem, gpu.workspace(size))
    assert np.array_equal(d_back.numpy(), a)


def test_a_sparse_vector_gathers_and_multiplies(gpu, handle, vector, rng, close):
    n, count = 500, 61
    y, indices = rng.standard_normal(n), np.sort(rng.choice(n, count, replace=False)).astype(np.int32)
    d_y, d_gathered, size, result = gpu.array(y), gpu.poisoned(count, np.float64), c_size_t(), c_double(np.nan)
    x = gpu.make(
        cs.cusparseSpVecDescr_t,
        lambda made: cs.cusparseCreateSpVec(made, n, count, gpu.array(indices).ptr, d_gathered.ptr, I32, BASE, F64),
        cs.cusparseDestroySpVec,
    )
    cs.cusparseGather(handle, vector(d_y), x)
    assert np.array_equal(d_gathered.numpy(), y[indices])

    problem = (handle, NO, x, vector(d_y), byref(result), F64)
    cs.cusparseSpVV_bufferSize(*problem, byref(size))
    cs.cusparseSpVV(*problem, gpu.workspace(size))
    squares = y[indices] @ y[indices]
    close(np.float64(result.value), squares, count * np.finfo(np.float64).eps * squares)


def test_tridiagonal_systems_with_pivoting(gpu, handle, rng, solves):
    n, columns = 131, 4
    below, on, above = rng.standard_normal((3, n))
    below[0] = above[-1] = 0
    b = rng.standard_normal((n, columns))
    d_b, size = gpu.array(b, order="F"), c_size_t()
    problem = (handle, n, columns, *(gpu.array(part).ptr for part in (below, on, above)), d_b.ptr, n)
    cs.cusparseDgtsv2_bufferSizeExt(*problem, byref(size))
    cs.cusparseDgtsv2(*problem, gpu.workspace(size))
    solves(d_b.numpy(), np.diag(on) + np.diag(below[1:], -1) + np.diag(above[:-1], 1), b)


def test_operands_that_do_not_fit_are_refused_in_the_librarys_words(gpu, handle, sparse, vector, sparse_matrix):
    x, y = gpu.poisoned(4, np.float64), gpu.poisoned(8, np.float64)
    with pytest.raises(CusparseError) as caught:
        cs.cusparseSpMV_bufferSize(
            *(handle, NO, byref(ONE), sparse(sparse_matrix(8, 5)), vector(x), byref(ZERO), vector(y)),
            *(F64, cs.cusparseSpMVAlg_t.CUSPARSE_SPMV_ALG_DEFAULT, byref(c_size_t())),
        )
    assert caught.value.name == "CUSPARSE_STATUS_INVALID_VALUE"
    assert caught.value.function == "cusparseSpMV_bufferSize"
    assert caught.value.text == cs.cusparseGetErrorString(caught.value.status)
    assert caught.value.text
