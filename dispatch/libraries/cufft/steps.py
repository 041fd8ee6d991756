"""Plans that are transforms and moves one after another, in scratch memory of their executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dispatch.core.request import Plan
from dispatch.execute.shared_memory import beyond_workspace
from dispatch.libraries.cufft.layouts import dense_view
from dispatch.libraries.cufft.moves import Move
from dispatch.libraries.cufft.transforms import Transform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cufft.layouts import TransformSpec, View

__all__ = ["FftPlan", "Steps"]

ALIGNMENT = 256  # bytes
MEMORY = "cufft"


class Step(Protocol):
    """A part of a plan."""

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Enqueue it, for these addresses."""


class FftPlan(Plan):
    """Steps one after another; behind the addresses of a run stands that of scratch memory."""

    __slots__ = ("_executor", "_memory", "_scratch", "_steps")

    def __init__(
        self, executor: CudaExecutor, row: Row, steps: Sequence[Step], memory: Storage | None, scratch: int
    ) -> None:
        super().__init__(row, capture_safe=bool(steps))
        self._executor, self._memory, self._scratch = executor, memory, scratch
        self._steps = tuple(steps)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        memory = self._memory
        if memory is not None and memory.owner is not self._executor.stream:
            # Made while the caller captured the executor's stream, on another one, which was waited for since.
            memory.owner = memory.writer = self._executor.stream
        addresses = (*arguments, self._scratch)
        for step in self._steps:
            step.enqueue(addresses)


class IdlePlan(FftPlan):
    """Nothing is to be done."""

    __slots__ = ()
    is_bare = True


class Steps:
    """What a plan is built with; `operands` is how many addresses a request gives."""

    def __init__(self, executor: CudaExecutor, row: Row, operands: int) -> None:
        self._executor, self._row, self._scratch = executor, row, operands
        self._bytes = 0
        self._steps: list[Step] = []

    def scratch(self, dtype: Dtype, shape: tuple[int, ...], axes: Sequence[int]) -> View:
        """Dense memory for so many elements, in which these axes are the innermost ones."""
        view = dense_view(self._scratch, self._bytes, dtype, shape, axes, ALIGNMENT)
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        self._bytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return view

    def move(self, source: View, target: View, **choices: Any) -> None:
        """Copy a view into another, as moves.py has it."""
        self._steps.append(Move(self._executor, source, target, **choices))

    def append(self, step: Step) -> None:
        """Add a step of the caller's."""
        self._steps.append(step)

    def transform(self, chain: Sequence[TransformSpec], *, forward: bool) -> None:
        """Transform by these plans of cuFFT, one after another."""
        self._steps += [Transform(self._executor, spec, forward=forward) for spec in chain]

    def plan(self) -> Plan:
        """The plan of all these steps: scratch memory and what cuFFT works in lie in one piece.

        That is the executor's workspace where it is large enough, else memory that its plans of cuFFT share.
        """
        if not self._steps:
            return IdlePlan(self._executor, self._row, (), None, 0)
        transforms = [step for step in self._steps if isinstance(step, Transform)]
        nbytes = self._bytes + max((step.work_bytes for step in transforms), default=0)
        memory, base, nbytes = None, 0, max(nbytes, len(transforms))  # cuFFT wants an address in any case
        if nbytes:
            memory, base = beyond_workspace(self._executor, nbytes, MEMORY)
        for step in transforms:
            step.set_work_area(base + self._bytes)
        return FftPlan(self._executor, self._row, self._steps, memory, base)
