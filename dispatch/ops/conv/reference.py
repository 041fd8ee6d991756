"""A convolution request in NumPy: its graph or its tree in a working dtype, and the magnitude of its sums.

The host rows run it, and in float64 it is the tests' reference. It calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import exactly
from dispatch.core.precision import to_tf32
from dispatch.core.request import Plan
from dispatch.device.tensor import Tensor
from dispatch.keys import I8, Compute
from dispatch.libraries.cudnn import convolve
from dispatch.libraries.cudnn.reference import evaluate as evaluate_graph
from dispatch.libraries.cutlass.arithmetic import evaluate as evaluate_tree
from dispatch.libraries.cutlass.arithmetic import rounded
from dispatch.ops.conv.graph import lower_to_graph
from dispatch.ops.conv.request import ConvBwdDataRequest, ConvFwdRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.request import Operands
    from dispatch.device.layout import Array
    from dispatch.ops.conv.request import ConvRequest

__all__ = [
    "NumpyTreePlan",
    "convolved",
    "evaluate",
    "exact",
    "image",
    "magnitude",
    "matrix",
    "product",
    "reference",
    "through_tree",
    "tree_operands",
]


def evaluate(request: ConvRequest, work: np.dtype[Any]) -> Results:
    """The result of a request; integers are summed exactly, and rounded and saturated as cuDNN does for i8."""
    if request.has_tree:
        return through_tree(request, work.type)
    result = exact(request, work)
    if request.result_dtype is I8:
        result = np.clip(np.rint(result), -128, 127)
    return {"out": result}


def exact(request: ConvRequest, work: np.dtype[Any]) -> Array:
    """The result of a request before it is rounded to its dtype."""
    graph, places = lower_to_graph(request)
    is_integer = request.dtypes[0] is I8
    tf32 = request.compute is Compute.COMPUTE_32F_FAST_TF32 and work == np.float32
    names = (*request.reads, *request.writes)
    feeds: dict[int, Array] = {}
    for uid, index in places.items():
        tensor = getattr(request, names[index])
        if tensor is not None and (names[index] != "out" or request.accumulates):
            values = np.asarray(tensor).astype(np.float64 if is_integer else work)
            feeds[uid] = to_tf32(np.ascontiguousarray(values)) if tf32 and names[index] in request.reads[:2] else values
    feeds = {uid: values.reshape(graph.wire(uid).dims) for uid, values in feeds.items()}
    (result,) = evaluate_graph(graph, feeds, np.float64 if is_integer else work.type).values()
    return result


def magnitude(request: ConvRequest) -> tuple[Array, int]:
    """The sum of the absolute values of all products of each element, scaled, and the number of products."""
    if isinstance(request, ConvFwdRequest):
        terms = int(np.prod(request.w_shape[1:]))
    elif isinstance(request, ConvBwdDataRequest):
        terms = request.w_shape[0] // request.groups * int(np.prod(request.w_shape[2:]))
    else:
        terms = request.x_shape[0] * int(np.prod(request.y_shape[2:]))
    return product(request, np.abs) * abs(request.alpha), terms


def product(request: ConvRequest, change: Callable[[Array], Array] = np.asarray) -> Array:
    """The convolution of a request's operands after `change`, without alpha and fused operations."""
    one, other = (change(np.asarray(getattr(request, name)).astype(np.float64)) for name in request.operand_names[:2])
    return convolved(request, one, other)


def convolved(request: ConvRequest, one: Array, other: Array) -> Array:
    """The convolution, or the gradient, of these values, with its axes as in the request."""
    if request.mode == "fwd":
        return convolve.forward(one, other, request.steps)
    if request.mode == "bwd_data":
        return convolve.backward_data(one, other, request.x_shape, request.steps)
    return convolve.backward_filter(one, other, request.w_shape, request.steps)


reference = exactly(evaluate)


# -- through a tree ----------------------------------------------------------------------------------------------------
def through_tree(request: ConvRequest, precision: type) -> dict[str, Array]:
    """Every output by name, unrounded; in f32, operands are rounded to TF32 if the request allows it."""
    operands = []
    for name in request.operand_names[:2]:
        values: Array = np.asarray(getattr(request, name)).astype(precision)
        tf32 = request.compute is Compute.COMPUTE_32F_FAST_TF32 and precision is np.float32
        operands.append(to_tf32(np.ascontiguousarray(values)) if tf32 else values)
    product = matrix(request, convolved(request, *operands))
    source = None if request.c is None else matrix(request, np.asarray(request.c))
    outputs = evaluate_tree(request.tree, product, tree_operands(request), source)
    return {name: image(request, name, values) for name, values in outputs.items()}


def tree_operands(request: ConvRequest) -> dict[str, Array]:
    """The tree's operands, in the shapes of a matrix."""
    operands = {}
    for name, operand in request.operand_values.items():
        if name in request.tree_outputs:
            continue
        values = np.asarray(operand.numpy() if isinstance(operand, Tensor) else operand)
        kind = request.kinds[name]
        operands[name] = matrix(request, values) if kind == "load" else values.reshape(-1) if kind == "col" else values
    return operands


def matrix(request: ConvRequest, values: Array) -> Array:
    """A result in the shape that the tree uses: pixels by channels; filters by taps and channels."""
    return np.moveaxis(values, 1, -1).reshape(request.extents)


def image(request: ConvRequest, name: str, values: Array) -> Array:
    """An output of the tree in the request's shape."""
    output = request.outputs()[name]
    if name != "out" and request.kinds[name] == "reduce":
        return values.reshape(output.shape)
    shape = request.result_shape
    return np.moveaxis(values.reshape(shape[0], *shape[2:], shape[1]), -1, 1)


class NumpyTreePlan(Plan):
    """A plan that evaluates the tree over NumPy's convolution in float32, and rounds once at the end."""

    __slots__ = ()

    def run(self, request: ConvRequest, outputs: Operands) -> None:
        """Compute a request into its outputs; `outputs` holds those that were allocated for it."""
        with np.errstate(all="ignore"):  # as on a GPU, an overflow gives a value and no warning
            results = through_tree(request, np.float32)
            targets: dict[str, Any] = {"out": request.out, **request.operand_values, **outputs}
            for name, values in results.items():
                target = np.asarray(targets[name])
                target[...] = rounded(values, targets[name].dtype)
