"""Reductions of operands whose addresses are not multiples of 16 bytes: they are copied to such an address first.

`cutensorReduce` of cuTENSOR 2.8.1 reads 16 bytes at a time at addresses that are multiples of 8, ignoring the alignment
in its descriptor: on an H200 that lost the device for f32 and f64 (`db->d` of 8 x 4, summed along the dense axis).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from dispatch.device.tensor import Tensor
from dispatch.errors import NoRow, Refused
from dispatch.ops.contraction.elementwise import PermuteRequest
from dispatch.ops.contraction.modes import lower
from dispatch.ops.contraction.orders import dense_strides
from dispatch.ops.contraction.permuted import PermutedPlan, Step
from dispatch.ops.contraction.sequence import PLACEHOLDER_ADDRESS, placeholder_storage, plan_memory

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["ALIGNMENT", "needs_aligned_copy", "plan"]

ALIGNMENT = 16  # bytes that cutensorReduce reads at a time
MEMORY = "aligned operand"


def needs_aligned_copy(request: Any) -> bool:
    """Whether a request is a reduction whose operand must be copied first."""
    return bool(request.op == "reduce_modes" and request.a.size and request.layout_of("a").alignment < ALIGNMENT)


def plan(request: Any, executor: CudaExecutor, row: Row) -> PermutedPlan:
    """The copy and the reduction; Refused if no row takes the copy."""
    modes, sizes, dtype = request.modes_of("a"), request.sizes, request.a.dtype
    steps = lower(modes, request.layout_of("a"), sizes).steps
    order = "".join(mode for mode in dict.fromkeys(modes) if mode in steps)
    memory = plan_memory(executor, prod(sizes[mode] for mode in order) * dtype.itemsize, MEMORY)
    if memory is None:  # cannot happen: the operand has elements
        raise Refused("needs an operand with elements, has only empty ones")
    strides, unique = dense_strides(order, sizes), "".join(dict.fromkeys(modes))
    dense = tuple(strides.get(mode, 1) for mode in unique)  # others have one element: a rule checks that
    layout = executor.device.layout(dtype, tuple(sizes[mode] for mode in unique), dense, memory.base)
    copied = Tensor(memory, memory.base, layout)
    copy = PermuteRequest(f"{modes}->{unique}", request.a, out=copied)
    reduction = request.replace(
        spec=f"{unique}->{request.result_modes}", a=copied, out=result_tensor(request, executor)
    )
    count = len(request.reads) + len(request.writes) + len(request.numbers)
    try:
        plans = executor.plan(copy), executor.plan(reduction)
    except NoRow as error:
        raise Refused(f"no row takes the step {copy.describe()}") from error
    places = {name: request.place_of(name) for name in (*request.reads, *request.writes)}
    places |= {name: count - len(request.numbers) + number for number, name in enumerate(request.numbers)}
    chain = [
        make_step(plans[0], copy, {"a": places["a"], "out": count}),
        make_step(plans[1], reduction, places | {"a": count}),
    ]
    return PermutedPlan(executor, row, chain, (memory.base,), memory)


def result_tensor(request: Any, executor: CudaExecutor) -> Tensor:
    """The result; if it is still to be allocated, a placeholder with its layout."""
    allocated: Tensor | None = request.out
    if allocated is not None:
        return allocated
    layout = request.layout_of("out")
    placeholder = executor.device.layout(layout.dtype, layout.shape, layout.strides, PLACEHOLDER_ADDRESS)
    return Tensor(placeholder_storage(executor, layout.high), PLACEHOLDER_ADDRESS, placeholder)


def make_step(made: Any, asked: Any, places: dict[str, int]) -> Step:
    """A step that takes these arguments of the run, by index, and all others from its request."""
    order, constants = (*asked.reads, *asked.writes, *asked.numbers), asked.arguments({})
    slots = tuple(places.get(name, -1) for name in order)
    return Step(made, slots, {k: constants[k] for k, slot in enumerate(slots) if slot < 0})
