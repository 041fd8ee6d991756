"""Contractions that are a matrix product once some operands are permuted: permutations around one `cublasLtMatmul`.

orders.py says which operands are permuted.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.request import Argument, IdlePlan, Plan
from dispatch.device.tensor import Tensor
from dispatch.errors import NoRow, Refused
from dispatch.ops.contraction.elementwise import PermuteRequest
from dispatch.ops.contraction.orders import along, arrangement
from dispatch.ops.contraction.product import steps_of
from dispatch.ops.contraction.request import ContractRequest
from dispatch.ops.contraction.sequence import ALIGNMENT, NOWHERE, memory_of, nowhere

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.row import Row
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["PermutedPlan", "permutes", "plan"]

MEMORY = "permuted operands"  # beside that of results on the way, for such a plan may be a step between these


def permutes(request: Any) -> str:
    """Rule: a contraction that is a matrix product, but not as its operands lie."""
    found = arrangement(request)
    if isinstance(found, str):
        return found
    return "" if found else "needs an operand to permute, has a matrix product as it is"


class Step(NamedTuple):
    """A plan, and what each of its arguments is: one of the run's, or memory on the way, which comes behind those."""

    plan: Plan
    slots: tuple[int, ...]
    constants: dict[int, Argument]  # instead of slots


class PermutedPlan(Plan):
    """Permutations, a product, and perhaps another permutation, over memory at fixed addresses."""

    __slots__ = ("_executor", "_fixed", "_memory", "_steps")

    def __init__(
        self, executor: CudaExecutor, row: Row, steps: Sequence[Step], fixed: tuple[int, ...], memory: Storage
    ) -> None:
        super().__init__(row, capture_safe=all(step.plan.capture_safe for step in steps))
        self._executor, self._steps, self._fixed, self._memory = executor, tuple(steps), fixed, memory

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        memory = self._memory
        if memory.owner is not self._executor.stream:
            # Made while the caller captured the executor's stream, on another one, which was waited for since.
            memory.owner = memory.writer = self._executor.stream
        there = (*arguments, *self._fixed)
        for plan, slots, constants in self._steps:
            plan.enqueue(tuple(constants[k] if k in constants else there[slot] for k, slot in enumerate(slots)))


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a contraction; Refused where a row is missing for one of its steps."""
    if not request.layout_of("out").size:
        return IdlePlan(row)
    orders = arrangement(request)
    if isinstance(orders, str):
        raise Refused(orders)
    return Making(request, executor).plan(row, orders)


def once(tensor: Tensor, modes: str, order: str) -> Tensor:
    """A view with one element along the modes along which a tensor does not step."""
    layout = tensor.layout
    shape = tuple(extent if mode in order else 1 for mode, extent in zip(modes, layout.shape, strict=True))
    if shape == layout.shape:
        return tensor
    view = layout.device.layout(layout.dtype, shape, layout.strides, tensor.ptr, layout.readonly)
    return Tensor(tensor.storage, tensor.ptr, view)


class Making:
    """The plan of one request: its steps, and the memory on the way."""

    def __init__(self, request: Any, executor: CudaExecutor) -> None:
        self.request, self.executor = request, executor
        self.steps: list[Step] = []
        self.given = {name: self.tensor_of(name) for name in (*(steps_of(request)),)}

    def tensor_of(self, name: str) -> Tensor:
        """An operand, or for an output that is left open a tensor that lies as it will."""
        given: Tensor | None = getattr(self.request, name)
        if given is not None:
            return given
        layout = self.request.layout_of(name)
        made = self.executor.device.layout(layout.dtype, layout.shape, layout.strides, NOWHERE)
        return Tensor(nowhere(self.executor, layout.high), NOWHERE, made)

    def plan(self, row: Row, orders: dict[str, str]) -> PermutedPlan:
        request, executor, sizes = self.request, self.executor, self.request.sizes
        kind = request.result_dtype
        volumes = [prod(sizes[mode] for mode in order) * kind.itemsize for order in orders.values()]
        offsets = [0]
        for nbytes in volumes:
            offsets.append(offsets[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
        memory = memory_of(executor, offsets[-1], MEMORY)
        if memory is None:
            raise Refused("needs an operand to permute, has none")
        count = len(request.reads) + len(request.writes) + len(request.numbers)
        fixed = tuple(memory.base + offset for offset in offsets[:-1])
        moved: dict[str, tuple[str, Tensor, int]] = {}  # modes, tensor, slot
        for number, ((name, order), base) in enumerate(zip(orders.items(), fixed, strict=True)):
            # Each mode is one axis; where an operand does not step along one, or has it of one element, that is 1.
            modes = "".join(dict.fromkeys(request.modes_of(name)))
            strides = along(order, sizes)
            shape = tuple(sizes[mode] if mode in strides else 1 for mode in modes)
            layout = executor.device.layout(kind, shape, tuple(strides.get(mode, 1) for mode in modes), base)
            moved[name] = modes, Tensor(memory, base, layout), count + number
        for name, order in orders.items():
            if name != "out":
                modes, target, slot = moved[name]
                source = once(self.given[name], request.modes_of(name), order)
                spec = f"{request.modes_of(name)}->{modes}"
                self.append(PermuteRequest(spec, source, out=target), {"a": request.place_of(name), "out": slot})
        self.multiply(moved)
        if "out" in orders:
            modes, source, slot = moved["out"]
            asked = PermuteRequest(f"{modes}->{modes}", source, out=self.given["out"])
            self.append(asked, {"a": slot, "out": request.place_of("out")})
        return PermutedPlan(executor, row, self.steps, fixed, memory)

    def multiply(self, moved: dict[str, tuple[str, Tensor, int]]) -> None:
        """The product, of which alpha and beta are those of the run."""
        request = self.request
        tensors: dict[str, Any] = {name: moved[name][1] if name in moved else one for name, one in self.given.items()}
        a, b = (moved[name][0] if name in moved else request.modes_of(name) for name in ("a", "b"))
        spec = f"{a},{b}->{request.result_modes}"
        choices: dict[str, Any] = {"compute": request.compute, "workspace": request.workspace, "library": "cublasLt"}
        if "c" in tensors:
            choices["beta"] = request.beta
        places = {name: moved[name][2] if name in moved else request.place_of(name) for name in tensors}
        first = len(request.reads) + len(request.writes)
        places |= {name: first + number for number, name in enumerate(request.numbers)}
        self.append(ContractRequest(spec, alpha=request.alpha, **tensors, **choices), places)

    def append(self, asked: Any, places: dict[str, int]) -> None:
        """A step, by whichever row takes it."""
        try:
            made = self.executor.plan(asked)
        except NoRow as error:
            raise Refused(f"no row takes the step {asked.describe()}") from error
        order, constants = (*asked.reads, *asked.writes, *asked.numbers), asked.arguments({})
        slots = tuple(places.get(name, -1) for name in order)
        self.steps.append(Step(made, slots, {k: constants[k] for k, slot in enumerate(slots) if slot < 0}))
