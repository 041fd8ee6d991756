"""Collectives by NCCL: one call of the library, or a group of sends and receives if parts have different sizes.

A plan prepares the arguments of its calls and writes addresses into them. This library never captures or learns such a
plan by itself: a call that the other ranks do not make never ends, and NCCL may exchange addresses between ranks during
a capture. A graph that the caller captures on all ranks may contain such calls, and `prepare(request, graph=True)`
captures one, on all ranks (nccl_graph.py). Follows
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
from dispatch.errors import BadRequest
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

    CallWith = Callable[[tuple[Argument, ...], int], int]  # takes a plan's arguments and the number of a reduction op

__all__ = ["NcclPlan", "plan"]

DEVICE, HOST_IMMEDIATE = 0, 1  # values of ncclScalarResidence_t


class NcclPlan(Plan):
    """A request's calls on its communicator.

    Guarantees: no call is made on a communicator that has failed, or while another thread aborts it.
    """

    __slots__ = ("_call", "_comm", "_executor", "_function", "_stream")
    is_bare = True

    def __init__(self, row: Row, ctx: CallContext, call: Call) -> None:
        super().__init__(row, capture_safe=False)
        self._executor, self._comm, self._stream = ctx.executor, ctx.comm, ctx.stream
        self._call, self._function = call, row.function

    def hold(self, tensors: tuple[Tensor, ...]) -> None:
        keep_operands(tensors)

    def as_graph(self, arguments: tuple[Argument, ...]) -> CollectiveGraph:
        """Capture the calls, as all ranks do together; errors as of `enqueue`, BadRequest inside a collective_group."""
        if is_group_open():
            raise BadRequest("graph", "True inside a collective_group", "False", "prepare the call before the group")
        self._refuse_graph()
        enqueue = partial(self._enqueue, arguments, is_captured=True)
        return capture_collective(self._comm, self._executor, enqueue, self._function)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Enqueue the calls; CollectiveError, CollectiveTimeout or RankLost if the communicator has failed."""
        is_captured = self._executor.captured
        if is_captured:
            self._refuse_graph()
            self._comm.in_graphs = True
        self._enqueue(arguments, is_captured=is_captured)

    def _refuse_graph(self) -> None:
        comm = self._comm
        if comm.config.graph_usage_mode == 0:
            actual = f"{comm!r}, whose graph_usage_mode is 0, under capture"
            raise BadRequest("comm", actual, "a communicator made with NcclConfig(graph_usage_mode=2), or none")

    def _enqueue(self, arguments: tuple[Argument, ...], *, is_captured: bool) -> None:
        comm, executor = self._comm, self._executor
        open_nccl_group()
        with enqueueing_collectives():
            with comm.lock:
                comm.check()
                self._stream.value = executor.target.value
                # NCCL may connect now, which waits for other ranks.
                comm.call_deadline = time.monotonic() + comm.deadline
                status = self._call(arguments)
                comm.call_deadline = math.inf
            if group.current.depth:
                if status not in (0, IN_PROGRESS):
                    comm.raise_status(self._function, status)
                group.current.add(comm, executor.target, self._function, captured=is_captured)
                return
            if status:
                comm.settle(self._function, status)
            if not is_captured:  # a captured call is not running yet
                comm.record_work(executor.target, self._function)


def plan(request: Any, executor: CudaExecutor, row: Row) -> NcclPlan:
    """The plan of a collective by NCCL."""
    ctx = CallContext(request, request.ranks, executor, row.function, nccl.cudaStream_t())
    return NcclPlan(row, ctx, MAKERS[request.op](ctx))


# -- one call ---------------------------------------------------------------------------------------------------------
def _all_reduce(ctx: CallContext) -> Call:
    return _reducing_call(ctx, nccl.ncclAllReduce, ctx.request.x.size)


def _reduce_to(ctx: CallContext) -> Call:
    return _reducing_call(ctx, nccl.ncclReduce, ctx.request.x.size, ctypes.c_int(ctx.request.root))


def _reduce_scatter(ctx: CallContext) -> Call:
    request = ctx.request
    if request.counts is None:
        return _reducing_call(ctx, nccl.ncclReduceScatter, request.x.size // ctx.comm.size)
    row = row_elements(request)
    parts = row_offsets(request.counts, row * request.x.dtype.itemsize)
    return _with_op(ctx, _reduce_rows(ctx, parts, row))


def _reducing_call(ctx: CallContext, function: Any, count: int, *root: Any) -> Call:
    """A reduction of `count` elements; the op is set for each call."""
    call, x, out = function.unchecked, ctx.position("x"), ctx.position("out")
    source, target, op = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    arguments = (source, target, ctypes.c_size_t(count), ctx.dtype(), op, *root, *ctx.tail_arguments())

    def run(given: tuple[Argument, ...], number: int) -> int:
        source.value, target.value, op.value = given[x], given[out], number  # type: ignore[assignment]
        return int(call(*arguments))

    return _with_op(ctx, run)


def _reduce_rows(ctx: CallContext, parts: Sequence[tuple[int, int]], row: int) -> CallWith:
    """Reductions of each rank's rows to that rank, as a group."""
    call, x, out, own_rank = nccl.ncclReduce.unchecked, ctx.position("x"), ctx.position("out"), ctx.comm.rank
    dtype, tail = ctx.dtype(), ctx.tail_arguments()

    def run(given: tuple[Argument, ...], number: int) -> int:
        def one(rank: int) -> int:
            first, count = parts[rank]
            target = ctypes.c_void_p(int(given[out].real) if rank == own_rank else None)
            source = ctypes.c_void_p(int(given[x].real) + first)
            size = ctypes.c_size_t(count * row)
            return int(call(source, target, size, dtype, ctypes.c_int(number), ctypes.c_int(rank), *tail))

        return run_in_group([(one, rank) for rank in range(len(parts)) if parts[rank][1]])

    return run


def _with_op(ctx: CallContext, run: CallWith) -> Call:
    """A reduction by the request's op; for PREMUL_SUM an op is created for each call."""
    request, comm = ctx.request, ctx.comm
    if request.red_op is not RedOp.PREMUL_SUM:
        # NCCL computes a mean as a product and a sum, but has no product of fp8 for one rank, whose mean is the sum.
        number = int(RedOp.SUM if request.red_op is RedOp.AVG and comm.size == 1 else request.red_op)
        return lambda given: run(given, number)
    dtype, c_op = ctx.dtype(), ctypes.c_int()
    factor = np.array(request.factor).astype(request.x.dtype.numpy)
    at = None if request.device_factor is None else ctx.position("device_factor")
    residence = ctypes.c_int(HOST_IMMEDIATE if at is None else DEVICE)

    def call(given: tuple[Argument, ...]) -> int:
        scalar = ctypes.c_void_p(factor.ctypes.data if at is None else int(given[at].real))
        create = nccl.ncclRedOpCreatePreMulSum.unchecked
        status = int(create(ctypes.byref(c_op), scalar, dtype, residence, comm.c_handle))
        if status not in (0, IN_PROGRESS):
            return status
        status = run(given, c_op.value)
        destroyed = int(nccl.ncclRedOpDestroy.unchecked(c_op, comm.c_handle))  # the call keeps its own reference
        return status or destroyed

    return call


def _broadcast(ctx: CallContext) -> Call:
    root = ctypes.c_int(ctx.request.root)
    return _moving_call(ctx, nccl.ncclBroadcast, ctx.request.x.size, root)


def _all_gather(ctx: CallContext) -> Call:
    request = ctx.request
    if request.counts is None:
        return _moving_call(ctx, nccl.ncclAllGather, request.x.size)
    row = row_elements(request)
    parts = row_offsets(request.counts, row * request.x.dtype.itemsize)
    call, x, out, dtype, tail = (
        nccl.ncclBroadcast.unchecked,
        ctx.position("x"),
        ctx.position("out"),
        ctx.dtype(),
        ctx.tail_arguments(),
    )

    def run(given: tuple[Argument, ...]) -> int:
        def one(rank: int) -> int:
            first, count = parts[rank]
            source, target = ctypes.c_void_p(int(given[x].real)), ctypes.c_void_p(int(given[out].real) + first)
            return int(call(source, target, ctypes.c_size_t(count * row), dtype, ctypes.c_int(rank), *tail))

        return run_in_group([(one, rank) for rank in range(len(parts)) if parts[rank][1]])

    return run


def _moving_call(ctx: CallContext, function: Any, count: int, *root: Any) -> Call:
    call, x, out = function.unchecked, ctx.position("x"), ctx.position("out")
    source, target = ctypes.c_void_p(), ctypes.c_void_p()
    arguments = (source, target, ctypes.c_size_t(count), ctx.dtype(), *root, *ctx.tail_arguments())

    def run(given: tuple[Argument, ...]) -> int:
        source.value, target.value = given[x], given[out]  # type: ignore[assignment]
        return int(call(*arguments))

    return run


def _all_to_all(ctx: CallContext) -> Call:
    if ctx.function != "ncclAlltoAll":  # NCCL before 2.28, or with counts
        return nccl_messages.MAKERS["all_to_all"](ctx)
    return _moving_call(ctx, nccl.ncclAlltoAll, ctx.request.x.size // ctx.comm.size)


def _barrier(ctx: CallContext) -> Call:
    """NCCL has no barrier: a sum of one byte per rank ends only after all ranks have made the call."""
    token = ctypes.c_void_p(ctx.comm.barrier_token.ptr)
    arguments = (token, token, ctypes.c_size_t(1), ctypes.c_int(DTYPES[U8]), ctypes.c_int(0), *ctx.tail_arguments())
    return lambda _: int(nccl.ncclAllReduce.unchecked(*arguments))


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
