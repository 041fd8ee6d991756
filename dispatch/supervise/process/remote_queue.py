"""RemoteQueue: a worker's place in the parent, whose worker is a thread of the child, and what comes back from there.

Who waits reads: `help_wait` reads what the child reports, so that no thread of the parent is in the way. Where nobody
waits the pool's monitor thread reads. Nothing here decides about restarts.
"""

from __future__ import annotations

import threading
from os import sched_yield
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.supervise.future import DONE, FAILED, LateFuture
from dispatch.supervise.process import messages
from dispatch.supervise.process.repeatable import Sent, written
from dispatch.supervise.process.runs import end_run
from dispatch.supervise.process.sending import NOW, SendingQueue, SentRequest

if TYPE_CHECKING:
    from dispatch.supervise.future import Future
    from dispatch.supervise.process.mailbox import Mailbox
    from dispatch.supervise.process.messages import Connection
    from dispatch.supervise.process.owner import QueueOwner

__all__ = ["RemoteQueue", "SentRequest"]

FEW = 4  # requests in flight at all workers: with more one who waits reads nothing, as it would only be in the way
# Seconds for which one who waits looks at the connection before it sleeps: a small request has ended by then, one of
# many in turn, too. With 50 us those took 110 to 160 us on the host, with 100 or 160 they took 100.
LOOKING = 120e-6
YIELDED = 4  # looks, some 10 us, after which another thread may have the processor: it may be the child's
REPORT_WAIT = 0.05  # seconds that it then waits for a report, before it leaves the reading to the monitor thread


class RemoteQueue(SendingQueue):
    """A place whose worker is in the child.

    Guarantees: only who holds `recv_lock` reads and settles, but for the monitor thread while there is no `link`.
    Whoever holds it may be interrupted anywhere, and lets go of it at once: a report stays with the link until all in
    it have ended, and the monitor thread, which looks at every tick, goes on where that was. A callback, or another
    library that waits, is told by the monitor thread alone, which nothing interrupts.
    """

    __slots__ = ("recv_lock",)

    def __init__(self, index: int, limit: int, pool: QueueOwner) -> None:
        super().__init__(index, limit, pool)
        self.recv_lock = threading.Lock()

    def help_wait(self, future: Future, timeout: float | None) -> float | None:
        """Read what the child reports until a future has ended, if nobody else does; returns what is left of the time.

        The one who waits then hears of the end from the child, not from the monitor thread: one change of threads less.
        """
        link = self.link
        pool = self.pool
        if link is None or pool.release_reader or sum(len(queue.sent) for queue in pool.queues) > FEW:
            return timeout
        began = monotonic()
        try:
            if not self._read_until_ended(link, future, None if timeout is None else began + timeout):
                return timeout
        except (EOFError, OSError):
            pass  # the monitor thread sees it, too
        finally:
            if link.pending:  # what was left to the monitor thread, or by an interrupt: nothing else would tell it
                pool.ring()
        return None if timeout is None else timeout - (monotonic() - began)

    def _read_until_ended(self, link: Connection, future: Future, ends: float | None) -> bool:
        """Read in the place of the monitor thread; False where another thread does."""
        held: list[bool] = []
        try:
            held.extend(map(self.recv_lock.acquire, NOW))  # as in `wake`
            if True not in held:
                return False
            mailbox, number = link.mailbox, getattr(future, "_number", 0)
            if mailbox is not None and number and mailbox.asked == number:
                mailbox.wait_for(number)
            else:
                mailbox = None
            if mailbox is None or not mailbox.found_last:  # else nothing is likely to come over the connection
                self.pool.listen(link, on=False)
            self._read_as_helper(link, mailbox, future, ends)
        finally:
            try:
                if True in held and not link.listened:
                    self.pool.listen(link, on=True)
            finally:
                if True in held:
                    self.recv_lock.release()
                    # The monitor thread may have found the lock held, and have turned away behind `on=True`.
                    if not link.listened and not self.recv_lock.locked():
                        self.pool.listen(link, on=True)
        return True

    def _read_as_helper(self, link: Connection, mailbox: Mailbox | None, future: Future, ends: float | None) -> None:
        """Read until a future has ended, whose end may come by the mailbox, or somebody else is to."""
        pool, number = self.pool, getattr(future, "_number", 0)
        sleeps, looks = monotonic() + LOOKING, 0
        while not (future._status or pool.release_reader) and self.link is link:
            if mailbox is not None and mailbox.is_ended(number):
                self.end_lone(mailbox, number, is_helper=True)
                return
            took = self.take(link, is_helper=True)
            if took is None:
                return
            if took:
                sleeps = monotonic() + LOOKING
                continue
            looks += 1
            if not looks % YIELDED:
                sched_yield()
            if (now := monotonic()) > sleeps:
                if mailbox is not None:
                    mailbox.not_found(likely=False)
                    mailbox = None
                if link.listened:
                    pool.listen(link, on=False)
                left = REPORT_WAIT if ends is None else min(REPORT_WAIT, ends - now)
                if left <= 0 or not messages.ready([link.socket], left):
                    break
        while link.pending:  # nothing would tell the monitor thread of what has been read from the socket
            if self.take(link, is_helper=True) is None:
                return

    def end_lone(self, mailbox: Mailbox, number: int, *, is_helper: bool = False) -> None:
        """End the request whose end stands in the mailbox. Of one that a helper leaves to the monitor thread that hears
        over the connection."""
        if self._end(number, None, is_helper=is_helper):
            mailbox.found(number)
            self.busy = len(self.sent)
            self.since = monotonic()
            if self.pending:
                self.wake()

    def take(self, link: Connection, *, is_helper: bool = False) -> bool | None:
        """Settle what one message reports, and send more; False where none has come. EOFError where none ever will.

        A helper settles only what nobody but threads waits for: it may be interrupted, and what others are told once
        the monitor thread tells them. None where it has left a message to that.
        """
        message = link.peek(wait=False)
        if message is None:
            return False
        mailbox = link.mailbox
        asked = 0 if mailbox is None else mailbox.asked
        was_asked = asked in self.sent
        if not self.report(message, is_helper=is_helper):
            return None
        if was_asked and asked not in self.sent and mailbox is not None:
            mailbox.not_found(likely=is_helper)
        link.advance()
        if self.pending:
            self.wake()
        return True

    def report(self, message: list[Any], *, is_helper: bool = False) -> bool:
        """End what the child's worker says has ended: a number for each success, or the first of several and how many,
        with an error for each failure.

        A second call with the same message does what an interrupted first one did not. False where a helper has left
        something to the monitor thread.
        """
        for item in message:
            if type(item) is tuple and type(item[1]) is int:
                numbers = range(item[0], item[0] + item[1])
                if end_run(self, numbers, is_helper=is_helper):
                    continue
                ended = all(self._end(number, None, is_helper=is_helper) for number in numbers)
            else:
                number, error = (item, None) if type(item) is int else item
                ended = self._end(number, error, is_helper=is_helper)
            if not ended:
                return False
        self.busy = len(self.sent)
        self.since = monotonic()
        return True

    def _end(self, number: int, error: bytes | None, *, is_helper: bool) -> bool:
        """End one, as `report` does."""
        sent = self.sent.get(number)
        if sent is None:  # its deadline was over, and it has failed with that
            return True
        waiting = sent.future._waiting
        if is_helper and waiting is not None and not waiting.is_plain:
            return False
        if sent.future._status:
            self.tell_of(sent.future)
        elif error is None:
            self._succeed(sent)
        else:
            self.fail(sent.future, messages.error_from(error))
        del self.sent[number]
        return True

    def _succeed(self, sent: Sent) -> None:
        device, future = self.pool.device, sent.future
        if device.taints:
            for tensor in written(sent):
                device.overwritten(tensor)
        if isinstance(future, LateFuture):
            future.after = ()
        self.done += 1
        future._status = DONE
        if future._waiting is not None:
            self.tell_of(future)

    def tell_of(self, future: Future) -> None:
        """Tell those who wait for a future that has ended; whoever was interrupted may have told some."""
        if future._waiting is not None:
            self.pool.callbacks_failed(future._waiting.tell(future))

    def fail(self, future: Future, error: BaseException) -> None:
        self.pool.keep(future)
        self.failed += 1
        future._value = error
        future._status = FAILED
        self.pool.failed(future, self.tell(future))

    def tell(self, future: Future) -> list[BaseException]:
        """Tell those who wait for a future that has ended, or leave that to the monitor thread; returns what callbacks
        raised.

        A callback may do anything, and close the supervisor or wait for room: here that would keep others from sending.
        """
        waiting = future._waiting
        if waiting is None:
            return []
        if waiting.is_plain or self.pool.is_own_thread():
            return waiting.tell(future)
        self.untold.append(future)
        self.pool.ring()
        return []

    def tell_rest(self) -> None:
        """Have the monitor thread tell of what others have left to it."""
        while self.untold:
            self.tell_of(self.untold.popleft())
