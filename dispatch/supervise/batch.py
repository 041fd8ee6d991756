"""Batch: requests of one worker that were enqueued together, behind which one event is watched."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

    from dispatch.core.request import Request
    from dispatch.supervise.future import Future

__all__ = ["Batch"]


class Batch:
    """Requests that were enqueued one after the other, and the event behind the last of them."""

    __slots__ = ("began", "event", "futures", "mark", "recorded", "requests")

    def __init__(self, event: ctypes.c_void_p) -> None:
        self.event = event
        self.began = perf_counter()  # as its first request was about to be enqueued
        self.recorded = False
        self.mark = 0  # for the completion's own use
        self.futures: list[Future] = []
        # They hold the operands, which other libraries may own, until the GPU is done.
        self.requests: list[Request] = []
