"""Starting a child: its connections, its process, and the chunks that it maps.

The crew's warden makes a Child, and nobody else: the kernel ends a child with the thread that started it. This room
decides nothing about restarts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.errors import WorkerFailed
from dispatch.isolate.wire import Link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.isolate.memory import Chunk, SharedCuda, SharedHost

__all__ = ["Child"]

START_SECONDS = 60.0  # in which a child must be ready; 0.3 to 0.6 are usual, a loaded machine takes longer
END_SECONDS = 2.0  # in which it must end once its connections are closed
SOCKET_BYTES = 1 << 20  # asked for; the kernel gives what net.core.wmem_max allows


class Child:
    """One child process with a control connection and a link for each worker."""

    def __init__(
        self,
        device: SharedHost | SharedCuda,
        streams: int,
        setup: Sequence[str],
        *,
        warm: bool = False,
    ) -> None:
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
            "parent": os.getpid(),
            "warm": warm,
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
        self.ready = False
        self.why = ""  # what it said before it ended
        for number, chunk in list(device.chunks.items()):
            self.attach(number, chunk)

    def attach(self, number: int, chunk: Chunk) -> None:
        """Have it map a chunk; a child that is gone needs none."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.control, [json.dumps([number, chunk.nbytes]).encode()], [chunk.fd])

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
            self.ready = True
        return message

    def wait_until_ready(self) -> None:
        """Wait for its word that it can run requests; WorkerFailed where it ends or stays silent instead."""
        ends = monotonic() + START_SECONDS
        while not self.ready:
            readable, _, _ = select.select([self.control], [], [], max(ends - monotonic(), 0))
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

    def kill(self) -> None:
        """End it at once."""
        self.process.send_signal(signal.SIGKILL)
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
