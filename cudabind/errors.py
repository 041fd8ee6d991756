"""The error tree of the binding layer: one root, one class per library, and what can go wrong before a call.

Raised by `_bind` (generated modules), `_load` and the cuda-python modules; caught by users and by `dispatch`. Every
error carries its parts as attributes and survives pickling, so that a worker process can hand it to its parent.
This file never calls a library: texts and names are passed in by whoever asked the library.
"""

from __future__ import annotations

from typing import ClassVar

# "This leaves the process in an inconsistent state … the process must be terminated and relaunched", in the words of
# driver_types.h (cudaError_t) and cuda.h (CUresult), which share these numbers. 709 (context is destroyed) is not one.
STICKY: frozenset[int] = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})


class CudaError(Exception):
    """Root of every error of the binding layer.

    Args:
        library: NVIDIA's name of the library, such as ``"cublasLt"``.
        function: the function that was called, or ``""`` where there was none yet.
        status: the status number, or None where no call was made.
        name: the status's name in the header, such as ``"CUBLAS_STATUS_NOT_SUPPORTED"``.
        text: the library's own words for the status.
        hint: what to try; by default the class's own hint for the status, or ``""``.

    Attributes:
        sticky: True where every further CUDA call of this process will fail too: only a new process helps.
    """

    HINTS: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        library: str,
        function: str = "",
        status: int | None = None,
        name: str = "",
        text: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(library, function, status, name, text, hint)
        self.library = library
        self.function = function
        self.status = status
        self.name = name
        self.text = text
        self.hint = hint or self.HINTS.get(name, "")

    @property
    def sticky(self) -> bool:
        return False

    def __str__(self) -> str:
        where = f"{self.library}: {self.function}" if self.function else self.library
        status = f" failed with {self.name} ({self.status})" if self.status is not None else ""
        text = f": {self.text.rstrip('.')}" if self.text else ""
        lost = ". This process can make no further CUDA call: start a new one" if self.sticky else ""
        hint = f". Hint: {self.hint}" if self.hint else ""
        return f"{where}{status}{text}{lost}{hint}"


class LibraryNotFound(CudaError):
    """A shared library was found nowhere; the text lists every place looked in."""


class LibraryMismatch(CudaError):
    """Two libraries that belong together come from different places or versions; the text names both."""


class SymbolNotFound(CudaError):
    """The installed library does not export the function; the text names library, version and symbol."""


class CublasError(CudaError):
    """A cuBLAS or cublasXt call returned another status than ``CUBLAS_STATUS_SUCCESS``."""


class CublasLtError(CudaError):
    """A cuBLASLt call returned another status than ``CUBLAS_STATUS_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUBLAS_STATUS_NOT_INITIALIZED": "the library found no driver or GPU that it can use",
        "CUBLAS_STATUS_INVALID_VALUE": "set CUBLASLT_LOG_LEVEL=5 to have the library print every call's arguments",
        "CUBLAS_STATUS_NOT_SUPPORTED": "set CUBLASLT_LOG_LEVEL=2 to have the library print its reason",
    }


class CudnnError(CudaError):
    """A cuDNN call returned another status than ``CUDNN_STATUS_SUCCESS``."""


class CufftError(CudaError):
    """A cuFFT call returned another status than ``CUFFT_SUCCESS``."""


class CurandError(CudaError):
    """A cuRAND call returned another status than ``CURAND_STATUS_SUCCESS``."""


class CusolverError(CudaError):
    """A cuSOLVER call returned another status than ``CUSOLVER_STATUS_SUCCESS``."""


class CusparseError(CudaError):
    """A cuSPARSE call returned another status than ``CUSPARSE_STATUS_SUCCESS``."""


class CusparseLtError(CudaError):
    """A cuSPARSELt call returned another status than ``CUSPARSE_STATUS_SUCCESS``."""


class CutensorError(CudaError):
    """A cuTENSOR or cutensorMg call returned another status than ``CUTENSOR_STATUS_SUCCESS``."""


class NcclError(CudaError):
    """A NCCL call returned another status than ``ncclSuccess``."""


class CudaDriverError(CudaError):
    """A driver API call returned another status than ``CUDA_SUCCESS``."""

    HINTS: ClassVar[dict[str, str]] = {
        "CUDA_ERROR_INVALID_VALUE": "a size, a handle or a pointer among the arguments is not what the function takes",
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
        "cudaErrorInsufficientDriver": "install an NVIDIA driver that is as new as this runtime",
        "cudaErrorNoDevice": "the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    }

    @property
    def sticky(self) -> bool:
        return self.status in STICKY


class CompilerError(CudaError):
    """A compiler or linker call failed; ``log`` holds what the compiler wrote, ``""`` where it wrote nothing."""

    def __init__(
        self,
        library: str,
        function: str = "",
        status: int | None = None,
        name: str = "",
        text: str = "",
        hint: str = "",
        log: str = "",
    ) -> None:
        super().__init__(library, function, status, name, text, hint)
        self.args = (*self.args, log)
        self.log = log

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.log}" if self.log else super().__str__()


class NvrtcError(CompilerError):
    """An NVRTC call returned another status than ``NVRTC_SUCCESS``."""


class NvJitLinkError(CompilerError):
    """An nvJitLink call returned another status than ``NVJITLINK_SUCCESS``."""
