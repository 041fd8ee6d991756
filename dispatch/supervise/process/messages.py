"""Messages between the parent and its child: lists of plain values, one frame each, over a Unix socket.

A frame is its length and the list, serialized by `marshal`, which takes a third of pickle's time for small tuples of
integers; both ends are the same interpreter. Requests and errors are pickled inside, with references to the shared
memory in place of tensors: no array is ever sent. This module defines the format of messages, not their use.
"""

from __future__ import annotations

import contextlib
import io
import marshal
import pickle
import select
import socket
import struct
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.errors import CudaError
from dispatch.device.device import Device
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, DispatchError, WorkerFailed, error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.request import Request
    from dispatch.supervise.process.mailbox import Mailbox

__all__ = [
    "DEFINE",
    "FORGET",
    "RUN",
    "Connection",
    "TensorLocation",
    "add_traceback",
    "location_of",
    "pack_error",
    "pack_request",
    "unpack_error",
    "unpack_request",
    "wait_readable",
]

# A request in a message is (number, name), (number, name, outputs, waits), or the latter followed by a deadline, a
# time of `monotonic`, which is the same clock in all processes of a machine. Other entries: (DEFINE, name, bytes),
# (FORGET, names), and (RUN, first, names) for defined requests with consecutive numbers.
DEFINE, FORGET, RUN = -1, -2, -3
LENGTH = struct.Struct("<I")
MAX_FRAMES = 20  # frames of a traceback that are sent, the innermost ones
FOREIGN = "raised in the child process, with its type lost"
LARGEST = 1 << 30  # bytes of a request; `marshal` is limited to 2 GiB
ONE_READ = (1 << 16,)  # bytes per read of the socket; this and the following are arguments for `map`
BLOCKING, NONBLOCKING = (0,), (socket.MSG_DONTWAIT,)


class TensorLocation(NamedTuple):
    """The location of a tensor: chunk, offset and bytes of its block, and the offset of its first element in it."""

    chunk: int
    offset: int
    nbytes: int
    start: int


def wait_readable(ends: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """The connections that become readable, or are closed, within `seconds`."""
    poll = select.poll()  # select.select fails for descriptors above 1,023, which a server may have
    for end in ends:
        poll.register(end, select.POLLIN)
    readable = {fd for fd, _ in poll.poll(seconds * 1000)}
    return [end for end in ends if end.fileno() in readable]


class Outgoing(NamedTuple):
    """A frame being sent: the numbers of bytes that the socket took so far, and the number of its last request."""

    frame: bytes
    taken: list[int]
    last: int


class Connection:
    """One end of a connection, which sends and receives whole frames.

    Guarantees: the caller holds a lock for the direction that it uses. An exception at any moment, such as Ctrl-C on
    the main thread, neither loses nor repeats a byte: reading or writing the socket and recording the bytes is one
    atomic step of the interpreter, in which no signal is handled, and the next caller goes on from there.
    """

    def __init__(self, end: socket.socket, mailbox: Mailbox | None = None) -> None:
        self.socket, self.mailbox = end, mailbox
        self.listened = True  # whether the monitor thread listens to it
        self._received = bytearray()
        self._frame_end = 0  # the end of the first frame in `_received`
        self.outgoing = self.flushed = Outgoing(b"", [], 0)  # the latest frame, and the latest that is sent completely

    def send(self, message: list[Any]) -> int:
        """Send one frame, waiting for room in the socket; returns its size. OSError if the other end is gone."""
        body = marshal.dumps(message)
        self.socket.sendall(LENGTH.pack(len(body)) + body)
        return len(body) + LENGTH.size

    def put(self, message: list[Any], last: int) -> None:
        """Set the next frame for `flush` to send; the one before must be sent."""
        body = marshal.dumps(message)
        self.outgoing = Outgoing(LENGTH.pack(len(body)) + body, [], last)

    def flush(self) -> bool:
        """Send as much as the socket has room for; returns whether all is sent. OSError if the other end is gone."""
        out = self.outgoing
        frame, taken, _ = out
        while (sent := sum(taken)) < len(frame):
            try:
                taken.extend(map(self.socket.send, (memoryview(frame)[sent:] if sent else frame,), NONBLOCKING))
            except BlockingIOError:  # noqa: PERF203
                return False
        self.flushed = out
        return True

    def receive(self, *, wait: bool = True) -> list[Any] | None:
        """The next message; None if there is none and `wait` is false. EOFError if the other end is gone."""
        message = self.peek(wait=wait)
        if message is not None:
            self.advance()
        return message

    def peek(self, *, wait: bool) -> list[Any] | None:
        """As `receive`, but the message stays the next one until `advance`."""
        while True:
            if self.pending:
                message: list[Any] = marshal.loads(memoryview(self._received)[LENGTH.size : self._frame_end])
                return message
            had = len(self._received)
            try:
                # One atomic step: `any` makes `map` read once and store the bytes (`extend` returns None).
                any(map(self._received.extend, map(self.socket.recv, ONE_READ, BLOCKING if wait else NONBLOCKING)))
            except BlockingIOError:
                return None
            if len(self._received) == had:
                raise EOFError("the other process has ended")

    @property
    def pending(self) -> bool:
        """Whether a whole frame has been read from the socket already."""
        come = self._received
        if len(come) < LENGTH.size:
            return False
        self._frame_end = LENGTH.size + LENGTH.unpack_from(come)[0]
        return len(come) >= self._frame_end

    def advance(self) -> None:
        """Remove the message that `peek` returned."""
        self._received = self._received[self._frame_end :]

    def is_hung_up(self) -> bool:
        """Whether the other end has closed, or shut down, the connection."""
        poll = select.poll()
        poll.register(self.socket, 0)  # a hang-up is always reported
        return bool(poll.poll(0))

    def close(self) -> None:
        self.socket.close()


# -- requests and errors inside messages --------------------------------------------------------------------------
def location_of(tensor: Tensor) -> TensorLocation:
    """The location of a tensor in shared memory."""
    chunk, offset, nbytes = tensor.storage.keep
    return TensorLocation(chunk, offset, nbytes, tensor.ptr - tensor.storage.base)


class _Packer(pickle.Pickler):
    """Pickles a tensor as its location and layout."""

    def __init__(self, target: io.BytesIO, home: Device) -> None:
        super().__init__(target, protocol=pickle.HIGHEST_PROTOCOL)
        self._home = home

    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            layout = thing.layout
            if layout.device is not self._home:
                hint = "create its tensors on the supervisor's own device: sup.device.array(x)"
                raise BadRequest("request", f"a tensor on {layout.device!r}", f"tensors on {self._home!r}", hint)
            return (location_of(thing), layout.dtype.name, layout.shape, layout.strides, layout.readonly)
        if isinstance(thing, Device):
            return ()
        return None


def pack_request(request: Request, home: Device) -> bytes:
    """A request as bytes; BadRequest if another process cannot rebuild it, or it is too long for a message."""
    target = io.BytesIO()
    try:
        _Packer(target, home).dump(request)
    except DispatchError:
        raise
    except Exception as error:
        hint = "its class must be importable by name, and its fields picklable"
        raise BadRequest("request", type(request).__name__, f"a request that can be pickled ({error})", hint) from error
    if target.tell() > LARGEST:
        hint = "put large arrays into tensors: sup.device.array(x)"
        raise BadRequest("request", f"a request of {target.tell()} bytes", f"at most {LARGEST} bytes", hint)
    return target.getvalue()


class _Unpacker(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, home: Device, tensor: Callable[..., Tensor]) -> None:
        super().__init__(source)
        self._home, self._tensor = home, tensor

    def persistent_load(self, pid: Any) -> Any:
        return self._tensor(*pid) if pid else self._home


def unpack_request(data: bytes, home: Device, tensor: Callable[..., Tensor]) -> Request:
    """The request of `pack_request`, its tensors made by `tensor(place, dtype, shape, strides, readonly)`."""
    request: Request = _Unpacker(io.BytesIO(data), home, tensor).load()
    return request


def pack_error(error: BaseException) -> bytes:
    """An error as bytes, with its cause; one that does not pickle becomes a WorkerFailed that says so."""
    text = f"{type(error).__name__}: {error_text(error, str)}"
    try:
        for one in (error, error.__cause__):
            _note_traceback(one)
        data = pickle.dumps((error, error.__cause__))
        _unpickled(data)  # an error whose __init__ takes other arguments than its args fails only here
    except BaseException as refusal:  # noqa: BLE001  # pickling a foreign error may raise anything
        failure: Any = WorkerFailed(f"{text} ({FOREIGN}: it cannot be pickled: {error_text(refusal)})")
        with contextlib.suppress(Exception):  # its notes may be anything
            failure.__notes__ = [str(note) for note in error.__notes__]  # type: ignore[attr-defined]
        data = pickle.dumps((failure, None))
    return pickle.dumps((text, data))


def _note_traceback(error: BaseException | None) -> None:
    """Add the traceback of a foreign error as a note, because tracebacks do not pickle.

    This library's own errors say what to do; their position in the child's code does not help the reader.
    """
    if error is None or isinstance(error, (DispatchError, CudaError)) or error.__traceback__ is None:
        return
    add_traceback(error, "".join(traceback.format_tb(error.__traceback__, -MAX_FRAMES)))


def add_traceback(error: BaseException, lines: str) -> None:
    """Add the traceback of a child's error, as text, as a note."""
    note = f"In the child process (most recent call last):\n{lines.rstrip()}"
    notes = getattr(error, "__notes__", ())
    # What `add_note` does, which Python 3.10 lacks (there the note is kept, but not shown).
    if note not in notes:  # several requests may have the same error
        any_error: Any = error
        any_error.__notes__ = [*notes, note]


def unpack_error(data: bytes) -> BaseException:
    """The error of `pack_error`; a WorkerFailed if its class or its cause cannot be rebuilt here."""
    text, inner = pickle.loads(data)
    try:
        return _unpickled(inner)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # its class may exist only in the child, or raise anything
        failure = WorkerFailed(f"{text} ({FOREIGN}: it cannot be rebuilt in this one: {error_text(error)})")
        failure.__cause__ = error
        return failure


def _unpickled(data: bytes) -> BaseException:
    error: BaseException
    error, cause = pickle.loads(data)
    error.__cause__ = cause  # AttributeError or TypeError if it is not an exception
    return error
