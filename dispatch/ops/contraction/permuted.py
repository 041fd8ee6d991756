"""Contractions that become a matrix product when some operands are permuted: permutations around one `cublasLtMatmul`.

orders.py chooses the operands to permute.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.request import Argument, IdlePlan, Plan
from dispatch.device.tensor import Tensor
from dispatch.errors import NoRow, Refused
from dispatch.ops.contraction.elementwise import PermuteRequest
from dispatch.ops.contraction.orders import arrangement, dense_strides
from dispatch.ops.contraction.product import steps_of
from dispatch.ops.contraction.request import ContractRequest
from dispatch.ops.contraction.sequence import ALIGNMENT, PLACEHOLDER_ADDRESS, placeholder_storage, plan_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.row import Row
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["PermutedPlan", "permutes", "plan"]

MEMORY = "permuted operands"  # not the memory of intermediate results: such a plan may be a step that uses these


def permutes(request: Any) -> str:
    """Rule: a contraction that is a matrix product only with permuted operands."""
    orders = arrangement(request)
    if isinstance(orders, str):
        return orders
    return "" if orders else "needs an operand that must be permuted, has a matrix product without permutations"


class Step(NamedTuple):
    """A plan and the slots of its arguments: first those of the run, then the addresses of permuted operands."""

    plan: Plan
    slots: tuple[int, ...]
    constants: dict[int, Argument]  # instead of slots


class PermutedPlan(Plan):
    """Permutations, a product, and perhaps another permutation; permuted operands are at fixed addresses."""

    __slots__ = ("_executor", "_fixed", "_memory", "_steps")

    def __init__(
        self, executor: CudaExecutor, row: Row, steps: Sequence[Step], fixed: tuple[int, ...], memory: Storage
    ) -> None:
        super().__init__(row, capture_safe=all(step.plan.capture_safe for step in steps))
        self._executor, self._steps, self._fixed, self._memory = executor, tuple(steps), fixed, memory

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        memory = self._memory
        if memory.owner is not self._executor.stream:
            # Allocated on another stream while the caller captured the executor's stream; that stream has finished
            # since.
            memory.owner = memory.writer = self._executor.stream
        values = (*arguments, *self._fixed)
        for plan, slots, constants in self._steps:
            plan.enqueue(tuple(constants[k] if k in constants else values[slot] for k, slot in enumerate(slots)))


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a contraction; Refused if no row takes one of its steps."""
    if not request.layout_of("out").size:
        return IdlePlan(row)
    orders = arrangement(request)
    if isinstance(orders, str):
        raise Refused(orders)
    return PlanBuilder(request, executor).plan(row, orders)


def collapse_repeated_modes(tensor: Tensor, modes: str, order: str) -> Tensor:
    """A view with one element along the modes along which a tensor has stride 0."""
    layout = tensor.layout
    shape = tuple(extent if mode in order else 1 for mode, extent in zip(modes, layout.shape, strict=True))
    if shape == layout.shape:
        return tensor
    view = layout.device.layout(layout.dtype, shape, layout.strides, tensor.ptr, layout.readonly)
    return Tensor(tensor.storage, tensor.ptr, view)


class PlanBuilder:
    """Builds the plan of one request: its steps, and the memory of its permuted operands."""

    def __init__(self, request: Any, executor: CudaExecutor) -> None:
        self.request, self.executor = request, executor
        self.steps: list[Step] = []
        self.operands = {name: self.tensor_of(name) for name in (*(steps_of(request)),)}

    def tensor_of(self, name: str) -> Tensor:
        """An operand; for an output that is still to be allocated, a placeholder with its layout."""
        tensor: Tensor | None = getattr(self.request, name)
        if tensor is not None:
            return tensor
        layout = self.request.layout_of(name)
        placeholder = self.executor.device.layout(layout.dtype, layout.shape, layout.strides, PLACEHOLDER_ADDRESS)
        return Tensor(placeholder_storage(self.executor, layout.high), PLACEHOLDER_ADDRESS, placeholder)

    def plan(self, row: Row, orders: dict[str, str]) -> PermutedPlan:
        request, executor, sizes = self.request, self.executor, self.request.sizes
        kind = request.result_dtype
        volumes = [prod(sizes[mode] for mode in order) * kind.itemsize for order in orders.values()]
        offsets = [0]
        for nbytes in volumes:
            offsets.append(offsets[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
        memory = plan_memory(executor, offsets[-1], MEMORY)
        if memory is None:
            raise Refused("needs an operand that must be permuted, has none")
        count = len(request.reads) + len(request.writes) + len(request.numbers)
        fixed = tuple(memory.base + offset for offset in offsets[:-1])
        permuted: dict[str, tuple[str, Tensor, int]] = {}  # modes, tensor, slot
        for number, ((name, order), base) in enumerate(zip(orders.items(), fixed, strict=True)):
            # Each mode is one axis. It has extent 1 where the operand has stride 0 or a single element.
            modes = "".join(dict.fromkeys(request.modes_of(name)))
            strides = dense_strides(order, sizes)
            shape = tuple(sizes[mode] if mode in strides else 1 for mode in modes)
            layout = executor.device.layout(kind, shape, tuple(strides.get(mode, 1) for mode in modes), base)
            permuted[name] = modes, Tensor(memory, base, layout), count + number
        for name, order in orders.items():
            if name != "out":
                modes, target, slot = permuted[name]
                source = collapse_repeated_modes(self.operands[name], request.modes_of(name), order)
                spec = f"{request.modes_of(name)}->{modes}"
                self.append_step(PermuteRequest(spec, source, out=target), {"a": request.place_of(name), "out": slot})
        self.multiply(permuted)
        if "out" in orders:
            modes, source, slot = permuted["out"]
            request_of_c = PermuteRequest(f"{modes}->{modes}", source, out=self.operands["out"])
            self.append_step(request_of_c, {"a": slot, "out": request.place_of("out")})
        return PermutedPlan(executor, row, self.steps, fixed, memory)

    def multiply(self, permuted: dict[str, tuple[str, Tensor, int]]) -> None:
        """Append the product, with the run's alpha and beta."""
        request = self.request
        tensors: dict[str, Any] = {
            name: permuted[name][1] if name in permuted else one for name, one in self.operands.items()
        }
        a, b = (permuted[name][0] if name in permuted else request.modes_of(name) for name in ("a", "b"))
        spec = f"{a},{b}->{request.result_modes}"
        choices: dict[str, Any] = {"compute": request.compute, "workspace": request.workspace, "library": "cublasLt"}
        if "c" in tensors:
            choices["beta"] = request.beta
        places = {name: permuted[name][2] if name in permuted else request.place_of(name) for name in tensors}
        first = len(request.reads) + len(request.writes)
        places |= {name: first + number for number, name in enumerate(request.numbers)}
        self.append_step(ContractRequest(spec, alpha=request.alpha, **tensors, **choices), places)

    def append_step(self, asked: Any, places: dict[str, int]) -> None:
        """Append a step by the first row that takes it."""
        try:
            plan = self.executor.plan(asked)
        except NoRow as error:
            raise Refused(f"no row takes the step {asked.describe()}") from error
        order, constants = (*asked.reads, *asked.writes, *asked.numbers), asked.arguments({})
        slots = tuple(places.get(name, -1) for name in order)
        self.steps.append(Step(plan, slots, {k: constants[k] for k, slot in enumerate(slots) if slot < 0}))
