"""WorkerPool: the workers of one supervisor, and the policy over them: who gets a request, what a defect or a fault
leads to.

supervisor.py is what users hold; worker.py has the threads, which know the pool and not the supervisor, so that one
that is dropped can end. This module never runs a request and never touches a stream.

What holds where a thread is interrupted or cannot start. Python interrupts the main thread alone (Ctrl-C, any handler
of a signal that raises), and may do so as a function begins, after a call, at the end of a loop and in a call that
blocks. The threads of the project are never interrupted; a system call of theirs that a signal breaks is made again.

    interrupted in          what holds
    Supervisor(...)         all threads and children that were started end; nothing is left (`undo`)
    submit, submit_many     what nobody was given a future of is withdrawn, or ends as it would have; others go on
    a full queue            who waits for room leaves; what was about to be dropped is dropped, or stays
    sending (processes)     the next who sends goes on where that was, the monitor thread at its next tick (sending.py)
    result, exception       the request goes on; who reads for it leaves the rest to the monitor thread, who runs it for
                            its worker to that one (deputy.py)
    await                   as asyncio has it: the task is cancelled, and with it what has not started
    cancel                  it is taken back, or not; one taken back ends there, or where its worker finds it
    a callback, here        the others are called, then the interrupt goes on
    close, leaving a block  nothing more is taken, what is queued runs, the threads end; call it again to wait
    a destructor            the interpreter reports the interrupt and passes over it; at worst a block of memory is held

    cannot be had           what holds
    a first thread          WorkerFailed, and nothing is left: a supervisor is made whole or not at all
    a worker's successor    the thread of the worker that broke goes on in its place
    a thread of completion  the worker breaks, which counts as a restart
    a thread that describes status and journal say so; nothing else depends on the status
    a child, as it starts   it counts as a restart and is tried again after 0.05 s, then ever later, up to 2 s
    a child to stand by     it is tried again later
    memory for a request    OutOfMemory, after caches were freed; that request's future alone
    a descriptor, a poll    as for what needs it: a child, memory, or the monitor thread; the end of that one fails what
                            is in flight
"""

from __future__ import annotations

import atexit
import errno
import itertools
import os
import threading
import warnings
import weakref
from _thread import allocate_lock, start_new_thread
from collections import deque
from contextlib import suppress
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from dispatch.device.stream import members
from dispatch.errors import BadRequest, Closed, DeviceFault, DispatchError, WorkerFailed
from dispatch.logs import log
from dispatch.supervise.admission import Admission
from dispatch.supervise.circuit import Circuit
from dispatch.supervise.cuda_worker import CudaWorker
from dispatch.supervise.failures import Failures
from dispatch.supervise.future import DELIVERED, DONE, LateFuture
from dispatch.supervise.host_worker import HostWorker
from dispatch.supervise.priority_queue import PRIORITIES, PriorityQueue
from dispatch.supervise.queue import BROKEN, CANCELLING, CLOSING, OPEN, WorkerQueue, clone_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device.device import Device
    from dispatch.supervise.future import Future
    from dispatch.supervise.limits import RestartLimit

__all__ = ["WorkerPool"]

SAMPLES = 1024  # latencies that are kept
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC)
UNDO_STEP = 0.05  # seconds between looks at whether what was begun has come to its end, so that it can be undone
AT_EXIT = 2.0  # seconds that an interpreter that exits waits for workers that nobody closed

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool(Admission, Circuit):
    """The workers of one supervisor and the policy over them. Threads hold this, and not the supervisor.

    Guarantees: `state` only grows. `refusal` is set before the last worker looks at its queue for the last time, and
    who submits looks at `WorkerQueue.draining` after adding to it: what comes too late is ended by whoever sees that it
    did. Queues are not locked: as many threads as submit at the same instant may exceed a queue's size by one each.
    What a main thread does here may be interrupted anywhere (see above): so it holds `lock` by `with` only, waits in
    plain locks, and leaves nothing that is not done again by the next who comes.
    """

    def __init__(
        self,
        device: Device,
        streams: int,
        queue_size: int,
        limit: RestartLimit,
        completion: str = "poll",
    ) -> None:
        self.device = device
        self.completion = completion
        self.state = OPEN
        self.refusal: DispatchError | None = None
        self.launch_lock = threading.Lock()
        self.lock = threading.Lock()
        self.blocked = 0
        self.gates = []
        self.ordered = False
        self.dropped = self.withdrawn = 0
        self.tickets = itertools.count()
        self.queue_of: dict[Any, WorkerQueue] = {}  # by executors, whose plans the worker has
        self.samples: deque[float] = deque(maxlen=SAMPLES)
        self.restarts = 0
        self.limit = limit
        self.cooling_down = False  # the circuit is open, but for a while only
        self.cooled = allocate_lock()  # held; released for those who wait for the end of that, where they shall not
        self.cooled.acquire()
        self._up = allocate_lock()  # held until the workers have begun, or cannot
        self._up.acquire()
        self._starters: list[int] = []  # the thread that starts the others, once it has begun
        self._starter: threading.Thread | None = None  # the one that does it for that
        self._is_up = False
        self._start_error: BaseException | None = None
        self.failures = Failures()
        self.queues = self.make_queues(streams, queue_size)
        self.latest = self.queues[0]  # where the latest request went that no worker knew (placement.py)
        _pools.add(self)
        device.supervisors.add(self)

    generation = 1

    def watch_generation(self, observer: Callable[[int], object]) -> None:
        """Threads are of one generation."""

    def make_queues(self, streams: int, queue_size: int) -> list[WorkerQueue]:
        """The queues, each with its worker."""
        kind = HostWorker if self.device.is_host else CudaWorker
        queues = [WorkerQueue(index, queue_size) for index in range(streams)]
        for queue in queues:
            queue.worker = kind(queue, self)
        return queues

    def start(self, then: Callable[[], None]) -> None:
        """Have the workers begin, and then do what else there is to be begun; raises what that raised, or WorkerFailed.

        A thread of its own does it, for Thread.start() cannot be interrupted without harm, and this can. Where this
        raises, `undo` ends what has begun.
        """
        try:
            self._starters.extend(map(start_new_thread, (self._bring_up,), ((then,),)))  # one step: see waiters.py
            self._up.acquire()
        except RuntimeError as error:
            raise unstarted(self.device, error) from error
        failure = self._start_error
        if failure is not None:
            raise unstarted(self.device, failure) if is_exhausted(failure) else failure

    def _bring_up(self, then: Callable[[], None]) -> None:
        """On a bare thread, whose making is one step: a full one, which may log, does the work."""
        try:
            name = f"dispatch {self.device} starter"
            self._starter = threading.Thread(target=self._begin, args=(then,), name=name, daemon=True)
            self._starter.start()
        except BaseException as error:  # noqa: BLE001  # raised by `start`
            self._start_error = error
            self._is_up = True
            self._up.release()

    def _begin(self, then: Callable[[], None]) -> None:
        try:
            self._start_threads()
            then()
        except BaseException as error:  # noqa: BLE001  # raised by `start`
            self._start_error = error
        self._is_up = True
        self._up.release()

    def _start_threads(self) -> None:
        for queue in self.queues:
            if queue.worker is not None:
                queue.worker.start()

    def undo(self) -> None:
        """End one that never came to be, and wait until nothing of it is left."""
        self.end(CANCELLING, Closed(f"the supervisor of {self.device} could not be made"))
        _pools.discard(self)
        self.device.supervisors.discard(self)
        while self._starters and not self._is_up:
            self._up.acquire(True, UNDO_STEP)
        self.join()

    # -- requests that are not as others ---------------------------------------------------------------------------
    def rank(self, queue: WorkerQueue, futures: Sequence[Future], priority: Any) -> None:
        """Add futures that have a priority or wait for others; those of a queue that never had any cost nothing."""
        if not isinstance(priority, int) or priority not in PRIORITIES:
            raise BadRequest("priority", repr(priority), " or ".join(map(str, PRIORITIES)), "the smaller goes first")
        with self.lock:
            if type(queue.pending) is not PriorityQueue:
                queue.pending = PriorityQueue(queue.pending, self.may_start)  # type: ignore[arg-type]
        for future in futures:
            if isinstance(future, LateFuture):
                for other in future.after:
                    if not other._status:
                        self.ordered = True
                        other.add_done_callback(lambda _: queue.wake())
        queue.pending.put(futures, priority)

    def may_start(self, future: LateFuture) -> bool:
        """Whether all that a future waits for has ended, or is enqueued where another worker can wait for its event."""
        return all(other._status or self._is_enqueued(other) for other in future.after)

    def _is_enqueued(self, other: Future) -> bool:
        return getattr(other, "_queue", None) in self.queues and other.is_launched

    def launched(self) -> None:
        """A worker has enqueued something: wake those that waited for that."""
        for queue in self.queues:
            if queue.asleep and type(queue.pending) is PriorityQueue and queue.pending:
                queue.wake()

    # -- what workers say (queue.WorkerOwner) -------------------------------------------------------------------------
    def opened(self, executor: Any, queue: WorkerQueue) -> None:
        with self.lock:
            self.queue_of = {**_without(self.queue_of, queue), executor: queue}

    def keep(self, future: Future) -> None:
        self.failures.keep(future)

    def failed(self, future: Future, errors: list[BaseException]) -> None:
        error = future._value
        log("request failed", {"device": self.device, "error": type(error).__name__, "words": error})
        self.failures.keep(future)
        self.failures.add_errors(errors)

    def callbacks_failed(self, errors: list[BaseException]) -> None:
        self.failures.add_errors(errors)

    def lost(self) -> None:
        """The device is lost: nothing more is taken, and what is queued fails."""
        if self.device.fault is not None:
            self.end(BROKEN, clone_error(self.device.fault))

    def reason(self) -> DispatchError:
        """Why what is queued will not be run."""
        return clone_error(self.refusal or Closed(f"the supervisor of {self.device} has ended"))

    def sample(self, start: float, future: Future) -> None:
        if future._status == DONE:
            self.samples.append(perf_counter() - start)

    # -- ending ---------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise why nothing is taken any more."""
        if self.refusal is not None:
            raise clone_error(self.refusal)

    def end(self, state: int, refusal: DispatchError) -> None:
        """Take nothing more; `state` says what becomes of what is queued."""
        if state == BROKEN > self.state:
            event = "device lost" if isinstance(refusal, DeviceFault) else "circuit opened"
            log(event, {"device": self.device, "cause": refusal})
        with self.lock:
            if self.refusal is None or self.cooling_down or state == BROKEN > self.state:
                self.refusal = refusal
            self.state = max(self.state, state)
            self.cooling_down = False
            self.open_gates()
        with suppress(RuntimeError):
            self.cooled.release()
        for queue in self.queues:
            queue.wake()

    def finish(self, why: str = "with its device") -> None:
        """Run what is queued, and end; the device asks for this before it is closed."""
        self.end(CLOSING, Closed(f"the supervisor of {self.device} was closed {why}; make a new one"))
        self.join()

    def is_own_thread(self) -> bool:
        return any(queue.worker is not None and queue.worker.is_here for queue in self.queues)

    def join(self, seconds: float | None = None) -> None:
        """Wait for all workers, their successors included; one of them cannot, and does not."""
        if self.is_own_thread():
            return
        deadline = None if seconds is None else monotonic() + seconds
        self._join_starter(seconds)
        for queue in self.queues:
            worker = None
            while worker is not queue.worker and queue.worker is not None:
                worker = queue.worker
                if worker.thread.ident is not None:  # or it was never started
                    worker.thread.join(None if deadline is None else max(deadline - monotonic(), 0))

    def _join_starter(self, seconds: float | None) -> None:
        """Wait for the thread that has started the others: whoever it let go on may be here before it has ended."""
        starter = self._starter
        if starter is not None and starter.ident is not None and starter is not threading.current_thread():
            starter.join(seconds)

    def abandon(self) -> None:
        """The supervisor is gone and was not closed. May come at any moment, in any thread, so it takes no lock.

        It may be called again: who ended the pool may have been interrupted before all of it had heard of that.
        """
        is_news = self.state <= OPEN
        if is_news:
            self.refusal = Closed("the supervisor is gone")
            self.state = CANCELLING
        with suppress(RuntimeError):
            self.cooled.release()
        for queue in self.queues:
            queue.wake()
        if not is_news:
            return
        warnings.warn(
            f"a supervisor of {self.device} was dropped without close(); what was queued is cancelled",
            ResourceWarning,
            2,
        )

    def after_fork(self) -> None:
        """In a forked child: its threads are not there, and a CUDA context does not survive a fork."""
        self.lock = threading.Lock()
        self.launch_lock = threading.Lock()
        self.gates = []
        self.refusal = Closed(
            f"this supervisor of {self.device} was made before os.fork(), which leaves its threads and the CUDA context"
            " behind; make it in the child, and start children with the 'spawn' method"
        )
        self.state = BROKEN
        for queue in self.queues:
            left = [*queue.pending, *queue.in_flight()]
            queue.pending.clear()
            for future in left:
                future.claim_again()  # not by `claim`: a thread that held its lock is not in this process
                future._value, future._status = self.reason(), DELIVERED  # who waited for it is not in this process
        self.failures = Failures()


# Loops with a condition in them are no part of a block that holds a lock: Python 3.12 and 3.13 guard the jump back to
# their beginning by no handler, so that Ctrl-C there would leave the block without its end.
def _without(queue_of: dict[Any, WorkerQueue], queue: WorkerQueue) -> dict[Any, WorkerQueue]:
    return {executor: other for executor, other in queue_of.items() if other is not queue}


def is_exhausted(error: BaseException) -> bool:
    """Whether the system has no more of something: threads, processes, descriptors or memory."""
    if isinstance(error, OSError):
        return error.errno in EXHAUSTED
    return type(error) in (RuntimeError, MemoryError)  # what Thread.start() raises is a RuntimeError


def unstarted(device: Device, error: BaseException) -> DispatchError:
    """The error for a supervisor that could not be made."""
    hint = "is the limit of threads, processes, descriptors or memory reached?"
    failure = WorkerFailed(f"the supervisor of {device} could not be started: {error!r}; {hint}")
    failure.__cause__ = error
    return failure


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


def _at_exit() -> None:
    """Let workers that nobody closed end before the interpreter does: cancel what is queued, wait a little."""
    pools = [pool for pool in members(_pools) if pool.state < CANCELLING]
    for pool in pools:
        pool.end(CANCELLING, Closed("the interpreter exits"))
    for pool in pools:
        pool.join(AT_EXIT / len(pools))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
