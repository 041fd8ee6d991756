"""Who is in a weak set, while other threads add to it: looking through one raises when another thread does."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakSet

__all__ = ["members"]

T = TypeVar("T")


def members(of: WeakSet[T]) -> list[T]:
    """Those that were in it at some time during this call, and live."""
    while True:
        try:
            return list(of)
        except RuntimeError:  # it changed size: another thread added one; what it took is seen the next time
            continue
