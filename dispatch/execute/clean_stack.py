"""The stack below a call of a library, the same each time that it is recorded.

What a library hands to a kernel has bytes that it never writes: gaps between the members of a structure, of which its
stack has what calls before left there. The kernel does not read them, but relocation.py compares every byte, and what
differs without a reason is not relocatable. Behind this the bytes are zeros, as long as the calls in between are the
same each time.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["clean_stack"]

REACH = 1 << 15  # bytes: libraries' frames begin within a few thousand


class Zeros(ctypes.Structure):
    """Passed by value, which puts it on the stack."""

    _fields_ = (("bytes", ctypes.c_ubyte * REACH),)


def clean_stack() -> None:
    """Write zeros below the caller's frame, where the next function that it calls will have its own."""
    _cleaner()()


@cache
def _cleaner() -> Callable[[], object]:
    zeros = Zeros()
    getpid = ctypes.CFUNCTYPE(ctypes.c_int)(("getpid", ctypes.CDLL(None)))
    getpid.argtypes = (Zeros,)  # which it does not look at
    return lambda: getpid(zeros)
