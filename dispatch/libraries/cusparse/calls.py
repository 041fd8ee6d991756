"""Plans of consecutive calls of cuSPARSE, with copies between them: only addresses and factors change per run.

The ops determine the calls. In the arguments of a call a descriptor stands for its operand, `OperandPointer` for an
address, `Scalar` and `Constant` for a factor. Plans of an executor share workspace that holds nothing between calls.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

from cudabind.errors import CusparseError
from cudabind.sys import cusparse
from dispatch.core.request import IdlePlan, Plan
from dispatch.errors import Refused
from dispatch.libraries.cublas.calls import Constant, HostScalar, Scalar
from dispatch.libraries.cusolver.copies import Copy, CopyMode
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.descriptors import Descriptor
from dispatch.libraries.cusparse.handle import handle_of
from dispatch.libraries.cusparse.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Call", "CusparsePlan", "DeviceResultCall", "IdlePlan", "PreprocessedCall", "RepeatedCall", "Steps"]

VECTOR = 16  # bytes of the widest load of a kernel
ROUND = 256  # bytes: the alignment of the parts of workspace


class Step(Protocol):
    """A part of a plan."""

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Enqueue it, for these addresses and numbers."""


class Call:
    """A call of cuSPARSE whose arguments are set for each run.

    Before the first run the addresses are those of the executor's workspace, and factors are 1, because the functions
    that return the size of workspace read them: cusparseCsr2cscEx2_bufferSize and cusparseSpVV_bufferSize do not accept
    a null address, and cusparseSpMM_bufferSize returns 0 if alpha is 0.
    """

    __slots__ = ("_descriptors", "_executor", "_handle", "_name", "_numbers", "_slots", "c_arguments")

    def __init__(self, executor: CudaExecutor, name: str, arguments: Sequence[Any]) -> None:
        self._executor, self._handle, self._name = executor, handle_of(executor), name
        self._descriptors: list[tuple[int, Descriptor]] = []
        self._numbers: list[tuple[HostScalar, Scalar | Constant]] = []
        self._slots: list[tuple[ctypes.c_void_p, OperandPointer]] = []
        self.c_arguments = [self._c_argument(place, argument) for place, argument in enumerate(arguments)]

    def _c_argument(self, place: int, argument: Any) -> Any:
        if isinstance(argument, Descriptor):
            self._descriptors.append((place, argument))
            return argument.c
        if isinstance(argument, OperandPointer):
            slot = ctypes.c_void_p(self._executor.workspace.c_ptr.value)
            self._slots.append((slot, argument))
            return slot
        if isinstance(argument, (Scalar, Constant)):
            number = HostScalar(argument.dtype)
            number.set(argument.value if isinstance(argument, Constant) else 1)
            self._numbers.append((number, argument))  # keeps it alive
            return number.address
        return argument

    def buffer_size(self, ending: str = "_bufferSize") -> int:
        """The bytes of workspace, from the function with this ending; Refused if the call is not supported."""
        size = ctypes.c_size_t()
        try:
            getattr(cusparse, f"{self._name}{ending}")(self._handle.follow(), *self.c_arguments, ctypes.byref(size))
        except CusparseError as error:
            if error.name == "CUSPARSE_STATUS_NOT_SUPPORTED":
                raise Refused(f"{self._name} rejects the request: {error}") from error
            raise
        return size.value

    def set_arguments(self, addresses: Sequence[Any]) -> None:
        """Set descriptors, addresses and factors for a run."""
        for place, descriptor in self._descriptors:
            descriptor.set_addresses(addresses)
            self.c_arguments[place] = descriptor.c  # a descriptor for BSR may have been replaced
        for slot, spec in self._slots:
            slot.value = (addresses[spec.operand] + spec.offset) or None
        for number, factor in self._numbers:
            if isinstance(factor, Scalar):
                number.set(addresses[factor.position])

    def invoke(self, name: str, *more: Any) -> None:
        """Call a function with these arguments and `others`; raises the library's error."""
        function: Any = getattr(cusparse, name)
        status = function.unchecked(self._handle.follow(), *self.c_arguments, *more)
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise function.error(status)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Call it."""
        self.set_arguments(addresses)
        self.invoke(self._name)


class RepeatedCall(Call):
    """`count` consecutive calls; `strides` maps an argument's place to its operand's advance per call, in bytes."""

    __slots__ = ("_count", "_strides")

    def __init__(
        self, executor: CudaExecutor, name: str, arguments: Sequence[Any], *, count: int, strides: Mapping[int, int]
    ) -> None:
        super().__init__(executor, name, arguments)
        self._count, self._strides = count, dict(strides)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Make all calls."""
        shifted = list(addresses)
        for _ in range(self._count):
            super().enqueue(shifted)
            for place, nbytes in self._strides.items():
                shifted[place] += nbytes


class PreprocessedCall(Call):
    """A call after its own preprocess step, which analyses the pattern in each run.

    The workspace holds the analysis between the two calls; the next run does not use it.
    """

    __slots__ = ()

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Analyse the pattern, and call it."""
        self.set_arguments(addresses)
        self.invoke(f"{self._name}_preprocess")
        self.invoke(self._name)


class DeviceResultCall(Call):
    """A call that writes its result, a number, to device memory."""

    __slots__ = ()

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Call it, and restore the handle's pointer mode."""
        self.set_arguments(addresses)
        modes = cusparse.cusparsePointerMode_t
        cusparse.cusparseSetPointerMode(self._handle.follow(), modes.CUSPARSE_POINTER_MODE_DEVICE)
        try:
            self.invoke(self._name)
        finally:
            cusparse.cusparseSetPointerMode(self._handle.follow(), modes.CUSPARSE_POINTER_MODE_HOST)


class CopyStep:
    """A copy by a kernel, skipped if source and target are the same memory."""

    __slots__ = ("_copy", "_source", "_target")

    def __init__(self, executor: CudaExecutor, source: Matrix, target: Matrix, batch: int) -> None:
        self._source, self._target = source.pointer.operand, target.pointer.operand
        self._copy = Copy(executor, source, target, batch, CopyMode.ALL, conj=False)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Copy."""
        if addresses[self._source] != addresses[self._target]:
            self._copy.enqueue(addresses)


class CusparsePlan(Plan):
    """Consecutive steps; the addresses of workspace and of its `parts` come after the arguments of a run."""

    __slots__ = ("_executor", "_parts", "_steps", "_work")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        steps: Sequence[Step],
        work: Storage | None,
        parts: Sequence[int],
        *,
        capture_safe: bool,
    ) -> None:
        """`parts` are places in `work`, in bytes from its beginning."""
        super().__init__(row, capture_safe=capture_safe)
        self._executor, self._steps, self._work, self._parts = executor, tuple(steps), work, tuple(parts)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        work = self._work
        if work is not None and work.owner is not self._executor.stream:
            # Created during a capture of the executor's stream, on another stream that has been synchronized since.
            work.owner = work.writer = self._executor.stream
        addresses = self.addresses(arguments)
        for step in self._steps:
            step.enqueue(addresses)

    def addresses(self, arguments: tuple[Argument, ...]) -> tuple[Any, ...]:
        """The arguments of a run, followed by the addresses of workspace and its parts, which do not change."""
        base = 0 if self._work is None else self._work.base
        return (*arguments, base, *(base + part for part in self._parts))


class Steps:
    """Builds a plan step by step; `arguments` is the number of addresses and numbers that a request passes."""

    def __init__(self, executor: CudaExecutor, row: Row, arguments: int) -> None:
        self.executor, self.row = executor, row
        self.placeholder: int = executor.workspace.c_ptr.value or 0
        self._work_place, self._work_bytes = arguments, 0
        self._parts: list[int] = []  # the size of each in bytes
        self._steps: list[Step] = []

    def copy(self, source: Matrix, target: Matrix, batch: int = 1) -> None:
        """Copy a matrix, or a batch of them, to another of the same extents, unless both are the same."""
        if source.rows and source.cols and source.pointer != target.pointer:
            self._steps.append(CopyStep(self.executor, source, target, batch))

    def copy_rounded(self, source: Matrix, target: Matrix) -> None:
        """Copy a matrix to another of the same extents and another dtype."""
        self._steps.append(Rounding(self.executor, source, target))

    def fill_zeros(self, target: Matrix, batch: int = 1) -> None:
        """Write zeros to a matrix, or a batch of them, but not to the gaps between their lines."""
        if target.rows and target.cols:
            self._steps.append(Copy(self.executor, target, target, batch, CopyMode.ZERO, conj=False))

    def allocate(self, nbytes: int) -> int:
        """Reserve memory of the plan, at a multiple of `ROUND` bytes; returns its place among the addresses."""
        self._parts.append(nbytes)
        return self._work_place + len(self._parts)

    def aligned_operand(self, layout: Layout, place: int, alignment: int = VECTOR) -> Matrix:
        """A dense operand itself if it is aligned to so many bytes, else aligned memory for a copy of it."""
        if layout.alignment < alignment:
            place = self.allocate(layout.size * layout.dtype.itemsize)
        return Matrix(OperandPointer(place), layout.dtype, layout.size, 1, 1, max(1, layout.size))

    def call(self, name: str, *arguments: Any, kind: Callable[..., Step] = Call, size: str = "_bufferSize") -> None:
        """Add a call whose last argument is workspace; `size` is the ending of the function that returns its size."""
        self._work_bytes = max(self._work_bytes, Call(self.executor, name, arguments).buffer_size(size))
        self._steps.append(kind(self.executor, name, (*arguments, OperandPointer(self._work_place))))

    def append(self, step: Step) -> None:
        """Add a step of the caller."""
        self._steps.append(step)

    def plan(self, *, capture_safe: bool) -> CusparsePlan:
        """The plan of all steps so far."""
        parts, end = [], self._work_bytes
        for nbytes in self._parts:
            parts.append(-(-end // ROUND) * ROUND)
            end = parts[-1] + nbytes
        work = handle_of(self.executor).memory(self.executor, end)
        return CusparsePlan(self.executor, self.row, self._steps, work, parts, capture_safe=capture_safe)

    def idle_plan(self) -> Plan:
        """A plan that does nothing."""
        return IdlePlan(self.row, capture_safe=False)
