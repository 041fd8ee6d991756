"""What a call of cuTENSOR that failed is to raise: whether it was for memory, the library does not say.

Beside the workspace that it is given cuTENSOR takes memory of its own: for kernels that are loaded as they are first
used, and in some contractions, those to a scalar among them, in each call. Where there is none left it answers
CUTENSOR_STATUS_CUDA_ERROR, which its documentation has for any error of CUDA's, "e.g., out of memory". Memory may be
short because this process keeps what it has freed, for its next tensors, and for other processes of the same GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudabind import driver
from cudabind.errors import CudaError, CutensorError
from dispatch.errors import OutOfMemory

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["failure", "made_room"]

MAY_BE_MEMORY = ("CUTENSOR_STATUS_ALLOC_FAILED", "CUTENSOR_STATUS_CUDA_ERROR", "CUTENSOR_STATUS_CUBLAS_ERROR")
SHORT = 512 << 20  # bytes of free memory below which a library may well have found none


def is_short(error: CudaError) -> bool:
    """Whether a call may have failed for memory: so says its status, and little of it is free."""
    return isinstance(error, CutensorError) and error.name in MAY_BE_MEMORY and driver.cuMemGetInfo()[0] < SHORT


def made_room(executor: CudaExecutor, error: CudaError) -> bool:
    """Give back what this process keeps but no tensor uses, where a call may have failed for that.

    Whether the call may be made once more; not while it is recorded or captured, for that waits for the device.
    """
    is_recorded = (executor.target.value or 0) != (executor.stream.c_handle.value or 0)
    if is_recorded or executor.captured or not is_short(error):
        return False
    executor.device.trim()
    return True


def failure(executor: CudaExecutor, error: CudaError) -> Exception:
    """The error to raise for a call that failed: OutOfMemory where little memory is free, else the library's own.

    Raises DeviceFault where it is the device that is lost.
    """
    executor.stream.done()
    if not isinstance(error, CutensorError) or error.name not in MAY_BE_MEMORY:
        return error
    free, total = (nbytes / 2**20 for nbytes in driver.cuMemGetInfo())
    told = f"{free:,.0f} of {total:,.0f} MiB are free"
    if free * 2**20 >= SHORT:
        hint = f"{told}: it is not for memory. CUTENSOR_LOG_LEVEL=5 has the library print what CUDA said"
        return CutensorError(error.library, error.function, error.status, error.name, error.text, hint)
    device = executor.device
    short = OutOfMemory(
        f"{device.name} ({device.model}) is likely out of memory: {told}, and cuTENSOR takes some of its own beside its"
        f" workspace: {error.function} failed with {error.name}"
    )
    short.__cause__ = error
    return short
