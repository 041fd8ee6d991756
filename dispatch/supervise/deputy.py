"""Deputy: who waits for a lone request runs it in the place of its worker, which has nothing else to do.

To wake a sleeping worker, and to be woken by it, takes twice 10 us and more; a small request has ended by then.
cuda_worker.py has one for each worker, and `Future.result` comes here by its queue. This module calls no library: what
it launches is a request that has run before, by the relocated graph of its plan.
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
from dispatch.supervise.future import DONE, MISSED, LateFuture

if TYPE_CHECKING:
    import ctypes

    from dispatch.device.cuda import CudaDevice
    from dispatch.supervise.future import Future
    from dispatch.supervise.queue import WorkerOwner, WorkerQueue

__all__ = ["Deputy"]

NOW = (False,)  # for `map`: acquire at once or not at all
WATCH = 50e-6  # seconds, from the launch on, for which who waits looks at the event; then the worker does
RAREST = 6  # one request in 2 ** 6 is run so where that was too short so often in a row
DEPUTIZED = 0.05  # seconds after which a worker looks again whether somebody still runs a request in its place


class LoneWorker(Protocol):
    """What is asked of a worker here."""

    queue: WorkerQueue
    owner: WorkerOwner
    device: CudaDevice
    executor: Any
    completion: Any
    batches: deque[Batch]

    def record_event(self, event: ctypes.c_void_p) -> int: ...
    def tell(self, future: Future) -> None: ...


class Deputy:
    """What a worker shares with one who waits for a lone request.

    Guarantees: who holds `lock` is the worker, its own thread or another; the worker's thread holds it whenever it does
    anything but sleep. Another thread only tries for it, and may be interrupted anywhere (Ctrl-C): it then lets go at
    once, and what it was about stands in `batch` and in the queue, where the worker finds it. That runs a request again
    of which it is not noted that it was launched, so only those come here of which a second run gives the same. A fault
    is left to the worker, too, which fails with it what it must.
    """

    __slots__ = ("_holder", "_left_alone", "_lock", "_misses", "_worker", "batch")

    def __init__(self, worker: LoneWorker) -> None:
        self._worker = worker
        self._lock = allocate_lock()
        self._holder = 0  # the thread that runs a request in the worker's place
        self._misses = self._left_alone = 0  # requests in a row that it was of no use for, and those not to be run so
        self.batch: Batch | None = None  # of the request that is run so

    @property
    def is_here(self) -> bool:
        """Whether the calling thread runs a request in the worker's place."""
        return self._holder == get_ident()

    # -- the worker's own thread ----------------------------------------------------------------------------------
    def enter(self) -> None:
        """Be the worker, once nobody else is; take over what they have left."""
        queue = self._worker.queue
        while not self._lock.acquire(False):
            queue.asleep = True  # and then another try: who holds it looks at the queue after letting go
            if self._lock.acquire(False):
                break
            queue.wait_for_wakeup(DEPUTIZED)
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
        if future.claim_again():  # it is the first in the queue still
            future._request = batch.requests[0]
        self.batch = None
        worker.completion.recycle(batch.event)

    # -- who waits ------------------------------------------------------------------------------------------------
    def run(self, future: Future) -> None:
        """Run a request that nothing is before or behind, if its worker has not begun with it.

        Ever more rarely where that is of no use: to look at the event holds up the program's other threads.
        """
        worker = self._worker
        if not self._is_lone(future):
            return
        if self._left_alone:
            self._left_alone -= 1
            return
        held: list[bool] = []
        try:
            held.extend(map(self._lock.acquire, NOW))  # one step: nothing can come between having it and knowing
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
        if type(pending) is not deque or len(pending) != 1 or isinstance(future, LateFuture):
            return False
        if future._waiting is not None and not future._waiting.is_plain:
            return False
        try:
            return pending[0] is future and type(worker.completion) is Polling
        except IndexError:  # its worker has just begun with it
            return False

    def _run(self, future: Future) -> None:
        worker, request = self._worker, future.unclaimed_request()
        bound = None if request is MISSED else getattr(request, "bound", None)
        if type(bound) is not Bound or bound.executor is not worker.executor:
            return
        if not bound.is_relaunchable(request):
            return
        with worker.device.context, relaxed():  # another thread, or this one, may capture meanwhile
            batch = Batch(worker.completion.event())
            batch.futures.append(future)
            batch.requests.append(request)
            self.batch = batch
            if not future.claim_again():
                return
            if not bound.launch():
                self._miss()
                return
            if worker.record_event(batch.event):
                return
            batch.recorded = True  # these two with no call between them: where it is launched it does not run again
            future._value = bound.result
            self._watch(batch, future)

    def _watch(self, batch: Batch, future: Future) -> None:
        """End it if the GPU is past it soon, and if those who wait for it are such as may be told of it here."""
        query, event, ends = driver.cuEventQuery.unchecked_holding_gil, batch.event, batch.began + WATCH
        while (status := query(event)) == NOT_READY and perf_counter() < ends:
            pass
        if status == NOT_READY:
            self._miss()
        elif not status and (future._waiting is None or future._waiting.is_plain):
            self._misses = 0
            self._finish(batch)

    def _miss(self) -> None:
        self._misses = min(self._misses + 1, RAREST)
        self._left_alone = 2**self._misses

    def _finish(self, batch: Batch) -> None:
        """End a request that the GPU is past; an interrupted call is made again."""
        worker, (future,) = self._worker, batch.futures
        future._status = DONE
        if future._waiting is not None:
            worker.tell(future)
        self._leave_queue(future)
        self.batch = None
        worker.queue.done += 1
        worker.completion.recycle(batch.event)

    def _leave_queue(self, future: Future) -> None:
        with suppress(ValueError):  # who drops the oldest may have taken it out
            self._worker.queue.pending.remove(future)
