"""Batch: requests of one worker that were enqueued together, with one event recorded after them."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

    from dispatch.core.request import Request
    from dispatch.supervise.future import Future

__all__ = ["Batch"]


class Batch:
    """Requests that were enqueued one after the other, and the event recorded after the last of them."""

    __slots__ = ("began", "event", "futures", "mark", "recorded", "requests")

    def __init__(self, event: ctypes.c_void_p) -> None:
        self.event = event
        self.began = perf_counter()  # just before its first request was enqueued
        self.recorded = False
        self.mark = 0  # for use by the completion only
        self.futures: list[Future] = []
        # Kept until the GPU is done: they refer to the operands, whose memory may belong to other libraries.
        self.requests: list[Request] = []
