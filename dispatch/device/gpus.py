"""The GPUs that the driver reports, and whose an address or a stream's handle from another library is.

cuda.py makes the device for a GPU.
"""

from __future__ import annotations

from functools import cache

from cudabind import driver
from cudabind.errors import CudaError
from dispatch.errors import BadRequest, DeviceUnavailable, shown

__all__ = ["DEFAULTS", "FORKED", "check_handle", "count_gpus", "device_of_pointer", "is_available"]

DEFAULTS = (0, 1, 2)  # special handles: a default stream of the current context
PAGE = 4096  # bytes: no stream has a smaller address, because the first page of memory is never mapped
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: from cuInit in a process that was forked from one that uses CUDA
FORKED = (
    "it was in use before os.fork(), and CUDA's state is not valid in a forked process. Start processes with the"
    " 'spawn' method"
    " of multiprocessing, or fork before anything uses a GPU; device('host') works here"
)


@cache
def is_available() -> bool:
    """Whether there is a driver and at least one GPU that it can use."""
    try:
        driver.cuInit(0)
        return int(driver.cuDeviceGetCount()) > 0
    except CudaError as error:
        return error.status == NOT_INITIALIZED  # a GPU exists; `device()` raises why this process cannot use it


def device_of_pointer(ptr: int) -> int:
    """The number of the GPU that a device pointer belongs to; BadRequest if the driver does not know the pointer."""
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    try:
        return int(driver.cuPointerGetAttribute(attribute, ptr))
    except CudaError as error:
        if error.status != INVALID_VALUE:
            raise
        raise BadRequest("data", f"address {ptr:#x}", "an address of a GPU's memory in this process") from None


def count_gpus(ordinal: int) -> int:
    """How many GPUs this process sees; DeviceUnavailable if `ordinal` is not among them."""
    try:
        driver.cuInit(0)
        count = int(driver.cuDeviceGetCount())
    except CudaError as error:
        if error.status == NOT_INITIALIZED:
            raise DeviceUnavailable(f"cuda:{ordinal} cannot be used in this process: {FORKED}") from error
        needed = f"cuda:{ordinal} needs an NVIDIA driver and a GPU; without them, use device('host')."
        raise DeviceUnavailable(f"{needed} The reason: {error}") from error
    if ordinal >= count:
        raise DeviceUnavailable(f"there is no cuda:{ordinal}; this machine has {count} GPU(s), numbered from 0")
    return count


def check_handle(name: str, handle: object) -> int:
    """A `cudaStream_t` as an integer; BadRequest for numbers that no stream has, on which the driver would crash."""
    is_whole = isinstance(handle, int) and not isinstance(handle, bool)
    if not is_whole or not (handle in DEFAULTS or PAGE <= handle < 1 << 64):  # type: ignore[operator]
        hint = "Stream(x) wraps a stream object"
        raise BadRequest(name, shown(handle), "a cudaStream_t as an integer: an address, or 0, 1 or 2", hint)
    return handle  # type: ignore[return-value]
