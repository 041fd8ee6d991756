"""The error that a failed cuTENSOR call raises; its status does not say whether memory was short.

In addition to its workspace, cuTENSOR allocates memory itself: when a kernel is first loaded, and in some
contractions, such as those to a scalar, in each call. Without free memory it returns CUTENSOR_STATUS_CUDA_ERROR,
which its documentation lists for any CUDA error, "e.g., out of memory"; cutensorCreate then returns
CUTENSOR_STATUS_NOT_SUPPORTED, as for an unsupported GPU (seen with 2.8.1 on an H100). Memory may be short
because this process keeps freed blocks for its next tensors, or because of other processes on the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind.errors import CudaError, CutensorError
from dispatch.device.shortage import free_memory
from dispatch.errors import OutOfMemory

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["failure", "free_kept_memory"]

MAY_BE_MEMORY = ("CUTENSOR_STATUS_ALLOC_FAILED", "CUTENSOR_STATUS_CUDA_ERROR", "CUTENSOR_STATUS_CUBLAS_ERROR")
AT_CREATE = ("CUTENSOR_STATUS_NOT_SUPPORTED", "CUTENSOR_STATUS_NOT_INITIALIZED", "CUTENSOR_STATUS_INTERNAL_ERROR")


def may_be_memory(error: CudaError) -> bool:
    """Whether a failed call may have failed for lack of memory."""
    if not isinstance(error, CutensorError):
        return False
    return error.name in MAY_BE_MEMORY or (error.function == "cutensorCreate" and error.name in AT_CREATE)


def free_kept_memory(executor: CudaExecutor, error: CudaError) -> bool:
    """Free the memory that this process caches and no tensor uses, if a call may have failed for lack of memory.

    Returns whether to make the call again. It frees nothing while the call is recorded or captured, because freeing
    memory waits for the device.
    """
    is_recorded = (executor.target.value or 0) != (executor.stream.c_handle.value or 0)
    if is_recorded or executor.captured or not (may_be_memory(error) and free_memory().is_short):
        return False
    executor.device.trim()
    return True


def failure(executor: CudaExecutor, error: CudaError) -> Exception:
    """The error to raise for a failed call: OutOfMemory if little memory is free, else the library's error.

    Raises DeviceFault if the device is lost.
    """
    executor.stream.done()
    if not may_be_memory(error):
        return error
    memory = free_memory()
    if not memory.is_short:
        hint = f"{memory}, so memory is not the cause. With CUTENSOR_LOG_LEVEL=5 the library prints CUDA's error"
        return CutensorError(error.library, error.function, error.status, error.name, error.text, hint)
    device = executor.device
    short = OutOfMemory(
        f"{device.name} ({device.model}) is probably out of memory ({memory}); cuTENSOR allocates some in addition"
        f" to its workspace: {error.function} failed with {error.name}"
    )
    short.__cause__ = error
    return short
