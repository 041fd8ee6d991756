"""Monitor: the loop of a process pool's monitor thread, which listens to the child while it works.

Other threads wake it by an eventfd. It notices when a child is lost; process_pool.py decides what happens then.
"""

from __future__ import annotations

import errno
import os
import select
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.errors import DeadlineExceeded, WorkerFailed
from dispatch.supervise.process import messages
from dispatch.supervise.process.recovery import ChildLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.supervise.process.child_process import Child
    from dispatch.supervise.process.children import Children
    from dispatch.supervise.process.deadlines import Deadlines
    from dispatch.supervise.process.messages import Connection
    from dispatch.supervise.process.remote_queue import RemoteQueue
    from dispatch.supervise.process.repeatable import InFlightRequest

__all__ = ["Monitor"]

IN, OUT = select.EPOLLIN, select.EPOLLOUT
TICK = 0.25  # seconds between checks whether the child was stopped, or an interrupted thread left work


class Monitor:
    """Reads the child's reports, unless a waiting thread does, and detects failures of the child.

    Guarantees: work that an interrupted thread has left to be read, settled or sent is handled at the next tick at the
    latest, even if that thread could not wake this one.
    """

    queues: list[Any]  # RemoteQueues
    children: Children
    hang_seconds: float
    cooling_down: bool
    release_reader: bool
    deadlines: Deadlines
    wake_fd: int
    poll: Any
    current_child: Callable[[], Child]
    is_over: Callable[[], bool]
    recover: Callable[[ChildLoss], None]
    allow_restart: Callable[..., bool]
    fail_sent: Callable[[InFlightRequest, BaseException], None]

    def listen(self, link: Connection, *, on: bool) -> None:
        """Turn the monitor thread's listening to a link on or off; it also listens for room if a frame is unsent.

        If two threads call this at once, the one that turns it off may be the last; then `listened` must end up False:
        a thread that stops reading checks it, and turns listening on again.
        """
        link.listened = on
        try:  # noqa: SIM105  # contextlib.suppress costs more than the rest
            self.poll.modify(link.socket, (IN if on else 0) | (0 if link.outgoing is link.flushed else OUT))
        except (OSError, ValueError):  # its child is being replaced
            pass
        if not on:
            link.listened = False

    def listen_to_child(self) -> None:
        """Wait for events and handle them; returns when the child was replaced, or the pool ends."""
        child = self.current_child()
        by_fd = {link.socket.fileno(): queue for link, queue in zip(child.links, self.queues, strict=True)}
        control = child.control.fileno()
        for fd in (control, *by_fd):
            self.poll.register(fd, select.EPOLLIN)
        while child is self.children.current and not self.cooling_down and not self.is_over():
            loss: ChildLoss | None = None
            heard = False
            events = self.poll.poll(self._poll_timeout())
            for fd, _ in events:
                if fd == self.wake_fd:
                    os.eventfd_read(self.wake_fd)
                elif fd == control:
                    heard = True
                elif fd in by_fd:  # else of an earlier child, whose descriptors a forked process may keep for a moment
                    loss = loss or self._read(by_fd[fd])
            if not events or any(fd == self.wake_fd or event & select.EPOLLOUT for fd, event in events):
                for queue in self.queues:
                    loss = loss or self._serve(queue)
            if loss is not None or heard:
                loss = self.last_message(child) or loss
            self.retry_chunks()
            loss = loss or self._check_deadlines() or self._check_stopped(child)
            if loss is not None:
                self.recover(loss)
            else:
                self.children.restock()

    def retry_chunks(self) -> None:
        """Send chunks to the children whose connections had no room before."""
        self.children.retry_chunks(self.poll, errno.EAGAIN)

    def _poll_timeout(self) -> float:
        """Seconds that the monitor thread may sleep, by the deadlines; submitting does not wake it."""
        seconds = self.deadlines.seconds_left(TICK)
        return max(seconds, 0.001) if seconds > 0 else TICK / 10  # that request was checked, and may only be late

    def _serve(self, queue: RemoteQueue) -> ChildLoss | None:
        """Read a worker's reports and send queued requests, unless other threads do; finish interrupted work."""
        loss = self._read(queue)
        queue.notify_rest()
        queue.wake()
        if queue.link is not None:
            self._listen_unless_read(queue, queue.link)
        return loss

    def _listen_unless_read(self, queue: RemoteQueue, link: Connection) -> None:
        """Listen to a link, unless a waiting thread reads it, which turns listening on again when it stops."""
        self.listen(link, on=not queue.recv_lock.locked())
        # That thread may have stopped, and turned listening on, just before the line above turned it off.
        if not link.listened and not queue.recv_lock.locked():
            self.listen(link, on=True)

    def _read(self, queue: RemoteQueue) -> ChildLoss | None:
        link = queue.link
        if link is None:
            return None
        if not queue.recv_lock.acquire(False):
            self._listen_unless_read(queue, link)
            return None
        try:
            while queue.read_report(link):
                pass
        except (EOFError, OSError):
            return ChildLoss("the child process died")
        finally:
            queue.recv_lock.release()
        return None

    def handle_control(self, child: Child) -> ChildLoss | None:
        message = child.read_control()
        if message is None:
            return ChildLoss("the child process died")
        if message[0] == "lost":
            return ChildLoss(message[1], messages.unpack_error(bytes.fromhex(message[2])), frozenset(message[3]))
        if message[0] == "defect":
            self.allow_restart(WorkerFailed(f"worker {message[1]} failed: {message[2]}"))
        return None

    def _check_stopped(self, child: Child) -> ChildLoss | None:
        """Whether the child has ended or was stopped, which its connections may not show."""
        how = child.exit_state() if any(queue.sent for queue in self.queues) else ""
        if how == "ended":
            return self.last_message(child) or ChildLoss("the child process died")
        return ChildLoss(f"the child process {how}") if how else None

    def _check_deadlines(self) -> ChildLoss | None:
        """Handle requests that are past their deadline: for one that hangs the child is replaced."""
        if self.deadlines.due(monotonic()) is None:
            return None
        self.release_reader = True
        with ExitStack() as stack:  # nothing may be settled during the check
            for queue in self.queues:
                stack.enter_context(queue.recv_lock)
            self.release_reader = False
            return self._find_hanging(monotonic())

    def _find_hanging(self, now: float) -> ChildLoss | None:
        overdue = self.deadlines.due(now)
        if overdue is None:
            return None
        future, queue = overdue
        number = getattr(future, "_number", None)
        if queue.sent and now - max(queue.since, future.deadline) < self.hang_seconds:
            return None  # this request, or the one before it, may still end: check again at the next tick
        self.deadlines.pop()
        passed = f"at its deadline (timeout=), nor hang_seconds={self.hang_seconds:g} s later"
        text = f"it had not completed {passed}, and its process was replaced"
        if number in queue.sent:
            self.fail_sent(queue.sent[number], DeadlineExceeded(text))
        elif not queue.expire(future) or not queue.sent:
            return None
        oldest = frozenset(next(iter(other.sent)) for other in self.queues if other.sent)
        return ChildLoss("a request hung beyond its deadline", hanging=oldest)

    def last_message(self, child: Child) -> ChildLoss | None:
        """The reason that a child sent before it ended, if it did."""
        try:
            while messages.wait_readable([child.control], 0):
                loss = self.handle_control(child)
                if loss is not None:
                    return loss
        except OSError:
            pass
        return None
