"""Zeroes the stack below a library call, so that kernel parameters have the same bytes each time it is recorded.

Structures that a library passes to a kernel have padding that it never writes; it contains data that earlier calls left
on the stack. Kernels do not read it, but relocation.py compares every byte, and a call whose bytes differ for no reason
is not relocatable. After `clean_stack` the padding is zero, if the calls in between are the same each time.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["clean_stack"]

REACH = 1 << 15  # bytes; libraries' stack frames begin within a few thousand bytes


class Zeros(ctypes.Structure):
    """An argument that is passed by value, and so copied to the stack."""

    _fields_ = (("bytes", ctypes.c_ubyte * REACH),)


def clean_stack() -> None:
    """Write zeros below the caller's frame, where the frame of the next function that it calls will be."""
    _cleaner()()


@cache
def _cleaner() -> Callable[[], object]:
    zeros = Zeros()
    getpid = ctypes.CFUNCTYPE(ctypes.c_int)(("getpid", ctypes.CDLL(None)))
    getpid.argtypes = (Zeros,)  # getpid ignores it
    return lambda: getpid(zeros)
