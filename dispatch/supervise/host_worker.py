"""HostWorker: runs requests on the host, one after the other; each is done when its run returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.supervise import trace
from dispatch.supervise.future import ALREADY_CLAIMED, DONE
from dispatch.supervise.queue import CANCELLING
from dispatch.supervise.worker import Worker

if TYPE_CHECKING:
    from dispatch.supervise.future import Future
    from dispatch.supervise.queue import WorkerOwner, WorkerQueue

__all__ = ["HostWorker"]


class HostWorker(Worker):
    """Runs requests on the host; each is done when its run returns."""

    def __init__(self, queue: WorkerQueue, owner: WorkerOwner) -> None:
        super().__init__(queue, owner)
        self._current: Future | None = None

    def in_flight(self) -> list[Future]:
        return [] if self._current is None else [self._current]

    def _serve(self) -> None:
        queue, owner = self.queue, self.owner
        while owner.state < CANCELLING:
            if queue.pending:
                self._run_next()
                if owner.blocked and len(queue.pending) <= queue.limit // 2:
                    owner.make_room()
            elif owner.state and not len(queue.pending):  # requests that may not start yet are waited for
                return
            else:
                queue.wait(-1)

    def _run_next(self) -> None:
        """Run the next request."""
        queue = self.queue
        try:
            future = queue.pending.popleft()
        except IndexError:  # it was dropped
            return
        try:
            request = future._request
            del future._request
        except AttributeError:
            request = self._claim_conditional(future)
            if request is ALREADY_CLAIMED:
                return
        self._current = future
        queue.busy = 1
        try:
            run = self.executor.run
            future._value = trace.hooked(self.executor, run, request) if trace.hooks else run(request)
            ran = True
        except BaseException as error:  # noqa: BLE001  # a value until it is delivered
            ran = self._handle_error(future, request, error)
        finally:
            queue.busy = 0
            self._current = None
        if ran:
            queue.done += 1
            future._status = DONE
            if future._wait_list is not None:
                self._notify(future)
