"""The root of the error tree, what can go wrong before a call, and the hints that many libraries share.

Raised by `_bind` (generated modules), `_load` and the cuda-python modules; caught by users and by `dispatch`. Every
error carries its parts as attributes and survives pickling, so that a worker process can hand it to its parent.
This file never calls a library: texts and names are passed in by whoever asked the library.
"""

from __future__ import annotations

from typing import ClassVar

# "This leaves the process in an inconsistent state … the process must be terminated and relaunched", in the words of
# driver_types.h (cudaError_t) and cuda.h (CUresult), which share these numbers. 709 (context is destroyed) is not one.
STICKY: frozenset[int] = frozenset({226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})

# A library reports with one status what broke now and what an earlier kernel broke, curable or not. Measured on an H200
# after an illegal address: cublasSgemm says EXECUTION_FAILED, every new handle NOT_INITIALIZED or INTERNAL_ERROR, cuFFT
# EXEC_FAILED, cuRAND LAUNCH_FAILURE or PREEXISTING_FAILURE, while cusolverDnSgetrf and ncclAllReduce go on to succeed:
# no library's word, not even success, can stand for the driver's.
ASK_THE_DRIVER = (
    "the GPU reported an error, of this call or of earlier work: driver.cuCtxSynchronize() raises it by its own name, "
    "and `sticky` of that error says whether the process is lost"
)
NO_GPU = (
    "no driver or GPU that the library can use: check nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's version; or an "
    "earlier fault, after which no handle can be made: driver.cuCtxSynchronize() raises it"
)
CUDNN_REASON = "cudnnGetLastErrorString returns the reason; CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr prints it"
NO_MEMORY = "free memory, or use less workspace; memory that a memory pool holds is not available to the library"


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
        sticky: True where every further CUDA call of this process will fail too: only a new process helps. Just the
            driver and the runtime can tell. A library's status is never sticky: its "execution failed" may be a fault
            that ends the process or a launch that was refused, so its hint says how to ask the driver.
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
        text = f": {self.text.rstrip('.')}" if self.text not in ("", self.name) else ""  # some say nothing but the name
        lost = ". This process can make no further CUDA call: start a new one" if self.sticky else ""
        hint = f". Hint: {self.hint}" if self.hint else ""
        return f"{where}{status}{text}{lost}{hint}"


class LibraryNotFound(CudaError):
    """A shared library was found nowhere; the text lists every place looked in."""


class LibraryMismatch(CudaError):
    """Two libraries that belong together come from different places or versions; the text names both."""


class SymbolNotFound(CudaError):
    """The installed library does not export the function; the text names library, version and symbol."""


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
