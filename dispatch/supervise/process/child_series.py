"""Series: requests that a child's worker gets again and again in the same order, recorded as one CUDA graph.

child_workers.py uses them. Launching one request takes a child some 10 us, a graph of 32 not much more. The graph has
what the requests' plans enqueue, in the same order and at the same addresses; outputs, the order between streams and
the handling of faults are as for single requests.

Each request gets a position (a number), in the order in which requests first came in runs. A run is cut by positions
alone: into pieces of 2, 4 … 32 consecutive positions that begin at a multiple of their length. So a list that arrives
again in other portions is cut into nearly the same pieces. If requests come in another order later, they get new
positions.
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

__all__ = ["Series", "SeriesCache"]

LONGEST = 32  # requests in one graph; recording them takes half a millisecond, in which the worker is blocked
MIN_STRETCH = 4  # average length of stretches of consecutive positions below which a run counts as in a new order
RECORD_AFTER = 3  # times that a piece has run one by one before it is recorded
MAX_REQUESTS = 4096  # requests in all graphs of one worker; the oldest graph is dropped first
MAX_CUTS = 256  # runs whose pieces are remembered
MAX_COUNTED = 4096  # pieces that are counted
MAX_TO_RECORD = 64  # pieces that wait to be recorded while the worker is idle
MAX_SINGLE_RUNS = 1024  # requests run one by one after which a piece is recorded even if the worker is not idle
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
        self._reads = _one_per_storage(tensor for bound in bounds for tensor in bound.reads)
        self._writes = _one_per_storage(tensor for bound in bounds for tensor in bound.writes)
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


def _one_per_storage(tensors: Any) -> tuple[Tensor, ...]:
    """One tensor for each storage."""
    return tuple({id(tensor.storage): tensor for tensor in tensors}.values())


def _cut_aligned(names: Names, positions: list[int]) -> list[Names]:
    """Cut names into pieces by their positions."""
    pieces: list[Names] = []
    start = 0
    while start < len(names):
        position = positions[start]
        length = min(position & -position or LONGEST, LONGEST)  # the largest power of two that it is a multiple of
        while length > 1 and positions[start : start + length] != [*range(position, position + length)]:
            length //= 2
        pieces.append(names[start : start + length])
        start += length
    return pieces


class SeriesCache:
    """All series of one worker, the counts of pieces, and how runs are cut."""

    def __init__(self, executor: Any, known: dict[int, Any]) -> None:
        """`known` has the requests by name."""
        self._executor, self._known = executor, known
        self._positions: dict[int, int] = {}  # of requests, by name
        self._next = 0  # the next position to be assigned
        self._all: dict[Names, Series] = {}
        self._series_of: dict[int, set[Names]] = {}  # the series that contain a request
        self._run_counts: dict[Names, int] = {}
        self._to_record: dict[Names, None] = {}
        self._cuts: dict[Names, list[Names]] = {}
        self._single_runs = 0  # requests that ran one by one since a piece was recorded

    def cut(self, names: Names) -> list[Names]:
        """The pieces of a run, in order."""
        pieces = self._cuts.get(names)
        if pieces is None:
            if len(self._cuts) >= MAX_CUTS:
                self._cuts.clear()
            pieces = self._cuts[names] = self._cut(names)
        return pieces

    def _cut(self, names: Names) -> list[Names]:
        self._assign_positions([name for name in names if name not in self._positions])
        positions = [self._positions[name] for name in names]
        breaks = sum(behind != position + 1 for position, behind in pairwise(positions))
        if breaks * MIN_STRETCH > len(names):
            self._next += -self._next % LONGEST
            self._assign_positions(names)
            self._cuts.clear()
            positions = [self._positions[name] for name in names]
        return _cut_aligned(names, positions)

    def _assign_positions(self, names: Iterable[int]) -> None:
        """Assign the next positions to requests."""
        for name in names:
            self._positions[name] = self._next
            self._next += 1

    def find(self, names: Names) -> Series | None:
        """The series of a piece, if there is one."""
        return self._all.get(names)

    def get(self, names: Names) -> Series | None:
        """As `find`; if there is none, counts that these requests run one by one."""
        series = self._all.get(names)
        if series is None:
            self._single_runs += len(names)
            if len(names) > 1:
                self._count_piece(names)
        return series

    def _count_piece(self, names: Names) -> None:
        if len(self._run_counts) >= MAX_COUNTED:
            self._run_counts.clear()  # frequent pieces will soon be counted again
        count = self._run_counts[names] = self._run_counts.get(names, 0) + 1
        if count == RECORD_AFTER and len(self._to_record) < MAX_TO_RECORD:
            self._to_record[names] = None

    @property
    def is_due(self) -> bool:
        """Whether a piece must be recorded now, because the worker has not been idle for long."""
        return self._single_runs >= MAX_SINGLE_RUNS and bool(self._to_record)

    def learn(self) -> bool:
        """Record a piece that waits for it; returns False if none does."""
        if not self._to_record:
            return False
        names = next(iter(self._to_record))
        del self._to_record[names]
        self._single_runs = 0
        try:
            series = self._recorded(names)
        except Exception:
            if self._executor.device.fault is not None:
                raise
            self._run_counts[names] = NEVER  # the requests continue to run one by one
            return True
        if series is None:
            self._run_counts[names] = 0
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
            if bound.plan.launch is None or not bound.plan.capture_safe or bound.plan.counter is not None:
                return None
            bounds.append(bound)
        graph = executor.record_calls([(bound.plan, bound.arguments) for bound in bounds])
        return None if graph is None else Series(executor, names, requests, bounds, graph)

    def _add(self, series: Series) -> None:
        self._all[series.names] = series
        for name in series.names:
            self._series_of.setdefault(name, set()).add(series.names)
        while sum(map(len, self._all)) > MAX_REQUESTS:
            self.drop(next(iter(self._all)))

    def drop(self, names: Names) -> None:
        """Drop a series."""
        self._all.pop(names, None)
        self._run_counts.pop(names, None)
        for name in names:
            series_names = self._series_of.get(name)
            if series_names is not None:
                series_names.discard(names)
                if not series_names:
                    del self._series_of[name]

    def forget(self, names: Names) -> None:
        """Drop the series that contain requests which the parent has dropped."""
        for name in names:
            self._positions.pop(name, None)
            for series in tuple(self._series_of.get(name, ())):
                self.drop(series)

    def clear(self) -> None:
        """Drop all series and counts."""
        for part in (self._all, self._series_of, self._run_counts, self._to_record):
            part.clear()
