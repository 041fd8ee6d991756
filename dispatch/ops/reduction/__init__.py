"""Reductions over any axes: sums, products, norms, extremes with their indices: `reduce`.

They run on `cudnnReduceTensor`, on a graph of cuDNN's backend, or on NumPy. Axes are merged as far as the strides
allow. If some axes are kept, cudnnReduceTensor of 9.19 is slow in every order of axes: 0.4 ms for the rows or the
columns of 4096 by 4096 f32 on an H200, which torch sums in 0.03; to one number 0.03. The graph is for these cases: the
merged axes form a dense matrix that it can sum, after a pointwise operation. of_one.py has the rows for axes of one
element. Follows https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnnreducetensor.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind.sys import cudnn
from dispatch.core.axes import Axis, describable, merge
from dispatch.core.host_plan import Results, exactly, largest, numpy_call, values
from dispatch.core.request import IdlePlan
from dispatch.core.request_function import request_function
from dispatch.keys import F32, F64, member
from dispatch.libraries.cudnn.calls import CallPlan, Operand, number
from dispatch.libraries.cudnn.engines import Policy
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.libraries.cudnn.plan import WORKSPACE, bind
from dispatch.libraries.cudnn.prefill import reduction_fills, with_prefill
from dispatch.libraries.cudnn.request_graph import LoweredGraph, RequestGraphBuilder
from dispatch.libraries.cudnn.tensors import DTYPES, Descriptor, tensor
from dispatch.ops.reduction.request import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Array, Layout
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cudnn.graph import Graph
    from dispatch.ops.reduction.results import ReduceRequest, reduce
else:
    from dispatch.ops.reduction.request import ReduceRequest

    reduce = request_function(ReduceRequest, "reduce")

__all__ = [
    "ReduceOp",
    "ReduceRequest",
    "reduce",
]


# -- rules of the rows: "needs …, has …", or "" if a rule is met ------------------------------------------------------
MAX_AXES = 8

SUMS = (ReduceOp.ADD, ReduceOp.AVG, ReduceOp.NORM1)


def axes_of(request: ReduceRequest) -> list[Axis]:
    """The merged axes of x (reduced ones are in group 1), with the strides of x and of the outputs.

    With indices the axes stay in their order, because it determines the indices.
    """
    x = request.x.layout
    layouts = [x, *(_widened(request, request.layout_of(name)) for name in request.outputs())]
    groups = [int(axis in request.reduced) for axis in range(len(x.shape))]
    return merge(layouts, groups, in_order=request.indices)


def _widened(request: ReduceRequest, layout: Layout) -> Layout:
    """The layout of an output with the axes of x; reduced axes have one element."""
    if request.keepdims:
        return layout
    extents, strides = list(layout.shape), list(layout.strides)
    for axis in request.reduced:
        extents.insert(axis, 1)
        strides.insert(axis, 1)
    return request.device.layout(layout.dtype, tuple(extents), tuple(strides), layout.alignment)


def is_of_one(request: ReduceRequest) -> bool:
    """Whether each result is reduced from one element: of_one.py has the rows for that."""
    return all(request.x.shape[axis] == 1 for axis in request.reduced)


def shrinks(request: ReduceRequest) -> str:
    """cuDNN refuses a result of the operand's own shape (BAD_PARAM, "!dims_differ")."""
    if request.x.size == 0 or not is_of_one(request):
        return ""
    return (
        f"needs an axis of two elements or more among those reduced, has x {request.x.layout}, axes {request.reduced}"
    )


def eight_axes(request: ReduceRequest) -> str:
    """Strides are positive, at most eight axes remain after merging, and indices have dense outputs."""
    layouts = {name: request.layout_of(name) for name in ("x", *request.outputs())}
    if reason := describable(*layouts.values()):
        return reason
    count = len(axes_of(request))
    if count > MAX_AXES:
        return f"needs at most {MAX_AXES} axes that do not merge, has {count}"
    if request.indices and not (layouts["index"].is_contiguous and layouts["out"].is_contiguous):
        return "needs out and index dense in row-major order, has other strides"
    return ""


def sums(request: ReduceRequest) -> str:
    """ADD, AVG and NORM1 only: for the extremes of a graph, no document says how they handle NaN."""
    if request.reduce in SUMS:
        return ""
    return f"needs {', '.join(op.name for op in SUMS)}, has {member(request.reduce).name}"


def lines(request: ReduceRequest) -> str:
    """x is dense, and the reduced axes, once merged, are its innermost ones, its outermost ones, or all."""
    if request.x.size == 0:
        return ""
    if reason := describable(request.layout_of("x"), request.layout_of("out")):
        return reason
    axes = axes_of(request)
    dense, step = True, 1
    for axis in reversed(axes):
        dense, step = dense and axis.strides[0] == step, step * axis.extent
    if not dense or not 1 <= len(axes) <= 2 or any(axis.strides[1] != 1 for axis in axes if not axis.group):
        return f"needs the rows or the columns of a dense matrix, has x {request.x.layout}, axes {request.reduced}"
    return ""


def partial(request: ReduceRequest) -> str:
    """Some axis is kept: for a single result, cudnnReduceTensor is as fast as any."""
    return "" if request.layout_of("out").size > 1 else "needs two sums or more, has one"


# -- in NumPy: for the host's rows in their own precision, and as the reference in f64 --------------------------------
def rows_of(request: ReduceRequest, work: np.dtype[Any]) -> Array:
    """x in row-major order, with the reduced axes as one, which is the last."""
    x, reduced = values(request.x, work), request.reduced
    kept_axes = [axis for axis in range(x.ndim) if axis not in reduced]
    count = int(np.prod([x.shape[axis] for axis in reduced], dtype=np.int64))
    return np.asarray(x.transpose([*kept_axes, *reduced]).reshape(*(x.shape[axis] for axis in kept_axes), count))


def evaluate(request: ReduceRequest, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name, computed in a working dtype."""
    rows, is_alone = rows_of(request, work), is_of_one(request)
    shape = request.outputs()["out"].shape
    reduce = ReduceOp.NORM1 if is_alone and request.reduce is ReduceOp.NORM2 else member(request.reduce)
    reduced = np.asarray(REDUCED[reduce](rows))
    if request.reduce in (ReduceOp.MIN, ReduceOp.MAX) and not is_alone and rows.dtype.kind == "f":
        # cuDNN starts from the largest finite number of the compute dtype, or the lowest; it never returns infinity.
        top = rows.dtype.type(largest(F64 if request.x.dtype is F64 else F32))
        reduced = np.minimum(reduced, top) if request.reduce is ReduceOp.MIN else np.maximum(reduced, -top)
    results = {"out": reduced.reshape(shape)}
    if request.indices:
        order = np.abs(rows) if request.reduce is ReduceOp.AMAX else rows
        positions = order.argmin(axis=-1) if request.reduce is ReduceOp.MIN else order.argmax(axis=-1)
        results["index"] = np.asarray(positions).astype(np.uint32).reshape(shape)
    return results


REDUCED: dict[ReduceOp, Callable[[Array], Array]] = {
    ReduceOp.ADD: lambda rows: rows.sum(axis=-1),
    ReduceOp.MUL: lambda rows: rows.prod(axis=-1),
    ReduceOp.MIN: lambda rows: rows.min(axis=-1),
    ReduceOp.MAX: lambda rows: rows.max(axis=-1),
    ReduceOp.AMAX: lambda rows: np.abs(rows).max(axis=-1),
    ReduceOp.AVG: lambda rows: rows.mean(axis=-1),
    ReduceOp.NORM1: lambda rows: np.abs(rows).sum(axis=-1),
    ReduceOp.NORM2: lambda rows: np.sqrt((rows * rows).sum(axis=-1)),
    ReduceOp.MUL_NO_ZEROS: lambda rows: np.where(rows == 0, rows.dtype.type(1), rows).prod(axis=-1),
}


# -- as a graph of cuDNN ----------------------------------------------------------------------------------------------
Shape = tuple[int, ...]


def _image(rows: int, columns: int) -> tuple[Shape, Shape]:
    """A dense matrix as the image that engines support: a row has the channels of a pixel."""
    return (1, columns, 1, rows), (rows * columns, 1, rows * columns, columns)


def graphs(request: ReduceRequest) -> list[Graph]:
    """The graphs of a request: none if there are no results."""
    return [lower_to_graph(request).graph] if request.layout_of("out").size else []


def lower_to_graph(request: ReduceRequest) -> LoweredGraph:
    """ADD of the elements, of their magnitudes (NORM1), or of the elements divided by their number (AVG)."""
    axes = axes_of(request)
    outer, inner = (1 if len(axes) < 2 else axes[0].extent), axes[-1].extent
    extents = [1 if axis.group else axis.extent for axis in axes]
    sums = _image(1 if len(axes) < 2 else extents[0], extents[-1])
    graph_builder = RequestGraphBuilder(request)
    builder = graph_builder.builder
    dims, strides = _image(outer, inner)
    x = value = graph_builder.operand("x", dims, strides)
    if request.reduce is ReduceOp.AVG:
        share = builder.scalar(request.layout_of("out").size / request.x.size, len(dims))
        value = builder.pointwise("MUL", x, share, out=builder.virtual(dims, None, strides))
    elif request.reduce is ReduceOp.NORM1:
        value = builder.pointwise("ABS", x, out=builder.virtual(dims, None, strides))
    builder.reduction("ADD", value, sums[0], out=graph_builder.operand("out", *sums))
    return graph_builder.lowered()


# -- with cuDNN -------------------------------------------------------------------------------------------------------
PROPAGATE = cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN

INDICES = cudnn.cudnnReduceTensorIndices_t

BITS_32 = cudnn.cudnnIndicesType_t.CUDNN_32BIT_INDICES


def cudnn_reduce(request: ReduceRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; without results it launches nothing."""
    out = request.layout_of("out")
    if out.size == 0:
        return IdlePlan(row)
    axes = axes_of(request)
    x = tensor(request.x.dtype, [axis.extent for axis in axes], [axis.strides[0] for axis in axes])
    extents = [1 if axis.group else axis.extent for axis in axes]
    y = tensor(out.dtype, extents, [1 if axis.group else axis.strides[1] for axis in axes])
    sums = F64 if request.x.dtype is F64 else F32
    reduction = Descriptor("ReduceTensor")
    kind = INDICES.CUDNN_REDUCE_TENSOR_FLATTENED_INDICES if request.indices else INDICES.CUDNN_REDUCE_TENSOR_NO_INDICES
    operation = cudnn.cudnnReduceTensorOp_t(member(request.reduce))
    cudnn.cudnnSetReduceTensorDescriptor(reduction.handle, operation, DTYPES[sums], PROPAGATE, kind, BITS_32)
    handle, size = handle_of(executor).follow(), ctypes.c_size_t()
    cudnn.cudnnGetReductionWorkspaceSize(handle, reduction.handle, x.handle, y.handle, ctypes.byref(size))
    scratch = handle_of(executor).scratch(executor, size.value)
    places = (Operand(2), ctypes.c_size_t(4 * out.size)) if request.indices else (None, ctypes.c_size_t(0))
    arguments = (
        *(reduction, *places, scratch.c_ptr, size),
        *(number(1, sums), x, Operand(0), number(0, sums), y, Operand(1)),
    )
    return CallPlan(executor, row, cudnn.cudnnReduceTensor, arguments, (scratch,))


def policy_of(request: ReduceRequest, row: Row) -> Policy:
    """Allow all engines: the notes mention tensor cores, but without products nothing can be rounded to TF32."""
    del request, row
    return Policy(workspace=WORKSPACE)


def cudnn_sums(request: ReduceRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request as a graph; Refused with cuDNN's message if no engine supports it."""
    if request.layout_of("out").size == 0:
        return IdlePlan(row)
    graph, places = lower_to_graph(request)
    bound_plan = bind(request, executor, row, graph, places, policy_of(request, row))
    return with_prefill(executor, bound_plan, reduction_fills(graph, places))


# -- the public functions, and the calls of the rows ------------------------------------------------------------------
reference = exactly(evaluate)
numpy_reduce = numpy_call(evaluate)
