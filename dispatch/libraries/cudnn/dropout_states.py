"""The size of the state that dropout's random numbers have on a device."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

from dispatch.core.operand_checks import check_opaque

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor

__all__ = ["STATES_ALIGNMENT", "check_states", "known_states_bytes", "states_bytes"]

STATES_ALIGNMENT = 16  # bytes: the library keeps structs in a state
HOST_STATES = 16  # bytes: the seed, and how many masks were drawn from it
_sizes: weakref.WeakKeyDictionary[Device, int] = weakref.WeakKeyDictionary()


def known_states_bytes(device: Device) -> int | None:
    """The size of a state where no library must be asked for it: the host's. Of others it is checked with the plan."""
    return HOST_STATES if device.is_host else None


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


def check_states(name: str, states: Tensor, *, binding: bool = False) -> None:
    """BadRequest unless a tensor can hold a state; a GPU's library is asked for its size when a plan is bound."""
    hint = "leave out=None" if name == "out" else "take what dropout_states(device, seed) gives"
    wanted = states_bytes(states.device) if binding else known_states_bytes(states.device)
    check_opaque(name, states, wanted, STATES_ALIGNMENT, hint)
