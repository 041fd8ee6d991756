"""cuSPARSELt: products with a matrix of which two in four numbers are zero, pruned and compressed by the library.

Handles, descriptors and plans are structs of the caller's, which the library fills in.
"""

from __future__ import annotations

from ctypes import byref, c_float, c_int32, c_size_t, c_void_p, sizeof

import numpy as np
import pytest

from cudabind.errors import CusparseLtError
from cudabind.sys import cusparseLt as lt

LIBRARIES = ("cusparseLt",)
TYPE = lt.cudaDataType_t
COMPUTE = lt.cusparseComputeType
ROW = lt.cusparseOrder_t.CUSPARSE_ORDER_ROW
NO = lt.cusparseOperation_t.CUSPARSE_OPERATION_NON_TRANSPOSE
TRANSPOSE = lt.cusparseOperation_t.CUSPARSE_OPERATION_TRANSPOSE
ALIGNMENT = 16
ONE, ZERO = c_float(1), c_float(0)


@pytest.fixture
def handle(gpu):
    return gpu.make(lt.cusparseLtHandle_t, lt.cusparseLtInit, lt.cusparseLtDestroy)


@pytest.fixture
def dense(gpu, handle):
    def make(rows, cols, kind):
        return gpu.make(
            lt.cusparseLtMatDescriptor_t,
            lambda made: lt.cusparseLtDenseDescriptorInit(handle, made, rows, cols, cols, ALIGNMENT, kind, ROW),
            lt.cusparseLtMatDescriptorDestroy,
        )

    return make


@pytest.fixture
def structured(gpu, handle):
    def make(rows, cols, kind):
        half = lt.cusparseLtSparsity_t.CUSPARSELT_SPARSITY_50_PERCENT
        return gpu.make(
            lt.cusparseLtMatDescriptor_t,
            lambda made: lt.cusparseLtStructuredDescriptorInit(
                handle, made, rows, cols, cols, ALIGNMENT, kind, ROW, half
            ),
            lt.cusparseLtMatDescriptorDestroy,
        )

    return make


@pytest.fixture
def describe(handle):
    """A product of a structured and a dense matrix; it belongs to the plan, and has no destructor of its own."""

    def make(operations, a, b, c, compute):
        matmul = lt.cusparseLtMatmulDescriptor_t()
        lt.cusparseLtMatmulDescriptorInit(handle, matmul, *operations, a, b, c, c, compute)
        return matmul

    return make


@pytest.fixture
def plan(gpu, handle):
    def make(matmul):
        # Left to the process: cusparseLtMatmulAlgSelectionDestroy is there only since 0.8.
        selection = lt.cusparseLtMatmulAlgSelection_t()
        default = lt.cusparseLtMatmulAlg_t.CUSPARSELT_MATMUL_ALG_DEFAULT
        lt.cusparseLtMatmulAlgSelectionInit(handle, selection, matmul, default)
        return gpu.make(
            lt.cusparseLtMatmulPlan_t,
            lambda made: lt.cusparseLtMatmulPlanInit(handle, made, matmul, selection),
            lt.cusparseLtMatmulPlanDestroy,
        )

    return make


@pytest.fixture
def prune(gpu, handle):
    """Set two in four numbers of each row to zero, those that count least; have the library check that they are."""

    def run(matmul, a):
        # The check writes 1 where it finds a fault, and else nothing: the 0 must be there before.
        pruned, invalid = gpu.poisoned(a.shape, a.dtype), gpu.array([0], np.int32)
        strip = lt.cusparseLtPruneAlg_t.CUSPARSELT_PRUNE_SPMMA_STRIP
        lt.cusparseLtSpMMAPrune(handle, matmul, gpu.array(a).ptr, pruned.ptr, strip, None)
        lt.cusparseLtSpMMAPruneCheck(handle, matmul, pruned.ptr, invalid.ptr, None)
        assert invalid.numpy()[0] == 0
        return pruned

    return run


@pytest.fixture
def multiply(gpu, handle):
    """Compress the pruned matrix and run the plan."""

    def run(made, pruned, b, c, d, alpha=ONE, beta=ZERO):
        sizes = c_size_t(), c_size_t()
        lt.cusparseLtSpMMACompressedSize(handle, made, byref(sizes[0]), byref(sizes[1]))
        compressed, buffer = (gpu.workspace(size) for size in sizes)
        lt.cusparseLtSpMMACompress(handle, made, pruned.ptr, compressed, buffer, None)
        size = c_size_t()
        lt.cusparseLtMatmulGetWorkspace(handle, made, byref(size))
        lt.cusparseLtMatmul(
            *(handle, made, byref(alpha), compressed, b.ptr, byref(beta), c.ptr, d.ptr),
            *(gpu.workspace(size), None, 0),
        )

    return run


def check_pruned(pruned, a):
    """Of each four numbers, two are left, and they are the largest."""
    left, four = (np.abs(x.astype(np.float64)).reshape(-1, 4) for x in (pruned, a))
    assert np.array_equal(pruned, np.where(pruned == 0, 0, a))
    assert (np.count_nonzero(left, axis=1) <= 2).all()
    assert np.array_equal(left.sum(axis=1), np.sort(four, axis=1)[:, 2:].sum(axis=1))


def test_a_half_precision_product_with_scaling(gpu, dense, structured, describe, plan, prune, multiply, rng, product):
    m, n, k, kind = 96, 72, 160, TYPE.CUDA_R_16F
    a, b, c = (rng.standard_normal(shape).astype(np.float16) for shape in ((m, k), (k, n), (m, n)))
    matmul = describe(
        (NO, NO), structured(m, k, kind), dense(k, n, kind), dense(m, n, kind), COMPUTE.CUSPARSE_COMPUTE_32F
    )
    pruned, d_d = prune(matmul, a), gpu.poisoned((m, n), np.float16)
    check_pruned(pruned.numpy(), a)
    multiply(plan(matmul), pruned, gpu.array(b), gpu.array(c), d_d, c_float(0.5), c_float(-2))
    product(d_d.numpy(), pruned.numpy(), b, alpha=0.5, beta=-2, c=c, compute=np.float32)


def test_integers_are_multiplied_exactly(gpu, dense, structured, describe, plan, prune, multiply, rng):
    m, n, k = 64, 96, 128
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((m, k), (n, k)))
    i8, i32 = TYPE.CUDA_R_8I, TYPE.CUDA_R_32I
    # Both operands lie along k, as the tensor cores want bytes: b is given transposed.
    operands = structured(m, k, i8), dense(n, k, i8), dense(m, n, i32)
    matmul = describe((NO, TRANSPOSE), *operands, COMPUTE.CUSPARSE_COMPUTE_32I)
    pruned, d_d = prune(matmul, a), gpu.poisoned((m, n), np.int32)
    multiply(plan(matmul), pruned, gpu.array(b), d_d, d_d)
    assert np.array_equal(d_d.numpy(), pruned.numpy().astype(np.int64) @ b.astype(np.int64).T)


def test_bias_and_relu_after_the_product(gpu, handle, dense, structured, describe, plan, prune, multiply, rng, product):
    m, n, k, kind = 64, 48, 64, TYPE.CUDA_R_16F
    a, b, bias = (rng.standard_normal(shape).astype(np.float16) for shape in ((m, k), (k, n), (m, 1)))
    matmul = describe(
        (NO, NO), structured(m, k, kind), dense(k, n, kind), dense(m, n, kind), COMPUTE.CUSPARSE_COMPUTE_32F
    )
    attribute = lt.cusparseLtMatmulDescAttribute_t
    for name, value in (
        (attribute.CUSPARSELT_MATMUL_ACTIVATION_RELU, c_int32(1)),
        (attribute.CUSPARSELT_MATMUL_BIAS_POINTER, c_void_p(gpu.array(bias).ptr)),
    ):
        lt.cusparseLtMatmulDescSetAttribute(handle, matmul, name, byref(value), sizeof(value))
    pruned, d_d = prune(matmul, a), gpu.poisoned((m, n), np.float16)
    multiply(plan(matmul), pruned, gpu.array(b), d_d, d_d)
    product(*(d_d.numpy(), pruned.numpy(), b), beta=1, c=bias, compute=np.float32, then=lambda x: np.maximum(x, 0))


def test_a_shape_that_cannot_be_pruned_is_refused_in_the_librarys_words(structured):
    with pytest.raises(CusparseLtError) as caught:
        structured(31, 7, TYPE.CUDA_R_16F)
    assert caught.value.name in {"CUSPARSE_STATUS_NOT_SUPPORTED", "CUSPARSE_STATUS_INVALID_VALUE"}
    assert caught.value.function == "cusparseLtStructuredDescriptorInit"
    assert caught.value.text == lt.cusparseLtGetErrorString(caught.value.status)
    assert caught.value.text
