"""What libraries keep in descriptors comes back as it was set: cuBLASLt, cublasXt, cuDNN, cuSPARSE, cuSOLVER."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cudabind import _lazy, _load
from cudabind.errors import CublasError, CudnnError, CusolverError, CusparseError
from cudabind.sys import cublasLt, cublasXt, cudnn, cusolverDn, cusolverMg, cusolverSp, cusparse
from cudabind.sys.cublas_types import cublasOperation_t
from cudabind.sys.cublasLt import cublasLtMatmulDescAttributes_t as Desc
from cudabind.sys.cublasLt import cublasLtMatrixLayoutAttribute_t as Layout
from cudabind.sys.cuda_types import cudaDataType

if TYPE_CHECKING:
    from collections.abc import Callable

    Need = Callable[..., None]

DESC = "CUBLASLT_MATMUL_DESC_"
LAYOUT = "CUBLASLT_MATRIX_LAYOUT_"
PREFERENCE = "CUBLASLT_MATMUL_PREF_"


@pytest.mark.parametrize(
    ("attribute", "kind", "value"),
    [
        ("TRANSA", ctypes.c_int32, cublasOperation_t.CUBLAS_OP_T),
        ("EPILOGUE", ctypes.c_int32, cublasLt.cublasLtEpilogue_t.CUBLASLT_EPILOGUE_GELU_AUX_BIAS),
        ("BIAS_POINTER", ctypes.c_void_p, 0x7F0000001000),
        ("EPILOGUE_AUX_LD", ctypes.c_int64, 1 << 33),
        ("A_SCALE_POINTER", ctypes.c_void_p, 0x7F0000002000),
        ("FAST_ACCUM", ctypes.c_int8, 1),
    ],
)
def test_matmul_attributes_come_back(need: Need, attribute: str, kind: Any, value: int) -> None:
    need("cublasLt")
    desc = cublasLt.cublasLtMatmulDesc_t()
    cublasLt.cublasLtMatmulDescCreate(
        byref(desc), cublasLt.cublasComputeType_t.CUBLAS_COMPUTE_32F, cudaDataType.CUDA_R_32F
    )
    given, back, written = kind(value), kind(), ctypes.c_size_t()
    number, size = Desc[DESC + attribute], ctypes.sizeof(kind)
    cublasLt.cublasLtMatmulDescSetAttribute(desc, number, byref(given), size)
    cublasLt.cublasLtMatmulDescGetAttribute(desc, number, byref(back), size, byref(written))
    assert (back.value, written.value) == (value, size)
    cublasLt.cublasLtMatmulDescDestroy(desc)


def test_a_matrix_layout_comes_back(need: Need) -> None:
    need("cublasLt")
    layout = cublasLt.cublasLtMatrixLayout_t()
    cublasLt.cublasLtMatrixLayoutCreate(byref(layout), cudaDataType.CUDA_R_16BF, 640, 320, 648)
    batch, stride = ctypes.c_int32(5), ctypes.c_int64(1 << 34)
    cublasLt.cublasLtMatrixLayoutSetAttribute(layout, Layout[LAYOUT + "BATCH_COUNT"], byref(batch), 4)
    cublasLt.cublasLtMatrixLayoutSetAttribute(layout, Layout[LAYOUT + "STRIDED_BATCH_OFFSET"], byref(stride), 8)
    kinds = {"TYPE": ctypes.c_uint32, "ROWS": ctypes.c_uint64, "COLS": ctypes.c_uint64, "LD": ctypes.c_int64}
    told = {}
    for name, kind in (kinds | {"BATCH_COUNT": ctypes.c_int32, "STRIDED_BATCH_OFFSET": ctypes.c_int64}).items():
        value = kind()
        cublasLt.cublasLtMatrixLayoutGetAttribute(
            layout, Layout[LAYOUT + name], byref(value), ctypes.sizeof(kind), None
        )
        told[name] = value.value
    cublasLt.cublasLtMatrixLayoutDestroy(layout)
    sizes = {"TYPE": 14, "ROWS": 640, "COLS": 320, "LD": 648, "BATCH_COUNT": 5, "STRIDED_BATCH_OFFSET": 1 << 34}
    assert told == sizes  # 14 is CUDA_R_16BF in library_types.h


def test_a_matmul_preference_comes_back(need: Need) -> None:
    need("cublasLt")
    preference, back = cublasLt.cublasLtMatmulPreference_t(), ctypes.c_uint64()
    cublasLt.cublasLtMatmulPreferenceCreate(byref(preference))
    attribute = cublasLt.cublasLtMatmulPreferenceAttributes_t[PREFERENCE + "MAX_WORKSPACE_BYTES"]
    cublasLt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, byref(ctypes.c_uint64(33 << 20)), 8)
    cublasLt.cublasLtMatmulPreferenceGetAttribute(preference, attribute, byref(back), 8, None)
    cublasLt.cublasLtMatmulPreferenceDestroy(preference)
    assert back.value == 33 << 20


def test_cublasxt_keeps_its_settings_and_refuses_what_is_none(need: Need) -> None:
    need("cublasXt")
    handle, block = cublasXt.cublasXtHandle_t(), ctypes.c_int()
    cublasXt.cublasXtCreate(byref(handle))
    cublasXt.cublasXtSetBlockDim(handle, 640)
    cublasXt.cublasXtGetBlockDim(handle, byref(block))
    assert block.value == 640
    with pytest.raises(CublasError) as caught:
        cublasXt.cublasXtSetBlockDim(handle, -1)
    assert (caught.value.library, caught.value.name) == ("cublasXt", "CUBLAS_STATUS_INVALID_VALUE")
    cublasXt.cublasXtDestroy(handle)


def test_a_cudnn_tensor_comes_back_and_knows_its_size(need: Need) -> None:
    need("cudnn")
    shape, strides = (ctypes.c_int * 5)(2, 3, 4, 5, 6), (ctypes.c_int * 5)(400, 130, 31, 6, 1)
    desc, kind, rank, size = cudnn.cudnnTensorDescriptor_t(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    cudnn.cudnnCreateTensorDescriptor(byref(desc))
    cudnn.cudnnSetTensorNdDescriptor(desc, cudnn.cudnnDataType_t.CUDNN_DATA_HALF, 5, shape, strides)
    shape_back, strides_back = (ctypes.c_int * 5)(), (ctypes.c_int * 5)()
    cudnn.cudnnGetTensorNdDescriptor(desc, 5, byref(kind), byref(rank), shape_back, strides_back)
    cudnn.cudnnGetTensorSizeInBytes(desc, byref(size))
    cudnn.cudnnDestroyTensorDescriptor(desc)
    assert cudnn.cudnnDataType_t(kind.value) is cudnn.cudnnDataType_t.CUDNN_DATA_HALF
    assert (rank.value, list(shape_back), list(strides_back)) == (5, list(shape), list(strides))
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    assert size.value == 2 * (last + 1)


def test_a_cudnn_convolution_comes_back_and_tells_the_shape_it_makes(need: Need) -> None:
    need("cudnn")
    convolution, given = cudnn.cudnnConvolutionDescriptor_t(), [1, 2, 3, 4, 1, 2]
    image, filters = cudnn.cudnnTensorDescriptor_t(), cudnn.cudnnFilterDescriptor_t()
    for create, made in [
        (cudnn.cudnnCreateConvolutionDescriptor, convolution),
        (cudnn.cudnnCreateTensorDescriptor, image),
        (cudnn.cudnnCreateFilterDescriptor, filters),
    ]:
        create(byref(made))  # type: ignore[operator]
    mode, half = cudnn.cudnnConvolutionMode_t.CUDNN_CROSS_CORRELATION, cudnn.cudnnDataType_t.CUDNN_DATA_HALF
    nchw = cudnn.cudnnTensorFormat_t.CUDNN_TENSOR_NCHW
    cudnn.cudnnSetConvolution2dDescriptor(convolution, *given, mode, cudnn.cudnnDataType_t.CUDNN_DATA_FLOAT)
    cudnn.cudnnSetTensor4dDescriptor(image, nchw, half, 7, 3, 32, 40)
    cudnn.cudnnSetFilter4dDescriptor(filters, half, nchw, 9, 3, 5, 3)
    back = [ctypes.c_int() for _ in range(8)]
    cudnn.cudnnGetConvolution2dDescriptor(convolution, *map(byref, back))
    assert [each.value for each in back] == [*given, mode, cudnn.cudnnDataType_t.CUDNN_DATA_FLOAT]
    out = [ctypes.c_int() for _ in range(4)]
    cudnn.cudnnGetConvolution2dForwardOutputDim(convolution, image, filters, *map(byref, out))
    # Padding 1 and 2, stride 3 and 4, dilation 1 and 2, by the formula of cuDNN's documentation.
    assert [each.value for each in out] == [7, 9, 1 + (32 + 2 - 5) // 3, 1 + (40 + 4 - 5) // 4]
    cudnn.cudnnDestroyConvolutionDescriptor(convolution)
    cudnn.cudnnDestroyTensorDescriptor(image)
    cudnn.cudnnDestroyFilterDescriptor(filters)


def test_cudnn_tells_why_it_refuses_a_tensor(need: Need) -> None:
    need("cudnn")
    desc, words = cudnn.cudnnTensorDescriptor_t(), ctypes.create_string_buffer(512)
    cudnn.cudnnCreateTensorDescriptor(byref(desc))
    with pytest.raises(CudnnError) as caught:
        cudnn.cudnnSetTensorNdDescriptor(desc, cudnn.cudnnDataType_t.CUDNN_DATA_HALF, -5, None, None)
    assert caught.value.name.startswith("CUDNN_STATUS_BAD_PARAM")
    cudnn.cudnnGetLastErrorString(words, len(words))
    assert b"nbDims" in words.value
    cudnn.cudnnDestroyTensorDescriptor(desc)


def test_a_cusparse_matrix_comes_back(need: Need) -> None:
    need("cusparse")
    offsets, columns, values = np.zeros(5, np.int32), np.zeros(7, np.int32), np.zeros(7, np.float64)
    index = cusparse.cusparseIndexType_t.CUSPARSE_INDEX_32I
    base, kind = cusparse.cusparseIndexBase_t.CUSPARSE_INDEX_BASE_ONE, cudaDataType.CUDA_R_64F
    arrays = [array.ctypes.data for array in (offsets, columns, values)]
    matrix, sizes = cusparse.cusparseSpMatDescr_t(), [ctypes.c_int64() for _ in range(3)]
    cusparse.cusparseCreateCsr(byref(matrix), 4, 6, 7, *arrays, index, index, base, kind)
    pointers, kinds = [ctypes.c_void_p() for _ in range(3)], [ctypes.c_int() for _ in range(4)]
    cusparse.cusparseCsrGet(matrix, *map(byref, [*sizes, *pointers, *kinds]))
    assert [each.value for each in sizes] == [4, 6, 7]
    assert [each.value for each in pointers] == arrays
    assert [each.value for each in kinds] == [index, index, base, kind]
    found = ctypes.c_int()
    cusparse.cusparseSpMatGetFormat(matrix, byref(found))
    assert cusparse.cusparseFormat_t(found.value) is cusparse.cusparseFormat_t.CUSPARSE_FORMAT_CSR
    if _lazy.key(_load.version("cusparse")) >= _lazy.key(cusparse.SINCE["cusparseSpMatGetSizes"]):
        told, at = cusparse.cusparseSpMatSizes_t(), cusparse.cusparseSpMatPointers_t()
        cusparse.cusparseSpMatGetSizes(matrix, byref(told))
        assert [getattr(told.data.csr, name) for name in ("rows", "cols", "nnz")] == [4, 6, 7]
        at.format, other = told.format, values + 1
        at.data.csr.rowOffsets, at.data.csr.colInd, at.data.csr.values = *arrays[:2], other.ctypes.data
        cusparse.cusparseSpMatSetPointers(matrix, byref(at))
        cusparse.cusparseSpMatGetPointers(matrix, byref(at))
        assert [at.data.csr.rowOffsets, at.data.csr.values] == [arrays[0], other.ctypes.data]
    cusparse.cusparseDestroySpMat(matrix)
    with pytest.raises(CusparseError) as caught:
        cusparse.cusparseCreateCsr(byref(matrix), -4, 6, 7, *arrays, index, index, base, kind)
    assert (caught.value.function, caught.value.name) == ("cusparseCreateCsr", "CUSPARSE_STATUS_INVALID_VALUE")


def test_cusolvers_parameters_come_back_and_nonsense_is_refused(need: Need) -> None:
    need("cusolverDn")
    params, most = cusolverDn.cusolverDnIRSParams_t(), ctypes.c_int()
    cusolverDn.cusolverDnIRSParamsCreate(byref(params))
    cusolverDn.cusolverDnIRSParamsSetMaxIters(params, 77)
    cusolverDn.cusolverDnIRSParamsGetMaxIters(params, byref(most))
    assert most.value == 77
    with pytest.raises(CusolverError) as caught:
        cusolverDn.cusolverDnIRSParamsSetMaxItersInner(params, 99_999_999)
    assert (caught.value.status, caught.value.name) == (13, "CUSOLVER_STATUS_IRS_PARAMS_INVALID")
    cusolverDn.cusolverDnIRSParamsDestroy(params)


def test_cusolver_makes_and_drops_what_holds_its_state(need: Need) -> None:
    need("cusolverDn", "cusolverSp", "cusolverMg")
    svd, factors = cusolverDn.gesvdjInfo_t(), cusolverSp.csrqrInfo_t()
    cusolverDn.cusolverDnCreateGesvdjInfo(byref(svd))
    cusolverSp.cusolverSpCreateCsrqrInfo(byref(factors))
    handle, grid, matrix = (
        cusolverMg.cusolverMgHandle_t(),
        cusolverMg.cudaLibMgGrid_t(),
        cusolverMg.cudaLibMgMatrixDesc_t(),
    )
    mapping = cusolverMg.cusolverMgGridMapping_t.CUDALIBMG_GRID_MAPPING_COL_MAJOR
    cusolverMg.cusolverMgCreate(byref(handle))
    cusolverMg.cusolverMgCreateDeviceGrid(byref(grid), 1, 1, (ctypes.c_int * 1)(0), mapping)
    cusolverMg.cusolverMgCreateMatrixDesc(byref(matrix), 8, 8, 8, 4, cudaDataType.CUDA_R_32F, grid)
    assert all(each.value for each in (svd, factors, handle, grid, matrix))
    cusolverMg.cusolverMgDestroyMatrixDesc(matrix)
    cusolverMg.cusolverMgDestroyGrid(grid)
    cusolverMg.cusolverMgDestroy(handle)
    cusolverSp.cusolverSpDestroyCsrqrInfo(factors)
    cusolverDn.cusolverDnDestroyGesvdjInfo(svd)
