"""ProcessPool: the policy for workers that run in a child process, and the monitor thread that implements it.

supervisor.py uses it in place of a WorkerPool of threads. The monitor thread starts children, reads their reports, and
replaces a child that is lost; recovery.py decides what happens to the requests that were in flight.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
from _thread import allocate_lock
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.errors import DispatchError, WorkerFailed, error_text
from dispatch.logs import log
from dispatch.supervise.pool import WorkerPool
from dispatch.supervise.process.children import Children
from dispatch.supervise.process.deadlines import Deadlines
from dispatch.supervise.process.monitor import Monitor
from dispatch.supervise.process.recovery import ChildLoss, fail_in_flight, recover
from dispatch.supervise.process.remote_queue import RemoteQueue
from dispatch.supervise.process.repeatable import InFlightRequest, written_tensors
from dispatch.supervise.queue import BROKEN, CANCELLING, OPEN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.supervise.future import TimedFuture
    from dispatch.supervise.limits import RestartLimit
    from dispatch.supervise.process.child_process import Child
    from dispatch.supervise.process.shared_device import SharedCuda, SharedHost

__all__ = ["ProcessPool"]

LONGEST_POLL = 86400.0  # seconds; poll takes milliseconds in 32 bits, so at most 24 days


class ProcessPool(Monitor, WorkerPool):
    """The workers of one supervisor, in a child.

    Guarantees: only the monitor thread starts and ends children. A request is settled by its report, by its deadline,
    or by a recovery, whichever removes it from its queue's `sent`. A child that cannot be started counts as a restart,
    and is tried again after a while, up to the limit.
    """

    device: Any  # a SharedHost or SharedCuda
    queues: list[Any]  # RemoteQueues

    def __init__(
        self,
        device: SharedHost | SharedCuda,
        streams: int,
        queue_size: int,
        limit: RestartLimit,
        setup: Sequence[str] = (),
        spare: int = 0,
        hang_seconds: float = 1.0,
        completion: str = "poll",
    ) -> None:
        self.hang_seconds = hang_seconds
        self.numbers, self.names = itertools.count(1), itertools.count(1)
        self.generation = 0
        self.children = Children(device, streams, setup, completion, spare, lambda: self.state >= CANCELLING)
        self._observers: list[Callable[[int], object]] = []
        self.deadlines = Deadlines()
        self.release_reader = False  # asks a thread that reads in the monitor thread's place to stop
        self._first_child_gate = allocate_lock()
        self._first_child_gate.acquire()
        self.wake_fd = -1
        self.poll: Any = None
        super().__init__(device, streams, queue_size, limit, completion)
        self.queue_of = {queue: queue for queue in self.queues}
        self._monitor = threading.Thread(
            target=self._monitor_main, name=f"dispatch {device} monitor thread", daemon=True
        )

    def make_queues(self, streams: int, queue_size: int) -> list[Any]:
        return [RemoteQueue(index, queue_size, self) for index in range(streams)]

    def _start_threads(self) -> None:
        self._monitor.start()
        self._first_child_gate.acquire()  # released by the monitor thread once the first child has started or failed
        if self._start_error is not None:
            raise self._start_error

    # -- called by any thread -------------------------------------------------------------------------------------
    def wake_monitor(self) -> None:
        """Wake the monitor thread."""
        with suppress(OSError, ValueError, OverflowError):  # it has ended
            os.eventfd_write(self.wake_fd, 1)

    def end(self, state: int, refusal: DispatchError) -> None:
        super().end(state, refusal)
        self.wake_monitor()

    def abandon(self) -> None:
        super().abandon()
        self.wake_monitor()

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._monitor

    def join(self, seconds: float | None = None) -> None:
        if self.is_own_thread():
            return
        self._join_starter(seconds)
        if self._monitor.ident is not None:
            self._monitor.join(seconds)

    def after_fork(self) -> None:
        super().after_fork()
        self.children.after_fork()
        for queue in self.queues:
            queue.send_lock, queue.recv_lock, queue.link = threading.Lock(), threading.Lock(), None
        poll, wake_fd, self.poll, self.wake_fd = self.poll, self.wake_fd, None, -1
        if poll is not None:
            poll.close()  # this process's copy of the parent's descriptor
        if wake_fd >= 0:
            os.close(wake_fd)

    @property
    def _child(self) -> Child | None:
        return self.children.current

    @property
    def standby(self) -> Any:
        return self.children.standby

    def _children(self) -> list[Child]:
        return self.children.all()

    def watch_deadline(self, future: TimedFuture, queue: Any) -> None:
        self.deadlines.add(future, queue)
        self.wake_monitor()

    def watch_generation(self, observer: Callable[[int], object]) -> None:
        self._observers.append(observer)

    def _sync_chunks(self, done: int | None = None) -> None:
        """Make the children map the chunks that the device has, and unmap all others."""
        if not self.children.sync_chunks(done):
            self.wake_monitor()

    # -- the monitor thread -------------------------------------------------------------------------------------------
    def _monitor_main(self) -> None:
        try:
            self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self.poll = select.epoll()
            self.poll.register(self.wake_fd, select.EPOLLIN)
            self.device.on_chunks_changed = self._sync_chunks
            self._first_child()
            self.connect()
            if self.standby.spare:
                self.children.restock(now=True)
        except BaseException as error:  # noqa: BLE001  # raised by `start`
            self._start_error = error
            self.end(BROKEN, WorkerFailed(f"no child process could be started: {error}"))
            try:
                self._finish()
            finally:
                self._first_child_gate.release()
            return
        self._first_child_gate.release()
        try:
            while not self.is_over():
                self._wait_for_cooldown() if self.cooling_down else self.listen_to_child()
        except BaseException as error:  # noqa: BLE001  # a defect here must leave no future without an end
            broken = WorkerFailed(f"the monitor thread of {self.device} failed: {error_text(error)}")
            broken.__cause__ = error
            self.end(BROKEN, broken)
        self._finish()

    def is_over(self) -> bool:
        if self.state == OPEN:
            return False
        if self.state == BROKEN:
            return True
        queued = any(len(queue.pending) or queue.taken for queue in self.queues) if self.state < CANCELLING else False
        return not queued and not any(queue.sent for queue in self.queues)

    def _finish(self) -> None:
        """End the children, and the requests that have not been settled."""
        self._fail_all()
        self.children.end(kill=self.state == BROKEN)
        self.device.on_chunks_changed = None
        if self.poll is not None:
            self.poll.close()
        wake_fd, self.wake_fd = self.wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)

    def _fail_all(self) -> None:
        """Fail all requests that were sent or are queued, with `reason()`."""
        self._disconnect()
        for queue in self.queues:
            for sent in list(queue.sent.values()):
                self.fail_sent(sent, self.reason())
            queue.fail_taken()
            queue.notify_rest()
            queue.drain(self)

    def _disconnect(self) -> None:
        """Stop all threads from sending to the child and reading from it; requests that it has reported are settled."""
        for queue in self.queues:
            with queue.send_lock:
                queue.link = None
        if self._child is None:
            return
        for end in (self._child.control, *(link.socket for link in self._child.links)):
            with suppress(OSError, ValueError):  # closing alone may not unregister it: a forked process may have a copy
                self.poll.unregister(end)
        for queue, link in zip(self.queues, self._child.links, strict=True):
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a report
            with queue.recv_lock, suppress(EOFError, OSError):
                _read_all(queue, link)

    def fail_sent(self, sent: InFlightRequest, error: BaseException) -> None:
        """Fail a request that was in flight, and mark the tensors that it writes as tainted."""
        sent.queue.sent.pop(sent.number, None)
        sent.queue.busy = len(sent.queue.sent)
        for tensor in written_tensors(sent):
            self.device.taint(tensor, f"the request that writes it failed with {type(error).__name__}")
        if not sent.future._status:
            sent.queue.fail(sent.future, error)

    # -- replacing a child --------------------------------------------------------------------------------------------
    def current_child(self) -> Child:
        if self._child is None:
            raise WorkerFailed("there is no child process")
        return self._child

    def _first_child(self) -> None:
        """Start the first child. If it was killed, try again; if it failed by itself, it would fail again."""
        while True:
            try:
                self._take_child()
            except DispatchError as error:  # noqa: PERF203
                if not self.standby.last_was_killed or not self._count_start():
                    raise
                self._log_event("child lost", monotonic(), cause=str(error))
                self._pause(self.limit.delay, CANCELLING)
            else:
                return

    def _count_start(self) -> bool:
        with self.lock:
            return self.state < CANCELLING and self.limit.count(failed_start=True)

    def _take_child(self) -> None:
        """Make a ready child the present one."""
        begun = monotonic()
        child = self.children.take()
        self.limit.started()
        self.generation += 1
        self._log_event("child started", begun, pid=child.process.pid, seconds=child.start_seconds)
        for queue in self.queues:
            queue.defined, queue.forget = set(), []
            queue.since = monotonic()

    def replace_child(self, loss: ChildLoss) -> bool:
        """Replace the present child; returns False if none can be started, and the circuit is open.

        This waits for the old child to end, because its kernels may run until then; after a fault none run.
        """
        begun = monotonic()
        if self._child is not None:
            pid = self._child.process.pid
            self.children.discard(wait=not loss.is_device_fault)
            self._log_event("child lost", begun, pid=pid, cause=str(loss.cause))
        while True:
            try:
                self._take_child()
                break
            except (DispatchError, OSError, MemoryError) as error:
                error.__cause__ = error.__cause__ or loss.cause
                if not self.allow_restart(error, failed_start=True):
                    return False
                self._log_event("child lost", begun, cause=str(error))
                self._pause(self.limit.delay, CANCELLING)
        self._tell_observers()  # before anything ends in the new generation
        return True

    def _pause(self, seconds: float, state: int) -> None:
        """Wait for `seconds`, or until the pool's state is at least `state`."""
        ends = monotonic() + seconds
        poll = select.poll()
        poll.register(self.wake_fd, select.POLLIN)
        while self.state < state and (time_left := ends - monotonic()) > 0:
            if poll.poll(min(time_left, LONGEST_POLL) * 1000):
                os.eventfd_read(self.wake_fd)

    def recover(self, loss: ChildLoss) -> None:
        """Replace the child, handle the requests that were in flight, and continue."""
        begun = monotonic()
        self._disconnect()
        if self.allow_restart(loss.cause) and recover(self, loss):
            self.connect()
            self._log_event("child replaced", begun, cause=loss.why)
        elif self.state == CANCELLING:  # nothing runs again
            fail_in_flight(self, loss)
            self.children.discard(wait=True)
        else:  # the circuit is open: nothing may stay in flight, or close() would wait for ever
            self._fail_all()
            self.children.discard(wait=True)

    def _wait_for_cooldown(self) -> None:
        """While the circuit is open for its cooldown: fail all requests, wait, and try to start a child."""
        self._fail_all()
        self.children.discard(wait=True)
        self._pause(self.limit.cooldown or 0, OPEN + 1)
        if self.state:
            return
        begun = monotonic()
        try:
            self._take_child()
        except (DispatchError, OSError, MemoryError) as error:
            self.open_circuit(f"no child of {self.device} could be started: {error}", error)
            return
        self.half_open()
        if self.cooling_down or self.state:
            return
        self._tell_observers()
        self.connect()
        self._log_event("child replaced", begun, cause="the circuit was open for its cooldown")

    def _log_event(self, event: str, begun: float, **facts: object) -> None:
        """Log an event, and how long it took since `begun`."""
        common = {"device": self.device.name, "generation": self.generation}
        log(event, {**common, **facts, "milliseconds": round((monotonic() - begun) * 1000, 1)})

    def connect(self) -> None:
        """Let the queues send to the present child, beginning with the requests in flight that may run again."""
        if self.device.taints or self.ordered:  # in order, because other requests may depend on those that fail here
            for _, sent in sorted((number, sent) for queue in self.queues for number, sent in queue.sent.items()):
                error = sent.queue.refusal(sent)
                if error is not None:
                    del sent.queue.sent[sent.number]
                    sent.queue.busy = len(sent.queue.sent)
                    sent.queue.fail(sent.future, error)
        for queue, link in zip(self.queues, self.current_child().links, strict=True):
            queue.resume(link)

    def allow_restart(self, cause: BaseException, *, failed_start: bool = False) -> bool:
        """Count a restart; returns False, with the circuit open, if there were too many in too short a time."""
        with self.lock:
            if self.state >= CANCELLING or self.cooling_down:
                return False
            if self.limit.count(failed_start=failed_start):
                self.restarts += 1
                return True
            text = f"the child of {self.device} was lost {self.limit.describe()}, the last time with {cause}"
        self.open_circuit(text, cause)
        return False

    def _tell_observers(self) -> None:
        errors: list[BaseException] = []
        for observer in list(self._observers):
            try:
                observer(self.generation)
            except Exception as error:  # noqa: BLE001, PERF203  # raised when the supervisor is closed
                errors.append(error)
        self.on_callback_errors(errors)


def _read_all(queue: Any, link: Any) -> None:
    if link.mailbox is not None and link.mailbox.announced and link.mailbox.is_ended(link.mailbox.announced):
        queue.end_lone(link.mailbox, link.mailbox.announced)
    while queue.read_report(link):
        pass
