"""Errors of the libraries of every CUDA toolkit, of cuDNN, cuTENSOR, NCCL, the driver and the runtime.

Raised by generated modules and those over cuda-python; users have them from `cudabind.errors`. A class has the hints
for its library's statuses, and nothing else.
"""

from __future__ import annotations

from typing import ClassVar

from cudabind.errors.base import ASK_THE_DRIVER, CUDNN_REASON, NO_GPU, NO_MEMORY, STICKY, CompilerError, CudaError


class CublasError(CudaError):
    """A cuBLAS or cublasXt call returned another status than ``CUBLAS_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUBLAS_STATUS_NOT_INITIALIZED": f"the handle was not made by cublasCreate, or {NO_GPU}",
        "CUBLAS_STATUS_ALLOC_FAILED": NO_MEMORY,
        "CUBLAS_STATUS_INVALID_VALUE": "matrices are column-major: a leading dimension is at least the rows as stored",
        "CUBLAS_STATUS_EXECUTION_FAILED": ASK_THE_DRIVER,
        "CUBLAS_STATUS_INTERNAL_ERROR": ASK_THE_DRIVER,
    }


class CublasLtError(CudaError):
    """A cuBLASLt call returned another status than ``CUBLAS_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUBLAS_STATUS_NOT_INITIALIZED": NO_GPU,
        "CUBLAS_STATUS_ALLOC_FAILED": NO_MEMORY,
        "CUBLAS_STATUS_INVALID_VALUE": "set CUBLASLT_LOG_LEVEL=5 to have the library print every call's arguments",
        "CUBLAS_STATUS_NOT_SUPPORTED": "set CUBLASLT_LOG_LEVEL=2 to have the library print its reason",
        "CUBLAS_STATUS_EXECUTION_FAILED": ASK_THE_DRIVER,
        "CUBLAS_STATUS_INTERNAL_ERROR": ASK_THE_DRIVER,
    }


class CudnnError(CudaError):
    """A cuDNN call returned another status than ``CUDNN_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUDNN_STATUS_NOT_INITIALIZED": NO_GPU,
        "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH": "another package has loaded parts of another cuDNN: use one cuDNN",
        "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED": "a libcudnn_*.so.9 is missing, or something that it needs",
        "CUDNN_STATUS_BAD_PARAM": CUDNN_REASON,
        "CUDNN_STATUS_NOT_SUPPORTED": CUDNN_REASON,
        "CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN": "no engine takes this graph: fuse less, or ask other heuristics",
        "CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE": "a libcudnn_*.so.9 is missing, or something that it needs",
        "CUDNN_STATUS_INTERNAL_ERROR": ASK_THE_DRIVER,
        "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": NO_MEMORY,
        "CUDNN_STATUS_EXECUTION_FAILED": ASK_THE_DRIVER,
        "CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER": ASK_THE_DRIVER,
        "CUDNN_STATUS_EXECUTION_FAILED_CUDART": ASK_THE_DRIVER,
        "CUDNN_STATUS_EXECUTION_FAILED_CUBLAS": ASK_THE_DRIVER,
    }


class CufftError(CudaError):
    """A cuFFT or cufftXt call returned another status than ``CUFFT_SUCCESS``. cuFFT has no words for a status."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUFFT_INVALID_PLAN": "the plan was never created, or is already destroyed",
        "CUFFT_ALLOC_FAILED": NO_MEMORY,
        "CUFFT_INVALID_TYPE": "the plan was created for another type of transform, such as R2C instead of C2C",
        "CUFFT_INTERNAL_ERROR": f"where even the first plan fails, {NO_GPU}; else {ASK_THE_DRIVER}",
        "CUFFT_EXEC_FAILED": ASK_THE_DRIVER,
        "CUFFT_SETUP_FAILED": NO_GPU,
        "CUFFT_INVALID_SIZE": "every extent is at least 1, and 16-bit types take powers of 2 only",
        "CUFFT_NO_WORKSPACE": "cufftSetAutoAllocation is off and no cufftSetWorkArea was given",
        "CUFFT_MISSING_DEPENDENCY": "cuFFT links at run time: install nvJitLink",
        "CUFFT_NVJITLINK_FAILURE": "cuFFT links at run time: nvJitLink must be as new as cuFFT",
    }


class CurandError(CudaError):
    """A cuRAND call returned another status than ``CURAND_STATUS_SUCCESS``. cuRAND has no words for a status."""

    HINTS: ClassVar[dict[str, str]] = {
        "CURAND_STATUS_NOT_INITIALIZED": "the generator was never created, or is already destroyed",
        "CURAND_STATUS_ALLOCATION_FAILED": NO_MEMORY,
        "CURAND_STATUS_TYPE_ERROR": "this kind of generator has no such setting or no such output",
        "CURAND_STATUS_LENGTH_NOT_MULTIPLE": "normals come in pairs, quasirandom numbers per dimension",
        "CURAND_STATUS_LAUNCH_FAILURE": ASK_THE_DRIVER,
        "CURAND_STATUS_PREEXISTING_FAILURE": ASK_THE_DRIVER,
        "CURAND_STATUS_INITIALIZATION_FAILED": f"{NO_GPU}; curandCreateGeneratorHost needs none",
    }


class CusolverError(CudaError):
    """A cuSOLVER call returned another status than ``CUSOLVER_STATUS_SUCCESS``. cuSOLVER has no words for a status.

    A matrix that is singular or not positive definite is no error: the call succeeds and says so in ``devInfo``.
    """

    HINTS: ClassVar[dict[str, str]] = {
        "CUSOLVER_STATUS_NOT_INITIALIZED": f"the handle was not made by its library's …Create, or {NO_GPU}",
        "CUSOLVER_STATUS_ALLOC_FAILED": NO_MEMORY,
        "CUSOLVER_STATUS_INVALID_VALUE": "matrices are column-major: a leading dimension is at least the rows",
        "CUSOLVER_STATUS_EXECUTION_FAILED": ASK_THE_DRIVER,
        "CUSOLVER_STATUS_INTERNAL_ERROR": ASK_THE_DRIVER,
        "CUSOLVER_STATUS_ZERO_PIVOT": "the matrix is numerically singular",
        "CUSOLVER_STATUS_INVALID_WORKSPACE": "pass a workspace of the size that the function's _bufferSize returns",
    }


class CusparseError(CudaError):
    """A cuSPARSE call returned another status than ``CUSPARSE_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUSPARSE_STATUS_NOT_INITIALIZED": f"the handle was not made by cusparseCreate, or {NO_GPU}",
        "CUSPARSE_STATUS_ALLOC_FAILED": NO_MEMORY,
        "CUSPARSE_STATUS_EXECUTION_FAILED": ASK_THE_DRIVER,
        "CUSPARSE_STATUS_INTERNAL_ERROR": ASK_THE_DRIVER,
        "CUSPARSE_STATUS_ZERO_PIVOT": "an entry of the diagonal is missing or zero",
        "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES": "not enough memory or shared memory for this algorithm: try another",
    }


class CusparseLtError(CudaError):
    """A cuSPARSELt call returned another status than ``CUSPARSE_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUSPARSE_STATUS_NOT_INITIALIZED": NO_GPU,
        "CUSPARSE_STATUS_ARCH_MISMATCH": "structured sparsity needs a GPU of compute capability 8.0 or newer",
        "CUSPARSE_STATUS_NOT_SUPPORTED": "set CUSPARSELT_LOG_LEVEL=5 to have the library print its reason",
        "CUSPARSE_STATUS_EXECUTION_FAILED": ASK_THE_DRIVER,
        "CUSPARSE_STATUS_INTERNAL_ERROR": ASK_THE_DRIVER,
    }


class CutensorError(CudaError):
    """A cuTENSOR or cutensorMg call returned another status than ``CUTENSOR_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUTENSOR_STATUS_NOT_INITIALIZED": NO_GPU,
        "CUTENSOR_STATUS_ALLOC_FAILED": NO_MEMORY,
        "CUTENSOR_STATUS_NOT_SUPPORTED": "set CUTENSOR_LOG_LEVEL=5 to have the library print its reason",
        "CUTENSOR_STATUS_EXECUTION_FAILED": ASK_THE_DRIVER,
        "CUTENSOR_STATUS_INTERNAL_ERROR": "or extents disagree: CUTENSOR_LOG_LEVEL=5 prints the reason",
        "CUTENSOR_STATUS_CUBLAS_ERROR": ASK_THE_DRIVER,
        "CUTENSOR_STATUS_CUDA_ERROR": f"where cutensorCreate fails, {NO_GPU}; else {ASK_THE_DRIVER}",
        "CUTENSOR_STATUS_INSUFFICIENT_WORKSPACE": "ask cutensorEstimateWorkspaceSize or the plan for its size",
        "CUTENSOR_STATUS_INSUFFICIENT_DRIVER": "install a newer driver, or the library for an older CUDA",
    }


class NcclError(CudaError):
    """An NCCL call returned another status than ``ncclSuccess``.

    ``ncclInProgress`` is raised as an error, too: a communicator that does not block answers so until it is done.
    """

    HINTS: ClassVar[dict[str, str]] = {
        "ncclUnhandledCudaError": f"NCCL_DEBUG=WARN prints the CUDA call; {ASK_THE_DRIVER}",
        "ncclSystemError": "a socket, shared memory or a device file failed: NCCL_DEBUG=WARN prints which",
        "ncclInternalError": "NCCL_DEBUG=WARN prints where; ncclGetLastError has the last message",
        "ncclInvalidArgument": "NCCL_DEBUG=WARN prints which argument",
        "ncclInvalidUsage": "ranks disagree, or calls on several communicators are not in one group: NCCL_DEBUG=WARN",
        "ncclRemoteError": "another rank failed or left: see its messages, then call ncclCommAbort and start again",
        "ncclInProgress": "the communicator does not block: ask ncclCommGetAsyncError until it is done",
    }


class CudaDriverError(CudaError):
    """A driver API call returned another status than ``CUDA_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUDA_ERROR_INVALID_VALUE": "an argument is invalid, such as a size, a handle or a pointer",
        "CUDA_ERROR_OUT_OF_MEMORY": "free memory or make the request smaller",
        "CUDA_ERROR_NOT_INITIALIZED": "call driver.cuInit(0) first",
        "CUDA_ERROR_NO_DEVICE": "the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES",
        "CUDA_ERROR_INVALID_CONTEXT": "make a context current first, for example a device's primary context",
        "CUDA_ERROR_NO_BINARY_FOR_GPU": "compile the code for this GPU's compute capability",
    }

    @property
    def sticky(self) -> bool:
        return self.status in STICKY


class CudaRuntimeError(CudaError):
    """A runtime API call returned another status than ``cudaSuccess``."""

    HINTS: ClassVar[dict[str, str]] = {
        "cudaErrorMemoryAllocation": "free memory or make the request smaller",
        "cudaErrorInsufficientDriver": "install an NVIDIA driver of this runtime's CUDA, or cudabind[cu12] for CUDA 12",
        "cudaErrorNoDevice": "the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    }

    @property
    def sticky(self) -> bool:
        return self.status in STICKY


class NvrtcError(CompilerError):
    """An NVRTC call returned another status than ``NVRTC_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "NVRTC_ERROR_INVALID_OPTION": "the log names the option, such as an -arch that is newer than this NVRTC",
        "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE": "libnvrtc-builtins of the same version must be in its folder",
    }


class NvJitLinkError(CompilerError):
    """An nvJitLink call returned another status than ``NVJITLINK_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "NVJITLINK_ERROR_MISSING_ARCH": "give an option such as -arch=sm_90",
        "NVJITLINK_ERROR_OUTDATED_LIBRARY": "the input is newer than nvJitLink: use one that is as new as the compiler",
    }
