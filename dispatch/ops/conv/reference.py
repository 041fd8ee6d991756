"""What a convolution request gives, in NumPy: its graph evaluated in a working dtype, and how large what it adds up is.

The host rows compute with it, tests hold rows against it in float64. It calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.precision import to_tf32
from dispatch.keys import I8, Compute
from dispatch.libraries.cudnn import convolve
from dispatch.libraries.cudnn.reference import evaluate as evaluate_graph
from dispatch.ops.conv.graph import describe
from dispatch.ops.conv.request import ConvBwdDataRequest, ConvFwdRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array
    from dispatch.ops.conv.request import ConvRequest

__all__ = ["evaluate", "exact", "magnitude", "product", "reference"]


def evaluate(request: ConvRequest, work: np.dtype[Any]) -> Results:
    """The result of a request; integers are summed up exactly, and rounded and cut off as cuDNN does for i8."""
    found = exact(request, work)
    if request.result_dtype is I8:
        found = np.clip(np.rint(found), -128, 127)
    return {"out": found}


def exact(request: ConvRequest, work: np.dtype[Any]) -> Array:
    """The result of a request before it is rounded to its dtype."""
    graph, places = describe(request)
    whole = request.dtypes[0] is I8
    tf32 = request.compute is Compute.COMPUTE_32F_FAST_TF32 and work == np.float32
    names = (*request.reads, *request.writes)
    feeds: dict[int, Array] = {}
    for uid, place in places.items():
        tensor = getattr(request, names[place])
        if tensor is not None and (names[place] != "out" or _accumulates(request)):
            values = np.asarray(tensor).astype(np.float64 if whole else work)
            feeds[uid] = to_tf32(np.ascontiguousarray(values)) if tf32 and names[place] in request.reads[:2] else values
    feeds = {uid: values.reshape(graph.wire(uid).dims) for uid, values in feeds.items()}
    (found,) = evaluate_graph(graph, feeds, np.float64 if whole else work.type).values()
    return found


def _accumulates(request: ConvRequest) -> bool:
    return not isinstance(request, ConvFwdRequest) and request.beta != 0


def magnitude(request: ConvRequest) -> tuple[Array, int]:
    """The sum of the absolute values of all products of each element, scaled, and how many products there are."""
    if isinstance(request, ConvFwdRequest):
        terms = int(np.prod(request.w_shape[1:]))
    elif isinstance(request, ConvBwdDataRequest):
        terms = request.w_shape[0] // request.groups * int(np.prod(request.w_shape[2:]))
    else:
        terms = request.x_shape[0] * int(np.prod(request.y_shape[2:]))
    return product(request, np.abs) * abs(request.alpha), terms


def product(request: ConvRequest, change: Callable[[Array], Array] = np.asarray) -> Array:
    """The convolution of a request's operands, each changed before, without alpha and what is fused."""
    one, other = (change(np.asarray(getattr(request, name)).astype(np.float64)) for name in request.reads[:2])
    if isinstance(request, ConvFwdRequest):
        return convolve.forward(one, other, request.steps)
    if isinstance(request, ConvBwdDataRequest):
        return convolve.backward_data(one, other, request.x_shape, request.steps)
    return convolve.backward_filter(one, other, request.w_shape, request.steps)


def reference(request: ConvRequest) -> Results:
    """The output of a request in float64, by name."""
    return evaluate(request, EXACT)
