"""A child whose workers are those of a GPU, with a host's executor and events that are complete at once.

A child of a supervisor of the host imports this module by `setup=("gpu_on_host",)`. What a graph would launch runs as
soon as it is launched. LAUNCHES names a file: a line for each launch, the number of requests in it. COSTS, "7 3 0.1",
are the us that a request, a graph and each request in one take, in which nothing is computed: for measurements of what
is around.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from dispatch.errors import WorkerFailed
from dispatch.execute.bound import Bound
from dispatch.execute.host_executor import HostExecutor
from dispatch.supervise.process import child_main
from dispatch.supervise.process.child_workers import CudaChild

LAUNCHES = os.environ.get("LAUNCHES", "")
COSTS = [float(part) * 1e-6 for part in os.environ.get("COSTS", "").split()]


def spend(seconds: float) -> None:
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


class Graph:
    """Requests that run one behind the other at each launch."""

    def __init__(self, executor: StreamExecutor, calls: Any) -> None:
        self.executor, self.requests = executor, [executor.by_arguments[arguments] for _, arguments in calls]

    def launch(self) -> int:
        if COSTS:
            spend(COSTS[1] + COSTS[2] * len(self.requests))
            return 0
        note(len(self.requests))
        for request in self.requests:
            self.executor.compute(request)
        return 0


def note(count: int) -> None:
    if LAUNCHES:
        with open(LAUNCHES, "a") as file:
            file.write(f"{count}\n")


class StreamExecutor(HostExecutor):
    """Runs requests as an executor of a GPU does, as far as its worker sees that."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.by_arguments: dict[Any, Any] = {}

    def run(self, request: Any) -> Any:
        bound = request.bound
        if bound is None or bound.plans is not self.plans:
            bound = Bound(self, request)
            object.__setattr__(request, "bound", bound)
            bound.plan.launch, bound.plan.capture_safe = launch, True
            self.by_arguments[bound.arguments] = request
        if COSTS:
            spend(COSTS[0])
            return bound.result
        note(1)
        self.compute(request)
        return bound.result

    def compute(self, request: Any) -> None:
        super().run_into(request, {})

    def record_calls(self, calls: Any) -> Graph:
        return Graph(self, calls)

    def wait_for_uses(self, reads: Any, writes: Any) -> None:
        """All that was enqueued has run."""


def launch(_arguments: Any) -> int:
    raise WorkerFailed("only the worker's own graphs are launched here")


class Events:
    """Events that are complete as they are recorded."""

    def event(self) -> Any:
        return SimpleNamespace()

    def recycle(self, event: Any) -> None: ...
    def watch(self, batch: Any) -> None: ...

    def ended(self, batch: Any) -> bool:
        return True

    def pause(self, batches: Any, *, full: bool) -> None: ...


class StreamChild(CudaChild):
    """A GPU's worker in a child, over the executor of the host."""

    def _open(self) -> None:
        self._stream = self.device.stream()
        self.executor = StreamExecutor(self._stream)
        self.executor.stream.c_handle = None
        self.open_series()
        self._record_event = lambda _event, _stream: 0
        self.completion = Events()

    def _settle_batches(self) -> None:
        for batch in self.batches:
            self._succeed(batch)
        self.batches.clear()


child_main.HostChild = StreamChild
