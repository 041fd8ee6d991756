"""What is generated: one row per module of `cudabind/sys`, and nothing else.

Read by `python -m cudabind.gen`. A new library is a new row here, one in `cudabind.LIBRARIES` (how it is found) and its
error class in `cudabind.errors`. What a header declares and the module leaves out stands in the row with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One generated module.

    Attributes:
        module: the module's name in `cudabind.sys`, which is the library's name.
        headers: what to include; everything these files declare is generated.
        wheel: the PyPI package that the headers come from, and the version generated from.
        docs: NVIDIA's documentation of the library.
        prefixes: how the functions' names start; other functions in the headers are not the library's.
        status: the enum of the statuses, or ``""`` where there are no functions.
        success: its enumerator for success, which the check relies on being 0.
        text: the function that puts a status into words, or ``""``.
        error: the error class of `cudabind.errors`.
        uses: modules whose types are imported instead of generated again.
        types: generate just these types: for headers that are shared by many libraries.
        symbols: generate just the symbols behind the names that the header redefines: cuda-python binds the rest.
        elements: structs that arrays of numbers are made of, whose pointers may be device addresses.
        left_out: declared functions that are not generated, each with the reason.
        not_exported: generated functions that the wheel's library does not export, each with what is known of it.
    """

    module: str
    headers: tuple[str, ...]
    wheel: tuple[str, str]
    docs: str
    prefixes: tuple[str, ...] = ()
    status: str = ""
    success: str = ""
    text: str = ""
    error: str = ""
    uses: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    symbols: bool = False
    elements: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    not_exported: dict[str, str] = field(default_factory=dict)


_SIZED_INIT = "inline in the header: call {} with the size of the descriptor's Opaque struct"

ROWS: tuple[Row, ...] = (
    Row(
        module="cuda_types",
        headers=("library_types.h", "driver_types.h", "cuComplex.h"),
        wheel=("nvidia-cuda-runtime", "13.5.37"),
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
            "cuFloatComplex",
            "cuComplex",
            "cuDoubleComplex",
        ),
        elements=("float2", "double2"),
    ),
    Row(
        module="cuda_symbols",
        headers=("cuda.h",),
        wheel=("nvidia-cuda-runtime", "13.5.37"),
        docs="https://docs.nvidia.com/cuda/cuda-driver-api/",
        prefixes=("cu",),
        symbols=True,
    ),
    Row(
        module="cublasLt",
        headers=("cublasLt.h",),
        wheel=("nvidia-cublas", "13.10.0.20"),
        docs="https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api",
        prefixes=("cublasLt",),
        status="cublasStatus_t",
        success="CUBLAS_STATUS_SUCCESS",
        text="cublasLtGetStatusString",
        error="CublasLtError",
        uses=("cuda_types",),
        left_out={
            name: _SIZED_INIT.format(f"{name}_internal")
            for name in (
                "cublasLtMatrixLayoutInit",
                "cublasLtGroupedMatrixLayoutInit",
                "cublasLtMatmulDescInit",
                "cublasLtMatrixTransformDescInit",
                "cublasLtEmulationDescInit",
                "cublasLtMatmulPreferenceInit",
            )
        },
        not_exported={
            "cublasLtDisableCpuInstructionsSetMask": "declared, but not among the symbols of libcublasLt.so 13.10.0",
        },
    ),
)
