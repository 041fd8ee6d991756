"""RemoteSeat: a worker's place in the parent, whose worker is a thread of the child.

Who submits sends, and who waits reads: waking a remote seat sends what is queued, as far as the child has room, and
attending it reads what the child reports, so that no thread of the parent is in the way. Where nobody waits the crew's
warden reads. Nothing here decides about restarts.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.errors import BadRequest
from dispatch.future import DONE, FAILED, MISSED, LateFuture, TimedFuture
from dispatch.isolate import wire
from dispatch.isolate.recovery import Sent, written
from dispatch.request import Request
from dispatch.seat import CANCELLING, Seat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.errors import DispatchError
    from dispatch.future import Future
    from dispatch.isolate.crew import ProcessCrew
    from dispatch.isolate.wire import Link
    from dispatch.request import Operands

__all__ = ["RemoteSeat", "Wired"]

Waits = tuple[tuple[int, int], ...]

WINDOW = 256  # requests that a worker of the child may have at once
BATCH = 128  # in one message
MESSAGE_BYTES = 1 << 16  # after which a message is closed
FEW = 4  # requests in flight at all workers: with more one who waits reads nothing, as it would only be in the way
# At the connection by one who waits, before it sleeps: some 120 us, in which a small request has ended, one of many in
# turn, too. With 60 looks those took 110 to 160 us on the host, with 120 or 200 of them 100.
LOOKS = 150
NAP = 0.05  # seconds that it then waits for a report, before it leaves the reading to the warden
PATIENT = 16  # requests: with so many in flight, fewer than that wait for company, for the child has enough to do


def _waits(future: LateFuture) -> Waits:
    """What a future waits for that has not ended, by worker and number: the child has been sent it, or will be."""
    return tuple((other._seat.index, other._number) for other in future.after if not other._status)


def _places(outputs: Operands) -> tuple[Any, ...]:
    return tuple(tuple(tensor.storage.keep) for tensor in outputs.values())


class Wired:
    """What a request keeps of its way to a child (`Request.bound`): its name there, and what it is packed as.

    `plans` and `lane` are what a lane and a supervisor look for in what they keep there themselves.
    """

    __slots__ = ("crew", "data", "lane", "missing", "name", "plans", "result")

    def __init__(self, crew: ProcessCrew, request: Request, seat: RemoteSeat) -> None:
        self.crew, self.lane, self.plans = crew, seat, None
        self.name = next(crew.names)
        self.data = wire.pack_request(request, crew.device)
        self.missing = request.missing()  # a request is frozen: asking it once is enough
        self.result = None if self.missing else request.result({})

    def __del__(self) -> None:
        for seat in self.crew.seats:
            if self.name in seat.defined:
                seat.forget.append(self.name)


class RemoteSeat(Seat):
    """A place whose worker is in the child.

    Guarantees: `sent` holds every request that the child was given and has not reported on, in order. Only who holds
    `pumping` sends; who does not get it leaves that to the holder, who looks at the queue again after letting go. Only
    who holds `reading` reads and settles, but for the warden while there is no `link`.
    """

    __slots__ = ("crew", "defined", "forget", "link", "pumping", "reading", "sent", "since")

    def __init__(self, index: int, limit: int, crew: ProcessCrew) -> None:
        super().__init__(index, limit)
        self.crew = crew
        self.link: Link | None = None  # None while there is no child
        self.sent: dict[int, Sent] = {}
        self.defined: set[int] = set()  # names of requests that the present child's worker knows
        self.forget: list[int] = []
        self.pumping = threading.Lock()
        self.reading = threading.Lock()
        self.since = 0.0  # when the child's worker began with the oldest of `sent`, at the earliest
        self.asleep = True

    def wake(self) -> None:
        """Send what is queued, as far as the child has room."""
        while self.pumping.acquire(False):
            self.asleep = False
            try:
                is_sent = self._send()
            finally:
                self.asleep = True
                self.pumping.release()
            if is_sent and self.crew.holding:
                self.crew.launched()
            if not self.items or not self._has_room():
                return

    def _has_room(self) -> bool:
        if self.link is None or self.crew.ending >= CANCELLING:
            return False
        flying = len(self.sent)
        return flying < WINDOW and (flying < PATIENT or len(self.items) >= PATIENT)

    def _send(self) -> bool:
        is_sent = False
        while self.items and self._has_room():
            message: list[Any] = []
            size = 0
            if self.forget:
                names, self.forget = self.forget, []
                self.defined.difference_update(names)
                message.append((wire.FORGET, names))
            for _ in range(min(len(self.items), BATCH, WINDOW - len(self.sent))):
                size += self._add(message)
                if size > MESSAGE_BYTES:
                    break
            if message and self.link is not None:
                is_sent = True
                try:
                    self.link.send(message)
                except OSError:  # the child is gone: the warden sees it, and deals with what was sent
                    return True
        return is_sent

    def _add(self, message: list[Any]) -> int:
        """Take the next request from the queue into a message; returns about how many bytes that adds."""
        try:
            future = self.items.popleft()
        except IndexError:  # cancelled by another thread meanwhile
            return 0
        request = future.claim()
        if request is MISSED:
            self.cancelled += 1
            return 0
        try:
            waits: Waits = ()
            if isinstance(future, LateFuture):
                waits = _waits(future)
                refusal = future.refusal()  # after `_waits`: what it did not find has ended by now
                if refusal is not None:
                    raise refusal
            return self._entry(future, request, message, waits)
        except BaseException as error:  # noqa: BLE001  # a value until it is delivered
            self.fail(future, error)
            return 0

    def _entry(self, future: Future, request: Any, message: list[Any], waits: Waits) -> int:
        crew = self.crew
        wired = getattr(request, "bound", None)
        if type(wired) is not Wired or wired.crew is not crew:
            wired = self._wire(request)
        refusal = crew.device.refusal(request) if crew.device.taints else None
        if refusal is not None:
            raise refusal
        outputs: Operands = {}
        if wired.missing:
            lane = crew.device.lane()
            outputs = {name: lane.empty(*made) for name, made in wired.missing.items()}
        size = 32
        if wired.name not in self.defined:
            message.append((wire.DEFINE, wired.name, wired.data))
            self.defined.add(wired.name)
            size += len(wired.data)
        future._number = number = next(crew.numbers)
        if outputs or waits:
            message.append((number, wired.name, _places(outputs), waits))
        else:
            message.append((number, wired.name))
        future._value = request.result(outputs) if outputs else wired.result
        if not self.sent:
            self.since = monotonic()
        self.sent[number] = Sent(number, future, request, outputs, self)
        self.busy = len(self.sent)
        if isinstance(future, TimedFuture):
            crew.watch_deadline(future, number, self)
        return size

    def _wire(self, request: Any) -> Wired:
        if not isinstance(request, Request):
            hint = "such as dispatch.MatmulRequest(a=a, b=b)"
            raise BadRequest("request", type(request).__name__, "a dispatch.Request", hint)
        wired = Wired(self.crew, request, self)
        object.__setattr__(request, "bound", wired)
        return wired

    def again(self, link: Link, requests: Iterable[Sent]) -> None:
        """Send requests once more, to a child that may know nothing of them. OSError where it is gone."""
        message: list[Any] = []
        for sent in requests:
            wired = sent.request.bound
            if wired.name not in self.defined:
                message.append((wire.DEFINE, wired.name, wired.data))
                self.defined.add(wired.name)
            waits = _waits(sent.future) if isinstance(sent.future, LateFuture) else ()
            message.append((sent.number, wired.name, _places(sent.outputs), waits))
        if message:
            self.since = monotonic()
            link.send(message)

    def resume(self, link: Link) -> None:
        """Send to a new child: what its predecessor had and did not end, and what is queued."""
        with self.pumping:
            with suppress(OSError):  # the warden sees that the child is gone, and recovers once more
                self.again(link, self.sent.values())
            self.link = link
        self.wake()

    def refusal(self, sent: Sent) -> DispatchError | None:
        """Why a request must not run again, if so: what it reads, or waits for, came to harm."""
        future = sent.future
        error: DispatchError | None = future.orphaned() if isinstance(future, LateFuture) else None
        if error is None and self.crew.device.taints:
            error = self.crew.device.refusal(sent.request)
        return error

    def in_hand(self) -> list[Future]:
        return [sent.future for sent in list(self.sent.values())]

    # -- reports ------------------------------------------------------------------------------------------------------
    def attend(self, future: Future, timeout: float | None) -> float | None:
        """Read what the child reports until a future has ended, if nobody else does; returns what is left of the time.

        The one who waits then hears of the end from the child, not from the warden: one change of threads less.
        """
        link = self.link
        crew = self.crew
        if link is None or crew.hush or sum(len(seat.sent) for seat in crew.seats) > FEW:
            return timeout
        if not self.reading.acquire(False):
            return timeout
        began = monotonic()
        crew.listen(link, False)
        try:
            looks = 0
            while not (future._status or crew.hush) and self.link is link:
                if self.take(link):
                    looks = 0
                    continue
                looks += 1
                if looks > LOOKS:
                    left = NAP if timeout is None else min(NAP, began + timeout - monotonic())
                    if left <= 0 or not wire.ready([link.socket], left):
                        break
            while link.pending:  # nothing would tell the warden of what has been read from the socket
                self.take(link)
        except (EOFError, OSError):
            pass  # the warden sees it, too
        finally:
            if link.pending:  # an interrupt has left it
                crew.ring()
            crew.listen(link, True)
            self.reading.release()
        return None if timeout is None else timeout - (monotonic() - began)

    def take(self, link: Link) -> bool:
        """Settle what one message reports, and send more; False where none has come. EOFError where none ever will."""
        message = link.peek(wait=False)
        if message is None:
            return False
        try:
            self.report(message)
        except BaseException:  # Ctrl-C in the middle, on a main thread that waits: what it left undone is done first
            self.report(message)
            link.advance()
            raise
        link.advance()
        if self.items:
            self.wake()
            if self.crew.blocked and len(self.items) <= self.limit // 2:
                self.crew.make_room()
        return True

    def report(self, message: list[Any]) -> None:
        """End what the child's worker says has ended: a number for each success, with an error for each failure.

        A second call with the same message does what an interrupted first one did not.
        """
        device = self.crew.device
        sents = self.sent
        for item in message:
            if type(item) is int:
                sent = sents.get(item)
                if sent is None:  # its deadline was over, and it has failed with that
                    continue
                future = sent.future
                if not future._status:
                    if device.taints:
                        for tensor in written(sent):
                            device.overwritten(tensor)
                    self.done += 1
                    if isinstance(future, LateFuture):
                        future.after = ()
                    future._status = DONE
                if future._waiting is not None:
                    errors = future._waiting.tell(future)
                    if errors:
                        self.crew.callbacks_failed(errors)
                del sents[item]
            else:
                sent = sents.get(item[0])
                if sent is not None:
                    if not sent.future._status:
                        self.fail(sent.future, wire.error_from(item[1]))
                    del sents[item[0]]
        self.busy = len(sents)
        self.since = monotonic()

    def fail(self, future: Future, error: BaseException) -> None:
        self.failed += 1
        self.crew.failed(future, future.settle(FAILED, error))
