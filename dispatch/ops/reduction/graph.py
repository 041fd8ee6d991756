"""Sums over the rows or the columns of a matrix as a graph of cuDNN, and where its operands stand in the arguments.

Axes that are merged make a dense matrix of what a graph can sum (`rules.py` says which); what is added up is prepared
by a pointwise operation. Pure: it calls no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatch.keys import F32
from dispatch.libraries.cudnn.graph import Builder, Graph
from dispatch.ops.reduction.request import ReduceOp
from dispatch.ops.reduction.rules import axes_of

if TYPE_CHECKING:
    from dispatch.ops.reduction.request import ReduceRequest

__all__ = ["Described", "describe", "graphs"]

Shape = tuple[int, ...]


class Described(NamedTuple):
    """A graph, and for the unique id of each operand its place in the request's arguments."""

    graph: Graph
    places: dict[int, int]


def _image(rows: int, columns: int) -> tuple[Shape, Shape]:
    """A dense matrix as the image that engines take: a row is a pixel's channels."""
    return (1, columns, 1, rows), (rows * columns, 1, rows * columns, columns)


def graphs(request: ReduceRequest) -> list[Graph]:
    """The graphs that carry a request out: none where there is nothing to write."""
    return [describe(request).graph] if request.layout_of("out").size else []


def describe(request: ReduceRequest) -> Described:
    """ADD of the elements, of their magnitudes (NORM1), or of their shares (AVG)."""
    axes = axes_of(request)
    outer, inner = (1 if len(axes) < 2 else axes[0].extent), axes[-1].extent
    kept = [1 if axis.group else axis.extent for axis in axes]
    sums = _image(1 if len(axes) < 2 else kept[0], kept[-1])
    builder = Builder(F32)
    layouts = request.layout_of("x"), request.layout_of("out")
    dims, strides = _image(outer, inner)
    x = value = builder.tensor(dims, strides, layouts[0].dtype, alignment=layouts[0].alignment)
    if request.reduce is ReduceOp.AVG:
        share = builder.scalar(layouts[1].size / layouts[0].size, len(dims))
        value = builder.pointwise("MUL", x, share, out=builder.virtual(dims, None, strides))
    elif request.reduce is ReduceOp.NORM1:
        value = builder.pointwise("ABS", x, out=builder.virtual(dims, None, strides))
    out = builder.tensor(*sums, layouts[1].dtype, alignment=layouts[1].alignment)
    builder.reduction("ADD", value, sums[0], out=out)
    return Described(builder.build(), {x.uid: 0, out.uid: 1})
