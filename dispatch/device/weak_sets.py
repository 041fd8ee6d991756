"""Who is in a weak set, while other threads add to it: looking through one raises when another thread does."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from weakref import WeakSet

__all__ = ["members"]

T = TypeVar("T")


def members(of: WeakSet[T]) -> list[T]:
    """Those that were in it at some time during this call, and live."""
    while True:
        try:
            return list(of)
        except RuntimeError:  # noqa: PERF203  # it changed size: another thread added one, which the next look sees
            continue
