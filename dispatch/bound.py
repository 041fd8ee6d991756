"""A request's plan on one lane of a GPU, and its runs: what a lane remembers of a request between two calls.

lane.py makes one for each request that runs, and plans.py for each prepared call. Nothing is chosen or launched here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.lane import CudaLane
    from dispatch.request import Argument, Operands, Request

__all__ = ["Bound"]


class Bound:
    """A request's plan on one lane, with what its runs need and nothing that would keep the request alive."""

    __slots__ = ("arguments", "lane", "plan", "plans", "reads", "result", "writes")

    def __init__(self, lane: CudaLane, request: Request, outputs: Operands | None = None) -> None:
        self.lane, self.plans = lane, lane.plans
        self.plan = lane.plan(request)
        operands = list(request.tensors())
        self.reads = tuple(tensor for _, tensor, written in operands if not written)
        self.writes = tuple(tensor for _, tensor, written in operands if written)
        self.arguments: tuple[Argument, ...] | None = None
        self.result: Any = None
        if outputs is not None:
            self.writes += tuple(outputs.values())
        if outputs is not None or not request.missing():
            self.arguments = request.arguments(outputs or {})
            self.result = request.result(outputs or {})

    def run(self, request: Request) -> Any:
        """Run once, into the request's outputs or into fresh ones."""
        lane = self.lane
        if lane.closed:
            lane.check()
        if self.arguments is not None:
            replay = self.plan.replays.get(self.arguments)
            if replay is not None and not lane.stream.foreign:
                lane.launch(replay, self.reads, self.writes)
            else:
                lane.enqueue(self.plan, self.arguments, self.reads, self.writes)
            return self.result
        outputs = lane.outputs(request)
        lane.run_into(request, outputs)
        return request.result(outputs)
