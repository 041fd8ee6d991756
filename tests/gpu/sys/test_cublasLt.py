"""cuBLASLt: descriptors, the heuristic and a fused epilogue, a strided batch, fp8 with scales, and a change of layout.

Matrices are column-major, as order="F" stores them, unless a layout says otherwise.
"""

from __future__ import annotations

from ctypes import byref, c_float, c_int32, c_int64, c_uint64, c_void_p, sizeof

import ml_dtypes
import numpy as np
import pytest

from cudabind.errors import CublasLtError
from cudabind.sys import cublasLt as lt
from cudabind.sys.cublas_types import cublasOperation_t

LIBRARIES = ("cublasLt",)
TYPE = lt.cudaDataType_t
DESC = lt.cublasLtMatmulDescAttributes_t
LAYOUT = lt.cublasLtMatrixLayoutAttribute_t
ONE, ZERO = c_float(1), c_float(0)
WORKSPACE = 32 << 20


@pytest.fixture
def handle(gpu):
    return gpu.make(lt.cublasLtHandle_t, lt.cublasLtCreate, lt.cublasLtDestroy)


@pytest.fixture
def desc(gpu):
    """A description of products that are summed and scaled in f32."""
    return gpu.make(
        lt.cublasLtMatmulDesc_t,
        lambda made: lt.cublasLtMatmulDescCreate(
            made, lt.cublasComputeType_t.CUBLAS_COMPUTE_32F, lt.cudaDataType_t.CUDA_R_32F
        ),
        lt.cublasLtMatmulDescDestroy,
    )


@pytest.fixture
def layout(gpu):
    def make(kind, rows, cols, ld, **attributes):
        made = gpu.make(
            lt.cublasLtMatrixLayout_t,
            lambda made: lt.cublasLtMatrixLayoutCreate(made, kind, rows, cols, ld),
            lt.cublasLtMatrixLayoutDestroy,
        )
        for name, value in attributes.items():
            attribute = LAYOUT[f"CUBLASLT_MATRIX_LAYOUT_{name}"]
            lt.cublasLtMatrixLayoutSetAttribute(made, attribute, byref(value), sizeof(value))
        return made

    return make


@pytest.fixture
def best(gpu, handle, desc):
    """The algorithm that the heuristic puts first for these layouts, with WORKSPACE bytes at the most."""

    def ask(a, b, c, d):
        preference = gpu.make(
            lt.cublasLtMatmulPreference_t, lt.cublasLtMatmulPreferenceCreate, lt.cublasLtMatmulPreferenceDestroy
        )
        limit = lt.cublasLtMatmulPreferenceAttributes_t.CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
        lt.cublasLtMatmulPreferenceSetAttribute(preference, limit, byref(c_uint64(WORKSPACE)), 8)
        found, count = (lt.cublasLtMatmulHeuristicResult_t * 4)(), c_int32()
        lt.cublasLtMatmulAlgoGetHeuristic(handle, desc, a, b, c, d, preference, 4, found, byref(count))
        assert count.value >= 1
        assert found[0].state == lt.cublasStatus_t.CUBLAS_STATUS_SUCCESS
        return found[0].algo

    return ask


def set_desc(desc, attribute, value):
    lt.cublasLtMatmulDescSetAttribute(desc, attribute, byref(value), sizeof(value))


def test_a_bfloat16_product_with_bias_and_relu_in_its_epilogue(gpu, handle, desc, layout, best, rng, product):
    m, n, k = 96, 40, 200
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((m, k), (k, n)))
    bias = rng.standard_normal((m, 1)).astype(ml_dtypes.bfloat16)
    d_a, d_b, d_bias = gpu.array(a, order="F"), gpu.array(b, order="F"), gpu.array(bias)
    d_d = gpu.poisoned((m, n), ml_dtypes.bfloat16, order="F")
    set_desc(desc, DESC.CUBLASLT_MATMUL_DESC_EPILOGUE, c_int32(lt.cublasLtEpilogue_t.CUBLASLT_EPILOGUE_RELU_BIAS))
    set_desc(desc, DESC.CUBLASLT_MATMUL_DESC_BIAS_POINTER, c_void_p(d_bias.ptr))
    la, lb, ld = (layout(TYPE.CUDA_R_16BF, *x.shape, x.shape[0]) for x in (a, b, d_d))
    lt.cublasLtMatmul(
        *(handle, desc, byref(ONE), d_a.ptr, la, d_b.ptr, lb, byref(ZERO), d_d.ptr, ld, d_d.ptr, ld),
        *(best(la, lb, ld, ld), gpu.workspace(WORKSPACE), WORKSPACE, None),
    )
    product(d_d.numpy(), a, b, beta=1, c=bias, compute=np.float32, then=lambda x: np.maximum(x, 0))


def test_a_strided_batch_without_a_chosen_algorithm(gpu, handle, desc, layout, rng, product):
    count, m, n, k = 3, 17, 29, 23
    a, b, c = (rng.standard_normal((count, *s)).astype(np.float32) for s in ((m, k), (k, n), (m, n)))
    d_d = gpu.poisoned((count, m, n), np.float32)

    def batch(rows, cols):
        return layout(
            *(TYPE.CUDA_R_32F, rows, cols, rows),
            BATCH_COUNT=c_int32(count),
            STRIDED_BATCH_OFFSET=c_int64(rows * cols),
        )

    # Stacks of matrices by rows are, by columns, stacks of their transposes: dᵀ = bᵀ·aᵀ + 2·cᵀ.
    lb, la, ld = batch(n, k), batch(k, m), batch(n, m)
    lt.cublasLtMatmul(
        *(handle, desc, byref(ONE), gpu.array(b).ptr, lb, gpu.array(a).ptr, la),
        *(byref(c_float(2)), gpu.array(c).ptr, ld, d_d.ptr, ld, None, None, 0, None),
    )
    product(d_d.numpy(), a, b, beta=2, c=c)


def test_an_fp8_product_with_a_scale_for_each_operand(gpu, handle, desc, layout, best, rng, close):
    if int(gpu.arch) < 89:
        pytest.skip("fp8 needs a GPU of compute capability 8.9 or newer")
    m, n, k = 64, 48, 160
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((m, k), (k, n)))
    scales = rng.uniform(0.5, 2, 2).astype(np.float32)
    d_d = gpu.poisoned((m, n), np.float32, order="F")
    set_desc(desc, DESC.CUBLASLT_MATMUL_DESC_TRANSA, c_int32(cublasOperation_t.CUBLAS_OP_T))
    set_desc(desc, DESC.CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c_void_p(gpu.array(scales[:1]).ptr))
    set_desc(desc, DESC.CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, c_void_p(gpu.array(scales[1:]).ptr))
    # Both operands lie along k: a by rows, which is aᵀ by columns, and b by columns.
    la, lb = layout(TYPE.CUDA_R_8F_E4M3, k, m, k), layout(TYPE.CUDA_R_8F_E4M3, k, n, k)
    ld = layout(TYPE.CUDA_R_32F, m, n, m)
    lt.cublasLtMatmul(
        *(handle, desc, byref(ONE), gpu.array(a).ptr, la, gpu.array(b, order="F").ptr, lb),
        *(byref(ZERO), d_d.ptr, ld, d_d.ptr, ld, best(la, lb, ld, ld), gpu.workspace(WORKSPACE), WORKSPACE, None),
    )
    # Tensor cores add fp8 products with 14 bits at least, less than f32 has, so each product may be off by 2**-13.
    a, b, scale = a.astype(float), b.astype(float), float(scales[0]) * float(scales[1])
    close(d_d.numpy(), scale * (a @ b), 2**-12 * scale * (np.abs(a) @ np.abs(b)))


def test_a_matrix_changes_from_rows_to_columns_and_is_scaled(gpu, handle, layout, rng, close):
    rows, cols = 37, 22
    a = rng.standard_normal((rows, cols)).astype(np.float32)
    d_c = gpu.poisoned((rows, cols), np.float32, order="F")
    transform = gpu.make(
        lt.cublasLtMatrixTransformDesc_t,
        lambda made: lt.cublasLtMatrixTransformDescCreate(made, TYPE.CUDA_R_32F),
        lt.cublasLtMatrixTransformDescDestroy,
    )
    by_rows = layout(TYPE.CUDA_R_32F, rows, cols, cols, ORDER=c_int32(lt.cublasLtOrder_t.CUBLASLT_ORDER_ROW))
    by_columns = layout(TYPE.CUDA_R_32F, rows, cols, rows)
    lt.cublasLtMatrixTransform(
        *(handle, transform, byref(c_float(4)), gpu.array(a).ptr, by_rows, byref(ZERO), None, None),
        *(d_c.ptr, by_columns, None),
    )
    close(d_c.numpy(), 4.0 * a, 0)  # a power of two: exact


def test_layouts_that_do_not_fit_are_refused(gpu, handle, desc, layout):
    square, other = layout(TYPE.CUDA_R_32F, 4, 4, 4), layout(TYPE.CUDA_R_32F, 5, 4, 5)
    memory = gpu.poisoned((5, 5), np.float32)
    with pytest.raises(CublasLtError) as caught:
        lt.cublasLtMatmul(
            *(handle, desc, byref(ONE), memory.ptr, square, memory.ptr, other, byref(ZERO), memory.ptr, square),
            *(memory.ptr, square, None, None, 0, None),
        )
    assert caught.value.name in {"CUBLAS_STATUS_INVALID_VALUE", "CUBLAS_STATUS_NOT_SUPPORTED"}
    assert caught.value.function == "cublasLtMatmul"
    assert np.isnan(memory.numpy()).all()
