"""Plans that consist of transforms and moves in sequence, in scratch memory of their executor."""

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
        """Enqueue it for these addresses."""


class FftPlan(Plan):
    """Steps in sequence; the address of scratch memory follows the addresses of a run."""

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
            # The plan was made on another stream, while the caller captured the executor's; that stream has finished
            # since.
            memory.owner = memory.writer = self._executor.stream
        addresses = (*arguments, self._scratch)
        for step in self._steps:
            step.enqueue(addresses)


class IdlePlan(FftPlan):
    """A plan without work."""

    __slots__ = ()
    is_bare = True


class Steps:
    """A builder of a plan; `operands` is the number of addresses that a request has."""

    def __init__(self, executor: CudaExecutor, row: Row, operands: int) -> None:
        self._executor, self._row, self._scratch = executor, row, operands
        self._bytes = 0
        self._steps: list[Step] = []

    def scratch(self, dtype: Dtype, shape: tuple[int, ...], axes: Sequence[int]) -> View:
        """Dense scratch memory for this shape, in which these axes are the innermost ones."""
        view = dense_view(self._scratch, self._bytes, dtype, shape, axes, ALIGNMENT)
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        self._bytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return view

    def move(self, source: View, target: View, **choices: Any) -> None:
        """Copy a view into another, by the kernel in moves.py."""
        self._steps.append(Move(self._executor, source, target, **choices))

    def append(self, step: Step) -> None:
        """Add a step of the caller."""
        self._steps.append(step)

    def transform(self, chain: Sequence[TransformSpec], *, forward: bool) -> None:
        """Transform by these cuFFT plans, in sequence."""
        self._steps += [Transform(self._executor, spec, forward=forward) for spec in chain]

    def plan(self) -> Plan:
        """The plan of all these steps: scratch memory and cuFFT's work areas are in one piece of memory.

        That is the executor's workspace if it is large enough, else memory that its cuFFT plans share.
        """
        if not self._steps:
            return IdlePlan(self._executor, self._row, (), None, 0)
        transforms = [step for step in self._steps if isinstance(step, Transform)]
        nbytes = self._bytes + max((step.work_bytes for step in transforms), default=0)
        memory, base, nbytes = None, 0, max(nbytes, len(transforms))  # cuFFT needs a non-null address in any case
        if nbytes:
            memory, base = beyond_workspace(self._executor, nbytes, MEMORY)
        for step in transforms:
            step.set_work_area(base + self._bytes)
        return FftPlan(self._executor, self._row, self._steps, memory, base)
