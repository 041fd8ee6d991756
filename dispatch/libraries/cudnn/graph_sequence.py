"""Several graphs of cuDNN as one plan: what no single graph computes, carried out one after the other on an executor.

Ops describe themselves as `Steps` where they need it; `bind_steps` makes the plan. What passes from one graph to the
next lies in memory that the executor's plans share. Recorded and replayed like any other plan; nothing is chosen here.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.libraries.cudnn.plan import ALIGNED, bind
from dispatch.libraries.cudnn.prefill import Fill, filled, fills_of

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Request
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cudnn.engines import Policy
    from dispatch.libraries.cudnn.graph import Graph

__all__ = ["Intermediate", "Step", "Steps", "bind_steps"]


class Intermediate(NamedTuple):
    """A dense tensor that one graph leaves to the next; with `fill`, f32 numbers that are there from the start."""

    size: int
    dtype: Dtype
    fill: float | None = None

    @property
    def nbytes(self) -> int:
        """Up to where the next one may begin."""
        return -(-self.size * self.dtype.itemsize // ALIGNED) * ALIGNED


class Step(NamedTuple):
    """A graph, and for the unique id of each operand its place in the arguments, behind which comes what is between."""

    graph: Graph
    places: dict[int, int]


class Steps(NamedTuple):
    """The graphs of a request in order, and what lies between them."""

    steps: tuple[Step, ...]
    between: tuple[Intermediate, ...]


class StepsPlan(Plan):
    """The plans of the steps, and the addresses between them."""

    __slots__ = ("_addresses", "_keep", "_plans")

    def __init__(
        self, row: Row, executor: CudaExecutor, plans: tuple[Plan, ...], between: tuple[Intermediate, ...]
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._plans = plans
        passing = [one for one in between if one.fill is None]
        ends = list(accumulate((one.nbytes for one in passing), initial=0))
        room = handle_of(executor).between(executor, ends[-1])
        starts = iter(ends)
        numbers = [None if one.fill is None else _numbers(executor, one) for one in between]
        self._keep = (room, numbers)
        self._addresses = tuple((room.c_ptr.value or 0) + next(starts) if t is None else t.ptr for t in numbers)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        given = (*arguments, *self._addresses)
        for plan in self._plans:
            plan.enqueue(given)


def bind_steps(request: Request, executor: CudaExecutor, row: Row, steps: Steps, policy: Policy) -> StepsPlan:
    """The plan of a request that is these graphs; Refused with cuDNN's words where no engine takes one of them."""
    plans: list[Plan] = []
    for step in steps.steps:
        made = bind(request, executor, row, step.graph, step.places, policy)
        plans.append(filled(executor, made, fills_of(step.graph, step.places)))
    return StepsPlan(row, executor, tuple(plans), steps.between)


def _numbers(executor: CudaExecutor, one: Intermediate) -> Tensor:
    made = executor.empty((one.size,), (1,), one.dtype)
    driver.cuMemsetD32Async(made.ptr, Fill(0, one.fill or 0.0, one.size).bits, one.size, executor.stream.c_handle.value)
    return made
