"""Whether little of the GPU's memory is free: what a call failed for whose status does not say it.

Libraries and the driver take memory of their own beside what they are given. Where there is none they may say no more
than that an error occurred, that the GPU is not supported, or that a launch has too few resources.
"""

from __future__ import annotations

from typing import NamedTuple

from cudabind import driver

__all__ = ["SHORT", "FreeMemory", "free_memory"]

SHORT = 512 << 20  # bytes of free memory below which a library may well have found none


class FreeMemory(NamedTuple):
    """Bytes of the GPU of the current context."""

    free: int
    total: int

    @property
    def is_short(self) -> bool:
        """Whether a call may have failed for memory."""
        return self.free < SHORT

    def __str__(self) -> str:
        return f"{self.free / 2**20:,.0f} of {self.total / 2**20:,.0f} MiB are free"


def free_memory() -> FreeMemory:
    """What is free now, by all processes of the GPU; the driver's error."""
    return FreeMemory(*driver.cuMemGetInfo())
