"""Several graphs of cuDNN as one plan, for requests that no single graph computes; they run one after the other.

Ops describe such requests as a `GraphSequence`; `bind_sequence` makes the plan. Intermediate tensors are stored in
memory that the executor's plans share. The plan is recorded and replayed like any other.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.libraries.cudnn.plan import ALIGNED, bind
from dispatch.libraries.cudnn.prefill import Fill, reduction_fills, with_prefill

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Request
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cudnn.engines import Policy
    from dispatch.libraries.cudnn.graph import Graph

__all__ = ["GraphSequence", "GraphStep", "Intermediate", "bind_sequence"]


class Intermediate(NamedTuple):
    """A dense tensor that one graph writes and a later one reads; with `fill`, a constant f32 tensor."""

    size: int
    dtype: Dtype
    fill: float | None = None

    @property
    def nbytes(self) -> int:
        """Its size, rounded up to the alignment of the next one."""
        return -(-self.size * self.dtype.itemsize // ALIGNED) * ALIGNED


class GraphStep(NamedTuple):
    """A graph, and for each operand's unique id its index in the arguments; intermediates come after the arguments."""

    graph: Graph
    places: dict[int, int]


class GraphSequence(NamedTuple):
    """The graphs of a request in order, and their intermediate tensors."""

    steps: tuple[GraphStep, ...]
    intermediates: tuple[Intermediate, ...]


class GraphSequencePlan(Plan):
    """The plans of the graphs, and the addresses of the intermediate tensors."""

    __slots__ = ("_addresses", "_keep", "_plans")

    def __init__(
        self, row: Row, executor: CudaExecutor, plans: tuple[Plan, ...], intermediates: tuple[Intermediate, ...]
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._plans = plans
        written = [one for one in intermediates if one.fill is None]
        ends = list(accumulate((one.nbytes for one in written), initial=0))
        memory = handle_of(executor).intermediate_memory(executor, ends[-1])
        starts = iter(ends)
        constants = [None if one.fill is None else _filled_tensor(executor, one) for one in intermediates]
        self._keep = (memory, constants)
        self._addresses = tuple((memory.c_ptr.value or 0) + next(starts) if t is None else t.ptr for t in constants)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        addresses = (*arguments, *self._addresses)
        for plan in self._plans:
            plan.enqueue(addresses)


def bind_sequence(
    request: Request, executor: CudaExecutor, row: Row, steps: GraphSequence, policy: Policy
) -> GraphSequencePlan:
    """The plan of a request that consists of these graphs; Refused with cuDNN's message if one has no engine."""
    plans: list[Plan] = []
    for step in steps.steps:
        plan = bind(request, executor, row, step.graph, step.places, policy)
        plans.append(with_prefill(executor, plan, reduction_fills(step.graph, step.places)))
    return GraphSequencePlan(row, executor, tuple(plans), steps.intermediates)


def _filled_tensor(executor: CudaExecutor, one: Intermediate) -> Tensor:
    tensor = executor.empty((one.size,), (1,), one.dtype)
    driver.cuMemsetD32Async(
        tensor.ptr, Fill(0, one.fill or 0.0, one.size).bits, one.size, executor.stream.c_handle.value
    )
    return tensor
