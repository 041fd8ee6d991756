"""cuFFT's plans: made without a work area, used by one plan of this library at a time, then cached for the next one.

cuFFT does not report how much device memory a plan holds, in tables of roots of unity and kernels: `estimated_bytes`
estimates it. If the plans of one executor exceed `LIMIT` bytes, the executor drops all of them and makes them again
when they are needed. Idle plans above the limit are destroyed, the oldest first, and only while another plan is made,
because destroying one waits for the GPU.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind.errors import CudaError, CufftError
from cudabind.sys import cufft
from dispatch.device.stream import QuietStream
from dispatch.errors import DispatchError, Refused

if TYPE_CHECKING:
    from collections import deque

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cufft.layouts import Problem, TransformSpec

__all__ = ["LIMIT", "CallbackRoutine", "Transform", "estimated_bytes"]

DATA, KINDS = cufft.cudaDataType_t, cufft.cufftType_t
LIMIT = 512 << 20  # bytes
PLAN_BYTES = 1 << 20  # estimated bytes of a plan, independent of its size
TABLE_POINTS = 4  # roots of unity for each point along an axis; a size with a large prime has those of two larger sizes
IDLE_PLANS = "cufft"
REFUSALS = ("CUFFT_NOT_SUPPORTED", "CUFFT_NOT_IMPLEMENTED", "CUFFT_INVALID_SIZE", "CUFFT_INVALID_TYPE")
# Linking callbacks may need more registers or memory than there are; cuFFT reports no more than these statuses.
CALLBACK_REFUSALS = (
    *REFUSALS,
    "CUFFT_INTERNAL_ERROR",
    "CUFFT_SETUP_FAILED",
    "CUFFT_NVRTC_FAILURE",
    "CUFFT_NVJITLINK_FAILURE",
)
MAX_BASIC = 2**31 - 1  # points of a plan with 32-bit sizes
BASIC = {
    (int(given), int(made)): int(kind)
    for given, made, kind in (
        (DATA.CUDA_C_32F, DATA.CUDA_C_32F, KINDS.CUFFT_C2C),
        (DATA.CUDA_R_32F, DATA.CUDA_C_32F, KINDS.CUFFT_R2C),
        (DATA.CUDA_C_32F, DATA.CUDA_R_32F, KINDS.CUFFT_C2R),
        (DATA.CUDA_C_64F, DATA.CUDA_C_64F, KINDS.CUFFT_Z2Z),
        (DATA.CUDA_R_64F, DATA.CUDA_C_64F, KINDS.CUFFT_D2Z),
        (DATA.CUDA_C_64F, DATA.CUDA_R_64F, KINDS.CUFFT_Z2D),
    )
}
POINT_BYTES = 16  # bytes, of the largest complex number
BLOCK_BYTES = 512  # bytes of a plan's callback block; those of the store callback are in the second half
FIRST_STORE = 4  # the first type of store callbacks


class CallbackRoutine(NamedTuple):
    """A callback: its cufftXtCallbackType, its name in C++, unmangled, and its LTO-IR."""

    kind: int
    symbol: str
    code: bytes


class CachedPlan(NamedTuple):
    """A cuFFT plan, its problem, and the size of its work area, which it does not own.

    Its callbacks find their operands in `block`, whose address stays the same during the life of the plan. cuFFT does
    not copy what it gets for a callback: names and lists of addresses stay in `callback_arguments`, code in `routines`,
    until the plan is destroyed.
    """

    problem: Problem
    handle: int
    work: int
    routines: tuple[CallbackRoutine, ...] = ()
    block: Storage | None = None
    callback_arguments: tuple[Any, ...] = ()


def estimated_bytes(problem: Problem) -> int:
    """An estimate of the device memory that a plan holds."""
    return PLAN_BYTES + TABLE_POINTS * POINT_BYTES * sum(problem.sizes)


def destroy(plan: CachedPlan) -> int:
    """Destroy a plan; returns cuFFT's status."""
    status: int = cufft.cufftDestroy.unchecked(plan.handle)
    return status


class PlanMemory:
    """The bytes that the plans of one executor hold; `spared` are those still in use when the executor dropped them."""

    __slots__ = ("nbytes", "spared")

    def __init__(self) -> None:
        self.nbytes = self.spared = 0


class Transform:
    """A cuFFT plan as a step of a plan of this library, which calls it at one or several offsets of its operands.

    Guarantees: the cuFFT plan has one user at a time, and is returned exactly once, when this object is freed. The next
    user's work is ordered after that of the first. It is destroyed with its device, or when too many are cached.
    """

    __slots__ = (
        "__weakref__",
        "_account",
        "_device",
        "_executor",
        "_forward",
        "_last_stream",
        "_plan",
        "_spec",
        "_stream",
    )

    def __init__(
        self, executor: CudaExecutor, spec: TransformSpec, *, forward: bool, routines: tuple[CallbackRoutine, ...] = ()
    ) -> None:
        self._plan: CachedPlan | None = None
        self._executor, self._device, self._spec = executor, executor.device, spec
        self._forward = cufft.CUFFT_FORWARD if forward else cufft.CUFFT_INVERSE
        self._stream: int | None = -1  # a stream that does not exist
        self._last_stream = executor.stream.stream if isinstance(executor.stream, QuietStream) else executor.stream
        account: PlanMemory = executor.handles.setdefault(IDLE_PLANS, PlanMemory())
        self._account, account.spared = account, min(account.spared, account.nbytes)
        if account.nbytes + estimated_bytes(spec.problem) > LIMIT + account.spared:
            executor.forget()
            account.spared = account.nbytes
        idle: Any = self._device.idle[IDLE_PLANS]
        plan = take_idle(idle, spec.problem, routines)
        if plan is None:
            block = executor.device.allocate(BLOCK_BYTES, executor.stream) if routines else None
            plan = make_plan(spec.problem, routines, block)
            trim_idle(idle)
        else:
            executor.stream.wait_for_uses(self._device.releases.side)
        self._plan = plan
        self._account.nbytes += estimated_bytes(spec.problem)

    @property
    def work_bytes(self) -> int:
        """The size of its work area."""
        return 0 if self._plan is None else self._plan.work

    def set_work_area(self, address: int) -> None:
        """Set the work area; plans on one stream may share one."""
        if self._plan is not None:
            cufft.cufftSetWorkArea(self._plan.handle, address)

    def claim_block(self) -> None:
        """Make the executor's stream the owner of the callbacks' block, after the work of its previous owner."""
        plan: Any = self._plan
        if plan.block.owner is not self._executor.stream:  # the plan had another user, whose work has finished
            plan.block.owner = plan.block.writer = self._executor.stream

    def enqueue(self, addresses: Any) -> None:
        """Enqueue the transform for these addresses."""
        plan: Any = self._plan
        stream = self._executor.target.value
        if stream != self._stream:
            cufft.cufftSetStream(plan.handle, cufft.cudaStream_t(stream))
            self._stream = stream
        source, target = self._spec.source, self._spec.target
        first = addresses[source.operand] + source.offset
        second = addresses[target.operand] + target.offset
        execute: Any = cufft.cufftXtExec
        for source_offset, target_offset in self._spec.offsets:
            status = execute.unchecked(plan.handle, first + source_offset, second + target_offset, self._forward)
            if status:
                self._executor.stream.done()  # raises DeviceFault if the device is lost
                raise execute.error(status)

    def close(self) -> None:
        """Return the cuFFT plan to the cache; a second call does nothing."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        self._account.nbytes -= estimated_bytes(plan.problem)
        if self._device.fault is None:
            with suppress(CudaError, DispatchError):  # a stream under capture, whose work has not run yet
                self._device.releases.side.wait_for_uses(self._last_stream)
            self._device.idle[IDLE_PLANS].append((plan, destroy))

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._device.alive:
            self.close()


def take_idle(idle: deque[Any], problem: Problem, routines: tuple[CallbackRoutine, ...] = ()) -> CachedPlan | None:
    """Take an idle plan for a problem out of the cache; None if there is none."""
    for entry in idle.copy():
        if entry[0].problem == problem and entry[0].routines == routines:
            try:
                idle.remove(entry)
            except ValueError:  # another thread took it
                continue
            plan: CachedPlan = entry[0]
            return plan
    return None


def trim_idle(idle: deque[Any]) -> None:
    """Destroy the oldest idle plans until the others are within the limit."""
    while idle and sum(estimated_bytes(entry[0].problem) for entry in idle.copy()) > LIMIT:
        try:
            plan, end = idle.popleft()
        except IndexError:  # another thread took it
            return
        end(plan)


def make_plan(problem: Problem, routines: tuple[CallbackRoutine, ...] = (), block: Storage | None = None) -> CachedPlan:
    """Make a plan without a work area; Refused if cuFFT has none for the problem.

    cuFFT stores pointers to a callback's name and code, and reads them when the plan is made: if that memory was freed,
    making the plan ends in CUFFT_INTERNAL_ERROR, or in another error.
    """
    handle, work, callback_arguments = ctypes.c_int32(), ctypes.c_size_t(), []
    cufft.cufftCreate(ctypes.byref(handle))
    try:
        cufft.cufftSetAutoAllocation(handle.value, 0)
        for one in routines:
            storage: Any = block
            at = (ctypes.c_void_p * 1)(storage.base + (BLOCK_BYTES // 2 if one.kind >= FIRST_STORE else 0))
            name = one.symbol.encode()
            callback_arguments.append((name, at))
            cufft.cufftXtSetJITCallback(
                handle.value, name, one.code, len(one.code), cufft.cufftXtCallbackType(one.kind), at
            )
        if not routines and is_basic(problem):
            cufft_type = cufft.cufftType_t(BASIC[problem.in_type, problem.out_type])
            cufft.cufftMakePlan1d(handle.value, problem.sizes[0], cufft_type, problem.batch, ctypes.byref(work))
        else:
            _make_many(handle.value, problem, work)
    except CufftError as error:
        cufft.cufftDestroy.unchecked(handle.value)
        if error.name in (REFUSALS if not routines else CALLBACK_REFUSALS):
            raise Refused(f"cuFFT has no plan for sizes {list(problem.sizes)}: {error}") from error
        raise
    return CachedPlan(problem, handle.value, work.value, routines, block, tuple(callback_arguments))


def is_basic(problem: Problem) -> bool:
    """Whether the problem is dense transforms along one axis, next to each other, as cufftMakePlan1d takes them.

    cuFFT may have other kernels for these: on an H100 64 transforms of 2^18 real numbers took 157 us with such a plan
    and 193 with an equivalent plan of cufftXtMakePlanMany with embedded extents; 16 of 2^20 took 165 and 200.
    """
    if len(problem.sizes) != 1 or (problem.in_stride, problem.out_stride) != (1, 1):
        return False
    (n,), half = problem.sizes, problem.sizes[0] // 2 + 1
    halves = problem.in_type != problem.out_type
    extents = [half if halves and kind == problem.execution else n for kind in (problem.in_type, problem.out_type)]
    dense = problem.batch == 1 or [problem.in_dist, problem.out_dist] == extents
    return dense and (problem.in_type, problem.out_type) in BASIC and n * problem.batch <= MAX_BASIC


def _make_many(handle: int, problem: Problem, work: ctypes.c_size_t) -> None:
    """Make a plan for any layout."""
    rank, kind = len(problem.sizes), cufft.cudaDataType_t
    extents: Any = ctypes.c_int64 * rank
    sizes, in_embed, out_embed = (extents(*one) for one in (problem.sizes, problem.in_embed, problem.out_embed))
    source_layout = problem.in_stride, problem.in_dist, kind(problem.in_type)
    target_layout = problem.out_stride, problem.out_dist, kind(problem.out_type)
    batch_arguments = problem.batch, ctypes.byref(work), kind(problem.execution)
    cufft.cufftXtMakePlanMany(
        handle, rank, sizes, in_embed, *source_layout, out_embed, *target_layout, *batch_arguments
    )
