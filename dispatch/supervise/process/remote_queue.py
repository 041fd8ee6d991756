"""RemoteQueue: the parent's queue of a worker in the child: receives its reports and settles futures.

A thread that waits for a future reads the child's reports itself (`help_wait`), which saves a switch of threads. If no
thread waits, the pool's monitor thread reads. Nothing here decides about restarts.
"""

from __future__ import annotations

import threading
from os import sched_yield
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.supervise.future import DONE, FAILED, ConditionalFuture
from dispatch.supervise.process import messages
from dispatch.supervise.process.repeatable import InFlightRequest, written_tensors
from dispatch.supervise.process.runs import end_run
from dispatch.supervise.process.sending import NONBLOCKING, RemoteBound, SendingQueue

if TYPE_CHECKING:
    from dispatch.supervise.future import Future
    from dispatch.supervise.process.mailbox import Mailbox
    from dispatch.supervise.process.messages import Connection
    from dispatch.supervise.process.owner import QueueOwner

__all__ = ["RemoteBound", "RemoteQueue"]

MAX_HELPED = 4  # requests in flight at all workers; with more, a waiting thread does not read, because it would disturb
# Seconds for which a waiting thread polls the connection before it sleeps; a small request ends within that, even one
# of several in turn. With 50 us these took 110 to 160 us on the host, with 100 or 160 they took 100.
POLL_SECONDS = 120e-6
POLLS_PER_YIELD = 4  # polls, some 10 us, after which the CPU is yielded: the child may need it
REPORT_WAIT = 0.05  # seconds that it then waits for a report, before it leaves reading to the monitor thread


class RemoteQueue(SendingQueue):
    """The queue of a worker that is in the child.

    Guarantees: only the thread that holds `recv_lock` reads and settles, and the monitor thread while there is no
    `link`. The holder may be interrupted anywhere, and then releases the lock at once: a report stays with the link
    until all requests in it have ended, and the monitor thread, which checks at every tick, goes on from there.
    Callbacks, and waiters of other libraries, are called only by the monitor thread, which is never interrupted.
    """

    __slots__ = ("recv_lock",)

    def __init__(self, index: int, limit: int, pool: QueueOwner) -> None:
        super().__init__(index, limit, pool)
        self.recv_lock = threading.Lock()

    def help_wait(self, future: Future, timeout: float | None) -> float | None:
        """Read the child's reports until a future has ended, if no other thread does; returns the remaining time.

        The waiting thread then gets the report directly from the child, without a switch from the monitor thread.
        """
        link = self.link
        pool = self.pool
        if link is None or pool.release_reader or sum(len(queue.sent) for queue in pool.queues) > MAX_HELPED:
            return timeout
        began = monotonic()
        try:
            if not self._read_until_ended(link, future, None if timeout is None else began + timeout):
                return timeout
        except (EOFError, OSError):
            pass  # the monitor thread handles it
        finally:
            if link.pending:  # a message left to the monitor thread, or by an interrupt: epoll would not report it
                pool.wake_monitor()
        return None if timeout is None else timeout - (monotonic() - began)

    def _read_until_ended(self, link: Connection, future: Future, ends: float | None) -> bool:
        """Read in place of the monitor thread; False if another thread does so already."""
        held: list[bool] = []
        try:
            held.extend(map(self.recv_lock.acquire, NONBLOCKING))  # as in `wake`
            if True not in held:
                return False
            mailbox, number = link.mailbox, getattr(future, "_number", 0)
            if mailbox is not None and number and mailbox.announced == number:
                mailbox.wait_for(number)
            else:
                mailbox = None
            if mailbox is None or not mailbox.last_was_found:  # else the end will likely come by the mailbox
                self.pool.listen(link, on=False)
            self._read_as_helper(link, mailbox, future, ends)
        finally:
            try:
                if True in held and not link.listened:
                    self.pool.listen(link, on=True)
            finally:
                if True in held:
                    self.recv_lock.release()
                    # The monitor thread may have found the lock held, and stopped listening after `on=True`.
                    if not link.listened and not self.recv_lock.locked():
                        self.pool.listen(link, on=True)
        return True

    def _read_as_helper(self, link: Connection, mailbox: Mailbox | None, future: Future, ends: float | None) -> None:
        """Read, also from the mailbox, until a future has ended, or reading is left to the monitor thread."""
        pool, number = self.pool, getattr(future, "_number", 0)
        sleeps, polls = monotonic() + POLL_SECONDS, 0
        while not (future._status or pool.release_reader) and self.link is link:
            if mailbox is not None and mailbox.is_ended(number):
                self.end_lone(mailbox, number, is_helper=True)
                return
            took = self.read_report(link, is_helper=True)
            if took is None:
                return
            if took:
                sleeps = monotonic() + POLL_SECONDS
                continue
            polls += 1
            if not polls % POLLS_PER_YIELD:
                sched_yield()
            if (now := monotonic()) > sleeps:
                if mailbox is not None:
                    mailbox.expect_message(likely=False)
                    mailbox = None
                if link.listened:
                    pool.listen(link, on=False)
                seconds = REPORT_WAIT if ends is None else min(REPORT_WAIT, ends - now)
                if seconds <= 0 or not messages.wait_readable([link.socket], seconds):
                    break
        while link.pending:  # messages already read from the socket, which epoll would not report
            if self.read_report(link, is_helper=True) is None:
                return

    def end_lone(self, mailbox: Mailbox, number: int, *, is_helper: bool = False) -> None:
        """End the request whose end is in the mailbox, unless a helper must leave it to the monitor thread, which then
        receives it over the connection."""
        if self._end(number, None, is_helper=is_helper):
            mailbox.confirm_end(number)
            self.busy = len(self.sent)
            self.since = monotonic()
            if self.pending:
                self.wake()

    def read_report(self, link: Connection, *, is_helper: bool = False) -> bool | None:
        """Settle the requests that one message reports, and send more; False if there is no message, EOFError at the
        end.

        A helper (a waiting thread, which may be interrupted) settles only futures on which nothing but threads wait; it
        leaves others to the monitor thread, and returns None.
        """
        message = link.peek(wait=False)
        if message is None:
            return False
        mailbox = link.mailbox
        announced = 0 if mailbox is None else mailbox.announced
        was_announced = announced in self.sent
        if not self.settle_report(message, is_helper=is_helper):
            return None
        if was_announced and announced not in self.sent and mailbox is not None:
            mailbox.expect_message(likely=is_helper)
        link.advance()
        if self.pending:
            self.wake()
        return True

    def settle_report(self, message: list[Any], *, is_helper: bool = False) -> bool:
        """End the requests of a report: a number for each success, (first, count) for several, (number, error) for a
        failure.

        After an interrupt, a second call with the same message finishes the first. False if a helper has left something
        to the monitor thread.
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
        """End one request, as `settle_report` does."""
        sent = self.sent.get(number)
        if sent is None:  # the request has failed by its deadline
            return True
        wait_list = sent.future._wait_list
        if is_helper and wait_list is not None and not wait_list.is_interruptible:
            return False
        if sent.future._status:
            self.notify_waiters(sent.future)
        elif error is None:
            self._succeed(sent)
        else:
            self.fail(sent.future, messages.unpack_error(error))
        del self.sent[number]
        return True

    def _succeed(self, sent: InFlightRequest) -> None:
        device, future = self.pool.device, sent.future
        if device.taints:
            for tensor in written_tensors(sent):
                device.overwritten(tensor)
        if isinstance(future, ConditionalFuture):
            future.after = ()
        self.done += 1
        future._status = DONE
        if future._wait_list is not None:
            self.notify_waiters(future)

    def notify_waiters(self, future: Future) -> None:
        """Wake the waiters of a future that has ended, and run its callbacks; may finish an interrupted call."""
        if future._wait_list is not None:
            self.pool.on_callback_errors(future._wait_list.notify(future))

    def fail(self, future: Future, error: BaseException) -> None:
        self.pool.keep(future)
        self.failed += 1
        future._value = error
        future._status = FAILED
        self.pool.on_request_failed(future, self.notify(future))

    def notify(self, future: Future) -> list[BaseException]:
        """Wake the waiters of a future that has ended, or leave it to the monitor thread; returns errors of callbacks.

        A callback may close the supervisor or wait for room: on this thread, which holds `send_lock`, that would block
        all that send.
        """
        wait_list = future._wait_list
        if wait_list is None:
            return []
        if wait_list.is_interruptible or self.pool.is_own_thread():
            return wait_list.notify(future)
        self.unnotified.append(future)
        self.pool.wake_monitor()
        return []

    def notify_rest(self) -> None:
        """On the monitor thread: wake the waiters of futures that other threads have left to this one."""
        while self.unnotified:
            self.notify_waiters(self.unnotified.popleft())
