"""HostWorker: runs requests on the host, one after the other, where they are done as soon as they return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.supervise import trace
from dispatch.supervise.future import DONE, MISSED
from dispatch.supervise.queue import CANCELLING
from dispatch.supervise.worker import Worker

if TYPE_CHECKING:
    from dispatch.supervise.future import Future
    from dispatch.supervise.queue import WorkerOwner, WorkerQueue

__all__ = ["HostWorker"]


class HostWorker(Worker):
    """Runs requests on the host, where they are done as soon as they return."""

    def __init__(self, seat: WorkerQueue, keeper: WorkerOwner) -> None:
        super().__init__(seat, keeper)
        self._hand: Future | None = None

    def in_hand(self) -> list[Future]:
        return [] if self._hand is None else [self._hand]

    def _serve(self) -> None:
        seat, keeper = self.seat, self.keeper
        while keeper.ending < CANCELLING:
            if seat.items:
                self._take()
                if keeper.blocked and len(seat.items) <= seat.limit // 2:
                    keeper.make_room()
            elif keeper.ending and not len(seat.items):  # what may not start yet is waited for
                return
            else:
                seat.rest(-1)

    def _take(self) -> None:
        """Run the next request."""
        seat = self.seat
        try:
            future = seat.items.popleft()
        except IndexError:  # somebody has dropped it
            return
        try:
            request = future._request
            del future._request
        except AttributeError:
            request = self._unusual(future)
            if request is MISSED:
                return
        self._hand = future
        seat.busy = 1
        try:
            run = self.executor.run
            future._value = trace.hooked(self.executor, run, request) if trace.hooks else run(request)
            ran = True
        except BaseException as error:  # noqa: BLE001  # a value until it is delivered
            ran = self._rescue(future, request, error)
        finally:
            seat.busy = 0
            self._hand = None
        if ran:
            seat.done += 1
            future._status = DONE
            if future._waiting is not None:
                self._tell(future)
