"""Errors of the libraries beside those of `toolkit`: pictures, compilers, tools, data, many processes, quantum states.

Raised by generated modules; users have them from `cudabind.errors`. A class has the hints for its library's statuses,
and nothing else.
"""

from __future__ import annotations

from typing import ClassVar

from cudabind.errors.base import ASK_THE_DRIVER, NO_GPU, NO_MEMORY, CompilerError, CudaError

RAN = ASK_THE_DRIVER
INSTALL_TOO = "install {} beside it"


class CudssError(CudaError):
    """A cuDSS call returned another status than ``CUDSS_STATUS_SUCCESS``. cuDSS has no words for a status."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUDSS_STATUS_NOT_INITIALIZED": f"the handle was not made by cudssCreate, or {NO_GPU}",
        "CUDSS_STATUS_ALLOC_FAILED": NO_MEMORY,
        "CUDSS_STATUS_EXECUTION_FAILED": RAN,
        "CUDSS_STATUS_INTERNAL_ERROR": RAN,
        "CUDSS_STATUS_INVALID_VALUE": "the phases come in order: analysis, factorization, solve",
    }


class NvjpegError(CudaError):
    """A nvJPEG call returned another status than ``NVJPEG_STATUS_SUCCESS``. nvJPEG has no words for a status."""

    HINTS: ClassVar[dict[str, str]] = {
        "NVJPEG_STATUS_NOT_INITIALIZED": f"the handle was never created, or is already destroyed, or {NO_GPU}",
        "NVJPEG_STATUS_ALLOCATOR_FAILURE": NO_MEMORY,
        "NVJPEG_STATUS_EXECUTION_FAILED": RAN,
        "NVJPEG_STATUS_INTERNAL_ERROR": RAN,
        "NVJPEG_STATUS_INCOMPLETE_BITSTREAM": "the data end before the image does: the file may be truncated",
        "NVJPEG_STATUS_JPEG_NOT_SUPPORTED": "nvJPEG supports baseline and progressive images of 8 bits",
        "NVJPEG_STATUS_IMPLEMENTATION_NOT_SUPPORTED": "use another nvjpegBackend_t: not all backends have all features",
    }


class Nvjpeg2kError(CudaError):
    """A nvJPEG2000 call returned another status than ``NVJPEG2K_STATUS_SUCCESS``. nvJPEG2000 has no words."""

    HINTS: ClassVar[dict[str, str]] = {
        "NVJPEG2K_STATUS_NOT_INITIALIZED": f"the handle was never created, or is already destroyed, or {NO_GPU}",
        "NVJPEG2K_STATUS_ALLOCATOR_FAILURE": NO_MEMORY,
        "NVJPEG2K_STATUS_EXECUTION_FAILED": RAN,
        "NVJPEG2K_STATUS_INTERNAL_ERROR": RAN,
    }


class NvtiffError(CudaError):
    """A nvTIFF call returned another status than ``NVTIFF_STATUS_SUCCESS``. nvTIFF has no words for a status."""

    HINTS: ClassVar[dict[str, str]] = {
        "NVTIFF_STATUS_NOT_INITIALIZED": f"the handle was never created, or is already destroyed, or {NO_GPU}",
        "NVTIFF_STATUS_ALLOCATOR_FAILURE": NO_MEMORY,
        "NVTIFF_STATUS_EXECUTION_FAILED": RAN,
        "NVTIFF_STATUS_INTERNAL_ERROR": RAN,
        "NVTIFF_STATUS_NVCOMP_NOT_FOUND": INSTALL_TOO.format("nvCOMP"),
        "NVTIFF_STATUS_NVJPEG_NOT_FOUND": INSTALL_TOO.format("nvJPEG"),
        "NVTIFF_STATUS_NVJPEG2K_NOT_FOUND": INSTALL_TOO.format("nvJPEG2000"),
    }


class NvimgcodecError(CudaError):
    """A nvImageCodec call returned another status than ``NVIMGCODEC_STATUS_SUCCESS``. It has no words for a status."""

    HINTS: ClassVar[dict[str, str]] = {
        "NVIMGCODEC_STATUS_NOT_INITIALIZED": "the instance was never created, or is already destroyed",
        "NVIMGCODEC_STATUS_ALLOCATOR_FAILURE": NO_MEMORY,
        "NVIMGCODEC_STATUS_EXECUTION_FAILED": RAN,
        "NVIMGCODEC_STATUS_CODESTREAM_UNSUPPORTED": "no loaded extension supports this format",
        "NVIMGCODEC_STATUS_MISSED_DEPENDENCIES": "an extension needs a library that is not installed, such as nvJPEG",
    }


class NppError(CudaError):
    """A NPP call returned another status than ``NPP_NO_ERROR``. Warnings, which are positive, are raised, too."""

    HINTS: ClassVar[dict[str, str]] = {
        "NPP_CUDA_KERNEL_EXECUTION_ERROR": RAN,
        "NPP_MEMORY_ALLOCATION_ERR": NO_MEMORY,
        "NPP_STEP_ERROR": "steps are the bytes from one line to the next, not pixels",
        "NPP_SIZE_ERROR": "a region of interest has a positive width and height",
    }


class NvcompError(CudaError):
    """A nvCOMP call returned another status than ``nvcompSuccess``."""

    HINTS: ClassVar[dict[str, str]] = {
        "nvcompErrorCudaError": RAN,
        "nvcompErrorAlignment": "each format tells what its buffers need",
        "nvcompErrorOutputBufferTooSmall": "the format tells the largest output of a chunk",
    }


class CufileError(CudaError):
    """A cuFile call returned a struct whose status is not ``CU_FILE_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CU_FILE_DRIVER_NOT_INITIALIZED": "load nvidia-fs, or set allow_compat_mode in cufile.json",
        "CU_FILE_IO_NOT_SUPPORTED": "this file system has no GPUDirect Storage: set allow_compat_mode in cufile.json",
        "CU_FILE_CUDA_DRIVER_ERROR": RAN,
        "CU_FILE_CUDA_CONTEXT_MISMATCH": "make the context current in which the memory was allocated",
    }


class NvFatbinError(CompilerError):
    """A nvFatbin call returned another status than ``NVFATBIN_SUCCESS``."""


class NvvmError(CompilerError):
    """A libNVVM call returned another status than ``NVVM_SUCCESS``. nvvmGetProgramLog has the compiler's messages."""

    HINTS: ClassVar[dict[str, str]] = {
        "NVVM_ERROR_COMPILATION": "nvvmGetProgramLog returns the messages",
        "NVVM_ERROR_INVALID_IR": "nvvmVerifyProgram finds the reason, and nvvmGetProgramLog returns it",
        "NVVM_ERROR_INVALID_OPTION": "nvvmGetProgramLog names the option",
    }


class NvPtxCompilerError(CompilerError):
    """A PTX compiler call returned another status than ``NVPTXCOMPILE_SUCCESS``. nvPTXCompilerGetErrorLog says why."""

    HINTS: ClassVar[dict[str, str]] = {
        "NVPTXCOMPILE_ERROR_COMPILATION_FAILURE": "nvPTXCompilerGetErrorLog returns the messages",
        "NVPTXCOMPILE_ERROR_UNSUPPORTED_PTX_VERSION": "the PTX is newer than the compiler",
    }


class MathdxError(CompilerError):
    """A libmathdx call returned another status than ``COMMONDX_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "COMMONDX_COMPILATION_ERROR": "the descriptor is incomplete, or no implementation has these traits together",
    }


class NvmlError(CudaError):
    """A NVML call returned another status than ``NVML_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "NVML_ERROR_UNINITIALIZED": "call nvmlInit_v2 first",
        "NVML_ERROR_DRIVER_NOT_LOADED": "no NVIDIA driver runs on this machine",
        "NVML_ERROR_NO_PERMISSION": "only root may do this, unless nvidia-smi has permitted it to other users",
        "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver was updated while it was running: reload it",
        "NVML_ERROR_GPU_IS_LOST": "the GPU has fallen off the bus: see dmesg",
        "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": "set the struct's version member to the constant of its name",
    }


class CuptiError(CudaError):
    """A CUPTI call returned another status than ``CUPTI_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES": "the driver's NVreg_RestrictProfilingToAdminUsers lets only root",
        "CUPTI_ERROR_NOT_INITIALIZED": NO_GPU,
        "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED": "another profiler has subscribed in this process",
        "CUPTI_ERROR_OUT_OF_MEMORY": NO_MEMORY,
    }


class SanitizerError(CudaError):
    """A Compute Sanitizer call returned another status than ``SANITIZER_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "SANITIZER_ERROR_NOT_SUPPORTED": "compute-sanitizer must have injected the caller into the process",
    }


class NvshmemError(CudaError):
    """An NVSHMEM call returned another status than ``NVSHMEMX_SUCCESS``."""


class CublasMpError(CudaError):
    """A cuBLASMp call returned another status than ``CUBLASMP_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUBLASMP_STATUS_NOT_INITIALIZED": f"the handle was not made by cublasMpCreate, or {NO_GPU}",
        "CUBLASMP_STATUS_ALLOCATION_FAILED": NO_MEMORY,
        "CUBLASMP_STATUS_EXECUTION_FAILED": RAN,
        "CUBLASMP_STATUS_INTERNAL_ERROR": RAN,
    }


class CustatevecError(CudaError):
    """A cuStateVec call returned another status than ``CUSTATEVEC_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUSTATEVEC_STATUS_NOT_INITIALIZED": f"the handle was not made by custatevecCreate, or {NO_GPU}",
        "CUSTATEVEC_STATUS_ALLOC_FAILED": NO_MEMORY,
        "CUSTATEVEC_STATUS_EXECUTION_FAILED": RAN,
        "CUSTATEVEC_STATUS_INSUFFICIENT_WORKSPACE": "pass a workspace of the size that GetWorkspaceSize returns",
    }


class CutensornetError(CudaError):
    """A cuTensorNet call returned another status than ``CUTENSORNET_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUTENSORNET_STATUS_NOT_INITIALIZED": f"the handle was not made by cutensornetCreate, or {NO_GPU}",
    }


class CudensitymatError(CudaError):
    """A cuDensityMat call returned another status than ``CUDENSITYMAT_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUDENSITYMAT_STATUS_NOT_INITIALIZED": f"the handle was not made by cudensitymatCreate, or {NO_GPU}",
    }


class CupaulipropError(CudaError):
    """A cuPauliProp call returned another status than ``CUPAULIPROP_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUPAULIPROP_STATUS_NOT_INITIALIZED": f"the handle was not made by cupaulipropCreate, or {NO_GPU}",
    }


class CustabilizerError(CudaError):
    """A cuStabilizer call returned another status than ``CUSTABILIZER_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUSTABILIZER_STATUS_NOT_INITIALIZED": NO_GPU,
        "CUSTABILIZER_STATUS_ALLOC_FAILED": NO_MEMORY,
        "CUSTABILIZER_STATUS_CUDA_ERROR": RAN,
    }
