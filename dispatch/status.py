"""Status: a supervisor's answer to `python -m dispatch top PID`, on a Unix socket that leaves no file behind.

Supervisors open a Board; `ask` is the other end. The socket's name is abstract: it goes with the process, however that
ends. It has no file mode, so the board answers only to its own user and root, and `ask` believes only the process that
it asked for. A board looks at counts when it is asked, and else sleeps in the kernel; it never touches a worker.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
import threading
import weakref
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.seat import BROKEN, OPEN
from dispatch.stats import count

if TYPE_CHECKING:
    from dispatch.crew import Crew

__all__ = ["VERSION", "Board", "ask", "boards"]

VERSION = 1  # of what is answered
PREFIX = "dispatch-status"
PATIENCE = 2.0  # seconds that either end waits for the other
CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid

_numbers = itertools.count(1)
_boards: weakref.WeakSet[Board] = weakref.WeakSet()


class Board:
    """Answers who asks how one supervisor is doing; the thread does not keep the crew alive."""

    def __init__(self, crew: Crew, isolation: str) -> None:
        self._crew = weakref.ref(crew)
        self._facts = {"pid": os.getpid(), "supervisor": next(_numbers), "device": str(crew.device)}
        self._facts |= {"isolation": isolation}
        self._opened = monotonic()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{PREFIX}-{self._facts['pid']}-{self._facts['supervisor']}")
        self._listener.listen()
        self._thread = threading.Thread(target=self._answer, name=f"dispatch {crew.device} status", daemon=True)
        self._thread.start()
        _boards.add(self)

    def close(self, wait: bool = False) -> None:
        """Answer no more; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # this wakes the thread, which a close alone would not
        self._listener.close()
        if wait and self._thread is not threading.current_thread():
            self._thread.join()

    def forget(self) -> None:
        """In a forked child: the socket is the parent's, who answers."""
        self._listener.close()

    def _answer(self) -> None:
        while True:
            try:
                asker, _ = self._listener.accept()
            except OSError:  # closed
                return
            with asker, contextlib.suppress(OSError):  # one that has gone needs no answer
                asker.settimeout(PATIENCE)
                if _peer(asker)[1] in (0, os.getuid()):
                    asker.sendall(json.dumps(self.facts()).encode())

    def facts(self) -> dict[str, Any]:
        """What is answered: a JSON object."""
        crew = self._crew()
        facts: dict[str, Any] = {"version": VERSION, **self._facts, "time": monotonic(), "opened": self._opened}
        if crew is None:
            return facts | {"state": "gone"}
        state = "open" if crew.ending == OPEN else "broken" if crew.ending == BROKEN else "closing"
        return facts | {"state": state, **asdict(count(crew))}


def _peer(end: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid, gid


def boards(pid: int) -> list[str]:
    """The names of a process's boards, by age."""
    start = f"@{PREFIX}-{pid}-"
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    names = {words[-1] for words in map(str.split, lines) if words and words[-1].startswith(start)}
    return sorted(names, key=lambda name: int(name.removeprefix(start)))


def ask(pid: int) -> list[dict[str, Any]]:
    """What the boards of a process say, one object for each supervisor; empty where it has none, or is another user's.

    PermissionError where somebody else answers in its name.
    """
    return [facts for facts in (_ask(name, pid) for name in boards(pid)) if facts is not None]


def _ask(name: str, pid: int) -> dict[str, Any] | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(PATIENCE)
        try:
            asker.connect(f"\0{name[1:]}")
            who = _peer(asker)[0]
            if who != pid:
                raise PermissionError(f"process {who} answers in the name of process {pid}")
            data = b"".join(iter(lambda: asker.recv(1 << 16), b""))
        except (ConnectionError, TimeoutError):  # it has just gone
            return None
    facts: dict[str, Any] | None = json.loads(data) if data else None
    return facts


def _after_fork() -> None:
    for board in list(_boards):
        board.forget()


os.register_at_fork(after_in_child=_after_fork)
