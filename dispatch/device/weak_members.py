"""Reading weak sets that other threads change."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["members"]

T = TypeVar("T")


def members(of: Iterable[T]) -> list[T]:
    """The members of a weak set that other threads may add to meanwhile."""
    while True:
        try:
            return list(of)
        except RuntimeError:  # noqa: PERF203  # it changed size while it was read: try again
            continue
