"""The requests of this family as cuTENSOR operations with their operands.

cuTENSOR requires the added operand to have the layout of the result; if it has another, it is first copied to the
result. Modes along which a tensor has stride 0, and modes of one element, are omitted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dispatch.core.request import IdlePlan
from dispatch.errors import Refused
from dispatch.keys import C128, F64, Compute, member
from dispatch.libraries.cutensor.caches import read_kernels, read_plans, write_kernels
from dispatch.libraries.cutensor.calls import Call, Constant, Operand, Scalar, TensorPlan, Zero
from dispatch.libraries.cutensor.descriptors import Operation, Preference, TensorOperand
from dispatch.libraries.cutensor.incremental import TuningPlan
from dispatch.ops.contraction import aligned
from dispatch.ops.contraction.choices import ContractionAlgo, TensorOp
from dispatch.ops.contraction.empty_product import EmptyProductPlan, is_empty_product
from dispatch.ops.contraction.modes import lower
from dispatch.ops.contraction.orders import is_intense
from dispatch.ops.contraction.tune import tuned

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["calls_of", "plan"]

# The functions that describe and execute an op, and whether the latter take a workspace.
FUNCTIONS = {
    "contract": ("cutensorCreateContraction", "cutensorContract", True),
    "contract_trinary": ("cutensorCreateContractionTrinary", "cutensorContractTrinary", True),
    "reduce_modes": ("cutensorCreateReduction", "cutensorReduce", True),
    "permute": ("cutensorCreatePermutation", "cutensorPermute", False),
    "elementwise_binary": ("cutensorCreateElementwiseBinary", "cutensorElementwiseBinaryExecute", False),
    "elementwise_trinary": ("cutensorCreateElementwiseTrinary", "cutensorElementwiseTrinaryExecute", False),
}


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; Refused where cuTENSOR has no kernel for it."""
    if not request.layout_of("out").size:
        return IdlePlan(row)
    if is_empty_product(request):
        return EmptyProductPlan(request, executor, row)
    if aligned.needs_aligned_copy(request):
        return aligned.plan(request, executor, row)
    preference, in_order = preference_of(request), not may_leave_stream(request)

    def make_plan(preference: Preference) -> TensorPlan:
        return TensorPlan(executor, row, calls_of(request, row, preference), in_order=in_order)

    if preference.jit:
        executor.refuse_capture("a request with jit=True")
        read_kernels(executor)
    if preference.incremental_count:
        executor.refuse_capture("a request with autotune=True")
        read_plans(executor)
        result: Plan = TuningPlan(executor, row, partial(make_plan, preference), preference.incremental_count)
    elif request.autotune:
        result = tuned(request, executor, row, preference, make_plan)
    elif is_worth_transposing(request):
        try:
            result = make_plan(preference._replace(algo=int(ContractionAlgo.TTGT)))
        except Refused:
            result = make_plan(preference)
    else:
        result = make_plan(preference)
    if preference.jit:
        write_kernels(executor)
    return result


def is_worth_transposing(request: Any) -> bool:
    """Whether a contraction is faster with transposed operands (TTGT), although cuTENSOR's model does not choose that.

    On an H200 with cuTENSOR 2.8.1 f32 with two modes of 40 summed over took 366 us with cuTENSOR's choice and 217 with
    TTGT, with a long sum of 25,600 terms 128 and 69; with 80 operations per element or fewer its choice was faster.
    """
    if request.op != "contract" or request.compute is not None or not leaves_kernel_open(request):
        return False
    return is_intense(request.sizes, (request.modes_of("a"), request.modes_of("b"), request.result_modes))


def leaves_kernel_open(request: Any) -> bool:
    """Whether the request leaves the choice of a kernel to this library."""
    return all(getattr(request, name) is None for name in ("algo", "kernel_rank", "workspace")) and not request.jit


def may_leave_stream(request: Any) -> bool:
    """Whether a part of a call may run outside the stream: contractions of three tensors, or of two to a scalar.

    On an H100 cuTENSOR 2.8.1 ran a part of some of these immediately, outside of a recording: with placeholder
    addresses that destroyed the context, and within a caller's capture it returned CUTENSOR_STATUS_CUDA_ERROR. So they
    are not recorded, and the host waits for operands that are still being written.
    """
    if request.op == "contract_trinary":
        return True
    if request.op != "contract" or any(request.sizes[mode] > 1 for mode in request.result_modes):
        return False
    return any(size > 1 for size in request.sizes.values())


def preference_of(request: Any) -> Preference:
    """The preference for kernels in a request."""
    if request.op not in ("contract", "contract_trinary", "reduce_modes"):
        return Preference()
    algo = ContractionAlgo.DEFAULT if request.algo is None else member(request.algo)
    return Preference(int(algo), request.kernel_rank, request.jit, request.workspace, request.incremental_count or 0)


def tensor_operand(request: Any, name: str, operator: TensorOp = TensorOp.IDENTITY) -> TensorOperand:
    """An operand in cuTENSOR's terms."""
    layout = request.layout_of(name)
    view = lower(request.modes_of(name), layout, request.sizes)
    return TensorOperand(view.modes, view.extents, view.strides, layout.dtype, layout.alignment, int(operator))


def calls_of(request: Any, row: Row, preference: Preference) -> list[Call | Zero]:
    """The cuTENSOR calls that execute a request, and memory to set to 0."""
    out = tensor_operand(request, "out")
    if any(extent == 0 for extent in request.sizes.values()):
        layout = request.layout_of("out")  # a sum of no elements
        return [Zero(request.place_of("out"), layout.low, layout.high - layout.low)]
    compute: Any = row.compute
    inputs: list[TensorOperand] = []
    places: dict[str, Operand] = {}
    calls: list[Call | Zero] = []
    fields = {name: field for field, name in request.unary.items()}
    for name in request.reads:
        if name == request.added and not request.reads_added:
            continue
        operator = request.operator(fields[name]) if name in fields else TensorOp.IDENTITY
        operand, places[name] = tensor_operand(request, name, operator), Operand(request.place_of(name))
        if name == request.added:
            if operand[:4] != out[:4]:
                calls.append(copy_call(request, operand._replace(operator=1), out))
                places[name], operand = Operand(request.place_of("out")), out
            alignment = min(operand.alignment, out.alignment)  # both must have the same descriptor
            out, operand = (
                out._replace(alignment=alignment),
                operand._replace(alignment=alignment, operator=int(operator)),
            )
        inputs.append(operand)
    create, execute, uses_workspace = FUNCTIONS[request.op]
    if uses_workspace and not request.reads_added:
        inputs.append(out)  # a factor of 0 means that it is not read
    binary = tuple(int(member(getattr(request, field))) for field in request.binary)
    operation = Operation(create, tuple(inputs), out, binary, compute)
    calls.append(Call(operation, execute, arguments_of(request, places), uses_workspace, preference))
    return calls


def copy_call(request: Any, source: TensorOperand, target: TensorOperand) -> Call:
    """The call that copies the added operand to the result."""
    is_double = source.dtype in (F64, C128)
    compute = Compute.COMPUTE_64F if is_double else Compute.COMPUTE_32F
    operation = Operation("cutensorCreatePermutation", (source,), target, (), compute)
    places = Operand(request.place_of(request.added)), Operand(request.place_of("out"))
    return Call(operation, "cutensorPermute", (Constant(1.0), *places))


def arguments_of(request: Any, places: dict[str, Operand]) -> tuple[Any, ...]:
    """Factors and operands in the order of the function that executes an op, the result last."""
    out = Operand(request.place_of("out"))
    first_number = len(request.reads) + len(request.writes)
    scalars = {name: Scalar(first_number + place) for place, name in enumerate(request.numbers)}
    if request.op in ("contract", "contract_trinary", "reduce_modes"):
        operands = [places[name] for name in request.tensors_of_spec]
        beta = scalars["beta"] if request.reads_added else Constant(0.0)
        return (scalars["alpha"], *operands, beta, places.get(request.added, out), out)
    pairs = [(scalars[number], places[name]) for number, name in zip(request.numbers, request.reads, strict=True)]
    return (*(one for pair in pairs for one in pair), out)
