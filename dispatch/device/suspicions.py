"""Devices on which a collective has failed, and where what is read may follow from what it was to write.

A communicator's monitor notes it before it ends the collective; copies to the host look behind their wait, so that
nothing that such a collective left half done is taken for a result. The world's `rebuild` and `close` end it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.errors import DispatchError

__all__ = ["check_trust", "suspect", "trust"]

_suspected: weakref.WeakKeyDictionary[object, dict[int, DispatchError]] = weakref.WeakKeyDictionary()


def suspect(device: object, source: object, error: DispatchError) -> None:
    """Have copies from a device to the host raise, until `trust` is told by the same source."""
    _suspected[device] = {**_suspected.get(device, {}), id(source): error}


def trust(device: object, source: object) -> None:
    """What is read from the device is taken as it is again, as far as this source can tell."""
    left = {key: error for key, error in _suspected.get(device, {}).items() if key != id(source)}
    if left:
        _suspected[device] = left
    else:
        _suspected.pop(device, None)


def check_trust(device: object) -> None:
    """Raise what a collective on the device has failed by."""
    for error in _suspected.get(device, {}).values() if _suspected else ():
        made: tuple[Any, ...] = tuple(error.__reduce__())  # an error of its own for each thread
        raise made[0](*made[1]) from error
