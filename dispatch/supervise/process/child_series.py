"""Series: requests that a child's worker gets again and again in the same order, recorded as one CUDA graph.

child_workers.py uses them. Launching one request takes a child some 10 us, a graph of 32 not much more. The graph has
what the requests' plans enqueue, in the same order and at the same addresses; outputs, the order between streams and
the handling of faults are as for single requests.

Each request gets a place (a number), in the order in which requests first came in runs. A run is cut by places alone:
into pieces of 2, 4 … 32 consecutive places that begin at a multiple of their length. So a list that comes again in
other portions is cut into nearly the same pieces. If requests come in another order later, they get new places.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dispatch.device.stream import order
from dispatch.execute.bound import Bound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_graph import GraphExec

__all__ = ["AllSeries", "Series"]

LONGEST = 32  # requests in one graph; recording them takes half a millisecond, in which the worker is blocked
FEWEST = 4  # average length of stretches with consecutive places below which a run counts as in a new order
OFTEN = 3  # times that a piece has run one by one before it is recorded
MOST = 4096  # requests in all graphs of one worker; the oldest graph is dropped first
MOST_CUTS = 256  # runs whose pieces are remembered
MOST_SEEN = 4096  # pieces that are counted
MOST_WAITING = 64  # pieces that wait to be recorded while the worker is idle
BUSY = 1024  # requests run one by one after which a piece is recorded even if the worker is not idle
NEVER = -(1 << 62)

Names = tuple[int, ...]


class Series:
    """Requests of one executor as one graph.

    Guarantees: a launch is ordered after the uses of the requests' operands on other streams, as single launches are,
    and has their addresses and numbers. Once the executor has dropped its plans, nothing is launched any more.
    """

    __slots__ = ("_epoch", "_executor", "_graph", "_plans", "_reads", "_writes", "names", "requests")

    def __init__(self, executor: Any, names: Names, requests: list[Any], bounds: list[Bound], graph: GraphExec) -> None:
        self.names, self.requests = names, requests
        self._executor, self._plans, self._graph = executor, executor.plans, graph
        self._reads = _one_of_each(tensor for bound in bounds for tensor in bound.reads)
        self._writes = _one_of_each(tensor for bound in bounds for tensor in bound.writes)
        self._epoch = -1

    def launch(self) -> bool:
        """Launch all of them; returns False if nothing was launched, and they must run one by one."""
        executor = self._executor
        if executor.closed or executor.plans is not self._plans:
            return False
        if order.sync_epoch != self._epoch:
            epoch = order.sync_epoch  # before the check
            executor.wait_for_uses(self._reads, self._writes)
            if order.sync_epoch == epoch:
                self._epoch = epoch
        return self._graph.launch() == 0


def _one_of_each(tensors: Any) -> tuple[Tensor, ...]:
    """One tensor for each storage."""
    return tuple({id(tensor.storage): tensor for tensor in tensors}.values())


def _aligned(names: Names, places: list[int]) -> list[Names]:
    """Cut names into pieces by their places."""
    pieces: list[Names] = []
    start = 0
    while start < len(names):
        place = places[start]
        length = min(place & -place or LONGEST, LONGEST)  # the largest power of two that it is a multiple of
        while length > 1 and places[start : start + length] != [*range(place, place + length)]:
            length //= 2
        pieces.append(names[start : start + length])
        start += length
    return pieces


class AllSeries:
    """All series of one worker, the counts of pieces, and how runs are cut."""

    def __init__(self, executor: Any, known: dict[int, Any]) -> None:
        """`known` has the requests by name."""
        self._executor, self._known = executor, known
        self._places: dict[int, int] = {}  # of requests, by name
        self._next = 0  # the next place to be given
        self._all: dict[Names, Series] = {}
        self._with: dict[int, set[Names]] = {}  # the series that contain a request
        self._seen: dict[Names, int] = {}
        self._waiting: dict[Names, None] = {}
        self._cuts: dict[Names, list[Names]] = {}
        self._alone = 0  # requests that ran one by one since a piece was recorded

    def cut(self, names: Names) -> list[Names]:
        """The pieces of a run, in order."""
        pieces = self._cuts.get(names)
        if pieces is None:
            if len(self._cuts) >= MOST_CUTS:
                self._cuts.clear()
            pieces = self._cuts[names] = self._cut(names)
        return pieces

    def _cut(self, names: Names) -> list[Names]:
        self._place([name for name in names if name not in self._places])
        places = [self._places[name] for name in names]
        breaks = sum(behind != place + 1 for place, behind in pairwise(places))
        if breaks * FEWEST > len(names):
            self._next += -self._next % LONGEST
            self._place(names)
            self._cuts.clear()
            places = [self._places[name] for name in names]
        return _aligned(names, places)

    def _place(self, names: Iterable[int]) -> None:
        """Give requests the next places."""
        for name in names:
            self._places[name] = self._next
            self._next += 1

    def find(self, names: Names) -> Series | None:
        """The series of a piece, if there is one."""
        return self._all.get(names)

    def get(self, names: Names) -> Series | None:
        """As `find`; if there is none, counts that these requests run one by one."""
        series = self._all.get(names)
        if series is None:
            self._alone += len(names)
            if len(names) > 1:
                self._note(names)
        return series

    def _note(self, names: Names) -> None:
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()  # frequent pieces will soon be counted again
        seen = self._seen[names] = self._seen.get(names, 0) + 1
        if seen == OFTEN and len(self._waiting) < MOST_WAITING:
            self._waiting[names] = None

    @property
    def is_due(self) -> bool:
        """Whether a piece must be recorded now, because the worker has not been idle for long."""
        return self._alone >= BUSY and bool(self._waiting)

    def learn(self) -> bool:
        """Record a piece that waits for it; returns False if none does."""
        if not self._waiting:
            return False
        names = next(iter(self._waiting))
        del self._waiting[names]
        self._alone = 0
        try:
            series = self._recorded(names)
        except Exception:
            if self._executor.device.fault is not None:
                raise
            self._seen[names] = NEVER  # the requests go on running one by one
            return True
        if series is None:
            self._seen[names] = 0
        else:
            self._add(series)
        return True

    def _recorded(self, names: Names) -> Series | None:
        """The series of some names; None if a plan is not launched as a relocated graph (yet)."""
        executor, requests = self._executor, [self._known.get(name) for name in names]
        bounds: list[Bound] = []
        for request in requests:
            bound = getattr(request, "bound", None)
            if not isinstance(bound, Bound) or bound.plans is not executor.plans or bound.arguments is None:
                return None
            if bound.plan.launch is None or bound.plan.counter is not None:
                return None
            bounds.append(bound)
        graph = executor.record_calls([(bound.plan, bound.arguments) for bound in bounds])
        return None if graph is None else Series(executor, names, requests, bounds, graph)

    def _add(self, series: Series) -> None:
        self._all[series.names] = series
        for name in series.names:
            self._with.setdefault(name, set()).add(series.names)
        while sum(map(len, self._all)) > MOST:
            self.drop(next(iter(self._all)))

    def drop(self, names: Names) -> None:
        """Drop a series."""
        self._all.pop(names, None)
        self._seen.pop(names, None)
        for name in names:
            others = self._with.get(name)
            if others is not None:
                others.discard(names)
                if not others:
                    del self._with[name]

    def forget(self, names: Names) -> None:
        """Drop the series that contain requests which the parent has dropped."""
        for name in names:
            self._places.pop(name, None)
            for series in tuple(self._with.get(name, ())):
                self.drop(series)

    def clear(self) -> None:
        """Drop all series and counts."""
        for part in (self._all, self._with, self._seen, self._waiting):
            part.clear()
