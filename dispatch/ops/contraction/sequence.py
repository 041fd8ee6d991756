"""einsum on a GPU: a plan of plans, one for each step, that the table chooses; with memory for what is on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from dispatch.core.request import Argument, IdlePlan, Plan
from dispatch.device.layout import c_strides
from dispatch.device.storage import Storage
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, NoRow, Refused
from dispatch.execute.shared_memory import of_size
from dispatch.ops.contraction.choices import TensorOp
from dispatch.ops.contraction.einsum import COMPLEX, EinsumRequest, unique_layout
from dispatch.ops.contraction.elementwise import ElementwiseBinaryRequest, PermuteRequest
from dispatch.ops.contraction.request import ContractRequest, ReduceModesRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.ops.contraction.steps import Step

__all__ = ["ALIGNMENT", "NOWHERE", "EinsumPlan", "blocks", "memory_of", "nowhere", "plan"]

NOWHERE = 1 << 20  # an address that no tensor has
ALIGNMENT = 256  # bytes
EXACT = 64 << 20  # bytes, beyond which memory is no power of 2 any more, but a multiple of 2 MiB
PAGE = 2 << 20
MEMORY = "einsum"
KINDS: dict[str, Any] = {
    "contract": ContractRequest,
    "reduce_modes": ReduceModesRequest,
    "permute": PermuteRequest,
    "elementwise_binary": ElementwiseBinaryRequest,
}


class Planned(NamedTuple):
    """The plan of a step, with what each of its arguments is: the number of a tensor, or a number."""

    plan: Plan
    slots: tuple[int | None, ...]
    constants: tuple[Argument, ...]


class EinsumPlan(Plan):
    """Steps one after another; what is on the way lies in `memory`, at fixed addresses."""

    __slots__ = ("_executor", "_fixed", "_memory", "_steps", "_zeroed")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        steps: Sequence[Planned],
        fixed: tuple[int, ...],
        memory: Storage | None,
        zeroed: tuple[int, int] | None,
    ) -> None:
        super().__init__(row, capture_safe=all(step.plan.capture_safe or step.plan.is_bare for step in steps))
        self._executor, self._steps, self._fixed, self._memory = executor, tuple(steps), fixed, memory
        self._zeroed = zeroed  # where the result's bytes begin, and how many they are, if they are to be zeros first

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        memory = self._memory
        if memory is not None and memory.owner is not self._executor.stream:
            # Made while the caller captured the executor's stream, on another one, which was waited for since.
            memory.owner = memory.writer = self._executor.stream
        *operands, out = arguments
        if self._zeroed is not None:
            low, nbytes = self._zeroed
            driver.cuMemsetD8Async(int(out.real) + low, 0, nbytes, self._executor.target.value)
        addresses = (*operands, *self._fixed, out)
        for plan, slots, constants in self._steps:
            plan.enqueue(
                tuple(
                    constant if slot is None else addresses[slot]
                    for slot, constant in zip(slots, constants, strict=True)
                )
            )


def plan(request: EinsumRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; Refused where no row takes one of its steps, or the device has not the memory for them."""
    if not request.out_layout().size:
        return IdlePlan(row)
    count = len(request.operands)
    offsets, nbytes = _room(request)
    if nbytes and nbytes > (total := driver.cuMemGetInfo()[1]):
        request = _within(request, nbytes, total)
        offsets, nbytes = _room(request)
    steps = request.course.steps
    memory = memory_of(executor, nbytes)
    base = NOWHERE if memory is None else memory.base
    tensors: list[Tensor] = list(request.operands)
    for step, offset in zip(steps[:-1], offsets, strict=True):
        dtype = _dtype(request, step)
        layout = executor.device.layout(dtype, step.shape, c_strides(step.shape), base + offset)
        tensors.append(Tensor(memory or nowhere(executor, layout.high), base + offset, layout))
    tensors.append(_result(request, executor))
    library = request.library or (None if row.library == "cutensor" else row.library)
    planned = [_planned(request, executor, step, tensors, count + number, library) for number, step in enumerate(steps)]
    layout, output = request.out_layout(), request.parsed[1]
    zeroed = None if len(set(output)) == len(output) else (layout.low, layout.high - layout.low)
    return EinsumPlan(executor, row, planned, tuple(base + offset for offset in offsets), memory, zeroed)


def _room(request: EinsumRequest) -> tuple[tuple[int, ...], int]:
    """Where what is on the way begins in memory, and how many bytes that is in all."""
    steps = request.course.steps
    sizes = [_nbytes(step.shape, _dtype(request, step)) for step in steps[:-1]]
    return blocks(steps, sizes, len(request.operands))


def _within(request: EinsumRequest, nbytes: int, total: int) -> EinsumRequest:
    """The request with a path that keeps within what the device has; Refused where none is found."""
    said = f"results on the way take {nbytes:,} bytes, and the device has {total:,}"
    if request.memory_limit is not None:
        raise Refused(said)
    try:
        found = replace(request, memory_limit=total)
    except BadRequest as error:
        raise Refused(f"{said}: {error}") from error
    if _room(found)[1] > total:
        raise Refused(said)
    return found


def _dtype(request: EinsumRequest, step: Step) -> Dtype:
    """The dtype of what a step gives: in the precision of all, complex where an operand is."""
    count = len(request.operands)
    for number in step.inputs:
        one = (
            request.operands[number].dtype if number < count else _dtype(request, request.course.steps[number - count])
        )
        if one.is_complex:
            return COMPLEX[request.precision]
    return request.precision


def _nbytes(shape: tuple[int, ...], dtype: Dtype) -> int:
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _planned(
    request: EinsumRequest,
    executor: CudaExecutor,
    step: Step,
    tensors: Sequence[Tensor],
    number: int,
    library: str | None,
) -> Planned:
    """The plan of a step, whose result is the tensor of that number."""
    kind = KINDS[step.op]
    names = ("a", "c") if step.op == "elementwise_binary" else kind.tensors_of_spec
    operands = {name: tensors[slot] for name, slot in zip(names, step.inputs, strict=True)}
    choices: dict[str, Any] = {f"op_{name}": TensorOp.CONJ for name, conj in zip(names, step.conj, strict=True) if conj}
    spec = step.spec
    if step.op == "elementwise_binary":  # of which the second lies along the result's modes in their order
        inputs, _, output = spec.partition("->")
        first, second = inputs.split(",")
        spec, choices["op_ac"] = f"{first}->{output}", TensorOp.MUL
        operands["c"] = turned(operands["c"], [second.index(mode) for mode in output])
    elif step.op != "permute":
        choices["autotune"] = request.autotune
    if step.op == "contract":
        choices |= {"compute": request.compute, "jit": request.jit}
    asked = kind(spec, **operands, out=tensors[number], library=library, **choices)
    try:
        made = executor.plan(asked)
    except NoRow as error:
        raise Refused(f"no row takes the step {asked.describe()}") from error
    slots: dict[str, int] = {**dict(zip(names, step.inputs, strict=True)), "out": number}
    order = (*asked.reads, *asked.writes, *asked.numbers)
    return Planned(made, tuple(slots.get(name) for name in order), asked.arguments({}))


def turned(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """A view with the axes in another order."""
    layout = tensor.layout
    shape, strides = (tuple(each[axis] for axis in axes) for each in (layout.shape, layout.strides))
    view = layout.device.layout(layout.dtype, shape, strides, tensor.ptr, layout.readonly)
    return Tensor(tensor.storage, tensor.ptr, view)


def nowhere(executor: CudaExecutor, nbytes: int) -> Storage:
    """Memory that is not there, for tensors of which a plan needs the layout alone."""
    return Storage(executor.device, NOWHERE, nbytes, executor.stream, lambda _: None)


def _result(request: EinsumRequest, executor: CudaExecutor) -> Tensor:
    """The result along each of its modes once: its diagonal, where it has one twice."""
    layout = request.out_layout()
    if request.out is not None:
        storage, ptr = request.out.storage, request.out.ptr
    elif request.autotune:  # which runs the steps
        made = executor.empty(layout.shape, layout.strides, layout.dtype)
        storage, ptr = made.storage, made.ptr
    else:
        storage, ptr = nowhere(executor, layout.high), NOWHERE
    return Tensor(storage, ptr, unique_layout(request))


def blocks(steps: Sequence[Step], sizes: Sequence[int], operands: int) -> tuple[tuple[int, ...], int]:
    """Where what each step but the last gives begins, in bytes, and how many there are in all.

    A step's result lies where nothing is that it or a later step reads.
    """
    last = {number: place for place, step in enumerate(steps) for number in step.inputs}
    live: list[tuple[int, int, int]] = []  # begin, end, the last step that reads it
    offsets = []
    for place, size in enumerate(sizes):
        live = sorted(block for block in live if block[2] >= place)
        begin = 0
        for block in live:
            if block[0] - begin >= size:
                break
            begin = max(begin, block[1])
        live.append((begin, begin + size, last[operands + place]))
        offsets.append(begin)
    return tuple(offsets), max((begin + size for begin, size in zip(offsets, sizes, strict=True)), default=0)


def memory_of(executor: CudaExecutor, nbytes: int, name: str = MEMORY) -> Storage | None:
    """Memory on the device for that many bytes, shared by plans that run one after the other; None for none.

    It is there as long as a plan keeps it. Plans that run within others have memory of another name.
    """
    if not nbytes:
        return None
    size = 1 << (nbytes - 1).bit_length() if nbytes <= EXACT else -(-nbytes // PAGE) * PAGE
    return of_size(executor, size, name)
