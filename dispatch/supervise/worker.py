"""Worker: one thread with its own stream, library handles and workspace, which runs what is queued for it in order.

supervisor.py makes workers and fills their queues. A worker enqueues requests, watches one event for each batch of
them, and settles their futures once the GPU is past it. It never places requests and never decides about restarts.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind.errors import CudaDriverError, CudaError
from dispatch.core.request import Request
from dispatch.device.cuda import OUT_OF_MEMORY, CudaDevice
from dispatch.device.stream import NOT_READY, current
from dispatch.device.tensor import Storage
from dispatch.errors import BadRequest, DispatchError, OutOfMemory, WorkerFailed, words
from dispatch.supervise import trace
from dispatch.supervise.completion import COMPLETIONS
from dispatch.supervise.future import CANCELLED, DONE, FAILED, MISSED, LateFuture
from dispatch.supervise.queue import CANCELLING, again

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from dispatch.device.stream import Stream
    from dispatch.supervise.future import Future
    from dispatch.supervise.priority_queue import PriorityQueue
    from dispatch.supervise.queue import WorkerOwner, WorkerQueue

__all__ = ["CudaWorker", "HostWorker", "Worker", "described"]

BATCH = 128  # requests enqueued before an event is recorded: its 0.5 us are shared, and others get their turn
IN_FLIGHT = 512  # requests on one stream; with about 1,000 the driver would block, and with it all who wait for a turn


class Worker:
    """What is common to workers on a GPU and on the host.

    Guarantees: what a worker takes from its queue it settles, also when it breaks; the future in hand then fails with
    WorkerFailed. Its executor, stream and handles are made, used and closed on its own thread.
    """

    def __init__(self, seat: WorkerQueue, keeper: WorkerOwner) -> None:
        self.seat, self.keeper, self.device = seat, keeper, keeper.device
        self.executor: Any = None
        self.successor: Worker | None = None  # one that goes on with this one's thread
        name = f"dispatch {self.device} worker {seat.index}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def in_hand(self) -> list[Future]:
        """What has been taken from the queue and not been settled."""
        return []

    # -- what differs ---------------------------------------------------------------------------------------------
    def _open(self) -> None:
        """Make the stream and the executor."""
        self.executor = self.device.executor(self.device.stream())

    def _serve(self) -> None:
        """Run requests until it is told to end."""

    def _close(self) -> None:
        """Settle what is in flight; close what `_open` made."""
        if self.executor is not None:
            self.executor.close()

    def _settle_flights(self) -> None:
        """Wait for what is in flight, so that its memory is free."""

    def _cause(self, error: CudaError) -> BaseException:
        """The fault of the device where an error comes from one, or the error."""
        return error

    # -- its life -------------------------------------------------------------------------------------------------
    def _main(self) -> None:
        defect: BaseException | None = None
        lost = False
        for step in (self._live, self._close):
            try:
                step()
            except BaseException as error:  # noqa: BLE001  # it goes to the keeper, who decides
                defect = defect or error
            lost = self.device.fault is not None
            if lost:
                self.keeper.lost()  # before any future tells of it: who hears of a fault is refused from then on
        if lost or defect is None or not self.keeper.replace(self, defect):
            self.seat.vacate(self.keeper)
        elif self.successor is not None:
            if self.executor is not None:  # it is closed: what this thread does from now on has another
                current.executors.pop(self.executor.stream, None)
            self.successor._main()

    def _live(self) -> None:
        self._open()
        self.keeper.opened(self.executor, self.seat)
        self._serve()

    # -- one request that is not as others --------------------------------------------------------------------------
    def _unusual(self, future: Future) -> Any:
        """What to run of a future without `_request`; MISSED for one that was cancelled, or must not start any more."""
        request = future.claim()
        if request is MISSED:
            self.seat.cancelled += future._status == CANCELLED
        elif isinstance(future, LateFuture):
            refusal = future.refusal()
            if refusal is not None:
                self._fail(future, refusal)
                return MISSED
            try:
                for other in future.after:
                    if not other._status and other._seat is not self.seat:
                        self._follow(other._seat)
            except BaseException as error:  # noqa: BLE001  # without that order it must not run
                self._judge(future, request, error)
                return MISSED
            future.after = ()
        return request

    def _follow(self, seat: WorkerQueue) -> None:
        """Let what is enqueued from now on run after all that another worker has enqueued; on the host it has run."""

    def _rescue(self, future: Future, request: Request, error: BaseException) -> bool:
        """Deal with what running a request raised; whether it has run after all. Raises what ends the worker."""
        error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # our frame holds the batch
        if _is_out_of_memory(error):
            retried = self._retry(future, request)
            if retried is None:
                return True
            error = retried
        self._judge(future, request, error)
        return False

    def _judge(self, future: Future, request: Request, error: BaseException) -> None:
        """Fail a request with what it raised. Raises what ends the worker."""
        if isinstance(error, CudaError):
            error = self._cause(error)
        if self.device.fault is not None:
            self.keeper.lost()
            fault = again(self.device.fault)
            self._fail(future, fault)
            raise again(fault)
        if isinstance(error, (DispatchError, CudaError)):
            self._fail(future, error)
            return
        if not isinstance(request, Request):
            hint = "such as dispatch.MatmulRequest(a=a, b=b)"
            self._fail(future, BadRequest("request", type(request).__name__, "a dispatch.Request", hint))
            return
        failure = WorkerFailed(
            f"worker {self.seat.index} of {self.device} broke on {described(request)}: {words(error)}"
        )
        failure.__cause__ = error
        self._fail(future, failure)
        raise error

    def _retry(self, future: Future, request: Request) -> BaseException | None:
        """Free what can be freed and run a request once more; returns what it failed with again."""
        self.executor.release()
        self._settle_flights()
        gc.collect()
        try:
            if isinstance(self.device, CudaDevice):
                self.device.trim()
            future._value = self.executor.run(request)
        except BaseException as error:  # noqa: BLE001  # judged by `_rescue`
            if not _is_out_of_memory(error):
                return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            short = OutOfMemory(
                f"{self.device} has not enough memory for {described(request)}, caches freed: {words(error, str)}"
            )
            short.__cause__ = error
            return short
        return None

    def _fail(self, future: Future, error: BaseException) -> None:
        self.seat.failed += 1
        self.keeper.failed(future, future.settle(FAILED, error))

    def _tell(self, future: Future) -> None:
        """Tell those who wait for a future whose status is set."""
        waiting = future._waiting
        errors = waiting.tell(future) if waiting is not None else []
        if errors:
            self.keeper.callbacks_failed(errors)


def described(request: Request) -> str:
    """A request in words; where it cannot say them, the failure that they were for must not be lost to another."""
    try:
        return request.describe()
    except Exception as error:  # noqa: BLE001
        return f"a {type(request).__name__} whose describe() raised {words(error)}"


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, CudaDriverError) and error.status == OUT_OF_MEMORY)


class HostWorker(Worker):
    """Runs requests on the host, where they are done as soon as they return."""

    def __init__(self, seat: WorkerQueue, keeper: WorkerOwner) -> None:
        super().__init__(seat, keeper)
        self._hand: Future | None = None

    def in_hand(self) -> list[Future]:
        return [] if self._hand is None else [self._hand]

    def _serve(self) -> None:
        seat, keeper = self.seat, self.keeper
        while keeper.ending < CANCELLING:
            if seat.items:
                self._take()
                if keeper.blocked and len(seat.items) <= seat.limit // 2:
                    keeper.make_room()
            elif keeper.ending and not len(seat.items):  # what may not start yet is waited for
                return
            else:
                seat.rest(-1)

    def _take(self) -> None:
        """Run the next request."""
        seat = self.seat
        try:
            future = seat.items.popleft()
        except IndexError:  # somebody has dropped it
            return
        try:
            request = future._request
            del future._request
        except AttributeError:
            request = self._unusual(future)
            if request is MISSED:
                return
        self._hand = future
        seat.busy = 1
        try:
            run = self.executor.run
            future._value = trace.hooked(self.executor, run, request) if trace.hooks else run(request)
            ran = True
        except BaseException as error:  # noqa: BLE001  # a value until it is delivered
            ran = self._rescue(future, request, error)
        finally:
            seat.busy = 0
            self._hand = None
        if ran:
            seat.done += 1
            future._status = DONE
            if future._waiting is not None:
                self._tell(future)


class Batch:
    """Requests that were enqueued one after the other, and the event behind the last of them."""

    __slots__ = ("event", "futures", "mark", "recorded", "requests")

    def __init__(self, event: ctypes.c_void_p) -> None:
        self.event = event
        self.recorded = False
        self.mark = 0  # for the completion's own use
        self.futures: list[Future] = []
        self.requests: list[
            Request
        ] = []  # they hold the operands, which other libraries may own, until the GPU is done


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

    def _follow(self, seat: WorkerQueue) -> None:
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
