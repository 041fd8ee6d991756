"""The size of the state of dropout's random number generator on a device."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

from dispatch.core.operand_checks import check_opaque

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor

__all__ = ["STATES_ALIGNMENT", "check_states", "known_states_bytes", "states_bytes"]

STATES_ALIGNMENT = 16  # bytes: a state contains structs
HOST_STATES = 16  # bytes: the seed, and the number of masks drawn from it
_sizes: weakref.WeakKeyDictionary[Device, int] = weakref.WeakKeyDictionary()


def known_states_bytes(device: Device) -> int | None:
    """The size of a state if it is known without a library call (host only); on a GPU it is checked with the plan."""
    return HOST_STATES if device.is_host else None


def states_bytes(device: Device) -> int:
    """The size of a state on a device; on a GPU cuDNN reports it: states for all of its threads, some MiB."""
    if device.is_host:
        return HOST_STATES
    nbytes = _sizes.get(device)
    if nbytes is None:
        from cudabind.sys import cudnn  # imported at first use: requests must not load a library
        from dispatch.libraries.cudnn.handle import handle_of

        size = ctypes.c_size_t()
        executor: Any = device.executor()
        cudnn.cudnnDropoutGetStatesSize(handle_of(executor).follow(), ctypes.byref(size))
        nbytes = _sizes[device] = size.value
    return nbytes


def check_states(name: str, states: Tensor, *, binding: bool = False) -> None:
    """BadRequest unless a tensor can hold a state; on a GPU the size is checked when a plan is bound."""
    hint = "leave out=None" if name == "out" else "use the result of dropout_states(device, seed)"
    expected = states_bytes(states.device) if binding else known_states_bytes(states.device)
    check_opaque(name, states, expected, STATES_ALIGNMENT, hint)
