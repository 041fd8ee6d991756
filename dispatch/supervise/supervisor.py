"""Supervisor: takes requests and returns futures; a worker thread for each stream of a device runs them.

This is the public class; pool.py has the policy, worker.py runs the requests. An error is stored in its future; errors
that were never read from their futures are raised when the block is left. This module never calls a library.
"""

from __future__ import annotations

import weakref
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Literal, final

from dispatch.checks import check_bool, names_arguments, shown
from dispatch.core.request import as_requests, tell_written
from dispatch.device.device import Device
from dispatch.device.registry import device as find_device
from dispatch.errors import BadRequest, Closed, DispatchError, QueueFull, Undelivered
from dispatch.supervise import arguments, trace
from dispatch.supervise.future import ConditionalFuture, Future
from dispatch.supervise.limits import RestartLimit, check_seconds
from dispatch.supervise.placement import FEW, place, place_near, shares
from dispatch.supervise.pool import WorkerPool
from dispatch.supervise.queue import BROKEN, CANCELLING, WorkerQueue, clone_error
from dispatch.supervise.stats import Stats, describe_supervisor, read_stats
from dispatch.supervise.supervisor_exit import (
    abandon_pool,
    close_in_thread,
    close_observers,
    raise_undelivered,
    refuse_closed,
)
from dispatch.supervise.waiters import LatencyCallback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike
    from types import TracebackType

    from dispatch.core.request import R_co, Request
    from dispatch.supervise.journal import Journal
    from dispatch.supervise.status_server import StatusServer

__all__ = ["Stats", "Supervisor"]

SAMPLED = 63  # a bit mask: the latency of every 64th request is measured


@names_arguments
@final
class Supervisor:
    """Runs requests on a device's streams, with a worker thread for each, and returns futures.

    Args:
        device: "cuda:0", "host", a Device, or None for the first GPU, or the host if there is none.
        streams: the number of workers; each has a stream, library handles and a workspace of its own.
        isolation: "thread": the workers are threads of this process, which a GPU fault makes unusable for CUDA.
            "process": they are threads of a child process, which is replaced after a fault. Its memory, that of
            `supervisor.device` (not of dispatch.device()), survives. Requests in flight run again, one at a time; only
            one that faults again fails.
        queue_size: requests that may wait for each worker.
        when_full: "block" until there is room; "raise" QueueFull; or "drop_oldest": the request of the lowest priority
            that has waited longest for that worker fails with QueueFull, and the new one takes its place.
        placement: how a worker is chosen among those that a request may go to. "fair": the one with the least to do.
            "affine": a request that has run before goes to the worker that has its plan, unless many requests wait
            there, or some while another worker is idle; all others go to the one with the least to do.
        setup: with "process", modules that the child imports first: those that register rows of your own. The module of
            a request's class is imported with the first request of it, also without `setup`.
        spare: with "process", the number of spare children, each with a CUDA context of its own and some 500 MB of the
            GPU's memory. With one, work continues at once after a fault, without the 0.2 to 0.3 s for starting a child.
            A fault with several requests in flight takes two children: one finds the request that faults.
        hang_seconds: with "process", how long a request may run on after its own deadline, or that of a request waiting
            behind it, has passed; then its process is replaced.
        completion: how a worker detects that the GPU has finished a request. "poll": it queries an event (the fastest
            way); "block": a second thread sleeps in the driver; "callback": the driver calls a function.
        max_restarts, max_seconds: if workers break more than `max_restarts` times in `max_seconds`, by defects and not
            by failing requests, the circuit opens: queued requests fail, and `submit` raises WorkerFailed. A child that
            ends while it starts counts as well; the next start waits 0.05 s, then longer each time, up to 2 s.
        cooldown: seconds after which an open circuit half-opens, on the same memory: requests are taken again, and
            one break within `max_seconds` opens it anew. None: it stays open.
        journal: a file to which requests and their outcomes are appended, without their data; see journal.py. No
            other open supervisor may have it. A file that cannot be opened raises the system's OSError.

    Requests of one priority at one worker run in the order of submission. Smaller priorities go first, except every
    eighth time, so that none waits for ever; work enqueued on a stream is not overtaken. Between workers there is no
    order, unless `after` is given: a request that uses the output of another must name its future there, or be
    submitted after it has ended, or to the same `worker`. Leaving the block waits for all work and raises Undelivered
    with the errors that were never read; if an exception leaves the block, they are added to that. Leaving `async with`
    does the same without blocking the loop. A supervisor that is dropped without close() cancels queued requests and
    warns; at exit the interpreter cancels them without a warning, and waits at most two seconds for those that run.

    Guarantees: all methods may be called from any thread. Every future ends exactly once, whatever happens to workers,
    device and supervisor, unless the process itself dies.
    """

    def __init__(
        self,
        device: str | Device | None = None,
        streams: int = 4,
        isolation: Literal["thread", "process"] = "thread",
        queue_size: int = 4096,
        when_full: Literal["block", "raise", "drop_oldest"] = "block",
        placement: Literal["affine", "fair"] = "affine",
        max_restarts: int = 3,
        max_seconds: float = 5.0,
        setup: Sequence[str] = (),
        spare: int = 0,
        hang_seconds: float = 1.0,
        completion: Literal["poll", "block", "callback"] = "poll",
        journal: str | PathLike[str] | None = None,
        cooldown: float | None = None,
    ) -> None:
        arguments.check_choice("isolation", isolation, ("thread", "process"))
        arguments.check_choice("when_full", when_full, ("block", "raise", "drop_oldest"))
        arguments.check_choice("completion", completion, ("poll", "block", "callback"))
        arguments.check_choice("placement", placement, ("affine", "fair"))
        streams = arguments.check_streams(streams)
        queue_size = arguments.check_at_least("queue_size", queue_size, 1)
        max_restarts = arguments.check_at_least("max_restarts", max_restarts, 0)
        spare = arguments.check_at_least("spare", int(spare) if isinstance(spare, bool) else spare, 0)  # True means one
        arguments.check_names("setup", setup)
        max_seconds = check_seconds("max_seconds", max_seconds)
        hang_seconds = check_seconds("hang_seconds", hang_seconds, above=True)
        if cooldown is not None:
            cooldown = check_seconds("cooldown", cooldown)
        self.device = device if isinstance(device, Device) else find_device(device)
        self.device.check()
        limit = RestartLimit(max_restarts, max_seconds, cooldown)
        pool: WorkerPool
        if isolation == "thread":
            pool = WorkerPool(self.device, streams, queue_size, limit, completion)
        else:
            from dispatch.supervise.process.process_pool import ProcessPool
            from dispatch.supervise.process.shared_device import make_shared_device

            self.device = home = make_shared_device(self.device.name)
            pool = ProcessPool(home, streams, queue_size, limit, setup, spare, hang_seconds, completion)
        self._pool = pool
        self._when_full, self._affine, self._limit = when_full, placement == "affine" and streams > 1, queue_size
        self._journal: Journal | None = None
        self._status_server: StatusServer | None = None
        try:
            pool.start(partial(self._open_observers, journal, isolation, setup))
            self._finalizer = weakref.finalize(self, close_observers, self._status_server, self._journal, wait=False)
            self._pool_finalizer = weakref.finalize(self, abandon_pool, pool)
            self._pool_finalizer.atexit = False  # `_at_exit` does that
        except BaseException:
            pool.undo_start()
            close_observers(self._status_server, self._journal, wait=False)
            if isolation == "process":
                self.device.close()  # no caller has it
            raise

    def _open_observers(self, journal: str | PathLike[str] | None, isolation: str, setup: Sequence[str]) -> None:
        """Open the journal and the status server; runs on a thread that cannot be interrupted."""
        from dispatch.supervise.status_server import StatusServer

        if journal is not None:
            from dispatch.supervise.journal import Journal

            self._journal = Journal(journal, self._pool, isolation, setup)
        self._status_server = StatusServer(self._pool, isolation)

    def submit(
        self,
        request: Request[R_co],
        timeout: float | None = None,
        worker: int | Sequence[int] | None = None,
        priority: int = 0,
        after: Sequence[Future] = (),
    ) -> Future[R_co]:
        """Queue a request and return its future, which raises the errors of the request, also if it is none.

        Args:
            request: the request to run.
            timeout: seconds, a finite number, within which it must find room in a queue and start; None for no limit.
                Otherwise its future fails with DeadlineExceeded: with "thread" once a worker comes to it, after the
                requests before it. With "process", it fails in time, and a request that still runs `hang_seconds` later
                is ended.
            worker: the number of the worker to run it, or several numbers: the one with the least to do among these
                runs it; by default all.
            priority: -1, 0 or 1; the smaller goes first. With "process" it does not pass what was sent to the child.
            after: futures of earlier requests, at any worker. It runs after them, ordered by events between streams,
                and fails with DependencyFailed if one of them fails.

        Raises QueueFull if there is no room (by `when_full`, or within `timeout`), Closed after close(), DeviceFault if
        the device is lost, WorkerFailed while the circuit is open.
        """
        pool = self._pool
        if pool.refusal is not None:
            pool.check()
        deadline = None
        if timeout is not None:
            timeout = check_seconds("timeout", timeout)  # finite: the journal writes it as JSON
            deadline = monotonic() + timeout
        try:
            is_plain = deadline is None and not after
            is_first_come = priority == 0 and not after
        except Exception as error:
            raise BadRequest("priority and after", shown((priority, after)), "a number, and futures") from error
        future = Future(request) if is_plain else arguments.conditional_future(request, deadline, after)
        try:
            ticket = next(pool.tickets)
            if worker is not None or not self._affine:
                queue = place(ticket, self._allowed_queues(worker))
            else:
                bound = getattr(request, "bound", None)
                near = None if bound is None else pool.queue_of.get(bound.executor)
                if near is not None and len(near.pending) + near.busy <= FEW:
                    queue = near
                else:
                    queue = place_near(ticket, near, pool)
            if len(queue.pending) >= self._limit:
                queue = pool.wait_for_room(self._allowed_queues(worker), self._when_full, deadline)
            future._queue = queue
            if trace.hooks or self._journal is not None:
                self._record_submissions([future], [request], queue, timeout)
            if not ticket & SAMPLED:
                future.add_done_callback(LatencyCallback(pool.record_latency, perf_counter()))
            if is_first_come:
                queue.pending.append(future)
            else:
                pool.enqueue_ranked(queue, [future], priority)
            if queue.asleep:
                queue.wake()
            if queue.draining:
                queue.drain(pool)
            if deadline is not None:
                queue.watch_deadline(future)
        except BaseException:  # an error, or Ctrl-C: the caller does not get this future, so it must end here
            future.withdraw(None)
            raise
        if getattr(request, "framework", None) is not None:
            tell_written(request)
        return future

    @names_arguments
    def submit_many(
        self,
        requests: Iterable[Request[R_co]],
        worker: int | Sequence[int] | None = None,
        priority: int = 0,
        after: Sequence[Future] = (),
    ) -> list[Future[R_co]]:
        """Queue many requests, faster than one by one, and return their futures in the same order.

        Each worker gets a run of consecutive requests; `after` applies to all of them. If the queues lack room and
        `when_full` is "raise", QueueFull is raised before any request is queued. If it is "block" and the supervisor
        ends meanwhile, the futures of the requests that found no room fail with the reason. Otherwise as `submit`.
        """
        pool = self._pool
        if pool.refusal is not None:
            pool.check()
        futures: list[Future[R_co]] = list(map(Future, requests := as_requests(requests)))
        dependencies = arguments.check_futures(after) if after else ()
        if dependencies:
            futures = [ConditionalFuture(future.claim(), dependencies) for future in futures]
        queues = self._allowed_queues(worker)
        if self._when_full == "raise" and len(futures) > sum(
            max(queue.limit - len(queue.pending), 0) for queue in queues
        ):
            raise QueueFull(f"{pool.full_message(queues, 'raise', None)}, or cannot hold {len(futures)} more requests")
        try:
            self._enqueue(futures, requests, queues, priority, ranked=bool(priority != 0 or dependencies))
        except BaseException:  # as in `submit`
            for future in futures:
                future.withdraw(None)
            raise
        for request in requests:
            if getattr(request, "framework", None) is not None:
                tell_written(request)
        return futures

    def _enqueue(
        self, futures: list[Future], requests: list[Request], queues: list[WorkerQueue], priority: int, *, ranked: bool
    ) -> None:
        """Queue many requests, the whole share of each worker at once."""
        pool = self._pool
        if futures:
            futures[-1].add_done_callback(LatencyCallback(pool.record_latency, perf_counter()))
        start = 0
        while start < len(futures):
            for queue, share in shares(len(futures) - start, queues):
                part = futures[start : start + share]
                for future in part:
                    future._queue = queue
                if trace.hooks or self._journal is not None:
                    self._record_submissions(part, requests[start : start + share], queue, None)
                if ranked:
                    pool.enqueue_ranked(queue, part, priority)
                else:
                    queue.pending.extend(part)
                start += share
                if queue.asleep:
                    queue.wake()
                if queue.draining:
                    queue.drain(pool)
            if start < len(futures) and self._when_full == "drop_oldest":
                pool.drop_oldest(queues, len(futures) - start)
            elif start < len(futures):
                try:
                    pool.wait_for_room(queues, "block", None)
                except DispatchError as error:
                    self._fail_unplaced(futures[start:], error)
                    break

    def _record_submissions(
        self, futures: list[Future], requests: list[Request], queue: WorkerQueue, timeout: float | None
    ) -> None:
        """Tell hooks and journal about requests that are about to be queued."""
        for future, request in zip(futures, requests, strict=True):
            trace.watch(future, request)
            if self._journal is not None:
                self._journal.record(future, request, queue.index, timeout)

    def _fail_unplaced(self, futures: list[Future], error: DispatchError) -> None:
        for future in futures:
            failure = clone_error(error)
            failure.__cause__ = error
            self._pool.failures.keep(future)
            is_mine, errors = future.withdraw(failure)
            if is_mine:
                self._pool.on_request_failed(future, errors)

    def _allowed_queues(self, worker: Any) -> list[WorkerQueue]:
        """The queues that a request may go to."""
        queues = self._pool.queues
        return queues if worker is None else [queues[number] for number in arguments.check_workers(worker, len(queues))]

    @property
    def generation(self) -> int:
        """With "process", the number of the present child, counted from 1; with "thread" always 1."""
        return self._pool.generation

    def watch_generation(self, observer: Callable[[int], object]) -> None:
        """Call `observer(generation)` after a child was replaced; with "thread" that never happens."""
        arguments.check_function("observer", observer)
        self._pool.watch_generation(observer)

    def stats(self) -> Stats:
        """Counts and latencies at about this moment."""
        return read_stats(self._pool)

    @names_arguments
    def close(self, wait: bool = True) -> None:
        """Refuse new requests, run the queued ones, end the workers, and raise Undelivered with errors never read.

        With `wait=False`, requests that have not started are cancelled instead, and nothing is waited for or raised. On
        one of its own workers (in a callback) it cannot wait, and only starts to close. A second call does nothing.
        """
        check_bool("wait", wait)
        undelivered = self._close(wait)
        if undelivered is not None:
            raise undelivered from undelivered.exceptions[0]

    def _close(self, wait: bool) -> Undelivered | None:
        if not wait:
            self._pool.end(CANCELLING, Closed(f"the supervisor of {self.device} was closed"))
            self._pool_finalizer.detach()
            self._close_observers(wait=False)
            return None
        self._pool.finish("when its block was left, or by close()")
        self._pool_finalizer.detach()  # only now: after an interrupt, dropping the supervisor finishes the work
        try:
            self._close_observers(wait=not self._pool.is_own_thread())
        except DispatchError as error:
            self._pool.failures.add_errors([error])
        return None if self._pool.is_own_thread() else self._pool.failures.take()

    def _close_observers(self, *, wait: bool) -> None:
        close_observers(self._status_server, self._journal, wait=wait)
        self._finalizer.detach()

    def __enter__(self) -> Supervisor:
        refuse_closed(self._pool)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        raise_undelivered(self._close(wait=True), error)

    async def __aenter__(self) -> Supervisor:
        refuse_closed(self._pool)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As leaving `with`, without blocking the loop; if the task is cancelled, the work still runs to its end."""
        raise_undelivered(await close_in_thread(self._close, self.device.name), error)

    def __repr__(self) -> str:
        return describe_supervisor(self._pool, BROKEN)

    def _repr_html_(self) -> str:
        from html import escape

        return f"<div><code>{escape(repr(self))}</code></div>"
