"""Starting children: their connections, their processes, the chunks that they map, and a reserve of some that stand by.

The crew's warden makes them, and nobody else: the kernel ends a child with the thread that started it. This room
decides nothing about restarts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.errors import WorkerFailed
from dispatch.isolate.wire import Link, ready

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.isolate.chunks import Chunk
    from dispatch.isolate.memory import SharedCuda, SharedHost

__all__ = ["Child", "Reserve"]

START_SECONDS = 60.0  # in which a child must be ready; 0.3 to 0.6 are usual, a loaded machine takes longer
END_SECONDS = 2.0  # in which it must end once its connections are closed
SOCKET_BYTES = 1 << 20  # asked for; the kernel gives what net.core.wmem_max allows


class Child:
    """One child process with a control connection and a link for each worker.

    It imports what it needs and then waits for `go`, before which it holds nothing on the device.
    """

    def __init__(self, device: SharedHost | SharedCuda, streams: int, setup: Sequence[str], completion: str) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pairs = [socket.socketpair() for _ in range(streams)]
        for pair in pairs:
            for end in pair:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self.links = [Link(ours) for ours, _ in pairs]
        given = [theirs, *(other for _, other in pairs)]
        words = {
            "device": device.name,
            "control": theirs.fileno(),
            "links": [end.fileno() for end in given[1:]],
            "setup": list(setup),
            "completion": completion,
            "parent": os.getpid(),
            "started": monotonic(),
        }
        code = f"import sys; sys.path[:] = {sys.path!r}; from dispatch.isolate.child import main; main(sys.argv[1])"
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(words)],
                pass_fds=[end.fileno() for end in given],
                stdin=subprocess.DEVNULL,
            )
        finally:
            for end in given:
                end.close()
        self.going = self.ready = False
        self.took: dict[str, float] = {}  # seconds for each step from its start until it was ready
        self._attached: set[int] = set()
        self.follow(device.chunks)

    def follow(self, chunks: dict[int, Chunk], done: int | None = None) -> None:
        """Have it map the chunks that there are and let go of the others; a child that is gone needs neither.

        `done` is a file descriptor that it holds until it has let go.
        """
        with contextlib.suppress(OSError):
            gone = sorted(self._attached - chunks.keys())
            if gone:
                self._attached.difference_update(gone)
                socket.send_fds(self.control, [json.dumps(["drop", gone]).encode()], [] if done is None else [done])
            for number, chunk in list(chunks.items()):
                if number not in self._attached:
                    self._attached.add(number)
                    socket.send_fds(self.control, [json.dumps([number, chunk.nbytes]).encode()], [chunk.fd])

    def go(self, *, warm: bool = False) -> None:
        """Have it take the device and get ready; `warm`: and run something, so that all is loaded."""
        if not self.going:
            self.going = True
            with contextlib.suppress(OSError):  # whoever waits until it is ready sees that it is gone
                self.control.send(json.dumps(["go", warm]).encode())

    def hear(self) -> list[Any] | None:
        """What it says on the control connection, which must be readable; None where it is gone."""
        try:
            data = self.control.recv(1 << 20)
        except OSError:
            return None
        if not data:
            return None
        message: list[Any] = json.loads(data)
        if message[0] == "ready":
            self.ready, self.took = True, message[1]
        return message

    def wait_until_ready(self) -> None:
        """Wait for its word that it can run requests; WorkerFailed where it ends or stays silent instead."""
        ends = monotonic() + START_SECONDS
        while not self.ready:
            readable = ready([self.control], max(ends - monotonic(), 0))
            said = self.hear() if readable else None
            if said is None:
                self.kill()
                ended, silent = f"ended with status {self.process.returncode}", f"was silent for {START_SECONDS:g} s"
                how = ended if readable else silent
                raise WorkerFailed(f"the child process {how} before it was ready; what it wrote is on stderr")

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP), so that it will not go on by itself."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def kill(self, *, wait: bool = True) -> None:
        """End it at once; until it has ended, what it had launched may still run."""
        self.process.send_signal(signal.SIGKILL)
        if wait:
            self.process.wait()
        self.disconnect()

    def close(self) -> None:
        """Let it end by itself, which it does once its connections are closed, and wait."""
        self.disconnect()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def disconnect(self) -> None:
        """Close this end of its connections, at which it ends."""
        self.control.close()
        for link in self.links:
            link.close()


class Reserve:
    """Children that stand by: `spare` of them ready to run, and one that has done its imports only.

    What a fault costs is mostly the start of a Python process (0.2 s) and of a context (0.3 s): one that waits behind
    its imports holds no GPU memory and saves the first, a ready one, whose context holds some 500 MB, saves both.
    """

    def __init__(self, launch: Callable[[], Child], spare: int) -> None:
        self._launch, self.spare = launch, spare
        self.children: list[Child] = []

    def hurry(self, count: int) -> None:
        """Have so many get ready now."""
        while len(self.children) < count:
            self.children.append(self._launch())
        for child in self.children[:count]:
            child.go()

    def take(self) -> Child:
        """The first that is ready; WorkerFailed where also one that was just started does not get ready."""
        stood_by = len(self.children)
        while True:
            self.hurry(1)
            child = self.children.pop(0)
            try:
                child.wait_until_ready()
            except WorkerFailed:
                if not stood_by:
                    raise
                stood_by -= 1  # it may have been ended while it stood by
            else:
                return child

    def refill(self) -> None:
        """Start those that lack, when there is nothing urgent."""
        while len(self.children) <= self.spare:
            self.children.append(self._launch())
        for child in self.children[: self.spare]:
            child.go(warm=True)

    def end(self) -> None:
        for child in self.children:
            child.kill()
        self.children.clear()
