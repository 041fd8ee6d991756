"""Bound: a request's plan on one executor of a GPU, cached between runs of the request.

cuda_executor.py makes one for each request that runs, and prepare.py for each prepared call. This module neither
selects nor launches anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Operands, Request
    from dispatch.execute.executor import Executor

__all__ = ["Bound"]


class Bound:
    """A request's plan on one executor, and the data for its runs; it does not keep the request alive."""

    __slots__ = ("_repeatable", "arguments", "executor", "plan", "plans", "reads", "result", "writes")

    def __init__(self, executor: Executor, request: Request, outputs: Operands | None = None) -> None:
        self.executor, self.plans = executor, executor.plans
        self.plan = executor.plan(request)
        operands = list(request.tensors())
        self.reads = tuple(tensor for _, tensor, written in operands if not written)
        self.writes = tuple(tensor for _, tensor, written in operands if written)
        self.arguments: tuple[Argument, ...] | None = None
        self.result: Any = None
        self._repeatable: bool | None = None
        if outputs is not None:
            self.writes += tuple(outputs.values())
        if outputs is not None or not request.unallocated():
            self.arguments = request.arguments(outputs or {})
            self.result = request.give(outputs or {})

    def run(self, request: Request) -> Any:
        """Run once, into the request's outputs or into new ones."""
        executor = self.executor
        if executor.closed:
            executor.check()
        if self.arguments is not None:
            executor.enqueue(self.plan, self.arguments, self.reads, self.writes)
            return self.result
        outputs = executor.outputs(request)
        executor.run_into(request, outputs)
        return request.give(outputs)

    def is_relaunchable(self, request: Request) -> bool:
        """Whether `launch` may be called and running the request twice gives the same result as once."""
        executor, plan = self.executor, self.plan
        if plan.launch is None or not plan.capture_safe:  # not a graph
            return False
        if self.arguments is None or executor.closed or executor.plans is not self.plans:
            return False
        if self._repeatable is None:
            self._repeatable = request.repeatable  # constant: a request is frozen
        return self._repeatable

    def launch(self) -> bool:
        """Launch the plan's graph from any thread; False if only the executor's own thread can run the request.

        The device's context must be current, and the executor's own thread must not use the executor meanwhile.
        """
        launch = self.plan.launch
        if launch is None or self.arguments is None:
            return False
        self.executor.wait_for_uses(self.reads, self.writes)
        return launch(self.arguments) == 0
