"""cuTENSOR's incremental autotune: each plan of one operation is made with another kernel, until the fastest stays.

cuTENSOR times the kernels as they run, and its cache of plans, which the handle has, remembers what it found.
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
    """A plan that is made anew for each of its first calls; the one behind these is kept, and on disk.

    The first is made at once, and is Refused where cuTENSOR has no kernel. Nothing is recorded before the last. What
    was tried is there until all of it has run, for cuTENSOR says nowhere when it looks at how long a kernel took.
    """

    __slots__ = ("_executor", "_left", "_make", "_plan", "_tried")

    def __init__(self, executor: CudaExecutor, row: Row, make: Callable[[], Plan], count: int) -> None:
        super().__init__(row, capture_safe=False)
        self._executor, self._make, self._left = executor, make, count
        self._plan = make()
        self._tried: list[Plan] = []

    @property
    def is_tuned(self) -> bool:
        """Whether the kernel stays as it is."""
        return self._left == 0

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Call cuTENSOR by this call's kernel."""
        self._plan.enqueue(arguments)
        if self._left:
            self._left -= 1
            self._tried.append(self._plan)
            try:
                self._plan = self._make()  # of the next call; behind the last one, of all further ones
            except Refused:  # of a further kernel: that at hand stays
                self._left = 0
            if not self._left:
                self._executor.stream.synchronize()
                write_plans(self._executor)
                self._tried.clear()
                self.capture_safe = self._plan.capture_safe
                self.relocation = PlanRelocation(self)  # from now on it may be launched as a graph
