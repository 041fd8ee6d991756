"""Child: a child process, its connections and the chunks that it maps; and Standby, the spare children.

Only the pool's monitor thread starts children, because the kernel ends a child together with the thread that started
it. This module does not decide about restarts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from array import array
from time import monotonic
from typing import TYPE_CHECKING, Any

from cudabind._fork import guard
from dispatch.errors import WorkerFailed
from dispatch.supervise.process.mailbox import mailbox_file, mailboxes
from dispatch.supervise.process.messages import Connection, add_traceback, wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.supervise.process.chunks import Chunk
    from dispatch.supervise.process.shared_device import SharedCuda, SharedHost

__all__ = ["Child", "Standby", "opening"]

# Held while the child's ends of its connections are open in this process: a process forked meanwhile would keep them
# open, and the end of the child would not be noticed.
opening = threading.Lock()
guard(opening)

START_SECONDS = 60.0  # seconds within which a child must be ready; usually 0.3 to 0.6, longer on a loaded machine
END_SECONDS = 2.0  # seconds within which it must end after its connections are closed
RETRY_SECONDS = 0.05  # seconds between two tries to send a message for which the connection had no room
MAX_DROPS_PER_MESSAGE = 1000  # chunks to unmap in one message, whose size is limited
TICK = 0.25  # seconds between checks whether to continue waiting for a child
SOCKET_BYTES = 1 << 20  # the buffer size requested; the kernel grants at most net.core.wmem_max
# Errors of a connection that may have room later: it is full, too many descriptors are in flight, or memory is short.
FULL = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
OPTIONS = {  # by their names in sys.flags; `isolated` implies -E and -s (and -P); repeating them does no harm
    "isolated": "-I",
    "ignore_environment": "-E",
    "no_user_site": "-s",
    "no_site": "-S",
    "safe_path": "-P",
    "dont_write_bytecode": "-B",
}
REPEATED = {"optimize": "O", "bytes_warning": "b"}


def _pair(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack, kind: socket.SocketKind
) -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection, each closed by one of the stacks."""
    pair = socket.socketpair(socket.AF_UNIX, kind)
    for end, stack in zip(pair, (ours, theirs), strict=True):
        stack.callback(end.close)
        if kind == socket.SOCK_STREAM:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return pair


class Child:
    """One child process, with a control connection and a link for each worker.

    It imports its modules and then waits for `go`; until then it does not use the device.
    """

    def __init__(self, device: SharedHost | SharedCuda, streams: int, setup: Sequence[str], completion: str) -> None:
        with contextlib.ExitStack() as parent_ends, contextlib.ExitStack() as child_ends:
            self.control, control = _pair(parent_ends, child_ends, socket.SOCK_SEQPACKET)
            pairs = [_pair(parent_ends, child_ends, socket.SOCK_STREAM) for _ in range(streams)]
            fd = mailbox_file(streams)
            if fd >= 0:
                child_ends.callback(os.close, fd)
            self.links = [Connection(end, box) for (end, _), box in zip(pairs, mailboxes(fd, streams), strict=True)]
            link_fds = [end.fileno() for _, end in pairs]
            config = {
                "device": device.name,
                "control": control.fileno(),
                "links": link_fds,
                "mailboxes": fd,
                "setup": list(setup),
                "completion": completion,
                "parent": os.getpid(),
                "started": monotonic(),
            }
            main = "from dispatch.supervise.process.child_main import main; main(sys.argv[1])"
            code = f"import sys; sys.path[:] = {sys.path!r}; {main}"
            # It inherits the mask: Ctrl-C before the child ignores it would print a traceback.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self.process = subprocess.Popen(
                    [sys.executable, *interpreter_options(), "-c", code, json.dumps(config)],
                    pass_fds=[control.fileno(), *link_fds, *([fd] if fd >= 0 else [])],
                    stdin=subprocess.DEVNULL,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            parent_ends.pop_all()  # from now on `disconnect` closes them
        self.was_sent_go = self.is_ready = False
        self.was_killed = False  # or stopped, by another process, before it was ready
        self.setup_failure = ("", "")  # which module of `setup` could not be imported, and why; the traceback
        self._go: bytes | None = None  # the "go" message, until its connection had room for it
        self.blocked_errno = 0  # the errno, one of FULL, because of which it does not know all chunks yet
        self.start_seconds: dict[str, float] = {}  # seconds for each step of its start
        self._attached: set[int] = set()
        try:
            self.sync_chunks(device.chunks)
        except BaseException:
            self.kill()
            raise

    def sync_chunks(self, chunks: dict[int, Chunk], done: int | None = None) -> None:
        """Make it map these chunks and unmap all others; does nothing if the child has ended.

        `done` is a file descriptor that it keeps open until it has unmapped them. A child that does not read, because
        it was stopped, must not block the parent: a later call sends what cannot be sent now (`blocked_errno`).
        """
        while self._attached - chunks.keys():
            dropped = sorted(self._attached - chunks.keys())[:MAX_DROPS_PER_MESSAGE]
            if not self._send_control(["drop", dropped], [] if done is None else [done]):
                return
            self._attached.difference_update(dropped)
        for number, chunk in chunks.copy().items():
            if number not in self._attached:
                if not self._send_control([number, chunk.nbytes], [chunk.fd]):
                    return
                self._attached.add(number)
        self.blocked_errno = 0

    def _send_control(self, message: list[Any], fds: list[int]) -> bool:
        """Send a message; returns False if that fails, with its errno in `blocked_errno` if it may succeed later."""
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            self.control.sendmsg([json.dumps(message).encode()], rights, socket.MSG_DONTWAIT)  # send_fds has no flags
        except OSError as error:
            self.blocked_errno = error.errno or 0 if error.errno in FULL else 0
            return False
        return True

    def go(self, *, warm: bool = False) -> None:
        """Make it open the device and get ready; with `warm` it also runs a product, so that libraries are loaded."""
        if not self.was_sent_go:
            self.was_sent_go = True
            self._go = json.dumps(["go", warm]).encode()
            self._send_go()

    def _send_go(self) -> None:
        if self._go is None:
            return
        try:
            self.control.send(self._go, socket.MSG_DONTWAIT)
        except BlockingIOError:  # it has not read the messages about chunks yet
            return
        except OSError:  # the child has ended: `wait_until_ready` will notice
            pass
        self._go = None

    def read_control(self) -> list[Any] | None:
        """Its next message on the control connection, which must be readable; None if it has ended."""
        try:
            try:
                data = self.control.recv(1 << 20)
            except ConnectionResetError:  # it ended without reading all messages; its own messages follow
                data = self.control.recv(1 << 20)
        except OSError:
            return None
        if not data:
            return None
        message: list[Any] = json.loads(data)
        if message[0] == "ready":
            self.is_ready, self.start_seconds = True, message[1]
        elif message[0] == "setup failed":
            self.setup_failure = message[1], message[2]
        return message

    def wait_until_ready(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until it can run requests; WorkerFailed if it ends, does not answer, or `stop()` is true."""
        ends = monotonic() + START_SECONDS
        while not self.is_ready:
            seconds = ends - monotonic()
            self._send_go()
            step = RETRY_SECONDS if self._go is not None else TICK
            readable = wait_readable([self.control], max(min(seconds, step), 0))
            why = ""
            if readable:
                why = "" if self.read_control() is not None else "ended"
            elif seconds <= 0:
                why = f"sent no message for {START_SECONDS:g} s"
            elif stop():
                why = "was no longer needed"
            else:
                why = self.exit_state()
            if why:
                self.close() if why == "ended" else self.kill()  # keep the status of one that ended by itself
                status = self.process.returncode
                self.was_killed = why != "ended" or status < 0
                how = f"ended with status {status}" if why == "ended" else why
                cause, lines = self.setup_failure
                why = f": {cause}" if cause else "; its output is on stderr"
                error = WorkerFailed(f"the child process {how} before it was ready{why}")
                if lines:
                    add_traceback(error, lines)
                raise error

    def exit_state(self) -> str:
        """How it has ended: "ended", "was stopped" (by SIGSTOP), or "" while it runs; its connections may not show it.

        A process that the child forked may keep the child's ends of the connections open after its end.
        """
        try:
            status = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code has reaped it
            return "ended"
        if status is None:
            return ""
        return "ended" if status.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED) else "was stopped"

    def kill(self, *, wait: bool = True) -> None:
        """Kill it; until it has ended, kernels that it launched may still run."""
        self.process.send_signal(signal.SIGKILL)
        if wait:
            self.process.wait()
        self.disconnect()

    def close(self) -> None:
        """Close its connections, which makes it end by itself, and wait for it."""
        self.disconnect()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def disconnect(self) -> None:
        """Close this end of its connections; it then ends by itself."""
        self.control.close()
        for link in self.links:
            link.close()


def interpreter_options() -> list[str]:
    """The options that this interpreter was started with, so that a child finds the same modules and warnings.

    Settings of the environment are not among them, because a child inherits it.
    """
    flags = sys.flags
    options = [option for name, option in OPTIONS.items() if getattr(flags, name, False)]
    options += ["-" + letter * getattr(flags, name) for name, letter in REPEATED.items() if getattr(flags, name)]
    for name, value in sys._xoptions.items():
        options += ["-X", name if value is True else f"{name}={value}"]
    for warning_filter in sys.warnoptions:
        options += ["-W", warning_filter]
    return options


class Standby:
    """Spare children: `spare` of them ready to run, and one more that has only imported its modules.

    The time after a fault is mostly that of starting a Python process (0.2 s) and a context (0.3 s). A child that has
    imported its modules uses no GPU memory and saves the first; a ready one, whose context takes some 500 MB, saves
    both.
    """

    def __init__(self, launch: Callable[[], Child], spare: int, stop: Callable[[], bool] = lambda: False) -> None:
        """`stop()` is true once no child is needed any more."""
        self._launch, self.spare, self._stop = launch, spare, stop
        self.children: list[Child] = []
        self.last_was_killed = False  # whether a signal ended the last child that did not get ready

    def start(self, count: int) -> None:
        """Let `count` children get ready now."""
        while len(self.children) < count:
            self.children.append(self._launch())
        for child in self.children[:count]:
            child.go()

    def take(self) -> Child:
        """Take the first child that gets ready; WorkerFailed if even one that was just started does not.

        OSError if none can be started, for lack of processes, descriptors or memory.
        """
        stood_by = len(self.children)
        while True:
            self.start(1)
            child = self.children.pop(0)
            try:
                child.wait_until_ready(self._stop)
            except WorkerFailed:
                if not stood_by or self._stop():
                    self.last_was_killed = child.was_killed
                    raise
                stood_by -= 1  # a spare child may have been killed before: try the next
            except BaseException:
                child.kill()
                raise
            else:
                return child

    def refill(self) -> None:
        """Start missing spare children, when nothing is urgent."""
        while len(self.children) <= self.spare:
            self.children.append(self._launch())
        for child in self.children[: self.spare]:
            child.go(warm=True)

    def end(self) -> None:
        for child in self.children:
            child.kill()
        self.children.clear()
