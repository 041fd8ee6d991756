"""The error tree of the binding layer: one root, one class per library, and what can go wrong before a call.

Raised by `_bind` (generated modules), `_load` and the cuda-python modules; caught by users and by `dispatch`. Every
error carries its parts as attributes and survives pickling, so that a worker process can hand it to its parent.
This file never calls a library: texts and names are passed in by whoever asked the library.
"""

from __future__ import annotations

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
        hint: what to try, or ``""``.

    Attributes:
        sticky: True where every further CUDA call of this process will fail too: only a new process helps.
    """

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
        self.hint = hint

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


class CublasLtError(CudaError):
    """A cuBLASLt call returned another status than ``CUBLAS_STATUS_SUCCESS``."""


class CudaDriverError(CudaError):
    """A driver API call returned another status than ``CUDA_SUCCESS``."""

    @property
    def sticky(self) -> bool:
        return self.status in STICKY


class CudaRuntimeError(CudaError):
    """A runtime API call returned another status than ``cudaSuccess``."""

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
