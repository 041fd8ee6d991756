"""What runs in the child: a worker thread for each stream, each with a connection of its own to the parent.

`launch.py` starts it by `main`. A worker reads requests from its connection, runs them as a supervisor's worker in the
parent would, and writes back which ended, in the order in which they came. The child ends with a word on the control
connection when the device is lost, and without one when the parent is gone. It owns no memory that must survive.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch import trace
from dispatch.errors import BadRequest, DependencyFailed, DispatchError
from dispatch.isolate import wire
from dispatch.isolate.memory import AttachedCuda, AttachedHost, attached
from dispatch.request import Request
from dispatch.seat import OPEN, Seat
from dispatch.worker import IN_FLIGHT, CudaWorker, Flight, HostWorker

if TYPE_CHECKING:
    from dispatch.isolate.wire import Link
    from dispatch.request import Operands
    from dispatch.tensor import Tensor

__all__ = ["DEFINE", "FORGET", "LOST", "main"]

DEFINE, FORGET = -1, -2  # in the place of a request's number: (DEFINE, name, bytes), (FORGET, names)
LOST = 70  # the exit status of a child whose device is lost; the reason is on the control connection
REPORT_SECONDS = 200e-6  # on the host, what has ended is reported after so long at the latest
KEPT = 1024  # failures of one worker: more than can be on their way at once
PR_SET_PDEATHSIG = 1


class Order:
    """One request to run: its number, and the outputs that the parent made for it."""

    __slots__ = ("_value", "number", "outputs")

    def __init__(self, number: int, outputs: Operands | None) -> None:
        self.number, self.outputs = number, outputs


class ChildSeat(Seat):
    """A worker's place; it sleeps until something comes in, or another thread of the child wakes it."""

    __slots__ = ("bell", "link")

    def __init__(self, index: int, link: Link) -> None:
        super().__init__(index, IN_FLIGHT)
        self.link = link
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        os.eventfd_write(self.bell, 1)

    def rest(self, seconds: float) -> None:
        self._sleep([self.link.socket, self.bell], seconds)

    def nap(self, seconds: float) -> None:
        self._sleep([self.bell], seconds)

    def _sleep(self, ends: list[Any], seconds: float) -> None:
        if self.bell in select.select(ends, [], [], None if seconds < 0 else seconds)[0]:
            os.eventfd_read(self.bell)


class Station:
    """What the child's workers share: the device, and the word to the parent (seat.Keeper)."""

    def __init__(self, device: AttachedHost | AttachedCuda, control: socket.socket, completion: str) -> None:
        self.device = device
        self.ending = OPEN
        self.blocked = 0
        self.completion = completion
        self.holding = False  # whether a worker waits for another, or ever has
        self.turn = threading.Lock()
        self.workers: list[Any] = []
        self._control = control
        self._arrived = threading.Condition()

    def tell(self, *message: Any) -> None:
        """Say something on the control connection; nobody may be there to hear it."""
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            os._exit(0)

    def listen(self) -> None:
        """Map the chunks that the parent makes, and unmap those that it gives back, until it is gone."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
            if not data:
                os._exit(0)
            first, second = json.loads(data)
            if first == "drop":
                for number in second:
                    self.device.detach(number)
                for fd in fds:
                    os.close(fd)  # the parent waits for that
                continue
            with self._arrived:
                self.device.attach(first, second, fds[0])
                self._arrived.notify_all()

    def tensor(self, place: Any, *layout: Any) -> Tensor:
        """The tensor at a place, once its chunk is mapped: that comes on another connection than requests."""
        if place[0] not in self.device.chunks:
            with self._arrived:
                self._arrived.wait_for(lambda: place[0] in self.device.chunks)
        return self.device.at(place, *layout)

    def leave(self, error: BaseException) -> None:
        """The device is lost, and this process with it: say why, and which requests had begun and not ended."""
        begun = sorted(number for worker in self.workers for number in worker.begun())
        self.tell("lost", str(self.device.fault or error), wire.pack_error(error).hex(), begun)
        os._exit(LOST)  # nothing of the driver works any more, and its destructors would hang

    def opened(self, lane: Any, seat: Seat) -> None:
        """Its keeper knows the worker by its connection."""

    def failed(self, *_: Any) -> None:
        """Workers here report for themselves."""

    def launched(self) -> None:
        """A worker has gone on: wake those that may wait for that."""
        for worker in self.workers:
            if worker.is_held:
                worker.seat.wake()

    callbacks_failed = make_room = lost = failed  # nothing of it happens here

    def replace(self, worker: Any, defect: BaseException) -> bool:
        return False

    def reason(self) -> DispatchError:
        return DispatchError("a child's worker has no queue")


class _Remote:
    """What child workers add to those of a thread: orders from a connection, reports to it, and a second life.

    Guarantees: `passed` grows; all orders up to that number are enqueued (on the host: have run) or have failed. An
    order waits only for smaller numbers, so the one with the smallest of all can always go on.
    """

    seat: Any  # a ChildSeat
    keeper: Any  # the Station
    lane: Any
    device: Any
    _follow: Any  # the worker's own
    _open: Any
    _running: int
    _serve: Any

    def _main(self) -> None:
        """Serve until the parent is gone; a defect costs what was planned, a fault the process."""
        self.orders: deque[Any] = deque()
        self.passed = 0
        self.is_held = False
        self.failures: dict[int, BaseException] = {}
        self.known: dict[int, Request | BaseException] = {}
        self._open()
        while True:
            error = self._until_it_breaks()
            self._mend(error)

    def _until_it_breaks(self) -> BaseException:
        try:
            self._serve()
        except (EOFError, ConnectionError):
            os._exit(0)  # the parent is gone
        except BaseException as error:  # noqa: BLE001  # judged by `_mend`
            return error
        return EOFError()

    def _mend(self, error: BaseException) -> None:
        try:
            self._settle()
            self._pass(self._running)  # the one that broke the worker
            self.lane.forget()
        except BaseException as worse:  # noqa: BLE001
            error = worse
        if self.device.fault is not None:
            self.keeper.leave(error)
        self.keeper.tell("defect", self.seat.index, repr(error))

    def _settle(self) -> None:
        """Report all that has been run."""
        raise NotImplementedError

    def begun(self) -> list[int]:
        """The numbers of requests that have begun and of which no end is known; any thread may ask."""
        raise NotImplementedError

    def may_go_on(self) -> bool:
        """Whether the next order need not wait for another worker; that one wakes this one where it must."""
        waits = self.orders[0][3] if len(self.orders[0]) > 3 else ()
        workers, own = self.keeper.workers, self.seat.index
        for _ in range(2):  # a second look, once the others know that they are waited for
            if all(index == own or workers[index].passed >= number for index, number in waits):
                self.is_held = False
                return True
            self.is_held = self.keeper.holding = True
        return False

    def _follow_all(self, waits: tuple[tuple[int, int], ...]) -> BaseException | None:
        """Let the stream wait for others; returns what failed there, and this order with it."""
        for index, number in waits:
            other = self.keeper.workers[index]
            cause = other.failures.get(number)
            if cause is not None:
                text = f"it was not run, for a request that it was submitted to run after failed: {cause!r}"
                error = DependencyFailed(text)
                error.__cause__ = cause
                return error
            if other is not self:
                self._follow(other.seat)
        return None

    def _pass(self, number: int) -> None:
        """An order is enqueued, or has failed."""
        self.passed = number
        if self.keeper.holding:
            self.keeper.launched()

    def _note(self, number: int, error: BaseException) -> None:
        """Keep what an order failed with for those that wait for it, which were sent soon after it."""
        self.failures[number] = error
        if len(self.failures) > KEPT:
            del self.failures[next(iter(self.failures))]

    def order(self) -> tuple[Order, Request] | None:
        """The next request; None where what came was none, or one that cannot be run."""
        entry = self.orders.popleft()
        number = entry[0]
        if number == DEFINE:
            self.known[entry[1]] = self._defined(entry[2])
            return None
        if number == FORGET:
            for name in entry[1]:
                self.known.pop(name, None)
            return None
        request = self.known[entry[1]]
        order = Order(number, None)
        if isinstance(request, BaseException):
            self._fail(order, request)
            return None
        if len(entry) > 2:
            if entry[2]:
                order.outputs = self._outputs(request, entry[2])
            refusal = self._follow_all(entry[3])
            if refusal is not None:
                self._fail(order, refusal)
                return None
        return order, request

    def _defined(self, data: bytes) -> Request | BaseException:
        try:
            return wire.request_from(data, self.device, self.keeper.tensor)
        except Exception as error:  # noqa: BLE001  # a class that cannot be imported here, or anything its making raises
            hint = "its class must be importable in a new process; setup=('your.module',) is imported there first"
            return BadRequest("request", repr(error), "one that another process can rebuild", hint)

    def _fail(self, future: Any, error: BaseException) -> None:
        raise NotImplementedError

    def _outputs(self, request: Request, places: tuple[Any, ...]) -> Operands:
        missing = request.missing().items()
        return {
            name: self.keeper.tensor((*place, 0), dtype.name, shape, strides, False)
            for place, (name, (shape, strides, dtype)) in zip(places, missing, strict=True)
        }

    def run(self, order: Order, request: Request) -> None:
        if trace.hooks:
            lane, made = self.lane, order.outputs
            trace.hooked(lane, lane.run if made is None else lane.run_into, request, *([] if made is None else [made]))
        elif order.outputs is None:
            self.lane.run(request)
        else:
            self.lane.run_into(request, order.outputs)


class HostChild(_Remote, HostWorker):
    """Runs orders on the host."""

    def _open(self) -> None:
        super()._open()
        self._report: list[Any] = []
        self._running = 0

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


class Trip(Flight):
    """A flight of orders, by their numbers, that knows what to report of it."""

    __slots__ = ("report",)
    futures: list[Any]

    def __init__(self, event: ctypes.c_void_p) -> None:
        super().__init__(event)
        self.report: list[Any] = []


class CudaChild(_Remote, CudaWorker):
    """Runs orders on a stream of a GPU."""

    _running = _last = 0

    def _open(self) -> None:
        super()._open()
        if self.keeper.completion != "callback":
            # At most WINDOW requests are here, and no Python runs on the stream. The other workers wait for the lock
            # while this one enqueues: one that gets it between two launches costs more than both.
            self.lane.holding = True
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
        trip = Trip(self._completion.event())
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

    def _plain(self, trip: Trip) -> None:
        """Enqueue those that are a number and a known name and no more: nearly all, so each 100 ns count here."""
        orders, known, run = self.orders, self.known, self.lane.run
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

    def _one(self, trip: Trip) -> None:
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

    def _record(self, flight: Flight) -> None:
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

    def _succeed(self, flight: Flight) -> None:
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


def main(words: str) -> None:
    """Run as a child: `words` is JSON with device, control (fd), links (fds), setup (modules), parent (pid), started.

    `started` is the parent's time.monotonic(), which is the whole system's: what starting took is told when it is over.
    """
    config = json.loads(words)
    _die_with(config["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    control = socket.socket(fileno=config["control"])
    for module in config["setup"]:
        importlib.import_module(module)
    imported = monotonic()
    chunks, warm = _wait_for_go(control)
    going = monotonic()
    device = attached(config["device"])
    station = Station(device, control, config["completion"])
    for number, (nbytes, fd) in chunks.items():
        device.attach(number, nbytes, fd)
    kind = HostChild if device.is_host else CudaChild
    for index, fd in enumerate(config["links"]):
        seat = ChildSeat(index, wire.Link(socket.socket(fileno=fd)))
        worker = kind(seat, station)  # type: ignore[arg-type]  # a Station is a Keeper, but for its device's class
        seat.worker = worker
        station.workers.append(worker)
    if warm and not device.is_host:
        _warm(device)
    for worker in station.workers:
        worker.start()
    ready = monotonic()
    station.tell("ready", {"import": imported - config["started"], "stand by": going - imported, "open": ready - going})
    station.listen()


def _wait_for_go(control: socket.socket) -> tuple[dict[int, tuple[int, int]], bool]:
    """Wait to be needed; returns the chunks that there are by then (bytes and fd of each), and whether to warm up."""
    chunks: dict[int, tuple[int, int]] = {}
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            os._exit(0)
        first, second = json.loads(data)
        if first == "go":
            return chunks, second
        if first == "drop":
            for fd in (*(chunks.pop(number)[1] for number in second), *fds):
                os.close(fd)
        else:
            chunks[first] = (second, fds[0])


def _warm(device: Any) -> None:
    """Load what the first product would load, so that a spare child is as quick as one that has run."""
    from dispatch import MatmulRequest, run

    a = device.zeros((64, 64))
    run(MatmulRequest(a, a))
    device.synchronize()


def _die_with(parent: int) -> None:
    """Have the kernel end this process with the parent, also where this one is stopped or hangs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)
