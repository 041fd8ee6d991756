"""JobRunner: how a child's worker takes jobs from its connection, in place of futures, and reports on them.

`child_workers.py` mixes it into the workers of threads. A job is a number and the name of a request that was defined
before; its dependencies on other workers' jobs are handled here, too.
"""

from __future__ import annotations

import os
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.core.user_code import is_of_user_code
from dispatch.errors import BadRequest, DeadlineExceeded, DependencyFailed, WorkerFailed, error_text
from dispatch.supervise import trace
from dispatch.supervise.cuda_worker import BATCH
from dispatch.supervise.future import TOO_LATE
from dispatch.supervise.process import messages
from dispatch.supervise.process.child_pool import MAX_REASON_CHARS

if TYPE_CHECKING:
    from dispatch.core.request import Operands, Request

__all__ = ["Job", "JobRunner", "compress_report"]

MAX_FAILURES = 1024  # failures of one worker; more than can be in flight at once


class Job:
    """One request to run: its number, and the outputs that the parent has allocated for it."""

    __slots__ = ("_value", "number", "outputs")

    def __init__(self, number: int, outputs: Operands | None) -> None:
        self.number, self.outputs = number, outputs


def compress_report(report: list[Any]) -> list[Any]:
    """A report in which successes with consecutive numbers are replaced by (first, count)."""
    short: list[Any] = []
    first = count = 0
    for item in report:
        if type(item) is int:
            if item == first + count:
                count += 1
                continue
            begins, follow = item, 1
        elif type(item[1]) is int:
            if item[0] == first + count:
                count += item[1]
                continue
            begins, follow = item
        else:
            begins = follow = 0
        if count:
            short.append(first if count == 1 else (first, count))
        first, count = begins, follow
        if not count:
            short.append(item)
    if count:
        short.append(first if count == 1 else (first, count))
    return short


class JobRunner:
    """The mixin of a child's workers: jobs from a connection, reports to it, and continuing after a defect.

    Guarantees: `enqueued` grows; all jobs up to that number are enqueued (on the host: have run) or have failed. A job
    depends only on jobs with smaller numbers, so the job with the smallest number of all can always continue.
    """

    queue: Any  # a ChildQueue
    owner: Any  # a ChildPool
    executor: Any
    device: Any
    _order_after: Any  # defined by the worker
    _open: Any
    _running: int
    _serve: Any

    def _main(self) -> None:
        """Serve until the parent has ended. After a defect the plans are dropped; after a fault the process exits."""
        self.jobs: deque[Any] = deque()
        self.enqueued = 0
        self.is_waiting = False
        self.failures: dict[int, BaseException] = {}
        self.known: dict[int, Request | BaseException] = {}
        self.others = [worker.queue for worker in self.owner.workers if worker is not self]
        try:
            self._open()
        except BaseException as why:  # noqa: BLE001  # its jobs would never run
            self.owner.exit_lost(why)
        while True:
            error = self._serve_until_error()
            self._recover(error)

    def _serve_until_error(self) -> BaseException:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  # judged by `_recover`
            if isinstance(error, (EOFError, ConnectionError)) and self.queue.link.is_hung_up():
                os._exit(0)  # the parent has ended, and the error does not come from a user's request
            return error
        return EOFError()

    def _recover(self, error: BaseException) -> None:
        try:
            self._report_finished()
            self._set_enqueued(self._running)  # the job at which the worker broke
            self.executor.forget()
        except BaseException as worse:  # noqa: BLE001
            error = worse
        if self.device.fault is not None:
            self.owner.exit_lost(error)
        self.owner.send_control("defect", self.queue.index, error_text(error)[:MAX_REASON_CHARS])

    def _report_finished(self) -> None:
        """Report all jobs that have run."""
        raise NotImplementedError

    def started_numbers(self) -> list[int]:
        """The numbers of requests that have started and are not known to have ended; any thread may call it."""
        raise NotImplementedError

    def receive(self, *, wait: bool) -> None:
        """Take the jobs of the next message, and of further messages that have arrived meanwhile.

        Each batch that is enqueued and reported separately costs 15 us, as much as two requests.
        """
        queue, jobs = self.queue, self.jobs
        link = queue.link
        jobs.extend((queue.next_message(self.others) if wait else queue.receive(wait=False)) or ())
        while link.pending and len(jobs) < BATCH:
            jobs.extend(queue.receive(wait=False) or ())

    def report(self, report: list[Any]) -> None:
        """Report ended jobs to the parent: a lone request by the mailbox if the parent reads it, else by a message."""
        if len(report) != 1 or self.jobs or not self.queue.announce_end(report[0]):
            self.queue.link.send(compress_report(report))
        report.clear()

    def may_start_next(self) -> bool:
        """Whether the next job may start; if it must wait for another worker, that one will wake this one."""
        waits = self.jobs[0][3] if len(self.jobs[0]) > 3 else ()
        workers, own_index = self.owner.workers, self.queue.index
        for _ in range(2):  # check again after announcing that this worker waits
            if all(index == own_index or workers[index].enqueued >= number for index, number in waits):
                self.is_waiting = False
                return True
            self.is_waiting = self.owner.ordered = True
        return False

    def _order_after_all(self, waits: tuple[tuple[int, int], ...]) -> BaseException | None:
        """Make the stream wait for other workers' jobs; returns the error for this job if one of them has failed."""
        for index, number in waits:
            other = self.owner.workers[index]
            cause = other.failures.get(number)
            if cause is not None:
                text = f"it was not run, because a request that it depends on (after=) failed: {error_text(cause)}"
                error = DependencyFailed(text)
                error.__cause__ = cause
                return error
            if other is not self:
                self._order_after(other.queue)
        return None

    def _set_enqueued(self, number: int) -> None:
        """A job is enqueued, or has failed."""
        self.enqueued = number
        if self.owner.ordered:
            self.owner.on_enqueued()

    def _keep_failure(self, number: int, error: BaseException) -> None:
        """Keep the error of a job for jobs that depend on it, which are sent soon after it."""
        self.failures[number] = error
        if len(self.failures) > MAX_FAILURES:
            del self.failures[next(iter(self.failures))]

    def next_job(self) -> tuple[Job, Request] | None:
        """The next job and its request; None if the next entry was no request, or one that failed at once."""
        entry = self.jobs.popleft()
        number = entry[0]
        if number == messages.DEFINE:
            self.known[entry[1]] = self._unpack_request(entry[2])
            return None
        if number == messages.FORGET:
            for name in entry[1]:
                self.known.pop(name, None)
            self.forget_requests(entry[1])
            return None
        if number < 0:  # a run, or a piece of one
            self.put_back(entry[1], entry[2])
            return None
        request = self.known[entry[1]]
        job = Job(number, None)
        if len(entry) > 4 and monotonic() >= entry[4]:  # its deadline; few jobs have one
            self._fail(job, DeadlineExceeded(TOO_LATE))
            return None
        if isinstance(request, BaseException):
            self._fail(job, request)
            return None
        if len(entry) > 2:
            try:
                if entry[2]:
                    job.outputs = self._outputs(request, entry[2])
                refusal = self._order_after_all(entry[3])
            except BaseException as error:  # a user's request may raise anything, and it must be reported
                if self.device.fault is not None:
                    raise
                if isinstance(error, Exception) and is_of_user_code(error, request):
                    self._fail(job, error)
                    return None
                refusal = WorkerFailed(f"worker {self.queue.index} could not prepare a request: {error_text(error)}")
                refusal.__cause__ = error
            if refusal is not None:
                self._fail(job, refusal)
                return None
        return job, request

    def put_back(self, first: int, names: tuple[int, ...]) -> None:
        """Put requests of a run back as the next jobs, one by one."""
        self.jobs.extendleft(reversed(tuple(zip(range(first, first + len(names)), names, strict=True))))

    def forget_requests(self, names: tuple[int, ...]) -> None:
        """Drop the data of requests that the parent has dropped."""

    def _unpack_request(self, data: bytes) -> Request | BaseException:
        try:
            return messages.unpack_request(data, self.device, self.owner.tensor)
        except BaseException as error:  # its class cannot be imported here, or constructing it raises
            if self.device.fault is not None:  # another worker's fault: this request has not started
                raise
            hint = "its class must be importable in a new process, whose __main__ is not this script"
            hint += "; setup=('your.module',) imports a module there first"
            return BadRequest("request", error_text(error), "a request that another process can rebuild", hint)

    def _fail(self, future: Any, error: BaseException) -> None:
        raise NotImplementedError

    def _outputs(self, request: Request, places: tuple[Any, ...]) -> Operands:
        missing = request.unallocated().items()
        return {
            name: self.owner.tensor((*block, 0), dtype.name, shape, strides, False)
            for block, (name, (shape, strides, dtype)) in zip(places, missing, strict=True)
        }

    def run(self, job: Job, request: Request) -> None:
        if trace.hooks:
            executor, outputs = self.executor, job.outputs
            trace.hooked(
                executor,
                executor.run if outputs is None else executor.run_into,
                request,
                *([] if outputs is None else [outputs]),
            )
        elif job.outputs is None:
            self.executor.run(request)
        else:
            self.executor.run_into(request, job.outputs)
