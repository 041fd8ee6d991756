"""Messages between the parent and its child: lists of plain values, one frame each, over a Unix socket.

A frame is its length and the list in `marshal`'s form, which for small tuples of integers costs a third of pickle's
time; both ends are the same interpreter. Requests and errors cross as pickles inside, in which a tensor is a reference
to the shared memory: no array ever crosses. This module knows what is sent, not why.
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
from dispatch.errors import BadRequest, DispatchError, WorkerFailed, words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.request import Request
    from dispatch.supervise.process.mailbox import Mailbox

__all__ = [
    "DEFINE",
    "FORGET",
    "RUN",
    "Connection",
    "Place",
    "error_from",
    "pack_error",
    "pack_request",
    "place_of",
    "ready",
    "request_from",
]

# In the place of a request's number: (DEFINE, name, bytes), (FORGET, names), and (RUN, first, names) of requests that
# are known, with successive numbers.
DEFINE, FORGET, RUN = -1, -2, -3
LENGTH = struct.Struct("<I")
FRAMES = 20  # the last of a traceback that crosses
LARGEST = 1 << 30  # bytes of a request: `marshal` takes no 2 GiB
ONE_READ = (1 << 16,)  # bytes asked of the socket at once; this and the following are for `map`
WAITING, AT_ONCE = (0,), (socket.MSG_DONTWAIT,)


class Place(NamedTuple):
    """Where a tensor lies: chunk, offset and bytes of its block, and the offset of its first element in that."""

    chunk: int
    offset: int
    nbytes: int
    start: int


def ready(ends: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """Those of some connections from which there is something to read, or nothing ever again, within a time."""
    poll = select.poll()  # select.select fails for a descriptor above 1,023, which a server may well have
    for end in ends:
        poll.register(end, select.POLLIN)
    told = {fd for fd, _ in poll.poll(seconds * 1000)}
    return [end for end in ends if end.fileno() in told]


class Outgoing(NamedTuple):
    """A frame on its way out: the counts of its bytes that the socket took, and the last request's number in it."""

    frame: bytes
    taken: list[int]
    last: int


class Connection:
    """One end of a connection; frames go out whole and come in as they are complete.

    Guarantees: who uses one direction holds a lock for it. An exception that comes at any moment, as Ctrl-C does on a
    main thread, loses and doubles no byte: what the socket takes or gives is noted in the same step of the interpreter,
    within which no signal is handled, and whoever comes next goes on where that was.
    """

    def __init__(self, end: socket.socket, mailbox: Mailbox | None = None) -> None:
        self.socket, self.mailbox = end, mailbox
        self.listened = True  # whether the monitor thread hears of what comes
        self._come = bytearray()
        self._end = 0  # of the first frame in it
        self.out = self.flushed = Outgoing(b"", [], 0)  # the latest frame, and the latest that is known to be sent

    def send(self, message: list[Any]) -> int:
        """Send one frame, waiting for room in the socket; returns its bytes. OSError where the other end is gone."""
        body = marshal.dumps(message)
        self.socket.sendall(LENGTH.pack(len(body)) + body)
        return len(body) + LENGTH.size

    def put(self, message: list[Any], last: int) -> None:
        """Make a frame the one to be sent by `flush`, once the one before is sent."""
        body = marshal.dumps(message)
        self.out = Outgoing(LENGTH.pack(len(body)) + body, [], last)

    def flush(self) -> bool:
        """Send what the socket has room for; whether all is sent. OSError where the other end is gone."""
        out = self.out
        frame, taken, _ = out
        while (gone := sum(taken)) < len(frame):
            try:
                taken.extend(map(self.socket.send, (memoryview(frame)[gone:] if gone else frame,), AT_ONCE))
            except BlockingIOError:  # noqa: PERF203
                return False
        self.flushed = out
        return True

    def receive(self, *, wait: bool = True) -> list[Any] | None:
        """The next frame; None if there is none and `wait` is false. EOFError where the other end is gone."""
        message = self.peek(wait=wait)
        if message is not None:
            self.advance()
        return message

    def peek(self, *, wait: bool) -> list[Any] | None:
        """As `receive`, but the frame stays the next one until `advance`."""
        while True:
            if self.pending:
                message: list[Any] = marshal.loads(memoryview(self._come)[LENGTH.size : self._end])
                return message
            had = len(self._come)
            try:
                # `extend` gives None, so `any` goes through all there is: one read, and its bytes kept, in one step.
                any(map(self._come.extend, map(self.socket.recv, ONE_READ, WAITING if wait else AT_ONCE)))
            except BlockingIOError:
                return None
            if len(self._come) == had:
                raise EOFError("the other process is gone")

    @property
    def pending(self) -> bool:
        """Whether a whole frame has been read from the socket already."""
        come = self._come
        if len(come) < LENGTH.size:
            return False
        self._end = LENGTH.size + LENGTH.unpack_from(come)[0]
        return len(come) >= self._end

    def advance(self) -> None:
        """Be done with the frame that `peek` gave."""
        self._come = self._come[self._end :]

    def is_gone(self) -> bool:
        """Whether the other end has closed, or shut down, the connection."""
        poll = select.poll()
        poll.register(self.socket, 0)  # that is told unasked
        return bool(poll.poll(0))

    def close(self) -> None:
        self.socket.close()


# -- what crosses inside ------------------------------------------------------------------------------------------
def place_of(tensor: Tensor) -> Place:
    """Where a tensor of shared memory lies; its storage keeps its block."""
    chunk, offset, nbytes = tensor.storage.keep
    return Place(chunk, offset, nbytes, tensor.ptr - tensor.storage.base)


class _Packer(pickle.Pickler):
    """Writes a tensor as its place and its layout."""

    def __init__(self, target: io.BytesIO, home: Device) -> None:
        super().__init__(target, protocol=pickle.HIGHEST_PROTOCOL)
        self._home = home

    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):
            layout = thing.layout
            if layout.device is not self._home:
                hint = "make its tensors on the supervisor's own device: sup.device.array(x)"
                raise BadRequest("request", f"a tensor on {layout.device!r}", f"tensors on {self._home!r}", hint)
            return (place_of(thing), layout.dtype.name, layout.shape, layout.strides, layout.readonly)
        if isinstance(thing, Device):
            return ()
        return None


def pack_request(request: Request, home: Device) -> bytes:
    """A request as bytes; BadRequest for one that another process cannot rebuild, or that is too long for a message."""
    target = io.BytesIO()
    try:
        _Packer(target, home).dump(request)
    except DispatchError:
        raise
    except Exception as error:
        hint = "its class must be importable by name, and its fields picklable"
        raise BadRequest("request", type(request).__name__, f"one that pickles ({error})", hint) from error
    if target.tell() > LARGEST:
        hint = "put large arrays into tensors: sup.device.array(x)"
        raise BadRequest("request", f"one of {target.tell()} bytes", f"one of {LARGEST} bytes at most", hint)
    return target.getvalue()


class _Unpacker(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, home: Device, tensor: Callable[..., Tensor]) -> None:
        super().__init__(source)
        self._home, self._tensor = home, tensor

    def persistent_load(self, pid: Any) -> Any:
        return self._tensor(*pid) if pid else self._home


def request_from(data: bytes, home: Device, tensor: Callable[..., Tensor]) -> Request:
    """The request of `pack_request`, its tensors made by `tensor(place, dtype, shape, strides, readonly)`."""
    request: Request = _Unpacker(io.BytesIO(data), home, tensor).load()
    return request


def pack_error(error: BaseException) -> bytes:
    """An error as bytes, with its cause; one that does not pickle as WorkerFailed in its words."""
    text = f"{type(error).__name__}: {words(error, str)}"
    try:
        for one in (error, error.__cause__):
            _note_traceback(one)
        data = pickle.dumps((error, error.__cause__))
        _unpickled(data)  # an error whose __init__ takes other arguments than its args fails only here
    except BaseException:  # noqa: BLE001  # whatever the pickling of another library's error raises: this one must be told
        failure: Any = WorkerFailed(text)
        with contextlib.suppress(Exception):  # its notes may be anything, too
            failure.__notes__ = [str(note) for note in error.__notes__]  # type: ignore[attr-defined]
        data = pickle.dumps((failure, None))
    return pickle.dumps((text, data))


def _note_traceback(error: BaseException | None) -> None:
    """Give an error that is none of ours its traceback as a note: tracebacks themselves do not pickle.

    Our own errors say what to do; where in the child they were raised tells their readers nothing.
    """
    if error is None or isinstance(error, (DispatchError, CudaError)) or error.__traceback__ is None:
        return
    lines = "".join(traceback.format_tb(error.__traceback__, -FRAMES)).rstrip()
    note = f"In the child process (most recent call last):\n{lines}"
    notes = getattr(error, "__notes__", ())
    # As `add_note` does, which Python 3.10 lacks; that one keeps the note and does not show it.
    if note not in notes:  # one error may be that of several requests
        told: Any = error
        told.__notes__ = [*notes, note]


def error_from(data: bytes) -> BaseException:
    """The error of `pack_error`; of a class, or with a cause, that cannot be rebuilt here, as WorkerFailed."""
    text, inner = pickle.loads(data)
    try:
        return _unpickled(inner)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # its class may be known in the child only, or do anything
        failure = WorkerFailed(text)
        failure.__cause__ = error
        return failure


def _unpickled(data: bytes) -> BaseException:
    error: BaseException
    error, cause = pickle.loads(data)
    error.__cause__ = cause  # AttributeError or TypeError for what came out as no error
    return error
