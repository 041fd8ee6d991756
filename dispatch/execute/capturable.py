"""Executors under the caller's stream capture: calls become part of the caller's graph, preparations do not."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dispatch.device.stream import QuietStream, relaxed
from dispatch.errors import BadRequest
from dispatch.execute.executor import Executor

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator

    from dispatch.device.cuda import CudaDevice

__all__ = ["CapturableExecutor"]


class CapturableExecutor(Executor):
    """An executor on a stream of a GPU; plans enqueue on the stream whose handle is `target`."""

    device: CudaDevice
    target: ctypes.c_void_p
    _is_preparing = False  # for a call that the caller captures

    @property
    def captured(self) -> bool:
        """Whether the caller captures this stream into a graph; then only library calls may be enqueued on it."""
        return self.stream.external and self.stream.is_capturing()

    def refuse_capture(self, what: str, *, always: bool = False) -> None:
        """Raise BadRequest if the caller captures the stream: work that must run now would become part of the graph.

        With `always`, `what` can never be captured, so the error does not suggest running it once before the capture.
        """
        if self._is_preparing or self.captured:
            hint = "run it outside of the capture" if always else "run the request once before the capture"
            runs = what if always else f"the first run of {what}"
            expected = f"one that is not under capture, for {runs}"
            raise BadRequest("stream", "a stream under capture", expected, hint)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A block in which to prepare a call, on another stream if the caller captures the executor's.

        In that case the block ends with a wait: its writes are done before the caller's graph runs, and not part of it.
        """
        if self._is_preparing or not self.captured:
            yield
            return
        stream, target = self.stream, self.target.value
        quiet = QuietStream(self.device, self.device.quiet.c_handle.value or 0, stream)
        self._is_preparing = True
        self.stream, self.target.value = quiet, quiet.c_handle.value
        try:
            with relaxed():
                yield
                quiet.synchronize()
        finally:
            self.stream, self.target.value = stream, target
            self._is_preparing = False
