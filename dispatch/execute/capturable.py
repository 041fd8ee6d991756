"""What an executor does where its caller captures the stream: calls are part of his graph, preparations are not."""

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
    """An executor on a stream of a GPU; plans enqueue on the stream that `target` names."""

    device: CudaDevice
    target: ctypes.c_void_p
    _is_preparing = False  # for a call that the caller captures

    @property
    def captured(self) -> bool:
        """Whether the caller records this stream into a graph of its own: then only plain calls may go on it."""
        return self.stream.external and self.stream.is_capturing()

    def refuse_capture(self, what: str, *, always: bool = False) -> None:
        """Raise BadRequest where the caller captures the stream: what must run now would be part of his graph.

        `always` is for what no capture may hold: then a run before it is of no use.
        """
        if self._is_preparing or self.captured:
            hint = "run it outside of the capture" if always else "run the request once before the capture"
            expected = f"another for {what}" if always else f"none for the first run of {what}"
            raise BadRequest("stream", "a stream under capture", expected, hint)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Prepare a call in here: on another stream where the caller captures the executor's, and wait for it then.

        What is written in here is there before his graph runs, and is no part of it.
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
