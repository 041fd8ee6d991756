"""The workers of a child: HostWorker and CudaWorker with jobs from a connection, to which they report.

`child_main.py` starts one for each stream. A worker reads requests, runs them as a worker thread of the parent would,
and reports which have ended, in the order in which they came.
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
from dispatch.supervise.process import messages
from dispatch.supervise.process.child_jobs import Job, JobRunner, compress_report
from dispatch.supervise.process.child_series import Series, SeriesCache

if TYPE_CHECKING:
    import ctypes

__all__ = ["CudaChild", "HostChild"]

PIECE = -4  # in place of messages.RUN, for a piece of a run that is a series
RUNS = (messages.RUN, PIECE)
LONE_POLLS = range(3)  # extra polls of a lone request's event before a poll of the connection, which takes as long
REPORT_SECONDS = 200e-6  # on the host, ended requests are reported within this time


class HostChild(JobRunner, HostWorker):
    """Runs jobs on the host."""

    _running = 0

    def _open(self) -> None:
        super()._open()
        self._report: list[Any] = []

    def _serve(self) -> None:
        link, report = self.queue.link, self._report
        reported_at = perf_counter()
        while True:
            if not self.jobs:
                if report:
                    self.report(report)
                self.receive(wait=True)
                reported_at = perf_counter()
                continue
            if len(self.jobs[0]) > 3 and not self.may_start_next():
                self._report_finished()
                self.queue.wait_for_wakeup(-1)
                continue
            number = self.jobs[0][0]
            entry = self.next_job()
            if entry is None:
                if number > 0:
                    self._set_enqueued(number)
                continue
            job, request = entry
            self._running = job.number
            try:
                self.run(job, request)
                ran = True
            except BaseException as error:  # noqa: BLE001  # a value until it is delivered
                ran = self._handle_error(job, request, error)  # type: ignore[arg-type]  # a job in place of a future
            if ran:
                report.append(job.number)
            self._set_enqueued(number)
            if perf_counter() - reported_at > REPORT_SECONDS:
                link.send(compress_report(report))
                report.clear()
                reported_at = perf_counter()

    def started_numbers(self) -> list[int]:
        return [self._running]

    def _fail(self, future: Any, error: BaseException) -> None:
        self._keep_failure(future.number, error)
        self._report.append((future.number, messages.pack_error(error)))

    def _report_finished(self) -> None:
        if self._report:
            self.queue.link.send(compress_report(self._report))
            self._report.clear()


class ChildBatch(Batch):
    """A batch of jobs, whose `futures` are numbers, with its report to the parent."""

    __slots__ = ("report",)
    futures: list[Any]

    def __init__(self, event: ctypes.c_void_p) -> None:
        super().__init__(event)
        self.report: list[Any] = []


class CudaChild(JobRunner, CudaWorker):
    """Runs jobs on a stream of a GPU."""

    _running = _last_number = 0

    def _open(self) -> None:
        super()._open()
        self.open_series()
        if self.owner.completion != "callback":
            # Launches cannot block (at most WINDOW requests are here) and no Python function runs on the stream, so
            # they may hold the GIL. A worker that got it between two launches would delay this one by more than both.
            self.executor.holds_gil = True
            self._record_event = driver.cuEventRecord.unchecked_holding_gil

    def open_series(self) -> None:
        self.series = SeriesCache(self.executor, self.known)

    def started_numbers(self) -> list[int]:
        # `_running` first: a number that is appended between the two reads is in at least one of them.
        return [self._running, *self.in_flight()]  # type: ignore[list-item]  # numbers, see `_enqueue_batch`

    def _serve(self) -> None:
        queue, batches = self.queue, self.batches
        while True:
            moved = False
            if not self.jobs and queue.busy < IN_FLIGHT:
                wait = not batches and (queue.unconfirmed > 0 or not (self.executor.learn() or self.series.learn()))
                self.receive(wait=wait)
            if self.jobs and queue.busy < IN_FLIGHT and (len(self.jobs[0]) < 4 or self.may_start_next()):
                self._enqueue_batch()
                moved = True
                if self.series.is_due:
                    self.series.learn()
            if batches and (self._poll() or (queue.busy == 1 and any(self._poll() for _ in LONE_POLLS))):
                moved = True
            if moved:
                continue
            if batches:
                self.completion.pause(batches, full=queue.busy >= IN_FLIGHT or bool(self.jobs))
            elif self.is_waiting:
                queue.wait_for_wakeup(-1)

    def _enqueue_batch(self) -> None:
        """Enqueue the jobs that have come, and record an event after them."""
        batch = ChildBatch(self.completion.event())
        self.batches.append(batch)
        self._last_number = 0
        with self.owner.launch_lock:
            while self.jobs:
                if not trace.hooks:
                    self._run_simple_jobs(batch)
                if self.jobs and self.jobs[0][0] in RUNS and not trace.hooks:
                    self._launch_run(batch)
                    continue
                if not self.jobs or (len(self.jobs[0]) > 3 and not self.may_start_next()):
                    break
                self._handle_entry(batch)
            self._record(batch)
        if self._last_number:
            self._set_enqueued(self._last_number)

    def _run_simple_jobs(self, batch: ChildBatch) -> None:
        """Enqueue the leading jobs without outputs and dependencies: nearly all are, so every 100 ns counts."""
        jobs, request_of, run = self.jobs, self.known, self.executor.run
        started, requests, report = batch.futures, batch.requests, batch.report
        while jobs and len(jobs[0]) == 2:
            number, name = jobs[0]
            request = request_of.get(name) if number > 0 else None
            if not isinstance(request, Request):
                return
            jobs.popleft()
            self._running = self._last_number = number
            try:
                run(request)
                ran = True
            except BaseException as error:  # noqa: BLE001  # a value until it is delivered
                ran = self._handle_error(Job(number, None), request, error)  # type: ignore[arg-type]  # as on the host
            if ran:
                started.append(number)
                requests.append(request)
                report.append(number)

    def _launch_run(self, batch: ChildBatch) -> None:
        """Launch the series at the start of the next run, or piece; put the rest back as the next jobs."""
        jobs, series = self.jobs, self.series
        kind, first, names = jobs.popleft()
        if kind == PIECE:
            cached = series.find(names)
            if cached is None or not self._launch_series(batch, first, cached):
                self.put_back(first, names)
            return
        remaining: list[Any] = []
        for piece in series.cut(names):
            cached = series.get(piece)
            if cached is None:
                remaining += zip(range(first, first + len(piece)), piece, strict=True)
            elif remaining or not self._launch_series(batch, first, cached):
                remaining.append((PIECE, first, piece))
            first += len(piece)
        jobs.extendleft(reversed(remaining))

    def _launch_series(self, batch: ChildBatch, first: int, series: Series) -> bool:
        """Launch a series; returns False if that fails: its requests then run one by one, which shows the error."""
        numbers = range(first, first + len(series.names))
        before = len(batch.futures)
        batch.futures.extend(numbers)  # first: a worker that detects a lost device reports all started requests
        try:
            is_launched = series.launch()
        except Exception:  # noqa: BLE001  # from ordering streams; single requests will raise it again
            is_launched = False
        if not is_launched:
            del batch.futures[before:]
            self.series.drop(series.names)
            return False
        self._running = self._last_number = numbers[-1]
        batch.requests.append(series)  # type: ignore[arg-type]  # keeps the requests alive
        batch.report.append((first, len(numbers)))
        return True

    def _handle_entry(self, batch: ChildBatch) -> None:
        """Handle the next entry of any kind."""
        self._last_number = max(self._last_number, self.jobs[0][0])
        entry = self.next_job()
        if entry is None:
            return
        job, request = entry
        self._running = job.number
        try:
            self.run(job, request)
            ran = True
        except BaseException as error:  # noqa: BLE001  # a value until it is delivered
            ran = self._handle_error(job, request, error)  # type: ignore[arg-type]  # as on the host
        if ran:
            batch.futures.append(job.number)
            batch.requests.append(request)
            batch.report.append(job.number)

    def _record(self, batch: Batch) -> None:
        report = batch.report  # type: ignore[attr-defined]
        super()._record(batch)
        if not batch.recorded and report:  # all have failed; earlier batches must be reported first
            if self.batches:
                self.batches[-1].report += report  # type: ignore[attr-defined]
            else:
                self.queue.link.send(compress_report(report))

    def _fail(self, future: Any, error: BaseException) -> None:
        self._keep_failure(future.number, error)
        batch: Any = self.batches[-1]  # appended by `_enqueue_batch`
        batch.report.append((future.number, messages.pack_error(error)))

    def _succeed(self, batch: Batch) -> None:
        report = batch.report  # type: ignore[attr-defined]
        if batch.recorded:
            self.queue.busy -= len(batch.futures)
        if report:
            if self.batches:
                self.queue.link.send(compress_report(report))
                report.clear()
            else:
                self.report(report)

    def forget_requests(self, names: tuple[int, ...]) -> None:
        self.series.forget(names)

    def _retry(self, future: Any, request: Request) -> BaseException | None:
        self.series.clear()  # the series keep workspaces alive
        if future.outputs is None:
            return super()._retry(future, request)
        return super()._retry(future, request.replace(**future.outputs))

    def _report_finished(self) -> None:
        self._settle_batches()
        while self.batches:  # the batch that was being filled
            self.completion.recycle(self.batches.popleft().event)
        self.queue.busy = 0
