"""Devices on which a collective has failed: data read from them may depend on results that were never written.

A communicator's monitor marks the device before it ends the collective. Copies to the host check the mark after they
have waited, so that incomplete data are never used as a result. The world's `rebuild` and `close` remove it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.errors import DispatchError

__all__ = ["check_not_failed", "clear_failed", "mark_failed"]

_failed: weakref.WeakKeyDictionary[object, dict[int, DispatchError]] = weakref.WeakKeyDictionary()


def mark_failed(device: object, source: object, error: DispatchError) -> None:
    """Make copies from a device to the host raise `error`, until `clear_failed` is called with the same source."""
    _failed[device] = {**_failed.get(device, {}), id(source): error}


def clear_failed(device: object, source: object) -> None:
    """Remove this source's mark; copies work again once no source's mark is left."""
    remaining = {key: error for key, error in _failed.get(device, {}).items() if key != id(source)}
    if remaining:
        _failed[device] = remaining
    else:
        _failed.pop(device, None)


def check_not_failed(device: object) -> None:
    """Raise the error of a collective that has failed on the device."""
    for error in _failed.get(device, {}).values() if _failed else ():
        reduced: tuple[Any, ...] = tuple(error.__reduce__())  # a copy, so that each thread has its own traceback
        raise reduced[0](*reduced[1]) from error
