"""Words between ranks beside the data: who is there, and what a new communicator needs. A few hundred bytes each.

`ThreadMesh` is for threads of a process, `SocketMesh` for processes: each is connected to each, so that the end of one
is known to all at once, and no rank is one that the others cannot do without. Nothing here makes a communicator.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from dispatch.errors import CollectiveError, CollectiveTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Message = dict[str, Any]
    Address = tuple[str, int]

__all__ = ["Mesh", "SocketMesh", "ThreadMesh", "listen", "meet", "receive_one", "send_one"]

HEAD = struct.Struct("!I")
LONGEST = 1 << 20  # bytes of a message
PATIENCE = 5.0  # seconds that who connects has to say who it is
RETRY = 0.02  # seconds between two attempts to reach who does not listen yet


class Mesh(ABC):
    """One member's ends of the lines to all others; members are numbered for good, from 0.

    Attributes:
        me: this member.
        lost: members that have ended without saying so, and `left` those that said so.
        has_failed: whether this one goes by an error, which to the others is as if its process had ended.
        failed: the generations that others have given up, and what the first of them said.
    """

    def __init__(self, me: int) -> None:
        self.me = me
        self.has_failed = False
        self.lost: set[int] = set()
        self.left: set[int] = set()
        self.changed = threading.Condition()
        self.inbox: list[tuple[int, Message]] = []
        self.failed: dict[int, tuple[int, Message]] = {}
        self.on_lost: Callable[[int], None] | None = None
        self.on_failed: Callable[[int], None] | None = None

    @abstractmethod
    def send(self, peer: int, message: Message) -> None:
        """Send a message, or do nothing where the other has gone."""

    @abstractmethod
    def close(self) -> None:
        """Tell the others that this member goes; a second call does nothing."""

    def take(self, wanted: Callable[[int, Message], bool], until: float, ended: Callable[[], bool]) -> Any:
        """The first message that is wanted, with its sender; None once `ended` or the time is over."""

        def found() -> int | None:
            return next((n for n, entry in enumerate(self.inbox) if wanted(*entry)), None)

        with self.changed:
            self.changed.wait_for(lambda: found() is not None or ended(), max(0.0, until - time.monotonic()))
            place = found()
            return None if place is None else self.inbox.pop(place)

    def received(self, peer: int, message: Message) -> None:
        """Note a message that has come."""
        kind = message.get("kind")
        with self.changed:
            if kind == "bye":
                self.left.add(peer)
            elif kind == "failed":
                self.failed.setdefault(message["generation"], (peer, message))
            else:
                self.inbox.append((peer, message))
            self.changed.notify_all()
        if kind == "failed" and self.on_failed is not None:
            self.on_failed(message["generation"])

    def gone(self, peer: int) -> None:
        """Note that a member's line has ended."""
        with self.changed:
            if peer in self.lost:
                return
            self.lost.add(peer)
            self.changed.notify_all()
        if self.on_lost is not None and peer not in self.left:
            self.on_lost(peer)


class ThreadMesh(Mesh):
    """Lines between threads; all members share one list of meshes."""

    def __init__(self, me: int, all_of_them: list[ThreadMesh]) -> None:
        super().__init__(me)
        self.all_of_them = all_of_them
        all_of_them.append(self)

    def send(self, peer: int, message: Message) -> None:
        # Also to one that has failed: its thread may call again, and is to find what the others have told it.
        self.all_of_them[peer].received(self.me, message)

    def find(self) -> None:
        """Take the others for members that live again: what has failed on their threads has ended."""
        with self.changed:
            self.lost.clear()

    def lose(self) -> None:
        """Tell the others that this member has failed."""
        for other in self.all_of_them:
            if other is not self:
                other.gone(self.me)

    def close(self) -> None:
        for other in self.all_of_them:
            if other is not self:
                other.received(self.me, {"kind": "bye"})


# -- between processes ------------------------------------------------------------------------------------------------
def listen(port: int = 0) -> socket.socket:
    """A socket that others can connect to; any free port where none is said."""
    return socket.create_server(("", port), backlog=1024)


def send_one(line: socket.socket, message: Message) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    line.sendall(HEAD.pack(len(data)) + data)


def receive_one(line: socket.socket) -> Message:
    """Read one message; ConnectionError where the line ends, or carries what is none."""
    (size,) = HEAD.unpack(_exactly(line, HEAD.size))
    if size > LONGEST:
        raise ConnectionError(f"a message of {size} bytes")
    found = json.loads(_exactly(line, size))
    if not isinstance(found, dict):
        raise ConnectionError("a message that is no object")
    return found


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionError("the line has ended")
        data += part
    return data


def reach(address: Address, until: float, what: str) -> socket.socket:
    """A connection, tried until somebody listens; CollectiveTimeout where nobody does in time."""
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise CollectiveTimeout(f"{what}: nobody listens at {address[0]}:{address[1]}")
        try:
            line = socket.create_connection(address, timeout=left)
        except (ConnectionError, TimeoutError, socket.gaierror, OSError):
            time.sleep(min(RETRY, left))
            continue
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line


class SocketMesh(Mesh):
    """Lines between processes; one thread reads them all."""

    def __init__(self, me: int, lines: dict[int, socket.socket]) -> None:
        super().__init__(me)
        self._lines, self._sending = lines, threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for peer, line in lines.items():
            line.settimeout(None)
            self._selector.register(line, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._read, name="world mesh", daemon=True)
        self._thread.start()

    @classmethod
    def join(cls, me: int, addresses: Mapping[int, Address], own: socket.socket, job: str, until: float) -> SocketMesh:
        """Connect to all members before this one, and be connected to by those behind it."""
        lines: dict[int, socket.socket] = {}
        try:
            for peer in sorted(each for each in addresses if each < me):
                lines[peer] = reach(addresses[peer], until, f"member {me}")
                send_one(lines[peer], {"kind": "hello", "member": me, "job": job})
            while len(lines) < len(addresses) - 1:
                peer, line = _accept(own, job, until, f"member {me} has {len(lines) + 1} of {len(addresses)}")
                lines[peer] = line
        except BaseException:
            for line in lines.values():
                line.close()
            raise
        finally:
            own.close()
        return cls(me, lines)

    def send(self, peer: int, message: Message) -> None:
        if peer in self.lost or peer not in self._lines:
            return
        with self._sending, contextlib.suppress(OSError):  # the reader tells that it has gone
            send_one(self._lines[peer], message)

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._end()
                    return
                line: Any = key.fileobj
                try:
                    self.received(key.data, receive_one(line))
                except (OSError, ValueError):
                    self._selector.unregister(line)
                    self.gone(key.data)

    def _end(self) -> None:
        self._selector.close()
        for line in (*self._lines.values(), self._woken):
            line.close()

    def close(self) -> None:
        if self._wake.fileno() == -1:
            return
        for peer in () if self.has_failed else self._lines:  # of one that has failed the line ends without a word
            self.send(peer, {"kind": "bye"})
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()


def _first_words(line: socket.socket, left: float) -> Message:
    """What somebody who has connected says first, {} where that is no message; nobody is listened to for long."""
    line.settimeout(min(left, PATIENCE))
    try:
        return receive_one(line)
    except (OSError, ValueError):
        return {}


def _accept(own: socket.socket, job: str, until: float, what: str) -> tuple[int, socket.socket]:
    """The next member that connects; whoever does not know the job's word is sent away."""
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise CollectiveTimeout(f"{what}: the others have not come in time")
        own.settimeout(left)
        try:
            line, _ = own.accept()
        except OSError:
            continue
        hello = _first_words(line, left)
        if hello.get("job") == job and isinstance(hello.get("member"), int):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return hello["member"], line
        line.close()


def meet(rank: int, size: int, master: Address, own: Address, job: str, until: float) -> tuple[dict[int, Address], str]:
    """Where all members listen, and the job's word, which rank 0 collects and tells at an address that all know."""
    if rank:
        with reach(master, until, f"rank {rank}") as line:
            line.settimeout(max(1e-3, until - time.monotonic()))
            send_one(line, {"kind": "here", "member": rank, "address": own, "size": size})
            try:
                told = receive_one(line)
            except OSError as error:
                raise CollectiveTimeout(f"rank {rank}: rank 0 has not answered in time: {error}") from error
        if "error" in told:
            raise CollectiveError(told["error"])
        return dict(enumerate(map(tuple, told["addresses"]))), told["job"]
    found: dict[int, tuple[Address, socket.socket | None]] = {0: (own, None)}
    with listen(master[1]) as server:
        while len(found) < size:
            member, address, line = _here(server, until, f"rank 0 has heard of {len(found)} of {size} ranks")
            if not 0 < member < size or member in found:
                send_one(line, {"error": f"rank {member} is there already, or none of {size}"})
                line.close()
                continue
            found[member] = address, line
    addresses = [found[member][0] for member in range(size)]
    for _, line_of in found.values():
        if line_of is not None:
            with line_of, contextlib.suppress(OSError):
                send_one(line_of, {"addresses": addresses, "job": job})
    return dict(enumerate(addresses)), job


def _here(server: socket.socket, until: float, what: str) -> tuple[int, Address, socket.socket]:
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise CollectiveTimeout(what)
        server.settimeout(left)
        try:
            line, _ = server.accept()
        except OSError:
            continue
        told = _first_words(line, left)
        try:
            return int(told["member"]), (str(told["address"][0]), int(told["address"][1])), line
        except (ValueError, KeyError, TypeError, IndexError):
            line.close()  # of whoever else calls here
