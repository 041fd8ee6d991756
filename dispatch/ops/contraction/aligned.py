"""Reductions of operands that do not lie at 16 bytes: of a copy that does.

`cutensorReduce` of cuTENSOR 2.8.1 reads 16 bytes at a time at addresses that are multiples of 8, whatever alignment its
descriptor was given: on an H200 that lost the device for f32 and f64 (`db->d` of 8 x 4, summed along the dense axis).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from dispatch.device.tensor import Tensor
from dispatch.errors import NoRow, Refused
from dispatch.ops.contraction.elementwise import PermuteRequest
from dispatch.ops.contraction.modes import lower
from dispatch.ops.contraction.orders import along
from dispatch.ops.contraction.permuted import PermutedPlan, Step
from dispatch.ops.contraction.sequence import NOWHERE, memory_of, nowhere

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["ALIGNED", "is_askew", "plan"]

ALIGNED = 16  # bytes, which are read at once
MEMORY = "aligned operand"


def is_askew(request: Any) -> bool:
    """Whether it is a reduction whose operand is to be copied first."""
    return bool(request.op == "reduce_modes" and request.a.size and request.layout_of("a").alignment < ALIGNED)


def plan(request: Any, executor: CudaExecutor, row: Row) -> PermutedPlan:
    """The copy and the reduction; Refused where no row takes the copy."""
    modes, sizes, dtype = request.modes_of("a"), request.sizes, request.a.dtype
    steps = lower(modes, request.layout_of("a"), sizes).steps
    order = "".join(mode for mode in dict.fromkeys(modes) if mode in steps)
    memory = memory_of(executor, prod(sizes[mode] for mode in order) * dtype.itemsize, MEMORY)
    if memory is None:  # as nobody asks: an operand has elements
        raise Refused("needs an operand with elements, has none")
    strides, unique = along(order, sizes), "".join(dict.fromkeys(modes))
    there = tuple(strides.get(mode, 1) for mode in unique)  # what has no step has one element: a rule refuses else
    layout = executor.device.layout(dtype, tuple(sizes[mode] for mode in unique), there, memory.base)
    copied = Tensor(memory, memory.base, layout)
    copy = PermuteRequest(f"{modes}->{unique}", request.a, out=copied)
    reduction = request.replace(spec=f"{unique}->{request.result_modes}", a=copied, out=result_of(request, executor))
    count = len(request.reads) + len(request.writes) + len(request.numbers)
    try:
        made = executor.plan(copy), executor.plan(reduction)
    except NoRow as error:
        raise Refused(f"no row takes the step {copy.describe()}") from error
    places = {name: request.place_of(name) for name in (*request.reads, *request.writes)}
    places |= {name: count - len(request.numbers) + number for number, name in enumerate(request.numbers)}
    chosen = [
        step_of(made[0], copy, {"a": places["a"], "out": count}),
        step_of(made[1], reduction, places | {"a": count}),
    ]
    return PermutedPlan(executor, row, chosen, (memory.base,), memory)


def result_of(request: Any, executor: CudaExecutor) -> Tensor:
    """The result, or for one that is left open a tensor that lies as it will."""
    given: Tensor | None = request.out
    if given is not None:
        return given
    layout = request.layout_of("out")
    made = executor.device.layout(layout.dtype, layout.shape, layout.strides, NOWHERE)
    return Tensor(nowhere(executor, layout.high), NOWHERE, made)


def step_of(made: Any, asked: Any, places: dict[str, int]) -> Step:
    """A step whose arguments are the run's at these places, and else its own."""
    order, constants = (*asked.reads, *asked.writes, *asked.numbers), asked.arguments({})
    slots = tuple(places.get(name, -1) for name in order)
    return Step(made, slots, {k: constants[k] for k, slot in enumerate(slots) if slot < 0})
