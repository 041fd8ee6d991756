"""Handles of streams as integers, as other libraries pass them."""

from __future__ import annotations

from dispatch.checks import shown
from dispatch.errors import BadRequest

__all__ = ["DEFAULTS", "check_handle"]

DEFAULTS = (0, 1, 2)  # special handles: a default stream of the current context
PAGE = 4096  # bytes: no stream has a smaller address, because the first page of memory is never mapped


def check_handle(name: str, handle: object) -> int:
    """A `cudaStream_t` as an integer; BadRequest for numbers that no stream has, on which the driver would crash."""
    is_whole = isinstance(handle, int) and not isinstance(handle, bool)
    if not is_whole or not (handle in DEFAULTS or PAGE <= handle < 1 << 64):  # type: ignore[operator]
        hint = "Stream(x) wraps a stream object"
        raise BadRequest(name, shown(handle), "a cudaStream_t as an integer: an address, or 0, 1 or 2", hint)
    return handle  # type: ignore[return-value]
