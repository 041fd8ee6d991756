"""Direct solves of a batch by cuDSS: all matrices at once, and one after another where one cannot be factorized.

cuDSS tells one status for all matrices of a batch. It says nothing of what becomes of the sound ones beside one that
has failed; so these are solved again, by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.ops.sparse.cudss_single import CudssPlan, Run

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cudss.factors import Factors
    from dispatch.ops.sparse.direct import BatchedSpsolveRequest

__all__ = ["BatchedPlan"]

STATUS_BYTES = 4


class BatchedPlan(CudssPlan):
    """A uniform batch: one analysis, and the factors of all matrices."""

    __slots__ = ("_single", "_steps")

    def __init__(self, request: BatchedSpsolveRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(request, executor, row)
        self._single: Factors | None = None  # of one matrix, made when a batch first fails
        size, dense = request.values.dtype.itemsize, self._said.n * self._said.sides
        self._steps = self._said.nnz * size, dense * size

    def solve(self, run: Run, info: Any) -> None:
        self._factors.factorize(*run, keeps=self._keeps)
        if self._factors.info:
            self._one_by_one(run, info)
        else:
            self._factors.substitute()
            self.tell(info, 0, self._batch)

    def _one_by_one(self, run: Run, info: Any) -> None:
        """Factorize and solve each matrix, and write its status."""
        if self._single is None:
            self._single = self.factors(self._said, self._ways._replace(batch=1))
        across, along = self._steps
        for number in range(self._batch):
            matrix = run.values + number * across, run.b + number * along, run.x + number * along
            self._single.solve(run.pattern, *matrix, None, keeps=self._keeps or number > 0)
            self.tell(info + number * STATUS_BYTES, self._single.info)
