"""Runs: several queued requests that the child already has, taken, sent and ended together.

sending.py takes and sends runs from its queues, remote_queue.py ends them; requests with conditions are handled there
one by one. Every step for all requests of a run is one call into C code of the interpreter, during which no signal is
handled and no other thread runs.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice, repeat
from operator import attrgetter, itemgetter
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.supervise.future import DONE, Future
from dispatch.supervise.process.repeatable import InFlightRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.supervise.process.mailbox import Mailbox
    from dispatch.supervise.process.messages import Connection

__all__ = ["Run", "end_run", "split_stale_runs", "take_lone", "take_run"]

FEWEST = 4  # the fewest requests of a run; fewer take less time one by one
NO_OUTPUTS: dict[str, Any] = {}  # for requests whose outputs are given; never changed
UNCLAIMED, NUMBER, VALUE, STATUS = map(repeat, ("_request", "_number", "_value", "_status"))  # slots of futures
NOTHING, NO_WAITS, NO_OUTPUT, ENDED = map(repeat, (None, (), NO_OUTPUTS, DONE))
new_in_flight = partial(tuple.__new__, InFlightRequest)
future_of: Any = itemgetter(InFlightRequest._fields.index("future"))
name_of, result_of, status_of, wait_list_of = map(attrgetter, ("name", "result", "_status", "_wait_list"))


class Run:
    """Requests that were taken together, for one child; `number` is that of the last one."""

    __slots__ = ("first", "link", "names", "number", "sents")

    def __init__(self, link: Connection, sents: list[InFlightRequest], names: tuple[int, ...]) -> None:
        self.link, self.sents, self.names = link, sents, names
        self.first, self.number = sents[0].number, sents[-1].number


def split_stale_runs(entries: Iterable[InFlightRequest | Run], link: Connection) -> list[InFlightRequest | Run]:
    """The same entries, with runs for an earlier child split up: some of their requests may have been resent."""
    result: list[InFlightRequest | Run] = []
    for entry in entries:
        if type(entry) is Run and entry.link is not link:
            result += entry.sents
        else:
            result.append(entry)
    return result


def take_run(queue: Any, link: Connection, count: int) -> int:
    """Take up to `count` requests from the front of a queue that can form a run; returns how many were taken.

    If this is interrupted, or one of them is withdrawn meanwhile, they are in `taken`, and the next thread handles
    them one by one.
    """
    pending, pool = queue.pending, queue.pool
    if count < FEWEST or type(pending) is not deque or pool.device.taints:
        return 0
    try:
        futures = list(islice(pending, count))
    except RuntimeError:  # a finalizer has submitted a request meanwhile
        return 0
    requests = list(map(getattr, futures, UNCLAIMED, NOTHING))
    bounds = known_prefix(queue, map(getattr, requests, repeat("bound"), NOTHING))
    count = len(bounds)
    if count < FEWEST:
        return 0
    del futures[count:], requests[count:]
    queue.taken.extend(zip(futures, requests, strict=True))
    try:
        any(map(delattr, futures, UNCLAIMED))  # claims them
    except AttributeError:  # one was withdrawn
        return 0
    numbers = list(islice(pool.numbers, count))
    sents = list(map(new_in_flight, zip(numbers, futures, requests, NO_OUTPUT, repeat(queue), NO_WAITS, bounds)))
    if numbers[-1] - numbers[0] == count - 1:
        queue.unframed.append(Run(link, sents, tuple(map(name_of, bounds))))
    else:  # threads of other queues took numbers in between
        queue.unframed.extend(sents)
    if not queue.sent:
        queue.since = monotonic()
    any(map(setattr, futures, NUMBER, numbers))
    any(map(setattr, futures, VALUE, map(result_of, bounds)))  # after their numbers: see `_record_sent`
    queue.sent.update(zip(numbers, sents, strict=True))
    queue.busy = len(queue.sent)
    list(map(deque.popleft, repeat(pending, count)))  # only the holder of `send_lock` takes out claimed futures
    queue.taken.clear()
    return count


def take_lone(queue: Any, mailbox: Mailbox) -> None:
    """Take the only request of a queue with nothing in flight, and announce it in the mailbox, if the child knows it.

    It is also sent over the connection, but the child has started it by then. Like `take_run` this may be interrupted.
    """
    pending, pool = queue.pending, queue.pool
    if queue.sent or queue.taken or queue.unframed or len(pending) != 1 or type(pending) is not deque:
        return
    if pool.device.taints:
        return
    try:
        future = pending[0]
    except IndexError:  # dropped by another thread
        return
    request: Any = getattr(future, "_request", None)
    if not known_prefix(queue, (getattr(request, "bound", None),)):
        return
    bound = request.bound
    queue.taken.append((future, request))
    try:
        del future._request  # claims it
    except AttributeError:  # it was withdrawn
        return
    number = next(pool.numbers)
    sent = new_in_flight((number, future, request, NO_OUTPUTS, queue, (), bound))
    queue.unframed.append(sent)
    queue.since = monotonic()
    future._number = number
    future._value = bound.result  # after its number: see `_record_sent`
    queue.sent[number] = sent
    mailbox.announce_request(number, bound.name)
    queue.busy = len(queue.sent)
    pending.popleft()  # only the holder of `send_lock` takes out claimed futures
    queue.taken.popleft()


def known_prefix(queue: Any, bounds: Iterable[Any]) -> list[Any]:
    """The leading RemoteBounds that the child knows and that need no memory for outputs."""
    pool, defined = queue.pool, queue.defined
    prefix: list[Any] = []
    for bound in bounds:
        if getattr(bound, "pool", None) is not pool or bound.unallocated or bound.name not in defined:
            break
        prefix.append(bound)
    return prefix


def end_run(queue: Any, numbers: range, *, is_helper: bool) -> bool:
    """End these requests with success, all in one step; False if they must be ended one by one."""
    sents = list(map(queue.sent.get, numbers))
    if queue.pool.device.taints or not all(sents):  # some have failed by their deadlines
        return False
    futures = list(map(future_of, sents))
    if {*map(type, futures)} != {Future} or any(map(status_of, futures)):  # an interrupted thread has ended some
        return False
    if is_helper and not all(wait_list.is_interruptible for wait_list in filter(None, map(wait_list_of, futures))):
        return False
    queue.done += len(futures)
    any(map(setattr, futures, STATUS, ENDED))
    for future in filter(wait_list_of, futures):
        queue.notify_waiters(future)
    list(map(queue.sent.pop, numbers, NOTHING))
    return True
