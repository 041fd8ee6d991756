"""Copying and pickling of host tensors, and of requests over them: new memory with the same layout.

`copy` and `pickle` find these functions through `copyreg`, before they check the classes. Views that share memory and
are copied together share memory in the copy, too. Tensors of a GPU are refused; the error says what to do.
"""

from __future__ import annotations

import copyreg
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.device.registry import device
from dispatch.device.storage import Storage
from dispatch.device.tensor import Tensor
from dispatch.keys import U8, Dtype

if TYPE_CHECKING:
    from dispatch.device.layout import Array

__all__: list[str] = []


def _reduced_tensor(tensor: Tensor) -> tuple[Any, ...]:
    layout, storage = tensor.layout, tensor.storage
    layout.device.refuse_pickles()
    layout.device.check(tensor)
    layout.device.look(tensor)
    if storage.nbytes:
        return _tensor, (storage, tensor.ptr - storage.base, layout.dtype, layout.shape, layout.strides)
    # Another library's memory: only the range of this view is known to exist.
    part = _bytes(tensor.ptr + layout.low, layout.high - layout.low)
    return _tensor, (part, -layout.low, layout.dtype, layout.shape, layout.strides)


def _reduced_storage(storage: Storage) -> tuple[Any, ...]:
    storage.device.refuse_pickles()
    storage.device.check()
    return _storage, (_bytes(storage.base, storage.nbytes),)


def _bytes(address: int, nbytes: int) -> Array:
    return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)


def _storage(memory: Array) -> Storage:
    tensor = device("host").empty(memory.shape, U8)
    tensor.copy_from(memory)
    return tensor.storage


def _tensor(
    memory: Storage | Array, offset: int, dtype: Dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    storage = memory if isinstance(memory, Storage) else _storage(memory)
    ptr = storage.base + offset
    tensor = Tensor(storage, ptr, storage.device.layout(dtype, shape, strides, ptr))
    tensor.check_within()  # a pickle may contain any values
    return tensor


copyreg.pickle(Tensor, _reduced_tensor)
copyreg.pickle(Storage, _reduced_storage)
