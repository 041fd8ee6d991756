"""Graph: builds a graph of cuDNN operations, node by node; runs it, or evaluates it in NumPy.

    g = cudnn.Graph()
    x, w = g.tensor("x", (8, 64, 128), "bf16"), g.tensor("w", (1, 128, 32), "bf16")
    g.output("y", g.pointwise("RELU_FWD", g.matmul(x, w)), "bf16")
    y = g(x=…, w=…)

This file calls no library; `request.py` has the request of a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import as_python_ints, check_int, names_arguments
from dispatch.core.layouts import dense_strides
from dispatch.core.list_call_cache import ListCallCache
from dispatch.core.operand_checks import each
from dispatch.errors import BadRequest
from dispatch.keys import F32, Dtype
from dispatch.libraries.cudnn.convolve import Steps, output_shape
from dispatch.libraries.cudnn.graph import Builder
from dispatch.libraries.cudnn.reference import evaluate
from dispatch.ops.graph.request import GraphRequest
from dispatch.unknown_arguments import refuse_operand

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.libraries.cudnn.graph import Graph as Drawn
    from dispatch.libraries.cudnn.graph import Wire

__all__ = ["Graph", "Node"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """The result of an operation, to be used by others; `+ - * /` with a node or a number are pointwise modes."""

    board: Graph
    wire: Wire

    @property
    def shape(self) -> Shape:
        return self.wire.dims

    def __add__(self, other: Node | float) -> Node:
        return self.board.pointwise("ADD", self, other)

    def __sub__(self, other: Node | float) -> Node:
        return self.board.pointwise("SUB", self, other)

    def __mul__(self, other: Node | float) -> Node:
        return self.board.pointwise("MUL", self, other)

    def __truediv__(self, other: Node | float) -> Node:
        return self.board.pointwise("DIV", self, other)


@names_arguments
class Graph:
    """A graph of operations; `compute` is the dtype of sums and of intermediate results."""

    def __init__(self, compute: Any = F32) -> None:
        self._builder = Builder(Dtype.of(compute))
        self._names: dict[str, int] = {}

    # -- operands and outputs -------------------------------------------------------------------------------------
    def tensor(self, name: str, shape: Shape, dtype: Any, strides: Shape | None = None) -> Node:
        """An operand that each run must be given; strides in elements, None for C order."""
        self._check_name(name)
        _check_strides(strides, shape)
        wire = self._builder.tensor(tuple(shape), strides, Dtype.of(dtype))
        self._names[name] = wire.uid
        return Node(self, wire)

    def output(self, name: str, node: Node, dtype: Any, strides: Shape | None = None) -> None:
        """Write a node's result to memory, rounded to a dtype."""
        self._check_name(name)
        self._check_mine(node)
        for other_name, uid in self._names.items():
            if uid == node.wire.uid:  # a wire has one location in memory
                hint = 'pointwise("IDENTITY", node) makes another node'
                raise BadRequest(
                    "node",
                    f"the node that is already named {other_name}",
                    "a node that is neither an operand nor an output",
                    hint,
                )
        _check_strides(strides, node.shape)
        wire = self._builder.as_output(node.wire, Dtype.of(dtype), strides)
        self._names[name] = wire.uid

    def _check_name(self, name: str) -> None:
        if not name.isidentifier() or name in self._names:
            raise BadRequest("name", repr(name), f"a new name, other than {', '.join(self._names) or 'none'}")

    def _check_mine(self, *nodes: Node) -> None:
        for node in nodes:
            if node.board is not self:
                raise BadRequest("node", repr(node), "a node of this graph")

    # -- operations -----------------------------------------------------------------------------------------------
    def pointwise(self, mode: str, x: Node, *others: Node | float, **attributes: float) -> Node:
        """A mode of `cudnnPointwiseMode_t` without its prefix, such as ADD, RELU_FWD or GELU_BWD (dy, x).

        Attributes are those of the mode, such as ELU_ALPHA=0.5 or AXIS=1. Axes of extent 1 broadcast.
        """
        self._check_mine(x, *(other for other in others if isinstance(other, Node)))
        rank = len(x.shape)
        wires = [
            other.wire if isinstance(other, Node) else self._builder.scalar(float(other), rank, self._builder.compute)
            for other in others
        ]
        numbers: dict[str, Any] = attributes
        return Node(self, self._builder.pointwise(mode, x.wire, *wires, **numbers))

    def matmul(self, a: Node, b: Node) -> Node:
        """A (…, m, k) times B (…, k, n), each with at least one batch axis."""
        self._check_mine(a, b)
        if len(a.shape) < 3 or len(a.shape) != len(b.shape):
            raise BadRequest("b", f"shapes {a.shape} and {b.shape}", "the same number of axes, three or more")
        return Node(self, self._builder.matmul(a.wire, b.wire))

    def reduction(self, mode: str, x: Node, *axes: int) -> Node:
        """Reduce axes to extent 1: ADD, MUL, MIN, MAX, AMAX, AVG, NORM1, NORM2."""
        self._check_mine(x)
        rank = len(x.shape)
        places = {check_int("axes", axis, -rank, rank - 1) % rank for axis in as_python_ints("axes", axes)}
        dims = tuple(1 if place in places else extent for place, extent in enumerate(x.shape))
        return Node(self, self._builder.reduction(mode, x.wire, dims))

    def convolution(self, x: Node, w: Node, *, pad: Shape, stride: Shape, dilation: Shape | None = None) -> Node:
        """Convolve (N, C, spatial…) with (K, C / groups, spatial…); a number for each spatial axis."""
        self._check_mine(x, w)
        if not 3 <= len(x.shape) <= 5 or len(w.shape) != len(x.shape):
            raise BadRequest("w", f"shapes {x.shape} and {w.shape}", "(N, C, spatial…) and (K, C / groups, spatial…)")
        channels, filters, filter_channels = x.shape[1], *w.shape[:2]
        if filter_channels < 1 or channels % filter_channels or filters % (channels // filter_channels or 1):
            raise BadRequest(
                "w", f"shape {w.shape}", f"filters over a divisor of the {channels} channels of x {x.shape}"
            )
        rank = len(x.shape) - 2
        pads = each("pad", pad, rank, 0)
        steps = Steps(
            pads, pads, each("stride", stride, rank, 1), each("dilation", 1 if dilation is None else dilation, rank, 1)
        )
        dims = output_shape(x.shape, w.shape, steps)
        if min(dims) < 1:
            raise BadRequest("w", f"a filter {w.shape}", f"a filter that fits into x {x.shape}")
        channels_last = x.wire.strides[1] == 1 and x.shape[1] > 1
        wire = self._builder.virtual(dims, None, dense_strides(dims, last=channels_last))
        names = dict(zip(("PRE", "POST", "STRIDE", "DILATION"), steps, strict=True))
        self._builder.convolution(
            "CONVOLUTION_FORWARD", {"X": x.wire, "W": w.wire}, {"Y": wire}, **names, ALPHA=1.0, BETA=0.0
        )
        return Node(self, wire)

    # -- running --------------------------------------------------------------------------------------------------
    def request(
        self, *, tf32: bool = False, deterministic: bool = False, autotune: bool = False, **operands: Tensor
    ) -> GraphRequest:
        """The request that runs this graph on operands; outputs may be given by name as well."""
        named = tuple(self._names.items())
        return _request_of(self._builder.build(), named, operands, tf32, deterministic, autotune)

    def __call__(
        self, *, tf32: bool = False, deterministic: bool = False, autotune: bool = False, **operands: Tensor
    ) -> Any:
        """Run it on the current stream; returns the output, or a tuple in the order in which the outputs were named."""
        named = tuple(self._names.items())
        return _calls(self._builder.build(), named, operands, tf32, deterministic, autotune)

    def reference(self, **operands: Any) -> dict[str, Array]:
        """The outputs in float64, by name, computed from arrays."""
        graph = self._builder.build()
        feeds = {self._names[name]: np.asarray(array) for name, array in operands.items()}
        results = evaluate(graph, feeds)
        return {name: results[uid] for name, uid in self._names.items() if uid in results}


def _request_of(
    graph: Drawn,
    named: tuple[tuple[str, int], ...],
    operands: dict[str, Tensor],
    tf32: bool,
    deterministic: bool,
    autotune: bool,
) -> GraphRequest:
    names = [name for name, _ in named]
    for name in operands:
        if name not in names:
            refuse_operand(name, names)
    return GraphRequest(graph, named, tuple(operands.get(name) for name in names), tf32, deterministic, autotune)


_calls = ListCallCache(GraphRequest, _request_of, ("graph", "named", "operands", "tf32", "deterministic", "autotune"))


def _check_strides(strides: Shape | None, shape: Shape) -> None:
    if strides is not None and len(strides) != len(shape):
        raise BadRequest("strides", repr(strides), f"None, or one for each axis of {shape}")
