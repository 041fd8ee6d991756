"""Control messages of a few hundred bytes between ranks: which ranks are alive, and data for a new communicator.

`ThreadMesh` is for threads of one process, `SocketMesh` for processes. Every rank is connected to every other, so all
ranks notice the end of one at once, and the mesh works without any of them. This module makes no communicator.
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

__all__ = ["Mesh", "SocketMesh", "ThreadMesh", "listen", "receive_message", "rendezvous", "send_message"]

LENGTH = struct.Struct("!I")
LONGEST = 1 << 20  # bytes of the longest message
HELLO_TIMEOUT = 5.0  # seconds within which a connecting rank must identify itself
RETRY = 0.02  # seconds between two attempts to connect to a rank that does not listen yet


class Mesh(ABC):
    """One member's connections to all others; members keep their numbers, from 0, over all generations.

    Attributes:
        me: this member.
        lost: members whose connections have ended; `left` are those that said goodbye before.
        goodbye: what this member says when it leaves; `goodbyes` are those of the members that have left.
        has_failed: whether this member leaves because of an error; to the others it then looks like a lost one.
        failed: the generations that have failed on other members, with the first message about each.
    """

    def __init__(self, me: int) -> None:
        self.me = me
        self.has_failed = False
        self.lost: set[int] = set()
        self.left: set[int] = set()
        self.goodbye: Message = {"kind": "bye"}
        self.goodbyes: dict[int, Message] = {}
        self.changed = threading.Condition()
        self.inbox: list[tuple[int, Message]] = []
        self.failed: dict[int, tuple[int, Message]] = {}
        self.on_lost: Callable[[int], None] | None = None
        self.on_failed: Callable[[int], None] | None = None
        self.on_left: Callable[[int], None] | None = None

    @abstractmethod
    def send(self, peer: int, message: Message) -> None:
        """Send a message; does nothing if the peer has ended."""

    def leave(self, **facts: Any) -> None:
        """Say goodbye to the other members, with facts for them, before `close`; they do not wait for this one."""
        self.goodbye = {**self.goodbye, **facts}
        self._say_goodbye()

    @abstractmethod
    def close(self) -> None:
        """Notify the other members that this one leaves; a second call does nothing."""

    @abstractmethod
    def _say_goodbye(self) -> None:
        """Send `goodbye` to the other members."""

    def take(self, wanted: Callable[[int, Message], bool], until: float, ended: Callable[[], bool]) -> Any:
        """The first message with `wanted(sender, message)`, and its sender; None once `ended()`, or at `until`."""

        def found() -> int | None:
            return next((n for n, entry in enumerate(self.inbox) if wanted(*entry)), None)

        with self.changed:
            self.changed.wait_for(lambda: found() is not None or ended(), max(0.0, until - time.monotonic()))
            index = found()
            return None if index is None else self.inbox.pop(index)

    def on_message(self, peer: int, message: Message) -> None:
        """Handle a message that has arrived."""
        kind = message.get("kind")
        with self.changed:
            if kind == "bye":
                self.left.add(peer)
                self.goodbyes[peer] = message
            elif kind == "failed":
                self.failed.setdefault(message["generation"], (peer, message))
            else:
                self.inbox.append((peer, message))
            self.changed.notify_all()
        if kind == "failed" and self.on_failed is not None:
            self.on_failed(message["generation"])
        if kind == "bye" and self.on_left is not None:
            self.on_left(peer)

    def on_disconnect(self, peer: int) -> None:
        """Handle the end of the connection to a member."""
        with self.changed:
            if peer in self.lost:
                return
            self.lost.add(peer)
            self.changed.notify_all()
        if self.on_lost is not None and peer not in self.left:
            self.on_lost(peer)


class ThreadMesh(Mesh):
    """A mesh of threads; all members share one list of meshes."""

    def __init__(self, me: int, meshes: list[ThreadMesh]) -> None:
        super().__init__(me)
        self.meshes = meshes
        meshes.append(self)

    def send(self, peer: int, message: Message) -> None:
        # Also to a failed member: its thread may call again, and must then find the others' messages.
        self.meshes[peer].on_message(self.me, message)

    def forget_lost(self) -> None:
        """Count all members as alive again, because the functions that failed on their threads have ended."""
        with self.changed:
            self.lost.clear()

    def mark_lost(self) -> None:
        """Tell the others that this member has failed."""
        for other in self.meshes:
            if other is not self:
                other.on_disconnect(self.me)

    def close(self) -> None:
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        for other in self.meshes:
            if other is not self:
                other.on_message(self.me, self.goodbye)


# -- between processes ------------------------------------------------------------------------------------------------
def listen(port: int = 0) -> socket.socket:
    """A listening socket; by default at any free port."""
    return socket.create_server(("", port), backlog=1024)


def send_message(connection: socket.socket, message: Message) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> Message:
    """Read one message; ConnectionError if the connection ends, or if the data is not a message."""
    (size,) = LENGTH.unpack(_receive_exactly(connection, LENGTH.size))
    if size > LONGEST:
        raise ConnectionError(f"a message of {size} bytes")
    message = json.loads(_receive_exactly(connection, size))
    if not isinstance(message, dict):
        raise ConnectionError("a message that is not an object")
    return message


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def connect(address: Address, until: float, what: str) -> socket.socket:
    """Connect, with retries until the address listens; CollectiveTimeout if it does not in time."""
    while True:
        seconds = until - time.monotonic()
        if seconds <= 0:
            raise CollectiveTimeout(f"{what}: nobody listens at {address[0]}:{address[1]}")
        try:
            connection = socket.create_connection(address, timeout=seconds)
        except (ConnectionError, TimeoutError, socket.gaierror, OSError):
            time.sleep(min(RETRY, seconds))
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class SocketMesh(Mesh):
    """A mesh of processes, connected by sockets, all of which one thread reads."""

    def __init__(self, me: int, connections: dict[int, socket.socket]) -> None:
        super().__init__(me)
        self._sockets, self._sending = connections, threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for peer, connection in connections.items():
            connection.settimeout(None)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._read, name="world mesh", daemon=True)
        self._thread.start()

    @classmethod
    def join(cls, me: int, addresses: Mapping[int, Address], own: socket.socket, job: str, until: float) -> SocketMesh:
        """Connect to all members with smaller numbers, and accept connections from those with larger ones."""
        connections: dict[int, socket.socket] = {}
        try:
            for peer in sorted(each for each in addresses if each < me):
                connections[peer] = connect(addresses[peer], until, f"member {me}")
                send_message(connections[peer], {"kind": "hello", "member": me, "job": job})
            while len(connections) < len(addresses) - 1:
                peer, connection = _accept(
                    own, job, until, f"member {me} has {len(connections) + 1} of {len(addresses)}"
                )
                connections[peer] = connection
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        finally:
            own.close()
        return cls(me, connections)

    def send(self, peer: int, message: Message) -> None:
        if peer in self.lost or peer not in self._sockets:
            return
        with self._sending, contextlib.suppress(OSError):  # the reading thread notices that the peer is gone
            send_message(self._sockets[peer], message)

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._end()
                    return
                connection: Any = key.fileobj
                try:
                    self.on_message(key.data, receive_message(connection))
                except (OSError, ValueError):
                    self._selector.unregister(connection)
                    self.on_disconnect(key.data)

    def _end(self) -> None:
        self._selector.close()
        for connection in (*self._sockets.values(), self._woken):
            connection.close()

    def close(self) -> None:
        if self._wake.fileno() == -1:
            return
        self._say_goodbye()
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()

    def _say_goodbye(self) -> None:
        for peer in () if self.has_failed else self._sockets:  # a failed member ends its connections without a goodbye
            self.send(peer, self.goodbye)


def _read_hello(connection: socket.socket, left: float) -> Message:
    """The first message of a new connection; {} if it is not a message, or does not come within HELLO_TIMEOUT."""
    connection.settimeout(min(left, HELLO_TIMEOUT))
    try:
        return receive_message(connection)
    except (OSError, ValueError):
        return {}


def _accept(own: socket.socket, job: str, until: float, what: str) -> tuple[int, socket.socket]:
    """Accept the next member's connection; connections without the job's token are closed."""
    while True:
        seconds = until - time.monotonic()
        if seconds <= 0:
            raise CollectiveTimeout(f"{what}: the other ranks have not connected before the deadline")
        own.settimeout(seconds)
        try:
            connection, _ = own.accept()
        except OSError:
            continue
        hello = _read_hello(connection, seconds)
        if hello.get("job") == job and isinstance(hello.get("member"), int):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return hello["member"], connection
        connection.close()


def rendezvous(
    rank: int, size: int, master: Address, own: Address, job: str, until: float
) -> tuple[dict[int, Address], str]:
    """The addresses of all members and the job's token, which rank 0 collects and sends, at the `master` address."""
    if rank:
        with connect(master, until, f"rank {rank}") as connection:
            connection.settimeout(max(1e-3, until - time.monotonic()))
            send_message(connection, {"kind": "here", "member": rank, "address": own, "size": size})
            try:
                answer = receive_message(connection)
            except OSError as error:
                raise CollectiveTimeout(f"rank {rank}: rank 0 has not answered before the deadline: {error}") from error
        if "error" in answer:
            raise CollectiveError(answer["error"])
        return dict(enumerate(map(tuple, answer["addresses"]))), answer["job"]
    joined: dict[int, tuple[Address, socket.socket | None]] = {0: (own, None)}
    with listen(master[1]) as server:
        while len(joined) < size:
            member, address, connection = _accept_rank(
                server, until, f"{len(joined)} of {size} ranks have connected to rank 0"
            )
            if not 0 < member < size or member in joined:
                send_message(connection, {"error": f"rank {member} has already connected, or is not one of {size}"})
                connection.close()
                continue
            joined[member] = address, connection
    addresses = [joined[member][0] for member in range(size)]
    for _, connection_of in joined.values():
        if connection_of is not None:
            with connection_of, contextlib.suppress(OSError):
                send_message(connection_of, {"addresses": addresses, "job": job})
    return dict(enumerate(addresses)), job


def _accept_rank(server: socket.socket, until: float, what: str) -> tuple[int, Address, socket.socket]:
    while True:
        seconds = until - time.monotonic()
        if seconds <= 0:
            raise CollectiveTimeout(what)
        server.settimeout(seconds)
        try:
            connection, _ = server.accept()
        except OSError:
            continue
        hello = _read_hello(connection, seconds)
        try:
            return int(hello["member"]), (str(hello["address"][0]), int(hello["address"][1])), connection
        except (ValueError, KeyError, TypeError, IndexError):
            connection.close()  # it is from another program
