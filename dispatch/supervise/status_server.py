"""StatusServer: answers `python -m dispatch top PID` on a Unix socket that leaves no file behind.

Each supervisor opens a StatusServer; `ask` is the client. The socket's name is abstract, so it vanishes with the
process, however that ends. It has no file mode; so the server answers only its own user and root, and `ask` accepts
answers only from the requested process. The server reads the counts when it is asked, and otherwise sleeps in
the kernel; it never disturbs a worker.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import secrets
import socket
import struct
import threading
import weakref
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.logs import log
from dispatch.supervise.queue import BROKEN, OPEN
from dispatch.supervise.stats import read_stats
from dispatch.supervise.waiters import Signal

if TYPE_CHECKING:
    from dispatch.supervise.pool import WorkerPool

__all__ = ["VERSION", "StatusServer", "ask", "socket_names"]

VERSION = 1  # of the answer's format
PREFIX = "dispatch-status"
TIMEOUT = 2.0  # seconds that either end waits for the other
RETRY_SECONDS = 0.1  # seconds before the next try if the system has no descriptor or memory for an answer
LONGEST = 1 << 22  # bytes of an answer; for a thousand workers it takes a hundred kilobytes
CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)  # errors of a listener that was closed
CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid

_numbers = itertools.count(1)
_servers: weakref.WeakSet[StatusServer] = weakref.WeakSet()


class StatusServer:
    """Answers questions about the state of one supervisor; its thread does not keep the pool alive.

    Guarantees: a server that cannot be opened, for lack of a name, a descriptor, a thread or memory, is no error of the
    supervisor. The log says what is missing, and `is_open` whether the server answers.
    """

    def __init__(self, pool: WorkerPool, isolation: str) -> None:
        self._pool = weakref.ref(pool)
        self._facts = {"pid": os.getpid(), "supervisor": next(_numbers), "device": str(pool.device)}
        self._facts |= {"isolation": isolation}
        self._opened = monotonic()
        self._closing = Signal()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        try:
            self._open(f"dispatch {pool.device} status")
        except (OSError, RuntimeError) as error:  # RuntimeError: the system gives no more threads
            self.close()
            log("no status", {**self._facts, "cause": error})

    def _open(self, name: str) -> None:
        listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _servers.add(self)
        _bind(listener, f"\0{PREFIX}-{self._facts['pid']}-{self._facts['supervisor']}")
        listener.listen()
        thread = threading.Thread(target=self._answer, args=(listener,), name=name, daemon=True)
        thread.start()
        self._thread = thread

    @property
    def is_open(self) -> bool:
        """Whether there is a thread that answers."""
        return self._thread is not None and self._thread.is_alive()

    def close(self, wait: bool = False) -> None:
        """Stop answering; a second call does nothing."""
        self._closing.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone would not
            self._listener.close()
        if wait and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def close_after_fork(self) -> None:
        """In a forked child: close the descriptor; the parent continues to answer."""
        if self._listener is not None:
            self._listener.close()

    def _answer(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                client, _ = listener.accept()
                with client:
                    self._send_answer(client)
            except Exception as error:  # noqa: BLE001, PERF203  # any error: the next client may be answered
                if self._closing.is_set() or (isinstance(error, OSError) and error.errno in CLOSED):
                    return
                self._closing.wait(RETRY_SECONDS)

    def _send_answer(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client has closed the connection
            client.settimeout(TIMEOUT)
            if _peer(client)[1] in (0, os.getuid()):
                client.sendall(json.dumps(self.facts()).encode())

    def facts(self) -> dict[str, Any]:
        """The answer, a JSON object."""
        pool = self._pool()
        facts: dict[str, Any] = {"version": VERSION, **self._facts, "time": monotonic(), "opened": self._opened}
        if pool is None:
            return facts | {"state": "gone"}
        state = "open" if pool.state == OPEN else "broken" if pool.state == BROKEN else "closing"
        return facts | {"state": state, **asdict(read_stats(pool))}


def _bind(listener: socket.socket, name: str) -> None:
    """Bind a name, or a longer one if it is taken (abstract names belong to the network namespace, not the process)."""
    try:
        listener.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener.bind(f"{name}-{secrets.token_hex(8)}")  # a random name, which is not in use


def _peer(end: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid, gid


def socket_names(pid: int) -> list[str]:
    """The socket names that a process's servers may have, by age; others may use them, so `ask` checks who answers."""
    pattern = re.compile(rf"@{PREFIX}-{pid}-([1-9][0-9]{{0,17}})(?:-[0-9a-f]{{16}})?", re.ASCII)
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    ages = {
        match[0]: int(match[1]) for words in map(str.split, lines) if words and (match := pattern.fullmatch(words[-1]))
    }
    return sorted(ages, key=lambda name: (ages[name], name))


def ask(pid: int) -> list[dict[str, Any]]:
    """The state of each supervisor of a process; empty if it has none, or belongs to another user.

    PermissionError if only another process answers under its name.
    """
    answers: list[dict[str, Any]] = []
    refused: PermissionError | None = None
    for name in socket_names(pid):
        try:
            facts = _ask(name, pid)
        except PermissionError as error:  # noqa: PERF203  # a handful of names
            refused = error
        else:
            answers += [] if facts is None else [facts]
    if refused is not None and not answers:
        raise refused
    return answers


def _ask(name: str, pid: int) -> dict[str, Any] | None:
    """The answer of one server; None if it has ended, does not answer, or sends an invalid answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(TIMEOUT)
        try:
            client.connect(f"\0{name[1:]}")
            who = _peer(client)[0]
            if who != pid:
                raise PermissionError(f"process {who} answers at the address of process {pid}")
            data, until = bytearray(), monotonic() + TIMEOUT  # for the whole answer, even if it arrives slowly
            while len(data) <= LONGEST and (part := client.recv(1 << 16)):
                data += part
                client.settimeout(max(until - monotonic(), 0))
        except (ConnectionError, TimeoutError, BlockingIOError):  # the server has just ended, or has too many clients
            return None
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and facts.get("version") == VERSION else None


def _after_fork() -> None:
    for server in list(_servers):
        server.close_after_fork()


os.register_at_fork(after_in_child=_after_fork)
