"""The size of the state that dropout's random numbers have on a device."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.device.device import Device

__all__ = ["STATES_ALIGNMENT", "states_bytes"]

STATES_ALIGNMENT = 16  # bytes: the library keeps structs in a state
HOST_STATES = 16  # bytes: the seed, and how many masks were drawn from it
_sizes: weakref.WeakKeyDictionary[Device, int] = weakref.WeakKeyDictionary()


def states_bytes(device: Device) -> int:
    """The size of a state on a device; on a GPU cuDNN says it: random numbers for each of its threads, some MiB."""
    if device.is_host:
        return HOST_STATES
    known = _sizes.get(device)
    if known is None:
        from cudabind.sys import cudnn  # at first use: requests bind no library
        from dispatch.libraries.cudnn.handle import handle_of

        size = ctypes.c_size_t()
        executor: Any = device.executor()
        cudnn.cudnnDropoutGetStatesSize(handle_of(executor).follow(), ctypes.byref(size))
        known = _sizes[device] = size.value
    return known
