"""Whether the GPU is nearly out of memory: the likely cause of failures whose status does not say so.

Libraries and the driver also allocate memory. If none is left, their status may only say that an internal error
occurred, that the GPU is not supported, or that a launch has too few resources.
"""

from __future__ import annotations

from typing import NamedTuple

from cudabind import driver

__all__ = ["SHORT", "FreeMemory", "free_memory"]

SHORT = 512 << 20  # bytes of free memory below which a library may have failed to allocate


class FreeMemory(NamedTuple):
    """Free and total bytes of the GPU of the current context."""

    free: int
    total: int

    @property
    def is_short(self) -> bool:
        """Whether a call may have failed for lack of memory."""
        return self.free < SHORT

    def __str__(self) -> str:
        return f"{self.free / 2**20:,.0f} of {self.total / 2**20:,.0f} MiB are free"


def free_memory() -> FreeMemory:
    """The memory that is free now, over all processes of the GPU; raises the driver's error."""
    return FreeMemory(*driver.cuMemGetInfo())
