"""What a call of cuTENSOR that failed is to raise: whether it was for memory, the library does not say.

Beside the workspace that it is given cuTENSOR takes memory of its own: for kernels that are loaded as they are first
used, and in some contractions, those to a scalar among them, in each call. Where there is none left it answers
CUTENSOR_STATUS_CUDA_ERROR, which its documentation has for any error of CUDA's, "e.g., out of memory"; and where it is
to make a handle CUTENSOR_STATUS_NOT_SUPPORTED, as of a GPU that it does not know (seen with 2.8.1 on an H100). Memory
may be short because this process keeps what it has freed, for its next tensors, and for other processes of the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.errors import CudaError, CutensorError
from dispatch.device.shortage import free_memory
from dispatch.errors import OutOfMemory

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["failure", "made_room"]

MAY_BE_MEMORY = ("CUTENSOR_STATUS_ALLOC_FAILED", "CUTENSOR_STATUS_CUDA_ERROR", "CUTENSOR_STATUS_CUBLAS_ERROR")
AT_CREATE = ("CUTENSOR_STATUS_NOT_SUPPORTED", "CUTENSOR_STATUS_NOT_INITIALIZED", "CUTENSOR_STATUS_INTERNAL_ERROR")


def may_be_memory(error: CudaError) -> bool:
    """Whether the status of a call that failed may stand for memory that was not there."""
    if not isinstance(error, CutensorError):
        return False
    return error.name in MAY_BE_MEMORY or (error.function == "cutensorCreate" and error.name in AT_CREATE)


def made_room(executor: CudaExecutor, error: CudaError) -> bool:
    """Give back what this process keeps but no tensor uses, where a call may have failed for that.

    Whether the call may be made once more; not while it is recorded or captured, for that waits for the device.
    """
    is_recorded = (executor.target.value or 0) != (executor.stream.c_handle.value or 0)
    if is_recorded or executor.captured or not (may_be_memory(error) and free_memory().is_short):
        return False
    executor.device.trim()
    return True


def failure(executor: CudaExecutor, error: CudaError) -> Exception:
    """The error to raise for a call that failed: OutOfMemory where little memory is free, else the library's own.

    Raises DeviceFault where it is the device that is lost.
    """
    executor.stream.done()
    if not may_be_memory(error):
        return error
    told = free_memory()
    if not told.is_short:
        hint = f"{told}: it is not for memory. CUTENSOR_LOG_LEVEL=5 has the library print what CUDA said"
        return CutensorError(error.library, error.function, error.status, error.name, error.text, hint)
    device = executor.device
    short = OutOfMemory(
        f"{device.name} ({device.model}) is likely out of memory: {told}, and cuTENSOR takes some of its own beside its"
        f" workspace: {error.function} failed with {error.name}"
    )
    short.__cause__ = error
    return short
