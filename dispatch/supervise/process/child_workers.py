"""A child's workers: those of a thread, which take orders from a connection and report on it.

`child_main.py` starts one for each stream. A worker reads requests, runs them as a supervisor's worker in the parent
would, and writes back which ended, in the order in which they came.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.request import Request
from dispatch.supervise import trace
from dispatch.supervise.batch import Batch
from dispatch.supervise.cuda_worker import IN_FLIGHT, CudaWorker
from dispatch.supervise.host_worker import HostWorker
from dispatch.supervise.process import messages as wire
from dispatch.supervise.process.child_jobs import JobRunner, Order

if TYPE_CHECKING:
    import ctypes

__all__ = ["CudaChild", "HostChild"]

REPORT_SECONDS = 200e-6  # on the host, what has ended is reported after so long at the latest


class HostChild(JobRunner, HostWorker):
    """Runs orders on the host."""

    _running = 0

    def _open(self) -> None:
        super()._open()
        self._report: list[Any] = []

    def _serve(self) -> None:
        link, report = self.seat.link, self._report
        told = perf_counter()
        while True:
            if not self.orders:
                if report:
                    link.send(report)
                    report.clear()
                self.orders.extend(link.receive() or ())
                told = perf_counter()
            if len(self.orders[0]) > 3 and not self.may_go_on():
                self._settle()
                self.seat.nap(-1)
                continue
            number = self.orders[0][0]
            found = self.order()
            if found is None:
                if number > 0:
                    self._pass(number)
                continue
            order, request = found
            self._running = order.number
            try:
                self.run(order, request)
                ran = True
            except BaseException as error:  # noqa: BLE001  # a value until it is delivered
                ran = self._rescue(order, request, error)  # type: ignore[arg-type]  # an order is to it what a future is
            if ran:
                report.append(order.number)
            self._pass(number)
            if perf_counter() - told > REPORT_SECONDS:
                link.send(report)
                report.clear()
                told = perf_counter()

    def begun(self) -> list[int]:
        return [self._running]

    def _fail(self, future: Any, error: BaseException) -> None:
        self._note(future.number, error)
        self._report.append((future.number, wire.pack_error(error)))

    def _settle(self) -> None:
        if self._report:
            self.seat.link.send(self._report)
            self._report.clear()


class ChildBatch(Batch):
    """A flight of orders, by their numbers, that knows what to report of it."""

    __slots__ = ("report",)
    futures: list[Any]

    def __init__(self, event: ctypes.c_void_p) -> None:
        super().__init__(event)
        self.report: list[Any] = []


class CudaChild(JobRunner, CudaWorker):
    """Runs orders on a stream of a GPU."""

    _running = _last = 0

    def _open(self) -> None:
        super()._open()
        if self.keeper.completion != "callback":
            # At most WINDOW requests are here, and no Python runs on the stream. The other workers wait for the lock
            # while this one enqueues: one that gets it between two launches costs more than both.
            self.executor.holding = True
            self._record_event = driver.cuEventRecord.unchecked_holding_gil

    def begun(self) -> list[int]:
        # `_running` first: what is appended between the two looks is then in one of them at least.
        return [self._running, *self.in_hand()]  # type: ignore[list-item]  # numbers, see `_take`

    def _serve(self) -> None:
        seat, link, flights = self.seat, self.seat.link, self._flights
        while True:
            moved = False
            if not self.orders and seat.busy < IN_FLIGHT:
                self.orders.extend(link.receive(wait=not flights) or ())
            if self.orders and seat.busy < IN_FLIGHT and (len(self.orders[0]) < 4 or self.may_go_on()):
                self._take()
                moved = True
            if flights and self._land():
                moved = True
            if moved:
                continue
            if flights:
                self._completion.pause(flights, full=seat.busy >= IN_FLIGHT or bool(self.orders))
            elif self.is_held:
                seat.nap(-1)

    def _take(self) -> None:
        """Enqueue what has come, and record an event behind it; `futures` of the flight are numbers here."""
        trip = ChildBatch(self._completion.event())
        self._flights.append(trip)
        self._last = 0
        with self.keeper.turn:
            while self.orders:
                if len(self.orders[0]) > 3 and not self.may_go_on():
                    break
                self._one(trip)
                if not trace.hooks:
                    self._plain(trip)
            self._record(trip)
        if self._last:
            self._pass(self._last)

    def _plain(self, trip: ChildBatch) -> None:
        """Enqueue those that are a number and a known name and no more: nearly all, so each 100 ns count here."""
        orders, known, run = self.orders, self.known, self.executor.run
        started, requests, report = trip.futures, trip.requests, trip.report
        while orders and len(orders[0]) == 2:
            number, name = orders[0]
            request = known.get(name) if number > 0 else None
            if not isinstance(request, Request):
                return
            orders.popleft()
            self._running = self._last = number
            try:
                run(request)
                ran = True
            except BaseException as error:  # noqa: BLE001  # a value until it is delivered
                ran = self._rescue(Order(number, None), request, error)  # type: ignore[arg-type]  # as on the host
            if ran:
                started.append(number)
                requests.append(request)
                report.append(number)

    def _one(self, trip: ChildBatch) -> None:
        """Deal with the next entry, whatever it is."""
        self._last = max(self._last, self.orders[0][0])
        found = self.order()
        if found is None:
            return
        order, request = found
        self._running = order.number
        try:
            self.run(order, request)
            ran = True
        except BaseException as error:  # noqa: BLE001  # a value until it is delivered
            ran = self._rescue(order, request, error)  # type: ignore[arg-type]  # as on the host
        if ran:
            trip.futures.append(order.number)
            trip.requests.append(request)
            trip.report.append(order.number)

    def _record(self, flight: Batch) -> None:
        report = flight.report  # type: ignore[attr-defined]
        super()._record(flight)
        if not flight.recorded and report:  # all failed; what was enqueued before is reported first
            if self._flights:
                self._flights[-1].report += report  # type: ignore[attr-defined]
            else:
                self.seat.link.send(report)

    def _fail(self, future: Any, error: BaseException) -> None:
        self._note(future.number, error)
        trip: Any = self._flights[-1]  # `_take` has put it there
        trip.report.append((future.number, wire.pack_error(error)))

    def _succeed(self, flight: Batch) -> None:
        report = flight.report  # type: ignore[attr-defined]
        if flight.recorded:
            self.seat.busy -= len(flight.futures)
        if report:
            self.seat.link.send(report)
            report.clear()

    def _retry(self, future: Any, request: Request) -> BaseException | None:
        if future.outputs is None:
            return super()._retry(future, request)
        return super()._retry(future, request.replace(**future.outputs))

    def _settle(self) -> None:
        self._settle_flights()
        while self._flights:  # the one that was being filled
            self._completion.recycle(self._flights.popleft().event)
        self.seat.busy = 0
