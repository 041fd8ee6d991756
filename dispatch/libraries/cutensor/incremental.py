"""cuTENSOR's incremental autotune: each new plan of an operation tries another kernel, until the fastest is chosen.

cuTENSOR times the kernels as they run, and the plan cache of the handle stores the result.
Follows https://docs.nvidia.com/cuda/cutensor/latest/plan_cache.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.request import Argument, Plan
from dispatch.errors import Refused
from dispatch.execute.plan_relocation import PlanRelocation
from dispatch.libraries.cutensor.caches import write_plans

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["TuningPlan"]


class TuningPlan(Plan):
    """A plan that is made again for each of its first calls; the last one is kept, and written to disk.

    The first is made at once, and is Refused if cuTENSOR has no kernel. Nothing is recorded until the last one is made.
    All tried plans are kept until their work has finished: the documentation does not say when cuTENSOR reads the
    timings.
    """

    __slots__ = ("_executor", "_left", "_make", "_plan", "_tried")

    def __init__(self, executor: CudaExecutor, row: Row, make: Callable[[], Plan], count: int) -> None:
        super().__init__(row, capture_safe=False)
        self._executor, self._make, self._left = executor, make, count
        self._plan = make()
        self._tried: list[Plan] = []

    @property
    def is_tuned(self) -> bool:
        """Whether the kernel is final."""
        return self._left == 0

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Call cuTENSOR with the kernel of this call."""
        self._plan.enqueue(arguments)
        if self._left:
            self._left -= 1
            self._tried.append(self._plan)
            try:
                self._plan = self._make()  # for the next call; after the last trial, for all further calls
            except Refused:  # no further kernel: the current one is kept
                self._left = 0
            if not self._left:
                self._executor.stream.synchronize()
                write_plans(self._executor)
                self._tried.clear()
                self.capture_safe = self._plan.capture_safe
                self.relocation = PlanRelocation(self)  # from now on it may be launched as a graph
