"""Executors on streams of other libraries, and which executor a stream of a GPU gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.device.stream import NULL_CONTEXT
from dispatch.execute.cuda_executor import CudaExecutor

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dispatch.device.external import ExternalStream
    from dispatch.device.stream import Stream

__all__ = ["ExternalExecutor", "executor_on"]


class ExternalExecutor(CudaExecutor):
    """Runs requests on another library's stream, which is alive in `with` blocks of it and while a call is made."""

    stream: ExternalStream

    def claimed(self) -> AbstractContextManager[None]:
        return NULL_CONTEXT if self.stream.is_current else self.stream.claimed()


def executor_on(stream: Stream) -> CudaExecutor:
    """An executor on a stream of a GPU."""
    return CudaExecutor(stream) if stream.is_ours else ExternalExecutor(stream)
