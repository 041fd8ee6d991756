"""Reads the statuses of routines, one for each matrix of a batch, on the host, and lists those that are not 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.device.tensor import Tensor

if TYPE_CHECKING:
    from dispatch.device.layout import Array

__all__ = ["nonzero", "on_host"]


def on_host(given: Any) -> Array:
    """The elements of a tensor of this or of another library; waits for them."""
    if isinstance(given, Tensor):
        return given.numpy()
    for name in ("cpu", "get"):  # of torch, of CuPy
        if hasattr(given, name):
            given = getattr(given, name)()
            break
    return np.asarray(given)


def nonzero(statuses: Array) -> dict[tuple[int, ...], int]:
    """The statuses that are not 0, by the index of their matrix; () if there is no batch."""
    return {tuple(map(int, place)): int(statuses[tuple(place)]) for place in np.argwhere(statuses)}
