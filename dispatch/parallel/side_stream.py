"""The stream on which a communicator's collectives run concurrently with the caller's products, and their order.

Storages make streams wait for one another where needed. Each such wait covers all work that is enqueued on the other
stream so far, so the order of enqueueing decides whether there are unnecessary waits. `wait_for_reads` makes the
caller's stream wait before it reads, at a moment when only the needed work is enqueued on the side stream. On the host
both are one stream, and nothing overlaps.
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

__all__ = ["SideStream", "check_matrices", "check_operand"]

_streams: weakref.WeakKeyDictionary[Communicator, Stream] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class SideStream:
    """A communicator, the caller's stream (`main`), and the side stream on which its collectives run (`stream`).

    Attributes:
        comm: the present communicator of a world.
        main: the stream that is current at construction; `is_captured` says whether a graph is being captured there.
        stream: the communicator's own stream, used as `with side.stream:` around its collectives. It has a high
            priority, because a product has enough blocks for the whole GPU: a collective begins when some of them end.
    """

    def __init__(self, comm: Ranks) -> None:
        self.comm = communicator_of(comm)
        self.comm.check()
        self.device = self.comm.device
        self.main: Stream = self.device.executor().stream
        self.is_captured = bool(self.main.capture())
        with _lock:
            stream = _streams.get(self.comm)
            if stream is None or stream.closed:
                stream = _streams[self.comm] = self.device.stream(high_priority=True)
        self.stream = stream
        if self.is_captured:
            stream.wait_for(self.main)  # includes the work on the side stream in the same graph

    def wait_for_reads(self, *tensors: Tensor) -> None:
        """Make the main stream wait before it reads tensors: for all work enqueued on the side stream so far."""
        if not self.device.is_host:
            for tensor in tensors:
                tensor.storage.use(self.main, write=False)

    def join(self) -> None:
        """Make the main stream wait for all work enqueued on the side stream."""
        self.main.wait_for(self.stream)

    def refuse_capture(self, name: str) -> None:
        """BadRequest while the main stream is captured; functions that measure or wait call it."""
        if self.is_captured:
            raise BadRequest(
                name, "None", "a number, because nothing can be measured while this stream is under capture"
            )


def check_operand(name: str, given: Any, side: SideStream, axes: int | None = None) -> Tensor:
    """The operand as a tensor of this library on the communicator's device; BadType or BadRequest for anything else."""
    if not isinstance(given, Tensor):
        raise BadType(
            name,
            f"a {type(given).__name__}",
            "a tensor of dispatch",
            "dispatch.from_dlpack(x) makes one without a copy",
        )
    side.device.check(given)
    if given.device is not side.device:
        raise BadRequest(name, f"a tensor on {given.device!r}", f"one on {side.device!r}, as its communicator is")
    if axes is not None and given.ndim != axes:
        raise BadRequest(name, str(given.layout), f"{axes} axes")
    return given


def check_matrices(a: Any, b: Any, side: SideStream) -> tuple[Tensor, Tensor]:
    """The operands of a product of two matrices."""
    one, other = check_operand("a", a, side, 2), check_operand("b", b, side, 2)
    if one.shape[1] != other.shape[0]:
        raise BadRequest("b", str(other.layout), f"{one.shape[1]} rows, the number of columns of a")
    return one, other
