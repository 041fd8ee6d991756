"""SendingQueue: sends the requests of a queue to the child: pickled once, taken in order, as its window allows.

The thread that submits also sends, which saves a switch of threads; remote_queue.py adds receiving. The main thread
runs this code, and Ctrl-C may come between any two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.core.request import Request
from dispatch.errors import BadRequest
from dispatch.supervise.future import ALREADY_CLAIMED, CANCELLED, ConditionalFuture, TimedFuture
from dispatch.supervise.process import messages
from dispatch.supervise.process.repeatable import InFlightRequest
from dispatch.supervise.process.runs import Run, split_stale_runs, take_lone, take_run
from dispatch.supervise.queue import CANCELLING, WorkerQueue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.core.request import Operands
    from dispatch.errors import DispatchError
    from dispatch.supervise.future import Future
    from dispatch.supervise.process.messages import Connection
    from dispatch.supervise.process.owner import QueueOwner

__all__ = ["NONBLOCKING", "RemoteBound", "SendingQueue"]

Waits = tuple[tuple[int, int], ...]

WINDOW = 256  # requests that a worker of the child may have at once
BATCH = 128  # requests in one message
MESSAGE_BYTES = 1 << 16  # a message that has this many bytes is closed
ALREADY_TAKEN = object()  # represents a request that was taken; None may be submitted by mistake
NONBLOCKING = (False,)  # for `map`: the argument `blocking` of `acquire`
FIRST_BATCH = 32  # requests in the first message to an idle child, which starts while the rest is packed
# With MIN_IN_FLIGHT requests in flight, fewer than MIN_BATCH queued ones wait for more: the worker has work, and each
# message costs both processes as much as two requests.
MIN_IN_FLIGHT, MIN_BATCH = 4, 16


def _waits(future: ConditionalFuture) -> Waits:
    """The dependencies of a future that have not ended, as (worker, number); they were or will be sent."""
    return tuple((other._queue.index, other._number) for other in future.after if not other._status)


def _output_blocks(outputs: Operands) -> tuple[Any, ...]:
    return tuple(tuple(tensor.storage.keep) for tensor in outputs.values())


class RemoteBound:
    """The `bound` of a request that was sent to a child: its name (a number) there, and its pickled bytes.

    `plans` and `executor` exist because executors and supervisors look for them in any request's `bound`.
    """

    __slots__ = ("data", "executor", "name", "plans", "pool", "result", "unallocated")

    def __init__(self, pool: QueueOwner, request: Request, queue: SendingQueue) -> None:
        self.pool, self.executor, self.plans, self.name = pool, queue, None, 0
        self.name = next(pool.names)
        self.data = messages.pack_request(request, pool.device)
        self.unallocated = request.unallocated()  # does not change: a request is frozen
        self.result = None if self.unallocated else request.result({})

    def __del__(self) -> None:
        if not hasattr(self, "name"):  # __init__ was interrupted
            return
        for queue in self.pool.queues:
            if self.name in queue.defined:
                queue.forget.append(self.name)


class SendingQueue(WorkerQueue):
    """The sending half of the queue of a worker in a child.

    Guarantees: `sent` has every request that the child was given and has not reported on, in order. Only the thread
    that holds `send_lock` sends; a thread that does not get it leaves sending to the holder, which checks the queue
    again after releasing the lock. The holder may be interrupted anywhere (Ctrl-C on the main thread), and then
    releases the lock at once; the next holder goes on from there. For that, requests being taken are in `taken` until
    they are in `sent`, those in `sent` but in no frame yet are in `unframed`, and a frame is in `link.outgoing` until
    the socket has it.
    """

    __slots__ = (
        "defined",
        "forget",
        "link",
        "pool",
        "send_lock",
        "sent",
        "since",
        "taken",
        "unframed",
        "unnotified",
    )

    def __init__(self, index: int, limit: int, pool: QueueOwner) -> None:
        super().__init__(index, limit)
        self.pool = pool
        self.link: Connection | None = None  # None while there is no child
        self.sent: dict[int, InFlightRequest] = {}
        self.taken: deque[tuple[Future, Any]] = deque()  # being taken from the queue, one after the other
        self.unframed: list[InFlightRequest | Run] = []
        self.unnotified: deque[Future] = deque()  # futures that have ended, whose waiters the monitor thread must wake
        self.defined: set[int] = set()  # names of requests that the present child's worker knows
        self.forget: list[int] = []
        self.send_lock = threading.Lock()
        self.since = 0.0  # the earliest time at which the child's worker may have started the oldest of `sent`
        self.asleep = True

    def fail(self, future: Future, error: BaseException) -> None:
        """End a request that was claimed."""
        raise NotImplementedError

    def notify(self, future: Future) -> list[BaseException]:
        """Wake the waiters of a future that has ended; returns errors of callbacks."""
        raise NotImplementedError

    def watch_deadline(self, future: Future) -> None:
        if isinstance(future, TimedFuture) and not hasattr(future, "_number"):  # else it was sent, or is about to be
            self.pool.watch_deadline(future, self)

    def expire(self, future: TimedFuture) -> bool:
        """Fail a queued request whose deadline is over; returns False if it was taken meanwhile."""
        self.pool.keep(future)
        is_mine, errors = future.withdraw(future.refusal())
        with suppress(ValueError):
            self.pending.remove(future)
        if is_mine:
            self.failed += 1
            self.pool.on_request_failed(future, errors)
        return is_mine

    def wake(self) -> None:
        """Send queued requests, as far as the child has room."""
        if len(self.sent) >= MIN_IN_FLIGHT and len(self.pending) < MIN_BATCH and self._is_at_rest():
            return  # as below, but three times as fast; the thread that reads the next report checks the queue
        while True:
            try:
                is_sent = self._send_alone()
            except BaseException:
                self.pool.wake_monitor()  # the monitor thread continues
                raise
            if is_sent is None:
                return
            if is_sent and self.pool.ordered:
                self.pool.on_enqueued()
            if self.pool.blocked and len(self.pending) <= self.limit // 2:
                self.pool.make_room()
            if not (self.pending or self.taken) or not self._has_room():
                return

    def _is_at_rest(self) -> bool:
        """Whether no thread has left anything half done, because of an interrupt or a full socket."""
        link = self.link
        return link is not None and link.outgoing is link.flushed and not self.taken and not self.unframed

    def _send_alone(self) -> bool | None:
        """As `_send`; None if another thread is sending."""
        held: list[bool] = []
        try:
            held.extend(
                map(self.send_lock.acquire, NONBLOCKING)
            )  # atomic: no interrupt between acquiring and recording it
            if True not in held:
                return None
            self.asleep = False
            return self._send()
        finally:
            if True in held:
                self.asleep = True
                self.send_lock.release()

    def _has_room(self) -> bool:
        link = self.link
        if link is None or link.outgoing is not link.flushed or self.pool.state >= CANCELLING:
            return False
        count = len(self.sent)
        return count < WINDOW and (count < MIN_IN_FLIGHT or len(self.pending) >= MIN_BATCH)

    def _send(self) -> bool:
        """Send what the child has room for; returns whether requests of other workers may follow what was sent."""
        is_sent = False
        link = self.link
        try:
            if link is not None and link.mailbox is not None and link.outgoing is link.flushed and self._has_room():
                take_lone(self, link.mailbox)
            while link is not None and (link.outgoing is link.flushed or link.flush()):
                if not self.unframed and not ((self.pending or self.taken) and self._has_room()):
                    break
                if not self.unframed:
                    self._take_some(link)
                if self._frame(link):
                    is_sent = True
        except OSError:
            # The child has ended: the monitor thread will notice, and handle the sent requests. Other workers must not
            # be woken: they would find the same, and wake this one again, for ever.
            return False
        if link is not None and link.outgoing is not link.flushed:
            self.pool.wake_monitor()  # the monitor thread continues once there is room
        return is_sent

    def _take_some(self, link: Connection) -> None:
        """Move requests from the queue to `sent`, as many as fit into a message."""
        size = 0
        count = min(len(self.pending) + 1, BATCH, WINDOW - len(self.sent))
        if count > FIRST_BATCH and not any(queue.sent for queue in self.pool.queues):
            count = FIRST_BATCH
        while count > 0:
            together = 0 if self.taken else take_run(self, link, count)
            if not together:
                size += self._take_next()
            count -= together or 1
            if size > MESSAGE_BYTES or not (self.pending or self.taken):
                break

    def _take_next(self) -> int:
        """Take the next request from the queue; returns about how many bytes that adds to a message."""
        taken = self.taken
        if not taken:
            pending = self.pending
            try:
                future = pending[0] if type(pending) is deque else pending.first()  # type: ignore[union-attr]
            except IndexError:  # dropped by another thread meanwhile, or it may not start yet
                return 0
            taking = (future, future.unclaimed_request())
            taken.append(taking)
        else:
            taking = taken[0]
            if self._is_taken(taking[0]):  # an interrupted thread has finished with it
                taking = (taking[0], ALREADY_TAKEN)
                if taking[0]._status:  # but that thread may not have woken all waiters
                    self.pool.on_callback_errors(self.notify(taking[0]))
        future, request = taking
        size = 0
        if request is ALREADY_CLAIMED or (request is not ALREADY_TAKEN and not future.claim_again()):
            future.claim()  # ends the future if its withdrawal was interrupted
            self.cancelled += future._status == CANCELLED
        elif request is not ALREADY_TAKEN:
            size = self._move_to_sent(future, request)
        self._leave_queue(future)
        taken.popleft()
        return size

    def _is_taken(self, future: Future) -> bool:
        """Whether a future that was being taken is in `sent`, or has ended without being withdrawn."""
        return getattr(future, "_number", None) in self.sent or (future._status != 0 and future.claim_again())

    def _leave_queue(self, future: Future) -> None:
        pending = self.pending
        if type(pending) is deque and pending and pending[0] is future:
            pending.popleft()  # only the holder of `send_lock` takes out claimed futures
            return
        with suppress(ValueError):
            pending.remove(future)

    def _move_to_sent(self, future: Future, request: Any) -> int:
        """Put a claimed request into `sent`, or fail it; returns about how many bytes it adds to a message."""
        try:
            waits: Waits = ()
            if isinstance(future, ConditionalFuture):
                waits = _waits(future)
                refusal = future.refusal()  # after `_waits`: dependencies that it left out have ended by now
                if refusal is not None:
                    raise refusal
            return self._record_sent(future, request, waits)
        except Exception as error:  # noqa: BLE001  # a value until it is delivered
            self.fail(future, error)
        except BaseException as error:
            if threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C is not an error of the request: the next thread continues with it
            self.fail(future, error)
        return 0

    def _record_sent(self, future: Future, request: Any, waits: Waits) -> int:
        pool = self.pool
        bound = getattr(request, "bound", None)
        if type(bound) is not RemoteBound or bound.pool is not pool:
            bound = self._bind(request)
        refusal = pool.device.refusal(request) if pool.device.taints else None
        if refusal is not None:
            raise refusal
        outputs: Operands = {}
        if bound.unallocated:
            executor = pool.device.executor()
            outputs = {name: executor.empty(*layout) for name, layout in bound.unallocated.items()}
        value = request.result(outputs) if outputs else bound.result
        size = 32 if bound.name in self.defined else 32 + len(bound.data)
        sent = InFlightRequest(next(pool.numbers), future, request, outputs, self, waits, bound)
        self.unframed.append(sent)
        if not self.sent:
            self.since = monotonic()
        future._number = sent.number
        future._value = value  # after its number, which a thread that sees the value may need (`_waits`)
        self.sent[sent.number] = sent
        self.busy = len(self.sent)
        return size

    def _frame(self, link: Connection) -> bool:
        """Make the next message, of requests in `sent` that are in none yet; returns whether there are any."""
        last, sents, forget = link.outgoing.last, self.sent, self.forget
        fresh = [sent for sent in split_stale_runs(self.unframed, link) if sent.number > last and sent.number in sents]
        if fresh:
            message: list[Any] = []
            names = forget.copy() if forget else ()
            if names:
                message.append((messages.FORGET, names))
            defined = self._entries(fresh, message)
            for sent in fresh:
                if type(sent) is InFlightRequest and isinstance(sent.future, TimedFuture):
                    self.pool.watch_deadline(sent.future, self)
            link.put(message, fresh[-1].number)
            if defined:
                self.defined |= defined
            if names:
                self.defined.difference_update(names)
                del forget[: len(names)]
        self.unframed.clear()
        return bool(fresh)

    def _entries(self, requests: Iterable[InFlightRequest | Run], message: list[Any]) -> set[int]:
        """Add requests to a message, with the definitions that the child lacks; returns the names defined."""
        defined: set[int] = set()
        for sent in requests:
            if isinstance(sent, Run):
                message.append((messages.RUN, sent.first, sent.names))
                continue
            bound = sent.bound
            if bound.name not in self.defined and bound.name not in defined:
                message.append((messages.DEFINE, bound.name, bound.data))
                defined.add(bound.name)
            if type(sent.future) is TimedFuture and not sent.future.may_have_started:
                message.append(
                    (sent.number, bound.name, _output_blocks(sent.outputs), sent.waits, sent.future.deadline)
                )
            elif sent.outputs or sent.waits:
                message.append((sent.number, bound.name, _output_blocks(sent.outputs), sent.waits))
            else:
                message.append((sent.number, bound.name))
        return defined

    def _bind(self, request: Any) -> RemoteBound:
        if not isinstance(request, Request):
            hint = "such as dispatch.MatmulRequest(a=a, b=b)"
            raise BadRequest("request", type(request).__name__, "a dispatch.Request", hint)
        bound = RemoteBound(self.pool, request, self)
        object.__setattr__(request, "bound", bound)
        return bound

    def resend(self, link: Connection, requests: Iterable[InFlightRequest]) -> None:
        """Send requests again, to a child that may not have them. OSError if it has ended."""
        message: list[Any] = []
        requests = [
            sent._replace(waits=_waits(sent.future) if isinstance(sent.future, ConditionalFuture) else ())
            for sent in requests
        ]
        if requests:
            self.defined |= self._entries(requests, message)
            self.since = monotonic()
            link.put(message, max(link.outgoing.last, requests[-1].number))
            link.flush()

    def resume(self, link: Connection) -> None:
        """Send to a new child: the requests that the old one did not finish, then the queued ones."""
        with self.send_lock:
            with suppress(OSError):  # the monitor thread will notice that the child has ended, and recover again
                self.resend(link, self.sent.values())
            self.link = link
        self.wake()

    def fail_taken(self) -> None:
        """Fail the requests that an interrupted thread was taking, once nothing is sent any more."""
        while self.taken:
            future, _ = self.taken[0]
            if not future._status and getattr(future, "_number", None) not in self.sent and future.claim_again():
                self.fail(future, self.pool.reason())
            self._leave_queue(future)
            self.taken.popleft()

    def refusal(self, sent: InFlightRequest) -> DispatchError | None:
        """The error if a request must not run again, because a dependency has failed or an operand is tainted."""
        future = sent.future
        error: DispatchError | None = future.dependency_error() if isinstance(future, ConditionalFuture) else None
        if error is None and self.pool.device.taints:
            error = self.pool.device.refusal(sent.request)
        return error

    def in_flight(self) -> list[Future]:
        return [sent.future for sent in list(self.sent.values())] + [future for future, _ in list(self.taken)]
