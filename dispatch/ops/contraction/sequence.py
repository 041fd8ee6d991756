"""einsum on a GPU: a plan for each step, by the row that the table chooses, and memory for intermediate results."""

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

__all__ = [
    "ALIGNMENT",
    "PLACEHOLDER_ADDRESS",
    "EinsumPlan",
    "intermediate_blocks",
    "placeholder_storage",
    "plan",
    "plan_memory",
]

PLACEHOLDER_ADDRESS = 1 << 20  # an address that no tensor has
ALIGNMENT = 256  # bytes
MAX_POWER_OF_2 = 64 << 20  # bytes: up to it sizes are powers of 2, above it multiples of PAGE
PAGE = 2 << 20
MEMORY = "einsum"
REQUEST_CLASSES: dict[str, Any] = {
    "contract": ContractRequest,
    "reduce_modes": ReduceModesRequest,
    "permute": PermuteRequest,
    "elementwise_binary": ElementwiseBinaryRequest,
}


class PlannedStep(NamedTuple):
    """The plan of a step, and its arguments: each is the number of a tensor, or a constant."""

    plan: Plan
    slots: tuple[int | None, ...]
    constants: tuple[Argument, ...]


class EinsumPlan(Plan):
    """Steps in sequence; intermediate results are in `memory`, at fixed addresses."""

    __slots__ = ("_executor", "_fixed", "_memory", "_steps", "_zeroed")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        steps: Sequence[PlannedStep],
        fixed: tuple[int, ...],
        memory: Storage | None,
        zeroed: tuple[int, int] | None,
    ) -> None:
        super().__init__(row, capture_safe=all(step.plan.capture_safe or step.plan.is_bare for step in steps))
        self._executor, self._steps, self._fixed, self._memory = executor, tuple(steps), fixed, memory
        self._zeroed = zeroed  # offset and number of the result's bytes, if they are set to 0 first

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        memory = self._memory
        if memory is not None and memory.owner is not self._executor.stream:
            # Allocated on another stream while the caller captured the executor's stream; that stream has finished
            # since.
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
    """The plan of a request; Refused if no row takes one of its steps, or the device has too little memory."""
    if not request.out_layout().size:
        return IdlePlan(row)
    count = len(request.operands)
    offsets, nbytes = _intermediate_offsets(request)
    if nbytes and nbytes > (total := driver.cuMemGetInfo()[1]):
        request = _fit_to_memory(request, nbytes, total)
        offsets, nbytes = _intermediate_offsets(request)
    steps = request.schedule.steps
    memory = plan_memory(executor, nbytes)
    base = PLACEHOLDER_ADDRESS if memory is None else memory.base
    tensors: list[Tensor] = list(request.operands)
    for step, offset in zip(steps[:-1], offsets, strict=True):
        dtype = _step_dtype(request, step)
        layout = executor.device.layout(dtype, step.shape, c_strides(step.shape), base + offset)
        tensors.append(Tensor(memory or placeholder_storage(executor, layout.high), base + offset, layout))
    tensors.append(_result_tensor(request, executor))
    library = request.library or (None if row.library == "cutensor" else row.library)
    planned = [
        _plan_step(request, executor, step, tensors, count + number, library) for number, step in enumerate(steps)
    ]
    layout, output = request.out_layout(), request.parsed[1]
    zeroed = None if len(set(output)) == len(output) else (layout.low, layout.high - layout.low)
    return EinsumPlan(executor, row, planned, tuple(base + offset for offset in offsets), memory, zeroed)


def _intermediate_offsets(request: EinsumRequest) -> tuple[tuple[int, ...], int]:
    """The offsets of intermediate results in memory, and the total number of bytes."""
    steps = request.schedule.steps
    sizes = [_aligned_nbytes(step.shape, _step_dtype(request, step)) for step in steps[:-1]]
    return intermediate_blocks(steps, sizes, len(request.operands))


def _fit_to_memory(request: EinsumRequest, nbytes: int, total: int) -> EinsumRequest:
    """The request with a path whose intermediate results fit in the device's memory; Refused if there is none."""
    reason = f"intermediate results need {nbytes:,} bytes, and the device has {total:,}"
    if request.memory_limit is not None:
        raise Refused(reason)
    try:
        fitting = replace(request, memory_limit=total)
    except BadRequest as error:
        raise Refused(f"{reason}: {error}") from error
    if _intermediate_offsets(fitting)[1] > total:
        raise Refused(reason)
    return fitting


def _step_dtype(request: EinsumRequest, step: Step) -> Dtype:
    """The dtype of a step's result: the common precision, complex if an operand is."""
    count = len(request.operands)
    for number in step.inputs:
        one = (
            request.operands[number].dtype
            if number < count
            else _step_dtype(request, request.schedule.steps[number - count])
        )
        if one.is_complex:
            return COMPLEX[request.precision]
    return request.precision


def _aligned_nbytes(shape: tuple[int, ...], dtype: Dtype) -> int:
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _plan_step(
    request: EinsumRequest,
    executor: CudaExecutor,
    step: Step,
    tensors: Sequence[Tensor],
    number: int,
    library: str | None,
) -> PlannedStep:
    """The plan of a step, whose result is the tensor with this number."""
    kind = REQUEST_CLASSES[step.op]
    names = ("a", "c") if step.op == "elementwise_binary" else kind.tensors_of_spec
    operands = {name: tensors[slot] for name, slot in zip(names, step.inputs, strict=True)}
    choices: dict[str, Any] = {f"op_{name}": TensorOp.CONJ for name, conj in zip(names, step.conj, strict=True) if conj}
    spec = step.spec
    if step.op == "elementwise_binary":  # its second operand has the result's modes in their order
        inputs, _, output = spec.partition("->")
        first, second = inputs.split(",")
        spec, choices["op_ac"] = f"{first}->{output}", TensorOp.MUL
        operands["c"] = transposed(operands["c"], [second.index(mode) for mode in output])
    elif step.op != "permute":
        choices["autotune"] = request.autotune
    if step.op == "contract":
        choices |= {"compute": request.compute, "jit": request.jit}
    step_request = kind(spec, **operands, out=tensors[number], library=library, **choices)
    try:
        plan = executor.plan(step_request)
    except NoRow as error:
        raise Refused(f"no row takes the step {step_request.describe()}") from error
    slots: dict[str, int] = {**dict(zip(names, step.inputs, strict=True)), "out": number}
    order = (*step_request.reads, *step_request.writes, *step_request.numbers)
    return PlannedStep(plan, tuple(slots.get(name) for name in order), step_request.arguments({}))


def transposed(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """A view with the axes in another order."""
    layout = tensor.layout
    shape, strides = (tuple(each[axis] for axis in axes) for each in (layout.shape, layout.strides))
    view = layout.device.layout(layout.dtype, shape, strides, tensor.ptr, layout.readonly)
    return Tensor(tensor.storage, tensor.ptr, view)


def placeholder_storage(executor: CudaExecutor, nbytes: int) -> Storage:
    """A storage without memory, for tensors whose layout is all that a plan needs."""
    return Storage(executor.device, PLACEHOLDER_ADDRESS, nbytes, executor.stream, lambda _: None)


def _result_tensor(request: EinsumRequest, executor: CudaExecutor) -> Tensor:
    """The result with each of its modes once: for a mode that it has twice, its diagonal."""
    layout = request.out_layout()
    if request.out is not None:
        storage, ptr = request.out.storage, request.out.ptr
    elif request.autotune:  # autotuning runs the steps
        allocated = executor.empty(layout.shape, layout.strides, layout.dtype)
        storage, ptr = allocated.storage, allocated.ptr
    else:
        storage, ptr = placeholder_storage(executor, layout.high), PLACEHOLDER_ADDRESS
    return Tensor(storage, ptr, unique_layout(request))


def intermediate_blocks(steps: Sequence[Step], sizes: Sequence[int], operands: int) -> tuple[tuple[int, ...], int]:
    """The offsets in bytes of the results of all steps but the last, and the total number of bytes.

    A step's result overlaps nothing that this or a later step reads.
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


def plan_memory(executor: CudaExecutor, nbytes: int, name: str = MEMORY) -> Storage | None:
    """A block of memory on the device, shared by plans that run one after the other; None for 0 bytes.

    It is freed when no plan holds it. Plans that run within others use another name.
    """
    if not nbytes:
        return None
    size = 1 << (nbytes - 1).bit_length() if nbytes <= MAX_POWER_OF_2 else -(-nbytes // PAGE) * PAGE
    return of_size(executor, size, name)
