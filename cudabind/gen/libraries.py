"""What is generated: one row for each module of `cudabind/sys`, and nothing else.

Read by `python -m cudabind.gen`. A new library is a row in WHEELS (pins.py), a row in ROWS, one in
`cudabind.LIBRARIES` (how it is found) and its error class in `cudabind.errors`. What a header declares and its module
leaves out stands in the row with its reason; headers of the wheels that have no row stand in HEADERS_LEFT_OUT with
theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One generated module.

    Attributes:
        module: the module's name in `cudabind.sys`.
        headers: what to include; everything these files declare is generated. An older version need not have them all.
        wheel: the row of WHEELS that the headers come from.
        docs: NVIDIA's documentation of the library.
        prefixes: how the functions' names start; other functions in the headers are not the library's.
        status: the enum of the statuses, or ``""`` where there are no functions.
        success: its enumerator for success, which the check relies on being 0.
        text: the function that puts a status into words, or ``""``.
        error: the error class of `cudabind.errors`.
        library: the name in `cudabind.LIBRARIES`, where it is not the module's.
        uses: modules whose types are imported instead of generated again.
        needs: further rows of WHEELS that the headers include.
        types: generate just these types: for headers that are shared by many libraries.
        symbols: generate just the symbols behind the names that the header redefines: cuda-python binds the rest.
        elements: structs that arrays of numbers are made of, whose pointers may be device addresses.
        inline_as: the symbols behind functions that are inline in old headers and exported by newer libraries.
        sized: functions that are inline because all they do is to call their `_internal` with the size of a struct, as
            the argument behind the first; each with that struct.
        left_out: declared functions that are not generated, each with the reason.
        not_exported: generated functions that the newest wheel's library does not export, with what is known of each.
    """

    module: str
    headers: tuple[str, ...]
    wheel: str
    docs: str
    prefixes: tuple[str, ...] = ()
    status: str = ""
    success: str = ""
    text: str = ""
    error: str = ""
    library: str = ""
    uses: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    symbols: bool = False
    elements: tuple[str, ...] = ()
    inline_as: dict[str, str] = field(default_factory=dict)
    sized: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    not_exported: dict[str, str] = field(default_factory=dict)


_NOT_A_SYMBOL = "declared, but not among the symbols of {}"
_LOGGER = ("SetCallback", "SetFile", "OpenFile", "SetLevel", "SetMask", "ForceDisable")
_CUSPARSE_SIZES = (
    *("bsrsv2", "bsrsm2", "csrilu02", "bsrilu02", "csric02", "bsric02"),
    *("gebsr2gebsc", "csr2gebsr", "gebsr2gebsr"),
)
_CUBLAS = "https://docs.nvidia.com/cuda/cublas/"
_CUSPARSE = "https://docs.nvidia.com/cuda/cusparse/"
_CUSOLVER = "https://docs.nvidia.com/cuda/cusolver/"
_CUTENSOR = "https://docs.nvidia.com/cuda/cutensor/latest/"

ROWS: tuple[Row, ...] = (
    Row(
        module="cuda_types",
        headers=("library_types.h", "driver_types.h", "cuComplex.h"),
        wheel="runtime",
        docs="https://docs.nvidia.com/cuda/cuda-runtime-api/",
        types=(
            "cudaDataType",
            "cudaDataType_t",
            "libraryPropertyType",
            "libraryPropertyType_t",
            "cudaEmulationStrategy",
            "cudaEmulationStrategy_t",
            "cudaEmulationMantissaControl",
            "cudaEmulationMantissaControl_t",
            "cudaEmulationSpecialValuesSupport",
            "cudaEmulationSpecialValuesSupport_t",
            "cudaStream_t",
            "cudaEvent_t",
            "cudaGraph_t",
            "cuFloatComplex",
            "cuComplex",
            "cuDoubleComplex",
        ),
        elements=("float2", "double2"),
    ),
    Row(
        module="cuda_symbols",
        headers=("cuda.h",),
        wheel="runtime",
        docs="https://docs.nvidia.com/cuda/cuda-driver-api/",
        prefixes=("cu",),
        symbols=True,
    ),
    Row(
        module="cublas_types",
        headers=("cublas_v2.h", "cublas_api.h"),
        wheel="cublas",
        docs=_CUBLAS,
        types=(
            "cublasStatus_t",
            "cublasComputeType_t",
            "cublasFillMode_t",
            "cublasDiagType_t",
            "cublasSideMode_t",
            "cublasOperation_t",
        ),
    ),
    Row(
        module="cusparse_types",
        headers=("cusparse.h",),
        wheel="cusparse",
        docs=_CUSPARSE,
        types=("cusparseStatus_t", "cusparseMatDescr_t", "cusparseOperation_t", "cusparseOrder_t"),
    ),
    Row(
        module="cusolver_types",
        headers=("cusolver_common.h",),
        wheel="cusolver",
        docs=_CUSOLVER,
        types=("cusolverStatus_t", "cusolverEigMode_t"),
    ),
    Row(
        module="cublasLt",
        headers=("cublasLt.h",),
        wheel="cublas",
        docs=f"{_CUBLAS}#using-the-cublaslt-api",
        prefixes=("cublasLt",),
        status="cublasStatus_t",
        success="CUBLAS_STATUS_SUCCESS",
        text="cublasLtGetStatusString",
        error="CublasLtError",
        uses=("cuda_types", "cublas_types"),
        sized={
            "cublasLtMatrixLayoutInit": "cublasLtMatrixLayoutOpaque_t",
            "cublasLtGroupedMatrixLayoutInit": "cublasLtMatrixLayoutOpaque_t",
            "cublasLtMatmulDescInit": "cublasLtMatmulDescOpaque_t",
            "cublasLtMatrixTransformDescInit": "cublasLtMatrixTransformDescOpaque_t",
            "cublasLtEmulationDescInit": "cublasLtEmulationDescOpaque_t",
            "cublasLtMatmulPreferenceInit": "cublasLtMatmulPreferenceOpaque_t",
        },
        not_exported={
            "cublasLtDisableCpuInstructionsSetMask": _NOT_A_SYMBOL.format("libcublasLt.so"),
        },
    ),
    Row(
        module="cublas",
        headers=("cublas_v2.h", "cublas_api.h"),
        wheel="cublas",
        docs=f"{_CUBLAS}#using-the-cublas-api",
        prefixes=("cublas",),
        status="cublasStatus_t",
        success="CUBLAS_STATUS_SUCCESS",
        text="cublasGetStatusString",
        error="CublasError",
        uses=("cuda_types", "cublas_types"),
    ),
    Row(
        module="cublas_legacy",
        headers=("cublas.h",),
        wheel="cublas",
        docs=f"{_CUBLAS}#using-the-cublas-legacy-api",
        prefixes=("cublas",),
        status="cublasStatus_t",
        success="CUBLAS_STATUS_SUCCESS",
        error="CublasError",
        library="cublas",
        uses=("cuda_types", "cublas_types"),
    ),
    Row(
        module="cublasXt",
        headers=("cublasXt.h",),
        wheel="cublas",
        docs=f"{_CUBLAS}#using-the-cublasxt-api",
        prefixes=("cublasXt",),
        status="cublasStatus_t",
        success="CUBLAS_STATUS_SUCCESS",
        error="CublasError",
        uses=("cuda_types", "cublas_types"),
    ),
    Row(
        module="cudnn",
        headers=(
            *("cudnn.h", "cudnn_version.h", "cudnn_graph.h", "cudnn_ops.h", "cudnn_cnn.h", "cudnn_adv.h"),
            *("cudnn_backend.h", "cudnn_subquadratic_ops.h", "cudnn_gnn_ops.h"),
        ),
        wheel="cudnn",
        docs="https://docs.nvidia.com/deeplearning/cudnn/backend/latest/",
        prefixes=("cudnn",),
        status="cudnnStatus_t",
        success="CUDNN_STATUS_SUCCESS",
        text="cudnnGetErrorString",
        error="CudnnError",
        uses=("cuda_types",),
    ),
    Row(
        module="cufft",
        headers=("cufft.h", "cudalibxt.h", "cufftXt.h"),
        wheel="cufft",
        docs="https://docs.nvidia.com/cuda/cufft/",
        prefixes=("cufft",),
        status="cufftResult_t",
        success="CUFFT_SUCCESS",
        error="CufftError",
        uses=("cuda_types",),
        inline_as={"cufftXtSetJITCallback": "__cufftXtSetJITCallback_12_7"},
    ),
    Row(
        module="curand",
        headers=("curand.h",),
        wheel="curand",
        docs="https://docs.nvidia.com/cuda/curand/",
        prefixes=("curand",),
        status="curandStatus",
        success="CURAND_STATUS_SUCCESS",
        error="CurandError",
        uses=("cuda_types",),
        not_exported=dict.fromkeys(
            ("curandGenerateBinomial", "curandGenerateBinomialMethod"), _NOT_A_SYMBOL.format("libcurand.so")
        ),
    ),
    Row(
        module="cusparse",
        headers=("cusparse.h",),
        wheel="cusparse",
        docs=_CUSPARSE,
        prefixes=("cusparse",),
        status="cusparseStatus_t",
        success="CUSPARSE_STATUS_SUCCESS",
        text="cusparseGetErrorString",
        error="CusparseError",
        uses=("cuda_types", "cusparse_types"),
        not_exported=dict.fromkeys(
            (
                *(f"cusparse{kind}{name}_bufferSizeExt" for name in _CUSPARSE_SIZES for kind in "SDCZ"),
                "cusparseXgebsr2csr",
            ),
            _NOT_A_SYMBOL.format("libcusparse.so"),
        ),
    ),
    Row(
        module="cusparseLt",
        headers=("cusparseLt.h",),
        wheel="cusparseLt",
        docs="https://docs.nvidia.com/cuda/cusparselt/",
        prefixes=("cusparseLt",),
        status="cusparseStatus_t",
        success="CUSPARSE_STATUS_SUCCESS",
        text="cusparseLtGetErrorString",
        error="CusparseLtError",
        uses=("cuda_types", "cusparse_types"),
        needs=("cusparse",),
    ),
    Row(
        module="cusolverDn",
        headers=("cusolver_common.h", "cusolverDn.h"),
        wheel="cusolver",
        docs=f"{_CUSOLVER}#using-the-cusolver-api",
        prefixes=("cusolver",),
        status="cusolverStatus_t",
        success="CUSOLVER_STATUS_SUCCESS",
        error="CusolverError",
        uses=("cuda_types", "cublas_types", "cusolver_types"),
        needs=("cublas",),
        not_exported=dict.fromkeys(
            (f"cusolverDnLogger{name}" for name in _LOGGER), _NOT_A_SYMBOL.format("libcusolver.so")
        ),
    ),
    Row(
        module="cusolverSp",
        headers=("cusolverSp.h", "cusolverSp_LOWLEVEL_PREVIEW.h"),
        wheel="cusolver",
        docs=f"{_CUSOLVER}#cusolversp-sparse-lapack",
        prefixes=("cusolver",),
        status="cusolverStatus_t",
        success="CUSOLVER_STATUS_SUCCESS",
        error="CusolverError",
        uses=("cuda_types", "cusparse_types", "cusolver_types"),
        needs=("cublas", "cusparse"),
    ),
    Row(
        module="cusolverRf",
        headers=("cusolverRf.h",),
        wheel="cusolver",
        docs=f"{_CUSOLVER}#cusolverrf-refactorization",
        prefixes=("cusolver",),
        status="cusolverStatus_t",
        success="CUSOLVER_STATUS_SUCCESS",
        error="CusolverError",
        uses=("cusolver_types",),
    ),
    Row(
        module="cusolverMg",
        headers=("cusolverMg.h",),
        wheel="cusolver",
        docs=f"{_CUSOLVER}#using-the-cusolvermg-api",
        prefixes=("cusolver",),
        status="cusolverStatus_t",
        success="CUSOLVER_STATUS_SUCCESS",
        error="CusolverError",
        uses=("cuda_types", "cublas_types", "cusolver_types"),
        needs=("cublas",),
    ),
    Row(
        module="cutensor",
        headers=("cutensor.h", "cutensor/types.h"),
        wheel="cutensor",
        docs=f"{_CUTENSOR}api/cutensor.html",
        prefixes=("cutensor",),
        status="cutensorStatus_t",
        success="CUTENSOR_STATUS_SUCCESS",
        text="cutensorGetErrorString",
        error="CutensorError",
        uses=("cuda_types",),
    ),
    Row(
        module="cutensorMg",
        headers=("cutensorMg.h",),
        wheel="cutensor",
        docs=f"{_CUTENSOR}api/cutensorMg.html",
        prefixes=("cutensorMg",),
        status="cutensorStatus_t",
        success="CUTENSOR_STATUS_SUCCESS",
        error="CutensorError",
        uses=("cuda_types", "cutensor"),
    ),
    Row(
        module="nccl",
        headers=("nccl.h",),
        wheel="nccl",
        docs="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html",
        prefixes=("nccl", "pnccl"),
        status="ncclResult_t",
        success="ncclSuccess",
        text="ncclGetErrorString",
        error="NcclError",
        uses=("cuda_types",),
    ),
)

# By file name, as fnmatch has it.
HEADERS_LEFT_OUT: dict[str, str] = {
    "*_v9.h": "cuDNN has each of its headers twice",
    "curand_*.h": "device code",
    "nvblas.h": "interposes on Fortran's BLAS in programs that are linked with it",
    "cufftw.h": "FFTW's functions, for C programs that are relinked; cufft has them all under its own names",
    "cufft_device.h": "needs a C++ compiler, and calls its own interface experimental",
    "cusparse_v2.h": "includes cusparse.h and declares nothing",
    "cusparseLt_cusparse_stub.h": "those parts of cusparse.h that cusparseLt.h needs",
    "cutensorMp.h": "a library of its own, of several processes, which needs NCCL or MPI",
    "nccl_device*.h": (
        "C++ for device code, and host functions over structs that only such code of the same version uses"
    ),
}
