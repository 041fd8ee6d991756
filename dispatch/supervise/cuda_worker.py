"""CudaWorker: enqueues requests on a stream of a GPU in batches, and settles their futures once the GPU is done.

It records one event for each batch; completion.py implements how it waits for that.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind.errors import CudaError
from dispatch.device.storage import Storage
from dispatch.device.stream import NOT_READY
from dispatch.errors import DispatchError
from dispatch.supervise import trace
from dispatch.supervise.batch import Batch
from dispatch.supervise.completion import COMPLETIONS
from dispatch.supervise.future import ALREADY_CLAIMED, DONE, FAILED
from dispatch.supervise.inline_runner import InlineRunner
from dispatch.supervise.queue import CANCELLING, clone_error
from dispatch.supervise.worker import Worker

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from dispatch.core.request import Request
    from dispatch.device.cuda import CudaDevice
    from dispatch.device.stream import Stream
    from dispatch.supervise.future import Future, QueueLike
    from dispatch.supervise.priority_queue import PriorityQueue
    from dispatch.supervise.queue import WorkerOwner, WorkerQueue

__all__ = ["CudaWorker"]

BATCH = 128  # requests enqueued before an event is recorded, which takes 0.5 us; others may launch between batches
IN_FLIGHT = 512  # requests on one stream; at about 1,000 the driver blocks, and all threads that wait for `launch_lock`


class CudaWorker(Worker):
    """Runs requests on a stream of a GPU.

    Guarantees: a future succeeds only after an event recorded after its work was seen to be complete; any other status
    fails it. The owner's `launch_lock` is held while requests are enqueued: a launch releases the GIL for a moment, and
    with several threads competing for it every launch would wait. A lone request may be run by the thread that waits
    for it (inline_runner.py).
    """

    device: CudaDevice

    def __init__(self, queue: WorkerQueue, owner: WorkerOwner) -> None:
        super().__init__(queue, owner)
        self._stream: Stream | None = None
        self.batches: deque[Batch] = deque()
        self.completion: Any = None
        self._unnotified: deque[Future] | None = None  # futures that end under `launch_lock`; None while it is not held
        self._inline_runner = InlineRunner(self)

    def in_flight(self) -> list[Future]:
        return [future for batch in self.batches for future in batch.futures]

    def _open(self) -> None:
        self.device.activate()
        # While any thread captures in the default mode, others must not even query an event; this one may.
        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        self._stream = self.device.stream()
        self.executor = self.device.executor(self._stream)
        self._record_event = driver.cuEventRecord.unchecked
        self.completion = COMPLETIONS[self.owner.completion](self.device, self.queue, self._stream)

    def _serve(self) -> None:
        queue, owner, batches, inline = self.queue, self.owner, self.batches, self._inline_runner
        while True:
            inline.enter()
            try:
                moved = self._step()
            finally:
                inline.leave()
            if moved:
                continue
            if batches:
                self._pause()
            elif owner.state and (owner.state >= CANCELLING or not len(queue.pending)):
                return
            else:
                queue.wait(-1)

    def _step(self) -> bool:
        """Enqueue queued requests and settle ended ones, or else learn a plan; returns whether there was work."""
        queue, owner, moved = self.queue, self.owner, False
        if queue.pending and owner.state < CANCELLING and queue.busy < IN_FLIGHT:
            self._enqueue_batch()
            moved = True
            if owner.blocked and len(queue.pending) <= queue.limit // 2:
                owner.make_room()
        if self.batches:
            return self._poll() or moved
        return moved or (not owner.state and bool(self.executor.learn()))

    def help(self, future: Future) -> None:
        self._inline_runner.run(future)

    @property
    def is_current_thread(self) -> bool:
        return super().is_current_thread or self._inline_runner.is_current_thread

    def record_event(self, event: ctypes.c_void_p) -> int:
        """Record an event after all that is enqueued; returns the driver's status."""
        record = driver.cuEventRecord  # releasing the GIL here may cost as much time as a small request
        record_now = record.unchecked_holding_gil if self.executor.launches.has_room else record.unchecked
        status: int = record_now(event, self.executor.stream.c_handle)
        return status

    def notify(self, future: Future) -> None:
        """Wake the threads that wait for a future that has ended, and run its callbacks."""
        self._notify(future)

    def _enqueue_batch(self) -> None:
        """Enqueue queued requests, up to a batch, and record an event after them."""
        pending, run = self.queue.pending, self.executor.run
        if trace.hooks:
            run = partial(trace.hooked, self.executor, run)
        batch = Batch(self.completion.event())
        self.batches.append(batch)
        unnotified = self._unnotified = deque()
        try:
            self._enqueue(batch, pending, run)
            if self.owner.ordered:
                self.owner.on_enqueued()
        finally:  # callbacks may block, and so must not run under `launch_lock`
            self._unnotified = None
            while unnotified:
                self._notify(unnotified.popleft())

    def _enqueue(self, batch: Batch, pending: deque[Future] | PriorityQueue, run: Callable[[Request], Any]) -> None:
        futures, requests = batch.futures, batch.requests
        with self.owner.launch_lock:
            for _ in range(min(len(pending), BATCH)):
                try:
                    future = pending.popleft()
                    request = future._request
                    del future._request
                except AttributeError:
                    request = self._claim_conditional(future)
                    if request is ALREADY_CLAIMED:
                        continue
                except IndexError:  # it was dropped, or the remaining ones may not start yet
                    break
                futures.append(future)
                requests.append(request)
                try:
                    future._value = run(request)
                except BaseException as error:  # noqa: BLE001  # a value until it is delivered
                    futures.pop()
                    if self._handle_error(future, request, error):
                        futures.append(future)
                        requests.append(request)  # again: batches in flight may have been settled meanwhile
            self._record(batch)

    def _fail(self, future: Future, error: BaseException) -> None:
        if self._unnotified is None:
            super()._fail(future, error)
            return
        self.queue.failed += 1
        future._value, future._status = error, FAILED
        self._unnotified.append(future)
        self.owner.on_request_failed(future, [])

    def _notify(self, future: Future) -> None:
        if self._unnotified is None:
            super()._notify(future)
        else:
            self._unnotified.append(future)

    def _find_cause(self, error: CudaError) -> BaseException:
        """The device's fault if the driver reports one (it is then marked as lost), else the error.

        A library that is called while another worker's kernel faults may return any status: cublasLtCreate returns
        NOT_INITIALIZED. So the stream is queried.
        """
        status, function = error.status, error.function
        if not error.sticky:
            status, function = driver.cuStreamQuery.unchecked(self.executor.stream.c_handle), "cuStreamQuery"
        if not status or status == NOT_READY:
            return error
        try:
            self.device.fail(status, function)
        except DispatchError as fault:
            return fault
        except CudaError:
            return error

    def _order_after(self, queue: QueueLike) -> None:
        other = queue.worker
        if other is not None and other.executor is not None:
            with Storage.ordering:  # else its stream could be destroyed before the wait, if that worker ends
                self.executor.stream.wait_for(other.executor.stream)

    def _record(self, batch: Batch) -> None:
        if not batch.futures:
            self.batches.pop()
            self.completion.recycle(batch.event)
            return
        status = self._record_event(batch.event, self.executor.stream.c_handle)
        if status:
            self.device.fail(status, "cuEventRecord")
        batch.recorded = True
        self.queue.busy += len(batch.futures)
        self.completion.watch(batch)

    def _poll(self) -> bool:
        """Settle the oldest batch if the GPU has finished it; returns whether it has."""
        batch = self.batches[0]
        if not self.completion.ended(batch):
            return False
        self.batches.popleft()
        self.completion.recycle(batch.event)
        self._succeed(batch)
        return True

    def _succeed(self, batch: Batch) -> None:
        queue = self.queue
        queue.done += len(batch.futures)
        if batch.recorded:
            queue.busy -= len(batch.futures)
        for future in batch.futures:
            future._status = DONE
            if future._wait_list is not None:
                self._notify(future)

    def _pause(self) -> None:
        """Wait for the batches in flight and, if there is room, for new requests."""
        self.completion.pause(self.batches, full=self.queue.busy >= IN_FLIGHT)

    def _settle_batches(self) -> None:
        if self._stream is None or not self.batches:
            return
        self._stream.synchronize()
        for batch in self.batches:
            self._succeed(batch)
            batch.futures.clear()
            batch.requests.clear()
        while self.batches and self.batches[0].recorded:  # one that is not recorded is being filled, and goes on empty
            self.completion.recycle(self.batches.popleft().event)

    def _close(self) -> None:
        self._inline_runner.enter()  # permanently
        try:
            self._settle_batches()
        finally:
            fault = self.device.fault
            for batch in self.batches:  # some are left only if synchronizing the stream failed
                for future in batch.futures:
                    self._fail(future, clone_error(fault or self.owner.reason()))
            self.batches.clear()
            self.queue.busy = 0
            if self.completion is not None:
                self.completion.close()
            super()._close()
        if self._stream is not None and self.device.fault is None:
            self._stream.close()
