"""Tensors over the memory of other libraries, without a copy: by DLPack and the CUDA Array Interface.

dlpack.py implements the two formats; this module assigns the memory to a Device and orders its uses on streams.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_dtype, check_shape, check_unmasked, names_arguments, shown
from dispatch.device import dlpack
from dispatch.device.gpus import check_handle, device_of_pointer
from dispatch.device.layout import c_strides
from dispatch.device.registry import device
from dispatch.device.storage import Storage
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.keys import Dtype

if TYPE_CHECKING:
    from dispatch.device.device import Device

__all__ = ["from_cuda_array_interface", "from_dlpack"]


@names_arguments
def from_dlpack(source: Any) -> Tensor:
    """A tensor over the memory of a torch, CuPy, JAX or NumPy array, without a copy.

    On a GPU the calling thread's current stream waits for the work that the producer has enqueued. BadRequest for an
    object without `__dlpack__`, and for a dtype or a device that this library does not support.
    """
    check_unmasked("from_dlpack", source)
    if isinstance(source, np.ndarray) and Dtype.by_numpy.get(source.dtype) is not None:
        return _wrapped(
            device("host"),
            source,
            source.ctypes.data,
            source.dtype,
            source.shape,
            source.strides,
            not source.flags.writeable,
        )
    if not (hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__")):
        raise BadRequest(
            "from_dlpack", type(source).__name__, "an object with __dlpack__", "dev.array(x) copies any array"
        )
    kind, number = dlpack.place_of(source)
    exporter: Any = None  # for a Tensor, whose strides may be negative
    if isinstance(source, Tensor):
        exporter = partial(dlpack.export, source, dl_device=None, copy=None, backwards=True)
    if kind in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        target = device(f"cuda:{number}")
        with target.context:  # torch exports memory of its current GPU only
            imported = dlpack.import_from(
                source, target.executor().stream.handle or dlpack.LEGACY_DEFAULT_STREAM, exporter
            )
    elif kind in (dlpack.CPU, dlpack.CUDA_HOST):
        target = device("host")
        imported = dlpack.import_from(source, None, exporter)
    else:
        raise BadRequest("from_dlpack", f"DLPack device type {kind}", "memory of a CUDA GPU or of the host")
    strides = imported.strides if imported.strides is not None else c_strides(imported.shape)
    # torch's export keeps its tensor alive, which may be given other memory by x.data = y, and this memory freed.
    held: Any = imported if not hasattr(source, "untyped_storage") else (imported, source.untyped_storage())
    storage = Storage(target, imported.ptr, 0, target.executor().stream, _hand_back, held)
    return Tensor(
        storage, imported.ptr, target.layout(imported.dtype, imported.shape, strides, imported.ptr, imported.readonly)
    )


@names_arguments
def from_cuda_array_interface(source: Any) -> Tensor:
    """A tensor over the memory of an object with `__cuda_array_interface__` (CuPy, Numba), without a copy.

    The calling thread's current stream waits for the stream that the interface names, if it names one. BadRequest for
    an object without the interface, or a dtype that this library does not support.
    """
    interface: dict[str, Any] | None = getattr(source, "__cuda_array_interface__", None)
    if interface is None:
        raise BadRequest("from_cuda_array_interface", type(source).__name__, "an object with __cuda_array_interface__")
    try:
        (ptr, readonly), shape, typestr = interface["data"], interface["shape"], interface["typestr"]
        shape, dtype, steps = check_shape("shape", shape), np.dtype(typestr), interface.get("strides")
        is_sound = isinstance(ptr, int) and (steps is None or len(steps) == len(shape))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise BadRequest(
            "from_cuda_array_interface", shown(interface), "version 3 of the interface", str(error)
        ) from None
    if not is_sound:
        raise BadRequest("from_cuda_array_interface", shown(interface), "version 3 of the interface")
    target = device(f"cuda:{device_of_pointer(ptr)}" if ptr else "cuda:0")
    stream = interface.get("stream")
    if stream:
        producer_stream: Any = target.external(check_handle("stream", stream))
        with producer_stream.claimed():
            target.executor().stream.wait_for_uses(producer_stream)
    return _wrapped(target, source, ptr, dtype, shape, steps, bool(readonly))


def _wrapped(
    home: Device,
    source: Any,
    ptr: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    readonly: bool,
) -> Tensor:
    kind = check_dtype("dtype", dtype)
    if kind.bits < 8:
        raise BadRequest(
            "dtype",
            f"{kind} with one element in each byte",
            "elements of whole bytes, or two elements in each byte",
            "dev.array(x) packs a copy",
        )
    steps = c_strides(shape)
    if strides is not None:
        if any(stride % kind.numpy.itemsize for stride in strides):
            raise BadRequest(
                "strides", str(strides), f"multiples of {kind}'s {kind.numpy.itemsize} bytes", "copy it first"
            )
        steps = tuple(stride // kind.numpy.itemsize for stride in strides)
    storage = Storage(home, ptr, 0, home.executor().stream, _hand_back, source)
    return Tensor(storage, ptr, home.layout(kind, tuple(shape), steps, ptr, readonly))


def _hand_back(storage: Storage) -> None:
    """Release another library's memory once our streams are done with it."""
    if storage.device.alive and storage.device.fault is None:
        storage.device.park(storage)
