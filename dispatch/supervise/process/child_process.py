"""Starting children: their connections, their processes, the chunks that they map, and a reserve of some that stand by.

The pool's monitor thread makes them, and nobody else: the kernel ends a child with the thread that started it. This
module decides nothing about restarts.
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
from dispatch.supervise.process.messages import Connection, ready

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.supervise.process.chunks import Chunk
    from dispatch.supervise.process.shared_device import SharedCuda, SharedHost

__all__ = ["Child", "Standby", "opening"]

# Held while a child's ends of its connections are open here: a process forked then would hold them for ever, and the
# end of the child would go unseen.
opening = threading.Lock()
guard(opening)

START_SECONDS = 60.0  # in which a child must be ready; 0.3 to 0.6 are usual, a loaded machine takes longer
END_SECONDS = 2.0  # in which it must end once its connections are closed
LOOK_SECONDS = 0.05  # between two tries to tell a child what its connection has no room for
TOLD_AT_ONCE = 1000  # chunks to let go of, in one message: what a message may hold is bounded
TICK = 0.25  # seconds between looks at whether it is still to be waited for
SOCKET_BYTES = 1 << 20  # asked for; the kernel gives what net.core.wmem_max allows
# What a connection says that may have room later: it is full, too many descriptors are under way, or memory is short.
FULL = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
OPTIONS = {  # by their names in sys.flags; `isolated` says -E and -s (and -P) by itself, which does no harm
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
    """Two ends of a connection, which are closed with what is given."""
    pair = socket.socketpair(socket.AF_UNIX, kind)
    for end, stack in zip(pair, (ours, theirs), strict=True):
        stack.callback(end.close)
        if kind == socket.SOCK_STREAM:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return pair


class Child:
    """One child process with a control connection and a link for each worker.

    It imports what it needs and then waits for `go`, before which it holds nothing on the device.
    """

    def __init__(self, device: SharedHost | SharedCuda, streams: int, setup: Sequence[str], completion: str) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self.control, control = _pair(ours, theirs, socket.SOCK_SEQPACKET)
            pairs = [_pair(ours, theirs, socket.SOCK_STREAM) for _ in range(streams)]
            fd = mailbox_file(streams)
            if fd >= 0:
                theirs.callback(os.close, fd)
            self.links = [Connection(end, box) for (end, _), box in zip(pairs, mailboxes(fd, streams), strict=True)]
            given = [end.fileno() for _, end in pairs]
            words = {
                "device": device.name,
                "control": control.fileno(),
                "links": given,
                "mailboxes": fd,
                "setup": list(setup),
                "completion": completion,
                "parent": os.getpid(),
                "started": monotonic(),
            }
            main = "from dispatch.supervise.process.child_main import main; main(sys.argv[1])"
            code = f"import sys; sys.path[:] = {sys.path!r}; {main}"
            self.process = subprocess.Popen(
                [sys.executable, *interpreter_options(), "-c", code, json.dumps(words)],
                pass_fds=[control.fileno(), *given, *([fd] if fd >= 0 else [])],
                stdin=subprocess.DEVNULL,
            )
            ours.pop_all()  # from now on `disconnect` closes them
        self.going = self.ready = False
        self.was_killed = False  # or stopped, by others, before it was ready
        self._go: bytes | None = None  # the word to get ready, until its connection has had room for it
        self.behind = 0  # why it has not been told of all chunks yet: an errno, of those that are no end
        self.took: dict[str, float] = {}  # seconds for each step from its start until it was ready
        self._attached: set[int] = set()
        try:
            self.follow(device.chunks)
        except BaseException:
            self.kill()
            raise

    def follow(self, chunks: dict[int, Chunk], done: int | None = None) -> None:
        """Have it map the chunks that there are and let go of the others; a child that is gone needs neither.

        `done` is a file descriptor that it holds until it has let go. A child that does not read, for somebody has
        stopped it, must stop nobody else: what it cannot be told now it is told by a later call (`behind`).
        """
        while self._attached - chunks.keys():
            gone = sorted(self._attached - chunks.keys())[:TOLD_AT_ONCE]
            if not self._tell(["drop", gone], [] if done is None else [done]):
                return
            self._attached.difference_update(gone)
        for number, chunk in chunks.copy().items():
            if number not in self._attached:
                if not self._tell([number, chunk.nbytes], [chunk.fd]):
                    return
                self._attached.add(number)
        self.behind = 0

    def _tell(self, message: list[Any], fds: list[int]) -> bool:
        """Send a message now; False where that cannot be, and `behind` says why, if it may be later."""
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            self.control.sendmsg([json.dumps(message).encode()], rights, socket.MSG_DONTWAIT)  # send_fds has no flags
        except OSError as error:
            self.behind = error.errno or 0 if error.errno in FULL else 0
            return False
        return True

    def go(self, *, warm: bool = False) -> None:
        """Have it take the device and get ready; `warm`: and run something, so that all is loaded."""
        if not self.going:
            self.going = True
            self._go = json.dumps(["go", warm]).encode()
            self._send_go()

    def _send_go(self) -> None:
        if self._go is None:
            return
        try:
            self.control.send(self._go, socket.MSG_DONTWAIT)
        except BlockingIOError:  # it has not yet read of the chunks that there are
            return
        except OSError:  # whoever waits until it is ready sees that it is gone
            pass
        self._go = None

    def hear(self) -> list[Any] | None:
        """What it says on the control connection, which must be readable; None where it is gone."""
        try:
            try:
                data = self.control.recv(1 << 20)
            except ConnectionResetError:  # it ended without reading all that it was told; what it said comes after this
                data = self.control.recv(1 << 20)
        except OSError:
            return None
        if not data:
            return None
        message: list[Any] = json.loads(data)
        if message[0] == "ready":
            self.ready, self.took = True, message[1]
        return message

    def wait_until_ready(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for its word that it can run requests; WorkerFailed where it ends, stays silent, or `stop` says so."""
        ends = monotonic() + START_SECONDS
        while not self.ready:
            left = ends - monotonic()
            self._send_go()
            step = LOOK_SECONDS if self._go is not None else TICK
            readable = ready([self.control], max(min(left, step), 0))
            why = ""
            if readable:
                why = "" if self.hear() is not None else "ended"
            elif left <= 0:
                why = f"was silent for {START_SECONDS:g} s"
            elif stop():
                why = "was not needed any more"
            else:
                why = self.fate()
            if why:
                self.close() if why == "ended" else self.kill()  # one that ends by itself has a status of its own
                status = self.process.returncode
                self.was_killed = why != "ended" or status < 0
                how = f"ended with status {status}" if why == "ended" else why
                raise WorkerFailed(f"the child process {how} before it was ready; what it wrote is on stderr")

    def fate(self) -> str:
        """What its connections may never tell: it "was stopped" (SIGSTOP) and will not go on by itself, or "ended".

        A process that it forked holds its ends of them, too, and keeps them open beyond its end.
        """
        try:
            told = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else has waited for it
            return "ended"
        if told is None:
            return ""
        return "ended" if told.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED) else "was stopped"

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


def interpreter_options() -> list[str]:
    """The options that this interpreter was started with, for another that shall find the same modules and warnings.

    What is said by the environment need not be said again: a child inherits that, and heeds it where this one does.
    """
    flags = sys.flags
    options = [option for name, option in OPTIONS.items() if getattr(flags, name, False)]
    options += ["-" + letter * getattr(flags, name) for name, letter in REPEATED.items() if getattr(flags, name)]
    for name, value in sys._xoptions.items():
        options += ["-X", name if value is True else f"{name}={value}"]
    for given in sys.warnoptions:
        options += ["-W", given]
    return options


class Standby:
    """Children that stand by: `spare` of them ready to run, and one that has done its imports only.

    What a fault costs is mostly the start of a Python process (0.2 s) and of a context (0.3 s): one that waits behind
    its imports holds no GPU memory and saves the first, a ready one, whose context holds some 500 MB, saves both.
    """

    def __init__(self, launch: Callable[[], Child], spare: int, stop: Callable[[], bool] = lambda: False) -> None:
        """`stop` says that no child is waited for any more."""
        self._launch, self.spare, self._stop = launch, spare, stop
        self.children: list[Child] = []
        self.last_was_killed = False  # whether a signal ended the last one that did not get ready

    def start(self, count: int) -> None:
        """Have so many get ready now."""
        while len(self.children) < count:
            self.children.append(self._launch())
        for child in self.children[:count]:
            child.go()

    def take(self) -> Child:
        """The first that is ready; WorkerFailed where also one that was just started does not get ready.

        OSError where none can be started: there are no more processes, descriptors or memory.
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
                stood_by -= 1  # it may have been ended while it stood by
            except BaseException:
                child.kill()
                raise
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
