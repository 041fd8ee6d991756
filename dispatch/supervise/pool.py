"""WorkerPool: the workers of one supervisor, and the policy for defects, faults and full queues.

supervisor.py has the public class; worker.py has the threads. Threads refer to the pool and not to the supervisor, so
a supervisor that is dropped can be collected. This module never runs a request and never touches a stream.

Guarantees when a thread is interrupted, or cannot be started. Python interrupts only the main thread (Ctrl-C, or any
signal handler that raises): at the start of a function, after a call, at the end of a loop, and in a blocking call.
This library's threads are never interrupted; system calls that a signal breaks are repeated.

    interrupted in          guarantee
    Supervisor(...)         all threads and children that were started end; nothing is left (`undo_start`)
    submit, submit_many     a request whose future was not returned is withdrawn, or ends as usual; others go on
    a full queue            the thread stops waiting for room; a request about to be dropped is dropped, or stays
    sending (processes)     the next thread that sends goes on from there, or the monitor thread at its next tick
    result, exception       the request goes on; what the thread did for its worker (reading from the child,
                            inline_runner.py) is left to the monitor thread or the worker
    await                   as asyncio defines it: the task is cancelled, and the request if it has not started
    cancel                  the request is withdrawn or not; if so, its future ends now, or when its worker finds it
    a callback, here        the other callbacks are called, then the interrupt is raised
    close, leaving a block  no request is taken any more, queued ones run, the threads end; call it again to wait
    a destructor            the interpreter reports the interrupt and goes on; at worst a block of memory stays in use

    cannot be started       guarantee
    a first thread          WorkerFailed, and nothing is left; the same for the journal's thread
    a worker's successor    the thread of the worker that broke goes on in its place
    a thread of completion  the worker breaks, which counts as a restart
    the status server       the log says so; nothing else depends on it
    a child                 counts as a restart, and is tried again after 0.05 s, then later each time, up to 2 s
    a spare child           is tried again later
    memory for a request    OutOfMemory, after caches were freed; that request's future alone
    a descriptor, a poll    as for its user: a child, memory, or the monitor thread; the end of the monitor thread fails
                            the requests in flight
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

from dispatch.checks import as_python_ints
from dispatch.device.disposal import members
from dispatch.errors import BadRequest, Closed, DeviceFault, DispatchError, WorkerFailed
from dispatch.logs import log
from dispatch.supervise.admission import Admission
from dispatch.supervise.circuit import Circuit
from dispatch.supervise.cuda_worker import CudaWorker
from dispatch.supervise.failures import Failures
from dispatch.supervise.future import DELIVERED, DONE, ConditionalFuture
from dispatch.supervise.host_worker import HostWorker
from dispatch.supervise.priority_queue import PRIORITIES, PriorityQueue
from dispatch.supervise.queue import BROKEN, CANCELLING, CLOSING, OPEN, WorkerQueue, clone_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device.device import Device
    from dispatch.supervise.future import Future
    from dispatch.supervise.limits import RestartLimit

__all__ = ["WorkerPool"]

MAX_LATENCIES = 1024  # latencies that are kept
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC)
UNDO_STEP = 0.05  # seconds between checks whether the starting thread has finished, so that it can be undone
AT_EXIT = 2.0  # seconds to wait at interpreter exit for workers that were not closed

_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool(Admission, Circuit):
    """The workers of one supervisor, and their policy. Threads refer to this object, not to the supervisor.

    Guarantees: `state` only grows. `refusal` is set before the last worker checks its queue for the last time, and a
    thread that submits checks `WorkerQueue.draining` after adding to the queue; if it is set, that thread ends what is
    left. Queues are not locked: every thread that submits at the same instant may exceed a queue's size by one. The
    main thread may be interrupted anywhere in here (see above). So it holds `lock` only by `with`, waits only in plain
    locks, and the next caller finishes everything that it leaves half done.
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
        self.queue_of: dict[Any, WorkerQueue] = {}  # by the executor of its worker
        self.latencies: deque[float] = deque(maxlen=MAX_LATENCIES)
        self.restarts = 0
        self.limit = limit
        self.cooling_down = False  # the circuit is open, and will half-open
        self.cooldown_gate = allocate_lock()  # held; released to end a cooldown early, when the pool ends
        self.cooldown_gate.acquire()
        self._started_gate = allocate_lock()  # held until the workers have started, or failed to
        self._started_gate.acquire()
        self._starters: list[int] = []  # the id of the bare thread, once it has started
        self._starter: threading.Thread | None = None  # the thread that starts the workers
        self._is_started = False
        self._start_error: BaseException | None = None
        self.failures = Failures()
        self.queues = self.make_queues(streams, queue_size)
        self.latest = self.queues[0]  # the queue of the latest request whose plan no worker had (placement.py)
        _pools.add(self)
        device.supervisors.add(self)

    generation = 1

    def watch_generation(self, observer: Callable[[int], object]) -> None:
        """Nothing to do: threads have one generation only."""

    def make_queues(self, streams: int, queue_size: int) -> list[WorkerQueue]:
        """The queues, each with its worker."""
        kind = HostWorker if self.device.is_host else CudaWorker
        queues = [WorkerQueue(index, queue_size) for index in range(streams)]
        for queue in queues:
            queue.worker = kind(queue, self)
        return queues

    def start(self, then: Callable[[], None]) -> None:
        """Start the workers, then call `then`; raises its error, or WorkerFailed.

        A separate thread does it, because Ctrl-C inside Thread.start() does harm, and inside this method does not. If
        this raises, `undo_start` ends what was started.
        """
        try:
            self._starters.extend(map(start_new_thread, (self._run_starter,), ((then,),)))  # one step: see waiters.py
            self._started_gate.acquire()
        except RuntimeError as error:
            raise start_failure(self.device, error) from error
        failure = self._start_error
        if failure is not None:
            raise start_failure(self.device, failure) if is_exhausted(failure) else failure

    def _run_starter(self, then: Callable[[], None]) -> None:
        """On a bare thread, which is started in one atomic step: start a full thread, which may log, for the work."""
        try:
            name = f"dispatch {self.device} starter"
            self._starter = threading.Thread(target=self._start_and_call, args=(then,), name=name, daemon=True)
            self._starter.start()
        except BaseException as error:  # noqa: BLE001  # raised by `start`
            self._start_error = error
            self._is_started = True
            self._started_gate.release()

    def _start_and_call(self, then: Callable[[], None]) -> None:
        try:
            self._start_threads()
            then()
        except BaseException as error:  # noqa: BLE001  # raised by `start`
            self._start_error = error
        self._is_started = True
        self._started_gate.release()

    def _start_threads(self) -> None:
        for queue in self.queues:
            if queue.worker is not None:
                queue.worker.start()

    def undo_start(self) -> None:
        """After a failed start: end everything that was started, and wait until nothing is left."""
        self.end(CANCELLING, Closed(f"the supervisor of {self.device} could not be created"))
        _pools.discard(self)
        self.device.supervisors.discard(self)
        while self._starters and not self._is_started:
            self._started_gate.acquire(True, UNDO_STEP)
        self.join()

    # -- requests with a priority or with dependencies -------------------------------------------------------------
    def enqueue_ranked(self, queue: WorkerQueue, futures: Sequence[Future], priority: Any) -> None:
        """Queue futures with a priority or with dependencies; the first makes `pending` a PriorityQueue."""
        priority = priority if isinstance(priority, bool) else as_python_ints("priority", priority)
        if not isinstance(priority, int) or priority not in PRIORITIES:
            raise BadRequest(
                "priority", repr(priority), " or ".join(map(str, PRIORITIES)), "requests with smaller numbers run first"
            )
        with self.lock:
            if type(queue.pending) is not PriorityQueue:
                queue.pending = PriorityQueue(queue.pending, self.may_start)  # type: ignore[arg-type]
        for future in futures:
            if isinstance(future, ConditionalFuture):
                for other in future.after:
                    if not other._status:
                        self.ordered = True
                        other.add_done_callback(lambda _: queue.wake())
        queue.pending.put(futures, priority)

    def may_start(self, future: ConditionalFuture) -> bool:
        """Whether every dependency of a future has ended, or is enqueued on a stream that its worker can wait for."""
        return all(other._status or self._is_enqueued(other) for other in future.after)

    def _is_enqueued(self, other: Future) -> bool:
        return getattr(other, "_queue", None) in self.queues and other.is_launched

    def on_enqueued(self) -> None:
        """A worker has enqueued requests: wake the workers that may have waited for these."""
        for queue in self.queues:
            if queue.asleep and type(queue.pending) is PriorityQueue and queue.pending:
                queue.wake()

    # -- called by workers (queue.WorkerOwner) ------------------------------------------------------------------------
    def on_worker_opened(self, executor: Any, queue: WorkerQueue) -> None:
        with self.lock:
            self.queue_of = {**_without(self.queue_of, queue), executor: queue}

    def keep(self, future: Future) -> None:
        self.failures.keep(future)

    def on_request_failed(self, future: Future, errors: list[BaseException]) -> None:
        error = future._value
        log("request failed", {"device": self.device, "error": type(error).__name__, "words": error})
        self.failures.keep(future)
        self.failures.add_errors(errors)

    def on_callback_errors(self, errors: list[BaseException]) -> None:
        self.failures.add_errors(errors)

    def on_device_lost(self) -> None:
        """The device is lost: refuse new requests, and fail the queued ones."""
        if self.device.fault is not None:
            self.end(BROKEN, clone_error(self.device.fault))

    def reason(self) -> DispatchError:
        """The error for queued requests that will not run."""
        return clone_error(self.refusal or Closed(f"the supervisor of {self.device} has ended"))

    def record_latency(self, start: float, future: Future) -> None:
        if future._status == DONE:
            self.latencies.append(perf_counter() - start)

    # -- ending ---------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise if no requests are taken any more."""
        if self.refusal is not None:
            raise clone_error(self.refusal)

    def end(self, state: int, refusal: DispatchError) -> None:
        """Refuse new requests with `refusal`; `state` says what happens to the queued ones."""
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
            self.cooldown_gate.release()
        for queue in self.queues:
            queue.wake()

    def finish(self, why: str = "with its device") -> None:
        """Run the queued requests, and end; the device calls this before it is closed."""
        self.end(CLOSING, Closed(f"the supervisor of {self.device} was closed {why}; create a new one"))
        self.join()

    def is_own_thread(self) -> bool:
        return any(queue.worker is not None and queue.worker.is_current_thread for queue in self.queues)

    def join(self, seconds: float | None = None) -> None:
        """Wait for all workers and their successors; does nothing on a worker's own thread."""
        if self.is_own_thread():
            return
        deadline = None if seconds is None else monotonic() + seconds
        self._join_starter(seconds)
        for queue in self.queues:
            worker = None
            while worker is not queue.worker and queue.worker is not None:
                worker = queue.worker
                if worker.thread.ident is not None:  # else it was never started
                    worker.thread.join(None if deadline is None else max(deadline - monotonic(), 0))

    def _join_starter(self, seconds: float | None) -> None:
        """Wait for the thread that has started the workers: `start` returns shortly before it ends."""
        starter = self._starter
        if starter is not None and starter.ident is not None and starter is not threading.current_thread():
            starter.join(seconds)

    def abandon(self) -> None:
        """End the pool of a supervisor that was dropped without close(). A finalizer calls it, so it takes no lock.

        It may be called again, to finish after an interrupt.
        """
        is_news = self.state <= OPEN
        if is_news:
            self.refusal = Closed("the supervisor no longer exists")
            self.state = CANCELLING
        with suppress(RuntimeError):
            self.cooldown_gate.release()
        for queue in self.queues:
            queue.wake()
        if not is_news:
            return
        warnings.warn(
            f"a supervisor of {self.device} was garbage-collected without close(); its queued requests are cancelled",
            ResourceWarning,
            2,
        )

    def after_fork(self) -> None:
        """In a forked child: the threads do not exist, and a CUDA context does not survive a fork."""
        self.lock = threading.Lock()
        self.launch_lock = threading.Lock()
        self.gates = []
        self.refusal = Closed(
            f"this supervisor of {self.device} was created before os.fork(), and its threads and the CUDA context do"
            " not exist in the child; create it in the child, and start children with the 'spawn' method"
        )
        self.state = BROKEN
        for queue in self.queues:
            unfinished = [*queue.pending, *queue.in_flight()]
            queue.pending.clear()
            for future in unfinished:
                future.claim_again()  # not `claim`: a thread that held a lock does not exist here
                future._value, future._status = self.reason(), DELIVERED  # threads that waited for it do not exist here
        self.failures = Failures()


# No loop with a condition inside a block that holds a lock: in Python 3.12 and 3.13 the jump back to its start is not
# covered by the exception table, so Ctrl-C there would leave the block without releasing the lock.
def _without(queue_of: dict[Any, WorkerQueue], queue: WorkerQueue) -> dict[Any, WorkerQueue]:
    return {executor: other for executor, other in queue_of.items() if other is not queue}


def is_exhausted(error: BaseException) -> bool:
    """Whether an error means that the system is out of threads, processes, descriptors or memory."""
    if isinstance(error, OSError):
        return error.errno in EXHAUSTED
    return type(error) in (RuntimeError, MemoryError)  # Thread.start() raises RuntimeError


def start_failure(device: Device, error: BaseException) -> DispatchError:
    """The error of a supervisor that could not be started."""
    hint = "check the limits of threads, processes, file descriptors and memory"
    failure = WorkerFailed(f"the supervisor of {device} could not be started: {error!r}; {hint}")
    failure.__cause__ = error
    return failure


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


def _at_exit() -> None:
    """At interpreter exit: cancel what is queued for workers that were not closed, and wait a little for them."""
    pools = [pool for pool in members(_pools) if pool.state < CANCELLING]
    for pool in pools:
        pool.end(CANCELLING, Closed("the interpreter exits"))
    for pool in pools:
        pool.join(AT_EXIT / len(pools))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
