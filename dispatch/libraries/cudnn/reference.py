"""Evaluates a graph in NumPy: each node by its definition, in float64 or another precision.

Tests and host rows use it; the graph is the same that `lower.py` turns into descriptors. It calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from dispatch.errors import BadRequest
from dispatch.libraries.cudnn import convolve
from dispatch.libraries.cudnn.convolve import Steps
from dispatch.libraries.cudnn.modes import REDUCTIONS, pointwise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dispatch.device.layout import Array
    from dispatch.libraries.cudnn.graph import Graph, Node

__all__ = ["evaluate"]

Arrays = dict[str, "Array"]


def evaluate(graph: Graph, feeds: Mapping[int, Array], dtype: type = np.float64) -> dict[int, Array]:
    """The wires that a run writes, by unique id; `feeds` are its inputs by unique id."""
    values: dict[int, Array] = {}
    for wire in graph.wires:
        if wire.value is not None:
            values[wire.uid] = np.full(wire.dims, wire.value, dtype)
        elif wire.uid in feeds:
            feed = np.asarray(feeds[wire.uid])
            values[wire.uid] = feed if feed.dtype.kind in "biu" else feed.astype(dtype)
    for node in graph.nodes:
        if node.kind not in NODES:
            raise BadRequest(
                "graph", f"a node {node.kind}", f"one of the nodes that the reference implements: {', '.join(NODES)}"
            )
        ins = {name: values[uid] for name, uid in node.ins}
        before = [values[uid] for _, uid in node.outs if uid in values]
        if before:
            ins[PREVIOUS] = before[0]
        shapes = {name: graph.wire(uid).dims for name, uid in node.outs}
        results = NODES[node.kind](node, ins, shapes)
        for name, uid in node.outs:
            values[uid] = results[name]
    return {wire.uid: values[wire.uid] for wire in graph.outputs}


Shapes = dict[str, tuple[int, ...]]
PREVIOUS = "before"  # the previous value of an output, for nodes that add to it


TEXT_ATTRIBUTES = ("MODE", "MATH_PREC")  # the attributes of a pointwise node that are not numbers


def _pointwise(node: Node, ins: Arrays, shapes: Shapes) -> Arrays:
    numbers = {name: float(cast("float", value)) for name, value in node.attributes if name not in TEXT_ATTRIBUTES}
    order = ("DYDESC", "XDESC") if "DYDESC" in ins else ("XDESC", "BDESC", "TDESC")
    result = pointwise(str(node.get("MODE")), [ins[name] for name in order if name in ins], numbers)
    (name,) = shapes
    return {name: np.broadcast_to(result, shapes[name])}


def _matmul(_node: Node, ins: Arrays, _shapes: Shapes) -> Arrays:
    a, b = ins["ADESC"], ins["BDESC"]
    if a.ndim > 2 and 1 < b.shape[-3] < a.shape[-3]:  # fewer heads: each is used for a group of heads of A
        b = np.repeat(b, a.shape[-3] // b.shape[-3], axis=-3)
    return {"CDESC": np.matmul(a, b)}


def _reshape(_node: Node, ins: Arrays, _shapes: Shapes) -> Arrays:
    """cuDNN's reshape with exchanged strides: a transpose of the last two axes."""
    return {"YDESC": np.swapaxes(ins["XDESC"], -1, -2)}


def _reduction(node: Node, ins: Arrays, shapes: Shapes) -> Arrays:
    x, dims = ins["XDESC"], shapes["YDESC"]
    for axis, extent in enumerate(dims):
        if 1 < extent < x.shape[axis]:  # by groups, e.g. of the heads that share a head of K
            grouped = x.reshape(*x.shape[:axis], extent, -1, *x.shape[axis + 1 :])
            return {"YDESC": REDUCTIONS[str(node.get("OPERATOR"))](grouped, axis=axis + 1, keepdims=False)}
    axes = tuple(axis for axis, extent in enumerate(dims) if extent == 1 and x.shape[axis] != 1)
    return {"YDESC": REDUCTIONS[str(node.get("OPERATOR"))](x, axis=axes, keepdims=True)}


def _steps(node: Node) -> Steps:
    return Steps(*(cast("tuple[int, ...]", node.get(name)) for name in ("PRE", "POST", "STRIDE", "DILATION")))


def _scaled(node: Node, result: Array, ins: Arrays) -> Array:
    """ALPHA times the result, plus BETA times the previous output."""
    alpha, beta = cast("float", node.get("ALPHA")), cast("float", node.get("BETA"))
    scaled = result * result.dtype.type(alpha) if alpha != 1 else result
    return scaled + result.dtype.type(beta) * ins[PREVIOUS] if beta != 0 else scaled


def _forward(node: Node, ins: Arrays, _shapes: Shapes) -> Arrays:
    return {"Y": _scaled(node, convolve.forward(ins["X"], ins["W"], _steps(node)), ins)}


def _data(node: Node, ins: Arrays, shapes: Shapes) -> Arrays:
    return {"DX": _scaled(node, convolve.backward_data(ins["DY"], ins["W"], shapes["DX"], _steps(node)), ins)}


def _filter(node: Node, ins: Arrays, shapes: Shapes) -> Arrays:
    return {"DW": _scaled(node, convolve.backward_filter(ins["DY"], ins["X"], shapes["DW"], _steps(node)), ins)}


NODES: dict[str, Callable[[Node, Arrays, Shapes], Arrays]] = {
    "POINTWISE": _pointwise,
    "MATMUL": _matmul,
    "RESHAPE": _reshape,
    "REDUCTION": _reduction,
    "CONVOLUTION_FORWARD": _forward,
    "CONVOLUTION_BACKWARD_DATA": _data,
    "CONVOLUTION_BACKWARD_FILTER": _filter,
}
