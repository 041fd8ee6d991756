"""InlineRunner: a thread that waits for a lone request runs it itself, in place of the sleeping worker.

Waking a sleeping worker takes 10 us or more, and so does being woken by it; a small request has ended by then.
cuda_worker.py has one InlineRunner for each worker; `Future.result` reaches it through its queue. This module calls no
library: it launches only requests that have run before, by the relocated graph of their plan.
"""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from collections import deque
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from cudabind import driver
from dispatch.device.stream import NOT_READY, relaxed
from dispatch.execute.bound import Bound
from dispatch.supervise import trace
from dispatch.supervise.batch import Batch
from dispatch.supervise.completion import Polling
from dispatch.supervise.future import ALREADY_CLAIMED, DONE, ConditionalFuture

if TYPE_CHECKING:
    import ctypes

    from dispatch.device.cuda import CudaDevice
    from dispatch.supervise.future import Future
    from dispatch.supervise.queue import WorkerOwner, WorkerQueue

__all__ = ["InlineRunner"]

NONBLOCKING = (False,)  # for `map`: the argument `blocking` of `acquire`
POLL_SECONDS = 50e-6  # seconds from the launch on for which the waiting thread polls; then the worker takes over
MAX_BACKOFF = 6  # after so many misses in a row, only one request in 2 ** 6 is run in this way
RECHECK = 0.05  # seconds between a worker's checks whether another thread still runs a request in its place


class CudaWorkerLike(Protocol):
    """The part of a worker that this module uses."""

    queue: WorkerQueue
    owner: WorkerOwner
    device: CudaDevice
    executor: Any
    completion: Any
    batches: deque[Batch]

    def record_event(self, event: ctypes.c_void_p) -> int: ...
    def notify(self, future: Future) -> None: ...


class InlineRunner:
    """Lets another thread act as the worker for one lone request.

    Guarantees: the thread that holds the lock acts as the worker; the worker's own thread holds it whenever it is not
    asleep. Another thread only tries to acquire it, and may be interrupted anywhere (Ctrl-C): it then releases the lock
    at once, and leaves its state in `batch` and in the queue, where the worker finds it. The worker runs the request
    again unless its launch was recorded; so it runs only requests for which a second run gives the same result. The
    worker also handles faults.
    """

    __slots__ = ("_holder", "_lock", "_misses", "_skips_left", "_worker", "batch")

    def __init__(self, worker: CudaWorkerLike) -> None:
        self._worker = worker
        self._lock = allocate_lock()
        self._holder = 0  # the thread that runs a request in the worker's place
        self._misses = self._skips_left = 0  # requests in a row that took too long; requests to skip from now on
        self.batch: Batch | None = None  # the batch of the request that is run in the worker's place

    @property
    def is_current_thread(self) -> bool:
        """Whether the calling thread runs a request in the worker's place."""
        return self._holder == get_ident()

    # -- the worker's own thread ----------------------------------------------------------------------------------
    def enter(self) -> None:
        """Acquire the lock, and take over a request that another thread has left unfinished."""
        queue = self._worker.queue
        while not self._lock.acquire(False):
            queue.asleep = True  # then try again: the holder checks the queue after releasing the lock
            if self._lock.acquire(False):
                break
            queue.wait_for_wakeup(RECHECK)
        queue.asleep = False
        if self.batch is not None:
            self._take_over(self.batch)

    def leave(self) -> None:
        self._lock.release()

    def _take_over(self, batch: Batch) -> None:
        worker, (future,) = self._worker, batch.futures
        if future._status:
            self._finish(batch)
            return
        if batch.recorded:
            self._leave_queue(future)
            worker.queue.busy += 1
            worker.batches.append(batch)
            self.batch = None
            worker.completion.watch(batch)
            return
        if future.claim_again():  # it is still the first in the queue
            future._request = batch.requests[0]
        self.batch = None
        worker.completion.recycle(batch.event)

    # -- a thread that waits for a future -------------------------------------------------------------------------
    def run(self, future: Future) -> None:
        """Run a request if it is the only one of its worker, and the worker has not started it.

        After misses it is skipped more and more often, because polling the event slows down other threads.
        """
        worker = self._worker
        if not self._is_lone(future):
            return
        if self._skips_left:
            self._skips_left -= 1
            return
        held: list[bool] = []
        try:
            held.extend(map(self._lock.acquire, NONBLOCKING))  # atomic: no interrupt between acquiring and recording it
            if True in held and self.batch is None and self._is_lone(future):
                self._holder = get_ident()
                self._run(future)
        finally:
            if True in held:
                self._holder = 0
                self._lock.release()
                if self.batch is not None or len(worker.queue.pending) or worker.owner.state:
                    worker.queue.wake()

    def _is_lone(self, future: Future) -> bool:
        worker, pending = self._worker, self._worker.queue.pending
        if worker.batches or worker.owner.state or worker.owner.ordered or trace.hooks:
            return False
        if type(pending) is not deque or len(pending) != 1 or isinstance(future, ConditionalFuture):
            return False
        if future._wait_list is not None and not future._wait_list.is_interruptible:
            return False
        try:
            return pending[0] is future and type(worker.completion) is Polling
        except IndexError:  # its worker has just taken it
            return False

    def _run(self, future: Future) -> None:
        worker, request = self._worker, future.unclaimed_request()
        bound = None if request is ALREADY_CLAIMED else getattr(request, "bound", None)
        if type(bound) is not Bound or bound.executor is not worker.executor:
            return
        if not bound.is_relaunchable(request):
            return
        with worker.device.context, relaxed():  # this thread or another may be capturing
            batch = Batch(worker.completion.event())
            batch.futures.append(future)
            batch.requests.append(request)
            self.batch = batch
            if not future.claim_again():
                return
            if not bound.launch():
                self._back_off()
                return
            if worker.record_event(batch.event):
                return
            batch.recorded = True  # no call between these two lines: a recorded launch has its result
            future._value = bound.result
            self._poll_event(batch, future)

    def _poll_event(self, batch: Batch, future: Future) -> None:
        """End it if the GPU finishes it soon, and if its waiters may be woken from this thread."""
        query, event, ends = driver.cuEventQuery.unchecked_holding_gil, batch.event, batch.began + POLL_SECONDS
        while (status := query(event)) == NOT_READY and perf_counter() < ends:
            pass
        if status == NOT_READY:
            self._back_off()
        elif not status and (future._wait_list is None or future._wait_list.is_interruptible):
            self._misses = 0
            self._finish(batch)

    def _back_off(self) -> None:
        self._misses = min(self._misses + 1, MAX_BACKOFF)
        self._skips_left = 2**self._misses

    def _finish(self, batch: Batch) -> None:
        """End a request that the GPU has finished; after an interrupt the worker calls this again."""
        worker, (future,) = self._worker, batch.futures
        future._status = DONE
        if future._wait_list is not None:
            worker.notify(future)
        self._leave_queue(future)
        self.batch = None
        worker.queue.done += 1
        worker.completion.recycle(batch.event)

    def _leave_queue(self, future: Future) -> None:
        with suppress(ValueError):  # a thread that drops the oldest may have taken it out
            self._worker.queue.pending.remove(future)
