"""Memory that NCCL moves fastest: its own allocations, and memory that is registered with a communicator.

Peers access registered memory in place; other memory is copied through buffers. A window is registered by all ranks
together; symmetric kernels and copy engines work on windows. Follows
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/bufferreg.html.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from cudabind.sys import nccl
from dispatch.checks import check_dtype, check_shape
from dispatch.device.layout import c_strides
from dispatch.device.storage import Storage
from dispatch.device.stream import relaxed
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from typing_extensions import Self

    from dispatch.device.device import Device
    from dispatch.libraries.nccl.communicator import NcclCommunicator

__all__ = ["Registration", "empty", "register", "window"]

ALIGNMENT = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC


class _Allocation:
    """Memory of `ncclMemAlloc`, freed when this object dies."""

    def __init__(self, device: Any, nbytes: int) -> None:
        self._device, self._pointer = device, ctypes.c_void_p()
        with device.context, relaxed():
            nccl.ncclMemAlloc(ctypes.byref(self._pointer), nbytes)
        self.address = int(self._pointer.value or 0)

    def __del__(self) -> None:
        if self._pointer.value and self._device.alive and not sys.is_finalizing():
            with self._device.context, relaxed():
                nccl.ncclMemFree.unchecked(self._pointer)


def _release_storage(storage: Storage) -> None:
    """Free the memory once the streams of this process are done with it."""
    if storage.device.alive and storage.device.fault is None:
        storage.device.park(storage)


def empty(device: Device, shape: int | tuple[int, ...], dtype: Any = "f32") -> Tensor:
    """An uninitialized tensor in memory that NCCL allocates; it supports every kind of registration."""
    kind = check_dtype("dtype", dtype)
    extents = check_shape("shape", shape, kind.bits)
    strides = c_strides(extents)
    elements = 1
    for extent in extents:
        elements *= extent
    nbytes = max(-(-elements * kind.bits // 8), 1)
    held = _Allocation(device, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    storage = Storage(device, held.address, nbytes, device.executor().stream, _release_storage, held)
    return Tensor(storage, held.address, device.layout(kind, extents, strides, held.address))


class Registration:
    """Memory that is registered with a communicator, until `close()` or the end of this object; it is kept until then.

    Close windows on all ranks. A communicator that has failed has no registrations any more.
    """

    def __init__(self, communicator: NcclCommunicator, tensor: Tensor, c_handle: Any, function: str) -> None:
        self.communicator, self.tensor = communicator, tensor
        self._c_handle, self._function = c_handle, function

    def close(self) -> None:
        """Deregister the memory; a second call does nothing."""
        comm, handle = self.communicator, self._c_handle
        if handle is None:
            return
        self._c_handle = None
        if comm.error is None and not comm.closed and comm.device.alive:
            with comm.device.context, relaxed(), comm.lock:
                getattr(nccl, self._function).unchecked(comm.c_handle, handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


def _address_and_size(communicator: NcclCommunicator, tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    """Address and size of a tensor; BadRequest unless it is dense."""
    communicator.check()
    if tensor.device is not communicator.device:
        raise BadRequest("tensor", f"one on {tensor.device!r}", f"one on {communicator.device!r}")
    if not tensor.layout.is_contiguous or not tensor.size:
        raise BadRequest("tensor", str(tensor.layout), "elements that are dense in C order")
    return ctypes.c_void_p(tensor.ptr), ctypes.c_size_t(tensor.nbytes)


def register(communicator: NcclCommunicator, tensor: Tensor) -> Registration:
    """Register memory that a communicator's calls will use; each rank does so by itself."""
    address, size = _address_and_size(communicator, tensor)
    handle = ctypes.c_void_p()

    def start() -> int:
        with communicator.lock:
            call = nccl.ncclCommRegister.unchecked
            return int(call(communicator.c_handle, address, size, ctypes.byref(handle)))

    communicator.wait_for("ncclCommRegister", start)
    return Registration(communicator, tensor, handle, "ncclCommDeregister")


def window(communicator: NcclCommunicator, tensor: Tensor) -> Registration:
    """Register a symmetric window: all ranks call this, with tensors of the same size made by `empty`."""
    address, size = _address_and_size(communicator, tensor)
    if tensor.ptr % ALIGNMENT:
        hint = "dispatch.libraries.nccl.memory.empty(device, shape, dtype)"
        raise BadRequest(
            "tensor", f"an address at {tensor.ptr % ALIGNMENT} of {ALIGNMENT} bytes", "memory of NCCL's", hint
        )
    handle = nccl.ncclWindow_t()

    def start() -> int:
        call = nccl.ncclCommWindowRegister.unchecked
        return int(call(communicator.c_handle, address, size, ctypes.byref(handle), ctypes.c_int(SYMMETRIC)))

    communicator.wait_for("ncclCommWindowRegister", start)
    return Registration(communicator, tensor, handle, "ncclCommWindowDeregister")
