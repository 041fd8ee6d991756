"""Sending: how requests of a queue get to the child: named and packed once, taken in order, sent as its window allows.

Who submits sends, so that no thread of the parent is in the way; remote_queue.py adds what comes back. Main threads go
through here, and Ctrl-C may come between any two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.core.request import Request
from dispatch.errors import BadRequest
from dispatch.supervise.future import CANCELLED, MISSED, LateFuture, TimedFuture
from dispatch.supervise.process import messages as wire
from dispatch.supervise.process.repeatable import Sent
from dispatch.supervise.queue import CANCELLING, WorkerQueue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.core.request import Operands
    from dispatch.errors import DispatchError
    from dispatch.supervise.future import Future
    from dispatch.supervise.process.messages import Connection
    from dispatch.supervise.process.owner import QueueOwner

__all__ = ["NOW", "SendingSeat", "SentRequest"]

Waits = tuple[tuple[int, int], ...]

WINDOW = 256  # requests that a worker of the child may have at once
BATCH = 128  # in one message
MESSAGE_BYTES = 1 << 16  # after which a message is closed
TAKEN = object()  # in the place of a request that has been; None may be what somebody submits by mistake
NOW = (False,)  # for `map`: acquire at once or not at all
PATIENT = 16  # requests: with so many in flight, fewer than that wait for company, for the child has enough to do


def _waits(future: LateFuture) -> Waits:
    """What a future waits for that has not ended, by worker and number: the child has been sent it, or will be."""
    return tuple((other._seat.index, other._number) for other in future.after if not other._status)


def _places(outputs: Operands) -> tuple[Any, ...]:
    return tuple(tuple(tensor.storage.keep) for tensor in outputs.values())


class SentRequest:
    """What a request keeps of its way to a child (`Request.bound`): its name there, and what it is packed as.

    `plans` and `executor` are what an executor and a supervisor look for in what they keep there themselves.
    """

    __slots__ = ("crew", "data", "executor", "missing", "name", "plans", "result")

    def __init__(self, crew: QueueOwner, request: Request, seat: SendingSeat) -> None:
        self.crew, self.executor, self.plans, self.name = crew, seat, None, 0
        self.name = next(crew.names)
        self.data = wire.pack_request(request, crew.device)
        self.missing = request.missing()  # a request is frozen: asking it once is enough
        self.result = None if self.missing else request.result({})

    def __del__(self) -> None:
        for seat in self.crew.seats:
            if self.name in seat.defined:
                seat.forget.append(self.name)


class SendingSeat(WorkerQueue):
    """A place whose worker is in a child, as far as requests go to it.

    Guarantees: `sent` holds every request that the child was given and has not reported on, in order. Only who holds
    `pumping` sends; who does not get it leaves that to the holder, who looks at the queue again after letting go.
    Whoever holds it may be interrupted anywhere (Ctrl-C on a main thread), and lets go of it at once. What it was about
    is found by the next who holds it, who goes on there: a request that is being taken stands in `taking` until it is
    in `sent`; one in `sent` that is in no frame yet in `unframed`; a frame in `link.out` until the socket has it.
    """

    __slots__ = ("crew", "defined", "forget", "link", "pumping", "sent", "since", "taking", "unframed", "untold")

    def __init__(self, index: int, limit: int, crew: QueueOwner) -> None:
        super().__init__(index, limit)
        self.crew = crew
        self.link: Connection | None = None  # None while there is no child
        self.sent: dict[int, Sent] = {}
        self.taking: tuple[Future, Any] | None = None  # the request that is being taken from the queue
        self.unframed: list[Sent] = []
        self.untold: deque[Future] = deque()  # those that have ended, of which the monitor thread is to tell
        self.defined: set[int] = set()  # names of requests that the present child's worker knows
        self.forget: list[int] = []
        self.pumping = threading.Lock()
        self.since = 0.0  # when the child's worker began with the oldest of `sent`, at the earliest
        self.asleep = True

    def fail(self, future: Future, error: BaseException) -> None:
        """End a request that was claimed."""
        raise NotImplementedError

    def tell(self, future: Future) -> list[BaseException]:
        """Tell those who wait for a future that has ended."""
        raise NotImplementedError

    def expect(self, future: Future) -> None:
        if isinstance(future, TimedFuture) and not hasattr(future, "_number"):  # else the child has it, or soon will
            self.crew.watch_deadline(future, self)

    def expire(self, future: TimedFuture) -> bool:
        """End one that its deadline finds in the queue; whether that came in time."""
        self.crew.keep(future)
        is_mine, errors = future.withdraw(future.refusal())
        with suppress(ValueError):
            self.items.remove(future)
        if is_mine:
            self.failed += 1
            self.crew.failed(future, errors)
        return is_mine

    def wake(self) -> None:
        """Send what is queued, as far as the child has room."""
        while True:
            try:
                is_sent = self._send_alone()
            except BaseException:
                self.crew.ring()  # the monitor thread goes on
                raise
            if is_sent is None:
                return
            if is_sent and self.crew.holding:
                self.crew.launched()
            if self.crew.blocked and len(self.items) <= self.limit // 2:
                self.crew.make_room()
            if not (self.items or self.taking) or not self._has_room():
                return

    def _send_alone(self) -> bool | None:
        """As `_send`; None where another thread is about it."""
        held: list[bool] = []
        try:
            held.extend(map(self.pumping.acquire, NOW))  # one step: nothing can come between having it and knowing
            if True not in held:
                return None
            self.asleep = False
            return self._send()
        finally:
            if True in held:
                self.asleep = True
                self.pumping.release()

    def _has_room(self) -> bool:
        link = self.link
        if link is None or link.out is not link.flushed or self.crew.ending >= CANCELLING:
            return False
        flying = len(self.sent)
        return flying < WINDOW and (flying < PATIENT or len(self.items) >= PATIENT)

    def _send(self) -> bool:
        is_sent = False
        link = self.link
        try:
            while link is not None and (link.out is link.flushed or link.flush()):
                if not self.unframed and not ((self.items or self.taking) and self._has_room()):
                    break
                self._take_some()
                if self._frame(link):
                    is_sent = True
        except OSError:  # the child is gone: the monitor thread sees it, and deals with what was sent
            return True
        if link is not None and link.out is not link.flushed:
            self.crew.ring()  # which has it go on when there is room
        return is_sent

    def _take_some(self) -> None:
        """Move requests from the queue to `sent`, as many as make a message."""
        size = 0
        for _ in range(min(len(self.items) + 1, BATCH, WINDOW - len(self.sent))):
            size += self._take_next()
            if size > MESSAGE_BYTES or not self.items:
                break

    def _take_next(self) -> int:
        """Take the next request from the queue; returns about how many bytes that adds to a message."""
        taking = self.taking
        if taking is None:
            items = self.items
            try:
                future = items[0] if type(items) is deque else items.first()  # type: ignore[union-attr]
            except IndexError:  # dropped by another thread meanwhile, or it may not start yet
                return 0
            taking = (future, future.unclaimed_request())
            self.taking = taking
        elif self._is_taken(taking[0]):  # an interrupted thread had come to the end of it
            taking = (taking[0], TAKEN)
            if taking[0]._status:  # but it may not have told all of that
                self.crew.callbacks_failed(self.tell(taking[0]))
        future, request = taking
        size = 0
        if request is MISSED or (request is not TAKEN and not future.claim_again()):
            future.claim()  # which ends what was withdrawn, if that is not done
            self.cancelled += future._status == CANCELLED
        elif request is not TAKEN:
            size = self._enter(future, request)
        self._leave_queue(future)
        self.taking = None
        return size

    def _is_taken(self, future: Future) -> bool:
        """Whether one that was being taken is in `sent`, or has ended otherwise than by being withdrawn."""
        return getattr(future, "_number", None) in self.sent or (future._status != 0 and future.claim_again())

    def _leave_queue(self, future: Future) -> None:
        items = self.items
        if type(items) is deque and items and items[0] is future:
            items.popleft()  # only who holds `pumping` takes out what is claimed
            return
        with suppress(ValueError):
            items.remove(future)

    def _enter(self, future: Future, request: Any) -> int:
        """Put a request that was claimed into `sent`, or end it; returns about how many bytes it adds to a message."""
        try:
            waits: Waits = ()
            if isinstance(future, LateFuture):
                waits = _waits(future)
                refusal = future.refusal()  # after `_waits`: what it did not find has ended by now
                if refusal is not None:
                    raise refusal
            return self._enter_sent(future, request, waits)
        except Exception as error:  # noqa: BLE001  # a value until it is delivered
            self.fail(future, error)
        except BaseException as error:
            if threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C is not the request's: whoever comes next goes on with it
            self.fail(future, error)
        return 0

    def _enter_sent(self, future: Future, request: Any, waits: Waits) -> int:
        crew = self.crew
        wired = getattr(request, "bound", None)
        if type(wired) is not SentRequest or wired.crew is not crew:
            wired = self._wire(request)
        refusal = crew.device.refusal(request) if crew.device.taints else None
        if refusal is not None:
            raise refusal
        outputs: Operands = {}
        if wired.missing:
            executor = crew.device.executor()
            outputs = {name: executor.empty(*made) for name, made in wired.missing.items()}
        value = request.result(outputs) if outputs else wired.result
        size = 32 if wired.name in self.defined else 32 + len(wired.data)
        sent = Sent(next(crew.numbers), future, request, outputs, self, waits, wired)
        self.unframed.append(sent)
        if not self.sent:
            self.since = monotonic()
        future._number = sent.number
        future._value = value  # behind its number: who sees it launched may wait for that (`_waits`)
        self.sent[sent.number] = sent
        self.busy = len(self.sent)
        return size

    def _frame(self, link: Connection) -> bool:
        """Make the next message of what is in `sent` and in none yet; whether there is one."""
        last, sents, forget = link.out.last, self.sent, self.forget
        fresh = [sent for sent in self.unframed if sent.number > last and sent.number in sents]
        if fresh:
            message: list[Any] = []
            names = forget.copy() if forget else ()
            if names:
                message.append((wire.FORGET, names))
            defined = self._entries(fresh, message)
            for sent in fresh:
                if isinstance(sent.future, TimedFuture):
                    self.crew.watch_deadline(sent.future, self)
            link.put(message, fresh[-1].number)
            if defined:
                self.defined |= defined
            if names:
                self.defined.difference_update(names)
                del forget[: len(names)]
        self.unframed.clear()
        return bool(fresh)

    def _entries(self, requests: Iterable[Sent], message: list[Any]) -> set[int]:
        """Add requests to a message, and those definitions that the child lacks, whose names are returned."""
        defined: set[int] = set()
        for sent in requests:
            wired = sent.wired
            if wired.name not in self.defined and wired.name not in defined:
                message.append((wire.DEFINE, wired.name, wired.data))
                defined.add(wired.name)
            if sent.outputs or sent.waits:
                message.append((sent.number, wired.name, _places(sent.outputs), sent.waits))
            else:
                message.append((sent.number, wired.name))
        return defined

    def _wire(self, request: Any) -> SentRequest:
        if not isinstance(request, Request):
            hint = "such as dispatch.MatmulRequest(a=a, b=b)"
            raise BadRequest("request", type(request).__name__, "a dispatch.Request", hint)
        wired = SentRequest(self.crew, request, self)
        object.__setattr__(request, "bound", wired)
        return wired

    def again(self, link: Connection, requests: Iterable[Sent]) -> None:
        """Send requests once more, to a child that may know nothing of them. OSError where it is gone."""
        message: list[Any] = []
        requests = [
            sent._replace(waits=_waits(sent.future) if isinstance(sent.future, LateFuture) else ()) for sent in requests
        ]
        if requests:
            self.defined |= self._entries(requests, message)
            self.since = monotonic()
            link.put(message, max(link.out.last, requests[-1].number))
            link.flush()

    def resume(self, link: Connection) -> None:
        """Send to a new child: what its predecessor had and did not end, and what is queued."""
        with self.pumping:
            with suppress(OSError):  # the monitor thread sees that the child is gone, and recovers once more
                self.again(link, self.sent.values())
            self.link = link
        self.wake()

    def give_back(self) -> None:
        """End the request that an interrupted thread was taking, once nothing is sent any more."""
        if self.taking is None:
            return
        future, _ = self.taking
        if not future._status and getattr(future, "_number", None) not in self.sent and future.claim_again():
            self.fail(future, self.crew.reason())
        self._leave_queue(future)
        self.taking = None

    def refusal(self, sent: Sent) -> DispatchError | None:
        """Why a request must not run again, if so: what it reads, or waits for, came to harm."""
        future = sent.future
        error: DispatchError | None = future.orphaned() if isinstance(future, LateFuture) else None
        if error is None and self.crew.device.taints:
            error = self.crew.device.refusal(sent.request)
        return error

    def in_hand(self) -> list[Future]:
        taking = [] if self.taking is None else [self.taking[0]]
        return [sent.future for sent in list(self.sent.values())] + taking
