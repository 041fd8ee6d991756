"""The stream on which a communicator's collectives run beside the caller's products, and the order between the two.

Storages have streams wait for one another where they must, by all that a stream was given up to then: who enqueues in
the right order gets no other waits. What is read on the caller's stream is ordered here, at the moment at which only
what it needs has been enqueued beside. On the host both are one stream, and nothing overlaps.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from dispatch.core.communicator import communicator_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, BadType

if TYPE_CHECKING:
    from dispatch.core.communicator import Communicator, Ranks
    from dispatch.device.stream import Stream

__all__ = ["Beside", "check_operand", "matrix"]

_streams: weakref.WeakKeyDictionary[Communicator, Stream] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Beside:
    """A communicator, the caller's stream, and the one beside it that its collectives run on.

    Attributes:
        comm: the communicator that a world has now.
        here: the stream that is current as this is made, and whether a graph is `captured` there.
        stream: the communicator's own, `with beside.stream:` for its collectives. Of high priority, for a product has
            blocks enough for the whole GPU, and a collective begins as some of these end.
    """

    def __init__(self, comm: Ranks) -> None:
        self.comm = communicator_of(comm)
        self.comm.check()
        self.device = self.comm.device
        self.here: Stream = self.device.executor().stream
        self.captured = bool(self.here.capture())
        with _lock:
            found = _streams.get(self.comm)
            if found is None or found.closed:
                found = _streams[self.comm] = self.device.stream(high_priority=True)
        self.stream = found
        if self.captured:
            found.wait_for(self.here)  # what runs beside goes into the same graph

    def read_here(self, *tensors: Tensor) -> None:
        """Have the caller's stream wait for what wrote tensors: for all that was enqueued beside up to now."""
        if not self.device.is_host:
            for tensor in tensors:
                tensor.storage.use(self.here, write=False)

    def join(self) -> None:
        """Have the caller's stream wait for all that was enqueued beside."""
        self.here.wait_for(self.stream)

    def refuse_capture(self, name: str) -> None:
        """BadRequest while the caller's stream is captured: for what measures, or waits."""
        if self.captured:
            raise BadRequest(name, "None", "a number, for this stream is being captured and nothing can be measured")


def check_operand(name: str, given: Any, beside: Beside, axes: int | None = None) -> Tensor:
    """A tensor of ours on the communicator's device; BadType or BadRequest for anything else."""
    if not isinstance(given, Tensor):
        raise BadType(
            name, f"a {type(given).__name__}", "a tensor of dispatch", "dispatch.from_dlpack(x) takes it as it is"
        )
    beside.device.check(given)
    if given.device is not beside.device:
        raise BadRequest(name, f"a tensor on {given.device!r}", f"one on {beside.device!r}, as its communicator is")
    if axes is not None and given.ndim != axes:
        raise BadRequest(name, str(given.layout), f"{axes} axes")
    return given


def matrix(a: Any, b: Any, beside: Beside) -> tuple[Tensor, Tensor]:
    """The operands of a product of two matrices."""
    one, other = check_operand("a", a, beside, 2), check_operand("b", b, beside, 2)
    if one.shape[1] != other.shape[0]:
        raise BadRequest("b", str(other.layout), f"{one.shape[1]} rows, as a has columns")
    return one, other
