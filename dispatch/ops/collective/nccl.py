"""Collectives by NCCL: one call of the library, or a group of sends and receives if parts have different sizes.

This library never captures or learns a plan of them by itself: a call that the other ranks do not make never ends, and
NCCL may exchange addresses between ranks during a capture. A graph that the caller captures on all ranks may contain
such calls, and `prepare(request, graph=True)` captures one, on all ranks (nccl_graph.py). A capture makes all later
calls of its communicator 2 us slower on the host, because NCCL then orders calls and graphs. Follows
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/colls.html.
"""

from __future__ import annotations

import ctypes
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind.sys import nccl
from dispatch.core.request import Plan
from dispatch.device.disposal import enqueueing_collectives
from dispatch.device.stream import RELAXED, exchange_mode, relaxed
from dispatch.errors import BadRequest
from dispatch.execute.launches import KERNELS
from dispatch.execute.relocated_graph import MISFIT
from dispatch.keys import U8
from dispatch.libraries.nccl import group
from dispatch.ops.collective import nccl_messages
from dispatch.ops.collective.group import is_group_open, keep_operands, open_nccl_group
from dispatch.ops.collective.nccl_graph import capture_collective
from dispatch.ops.collective.nccl_messages import (
    DTYPES,
    IN_PROGRESS,
    CallContext,
    row_elements,
    row_offsets,
    run_in_group,
)
from dispatch.ops.collective.request import RedOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.collective.nccl_graph import CollectiveGraph
    from dispatch.ops.collective.nccl_messages import Call

    # Takes a plan's arguments, the stream, and the number of a reduction op.
    CallWith = Callable[[tuple[Argument, ...], int | None, int], int]

__all__ = ["NcclPlan", "plan"]

DEVICE, HOST_IMMEDIATE = 0, 1  # values of ncclScalarResidence_t


class NcclPlan(Plan):
    """A request's calls on its communicator.

    Guarantees: no call is made on a communicator that has failed, or while another thread aborts it.
    """

    __slots__ = ("_calls",)
    is_bare = True

    def __init__(self, row: Row, ctx: CallContext, call: Call) -> None:
        super().__init__(row, capture_safe=False)
        self._calls = NcclCalls(ctx, call)
        self.launch = self._calls.launch

    def hold(self, tensors: tuple[Tensor, ...]) -> None:
        keep_operands(tensors)

    def as_calls(self, arguments: tuple[Argument, ...], tensors: tuple[Tensor, ...]) -> PreparedCalls:
        return PreparedCalls(self._calls, arguments, tensors)

    def as_graph(self, arguments: tuple[Argument, ...]) -> CollectiveGraph:
        """Capture the calls, as all ranks do together; errors as of `enqueue`, BadRequest inside a collective_group."""
        if is_group_open():
            raise BadRequest("graph", "True inside a collective_group", "False", "prepare the call before the group")
        calls = self._calls
        calls.refuse_graph()
        enqueue = partial(calls.enqueue, arguments, is_captured=True)
        return capture_collective(calls.comm, calls.executor, enqueue, calls.function)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Enqueue the calls; CollectiveError, CollectiveTimeout or RankLost if the communicator has failed."""
        calls = self._calls
        is_captured = calls.executor.captured
        if is_captured:
            calls.refuse_graph()
            calls.comm.in_graphs = True
        calls.enqueue(arguments, is_captured=is_captured)


class NcclCalls:
    """Makes a plan's calls; it does not refer to the plan, so that a plan is freed without the garbage collector."""

    __slots__ = ("_call", "comm", "executor", "function")

    def __init__(self, ctx: CallContext, call: Call) -> None:
        self.comm, self.executor, self.function = ctx.comm, ctx.executor, ctx.function
        self._call = call

    def launch(self, arguments: tuple[Argument, ...]) -> int:
        """Make the calls on the executor's stream, which is not under capture; MISFIT in a group, whose end makes them.

        This is the short way of calls that repeat: it does the same as the executor's `call`, but takes 5 us less.
        """
        if is_group_open() or group.current.depth:
            return MISFIT
        executor, launches = self.executor, self.executor.launches
        launches.left -= KERNELS
        context, exchange, mode = executor.device.context, exchange_mode(), ctypes.byref(ctypes.c_int(RELAXED))
        if status := context.push():
            return int(status)
        exchange(mode)
        try:
            self._enqueue(arguments, launches.stream_handle, is_captured=False)
        finally:
            exchange(mode)
            context.pop()
        return 0

    def enqueue(self, arguments: tuple[Argument, ...], *, is_captured: bool) -> None:
        """Make the calls on the stream to which the executor's plans enqueue now."""
        open_nccl_group()
        self._enqueue(arguments, self.executor.target, is_captured=is_captured)

    def _enqueue(self, arguments: tuple[Argument, ...], stream: ctypes.c_void_p, *, is_captured: bool) -> None:
        comm = self.comm
        with enqueueing_collectives():
            with comm.lock:
                if comm.error is not None or comm.closed:
                    comm.check()
                # NCCL may connect now, which waits for other ranks.
                comm.call_deadline = time.monotonic() + comm.deadline
                status = self._call(arguments, stream.value)
                comm.call_deadline = math.inf
            if group.current.depth:
                if status not in (0, IN_PROGRESS):
                    comm.raise_status(self.function, status)
                group.current.add(comm, stream, self.function, captured=is_captured)
                return
            if status:
                comm.settle(self.function, status)
            if not is_captured:  # a captured call is not running yet
                comm.record_work(stream, self.function)

    def refuse_graph(self) -> None:
        """BadRequest if no graph may contain the communicator's calls."""
        comm = self.comm
        if comm.config.graph_usage_mode == 0:
            actual = f"{comm!r}, whose graph_usage_mode is 0, under capture"
            raise BadRequest("comm", actual, "a communicator made with NcclConfig(graph_usage_mode=2), or none")


class PreparedCalls:
    """The calls of a prepared request: at the same addresses each time."""

    __slots__ = ("_arguments", "_calls", "_tensors")

    def __init__(self, calls: NcclCalls, arguments: tuple[Argument, ...], tensors: tuple[Tensor, ...]) -> None:
        self._calls, self._arguments, self._tensors = calls, arguments, tensors

    def launch(self) -> int:
        """Make the calls, or add them to this thread's group; returns the driver's status."""
        status = self._calls.launch(self._arguments)
        if status == MISFIT:
            keep_operands(self._tensors)
            with self._calls.executor.device.context, relaxed():
                self._calls.enqueue(self._arguments, is_captured=False)
            return 0
        return status


def plan(request: Any, executor: CudaExecutor, row: Row) -> NcclPlan:
    """The plan of a collective by NCCL."""
    ctx = CallContext(request, request.ranks, executor, row.function)
    return NcclPlan(row, ctx, MAKERS[request.op](ctx))


# -- one call ---------------------------------------------------------------------------------------------------------
def _all_reduce(ctx: CallContext) -> Call:
    return _reducing_call(ctx, nccl.ncclAllReduce, ctx.request.x.size)


def _reduce_to(ctx: CallContext) -> Call:
    return _reducing_call(ctx, nccl.ncclReduce, ctx.request.x.size, ctx.request.root)


def _reduce_scatter(ctx: CallContext) -> Call:
    request = ctx.request
    if request.counts is None:
        return _reducing_call(ctx, nccl.ncclReduceScatter, request.x.size // ctx.comm.size)
    row = row_elements(request)
    parts = row_offsets(request.counts, row * request.x.dtype.itemsize)
    run, op = _reduce_rows(ctx, parts, row), _number_of(ctx)
    return _with_own_op(ctx, run) if op is None else lambda given, stream: run(given, stream, op)


def _reducing_call(ctx: CallContext, function: Any, count: int, *root: Any) -> Call:
    """A reduction of `count` elements; the op is set for each call."""
    call, x, out, dtype, handle = function.unchecked, ctx.position("x"), ctx.position("out"), ctx.dtype, ctx.handle
    op = _number_of(ctx)
    if op is None:
        return _with_own_op(
            ctx, lambda given, stream, op: int(call(given[x], given[out], count, dtype, op, *root, handle, stream))
        )

    def run(given: tuple[Argument, ...], stream: int | None) -> int:
        status: int = call(given[x], given[out], count, dtype, op, *root, handle, stream)
        return status

    return run


def _reduce_rows(ctx: CallContext, parts: Sequence[tuple[int, int]], row: int) -> CallWith:
    """Reductions of each rank's rows to that rank, as a group."""
    call, x, out, own_rank = nccl.ncclReduce.unchecked, ctx.position("x"), ctx.position("out"), ctx.comm.rank
    dtype, handle = ctx.dtype, ctx.handle

    def run(given: tuple[Argument, ...], stream: int | None, number: int) -> int:
        def one(rank: int) -> int:
            first, count = parts[rank]
            source, target = int(given[x].real) + first, int(given[out].real) if rank == own_rank else None
            return int(call(source, target, count * row, dtype, number, rank, handle, stream))

        return run_in_group([(one, rank) for rank in range(len(parts)) if parts[rank][1]])

    return run


def _number_of(ctx: CallContext) -> int | None:
    """NCCL's number of the request's op; None for PREMUL_SUM, for which each call creates one."""
    op = ctx.request.red_op
    if op is RedOp.PREMUL_SUM:
        return None
    # NCCL computes a mean as a product and a sum, but has no product of fp8 for one rank, whose mean is the sum.
    return int(RedOp.SUM if op is RedOp.AVG and ctx.comm.size == 1 else op)


def _with_own_op(ctx: CallContext, run: CallWith) -> Call:
    """A reduction by an op that each call creates, with the request's factor."""
    request, comm = ctx.request, ctx.comm
    factor = np.array(request.factor).astype(request.x.dtype.numpy)
    at = None if request.device_factor is None else ctx.position("device_factor")
    residence = HOST_IMMEDIATE if at is None else DEVICE

    def call(given: tuple[Argument, ...], stream: int | None) -> int:
        scalar = factor.ctypes.data if at is None else int(given[at].real)
        create, c_op = nccl.ncclRedOpCreatePreMulSum.unchecked, ctypes.c_int()
        status = int(create(ctypes.byref(c_op), scalar, ctx.dtype, residence, comm.c_handle))
        if status not in (0, IN_PROGRESS):
            return status
        status = run(given, stream, c_op.value)
        destroyed = int(nccl.ncclRedOpDestroy.unchecked(c_op, comm.c_handle))  # the call keeps its own reference
        return status or destroyed

    return call


def _broadcast(ctx: CallContext) -> Call:
    return _moving_call(ctx, nccl.ncclBroadcast, ctx.request.x.size, ctx.request.root)


def _all_gather(ctx: CallContext) -> Call:
    request = ctx.request
    if request.counts is None:
        return _moving_call(ctx, nccl.ncclAllGather, request.x.size)
    row = row_elements(request)
    parts = row_offsets(request.counts, row * request.x.dtype.itemsize)
    call, x, out = nccl.ncclBroadcast.unchecked, ctx.position("x"), ctx.position("out")
    dtype, handle = ctx.dtype, ctx.handle

    def run(given: tuple[Argument, ...], stream: int | None) -> int:
        def one(rank: int) -> int:
            first, count = parts[rank]
            return int(call(given[x], int(given[out].real) + first, count * row, dtype, rank, handle, stream))

        return run_in_group([(one, rank) for rank in range(len(parts)) if parts[rank][1]])

    return run


def _moving_call(ctx: CallContext, function: Any, count: int, *root: Any) -> Call:
    call, x, out, dtype, handle = function.unchecked, ctx.position("x"), ctx.position("out"), ctx.dtype, ctx.handle

    def run(given: tuple[Argument, ...], stream: int | None) -> int:
        status: int = call(given[x], given[out], count, dtype, *root, handle, stream)
        return status

    return run


def _all_to_all(ctx: CallContext) -> Call:
    if ctx.function != "ncclAlltoAll":  # NCCL before 2.28, or with counts
        return nccl_messages.MAKERS["all_to_all"](ctx)
    return _moving_call(ctx, nccl.ncclAlltoAll, ctx.request.x.size // ctx.comm.size)


def _barrier(ctx: CallContext) -> Call:
    """NCCL has no barrier: a sum of one byte per rank ends only after all ranks have made the call."""
    token = ctx.comm.barrier_token.ptr
    arguments = (token, token, 1, DTYPES[U8], int(RedOp.SUM), ctx.handle)
    return lambda _, stream: int(nccl.ncclAllReduce.unchecked(*arguments, stream))


MAKERS: dict[str, Callable[[CallContext], Call]] = {
    **nccl_messages.MAKERS,
    "all_reduce": _all_reduce,
    "reduce_to": _reduce_to,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
