"""ProcessPool: the policy over workers that run in a child process, and the monitor thread that carries it out.

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

from dispatch.errors import DispatchError, WorkerFailed, words
from dispatch.logs import log
from dispatch.supervise.pool import WorkerPool
from dispatch.supervise.process.children import Children
from dispatch.supervise.process.deadlines import Deadlines
from dispatch.supervise.process.monitor import Monitor
from dispatch.supervise.process.recovery import ChildLoss, fail_in_flight, recover
from dispatch.supervise.process.remote_queue import RemoteQueue
from dispatch.supervise.process.repeatable import Sent, written
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
    or by a recovery, whichever takes it out of its queue's `sent`. A child that cannot be started counts as a restart,
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
        self._begun = allocate_lock()
        self._begun.acquire()
        self.bell = -1
        self.poll: Any = None
        super().__init__(device, streams, queue_size, limit, completion)
        self.queue_of = {queue: queue for queue in self.queues}
        self._monitor = threading.Thread(target=self._watch, name=f"dispatch {device} monitor thread", daemon=True)

    def make_queues(self, streams: int, queue_size: int) -> list[Any]:
        return [RemoteQueue(index, queue_size, self) for index in range(streams)]

    def _start_threads(self) -> None:
        self._monitor.start()
        self._begun.acquire()  # released by the monitor thread once the first child has started, or failed to
        if self._start_error is not None:
            raise self._start_error

    # -- called by any thread -------------------------------------------------------------------------------------
    def ring(self) -> None:
        """Wake the monitor thread."""
        with suppress(OSError, ValueError, OverflowError):  # it has ended
            os.eventfd_write(self.bell, 1)

    def end(self, state: int, refusal: DispatchError) -> None:
        super().end(state, refusal)
        self.ring()

    def abandon(self) -> None:
        super().abandon()
        self.ring()

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
        poll, bell, self.poll, self.bell = self.poll, self.bell, None, -1
        if poll is not None:
            poll.close()  # this process's copy of the parent's descriptor
        if bell >= 0:
            os.close(bell)

    @property
    def _child(self) -> Child | None:
        return self.children.present

    @property
    def standby(self) -> Any:
        return self.children.standby

    def _children(self) -> list[Child]:
        return self.children.all()

    def watch_deadline(self, future: TimedFuture, queue: Any) -> None:
        self.deadlines.add(future, queue)
        self.ring()

    def watch_generation(self, observer: Callable[[int], object]) -> None:
        self._observers.append(observer)

    def _follow(self, done: int | None = None) -> None:
        """Make the children map the chunks that the device has, and unmap all others."""
        if not self.children.follow(done):
            self.ring()

    # -- the monitor thread
    # -------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        try:
            self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self.poll = select.epoll()
            self.poll.register(self.bell, select.EPOLLIN)
            self.device.on_chunks = self._follow
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
                self._begun.release()
            return
        self._begun.release()
        try:
            while not self.is_over():
                self._cool() if self.cooling_down else self.listen_to_child()
        except BaseException as error:  # noqa: BLE001  # a defect here must leave no future without an end
            broken = WorkerFailed(f"the monitor thread of {self.device} broke: {words(error)}")
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
        """End the children, and whatever has not been settled."""
        self._clear()
        self.children.end(kill=self.state == BROKEN)
        self.device.on_chunks = None
        if self.poll is not None:
            self.poll.close()
        bell, self.bell = self.bell, -1
        if bell >= 0:
            os.close(bell)

    def _clear(self) -> None:
        """Fail all requests that were sent or are queued, with `reason()`."""
        self._disconnect()
        for queue in self.queues:
            for sent in list(queue.sent.values()):
                self.give_up(sent, self.reason())
            queue.give_back()
            queue.tell_rest()
            queue.drain(self)

    def _disconnect(self) -> None:
        """Stop all threads from sending to the child and reading from it; what it has reported is settled."""
        for queue in self.queues:
            with queue.send_lock:
                queue.link = None
        if self._child is None:
            return
        for end in (self._child.control, *(link.socket for link in self._child.links)):
            with suppress(OSError, ValueError):  # closing alone may not remove it: a forked process may have a copy
                self.poll.unregister(end)
        for queue, link in zip(self.queues, self._child.links, strict=True):
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a report
            with queue.recv_lock, suppress(EOFError, OSError):
                _take_all(queue, link)

    def give_up(self, sent: Sent, error: BaseException) -> None:
        """Fail a request that was in flight, and mark what it writes as tainted."""
        sent.queue.sent.pop(sent.number, None)
        sent.queue.busy = len(sent.queue.sent)
        for tensor in written(sent):
            self.device.taint(tensor, f"{type(error).__name__} ended the request that wrote it")
        if not sent.future._status:
            sent.queue.fail(sent.future, error)

    # -- replacing a child --------------------------------------------------------------------------------------------
    def present(self) -> Child:
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
                self._note("child lost", monotonic(), cause=str(error))
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
        self._note("child started", begun, pid=child.process.pid, seconds=child.took)
        for queue in self.queues:
            queue.defined, queue.forget = set(), []
            queue.since = monotonic()

    def renew(self, loss: ChildLoss) -> bool:
        """Replace the present child; returns False if none can be started, and the circuit is open.

        This waits for the old child to end, because its kernels may run until then; after a fault none run.
        """
        begun = monotonic()
        if self._child is not None:
            pid = self._child.process.pid
            self.children.discard(wait=not loss.proven)
            self._note("child lost", begun, pid=pid, cause=str(loss.cause))
        while True:
            try:
                self._take_child()
                break
            except (DispatchError, OSError, MemoryError) as error:
                error.__cause__ = error.__cause__ or loss.cause
                if not self.allow(error, failed_start=True):
                    return False
                self._note("child lost", begun, cause=str(error))
                self._pause(self.limit.delay, CANCELLING)
        self._tell_observers()  # before anything ends in the new generation
        return True

    def _pause(self, seconds: float, state: int) -> None:
        """Wait for so many seconds, or until the pool's state is at least `state`."""
        ends = monotonic() + seconds
        bell = select.poll()
        bell.register(self.bell, select.POLLIN)
        while self.state < state and (left := ends - monotonic()) > 0:
            if bell.poll(min(left, LONGEST_POLL) * 1000):
                os.eventfd_read(self.bell)

    def recover(self, loss: ChildLoss) -> None:
        """Replace the child, deal with the requests that were in flight, and go on."""
        begun = monotonic()
        self._disconnect()
        if self.allow(loss.cause) and recover(self, loss):
            self.connect()
            self._note("child replaced", begun, cause=loss.why)
        elif self.state == CANCELLING:  # nothing runs again
            fail_in_flight(self, loss)
            self.children.discard(wait=True)
        else:  # the circuit is open: nothing may stay in flight, or close() would wait for ever
            self._clear()
            self.children.discard(wait=True)

    def _cool(self) -> None:
        """While the circuit is open for its cooldown: fail all requests, wait, and try to start a child."""
        self._clear()
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
        self._note("child replaced", begun, cause="the circuit was open for its cooldown")

    def _note(self, event: str, begun: float, **facts: object) -> None:
        """Log an event, and how long it took since `begun`."""
        common = {"device": self.device.name, "generation": self.generation}
        log(event, {**common, **facts, "milliseconds": round((monotonic() - begun) * 1000, 1)})

    def connect(self) -> None:
        """Let the queues send to the present child, first of all requests in flight again that may still run."""
        if self.device.taints or self.ordered:  # in order: others may depend on what fails here
            for _, sent in sorted((number, sent) for queue in self.queues for number, sent in queue.sent.items()):
                error = sent.queue.refusal(sent)
                if error is not None:
                    del sent.queue.sent[sent.number]
                    sent.queue.busy = len(sent.queue.sent)
                    sent.queue.fail(sent.future, error)
        for queue, link in zip(self.queues, self.present().links, strict=True):
            queue.resume(link)

    def allow(self, cause: BaseException, *, failed_start: bool = False) -> bool:
        """Count a restart; returns False, with the circuit open, if there were too many in too short a time."""
        with self.lock:
            if self.state >= CANCELLING or self.cooling_down:
                return False
            if self.limit.count(failed_start=failed_start):
                self.restarts += 1
                return True
            text = f"the child of {self.device} was lost {self.limit.words()}, the last time with {cause}"
        self.open_circuit(text, cause)
        return False

    def _tell_observers(self) -> None:
        errors: list[BaseException] = []
        for observer in list(self._observers):
            try:
                observer(self.generation)
            except Exception as error:  # noqa: BLE001, PERF203  # raised when the supervisor is closed
                errors.append(error)
        self.callbacks_failed(errors)


def _take_all(queue: Any, link: Any) -> None:
    if link.mailbox is not None and link.mailbox.asked and link.mailbox.is_ended(link.mailbox.asked):
        queue.end_lone(link.mailbox, link.mailbox.asked)
    while queue.take(link):
        pass
