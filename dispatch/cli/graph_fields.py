"""A graph on the command line: operands x, y and z, and an expression over them.

`explain cudnn_graph --shape 8x64x64 --shape 8x64x64 --draw "RELU_FWD(matmul(x, y))"` is a graph of two nodes. Modes of
cuDNN's pointwise operations are called by name; matmul and reduction are the methods of `Graph`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.cli.expression import evaluate
from dispatch.errors import BadRequest
from dispatch.keys import F32, Dtype
from dispatch.ops.graph import Graph, GraphRequest, Node

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.tensor import Tensor

__all__ = ["GraphFields"]


@dataclass(frozen=True)
class GraphFields:
    """The fields of a graph's request in a form for the command line; `request` makes the request.

    Attributes:
        x, y, z: the operands.
        draw: the expression to compute: names, numbers, + - * /, matmul(a, b), reduction("ADD", a, axis) and pointwise
            modes like RELU_FWD(a).
        compute_dtype: the dtype of sums and of intermediate tensors; f32 by default.
        out_dtype: the dtype of the result; that of x by default.
        tf32: whether f32 products may be TF32.
        deterministic: the same bits at every run.
    """

    op: ClassVar[str] = GraphRequest.op

    x: Tensor
    y: Tensor | None = None
    z: Tensor | None = None
    draw: str = "IDENTITY(x)"
    compute_dtype: Any = F32
    out_dtype: Any = None
    tf32: bool = False
    deterministic: bool = False

    def request(self) -> GraphRequest:
        """The graph with its operands."""
        operands = {name: tensor for name in "xyz" if (tensor := getattr(self, name)) is not None}
        graph = Graph(self.compute_dtype)
        names: dict[str, Any] = {
            name: graph.tensor(name, tensor.shape, tensor.dtype, tensor.layout.strides)
            for name, tensor in operands.items()
        }
        try:
            node = evaluate(self.draw, _Names(graph, names))
        except ValueError as error:
            raise BadRequest("draw", self.draw, "an expression like RELU_FWD(matmul(x, y))", str(error)) from None
        if not isinstance(node, Node):
            raise BadRequest("draw", self.draw, "an expression of x, y and z")
        graph.output("out", node, Dtype.of(self.out_dtype or self.x.dtype))
        return graph.request(tf32=self.tf32, deterministic=self.deterministic, **operands)


class _Names(dict[str, Any]):
    """Operands, the methods of a graph, and pointwise modes by their names."""

    def __init__(self, graph: Graph, operands: dict[str, Any]) -> None:
        super().__init__(operands, matmul=graph.matmul, reduction=graph.reduction)
        self._graph = graph

    def __missing__(self, name: str) -> Callable[..., Node]:
        if not name.isupper():
            raise KeyError(name)
        return lambda x, *others, **attributes: self._graph.pointwise(name, x, *others, **attributes)
