"""CudaWorker: enqueues requests on a stream of a GPU in batches, and settles their futures once it is past them.

It watches one event for each batch; completion.py says how it waits for that.
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
from dispatch.supervise.future import DONE, FAILED, MISSED
from dispatch.supervise.queue import CANCELLING, again
from dispatch.supervise.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Request
    from dispatch.device.cuda import CudaDevice
    from dispatch.device.stream import Stream
    from dispatch.supervise.future import Future, QueueLike
    from dispatch.supervise.priority_queue import PriorityQueue
    from dispatch.supervise.queue import WorkerOwner, WorkerQueue

__all__ = ["CudaWorker"]

BATCH = 128  # requests enqueued before an event is recorded: its 0.5 us are shared, and others get their turn
IN_FLIGHT = 512  # requests on one stream; with about 1,000 the driver would block, and with it all who wait for a turn


class CudaWorker(Worker):
    """Runs requests on a stream of a GPU.

    Guarantees: a future is settled with success only after an event behind its work was seen to be complete; a status
    other than that fails it. The keeper's `turn` is held while requests are enqueued: launching gives up the
    interpreter's lock for a moment, and with several threads that would fetch it back, each launch would wait.
    """

    device: CudaDevice

    def __init__(self, seat: WorkerQueue, keeper: WorkerOwner) -> None:
        super().__init__(seat, keeper)
        self._stream: Stream | None = None
        self._flights: deque[Batch] = deque()
        self._completion: Any = None
        self._untold: deque[Future] | None = None  # what ends while this worker has the turn; None while it has not

    def in_hand(self) -> list[Future]:
        return [future for flight in self._flights for future in flight.futures]

    def _open(self) -> None:
        self.device.activate()
        # While a thread captures in the default mode, others may not even look at an event; this one may.
        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        self._stream = self.device.stream()
        self.executor = self.device.executor(self._stream)
        self._record_event = driver.cuEventRecord.unchecked
        self._completion = COMPLETIONS[self.keeper.completion](self.device, self.seat, self._stream)

    def _serve(self) -> None:
        seat, keeper, flights = self.seat, self.keeper, self._flights
        while True:
            moved = False
            if seat.items and keeper.ending < CANCELLING and seat.busy < IN_FLIGHT:
                self._take()
                moved = True
                if keeper.blocked and len(seat.items) <= seat.limit // 2:
                    keeper.make_room()
            if flights and self._land():
                moved = True
            if moved:
                continue
            if flights:
                self._pause()
            elif keeper.ending and (keeper.ending >= CANCELLING or not len(seat.items)):
                return
            else:
                seat.rest(-1)

    def _take(self) -> None:
        """Enqueue what is queued, up to a batch, and record an event behind it."""
        items, run = self.seat.items, self.executor.run
        if trace.hooks:
            run = partial(trace.hooked, self.executor, run)
        flight = Batch(self._completion.event())
        self._flights.append(flight)
        untold = self._untold = deque()
        try:
            self._enqueue(flight, items, run)
            if self.keeper.holding:
                self.keeper.launched()
        finally:  # a callback may wait for whatever it likes, and so may not keep the turn from others
            self._untold = None
            while untold:
                self._tell(untold.popleft())

    def _enqueue(self, flight: Batch, items: deque[Future] | PriorityQueue, run: Callable[[Request], Any]) -> None:
        futures, requests = flight.futures, flight.requests
        with self.keeper.turn:
            for _ in range(min(len(items), BATCH)):
                try:
                    future = items.popleft()
                    request = future._request
                    del future._request
                except AttributeError:
                    request = self._unusual(future)
                    if request is MISSED:
                        continue
                except IndexError:  # somebody has dropped it, or what is left may not start yet
                    break
                futures.append(future)
                requests.append(request)
                try:
                    future._value = run(request)
                except BaseException as error:  # noqa: BLE001  # a value until it is delivered
                    futures.pop()
                    if self._rescue(future, request, error):
                        futures.append(future)
                        requests.append(request)  # again: what was in flight may have been settled meanwhile
            self._record(flight)

    def _fail(self, future: Future, error: BaseException) -> None:
        if self._untold is None:
            super()._fail(future, error)
            return
        self.seat.failed += 1
        future._value, future._status = error, FAILED
        self._untold.append(future)
        self.keeper.failed(future, [])

    def _tell(self, future: Future) -> None:
        if self._untold is None:
            super()._tell(future)
        else:
            self._untold.append(future)

    def _cause(self, error: CudaError) -> BaseException:
        """The device's fault, which it is then marked with, where the driver tells of one; or the error.

        A library that is called while the context ends under it, by another worker's kernel, says what it likes:
        cublasLtCreate says NOT_INITIALIZED.
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

    def _follow(self, seat: QueueLike) -> None:
        other = seat.worker
        if other is not None and other.executor is not None:
            with Storage.ordering:  # or its handle may go between the look at it and the wait, where that worker ends
                self.executor.stream.wait_for(other.executor.stream)

    def _record(self, flight: Batch) -> None:
        if not flight.futures:
            self._flights.pop()
            self._completion.recycle(flight.event)
            return
        status = self._record_event(flight.event, self.executor.stream.c_handle)
        if status:
            self.device.fail(status, "cuEventRecord")
        flight.recorded = True
        self.seat.busy += len(flight.futures)
        self._completion.watch(flight)

    def _land(self) -> bool:
        """Settle the oldest batch if the GPU is past it."""
        flight = self._flights[0]
        if not self._completion.ended(flight):
            return False
        self._flights.popleft()
        self._completion.recycle(flight.event)
        self._succeed(flight)
        return True

    def _succeed(self, flight: Batch) -> None:
        seat = self.seat
        seat.done += len(flight.futures)
        if flight.recorded:
            seat.busy -= len(flight.futures)
        for future in flight.futures:
            future._status = DONE
            if future._waiting is not None:
                self._tell(future)

    def _pause(self) -> None:
        """Wait for what is in flight, and for what is queued if there is room for it."""
        self._completion.pause(self._flights, full=self.seat.busy >= IN_FLIGHT)

    def _settle_flights(self) -> None:
        if self._stream is None or not self._flights:
            return
        self._stream.synchronize()
        for flight in self._flights:
            self._succeed(flight)
            flight.futures.clear()
            flight.requests.clear()
        while self._flights and self._flights[0].recorded:  # one that is not is being filled, and goes on empty
            self._completion.recycle(self._flights.popleft().event)

    def _close(self) -> None:
        try:
            self._settle_flights()
        finally:
            fault = self.device.fault
            for flight in self._flights:  # there are any left only if the stream's status is not known to be good
                for future in flight.futures:
                    self._fail(future, again(fault or self.keeper.reason()))
            self._flights.clear()
            self.seat.busy = 0
            if self._completion is not None:
                self._completion.close()
            super()._close()
        if self._stream is not None and self.device.fault is None:
            self._stream.close()
